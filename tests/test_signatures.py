"""The public API is what `signatures.txt` says; `python tests/test_signatures.py` writes it after a wanted change."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("signatures.txt")

# What users rely on: a module's names, or all of its __all__.
PUBLIC: dict[str, Sequence[str] | None] = {
    "tilestream": None,
    "tilestream.dispatch": ("BACKENDS", "Explanation", "backend"),
    "tilestream.integrations.sdpa": None,
    "tilestream.integrations.transformers": None,
    "tilestream.io.cost": ("Cost", "Pass", "Traffic"),
    "tilestream.io.counters": None,
    "tilestream.io.model": None,
    "tilestream.io.published": ("PublishedBlocks", "published_blocks", "published_cost"),
    "tilestream.io.schedule": None,
    "tilestream.io.standard": None,
    "tilestream.io.theorems": None,
    "tilestream.problem": ("Problem",),
    "tilestream.spec": None,
}


# Classes that are made by their methods.
WITH_METHODS = ("BlockMask",)


def describe_module(module_name: str, names: Sequence[str] | None) -> list[str]:
    module = importlib.import_module(module_name)
    lines = [f"# {module_name}"]
    for name in sorted(module.__all__ if names is None else names):
        lines += describe(name, inspect.unwrap(getattr(module, name)))
    return [*lines, ""]


def describe(name: str, public: Any) -> list[str]:
    """A name's kind, with the fields of a class or the parameters of a function, one a line."""
    if inspect.isfunction(public):
        return [f"def {name}{returned(public)}", *(f"    {line}" for line in parameters(public))]
    if not inspect.isclass(public):
        return [f"{name}: {type(public).__name__}"]
    bases = ", ".join(base.__name__ for base in public.__bases__ if base is not object)
    lines = [f"class {name}({bases})" if bases else f"class {name}"]
    if dataclasses.is_dataclass(public):
        lines += [f"    {field.name}: {written(field.type)}{default_of(field)}" for field in dataclasses.fields(public)]
    elif hasattr(public, "_fields"):
        lines += [f"    {field}: {written(public.__annotations__[field])}" for field in public._fields]
    elif inspect.isfunction(public.__init__):
        lines += [f"    {line}" for line in parameters(public.__init__) if line != "self"]
    for method in sorted(vars(public)) if name in WITH_METHODS else ():
        function = getattr(vars(public)[method], "__func__", vars(public)[method])
        if inspect.isfunction(function) and not method.startswith("_"):
            lines += [f"    {line}" for line in describe(method, function)]
    return lines


def written(annotation: Any) -> str:
    """An annotation as it stands in the source: evaluated or not, its text is the same on every Python."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else inspect.formatannotation(text)


def default_of(field: dataclasses.Field[Any]) -> str:
    return "" if field.default is dataclasses.MISSING else f" = {field.default!r}"


def parameters(function: Any) -> list[str]:
    """One line per parameter, and a bare * before the keyword-only ones."""
    lines: list[str] = []
    is_keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        is_keyword_only |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            lines.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        annotation = "" if parameter.annotation is parameter.empty else f": {written(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"{stars}{parameter.name}{annotation}{default}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            lines.append("/")
    return lines


def returned(function: Any) -> str:
    annotation = inspect.signature(function).return_annotation
    return "" if annotation is inspect.Signature.empty else f" -> {written(annotation)}"


def current() -> str:
    return "\n".join(line for module, names in PUBLIC.items() for line in describe_module(module, names))


def test_public_api_is_unchanged() -> None:
    wanted, got = SNAPSHOT.read_text(encoding="utf-8"), current()
    changes = difflib.unified_diff(wanted.splitlines(), got.splitlines(), "signatures.txt", "now", lineterm="", n=2)
    assert got == wanted, "run `python tests/test_signatures.py` if this is wanted:\n" + "\n".join(changes)


if __name__ == "__main__":
    SNAPSHOT.write_text(current(), encoding="utf-8")
    sys.stdout.write(f"wrote {SNAPSHOT}\n")
