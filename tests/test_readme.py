"""The generated parts of the pages are up to date, and what README.md points to exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool() -> dict[str, object]:
    return runpy.run_path(str(ROOT / "tools" / "readme.py"))


def test_generated_parts_are_up_to_date(tool: dict[str, object]) -> None:
    assert tool["main"](["--check"]) == 0, "run `make readme`"  # type: ignore[operator]


def test_an_unknown_part_is_refused(tool: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="marks the parts"):
        tool["regenerate"]("<!-- generated:weather -->\n<!-- /generated -->\n")  # type: ignore[operator]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []
