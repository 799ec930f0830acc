"""torch.compile(fullgraph=True), each time in a fresh process, so that the compiler comes before any eager call."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

_WORKER = pathlib.Path(__file__).with_name("compile_worker.py")


def _run(scenario: str, backend: str, device: torch.device) -> None:
    done = subprocess.run(
        [sys.executable, str(_WORKER), scenario, backend, device.type],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=_WORKER.parent.parent,
        env=_environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled and right" in done.stdout


def _environment() -> dict[str, str]:
    """The checkout comes first on the path, installed or not."""
    return {**os.environ, "PYTHONPATH": str(_WORKER.parent.parent)}


@pytest.mark.parametrize("scenario", ["dense", "bias_and_sinks", "dropout", "packed", "module"])
def test_compiles_before_the_first_eager_call(scenario: str, device: torch.device) -> None:
    _run(scenario, "aot_eager", device)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("scenario", ["dense", "module"])
def test_compiles_with_inductor(scenario: str, device: torch.device) -> None:
    _run(scenario, "inductor", device)
