"""The one measuring protocol: gate, warm-up, interleaved samples, median and percentiles, one line per measurement.

Times are wall time on a CPU and device events on CUDA, where the second-level cache is flushed before each sample and
the device is kept busy until the host has queued the call, so that the events see the device's work alone. The
providers of a case take turns, sample by sample, so that a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilestream.bench import gate
from tilestream.bench.cases import Case
from tilestream.bench.machine import available_memory_bytes, code_version, device_name, load_average
from tilestream.bench.memory import Memory, MemoryProbe
from tilestream.bench.providers import Provider
from tilestream.bench.runs import IS_BACKWARD, Mode, Run, make_run
from tilestream.io.model import backward_flops, compulsory_bytes, forward_flops
from tilestream.problem import Problem

__all__ = [
    "HOLD_CYCLES",
    "Line",
    "Settings",
    "call_flops",
    "facts",
    "hold",
    "mask_facts",
    "measure",
    "measurement_line",
    "num_steps",
    "percentiles",
    "time_ms",
    "too_large",
]

# One measurement, or the reason why there is none; JSON-able.
Line = dict[str, Any]

_FLUSH_BYTES = 256 << 20
# A millisecond at 2 GHz: longer than a host needs to queue a call of a few kernels, guards of torch.compile included.
HOLD_CYCLES = 2_000_000
# Of the free memory, this much may be used: the rest of the machine lives too.
_USABLE_MEMORY = 0.7
# Inputs, outputs and gradients of the timed run and of the gate, in the input precision and in float64.
_TENSOR_COPIES = 6


@dataclass(frozen=True)
class Settings:
    """How long to measure: a provider is done after `max_samples`, or when `budget_s` is spent after `min_samples`.

    One that is so slow that not even `min_samples` fit into `patience` budgets is done then.
    """

    min_samples: int = 5
    max_samples: int = 30
    budget_s: float = 2.0
    patience: int = 4
    with_memory: bool = True


@dataclass
class _Contestant:
    """A provider whose gate is green, and its samples in milliseconds."""

    run: Run
    samples_ms: list[float] = field(default_factory=list)

    def is_done(self, settings: Settings) -> bool:
        spent_s = sum(self.samples_ms) / 1e3
        count = len(self.samples_ms)
        if count >= settings.max_samples:
            return True
        return spent_s >= settings.budget_s * (1 if count >= settings.min_samples else settings.patience)


def measure(
    cases: Iterable[Case],
    providers: Sequence[Provider],
    modes: Sequence[Mode],
    device: torch.device,
    settings: Settings,
    on_step: Callable[[str], None] = lambda step: None,
) -> Iterable[Line]:
    """Measure every provider on every case in every mode.

    Args:
        on_step: called with a short description before each of `num_steps` steps.

    Yields:
        One line per (case, mode, provider), in that order. ``ms_p50`` is None where there is no number, and
        ``reason`` says why: refused, too large for this machine, or a red gate.
    """
    with MemoryProbe(device) as probe:
        for case in cases:
            for mode in modes:
                yield from _measure_case(case, providers, mode, device, settings, probe, on_step)


def num_steps(num_cases: int, num_providers: int, num_modes: int, settings: Settings) -> int:
    """How often `measure` calls `on_step`: per case and mode a gate per provider, one timing, a memory per provider."""
    return num_cases * num_modes * (num_providers * (2 if settings.with_memory else 1) + 1)


def _measure_case(
    case: Case,
    providers: Sequence[Provider],
    mode: Mode,
    device: torch.device,
    settings: Settings,
    probe: MemoryProbe,
    on_step: Callable[[str], None],
) -> list[Line]:
    contestants: dict[str, _Contestant] = {}
    reasons: dict[str, str] = {}
    verdicts: dict[str, gate.Gate] = {}
    for provider in providers:
        on_step(f"{case.name} {mode}: checking {provider.name}")
        reason = provider.refuse(case, device) or too_large(case, provider, device)
        if reason is None:
            found = verdicts[provider.name] = gate.check(case, provider, device, with_gradients=mode != "forward")
            reason = None if found.is_green else f"wrong result: {found.reason}"
        if reason is None:
            contestants[provider.name] = _Contestant(make_run(case, provider, mode, device))
        else:
            reasons[provider.name] = reason
    on_step(f"{case.name} {mode}: timing {', '.join(contestants) or 'nobody'}")
    _sample(list(contestants.values()), device, settings)
    samples_ms = {name: contestant.samples_ms for name, contestant in contestants.items()}
    # The tensors of the timed runs must not stand beside those of the measured ones.
    contestants.clear()
    lines = []
    for provider in providers:
        if settings.with_memory:
            on_step(f"{case.name} {mode}: memory of {provider.name}")
        memory = Memory(None, "not asked for")
        if settings.with_memory and provider.name in samples_ms:
            memory = probe.measure(case, provider.name, mode)
        line = measurement_line(case, provider, mode, device, samples_ms.get(provider.name, []), memory)
        verdict = verdicts.get(provider.name)
        line["error_vs_float64"] = None if verdict is None else verdict.error
        line["is_wrong"] = verdict is not None and not verdict.is_green
        line["reason"] = reasons.get(provider.name)
        lines.append(line)
    return lines


def too_large(case: Case, provider: Provider, device: torch.device) -> str | None:
    """Why the memory of `device` may not do, or None."""
    tensors_bytes = _TENSOR_COPIES * compulsory_bytes(case.problem(device.type)).total_bytes
    needed, available = tensors_bytes + provider.expected_extra_bytes(case), available_memory_bytes(device)
    if available is None or needed <= _USABLE_MEMORY * available:
        return None
    return f"needs about {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free"


def _sample(contestants: list[_Contestant], device: torch.device, settings: Settings) -> None:
    """Warm each up once, then let them take turns until all are done."""
    for contestant in contestants:
        time_ms(contestant.run, device)
    while active := [contestant for contestant in contestants if not contestant.is_done(settings)]:
        for contestant in active:
            contestant.samples_ms.append(time_ms(contestant.run, device))


def time_ms(run: Run, device: torch.device) -> float:
    """One timed call."""
    run.setup()
    if device.type == "cuda":
        hold(device)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run.call()
        stop.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(stop))
    began = time.perf_counter()
    run.call()
    if device.type == "mps":
        torch.mps.synchronize()
    return (time.perf_counter() - began) * 1e3


def hold(device: torch.device, cycles: int = HOLD_CYCLES) -> None:
    """Flush the cache of a CUDA device and keep it busy, so that what is queued meanwhile runs without gaps."""
    torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device).zero_()
    torch.cuda._sleep(cycles)


def measurement_line(
    case: Case, provider: Provider, mode: Mode, device: torch.device, samples_ms: list[float], memory: Memory
) -> Line:
    """The line of one measurement, without what the gate says; without samples its times are None."""
    problem = case.problem(device.type)
    flops = call_flops(problem, mode)
    traffic = [provider.traffic(problem, is_backward) for is_backward in IS_BACKWARD[mode]]
    p20, p50, p80 = percentiles(samples_ms) if samples_ms else (None, None, None)
    return {
        "case": case.name,
        "provider": provider.name,
        "mode": mode,
        "ms_p50": p50,
        "ms_p20": p20,
        "ms_p80": p80,
        "num_samples": len(samples_ms),
        "flops": flops,
        "tflops": None if p50 is None else flops / (p50 * 1e9),
        "bytes_model": sum(part.total_bytes for part in traffic if part is not None) if None not in traffic else None,
        "extra_memory_bytes": memory.extra_bytes,
        "extra_memory_reason": memory.reason,
        "seqlen_q": case.seqlen_q,
        "seqlen_k": case.seqlen_k,
        "config": case.to_dict(),
        **facts(device),
    }


def call_flops(problem: Problem, mode: Mode) -> int:
    """Floating-point operations of one call."""
    forward, backward = forward_flops(problem), backward_flops(problem)
    return {"forward": forward, "backward": backward, "both": forward + backward}[mode]


def mask_facts(case: Case) -> Line:
    """Which fraction of blocks and of pairs a block mask keeps; nothing without one."""
    mask = case.block_mask
    return {} if mask is None else {"kept_fraction": mask.density, "kept_pairs": mask.pair_density()}


def facts(device: torch.device) -> Line:
    """Where, when and with what a line was measured."""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "load_average": load_average(),
        "num_threads": torch.get_num_threads(),
        "commit": code_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentiles of at least one sample."""
    quantiles = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    p20, p50, p80 = quantiles.tolist()
    return p20, p50, p80
