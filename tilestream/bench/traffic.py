"""The measuring of ``tilestream bench traffic``: bytes that a call moves through HBM, as NVIDIA's profiler counts.

``ncu`` runs a child process, which checks the result, makes one more call to be warm, and has one call profiled. The
bytes of all kernels of that call are added up.

The profiler empties the caches before each kernel (its default, kept), so a kernel finds nothing of a kernel before it
in the second-level cache, and what it reads is counted in full. What it writes is not: up to that cache's size may lie
there yet when the kernel ends. So at least the bytes that must be written count as written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.bench import gate
from tilestream.bench.cases import Case
from tilestream.bench.gpu_cells import Cell
from tilestream.bench.gpu_suite import versions
from tilestream.bench.measure import Line, facts, mask_facts
from tilestream.bench.providers import Provider, provider_named
from tilestream.bench.runs import IS_BACKWARD, Mode, Run, make_dout, make_run
from tilestream.errors import ArgumentError
from tilestream.io.cost import Traffic
from tilestream.io.model import compulsory_bytes
from tilestream.io.ncu import METRICS, KernelBytes, kernels_of
from tilestream.io.schedule import once_per_pass

__all__ = ["TrafficModels", "checked_run", "find_ncu", "measure_traffic", "traffic_models"]

# Where the toolkit's installer leaves it, on the search path or not.
_USUAL_PLACE = Path("/usr/local/cuda/bin/ncu")
_LIMIT_S = 180
_FAILED = "the profiled process failed"
_LAID = ("query", "key", "value")


def find_ncu() -> str:
    """NVIDIA's profiler.

    Raises:
        ArgumentError: it is not here.
    """
    found = shutil.which("ncu") or (str(_USUAL_PLACE) if _USUAL_PLACE.exists() else None)
    if found is None:
        raise ArgumentError(
            f"bench traffic needs NVIDIA's profiler: there is no ncu on the search path, and no {_USUAL_PLACE};"
            " it comes with the CUDA toolkit."
        )
    return found


def measure_traffic(
    cells: Sequence[Cell],
    provider_name: str,
    on_step: Callable[[str], None] = lambda step: None,
    needs_profiler: bool = True,
) -> Iterator[Line]:
    """Count the bytes of each cell on the current CUDA device.

    Args:
        provider_name: who runs the cells that name nobody.
        needs_profiler: raise where it is not here, instead of saying so in every line.

    Yields:
        One line per cell. ``reason`` says why it has no numbers.

    Raises:
        ArgumentError: the profiler is not here.
    """
    ncu, missing, device = "", None, torch.device("cuda")
    try:
        ncu = find_ncu()
    except ArgumentError as error:
        if needs_profiler:
            raise
        missing = str(error)
    for cell in cells:
        provider = provider_named(cell.provider or provider_name)
        on_step(f"{cell.part}: {cell}, {provider.name}")
        reason = missing or provider.refuse(cell.case, device)
        kernels: list[KernelBytes] = []
        if reason is None:
            kernels, reason = _profile(ncu, cell, provider.name)
        yield _line(cell, provider, device, kernels, reason)


def _line(
    cell: Cell, provider: Provider, device: torch.device, kernels: Sequence[KernelBytes], reason: str | None
) -> Line:
    least, model, cached = traffic_models(cell.case, cell.mode, provider, device.type)
    read = sum(kernel.read_bytes for kernel in kernels)
    written = sum(kernel.written_bytes for kernel in kernels)
    moved = read + max(written, least.written_bytes) if kernels else None
    return {
        "suite": cell.suite,
        "part": cell.part,
        "case": cell.case.name,
        "provider": provider.name,
        "mode": cell.mode,
        "needs_grad": cell.needs_grad,
        "measured_by": "ncu",
        "read_bytes": read if kernels else None,
        "written_bytes": written if kernels else None,
        "moved_bytes": moved,
        "bytes_least": least.total_bytes,
        "bytes_model": None if model is None else model.total_bytes,
        # Of the same passes, if the level-2 cache holds what a pass reads again.
        "bytes_cached_model": None if cached is None else cached.total_bytes,
        "over_least": None if moved is None else moved / least.total_bytes,
        "over_cached_model": None if moved is None or cached is None else moved / cached.total_bytes,
        "kernels": [kernel._asdict() for kernel in kernels],
        "peers": {},
        "config": cell.case.to_dict(),
        **mask_facts(cell.case),
        **facts(device),
        **versions(),
        "is_wrong": reason is not None and reason.startswith(("wrong result", _FAILED)),
        "reason": reason,
    }


class TrafficModels(NamedTuple):
    """What must move, what an algorithm moves, and what of that passes a cache; None where nobody knows."""

    least: Traffic
    model: Traffic | None
    cached: Traffic | None


def traffic_models(case: Case, mode: Mode, provider: Provider, device_type: str) -> TrafficModels:
    """The modelled traffic of one call of `mode`."""
    problem, least = case.problem(device_type), Traffic(0, 0)
    model: Traffic | None = Traffic(0, 0)
    cached: Traffic | None = Traffic(0, 0)
    for backward in IS_BACKWARD[mode]:
        least += compulsory_bytes(problem, backward)
        cost = provider.cost(problem, backward)
        model = None if model is None or cost is None else model + cost.traffic
        cached = None if cached is None or cost is None else cached + once_per_pass(problem, cost).traffic
    return TrafficModels(least, model, cached)


def _profile(ncu: str, cell: Cell, provider_name: str) -> tuple[list[KernelBytes], str | None]:
    """The kernels of one call, or the reason why they could not be counted."""
    request = json.dumps({"case": cell.case.to_dict(), "provider": provider_name, "mode": cell.mode})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--profile-from-start", "off", "--target-processes", "all", "--clock-control", "none",
            "--metrics", ",".join(METRICS), "--csv", "--print-units", "base", "--log-file", str(log),
            sys.executable, "-m", "tilestream.bench.traffic", request,
        ]  # fmt: skip
        # A session of its own, so that a kernel that hangs does not go on beside the cells after it.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        ) as child:  # fmt: skip
            try:
                output, _ = child.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                return [], f"{_FAILED}: it took more than {_LIMIT_S} s"
        texts = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    said = [*texts, *output.splitlines()]
    if wrong := next((text for text in said if text.startswith("wrong result")), None):
        return [], wrong
    if any("ERR_NVGPUCTRPERM" in text for text in said):
        return [], "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); an administrator can allow it"
    if child.returncode != 0:
        return [], f"{_FAILED}: code {child.returncode}, {_complaint(said)}"
    try:
        kernels = kernels_of(texts)
    except (KeyError, ValueError) as error:
        return [], f"the profiler's table is not understood: {type(error).__name__}: {error}"
    return kernels, None if kernels else f"the profiler saw no kernel: {_complaint(said)}"


def _complaint(said: Sequence[str]) -> str:
    """What ncu says of an error, or the last words of whoever spoke."""
    spoken = [text.strip() for text in said if text.strip()]
    errors = [text.removeprefix("==ERROR==").strip() for text in spoken if text.startswith("==ERROR==")]
    return errors[0] if errors else spoken[-1] if spoken else "no message"


def checked_run(request: dict[str, Any], device: torch.device) -> tuple[Run | None, str | None]:
    """In a child: the run of a request (case, provider, mode) whose result is right, or why there is none."""
    case, mode = Case.from_dict(request["case"]), request["mode"]
    provider = provider_named(request["provider"])
    inputs, dout = case.make_inputs(device, drawn_on=device), make_dout(case, device, drawn_on=device)
    if provider.is_heads_first:
        inputs, dout = (
            inputs._replace(**{name: _heads_first(getattr(inputs, name)) for name in _LAID}),
            _heads_first(dout),
        )
    oracle = gate.consult(gate.checked_case(case, provider), device, mode != "forward", inputs)
    verdict = gate.compare(oracle, provider)
    if not verdict.is_green:
        return None, f"wrong result: {verdict.reason}"
    return make_run(case, provider, mode, device, inputs=inputs, dout=dout), None


def _heads_first(tensor: Tensor) -> Tensor:
    """The same (B, tokens, heads, width), with heads before tokens in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _call(request: dict[str, Any]) -> str | None:
    """In the child: check, warm up, and have one call profiled; or why the result is wrong."""
    device = torch.device("cuda")
    run, complaint = checked_run(request, device)
    if run is None:
        return complaint
    run.call()
    run.setup()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return None


if __name__ == "__main__":
    if (complaint := _call(json.loads(sys.argv[1]))) is not None:
        print(complaint)
        sys.exit(1)
