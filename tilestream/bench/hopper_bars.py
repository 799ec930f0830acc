"""The bars of the Hopper kernels, judged from the lines of ``tilestream bench hopper``, and their tables.

What has no lines, the forward or the backward, is neither judged nor shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilestream.bench import bars
from tilestream.bench.bars import MISSING, Bar, Verdict, distinct, number
from tilestream.bench.gpu_bars import machine_text, reasons, shown
from tilestream.bench.gpu_cells import HIDDEN, LENGTHS, PEERS, TOKENS, Cell, Part, hopper_plan
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, markdown_table

__all__ = ["BACKWARD_CAUSES", "CAUSES", "bars_table", "judge", "markdown_report", "part_tables", "slower_cells"]

_MEAN, _FORWARD_EACH, _BACKWARD_EACH = 1.03, 0.95, 0.93
_TRAINING_MS = 2.3
_CUDNN = "sdpa/cudnn"
_PACKAGES = {"fa3": "fa3-fwd", "fa4": "flash-attn-4"}


class _Shown(NamedTuple):
    """A table: the cells that it has, and which of their numbers in what form."""

    part: Part
    is_layer: bool
    title: str
    number: str = "tflops"
    form: str = ".0f"


_OPERATIONS = " A backward counts 2.5 times the operations of its forward."
_OF_LAYERS = f"TFLOP/s at {' / '.join(f'{length // 1024}k' for length in LENGTHS)} tokens a sequence"
_OF_GPT2 = "64 sequences of 1024 tokens, 16 heads"
_TABLES = (
    _Shown("hopper", True, f"bfloat16 forward, {_OF_LAYERS}"),
    _Shown("hopper", False, f"GPT-2 medium, float16 forward, {_OF_GPT2}, TFLOP/s"),
    _Shown("hopper-backward", True, f"bfloat16 backward, {_OF_LAYERS}"),
    _Shown(
        "hopper-training",
        False,
        f"GPT-2 medium, float16 forward and backward, {_OF_GPT2}, milliseconds",
        "ms_p50",
        ".2f",
    ),
)

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
# The same of the backward, and of forward and backward in the setting of GPT-2 medium.
BACKWARD_CAUSES: dict[str, str] = {}
_NO_CAUSE = "no cause is named yet"


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """The verdicts of the bars of those directions that have lines."""
    are_forward = {line["part"] == "hopper" for line in lines}
    found = (_forward_bars() if True in are_forward else []) + (_backward_bars() if False in are_forward else [])
    return bars.judge(found, hopper_plan(), {Cell.of_line(line).key: line for line in lines})


def _forward_bars() -> list[Bar[Cell]]:
    return [
        *_best_peer_bars("hopper", "speed", _FORWARD_EACH),
        Bar(
            "speed against cuDNN in the setting of GPT-2 medium, each cell",
            1.0,
            lambda cell: cell.part == "hopper" and not cell.is_layer,
            lambda line: number(line["peers"].get(_CUDNN, {}), "ratio_p50"),
        ),
    ]


def _backward_bars() -> list[Bar[Cell]]:
    return [
        *_best_peer_bars("hopper-backward", "speed of the backward", _BACKWARD_EACH),
        Bar(
            "forward and backward in the setting of GPT-2 medium, no mask",
            _TRAINING_MS,
            lambda cell: cell.part == "hopper-training" and not cell.case.causal,
            lambda line: number(line, "ms_p50"),
            wanted="at most",
            unit="ms",
        ),
    ]


def _best_peer_bars(part: Part, what: str, each_limit: float) -> list[Bar[Cell]]:
    def selects(cell: Cell) -> bool:
        return cell.part == part and cell.is_layer

    name = f"{what} against the best peer of each cell"
    return [
        Bar(f"{name}, geometric mean", _MEAN, selects, _ratio_to_all, combine="geomean"),
        Bar(f"{name}, each cell", each_limit, selects, _ratio_to_all),
    ]


def _ratio_to_all(line: Line) -> float | None:
    """Our speed over that of the best peer, or None where one that could be the best has no number."""
    ratios = _ratios(line)
    return min(ratios.values()) if len(ratios) == len(PEERS[line["part"]]) else None


def _ratios(line: Line) -> dict[str, float]:
    """Our speed over that of each peer that has a number. A peer whose result misses our bound counts."""
    ratios = {name: number(line["peers"].get(name, {}), "ratio_p50") for name in PEERS[line["part"]]}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def bars_table(lines: Sequence[Line]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


def part_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """Titles and tables of what every contestant did; those without lines are left out."""
    tables = []
    for kind in _TABLES:
        picked = [line for line in lines if (line["part"], Cell.of_line(line).is_layer) == (kind.part, kind.is_layer)]
        if picked:
            tables.append((kind.title, _table(picked, kind)))
    return tables


def _table(lines: Sequence[Line], kind: _Shown) -> Table:
    """A row for all lengths of one head dimension and mask, a column for each contestant, and our speed over theirs."""
    lengths, peers = LENGTHS if kind.is_layer else (lines[0]["seqlen_q"],), PEERS[kind.part]
    by_row: dict[str, dict[int, Line]] = {}
    for line in lines:
        case = line["config"]
        row = f"d={case['head_dim']} {'causal' if case['causal'] else 'full'}"
        by_row.setdefault(row, {})[case["seqlen_q"]] = line
    rows = []
    for row, by_length in by_row.items():
        cells = [by_length.get(length, {"part": kind.part, "peers": {}}) for length in lengths]
        contestants = (cells, *([cell["peers"].get(name, {}) for cell in cells] for name in peers))
        columns = [[shown(found, kind.number, kind.form) for found in column] for column in contestants]
        columns.append([_over_best(cell) for cell in cells])
        rows.append((row, *(" / ".join(column) for column in columns)))
    return Table(("", distinct(lines, "provider"), *peers, "over the best peer"), rows)


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
            causes = CAUSES if line["part"] == "hopper" else BACKWARD_CAUSES
            cause = causes.get(line["case"], _NO_CAUSE)
            found.append((ratios[best], f"{Cell.of_line(line)}: {ratios[best]:.2f} of {best}; {cause}"))
    return [text for _, text in sorted(found)]


def markdown_report(lines: Sequence[Line]) -> str:
    """The bars, then what every contestant did, then the cells under their best peer, then who has no number."""
    measured = {name for line in lines for name in PEERS[line["part"]]}
    packages = [package for name, package in _PACKAGES.items() if name in measured]
    peers = ", ".join(f"{package} {distinct(lines, package)}" for package in packages)
    parts = [f"Measured on {machine_text(lines)}; {peers}.", markdown_table(bars_table(lines))]
    parts.append(
        f"{TOKENS:,} tokens in all (batch = {TOKENS} / length), {HIDDEN} numbers a token (heads = {HIDDEN} / d), but"
        " for GPT-2. Medians of turns; our speed over the best peer's is the median of the ratios within each turn. `-`"
        " was not measured; `*` marks a peer whose result misses our bound on errors."
        f"{_OPERATIONS if any(line['part'] == 'hopper-backward' for line in lines) else ''}"
    )
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in part_tables(lines)]
    lists = {"Under their best peer": slower_cells(lines), "Without a number, or with a star": reasons(lines)}
    for title, texts in lists.items():
        if texts:
            parts.append(f"{title}:\n\n" + "\n".join(f"- {text}" for text in texts))
    return "\n\n".join(parts)
