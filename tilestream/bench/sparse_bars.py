"""The bars of block-sparse attention, judged from the lines of ``tilestream bench block-sparse``, and their tables.

What has no lines, the GPU or the processor, is neither judged nor shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tilestream.bench import bars, gpu_bars
from tilestream.bench.bars import MISSING, Bar, Verdict, distinct, number
from tilestream.bench.block_masks import band_of
from tilestream.bench.gpu_bars import reasons, shown
from tilestream.bench.gpu_cells import DENSE, PEERS, Cell, Part
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_threads, markdown_table
from tilestream.bench.sparse_cells import SPARSE_PARTS, sparse_plan
from tilestream.bench.traffic_bars import off_the_model, training_table

__all__ = [
    "PROPORTION",
    "SPEED_OVER_FLEX",
    "bars_table",
    "judge",
    "machine_text",
    "markdown_report",
    "over_proportion",
    "part_tables",
    "suite_lines",
]

# Time over that of the dense call times the fraction of blocks that is kept, on a GPU and on a processor.
PROPORTION, _CPU_PROPORTION = 1.15, 1.25
SPEED_OVER_FLEX = 1.2
_BUTTERFLY = 30.0
_TRAFFIC_OFF = 0.15
_CPU: Part = "sparse-cpu"
_TITLES: tuple[tuple[Part, str], ...] = (
    ("sparse-density", "16k tokens, bfloat16, random blocks"),
    ("sparse-butterfly", "The butterfly of 64k tokens, bfloat16"),
    ("sparse-patterns", "Patterns of 16k tokens, bfloat16; dense is causal and has a window where the mask does"),
    (_CPU, "8k tokens, float32, on a CPU, random blocks"),
)


def suite_lines(lines: Iterable[Line]) -> list[Line]:
    """Those of the lines that ``tilestream bench block-sparse`` wrote; ArgumentError where there is none."""
    return bars.suite_lines(lines, "block-sparse")


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """The verdicts of the bars of those devices that have lines."""
    are_cpu = {line["part"] == _CPU for line in lines}
    found = (_gpu_bars() if False in are_cpu else []) + (_cpu_bars() if True in are_cpu else [])
    return bars.judge(found, sparse_plan(SPARSE_PARTS), {Cell.of_line(line).key: line for line in lines})


def _gpu_bars() -> list[Bar[Cell]]:
    found: list[Bar[Cell]] = []
    for mode in ("forward", "backward"):
        name = f"time over the kept fraction of dense's, {mode}, each cell"
        found.append(Bar(name, PROPORTION, _pick("sparse-density", mode), over_proportion, wanted="at most"))
    for mode in ("forward", "backward"):
        name = f"speed against flex_attention with the same mask, {mode}, each cell"
        found.append(Bar(name, SPEED_OVER_FLEX, _pick("sparse-density", mode), _speed_over("flex")))
    name = "speed of the butterfly against dense, 64k tokens, forward and backward"
    found.append(Bar(name, _BUTTERFLY, _pick("sparse-butterfly"), _speed_over(DENSE)))
    name = "HBM traffic off the model's behind a cache, each cell"
    traffic = _pick("sparse-traffic")
    return [*found, Bar(name, _TRAFFIC_OFF, traffic, off_the_model, wanted="at most", unit="%")]


def _cpu_bars() -> list[Bar[Cell]]:
    return [
        Bar(
            f"time over the kept fraction of dense's, on a CPU, {mode}, each cell",
            _CPU_PROPORTION,
            _pick(_CPU, mode),
            over_proportion,
            wanted="at most",
        )
        for mode in ("forward", "backward")
    ]


def _pick(part: Part, mode: str | None = None) -> Callable[[Cell], bool]:
    return lambda cell: cell.part == part and mode in (None, cell.mode)


def _speed_over(peer: str) -> Callable[[Line], float | None]:
    """The time of a peer over ours, in the same turns."""
    return lambda line: number(line["peers"].get(peer, {}), "ratio_p50")


def over_proportion(line: Line) -> float | None:
    """Our time over that of our own dense call times the kept fraction of blocks; 1 is proportional.

    None where the dense call leaves out what the mask does.
    """
    speed = _speed_over(DENSE)(line)
    is_band, _ = band_of(line["config"]["mask"], line["config"]["mask_block"])
    return None if speed is None or is_band else 1 / (speed * float(line["kept_fraction"]))


def bars_table(lines: Sequence[Line]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


def part_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """Titles and tables of what every contestant did, part by part; those without lines are left out."""
    tables = []
    for part, title in _TITLES:
        picked = [line for line in lines if line["part"] == part]
        if picked:
            tables.append((f"{title}; milliseconds, and speed over others", _speed_table(part, picked)))
    traffic = [line for line in lines if line["part"] == "sparse-traffic"]
    if traffic:
        tables.append(("HBM traffic, 16k tokens, bfloat16, random blocks", training_table(traffic)))
    return tables


def _speed_table(part: Part, lines: Sequence[Line]) -> Table:
    peers = PEERS[part]
    over = [name for name in peers if not name.startswith("tilestream/")]
    headers = ("", "kept", distinct(lines, "provider"), *peers, *(f"over {name}" for name in over), "over proportion")
    rows: list[tuple[str, ...]] = []
    for line in lines:
        found, excess = {name: line["peers"].get(name, {}) for name in peers}, over_proportion(line)
        rows.append((
            _row_name(line), f"{line['kept_fraction']:.3g}", shown(line, "ms_p50", ".4g"),
            *(shown(found[name], "ms_p50", ".4g") for name in peers),
            *(shown(found[name], "ratio_p50", ".2f") for name in over),
            MISSING if excess is None else f"{excess:.2f}",
        ))  # fmt: skip
    return Table(headers, rows)


def _row_name(line: Line) -> str:
    case = line["config"]
    mode = "forward and backward" if line["mode"] == "both" else line["mode"]
    return f"{case['mask'].replace('_', ' ')}, head_dim {case['head_dim']}, {case['num_heads_q']} heads, {mode}"


def machine_text(lines: Sequence[Line]) -> str:
    """Where, when and with what the lines were measured."""
    chosen = ", ".join(dict.fromkeys(str(line["chosen"]) for line in lines if line.get("chosen")))
    text = gpu_bars.machine_text(lines)
    if any(line["part"] == _CPU for line in lines):
        text = (
            f"{distinct(lines, 'device')}, {format_threads(lines[-1]['num_threads'])}, torch"
            f" {distinct(lines, 'torch')}, commit {distinct(lines, 'commit')}, {lines[0]['date']};"
            f" {distinct(lines, 'provider')}"
        )
    return f"{text}, which ran on {chosen}" if chosen else text


def markdown_report(lines: Sequence[Line]) -> str:
    """The bars, then what every contestant did, then why some have no number."""
    parts = [f"Measured on {machine_text(lines)}.", markdown_table(bars_table(lines))]
    parts.append(
        "Medians of turns in one run; `dense` is tilestream's own dense call, in the same turns, and speed over a peer"
        " is its time over ours. `over proportion` is our time over that of `dense` times the kept fraction of blocks:"
        " 1 is what a kernel would take that loses nothing to lists. `-` was not measured; `*` marks a peer whose"
        " result misses our bound on errors."
    )
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in part_tables(lines)]
    if found := reasons(lines):
        parts.append("Without a number, or with a star:\n\n" + "\n".join(f"- {reason}" for reason in found))
    return "\n\n".join(parts)
