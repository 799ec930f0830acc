"""The bars that the CPU kernels must clear, judged from the lines of ``tilestream bench cpu``, and their tables."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from tilestream.bench import bars
from tilestream.bench.bars import MISSING, Bar, Verdict, distinct, number
from tilestream.bench.cpu_cells import DTYPES, HEAD_DIMS, HEADS, LENGTHS, MAX_SCORES, Cell, plan
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_threads, markdown_table

__all__ = ["bars_table", "judge", "machine_text", "markdown_report", "ratio_tables", "suite_lines"]

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

_TABLE_HEADS = 8


def suite_lines(lines: Iterable[Line]) -> list[Line]:
    """Those of the lines that ``tilestream bench cpu`` wrote; ArgumentError where there is none."""
    return bars.suite_lines(lines, "cpu")


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """Every bar's verdict, for one thread and for all threads of the machine that wrote `lines`."""
    threads = tuple(dict.fromkeys((1, lines[0]["all_threads"])))
    return bars.judge(_bars(threads), plan(threads), {Cell.of_line(line).key: line for line in lines})


def _bars(threads: Sequence[int]) -> list[Bar[Cell]]:
    found = [
        Bar(
            f"speed against PyTorch, each cell, {format_threads(count)}", 1.0, _pick("ratio", num_threads=count), _ratio
        )
        for count in threads
    ]
    for dtype, mode, limit in _MEANS:
        for count in threads:
            name = f"speed against PyTorch, geometric mean, {dtype} {mode}, {format_threads(count)}"
            selects = _pick("ratio", dtype=dtype, mode=mode, num_threads=count)
            found.append(Bar(name, limit, selects, _ratio, combine="geomean"))
    for mode in ("forward", "backward"):
        name = f"share of a core's FMA peak, float32 {mode}, 2048 tokens and more, 1 thread"
        found.append(Bar(name, _PEAK_SHARE, _pick("ratio", mode=mode, uses_fma_peak=True), _fma_share, unit="%"))
    return found + _other_bars()


def _pick(part: str, **wanted: object) -> Callable[[Cell], bool]:
    """Whether a cell is of `part` and it, or its case, has these fields."""

    def selects(cell: Cell) -> bool:
        fields = {"dtype": cell.case.dtype, "has_window": cell.case.window is not None}
        found = (fields[name] if name in fields else getattr(cell, name) for name in wanted)
        return cell.part == part and all(map(operator.eq, found, wanted.values()))

    return selects


def _other_bars() -> list[Bar[Cell]]:
    causal, window = _pick("mask", has_window=False), _pick("mask", has_window=True)
    decode, memory = "decode, 1 query over 16k keys", "extra memory, forward and backward, 32k tokens"
    in_proportion = "time of a window of 512 in 8192 tokens, of causal's for as many visible pairs"
    return [
        Bar("time of causal, of full's, 4096 tokens", _CAUSAL_SHARE, causal, _ratio, wanted="at most"),
        Bar(in_proportion, _WINDOW_EXCESS, window, _window_excess, wanted="at most"),
        Bar(f"{decode}, share of the measured read bandwidth", _READ_SHARE, _pick("decode"), _ratio, unit="%"),
        Bar("one call, 4 heads, 16 tokens", _CALL_US, _pick("call"), _microseconds, wanted="at most", unit="us"),
        Bar(f"{memory}, of inputs and gradients", _MEMORY_RATIO, _pick("memory"), _ratio, wanted="at most"),
    ]


def _ratio(line: Line) -> float | None:
    return number(line, "ratio_p50")


def _fma_share(line: Line) -> float | None:
    return number(line, "fma_share")


def _window_excess(line: Line) -> float | None:
    ratio = _ratio(line)
    return None if ratio is None else ratio / float(line["visible_share"])


def _microseconds(line: Line) -> float | None:
    milliseconds = number(line, "ms_p50")
    return None if milliseconds is None else milliseconds * 1e3


def bars_table(lines: Sequence[Line]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


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
                    cells = (MISSING if value is None else f"{value:.2f}" for value in found)
                    rows.append((f"{dtype} {mode}, {'causal' if causal else 'full'}, head_dim {head_dim}", *cells))
    return Table(("", *(str(tokens) for tokens in LENGTHS)), rows)


def machine_text(lines: Sequence[Line]) -> str:
    """Where, when and with what the lines were measured."""

    loads = [line["load_average"] for line in lines if line["load_average"] is not None]
    load = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return (
        f"{distinct(lines, 'device')}, {format_threads(lines[0]['all_threads'])},"
        f" instruction set {distinct(lines, 'isa')}, torch {distinct(lines, 'torch')},"
        f" commit {distinct(lines, 'commit')}, {lines[0]['date']}{load}; {distinct(lines, 'provider')}"
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
