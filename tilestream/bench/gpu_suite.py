"""The measuring of ``tilestream bench gpu`` and ``bench hopper``: contestants take turns, and ratios are per turn.

Each result passes the correctness gate first, on the inputs that are then timed; those are drawn on the device, because
a processor would need longer for them than the whole cell takes. A peer is checked as well, but a miss of our bound is
written beside its number, not instead of it. A contestant that raises is a line that says so, not the end of the run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilestream import dispatch
from tilestream.bench import gate
from tilestream.bench.first_use import try_first_use
from tilestream.bench.gpu_cells import CHANGED_LENGTHS, DENSE, PEERS, Cell
from tilestream.bench.measure import (
    Line,
    Settings,
    call_flops,
    mask_facts,
    measurement_line,
    percentiles,
    time_ms,
    too_large,
)
from tilestream.bench.memory import Memory
from tilestream.bench.providers import Provider, peer_versions, provider_named
from tilestream.bench.runs import IS_BACKWARD, make_dout, make_run
from tilestream.bench.turns import Take, Turns, slow_reason, take_turns
from tilestream.problem import AttentionInputs

__all__ = ["HOPPER_PROVIDER", "PROVIDER", "SECONDS", "measure_cells", "suite_settings", "versions"]

PROVIDER, HOPPER_PROVIDER = "tilestream/triton", "tilestream/hopper"
SECONDS = 0.15
# Calls in one sample of the host's time; few enough that the queue of a device slower than the host holds them.
_HOST_CALLS = 200


def suite_settings(seconds: float = SECONDS) -> Settings:
    """At least 10 turns, at most 1000, about `seconds` a contestant; none where 10 would take 40 times as long."""
    return Settings(min_samples=10, max_samples=1000, budget_s=seconds, patience=40)


def measure_cells(
    cells: Sequence[Cell],
    provider_name: str = PROVIDER,
    settings: Settings | None = None,
    on_step: Callable[[str], None] = lambda step: None,
    device: torch.device | None = None,
) -> Iterator[Line]:
    """Measure `cells`, those of one case one after the other.

    Args:
        on_step: called with a description before each cell.
        device: the current CUDA device by default.

    Yields:
        One line per cell. ``reason`` says why it has no numbers, and that of a peer why the peer has none.
    """
    provider = provider_named(provider_name)
    device = torch.device("cuda") if device is None else device
    stage: _Stage | None = None
    for _, group in itertools.groupby(cells, key=lambda cell: (cell.part, cell.case)):
        stage = _Stage(provider, settings or suite_settings(), device, list(group), stage)
        for cell in stage.cells:
            on_step(f"{cell.part}: {cell}")
            yield _measure_cell(stage, cell)


@dataclass
class _Entry:
    """A contestant: what takes its samples, or the reason why it has none; and the verdict of the gate."""

    take: Take | None = None
    verdict: gate.Gate | None = None
    reason: str | None = None
    has_failed: bool = False

    @property
    def is_wrong(self) -> bool:
        return self.has_failed or (self.verdict is not None and not self.verdict.is_green)


class _Stage:
    """The cells of one case, the tensors that they share, and the verdicts of the gate.

    `dense` is the same of the case without its block mask; that of the stage before, where it is of the same case.
    """

    def __init__(
        self,
        provider: Provider,
        settings: Settings,
        device: torch.device,
        cells: list[Cell],
        before: _Stage | None = None,
    ) -> None:
        self.provider, self.settings, self.device, self.cells = provider, settings, device, cells
        self.case = cells[0].case
        self.dense: _Stage | None = None
        if self.case.mask is not None:
            known = None if before is None else before.dense
            same = [dataclasses.replace(cell, case=self.case.dense) for cell in cells]
            self.dense = known if known and known.cells == same else _Stage(provider, settings, device, same)
        self._oracle: gate.Oracle | None = None
        self._dout: Tensor | None = None
        self._gates: dict[tuple[str, bool], gate.Gate] = {}

    def enter(self, cell: Cell, provider: Provider) -> _Entry:
        """Check `provider` and call it once as it will be timed, so that all that is compiled is compiled then."""
        reason = provider.refuse(self.case, self.device) or too_large(self.case, provider, self.device)
        if reason is not None:
            return _Entry(reason=reason)
        try:
            verdict = self._check(cell, provider)
            if provider is self.provider and not verdict.is_green:
                return _Entry(None, verdict, f"wrong result: {verdict.reason}")
            take = self._take(cell, provider)
            take()
        except Exception as error:  # Of somebody else's compiler and kernels: anything.
            first, *_ = str(error).strip().splitlines() or ["no message"]
            return _Entry(reason=f"failed: {type(error).__name__}: {first}", has_failed=True)
        return _Entry(take, verdict)

    def turns(self, takes: Sequence[Take]) -> tuple[Turns, str | None]:
        """Turns of all, or the reason why there are none."""
        settings = dataclasses.replace(self.settings, budget_s=self.settings.budget_s * len(takes))
        turns = take_turns(takes, settings)
        return turns, None if turns else slow_reason(settings)

    def _inputs(self) -> AttentionInputs:
        return self._consult().inputs

    def _consult(self) -> gate.Oracle:
        if self._oracle is None:
            with_gradients = any(cell.mode != "forward" for cell in self.cells)
            inputs = self.case.make_inputs(self.device, drawn_on=self.device)
            self._oracle = gate.consult(self.case, self.device, with_gradients, inputs)
        return self._oracle

    def _check(self, cell: Cell, provider: Provider) -> gate.Gate:
        """Each direction by itself, so that who can run one of them only has a number there."""
        key = (provider.name, cell.mode != "forward")
        if key not in self._gates:
            oracle = self._consult()
            self._gates[key] = gate.compare(oracle.of_forward if cell.mode == "forward" else oracle, provider)
        return self._gates[key]

    def _take(self, cell: Cell, provider: Provider) -> Take:
        if cell.part == "call":
            return self._host_take(cell, provider)
        if cell.mode != "forward" and self._dout is None:
            self._dout = make_dout(self.case, self.device, drawn_on=self.device)
        run = make_run(self.case, provider, cell.mode, self.device, inputs=self._inputs(), dout=self._dout)
        return lambda: time_ms(run, self.device)

    def _host_take(self, cell: Cell, provider: Provider) -> Take:
        """Milliseconds until a call returns, whether or not the device has done it."""
        inputs = self._inputs()
        forward = provider.prepare(self.case, inputs)
        query, key, value = (
            tensor.detach().requires_grad_(cell.needs_grad) for tensor in (inputs.query, inputs.key, inputs.value)
        )

        def host_ms() -> float:
            _wait(self.device)
            with torch.set_grad_enabled(cell.needs_grad):
                began = time.perf_counter()
                for _ in range(_HOST_CALLS):
                    forward(query, key, value)
                spent_s = time.perf_counter() - began
            _wait(self.device)
            return spent_s / _HOST_CALLS * 1e3

        return host_ms


@dataclass
class _Found:
    """What a cell gave: samples of ours in milliseconds, a part of the line per peer, or the reason for none."""

    own: _Entry
    own_ms: list[float] = field(default_factory=list)
    peers: dict[str, Line] = field(default_factory=dict)
    details: Line = field(default_factory=dict)


def _measure_cell(stage: _Stage, cell: Cell) -> Line:
    found = _first_use(stage, cell) if cell.part == "compile" else _against_peers(stage, cell)
    own = found.own
    line = measurement_line(
        cell.case, stage.provider, cell.mode, stage.device, found.own_ms, Memory(None, "not asked for")
    )
    if cell.part == "call":
        # The host's time says nothing of the device's rate.
        line["tflops"] = None
    return {
        "suite": cell.suite,
        "part": cell.part,
        **line,
        "needs_grad": cell.needs_grad,
        "peers": found.peers,
        "error_vs_float64": None if own.verdict is None else own.verdict.error,
        "is_wrong": own.is_wrong,
        "reason": own.reason,
        "chosen": _chosen(stage, cell),
        **mask_facts(cell.case),
        **versions(),
        **found.details,
    }


def _against_peers(stage: _Stage, cell: Cell) -> _Found:
    """Ours and every peer in turns."""
    reason = _choice_reason(stage, cell)
    own = _Entry(reason=reason, has_failed=True) if reason else stage.enter(cell, stage.provider)
    if own.take is None:
        return _Found(own)
    entries = {name: _enter_peer(stage, cell, name) for name in PEERS[cell.part]}
    takes = {name: entry.take for name, entry in entries.items() if entry.take is not None}
    turns, own.reason = stage.turns([own.take, *takes.values()])
    own_ms = [turn[0] for turn in turns]
    peers = {}
    for name, entry in entries.items():
        case = cell.case.dense if name == DENSE else cell.case
        flops = call_flops(case.problem(stage.device.type), cell.mode) if cell.part != "call" else None
        index = list(takes).index(name) + 1 if name in takes else None
        peer_ms = [] if index is None else [turn[index] for turn in turns]
        peers[name] = _peer_part(entry, own_ms, peer_ms, flops)
    return _Found(own, own_ms, peers)


def _enter_peer(stage: _Stage, cell: Cell, name: str) -> _Entry:
    if name != DENSE:
        return stage.enter(cell, provider_named(name))
    assert stage.dense is not None
    return stage.dense.enter(cell, stage.provider)


def _chosen(stage: _Stage, cell: Cell) -> str | None:
    """The backends of a call that names none, in the directions that are measured."""
    problem = cell.case.problem(stage.device.type)
    found = [
        dispatch.explain(dataclasses.replace(problem, is_backward=is_backward)).chosen
        for is_backward in IS_BACKWARD[cell.mode]
    ]
    return " and ".join(dict.fromkeys(str(name) for name in found)) if any(found) else None


def _choice_reason(stage: _Stage, cell: Cell) -> str | None:
    """The bars of the suite hopper are about what every caller gets, so a backend that must be named has no number."""
    if cell.suite != "hopper" or stage.provider.name != HOPPER_PROVIDER:
        return None
    chosen = f"tilestream/{_chosen(stage, cell)}"
    return None if chosen == HOPPER_PROVIDER else f"a call that names no backend runs on {chosen}"


def _peer_part(entry: _Entry, own_ms: Sequence[float], peer_ms: list[float], flops: int | None) -> Line:
    """What the line says of one peer; `ratio` is its time over ours."""
    ratios = [theirs / ours for ours, theirs in zip(own_ms, peer_ms, strict=bool(peer_ms))]
    times, shares = (percentiles(values) if values else (None, None, None) for values in (peer_ms, ratios))
    verdict = entry.verdict
    return {
        "ms_p50": times[1],
        "ms_p20": times[0],
        "ms_p80": times[2],
        "tflops": None if times[1] is None or flops is None else flops / (times[1] * 1e9),
        "ratio_p50": shares[1],
        "ratio_p20": shares[0],
        "ratio_p80": shares[2],
        "error_vs_float64": None if verdict is None else verdict.error,
        "gate_reason": None if verdict is None else verdict.reason,
        "reason": entry.reason,
    }


def _first_use(stage: _Stage, cell: Cell) -> _Found:
    """Seconds until a new process has its first result, and what the cache gets from other lengths."""
    own = stage.enter(cell, stage.provider)
    if own.take is None:
        return _Found(own)
    used = try_first_use(cell.case, stage.provider.name, cell.mode, CHANGED_LENGTHS, stage.device)
    own.reason = used.reason
    details = {"first_use_s": used.seconds, "num_files": used.num_files, "new_files": used.new_files}
    return _Found(own, details=details)


def versions() -> Line:
    """What kernels are compiled and run with, beside torch; None for what is not installed."""
    try:
        triton: str | None = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "triton": triton,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **peer_versions(),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
