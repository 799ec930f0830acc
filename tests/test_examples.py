"""Documentation that runs: docstrings, the python blocks of the Markdown pages, and the example programs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import tilestream

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(tilestream.__path__, "tilestream.")
    if not module.name.endswith("__main__")
)
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["tilestream", *MODULES])
def test_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as missing:
        pytest.skip(f"needs an optional package: {missing}")
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert failed == 0


def test_every_public_function_is_shown() -> None:
    """Each function of the package's __all__ has an example in its docstring."""
    functions = [getattr(tilestream, name) for name in tilestream.__all__]
    without = [f.__name__ for f in functions if callable(f) and not isinstance(f, type) and ">>>" not in f.__doc__]
    assert without == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of one page run in order and share their names."""
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in _BLOCK.finditer(text):
        # Blank lines in front keep the page's line numbers in a traceback.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(page), "exec"), names)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_programs(example: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "transformers" in example.name:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
