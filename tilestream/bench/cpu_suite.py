"""The measuring of ``tilestream bench cpu``: what is compared takes turns in one process, and ratios are per turn.

A cell's number is the median of the ratios of its turns. Each result passes the correctness gate first, with the
thread count of the cell; that call is the warm-up too. PyTorch's own attention is checked as well, but a miss of our
bound is written beside the number, not instead of it: it misses by a few percent in some cells, and is what one would
use all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tilestream import dispatch
from tilestream.bench import gate
from tilestream.bench.cases import DTYPES, Case
from tilestream.bench.cpu_cells import Cell
from tilestream.bench.measure import Line, Settings, call_flops, measurement_line, percentiles, time_ms, too_large
from tilestream.bench.memory import Memory, MemoryProbe
from tilestream.bench.peaks import Peaks, load_peaks
from tilestream.bench.providers import Provider, provider_named
from tilestream.bench.runs import make_run
from tilestream.bench.turns import Take, Turns, median, slow_reason, take_turns
from tilestream.problem import AttentionInputs

__all__ = ["PEER", "PROVIDER", "SECONDS", "measure_cells", "suite_settings"]

PROVIDER = "tilestream/native"
PEER = "sdpa"
SECONDS = 0.2
# Twenty passes, of which the best counts.
_FMA_SECONDS = 0.02
_CPU = torch.device("cpu")


def suite_settings(seconds: float = SECONDS) -> Settings:
    """At least 3 turns, at most 1000, about `seconds` a cell; none where 3 turns would take 75 times as long."""
    return Settings(min_samples=3, max_samples=1000, budget_s=seconds, patience=75)


def measure_cells(
    cells: Sequence[Cell],
    provider_name: str = PROVIDER,
    settings: Settings | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Iterator[Line]:
    """Measure `cells`, those of one case one after the other.

    Args:
        on_step: called with a description before each cell.

    Yields:
        One line per cell. ``ratio_p50`` is None where there is no number, and ``reason`` says why.
    """
    all_threads = torch.get_num_threads()
    try:
        with MemoryProbe(_CPU) as probe:
            bench = _Bench(provider_named(provider_name), settings or suite_settings(), load_peaks(), probe)
            for _, group in itertools.groupby(cells, key=lambda cell: (cell.part, cell.case)):
                stage = _Stage(bench, list(group))
                for cell in stage.cells:
                    on_step(f"{cell.part}: {cell}")
                    torch.set_num_threads(cell.num_threads)
                    yield _measure_cell(stage, cell) | {"all_threads": all_threads}
    finally:
        torch.set_num_threads(all_threads)


@dataclass(frozen=True)
class _Bench:
    """What all cells of a run share."""

    provider: Provider
    settings: Settings
    peaks: Peaks | None
    probe: MemoryProbe


@dataclass
class _Found:
    """What a cell gave: turns of (ours in ms, peer in `peer_unit`, ...) and one ratio per turn; or a reason."""

    turns: Turns = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peer: str | None = None
    peer_unit: str | None = None
    memory: Memory = field(default_factory=lambda: Memory(None, "not asked for"))
    reason: str | None = None
    details: Line = field(default_factory=dict)


class _Stage:
    """The cells of one case, the inputs they share, and the verdicts of the gate."""

    def __init__(self, bench: _Bench, cells: list[Cell]) -> None:
        self.bench, self.cells = bench, cells
        self._inputs: AttentionInputs | None = None
        self._oracles: dict[Case, gate.Oracle] = {}
        self._gates: dict[tuple[Case, str, int], gate.Gate] = {}

    def check(self, cell: Cell, provider: Provider, case: Case) -> gate.Gate:
        """The verdict about `provider` on `case` in the direction of `cell`: ours anew for each number of threads."""
        num_threads = torch.get_num_threads() if provider is self.bench.provider else 0
        if (key := (case, provider.name, num_threads)) not in self._gates:
            if case not in self._oracles:
                with_gradients = any(cell.mode != "forward" for cell in self.cells)
                self._oracles[case] = gate.consult(case, _CPU, with_gradients)
            self._gates[key] = gate.compare(self._oracles[case], provider)
        return self._gates[key].of_forward if cell.mode == "forward" else self._gates[key]

    def timer(self, cell: Cell, provider: Provider, case: Case) -> Take:
        """Milliseconds of one call of `provider`, on the inputs that were checked where they were."""
        if case in self._oracles:
            inputs = self._oracles[case].inputs
        else:
            inputs = self._inputs = self._inputs or case.make_inputs(_CPU)
        run = make_run(case, provider, cell.mode, _CPU, inputs=inputs)
        return lambda: time_ms(run, _CPU)

    def compare(
        self, takes: Sequence[Take], peer: str, peer_unit: str, ratio: Callable[[float, float], float]
    ) -> _Found:
        """Turns of ours, the peer's and whatever else is in `takes`."""
        settings = self.bench.settings
        turns = take_turns(takes, settings)
        if not turns:
            return _Found(reason=slow_reason(settings))
        return _Found(turns, [ratio(turn[0], turn[1]) for turn in turns], peer, peer_unit)


def _measure_cell(stage: _Stage, cell: Cell) -> Line:
    provider = stage.bench.provider
    reason = provider.refuse(cell.case, _CPU) or too_large(cell.case, provider, _CPU)
    verdicts = []
    if reason is None:
        verdicts = [stage.check(cell, provider, case) for case in (cell.checked_case, cell.wide) if case is not None]
        reason = next((f"wrong result: {verdict.reason}" for verdict in verdicts if not verdict.is_green), None)
    found = _MEASURE[cell.part](stage, cell) if reason is None else _Found(reason=reason)
    own_ms = [turn[0] for turn in found.turns]
    line = measurement_line(cell.case, provider, cell.mode, _CPU, own_ms, found.memory)
    ratio_p20, ratio_p50, ratio_p80 = percentiles(found.ratios) if found.ratios else (None, None, None)
    library = dispatch.native_library()
    return {
        "suite": "cpu",
        "part": cell.part,
        **line,
        "peer": found.peer,
        "peer_unit": found.peer_unit,
        "peer_p50": median(turn[1] for turn in found.turns) if found.turns else None,
        "ratio_p50": ratio_p50,
        "ratio_p20": ratio_p20,
        "ratio_p80": ratio_p80,
        "error_vs_float64": verdicts[0].error if verdicts else None,
        "is_wrong": any(not verdict.is_green for verdict in verdicts),
        "reason": found.reason,
        "isa": None if library is None else library[0],
        **found.details,
    }


def _against_peer(stage: _Stage, cell: Cell) -> _Found:
    """How many times faster than PyTorch's attention; and in some cells what share of a core's peak."""
    ours, peer, peaks = stage.bench.provider, provider_named(PEER), stage.bench.peaks
    if (refusal := peer.refuse(cell.case, _CPU)) is not None:
        return _Found(reason=f"{PEER}: {refusal}")
    peer_verdict = stage.check(cell, peer, cell.case)
    takes = [stage.timer(cell, ours, cell.case), stage.timer(cell, peer, cell.case)]
    has_peak = peaks is not None and cell.uses_fma_peak
    if peaks is not None and cell.uses_fma_peak:
        takes.append(lambda: peaks.fma_gflops(_FMA_SECONDS))
    found = stage.compare(takes, PEER, "ms", lambda own_ms, peer_ms: peer_ms / own_ms)
    found.details["peer_reason"] = peer_verdict.reason
    if has_peak and found.turns:
        gflop = call_flops(cell.case.problem("cpu"), cell.mode) / 1e9
        found.details["fma_gflops"] = median(turn[2] for turn in found.turns)
        found.details["fma_share"] = median(gflop / (turn[0] / 1e3) / turn[2] for turn in found.turns)
    return found


def _against_wide(stage: _Stage, cell: Cell) -> _Found:
    """The share of the time of a call that sees more."""
    ours, wide = stage.bench.provider, cell.wide
    assert wide is not None
    takes = [stage.timer(cell, ours, cell.case), stage.timer(cell, ours, wide)]
    found = stage.compare(takes, wide.name, "ms", lambda own_ms, wide_ms: own_ms / wide_ms)
    narrow_flops, wide_flops = (call_flops(case.problem("cpu"), cell.mode) for case in (cell.case, wide))
    found.details["visible_share"] = narrow_flops / wide_flops
    return found


def _against_reading(stage: _Stage, cell: Cell) -> _Found:
    """The share of the bandwidth of reading as many bytes as keys and values have, and doing nothing with them."""
    case, peaks = cell.case, stage.bench.peaks
    if peaks is None:
        return _Found(reason="the bandwidth is measured by the native library, and there is none with that function")
    rows = case.batch * case.seqlen_k * case.num_heads_kv
    kv_bytes = rows * (case.head_dim + case.head_dim_v) * DTYPES[case.dtype].itemsize
    # Written, because pages that never were all stand for one page of zeros.
    buffer = torch.ones(kv_bytes, dtype=torch.uint8)
    takes = [
        stage.timer(cell, stage.bench.provider, case),
        lambda: peaks.read_gbps(buffer, cell.num_threads),
    ]
    found = stage.compare(takes, "reading", "GB/s", lambda own_ms, gbps: kv_bytes / (own_ms * 1e6) / gbps)
    found.details |= {"kv_bytes": kv_bytes}
    return found


def _against_tensors(stage: _Stage, cell: Cell) -> _Found:
    """Peak memory beyond inputs and results, as a multiple of query, key, value and their gradients."""
    memory = stage.bench.probe.measure(cell.case, stage.bench.provider.name, cell.mode)
    case = cell.case
    widths = case.seqlen_q * case.num_heads_q * case.head_dim
    widths += case.seqlen_k * case.num_heads_kv * (case.head_dim + case.head_dim_v)
    tensor_bytes = 2 * case.batch * widths * DTYPES[case.dtype].itemsize
    ratios = [] if memory.extra_bytes is None else [memory.extra_bytes / tensor_bytes]
    return _Found(
        ratios=ratios,
        peer="inputs and gradients",
        memory=memory,
        reason=memory.reason,
        details={"tensor_bytes": tensor_bytes},
    )


_MEASURE: dict[str, Callable[[_Stage, Cell], _Found]] = {
    "ratio": _against_peer,
    "call": _against_peer,
    "mask": _against_wide,
    "decode": _against_reading,
    "memory": _against_tensors,
}
