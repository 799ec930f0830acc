"""Who may import what: the table of docs/design.md, section 4, enforced over every file of the package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilestream

PACKAGE = Path(tilestream.__file__).parent

# Longest matching name wins. "backend" is a concrete backend, "root" the package's own __init__.
LAYERS = {
    "tilestream": "root",
    "tilestream.errors": "L0",
    "tilestream.spec": "L0",
    "tilestream.tiles": "L0",
    "tilestream.problem": "L1",
    "tilestream.state": "L1",
    "tilestream.reference": "L1",
    "tilestream.teaching": "L1",
    "tilestream.block_mask": "L1",
    "tilestream.dropout": "L1",
    "tilestream.kv_cache": "L1",
    "tilestream.io": "L1",
    "tilestream.backends": "L2",
    "tilestream.backends.base": "L2",
    "tilestream.backends.cpu": "backend",
    "tilestream.backends.triton": "backend",
    "tilestream.backends.hopper": "backend",
    "tilestream.dispatch": "L3",
    "tilestream.ops": "L3",
    "tilestream.api": "L4",
    "tilestream.block_sparse": "L4",
    "tilestream.serving": "L4",
    "tilestream.distributed": "L4",
    "tilestream.integrations": "L5",
    "tilestream.compat": "L5",
    "tilestream.bench": "L5",
    "tilestream.cli": "L5",
    "tilestream.__main__": "L5",
}

# What each layer may import of the package; a backend also imports itself.
MAY_IMPORT = {
    "L0": {"L0"},
    "L1": {"L0", "L1"},
    "L2": {"L0", "L1", "L2"},
    "backend": {"L0", "L1", "L2"},
    "L3": {"L0", "L1", "L2", "L3"},
    "L4": {"L0", "L1", "L3", "L4"},
    "L5": {"root", "L0", "L1", "L2", "L3", "L4", "L5"},
    "root": {"L0", "L1", "L3", "L4"},
}

# Inside functions alone: a backend is imported when it is first chosen.
MAY_IMPORT_LAZILY = {"L3": {"backend"}}

# The tile mathematics and the combine kernel are written once, in Triton, and called from the Hopper kernels.
EXCEPTIONS = {("tilestream.backends.hopper", "tilestream.backends.triton")}

THIRD_PARTY = {
    "L0": set(),
    "L1": {"torch"},
    "L2": {"torch"},
    "backend": {"torch", "triton"},
    "L3": {"torch"},
    "L4": {"torch"},
    "root": {"torch"},
}

# Where an edge is written down, for the error message.
_TABLE = "docs/design.md, section 4"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def entry_of(module: str) -> str | None:
    """The longest name of the table that `module` is or lies under; the package itself is only its __init__."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 1, -1)]
    found = next((name for name in names if name in LAYERS), None)
    return "tilestream" if module == "tilestream" else found


def imports(tree: ast.AST, is_lazy: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether inside a function) of every import; ones for type checking alone are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                is_submodule = (PACKAGE.parent / submodule.replace(".", "/")).exists() or (
                    PACKAGE.parent / (submodule.replace(".", "/") + ".py")
                ).exists()
                yield node.lineno, submodule if is_submodule else str(node.module), is_lazy
        else:
            yield from imports(node, is_lazy or isinstance(node, ast.FunctionDef))


def is_allowed(importer: str, imported: str, is_lazy: bool = False) -> bool:
    own, other = entry_of(importer), entry_of(imported)
    assert own is not None
    layer = LAYERS[own]
    if imported.split(".")[0] != "tilestream":
        top = imported.split(".")[0]
        return top in sys.stdlib_module_names or layer not in THIRD_PARTY or top in THIRD_PARTY[layer]
    if other is None:
        return False
    may_import = MAY_IMPORT[layer] | (MAY_IMPORT_LAZILY.get(layer, set()) if is_lazy else set())
    return own == other or LAYERS[other] in may_import or (own, other) in EXCEPTIONS


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    module = module_name(path)
    assert entry_of(module) is not None, f"{module} is in no layer; add it to LAYERS and to {_TABLE}"
    forbidden = [
        f"line {line}: {imported}"
        for line, imported, is_lazy in imports(ast.parse(path.read_text(encoding="utf-8")))
        if not is_allowed(module, imported, is_lazy)
    ]
    assert not forbidden, f"{module} may not import, by {_TABLE}:\n" + "\n".join(forbidden)


def test_the_rule_itself() -> None:
    """The table refuses what it should; otherwise a green test above would mean nothing."""
    assert is_allowed("tilestream.ops", "tilestream.dispatch")
    assert is_allowed("tilestream.backends.cpu.forward", "tilestream.backends.cpu.score")
    assert is_allowed("tilestream.backends.hopper.forward", "tilestream.backends.triton.tile_math")
    assert not is_allowed("tilestream.tiles", "torch")
    assert not is_allowed("tilestream.state", "tilestream.api")
    assert not is_allowed("tilestream.backends.cpu.forward", "tilestream.ops")
    assert not is_allowed("tilestream.backends.triton.forward", "tilestream.backends.hopper.forward")
    assert not is_allowed("tilestream.dispatch", "tilestream.backends.cpu")
    assert is_allowed("tilestream.dispatch", "tilestream.backends.cpu", is_lazy=True)
    assert not is_allowed("tilestream.cli.main", "tilestream.backends.cpu.forward")
    assert not is_allowed("tilestream.api", "numpy")
