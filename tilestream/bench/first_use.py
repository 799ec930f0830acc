"""The first call of a fresh process with an empty Triton cache, and whether other lengths are compiled again.

A child process does it, because this one has compiled already. The time counts from inputs on a device that is ready,
with torch and tilestream imported: it has the import of the backend, every compilation, and the call.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilestream.bench.cases import Case
from tilestream.bench.providers import provider_named
from tilestream.bench.runs import Mode, make_run

__all__ = ["FirstUse", "try_first_use"]

_CACHE = "TRITON_CACHE_DIR"
_LIMIT_S = 180


class FirstUse(NamedTuple):
    """Seconds of the first call, files that it left in the cache, and by length those that another one added."""

    seconds: float | None
    num_files: int | None = None
    new_files: dict[str, int] | None = None
    reason: str | None = None


def try_first_use(case: Case, provider_name: str, mode: Mode, lengths: Sequence[int], device: torch.device) -> FirstUse:
    """Call `provider_name` on `case` in a new process, then on the same case with each of `lengths`."""
    request = {
        "case": case.to_dict(),
        "provider": provider_name,
        "mode": mode,
        "lengths": list(lengths),
        "device": str(device),
    }
    with tempfile.TemporaryDirectory() as cache:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tilestream.bench.first_use", json.dumps(request)],
                env={**os.environ, _CACHE: cache},
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return FirstUse(None, reason=f"the process took more than {_LIMIT_S} s")
    if done.returncode != 0:
        complaints = done.stderr.strip().splitlines()
        last = complaints[-1] if complaints else "no message"
        return FirstUse(None, reason=f"the process ended with code {done.returncode}: {last}")
    return FirstUse(**json.loads(done.stdout.splitlines()[-1]))


def _use(request: dict[str, Any]) -> FirstUse:
    """In the child."""
    case, device, mode = Case.from_dict(request["case"]), torch.device(request["device"]), request["mode"]
    provider = provider_named(request["provider"])
    cases = [case, *(dataclasses.replace(case, seqlen_q=n, seqlen_k=n) for n in request["lengths"])]
    runs = [make_run(each, provider, mode, device) for each in cases]
    _wait(device)
    began = time.perf_counter()
    runs[0].call()
    _wait(device)
    seconds = time.perf_counter() - began
    counts = [_count_files()]
    for run in runs[1:]:
        run.call()
        _wait(device)
        counts.append(_count_files())
    added = (after - before for before, after in itertools.pairwise(counts))
    return FirstUse(seconds, counts[0], dict(zip(map(str, request["lengths"]), added, strict=True)))


def _count_files() -> int:
    return sum(path.is_file() for path in Path(os.environ[_CACHE]).rglob("*"))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(_use(json.loads(sys.argv[1]))._asdict()))
