"""The bars that the CPU kernels must clear, judged from the lines of ``tilestream bench cpu`` alone, and their tables.

A bar is met only by a full set of its cells: from part of them it can be missed, never met.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tilestream.bench.cpu_cells import DTYPES, HEAD_DIMS, HEADS, LENGTHS, MAX_SCORES, Cell, Key, plan
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_threads, markdown_table
from tilestream.errors import ArgumentError

__all__ = ["Bar", "Verdict", "bars_table", "judge", "machine_text", "markdown_report", "ratio_tables", "suite_lines"]

# Geometric means over a direction and a dtype, against PyTorch's attention.
_MEANS = (
    ("float32", "forward", 1.35),
    ("float32", "backward", 1.5),
    ("bfloat16", "forward", 1.5),
    ("bfloat16", "backward", 8.0),
    ("float16", "forward", 2.0),
)
_PEAK_SHARE = 0.75
_CAUSAL_SHARE = 0.58
# Of the visible pairs' share: tiles that the edges of the band cut are computed whole.
_WINDOW_EXCESS = 1.25
_READ_SHARE = 0.85
_CALL_US = 25.0
_MEMORY_RATIO = 1.5

_MISSING = "-"
_TABLE_HEADS = 8


@dataclass(frozen=True)
class Bar:
    """A number over the cells that it selects, and the limit that it must keep."""

    name: str
    limit: float
    selects: Callable[[Cell], bool]
    # The number of one line, or None where the line has none.
    value: Callable[[Line], float | None]
    combine: Literal["each", "geomean"] = "each"
    is_at_least: bool = True
    unit: str = "x"

    def clears(self, value: float) -> bool:
        """Written so that a NaN does not."""
        return value >= self.limit if self.is_at_least else value <= self.limit

    def show(self, value: float) -> str:
        """`value` with its unit."""
        return f"{value:.1%}" if self.unit == "%" else f"{value:.3g}{'' if self.unit == 'x' else ' '}{self.unit}"


@dataclass(frozen=True)
class Verdict:
    """What the lines say about a bar; `is_met` is None where they do not suffice."""

    bar: Bar
    value: float | None
    is_met: bool | None
    num_measured: int
    num_cells: int
    worst: str | None

    @property
    def met(self) -> str:
        """The verdict in words."""
        if self.is_met is not None:
            return "yes" if self.is_met else "no"
        if self.num_measured == 0:
            return "not measured"
        return f"not measured in full: {self.num_measured} of {self.num_cells} cells"


def suite_lines(lines: Iterable[Line]) -> list[Line]:
    """Those of the lines that ``tilestream bench cpu`` wrote.

    Raises:
        ArgumentError: there is none.
    """
    found = [line for line in lines if line.get("suite") == "cpu"]
    if not found:
        raise ArgumentError("--from names a file without lines of `tilestream bench cpu`; write one with --output.")
    return found


def judge(lines: Sequence[Line]) -> list[Verdict]:
    """Every bar's verdict, for one thread and for all threads of the machine that wrote `lines`."""
    threads = tuple(dict.fromkeys((1, lines[0]["all_threads"])))
    expected = plan(threads)
    by_key = {Cell.of_line(line).key: line for line in lines}
    return [_verdict(bar, expected, by_key) for bar in _bars(threads)]


def _verdict(bar: Bar, expected: Sequence[Cell], by_key: Mapping[Key, Line]) -> Verdict:
    cells = [cell for cell in expected if bar.selects(cell)]
    known = [(cell, by_key[cell.key]) for cell in cells if cell.key in by_key]
    wrong = [cell for cell, line in known if line["is_wrong"]]
    values = [(value, cell) for cell, line in known if (value := bar.value(line)) is not None]
    if wrong:
        return Verdict(bar, None, False, len(values), len(cells), f"{wrong[0]}: wrong result")
    if not values:
        return Verdict(bar, None, None, 0, len(cells), None)
    worst, where = (min if bar.is_at_least else max)(values, key=lambda pair: pair[0])
    value = math.exp(sum(math.log(each) for each, _ in values) / len(values)) if bar.combine == "geomean" else worst
    is_full = len(values) == len(cells)
    is_met: bool | None = bar.clears(value)
    # One cell is enough to miss a bar that holds for each; nothing is enough but all to meet one.
    if not is_full and (is_met or bar.combine == "geomean"):
        is_met = None
    return Verdict(bar, value, is_met, len(values), len(cells), f"{where}: {bar.show(worst)}")


def _bars(threads: Sequence[int]) -> list[Bar]:
    bars = [
        Bar(
            f"speed against PyTorch, each cell, {format_threads(count)}", 1.0, _pick("ratio", num_threads=count), _ratio
        )
        for count in threads
    ]
    for dtype, mode, limit in _MEANS:
        for count in threads:
            name = f"speed against PyTorch, geometric mean, {dtype} {mode}, {format_threads(count)}"
            selects = _pick("ratio", dtype=dtype, mode=mode, num_threads=count)
            bars.append(Bar(name, limit, selects, _ratio, combine="geomean"))
    for mode in ("forward", "backward"):
        name = f"share of a core's FMA peak, float32 {mode}, 2048 tokens and more, 1 thread"
        bars.append(Bar(name, _PEAK_SHARE, _pick("ratio", mode=mode, uses_fma_peak=True), _fma_share, unit="%"))
    return bars + _other_bars()


def _pick(part: str, **wanted: object) -> Callable[[Cell], bool]:
    """Whether a cell is of `part` and it, or its case, has these fields."""

    def selects(cell: Cell) -> bool:
        fields = {"dtype": cell.case.dtype, "has_window": cell.case.window is not None}
        found = (fields[name] if name in fields else getattr(cell, name) for name in wanted)
        return cell.part == part and all(map(operator.eq, found, wanted.values()))

    return selects


def _other_bars() -> list[Bar]:
    causal, window = _pick("mask", has_window=False), _pick("mask", has_window=True)
    decode, memory = "decode, 1 query over 16k keys", "extra memory, forward and backward, 32k tokens"
    in_proportion = "time of a window of 512 in 8192 tokens, of causal's for as many visible pairs"
    return [
        Bar("time of causal, of full's, 4096 tokens", _CAUSAL_SHARE, causal, _ratio, is_at_least=False),
        Bar(in_proportion, _WINDOW_EXCESS, window, _window_excess, is_at_least=False),
        Bar(f"{decode}, share of the measured read bandwidth", _READ_SHARE, _pick("decode"), _ratio, unit="%"),
        Bar("one call, 4 heads, 16 tokens", _CALL_US, _pick("call"), _microseconds, is_at_least=False, unit="us"),
        Bar(f"{memory}, of inputs and gradients", _MEMORY_RATIO, _pick("memory"), _ratio, is_at_least=False),
    ]


def _ratio(line: Line) -> float | None:
    return _number(line, "ratio_p50")


def _fma_share(line: Line) -> float | None:
    return _number(line, "fma_share")


def _window_excess(line: Line) -> float | None:
    ratio = _ratio(line)
    return None if ratio is None else ratio / float(line["visible_share"])


def _microseconds(line: Line) -> float | None:
    milliseconds = _number(line, "ms_p50")
    return None if milliseconds is None else milliseconds * 1e3


def _number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return None if value is None else float(value)


def bars_table(lines: Sequence[Line]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    rows: list[tuple[str, ...]] = []
    for verdict in judge(lines):
        bar = verdict.bar
        wanted = f"{'at least' if bar.is_at_least else 'at most'} {bar.show(bar.limit)}"
        measured = _MISSING if verdict.value is None else bar.show(verdict.value)
        rows.append((bar.name, wanted, measured, verdict.met, verdict.worst or _MISSING))
    return Table(("bar", "wanted", "measured", "met", "worst cell"), rows)


def ratio_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """Titles and tables of the speed against PyTorch per length: for 8 heads, and the least over all heads."""
    speeds: dict[tuple[object, ...], dict[int, float]] = {}
    for line in lines:
        cell = Cell.of_line(line)
        ratio = _ratio(line)
        if cell.part != "ratio" or ratio is None:
            continue
        case = cell.case
        row = (cell.num_threads, case.seqlen_q, case.dtype, cell.mode, case.causal, case.head_dim)
        speeds.setdefault(row, {})[case.batch * case.num_heads_q] = ratio
    tables = []
    heads_text = ", ".join(str(batch * heads) for batch, heads in HEADS)
    for count in sorted({cell.num_threads for line in lines if (cell := Cell.of_line(line)).part == "ratio"}):
        for title, pick in (
            (f"{_TABLE_HEADS} heads", lambda by_heads: by_heads.get(_TABLE_HEADS)),
            (f"the least of {heads_text} heads", lambda by_heads: min(by_heads.values(), default=None)),
        ):
            tables.append((f"{format_threads(count)}, {title}", _length_table(speeds, count, pick)))
    return tables


def _length_table(
    speeds: Mapping[tuple[object, ...], Mapping[int, float]],
    num_threads: int,
    pick: Callable[[Mapping[int, float]], float | None],
) -> Table:
    rows = []
    for dtype in DTYPES:
        for mode in ("forward", "backward"):
            for causal in (False, True):
                for head_dim in HEAD_DIMS:
                    keys = [(num_threads, tokens, dtype, mode, causal, head_dim) for tokens in LENGTHS]
                    found = [pick(speeds.get(key, {})) for key in keys]
                    cells = (_MISSING if value is None else f"{value:.2f}" for value in found)
                    rows.append((f"{dtype} {mode}, {'causal' if causal else 'full'}, head_dim {head_dim}", *cells))
    return Table(("", *(str(tokens) for tokens in LENGTHS)), rows)


def machine_text(lines: Sequence[Line]) -> str:
    """Where, when and with what the lines were measured."""

    def each(name: str) -> str:
        return ", ".join(dict.fromkeys(str(line[name]) for line in lines))

    loads = [line["load_average"] for line in lines if line["load_average"] is not None]
    load = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return (
        f"{each('device')}, {format_threads(lines[0]['all_threads'])}, instruction set {each('isa')},"
        f" torch {each('torch')}, commit {each('commit')}, {lines[0]['date']}{load}; {each('provider')}"
    )


def markdown_report(lines: Sequence[Line]) -> str:
    """The bars, then the speed of every length."""
    parts = [f"Measured on {machine_text(lines)}.", markdown_table(bars_table(lines))]
    parts.append(
        "Speed against PyTorch's `scaled_dot_product_attention`, by tokens: its time over ours, medians of turns."
        f" `-` was not measured; calls of more than {MAX_SCORES:,} scores (batch x heads x tokens^2) are left out."
    )
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in ratio_tables(lines)]
    return "\n\n".join(parts)
