"""Compile what a run will call, ahead of it and in several processes at once: the run then finds it in the caches.

A compiler of kernels runs on one core, and a run meets one kernel after the other. A process that fails is no matter
here: the run meets the same error, and says so in a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilestream.bench.cases import Case
from tilestream.bench.providers import provider_named
from tilestream.bench.runs import Mode, make_run

__all__ = ["Request", "compile_ahead"]

_LIMIT_S = 90.0
# A compiler that starts processes of its own would start as many in each of these.
_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Request(NamedTuple):
    """A call: `provider` on `case` in `mode`."""

    case: Case
    provider: str
    mode: Mode


def compile_ahead(requests: Sequence[Request], device: torch.device, limit_s: float = _LIMIT_S) -> int:
    """Make every request in a process of its own, as many at a time as there are cores.

    Args:
        limit_s: of all of them together; those that run then are killed.

    Returns:
        How many of the processes ended well.
    """
    waiting, running = list(requests), list[subprocess.Popen[bytes]]()
    num_done, began = 0, time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(_start(waiting.pop(0), device))
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(timeout=0.1)
            num_done += sum(child.poll() == 0 for child in running)
            running = [child for child in running if child.poll() is None]
            if time.monotonic() - began > limit_s:
                break
    finally:
        for child in running:
            child.kill()
            child.wait()
    return num_done


def _start(request: Request, device: torch.device) -> subprocess.Popen[bytes]:
    words = {**request._asdict(), "case": request.case.to_dict(), "device": str(device)}
    return subprocess.Popen(
        [sys.executable, "-m", "tilestream.bench.ahead", json.dumps(words)],
        env={**os.environ, **_ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _call(request: dict[str, Any]) -> None:
    """In the child."""
    case, device = Case.from_dict(request["case"]), torch.device(request["device"])
    provider = provider_named(request["provider"])
    if (reason := provider.refuse(case, device)) is not None:
        sys.exit(reason)
    make_run(case, provider, request["mode"], device, inputs=case.make_inputs(device, drawn_on=device)).call()


if __name__ == "__main__":
    _call(json.loads(sys.argv[1]))
