"""The paper's claims about approximate attention, judged from lines alone, and the tables of speed beside error.

arXiv:2205.14135, section 4.3: approximate methods overtake exact attention only past 512 to 1024 tokens; block-sparse
attention is faster than all of them at every length; memory is 2x below Linformer's at 64k and 20x below that of stored
scores at 4k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tilestream.bench import bars
from tilestream.bench.approximate.cells import METHODS, PLAIN, REFERENCE, Cell, plan
from tilestream.bench.bars import MISSING, Bar, Verdict, distinct, number
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_bytes, markdown_table

__all__ = [
    "bars_table",
    "crossing",
    "crossover",
    "judge",
    "machine_text",
    "markdown_report",
    "part_tables",
    "reasons",
    "suite_lines",
    "times_of",
]

# Below the lengths of the claim no approximate method may be faster.
_LAST_EXACT = 512
_LONG, _LINFORMER_RATIO = 65536, 2.0
_STORED, _STORED_RATIO = 4096, 20.0
_BUTTERFLY = "butterfly"
_APPROXIMATE = tuple(name for name, method in METHODS.items() if method.kind == "approximate")
_EXACT = tuple(name for name, method in METHODS.items() if method.kind == "exact")

# Lines of part speed by method and length.
_Speeds = Mapping[tuple[str, int], Line]


def suite_lines(lines: Iterable[Line]) -> list[Line]:
    """Those of the lines that ``tilestream bench approximate`` wrote; ArgumentError where there is none."""
    return bars.suite_lines(lines, "approximate")


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """Every bar's verdict, about the full plan of the kind of device that wrote `lines`."""
    expected = plan(lines[0]["device_type"])
    return bars.judge(_bars(_speeds(lines)), expected, {Cell.of_line(line).key: line for line in lines})


def _speeds(lines: Sequence[Line]) -> _Speeds:
    return {(line["method"], line["seqlen"]): line for line in lines if line["part"] == "speed"}


def _bars(speeds: _Speeds) -> list[Bar[Cell]]:
    found = []
    for name in _APPROXIMATE:
        title = f"{METHODS[name].label} is no faster than exact attention up to {_LAST_EXACT} tokens, time over ours"
        found.append(Bar(title, 1.0, _pick(name, lambda seqlen: seqlen <= _LAST_EXACT), _over(speeds, REFERENCE)))
    for others, text in ((_APPROXIMATE, "every approximate method"), (_EXACT, "all exact attention")):
        title = f"block-sparse attention (butterfly) is faster than {text} at every length, time over its"
        value = _fastest_over(speeds, others)
        found.append(Bar(title, 1.0, _pick(_BUTTERFLY, lambda seqlen: True), value, wanted="more than"))
    for name, seqlen, limit in (("linformer", _LONG, _LINFORMER_RATIO), ("materialised", _STORED, _STORED_RATIO)):
        title = f"peak memory of {METHODS[name].label} over ours, {seqlen} tokens"
        found.append(Bar(title, limit, _pick(name, seqlen.__eq__), _memory_over(speeds)))
    return found


def _pick(name: str, at: Callable[[int], bool]) -> Callable[[Cell], bool]:
    return lambda cell: cell.part == "speed" and cell.method == name and at(cell.setting.seqlen)


def _over(speeds: _Speeds, name: str) -> Callable[[Line], float | None]:
    """The time of a line over that of `name` at the same length."""
    return lambda line: _ratio(line, speeds.get((name, line["seqlen"])), "both_ms")


def _fastest_over(speeds: _Speeds, names: Sequence[str]) -> Callable[[Line], float | None]:
    """The least time of `names`, of those that have one, over that of a line."""

    def value(line: Line) -> float | None:
        ratios = [_ratio(speeds.get((name, line["seqlen"])), line, "both_ms") for name in names]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    return value


def _memory_over(speeds: _Speeds) -> Callable[[Line], float | None]:
    return lambda line: _ratio(line, speeds.get((REFERENCE, line["seqlen"])), "peak_memory_bytes")


def _ratio(one: Line | None, other: Line | None, name: str) -> float | None:
    if one is None or other is None:
        return None
    above, below = number(one, name), number(other, name)
    return None if above is None or not below else above / below


def times_of(lines: Sequence[Line], name: str, field: str = "both_ms") -> dict[int, float]:
    """The numbers of a method by length, where it has one."""
    found = {line["seqlen"]: number(line, field) for line in lines if (line["part"], line["method"]) == ("speed", name)}
    return {seqlen: value for seqlen, value in sorted(found.items()) if value is not None}


def crossover(times: Mapping[int, float], reference: Mapping[int, float]) -> int | None:
    """The first measured length from which on `times` are below the reference's, at every length that both have."""
    shared = sorted(set(times) & set(reference))
    first = None
    for seqlen in reversed(shared):
        if times[seqlen] >= reference[seqlen]:
            break
        first = seqlen
    return first


def crossing(times: Mapping[int, float], reference: Mapping[int, float]) -> tuple[float, float] | None:
    """(tokens, ms) where the lines of a picture with logarithmic axes cross for the last time, before `crossover`."""
    after = crossover(times, reference)
    before = max((seqlen for seqlen in set(times) & set(reference) if after and seqlen < after), default=None)
    if after is None or before is None:
        return None
    gaps = [math.log(times[seqlen] / reference[seqlen]) for seqlen in (before, after)]
    share = gaps[0] / (gaps[0] - gaps[1])

    def between(low: float, high: float) -> float:
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))

    return between(before, after), between(times[before], times[after])


# ---- tables


def bars_table(lines: Sequence[Line]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


def part_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """Titles and tables: time beside error, then forwards, backwards, memory, and what each method was run with."""
    tables = [("Forward and backward, ms, and what is given up", _main_table(lines))]
    for field, title in (("forward_ms", "Forward, ms"), ("backward_ms", "Backward, ms")):
        tables.append((title, _length_table(lines, field, _milliseconds)))
    title = "Peak memory of forward and backward, inputs, outputs and gradients included"
    tables.append((title, _length_table(lines, "peak_memory_bytes", _bytes)))
    tables.append(("Error of out against exact attention, layer by layer", _error_table(lines)))
    return [*tables, ("What was run", _method_table(lines))]


def _milliseconds(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def _lengths(lines: Sequence[Line]) -> list[int]:
    return sorted({line["seqlen"] for line in lines if line["part"] == "speed"})


def _names(lines: Sequence[Line], part: str) -> list[str]:
    found = {line["method"] for line in lines if line["part"] == part}
    return [name for name in METHODS if name in found]


def _models(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["model"] for line in lines if line["part"] == "error"))


def _main_table(lines: Sequence[Line]) -> Table:
    """Times by length, the crossovers, and the median and the largest error over layers of each model."""
    lengths, models = _lengths(lines), _models(lines)
    references = [times_of(lines, name) for name in (REFERENCE, PLAIN)]
    errors = {(line["method"], line["model"]): line for line in lines if line["part"] == "error"}
    rows = []
    for name in _names(lines, "speed") or _names(lines, "error"):
        times = times_of(lines, name)
        row = [METHODS[name].label, *(_shown(times, seqlen, _milliseconds) for seqlen in lengths)]
        for reference in references:
            first = None if METHODS[name].kind == "exact" else crossover(times, reference)
            row.append(MISSING if first is None else f"{first}")
        row += [_error_text(errors.get((name, model))) for model in models]
        rows.append(tuple(row))
    columns = ("faster than exact from", "than exact without dropout and padding from")
    headers = ("", *map(str, lengths), *columns, *(f"error, {model}" for model in models))
    return Table(headers, rows)


def _error_text(line: Line | None) -> str:
    if line is None or line["error_p50"] is None:
        return MISSING
    return f"{line['error_p50']:.2g} ({line['error_worst']:.2g})"


def _length_table(lines: Sequence[Line], field: str, show: Callable[[float], str]) -> Table:
    lengths = _lengths(lines)
    rows = []
    for name in _names(lines, "speed"):
        values = times_of(lines, name, field)
        rows.append((METHODS[name].label, *(_shown(values, seqlen, show) for seqlen in lengths)))
    return Table(("", *map(str, lengths)), rows)


def _shown(values: Mapping[int, float], seqlen: int, show: Callable[[float], str]) -> str:
    return show(values[seqlen]) if seqlen in values else MISSING


def _error_table(lines: Sequence[Line]) -> Table:
    rows: list[tuple[str, ...]] = []
    for line in lines:
        if line["part"] != "error" or not line["layers"]:
            continue
        errors = ", ".join(f"{one['error']:.2g}" for one in line["layers"])
        worst_head = max(one["worst_head"] for one in line["layers"])
        hidden = number(line, "hidden_mass_p50")
        rows.append((
            METHODS[line["method"]].label, f"{line['model']}, {line['seqlen']} tokens", errors, f"{worst_head:.2g}",
            MISSING if hidden is None else f"{hidden:.1%}",
        ))  # fmt: skip
    return Table(("", "states", "error of each layer", "worst head", "attention outside of what it looks at"), rows)


def _method_table(lines: Sequence[Line]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name in _names(lines, "speed"):
        own = [line for line in lines if line["part"] == "speed" and line["method"] == name]
        run = [line for line in own if line["dropout"] is not None]
        texts = [_distinct(run, field) for field in ("source", "dropout", "padding")]
        rows.append((METHODS[name].label, *texts, "; ".join(_details(run)) or MISSING))
    return Table(("", "source", "dropout", "padding mask", "settings"), rows)


def _distinct(lines: Sequence[Line], field: str) -> str:
    return distinct(lines, field) if lines else MISSING


def _details(lines: Sequence[Line]) -> list[str]:
    """Those of the longest length that was run."""
    found = []
    for key, value in (lines[-1]["details"] if lines else {}).items():
        if key == "density":
            found.append(f"keeps {value:.2g} of the blocks of {lines[-1]['seqlen']} tokens")
        else:
            found.append(str(value) if key == "note" else f"{key.replace('_', ' ')} {value}")
    return found


def reasons(lines: Sequence[Line]) -> list[str]:
    """Who has no number, and why, or misses the bound of the gate; what several lengths share once, with the first."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        if line["status"] != "ok":
            key = (METHODS[line["method"]].label, line["status"], str(line["reason"]).partition(", and ")[0])
            key = key if line["status"] != "out of memory" else (*key[:2], "")
            places.setdefault(key, []).append(line["model"] or f"{line['seqlen']} tokens")
    for line in lines:
        if line["status"] == "ok" and line.get("gate_reason"):
            key = (METHODS[line["method"]].label, "misses our bound on errors", "")
            places.setdefault(key, []).append(f"{line['seqlen']} tokens")
    return [
        f"{label}, {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {status}"
        + (f" ({reason})" if reason else "")
        for (label, status, reason), where in places.items()
    ]


def machine_text(lines: Sequence[Line]) -> str:
    """Where, when and with what the lines were measured."""
    loads = [line["load_average"] for line in lines if line["load_average"] is not None]
    load = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads and lines[0]["device_type"] == "cpu" else ""
    threads = f", threads {distinct(lines, 'num_threads')}" if lines[0]["device_type"] == "cpu" else ""
    return (
        f"{distinct(lines, 'device')}{threads}, torch {distinct(lines, 'torch')}, Triton {distinct(lines, 'triton')},"
        f" commit {distinct(lines, 'commit')}, {lines[0]['date']}{load}"
    )


def markdown_report(lines: Sequence[Line]) -> str:
    """The claims, then the tables, then why some have no number."""
    settings = [line["config"] for line in lines if line["part"] == "speed"]
    parts = [f"Measured on {machine_text(lines)}.", markdown_table(bars_table(lines))]
    if settings:
        one = settings[0]
        parts.append(
            f"Batch {one['batch']}, {one['num_heads']} heads, head_dim {one['head_dim']}, {one['dtype']},"
            f" bidirectional, dropout {one['dropout_p']}, sequences that end up to 20 tokens early; columns are"
            " lengths. Medians of training steps, whose forward and backward are timed in one. `-`: no number, for a"
            " reason below."
        )
    if _models(lines):
        parts.append(
            "Errors are those of out, ||found - exact|| / ||exact|| over all heads: the median of the layers, and the"
            " worst of them in brackets. Zeros would have an error of 1."
        )
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in part_tables(lines) if table.rows]
    if found := reasons(lines):
        parts.append("Without a number, or with a caveat:\n\n" + "\n".join(f"- {reason}" for reason in found))
    return "\n\n".join(parts)
