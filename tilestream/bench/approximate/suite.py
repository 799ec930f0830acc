"""The measuring of ``tilestream bench approximate``: contestants of one length take turns in one process.

A sample is a training step: a forward that keeps a graph, then the backward from a given gradient of out. Its two parts
are timed in the same step, on CUDA by events on the device, which is kept busy until the host has queued all of it: so
a package of many small operators is not charged for the host. Tensors are in each contestant's favourite layout.

Exact methods, and those exact over kept blocks, go through the correctness gate at every length before they are timed.
A peer's miss of our bound is written beside its number, not instead of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilestream.bench import gate
from tilestream.bench.approximate import checks
from tilestream.bench.approximate.cells import METHODS, PLAIN, Cell
from tilestream.bench.approximate.methods import Method, Prepared
from tilestream.bench.approximate.setting import LAYOUTS, Layout, Setting
from tilestream.bench.approximate.states import LayerStates
from tilestream.bench.gpu_suite import versions
from tilestream.bench.machine import available_memory_bytes
from tilestream.bench.measure import HOLD_CYCLES, Line, Settings, facts, hold, percentiles
from tilestream.bench.memory import Memory, PeakMeter

__all__ = ["SECONDS", "approximate_settings", "error_cells", "measure_cells", "measure_errors"]

SECONDS = 0.1
# Whose peak is a larger part of the free memory is sampled alone: in turns the allocator would give memory back and
# take it anew in the middle of a sample.
_TURN_MEMORY = 0.1
# Up to here a second warm-up is cheap.
_WARM_TOKENS = {"cuda": 4096, "cpu": 512}
_CYCLES_PER_S = 2e9
_MAX_HOLD_S = 0.03
# query, key, value and the gradient of out in three layouts, and what a step makes.
_TENSOR_COPIES = 20
_USABLE_MEMORY = {"cuda": 1.0, "cpu": 0.7}


def approximate_settings(seconds: float = SECONDS) -> Settings:
    """At least 3 samples, at most 20, about `seconds` a contestant; fewer of one that takes 10 times as long."""
    return Settings(min_samples=3, max_samples=20, budget_s=seconds, patience=10)


def measure_cells(
    cells: Sequence[Cell],
    device: torch.device,
    settings: Settings | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Iterator[Line]:
    """Measure cells of part speed, those of one setting in turns.

    Yields:
        One line per cell, in their order; ``status`` says why one has no numbers, and ``reason`` why in words.
    """
    _warm_up(device)
    meter = PeakMeter() if device.type == "cpu" else None
    for setting, group in itertools.groupby(cells, key=lambda cell: cell.setting):
        stage = _Stage(setting, device, meter, settings or approximate_settings())
        contestants = []
        for cell in group:
            on_step(str(cell))
            contestants.append(stage.enter(METHODS[cell.method]))
        stage.sample([contestant for contestant in contestants if contestant.status == "ok"])
        for contestant in contestants:
            yield stage.line(contestant)
        del stage, contestants
        if device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass
class _Contestant:
    """A method at one length: what it runs on, its samples (forward, backward, both) in milliseconds, or a reason."""

    method: Method
    status: str = "ok"
    reason: str | None = None
    prepared: Prepared | None = None
    verdict: gate.Gate | None = None
    memory: Memory = field(default_factory=lambda: Memory(None, "no run"))
    samples_ms: list[tuple[float, float, float]] = field(default_factory=list)
    host_s: float = 0.0
    is_in_turns: bool = True

    def is_done(self, settings: Settings) -> bool:
        spent_s, count = sum(both for *_, both in self.samples_ms) / 1e3, len(self.samples_ms)
        if count >= settings.max_samples:
            return True
        return spent_s >= settings.budget_s * (1 if count >= settings.min_samples else settings.patience)

    def drop(self, status: str, reason: str) -> None:
        """No number, and why."""
        self.status, self.reason = status, reason
        self.samples_ms.clear()


class _Stage:
    """The contestants of one setting and the tensors that they share."""

    def __init__(self, setting: Setting, device: torch.device, meter: PeakMeter | None, settings: Settings) -> None:
        self.setting, self.device, self.meter, self.settings = setting, device, meter, settings
        self._packed: dict[int, list[Tensor]] = {}

    def enter(self, method: Method) -> _Contestant:
        """Check `method` and run it as it will be timed, so that all that is compiled is compiled then."""
        found = _Contestant(method)
        reason = method.refuse(self.setting, self.device)
        if reason is not None:
            found.drop("skipped", reason)
        elif (too_large := self._too_large(method)) is not None:
            found.drop("out of memory", too_large)
        else:
            self._guarded(found, lambda: self._warm(found))
        return found

    def _warm(self, found: _Contestant) -> None:
        method = found.method
        if method.kind != "approximate":
            query, key, value, dout = self._tensors(LAYOUTS["tokens first"])
            found.verdict = checks.check(method, self.setting, self.device, (query, key, value, dout))
            if method.is_ours and not found.verdict.is_green:
                found.drop("wrong", f"wrong result: {found.verdict.reason}")
                return
        found.prepared = method.prepare(self.setting, self.device)
        self._tensors(found.prepared.layout)
        if self.setting.seqlen <= _WARM_TOKENS.get(self.device.type, 0):
            self._step(found)
        self._measure_memory(found)

    def _measure_memory(self, found: _Contestant) -> None:
        """One step, and its peak beyond what stood before and out, dq, dk, dv; and how long the host takes for it."""
        if self.meter is not None:
            self.meter.start()
            held_bytes = sum(tensor.nbytes for tensor in self._step(found) if tensor is not None)
            rise = self.meter.rise_bytes()
            if rise.extra_bytes is not None:
                rise = Memory(max(0, rise.extra_bytes - held_bytes))
            found.memory = rise
            return
        _wait(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        began = time.perf_counter()
        held_bytes = sum(tensor.nbytes for tensor in self._step(found) if tensor is not None)
        found.host_s = time.perf_counter() - began
        _wait(self.device)
        found.memory = Memory(max(0, torch.cuda.max_memory_allocated(self.device) - before - held_bytes))

    def sample(self, contestants: Sequence[_Contestant]) -> None:
        """Samples of all, in turns where their memory allows; every other turn in reverse order."""
        limit = _TURN_MEMORY * (_free_bytes(self.device) or 0) if self.device.type == "cuda" else None
        together = []
        for contestant in contestants:
            contestant.is_in_turns = limit is None or (contestant.memory.extra_bytes or 0) <= limit
            if contestant.is_in_turns:
                together.append(contestant)
        turn = 0
        while active := [c for c in together if c.status == "ok" and not c.is_done(self.settings)]:
            for contestant in active if turn % 2 == 0 else reversed(active):
                self._take(contestant)
            turn += 1
        for contestant in contestants:
            if not contestant.is_in_turns:
                self._release()
                # Takes its memory anew.
                self._take(contestant, is_kept=False)
                while contestant.status == "ok" and not contestant.is_done(self.settings):
                    self._take(contestant)

    def _take(self, contestant: _Contestant, is_kept: bool = True) -> None:
        def take() -> None:
            times = self._timed(contestant)
            if is_kept:
                contestant.samples_ms.append(times)

        self._guarded(contestant, take)

    def _timed(self, contestant: _Contestant) -> tuple[float, float, float]:
        if self.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            hold(self.device, max(HOLD_CYCLES, int(min(_MAX_HOLD_S, 1.5 * contestant.host_s) * _CYCLES_PER_S)))
            self._step(contestant, lambda index: events[index].record())
            _wait(self.device)
            forward, backward = (float(events[i].elapsed_time(events[i + 1])) for i in range(2))
            return forward, backward, forward + backward
        marks: list[float] = []
        self._step(contestant, lambda index: marks.append(time.perf_counter()))
        forward, backward = ((marks[i + 1] - marks[i]) * 1e3 for i in range(2))
        return forward, backward, forward + backward

    def _step(
        self, contestant: _Contestant, mark: Callable[[int], object] = lambda index: None
    ) -> tuple[Tensor | None, ...]:
        """Forward and backward; out and the gradients of query, key and value, of which Reformer has no second."""
        prepared = contestant.prepared
        assert prepared is not None
        *leaves, dout = self._tensors(prepared.layout)
        mark(0)
        out = prepared.forward(*leaves)
        mark(1)
        gradients = torch.autograd.grad(out, (*leaves, *prepared.parameters), dout, allow_unused=True)
        mark(2)
        return (out.detach(), *gradients[:3])

    def _tensors(self, layout: Layout) -> list[Tensor]:
        """query, key, value and the gradient of out, in `layout`; layouts that look alike in memory share it."""
        if id(layout) not in self._packed:
            if layout is LAYOUTS["tokens first"]:
                found = list(self.setting.make_inputs(self.device))
            elif layout is LAYOUTS["heads in batch"]:
                found = [tensor.detach().flatten(0, 1) for tensor in self._tensors(LAYOUTS["heads first"])]
            else:
                whole = self._tensors(LAYOUTS["tokens first"])
                found = [layout.pack(self.setting, tensor.detach()) for tensor in whole]
            self._packed[id(layout)] = [*(tensor.requires_grad_() for tensor in found[:3]), found[3]]
        return self._packed[id(layout)]

    def _guarded(self, contestant: _Contestant, work: Callable[[], None]) -> None:
        """Do `work`; where memory runs out once, again with all that is cached given back."""
        for is_last in (False, True):
            try:
                work()
                return
            except torch.OutOfMemoryError as error:
                if is_last:
                    contestant.drop("out of memory", _first_line(error))
            except Exception as error:  # Of somebody else's package: anything.
                contestant.drop("failed", f"{type(error).__name__}: {_first_line(error)}")
                return
            self._release()

    def _release(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _too_large(self, method: Method) -> str | None:
        available = _free_bytes(self.device)
        needed = method.score_matrices * self.setting.score_bytes + _TENSOR_COPIES * self.setting.tensor_bytes
        if available is None or needed <= _USABLE_MEMORY.get(self.device.type, 0.7) * available:
            return None
        return f"needs about {needed / 2**30:.0f} GiB, and {available / 2**30:.0f} GiB are free"

    def line(self, contestant: _Contestant) -> Line:
        """What was found out about one contestant."""
        samples, extra = contestant.samples_ms, contestant.memory.extra_bytes
        times: Line = {}
        for index, name in enumerate(("forward", "backward", "both")):
            spread = percentiles([sample[index] for sample in samples]) if samples else (None, None, None)
            times |= dict(zip((f"{name}_ms_p20", f"{name}_ms", f"{name}_ms_p80"), spread, strict=True))
        has_memory = contestant.status == "ok" and extra is not None
        # query, key, value, out, and the gradients of all of them.
        tensor_bytes = 8 * self.setting.tensor_bytes
        prepared, verdict = contestant.prepared, contestant.verdict
        return {
            "suite": "approximate",
            "part": "speed",
            **_facts_of(contestant.method, contestant.status, contestant.reason),
            "model": None,
            "seqlen": self.setting.seqlen,
            **times,
            "num_samples": len(samples),
            "in_turns": contestant.is_in_turns,
            "extra_memory_bytes": extra if has_memory else None,
            "peak_memory_bytes": extra + tensor_bytes if has_memory and extra is not None else None,
            "extra_memory_reason": contestant.memory.reason,
            "dropout": None if prepared is None else prepared.dropout,
            "padding": None if prepared is None else prepared.padding,
            "details": {} if prepared is None else prepared.details,
            "error_vs_float64": None if verdict is None else verdict.error,
            "gate_reason": None if verdict is None else verdict.reason,
            "is_wrong": contestant.status == "wrong",
            "config": self.setting.to_dict(),
            **facts(self.device),
            **versions(),
        }


def error_cells(layers: Sequence[LayerStates], num_tokens: int | None = None) -> list[Cell]:
    """Every method on every model of the states; `num_tokens` at most of each."""
    cells = []
    for model in dict.fromkeys(layer.model for layer in layers):
        layer = next(layer for layer in layers if layer.model == model)
        seqlen = layer.num_tokens if num_tokens is None else min(num_tokens, layer.num_tokens)
        _, num_heads, head_dim = layer.query.shape
        setting = Setting(1, seqlen, num_heads, head_dim, dropout_p=0.0, is_padded=False)
        # Without dropout and padding the plain one is the same as exact attention.
        cells += [Cell("error", name, setting, model) for name in METHODS if name != PLAIN]
    return cells


def measure_errors(
    cells: Sequence[Cell],
    layers: Sequence[LayerStates],
    device: torch.device,
    on_step: Callable[[str], None] = lambda step: None,
) -> Iterator[Line]:
    """Cells of part error: one line per method and model, with the error of every layer that `layers` have."""
    truths: dict[tuple[str, int, int], checks.Truth] = {}

    def truth_of(layer: LayerStates, num_tokens: int) -> checks.Truth:
        key = (layer.model, layer.layer, num_tokens)
        if key not in truths:
            truths[key] = checks.Truth(layer, num_tokens, device)
        return truths[key]

    for cell in cells:
        on_step(str(cell))
        method = METHODS[cell.method]
        of_model = [layer for layer in layers if layer.model == cell.model]
        status, reason = "ok", method.refuse(cell.setting, device)
        found: list[checks.LayerErrors] = []
        if reason is not None:
            status = "skipped"
        else:
            try:
                found = [checks.errors_on(method, truth_of(layer, cell.setting.seqlen)) for layer in of_model]
            except Exception as error:  # Of somebody else's package: anything.
                status, reason = "failed", f"{type(error).__name__}: {_first_line(error)}"
        errors = [one.error for one in found]
        masses = [one.hidden_mass for one in found if one.hidden_mass is not None]
        yield {
            "suite": "approximate",
            "part": "error",
            **_facts_of(method, status, reason),
            "model": cell.model,
            "text": of_model[0].text,
            "is_causal_model": of_model[0].is_causal,
            "seqlen": cell.setting.seqlen,
            "target": method.target,
            "layers": [dataclasses.asdict(one) for one in found],
            "error_p50": percentiles(errors)[1] if errors else None,
            "error_worst": max(errors, default=None),
            "hidden_mass_p50": percentiles(masses)[1] if masses else None,
            "is_wrong": False,
            "config": cell.setting.to_dict(),
            **facts(device),
            **versions(),
        }


def _facts_of(method: Method, status: str, reason: str | None) -> Line:
    return {
        "method": method.name,
        "kind": method.kind,
        "source": None if status == "skipped" else method.source(),
        "status": status,
        "reason": reason,
    }


def _warm_up(device: torch.device) -> None:
    """Whatever a library allocates at its first use must not count as somebody's memory."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(2, 128, 128, dtype=dtype, device=device, requires_grad=True)
        torch.softmax(x @ x, dim=-1).sum().backward()
    _wait(device)


def _free_bytes(device: torch.device) -> int | None:
    """What can still be allocated, including what PyTorch keeps for later; None where the system does not say."""
    available = available_memory_bytes(device)
    if device.type == "cuda" and available is not None:
        available += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
