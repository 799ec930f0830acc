"""Budgets that keep the code reviewable: sizes, parameters, docstrings, plain ASCII."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilestream

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tilestream"
CODE = sorted(
    path
    for top in ("tilestream", "tests", "tools", "examples", "benchmarks", "build_backend")
    for path in (ROOT / top).rglob("*.py")
)
TEXT = [
    *CODE,
    *(path for pattern in ("*.md", "docs/*.md", "*.toml", "*.txt", "Makefile", "*.cff") for path in ROOT.glob(pattern)),
]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 120
MAX_POSITIONAL = 8

# An exception is one line here, with its reason.
FILE_EXCEPTIONS: dict[str, str] = {}
FUNCTION_EXCEPTIONS: dict[str, str] = {}
_TORCH_CALLS_IT = "the signature of an operator of PyTorch, which calls it by position"
PARAMETER_EXCEPTIONS: dict[str, str] = {
    "tilestream/integrations/_sdpa_kernels.py:_cuda_dense_backward": _TORCH_CALLS_IT,
    "tilestream/integrations/_sdpa_kernels.py:_flash_forward": _TORCH_CALLS_IT,
    "tilestream/integrations/_sdpa_kernels.py:_flash_backward": _TORCH_CALLS_IT,
}

# A public function's docstring has these parts; one that computes nothing published has no Source.
SECTIONS = ("Args", "Returns", "Raises", "Cost", "Source", "Example")
WITHOUT_SOURCE = ("explain",)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _is_private(path: Path) -> bool:
    return path.name.startswith("_") and path.name != "__init__.py"


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    """Whether it is compiled by Triton or Gluon, where every pointer and stride is a parameter."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def code_lines(function: Function) -> int:
    """Lines without the docstring, which has no budget."""
    assert function.end_lineno is not None
    docstring = function.body[0] if ast.get_docstring(function) else None
    documented = docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
    return function.end_lineno - function.lineno + 1 - documented


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_sizes(path: Path) -> None:
    over = []
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MAX_FILE_LINES and relative(path) not in FILE_EXCEPTIONS:
        over.append(f"{lines} lines, at most {MAX_FILE_LINES}")
    for function in functions(path):
        name = f"{relative(path)}:{function.name}"
        limit = MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES
        if code_lines(function) > limit and name not in FUNCTION_EXCEPTIONS:
            over.append(f"{function.name} (line {function.lineno}): {code_lines(function)} lines, at most {limit}")
        positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg not in ("self", "cls")]
        if len(positional) > MAX_POSITIONAL and not is_kernel(function) and name not in PARAMETER_EXCEPTIONS:
            over.append(f"{function.name} (line {function.lineno}): {len(positional)} positional parameters")
    assert not over, f"{relative(path)}:\n" + "\n".join(over)


def test_exceptions_exist() -> None:
    """An exception goes with the function it was for."""
    known = {f"{relative(path)}:{function.name}" for path in CODE for function in functions(path)}
    files = {relative(path) for path in CODE}
    assert {*FUNCTION_EXCEPTIONS, *PARAMETER_EXCEPTIONS} <= known
    assert set(FILE_EXCEPTIONS) <= files


@pytest.mark.parametrize("path", TEXT, ids=relative)
def test_text_is_ascii(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [f"line {number}" for number, line in enumerate(lines, 1) if not line.isascii()] == []


@pytest.mark.parametrize(
    "path", [path for path in CODE if PACKAGE in path.parents and not _is_private(path)], ids=relative
)
def test_public_names_are_documented(path: Path) -> None:
    """Every module, public class, and public function or method of one has a docstring."""
    module = parsed(path)
    without = [] if ast.get_docstring(module) else ["the module"]
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [("", module)]
    while scopes:
        prefix, scope = scopes.pop()
        for node in scope.body:
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            # A property with an annotated return and one line says what it is by its name.
            is_property = isinstance(node, Function) and any(ast.unparse(d) == "property" for d in node.decorator_list)
            if not ast.get_docstring(node) and not is_property:
                without.append(f"{prefix}{node.name} (line {node.lineno})")
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}{node.name}.", node))
    assert not without, f"{relative(path)} has no docstring for: {', '.join(without)}"


@pytest.mark.parametrize("name", [name for name in tilestream.__all__ if inspect.isfunction(getattr(tilestream, name))])
def test_public_docstrings_have_every_part(name: str) -> None:
    documented = inspect.getdoc(getattr(tilestream, name)) or ""
    missing = [
        section
        for section in SECTIONS
        if not re.search(rf"(^|\s){section}:", documented) and not (section == "Source" and name in WITHOUT_SOURCE)
    ]
    assert missing == []
