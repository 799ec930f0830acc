"""Bytes that a call moves between a cache and memory on a CPU: the last-level misses that valgrind counts.

A child process runs under valgrind's callgrind, which has cachegrind's simulated caches and can be switched on for one
call: the child checks the result, makes one call to be warm, and has one call counted, from empty caches and on one
thread. The last level has the size that is asked for, 16 ways and lines of 64 bytes, whatever this processor's is.

The caches are simulated, the program is real: its own kernels, PyTorch's, and the interpreter around them, whose data
(some megabytes) count too. Lines that are still in the cache at the end are not written back yet, so at least the
bytes that must be written count as written, as in `traffic`. Valgrind knows neither AVX-512 nor AMX: kernels are those
of AVX2.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tilestream.bench.cases import Case
from tilestream.bench.measure import Line, call_flops, facts
from tilestream.bench.providers import Provider, provider_named
from tilestream.bench.runs import Mode
from tilestream.bench.traffic import checked_run, traffic_models
from tilestream.errors import ArgumentError

__all__ = ["LARGEST_FLOPS", "events_of", "find_valgrind", "measure_misses", "simulated_bytes"]

_LINE_BYTES, _WAYS = 64, 16
_LIMIT_S = 900
# Beyond this a call takes more than some minutes.
LARGEST_FLOPS = 5 * 10**9
_FAILED = "the measured process failed"
# What valgrind can run of the native kernels on x86.
_ISA_VARIABLE, _KNOWN_ISA, _UNKNOWN_ISAS = "TILESTREAM_NATIVE_ISA", "x86-64-v3", ("amx", "x86-64-v4")
# Data read misses, data write misses, and misses that pushed out a changed line.
_READ, _WRITTEN = "DLmr", ("ILdmr", "DLdmr", "DLdmw")


def find_valgrind() -> str:
    """valgrind, with the program that switches its counting on.

    Raises:
        ArgumentError: it is not here.
    """
    found, control = shutil.which("valgrind"), shutil.which("callgrind_control")
    if found is None or control is None:
        missing = "valgrind" if found is None else "callgrind_control"
        raise ArgumentError(
            f"measuring on a CPU needs valgrind, and there is no {missing} on the search path; Linux has a package of"
            " the name valgrind."
        )
    return found


def simulated_bytes(cache_bytes: int) -> int:
    """The size that is simulated for `cache_bytes`: the largest power of two that is not larger.

    Raises:
        ArgumentError: it is smaller than one set of lines.
    """
    least = _LINE_BYTES * _WAYS
    if cache_bytes < least:
        raise ArgumentError(f"a cache of {cache_bytes} bytes cannot be simulated; the smallest has {least}.")
    return 1 << (cache_bytes.bit_length() - 1)


def measure_misses(
    case: Case,
    mode: Mode,
    provider_names: Sequence[str],
    cache_bytes: int,
    on_step: Callable[[str], None] = lambda step: None,
) -> Iterator[Line]:
    """Count last-level misses of one call of each provider.

    Args:
        cache_bytes: of the simulated last level; rounded down by `simulated_bytes`.

    Yields:
        One line per provider; ``reason`` says why it has no numbers.

    Raises:
        ArgumentError: there is no valgrind, or the call is too large to be simulated in minutes.
    """
    valgrind, size = find_valgrind(), simulated_bytes(cache_bytes)
    flops = call_flops(case.problem("cpu"), mode)
    if flops > LARGEST_FLOPS:
        raise ArgumentError(
            f"the call is too large to be measured under valgrind: {flops:.2g} FLOP, at most {LARGEST_FLOPS:.2g};"
            " ask about fewer heads or tokens."
        )
    for name in provider_names:
        on_step(f"{mode} of {name} under valgrind")
        provider, events = provider_named(name), None
        reason = provider.refuse(case, torch.device("cpu"))
        if reason is None:
            events, reason = _run(valgrind, size, {"case": case.to_dict(), "provider": provider.name, "mode": mode})
        yield _line(case, mode, provider, size, events, reason)


def events_of(text: str) -> dict[str, int]:
    """The totals of a file that callgrind wrote, by event.

    Raises:
        ValueError: they are not there.
    """
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("events", "totals"):
            found[name] = rest.split()
    if set(found) != {"events", "totals"}:
        raise ValueError("no totals")
    numbers = [int(number) for number in found["totals"]]
    # Trailing zeros are left out.
    numbers += [0] * (len(found["events"]) - len(numbers))
    return dict(zip(found["events"], numbers, strict=True))


def _line(
    case: Case, mode: Mode, provider: Provider, size: int, events: dict[str, int] | None, reason: str | None
) -> Line:
    least, model, cached = traffic_models(case, mode, provider, "cpu")
    read = written = moved = None
    if events is not None:
        read = _LINE_BYTES * events[_READ]
        written = _LINE_BYTES * sum(events[name] for name in _WRITTEN)
        moved = read + max(written, least.written_bytes)
    return {
        "suite": "misses",
        "case": case.name,
        "provider": provider.name,
        "mode": mode,
        "measured_by": "valgrind, simulated cache",
        "cache_bytes": size,
        "read_bytes": read,
        "written_bytes": written,
        "moved_bytes": moved,
        "bytes_least": least.total_bytes,
        "bytes_model": None if model is None else model.total_bytes,
        "bytes_cached_model": None if cached is None else cached.total_bytes,
        "over_least": None if moved is None else moved / least.total_bytes,
        "events": events,
        "config": case.to_dict(),
        **facts(torch.device("cpu")),
        "num_threads": 1,
        "is_wrong": reason is not None and reason.startswith(("wrong result", _FAILED)),
        "reason": reason,
    }


def _run(valgrind: str, size: int, request: dict[str, Any]) -> tuple[dict[str, int] | None, str | None]:
    """The events of one call, or the reason why they could not be counted."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            valgrind, "--quiet", "--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes", "--simulate-wb=yes",
            f"--LL={size},{_WAYS},{_LINE_BYTES}", f"--callgrind-out-file={out}", f"--log-file={folder}/log",
            sys.executable, "-m", "tilestream.bench.valgrind", json.dumps(request),
        ]  # fmt: skip
        # A session of its own, so that all of it can be ended.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=_environment(), start_new_session=True,
        ) as child:  # fmt: skip
            try:
                output, _ = child.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                return None, f"{_FAILED}: it took more than {_LIMIT_S} s"
        said = [line for line in output.splitlines() if line.strip()]
        if wrong := next((line for line in said if line.startswith("wrong result")), None):
            return None, wrong
        # The first dump is that of the call; what is written at the end has nothing in it.
        dump = Path(f"{out}.1")
        if child.returncode != 0 or not dump.exists():
            return None, f"{_FAILED}: code {child.returncode}, {said[-1].strip() if said else 'no message'}"
        try:
            return events_of(dump.read_text(encoding="utf-8", errors="replace")), None
        except ValueError as error:
            return None, f"valgrind's file is not understood: {error}"


def _environment() -> dict[str, str]:
    """This process's, on one thread, with native kernels that valgrind can run."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    is_unknown = found.get(_ISA_VARIABLE, _UNKNOWN_ISAS[0]) in _UNKNOWN_ISAS
    if platform.machine().lower() in ("x86_64", "amd64") and is_unknown:
        found[_ISA_VARIABLE] = _KNOWN_ISA
    return found


def _call(request: dict[str, Any]) -> str | None:
    """In the child: check, warm up, and have one call counted; or why that cannot be."""
    torch.set_num_threads(1)
    run, complaint = checked_run(request, torch.device("cpu"))
    if run is None:
        return complaint
    run.call()
    run.setup()
    if (complaint := _control("--instr=on")) is not None:
        return complaint
    run.call()
    return _control("--dump=call")


def _control(command: str) -> str | None:
    """Say it to the callgrind that runs this process; or why that failed."""
    done = subprocess.run(
        ["callgrind_control", command, str(os.getpid())], capture_output=True, text=True, errors="replace", check=False
    )
    said = (done.stdout + done.stderr).strip()
    return None if done.returncode == 0 and "OK" in said else f"callgrind_control {command}: {said.splitlines()[-1:]}"


if __name__ == "__main__":
    trouble = _call(json.loads(sys.argv[1]))
    if trouble is not None:
        print(trouble)
    sys.stdout.flush()
    # Without the end of the interpreter, which takes long while every instruction is counted.
    os._exit(trouble is not None)
