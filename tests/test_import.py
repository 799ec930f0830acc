"""`import tilestream` needs torch alone; everything optional stays unimported, and may be missing."""

from __future__ import annotations

import subprocess
import sys

OPTIONAL = ("triton", "transformers", "accelerate", "gguf", "rich", "matplotlib")

# A module set to None in sys.modules cannot be imported: what a machine without it sees.
WITHOUT_OPTIONAL = f"""
import sys
import torch
loaded = {{name.split(".")[0] for name in sys.modules}}
for name in {OPTIONAL!r}:
    if name not in loaded:
        sys.modules[name] = None
import tilestream
added = {{name.split(".")[0] for name in sys.modules}} - loaded - set(sys.stdlib_module_names)
print(sorted(added - {{"tilestream"}} - set({OPTIONAL!r})))
"""

ATTENTION = """
query, key, value = (torch.randn(1, 70, 2, 16, requires_grad=True) for _ in range(3))
tilestream.attention(query, key, value, causal=True).sum().backward()
assert all(torch.isfinite(tensor.grad).all() for tensor in (query, key, value))
"""


def run(code: str) -> str:
    """Standard output of `code` in a fresh process, warnings being errors of ours alone."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_nothing_but_itself() -> None:
    assert run(WITHOUT_OPTIONAL).strip() == "[]"


def test_attention_runs_without_optional_packages() -> None:
    run(WITHOUT_OPTIONAL + ATTENTION)


def test_import_loads_no_backend_and_no_outer_layer() -> None:
    listed = run(
        "import sys, tilestream; print(*sorted(n for n in sys.modules if n.startswith('tilestream.')))"
    ).split()
    outer = ("tilestream.backends.", "tilestream.integrations", "tilestream.bench", "tilestream.cli")
    assert [name for name in listed if name.startswith(outer) and name != "tilestream.backends.base"] == []
