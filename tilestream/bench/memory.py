"""Peak memory of one call beyond its inputs and its results.

On CUDA the allocator counts. On a CPU nobody does, so a child process runs the call and reads the rise of its own peak
resident memory from the operating system: on Linux from /proc, where the peak can be reset before the call; elsewhere
through psutil and getrusage, in a fresh child per call, because the peak cannot be reset there. Where neither works the
answer is a reason, never a guess. The resolution is a few hundred KiB: the kernel counts pages per core in batches.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import torch

from tilestream.bench.cases import Case
from tilestream.bench.providers import provider_named
from tilestream.bench.runs import Mode, make_run

__all__ = ["Memory", "MemoryProbe", "PeakMeter"]

_WARM_UP_TOKENS = 64


class Memory(NamedTuple):
    """Peak bytes beyond inputs and results, or None and the reason."""

    extra_bytes: int | None
    reason: str | None = None


class PeakMeter:
    """How far this process's resident memory rises between `start` and `rise_bytes`."""

    def __init__(self) -> None:
        self.is_resettable = _reset_peak()
        self._before = 0

    def start(self) -> None:
        """Give freed memory back, forget the peak so far, and note where we stand."""
        gc.collect()
        if sys.platform == "linux":
            # Without it, a run would get the heap that an earlier one left for nothing.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
            if trim is not None:
                trim(0)
        if self.is_resettable:
            _reset_peak()
            self._before = _proc_status_bytes("VmRSS")
        elif (process := _psutil_process()) is not None:
            self._before = process.memory_info().rss

    def rise_bytes(self) -> Memory:
        """The peak since `start`, minus the memory held then."""
        if self.is_resettable:
            return Memory(max(0, _proc_status_bytes("VmHWM") - self._before))
        peak = _unresettable_peak_bytes()
        if peak is None:
            return Memory(None, f"not measured: {sys.platform} needs the package psutil for it")
        return Memory(max(0, peak - self._before))


def _reset_peak() -> bool:
    """Whether the peak of this process can be reset and read; it is reset on return."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _proc_status_bytes("VmHWM") > 0
    except OSError:
        return False


def _proc_status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _psutil_process() -> Any:
    try:
        return importlib.import_module("psutil").Process()
    except ImportError:
        return None


def _unresettable_peak_bytes() -> int | None:
    """The highest resident memory since this process began; on Linux getrusage would report the parent's too."""
    process = _psutil_process()
    if process is None or sys.platform == "linux":
        return None
    if sys.platform == "win32":
        return int(process.memory_info().peak_wset)
    peak = importlib.import_module("resource").getrusage(importlib.import_module("resource").RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


class MemoryProbe:
    """Measures calls one after the other; a context manager that ends its child process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._child: subprocess.Popen[str] | None = None
        # Closed by __exit__.
        self._complaints: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> MemoryProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._complaints.close()

    def measure(self, case: Case, provider_name: str, mode: Mode) -> Memory:
        """Peak memory of one run of `provider_name` on `case`."""
        if self.device.type == "cuda":
            return _measure_cuda(case, provider_name, mode, self.device)
        if self.device.type != "cpu":
            return Memory(None, f"not measured on {self.device.type}")
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            request = {"case": case.to_dict(), "provider": provider_name, "mode": mode}
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            return Memory(None, f"not measured: {self._last_words()}")
        if not answer["is_resettable"]:
            self._stop()
        return Memory(answer["extra_bytes"], answer["reason"])

    def _start(self) -> subprocess.Popen[str]:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tilestream.bench.memory", str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        return self._child

    def _last_words(self) -> str:
        """Why the child ended by itself."""
        assert self._child is not None
        code = self._child.wait()
        self._stop()
        if sys.platform != "win32" and code == -signal.SIGKILL:
            return "the system killed the measuring process, probably because memory ran out"
        self._complaints.seek(0)
        complaints = self._complaints.read().strip().splitlines()
        return f"the measuring process ended with code {code}: {complaints[-1] if complaints else 'no message'}"

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.communicate()


def _measure_cuda(case: Case, provider_name: str, mode: Mode, device: torch.device) -> Memory:
    run = make_run(case, provider_named(provider_name), mode, device)
    run.call()
    run.setup()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = run.call()
    torch.cuda.synchronize(device)
    extra = torch.cuda.max_memory_allocated(device) - before - sum(tensor.nbytes for tensor in results)
    return Memory(max(0, int(extra)))


def _measure_here(meter: PeakMeter, case: Case, provider_name: str, mode: Mode) -> Memory:
    """In the child: one run on a warm library, with the memory of its results taken off."""
    provider, device = provider_named(provider_name), torch.device("cpu")
    short = {"seqlen_q": min(case.seqlen_q, _WARM_UP_TOKENS), "seqlen_k": min(case.seqlen_k, _WARM_UP_TOKENS)}
    warm_up = make_run(Case.from_dict({**case.to_dict(), **short}), provider, mode, device)
    warm_up.call()
    run = make_run(case, provider, mode, device)
    del warm_up
    run.setup()
    meter.start()
    results = run.call()
    rise = meter.rise_bytes()
    if rise.extra_bytes is None:
        return rise
    return Memory(max(0, rise.extra_bytes - sum(tensor.nbytes for tensor in results)))


def _serve(num_threads: int) -> None:
    """The child: one JSON request per line of standard input, one JSON answer per line of standard output."""
    torch.set_num_threads(num_threads)
    meter = PeakMeter()
    for line in sys.stdin:
        request = json.loads(line)
        memory = _measure_here(meter, Case.from_dict(request["case"]), request["provider"], request["mode"])
        answer = {**memory._asdict(), "is_resettable": meter.is_resettable}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
