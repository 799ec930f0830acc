"""The bars of the Hopper forward, judged from the lines of ``tilestream bench hopper``, and their tables."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.bench import bars
from tilestream.bench.bars import MISSING, Bar, Verdict, distinct, number
from tilestream.bench.gpu_bars import machine_text, reasons, shown
from tilestream.bench.gpu_cells import HIDDEN, LENGTHS, PEERS, TOKENS, Cell, hopper_plan
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, markdown_table

__all__ = ["CAUSES", "bars_table", "judge", "markdown_report", "part_tables", "slower_cells"]

_MEAN, _EACH = 1.03, 0.95
_CUDNN = "sdpa/cudnn"
_PEERS = PEERS["hopper"]

# Why a cell is under its best peer, by the name of its case; found by measuring and written by hand, here alone.
_SHORT = (
    "what does not grow with the length: a second launch, which looks at flags (5 % at 1k), and 1.5 key tiles' time"
    " between row tiles (docs/measured-facts.md)"
)
_LONG = "within 3 %; not found"
CAUSES: dict[str, str] = {
    "causal_1024_d64_h16x32_bfloat16": _SHORT,
    "causal_1024_d64_h64x16_float16": _SHORT,
    "causal_1024_d128_h16x16_bfloat16": _SHORT,
    "causal_1024_d256_h16x8_bfloat16": _SHORT,
    "causal_4096_d64_h4x32_bfloat16": _SHORT,
    "causal_4096_d128_h4x16_bfloat16": _SHORT,
    "causal_4096_d256_h4x8_bfloat16": _SHORT,
    "causal_16384_d64_h1x32_bfloat16": _LONG,
    "causal_16384_d128_h1x16_bfloat16": _LONG,
    "causal_16384_d256_h1x8_bfloat16": _LONG,
    "full_4096_d128_h4x16_bfloat16": _LONG,
    "full_16384_d128_h1x16_bfloat16": _LONG,
}
_NO_CAUSE = "no cause is named yet"


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """Every bar's verdict."""
    return bars.judge(_bars(), hopper_plan(), {Cell.of_line(line).key: line for line in lines})


def _bars() -> list[Bar[Cell]]:
    mean, each = ("speed against the best peer of each cell, " + what for what in ("geometric mean", "each cell"))
    gpt2 = "speed against cuDNN in the setting of GPT-2 medium, each cell"
    return [
        Bar(mean, _MEAN, lambda cell: cell.is_layer, _ratio_to_all, combine="geomean"),
        Bar(each, _EACH, lambda cell: cell.is_layer, _ratio_to_all),
        Bar(gpt2, 1.0, lambda cell: not cell.is_layer, lambda line: number(line["peers"].get(_CUDNN, {}), "ratio_p50")),
    ]


def _ratio_to_all(line: Line) -> float | None:
    """Our speed over that of the best peer, or None where one that could be the best has no number."""
    ratios = _ratios(line)
    return min(ratios.values()) if len(ratios) == len(_PEERS) else None


def _ratios(line: Line) -> dict[str, float]:
    """Our speed over that of each peer that has a number. A peer whose result misses our bound counts."""
    ratios = {name: number(line["peers"].get(name, {}), "ratio_p50") for name in _PEERS}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def bars_table(lines: Sequence[Line]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


def part_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """Titles and tables of what every contestant did; those without lines are left out."""
    layers = [line for line in lines if Cell.of_line(line).is_layer]
    gpt2 = [line for line in lines if not Cell.of_line(line).is_layer]
    tables = []
    if layers:
        lengths = " / ".join(f"{length // 1024}k" for length in LENGTHS)
        tables.append((f"bfloat16 forward, TFLOP/s at {lengths} tokens a sequence", _table(layers, LENGTHS)))
    if gpt2:
        title = "GPT-2 medium, float16 forward, 64 sequences of 1024 tokens, 16 heads, TFLOP/s"
        tables.append((title, _table(gpt2, (gpt2[0]["seqlen_q"],))))
    return tables


def _table(lines: Sequence[Line], lengths: Sequence[int]) -> Table:
    """A row for all lengths of one head dimension and mask, a column for each contestant, and our speed over theirs."""
    by_row: dict[str, dict[int, Line]] = {}
    for line in lines:
        case = line["config"]
        row = f"d={case['head_dim']} {'causal' if case['causal'] else 'full'}"
        by_row.setdefault(row, {})[case["seqlen_q"]] = line
    rows = []
    for row, by_length in by_row.items():
        cells = [by_length.get(length, {"peers": {}}) for length in lengths]
        contestants = (cells, *([cell["peers"].get(name, {}) for cell in cells] for name in _PEERS))
        columns = [[shown(found, "tflops", ".0f") for found in column] for column in contestants]
        columns.append([_over_best(cell) for cell in cells])
        rows.append((row, *(" / ".join(column) for column in columns)))
    return Table(("", distinct(lines, "provider"), *_PEERS, "over the best peer"), rows)


def _over_best(line: Line) -> str:
    ratios = _ratios(line)
    return f"{min(ratios.values()):.2f}" if ratios else MISSING


def slower_cells(lines: Sequence[Line]) -> list[str]:
    """Every cell under its best peer, worst first, with the cause."""
    found = []
    for line in lines:
        ratios = _ratios(line)
        if ratios and min(ratios.values()) < 1:
            best = min(ratios, key=lambda name: ratios[name])
            found.append((ratios[best], f"{Cell.of_line(line)}: {ratios[best]:.2f} of {best}", line["case"]))
    return [f"{text}; {CAUSES.get(case, _NO_CAUSE)}" for _, text, case in sorted(found)]


def markdown_report(lines: Sequence[Line]) -> str:
    """The bars, then what every contestant did, then the cells under their best peer, then who has no number."""
    peers = ", ".join(f"{package} {distinct(lines, package)}" for package in ("fa3-fwd", "flash-attn-4"))
    parts = [f"Measured on {machine_text(lines)}; {peers}.", markdown_table(bars_table(lines))]
    parts.append(
        f"{TOKENS:,} tokens in all (batch = {TOKENS} / length), {HIDDEN} numbers a token (heads = {HIDDEN} / d), but"
        " for GPT-2. Medians of turns; our speed over the best peer's is the median of the ratios within each turn. `-`"
        " was not measured; `*` marks a peer whose result misses our bound on errors."
    )
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in part_tables(lines)]
    lists = {"Under their best peer": slower_cells(lines), "Without a number, or with a star": reasons(lines)}
    for title, texts in lists.items():
        if texts:
            parts.append(f"{title}:\n\n" + "\n".join(f"- {text}" for text in texts))
    return "\n\n".join(parts)
