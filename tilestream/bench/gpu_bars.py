"""The bars that the GPU kernels must clear, judged from the lines of ``tilestream bench gpu``, and their tables."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from tilestream.bench import bars
from tilestream.bench.bars import MISSING, Bar, Verdict, distinct, number
from tilestream.bench.gpu_cells import HIDDEN, PEERS, TOKENS, Cell, Part, plan
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, markdown_table

__all__ = [
    "bars_table",
    "judge",
    "machine_text",
    "markdown_report",
    "part_tables",
    "reasons",
    "shown",
    "suite_lines",
]

_FLEX_MEAN, _FLEX_EACH = 1.10, 0.95
_FLASH_MEAN = 1.2
_FP32_EACH = 1.0
_CALL_US = 25.0
_FIRST_USE_S = 10.0


def suite_lines(lines: Iterable[Line]) -> list[Line]:
    """Those of the lines that ``tilestream bench gpu`` wrote; ArgumentError where there is none."""
    return bars.suite_lines(lines, "gpu")


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """Every bar's verdict."""
    return bars.judge(_bars(), plan(), {Cell.of_line(line).key: line for line in lines})


def _bars() -> list[Bar[Cell]]:
    found: list[Bar[Cell]] = []
    for mode in ("forward", "backward"):
        name = f"speed against flex_attention, geometric mean, {mode}"
        found.append(Bar(name, _FLEX_MEAN, _pick("speed", mode=mode), _ratio_to("flex"), combine="geomean"))
    found.append(Bar("speed against flex_attention, each cell", _FLEX_EACH, _pick("speed"), _ratio_to("flex")))
    name = "speed against FlashAttention in PyTorch, geometric mean, forward"
    picked, ratio = _pick("speed", mode="forward"), _ratio_to("sdpa/flash")
    found.append(Bar(name, _FLASH_MEAN, picked, ratio, combine="geomean"))
    name, ratio = "speed against PyTorch's memory-efficient attention, float32, each cell", _ratio_to("sdpa/efficient")
    found.append(Bar(name, _FP32_EACH, _pick("fp32"), ratio, wanted="more than"))
    for needs_grad in (False, True):
        name = f"host's time of one call, {'inputs need gradients' if needs_grad else 'no gradients'}"
        picked = _pick("call", needs_grad=needs_grad)
        found.append(Bar(name, _CALL_US, picked, _microseconds, wanted="at most", unit="us"))
    name = "first call with an empty Triton cache"
    found.append(Bar(name, _FIRST_USE_S, _pick("compile"), _first_use, wanted="at most", unit="s"))
    name = "what calls of other lengths add to Triton's cache"
    return [*found, Bar(name, 0, _pick("compile"), _num_new_files, wanted="at most", unit="files")]


def _pick(part: Part, **wanted: object) -> Callable[[Cell], bool]:
    """Whether a cell is of `part` and has these fields."""

    def selects(cell: Cell) -> bool:
        found = (getattr(cell, name) for name in wanted)
        return cell.part == part and all(map(operator.eq, found, wanted.values()))

    return selects


def _ratio_to(peer: str) -> Callable[[Line], float | None]:
    return lambda line: number(line["peers"].get(peer, {}), "ratio_p50")


def _microseconds(line: Line) -> float | None:
    milliseconds = number(line, "ms_p50")
    return None if milliseconds is None else milliseconds * 1e3


def _first_use(line: Line) -> float | None:
    return number(line, "first_use_s")


def _num_new_files(line: Line) -> float | None:
    # A first call that left nothing there has no kernel of Triton's, so that the next ones say nothing either.
    return float(sum(line["new_files"].values())) if line.get("num_files") else None


def bars_table(lines: Sequence[Line]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


def part_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """Titles and tables of what every contestant did, part by part; those without lines are left out."""
    tables = []
    for part, title in (("speed", "bfloat16"), ("fp32", "float32")):
        for mode in ("forward", "backward"):
            picked = [line for line in lines if (line["part"], line["mode"]) == (part, mode)]
            if picked:
                tables.append((f"{title} {mode}, TFLOP/s, and our speed over each peer's", _speed_table(picked)))
    calls = [line for line in lines if line["part"] == "call"]
    if calls:
        tables.append(("The host's time of one call, microseconds", _call_table(calls)))
    compiles = [line for line in lines if line["part"] == "compile"]
    if compiles:
        tables.append(("The first call with an empty Triton cache", _compile_table(compiles)))
    return tables


def _speed_table(lines: Sequence[Line]) -> Table:
    names = PEERS[lines[0]["part"]]
    rows = []
    for line in lines:
        case, peers = Cell.of_line(line).case, [line["peers"].get(name, {}) for name in names]
        mask = "causal" if case.causal else "full"
        rows.append((
            f"head_dim {case.head_dim}, {mask}, {case.seqlen_q} tokens", shown(line, "tflops", ".3g"),
            *(shown(peer, "tflops", ".3g") for peer in peers), *(shown(peer, "ratio_p50", ".2f") for peer in peers),
        ))  # fmt: skip
    return Table(("", distinct(lines, "provider"), *names, *(f"over {name}" for name in names)), rows)


def _call_table(lines: Sequence[Line]) -> Table:
    names = PEERS["call"]
    rows = []
    for line in lines:
        contestants = (line, *(line["peers"].get(name, {}) for name in names))
        rows.append((str(Cell.of_line(line)), *(shown(found, "ms_p50", ".1f", 1e3) for found in contestants)))
    return Table(("", distinct(lines, "provider"), *names), rows)


def _compile_table(lines: Sequence[Line]) -> Table:
    rows: list[tuple[str, ...]] = []
    for line in lines:
        added = ", ".join(f"{count} by {length} tokens" for length, count in (line.get("new_files") or {}).items())
        counts = (shown(line, "num_files", ".0f"), added or MISSING)
        rows.append((str(Cell.of_line(line)), shown(line, "first_use_s", ".1f"), *counts))
    return Table(("", "seconds", "files in the cache", "files added"), rows)


def shown(found: Line, name: str, form: str, factor: float = 1.0) -> str:
    """A number, with a star where its result missed the bound of the gate."""
    value = number(found, name)
    return MISSING if value is None else f"{value * factor:{form}}{'*' if found.get('gate_reason') else ''}"


def machine_text(lines: Sequence[Line]) -> str:
    """Where, when and with what the lines were measured."""
    versions = ", ".join(
        f"{title} {distinct(lines, name)}"
        for title, name in (("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"), ("Triton", "triton"))
    )
    return (
        f"{distinct(lines, 'device')}, {versions}, commit {distinct(lines, 'commit')}, {lines[0]['date']};"
        f" {distinct(lines, 'provider')}"
    )


def markdown_report(lines: Sequence[Line]) -> str:
    """The bars, then what every contestant did, then why some have no number."""
    parts = [f"Measured on {machine_text(lines)}.", markdown_table(bars_table(lines))]
    parts.append(
        f"{TOKENS:,} tokens in all (batch = {TOKENS} / length), {HIDDEN} numbers a token (heads = {HIDDEN} / head_dim)."
        " Medians of turns; our speed over a peer's is its time over ours. `-` was not measured; `*` marks a peer whose"
        " result misses our bound on errors."
    )
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in part_tables(lines)]
    if found := reasons(lines):
        parts.append("Without a number, or with a star:\n\n" + "\n".join(f"- {reason}" for reason in found))
    return "\n\n".join(parts)


def reasons(lines: Sequence[Line]) -> list[str]:
    """Who has no number or missed the gate, and why; what several cells have in common once, with the first of them."""
    places: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        found = [(line["provider"], line["reason"])]
        found += [(name, peer[key]) for name, peer in line["peers"].items() for key in ("reason", "gate_reason")]
        for who, reason in found:
            if reason is not None:
                places.setdefault((who, reason), []).append(str(Cell.of_line(line)))
    return [
        f"{who}, {cells[0]}{f' and {len(cells) - 1} more' if len(cells) > 1 else ''}: {reason}"
        for (who, reason), cells in places.items()
    ]
