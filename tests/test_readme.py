"""The generated parts of the pages are up to date, and what README.md points to exists."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool() -> dict[str, object]:
    return runpy.run_path(str(ROOT / "tools" / "readme.py"))


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the support matrix is that of an installed Triton"
)
def test_generated_parts_are_up_to_date() -> None:
    """In a process of its own, because in Triton's interpreter, where this one may be, other devices are supported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tools" / "readme.py"), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_part_is_refused(tool: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="marks the parts"):
        tool["regenerate"]("<!-- generated:weather -->\n<!-- /generated -->\n")  # type: ignore[operator]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []
