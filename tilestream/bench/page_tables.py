"""The tables of ``tilestream report``: every header says whether its numbers are of the model or measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilestream.bench.gpu_cells import Cell
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_count, measurement_table

__all__ = ["figure_table", "moved_tables", "setting_table"]

_NOTHING = "-"
# Who runs an algorithm of the models here.
_RUNS = {"standard": "materialised", "tilestream": "tilestream"}


def setting_table(lines: Sequence[Line]) -> tuple[str, Table] | None:
    """Figure 2, left: one call, every algorithm, and how long the ones that are here took."""
    models = [line for line in lines if line.get("part") == "setting_model" and line["reason"] is None]
    timed = [line for line in lines if line.get("part") == "setting"]
    if not models:
        return None
    by_provider = {line["provider"]: line for line in timed}
    runs = {line["algorithm"]: by_provider.pop(_RUNS.get(line["algorithm"], ""), None) for line in models}
    rows: list[tuple[str, ...]] = [
        (
            line["algorithm"], f"{format_count(line['flops'])}FLOP",
            *(_gigabytes(line[name]) for name in ("read_bytes", "written_bytes", "bytes_model", "extra_memory_bytes")),
            *_run_cells(runs[line["algorithm"]]),
        )
        for line in models
    ]  # fmt: skip
    rows += [(f"{name} (not modelled)", *[_NOTHING] * 5, *_run_cells(line)) for name, line in by_provider.items()]
    headers = (
        "", "FLOP (model)", "read (model)", "written (model)", "moved (model)", "extra memory (model)",
        "time (measured)", "extra memory (measured)",
    )  # fmt: skip
    case, first = models[0]["config"], models[0]
    mask = "causal" if case["causal"] else "full"
    title = (
        f"{mask} attention forward and backward: batch {case['batch']}, {case['seqlen_q']} tokens,"
        f" {case['num_heads_q']} heads, head_dim {case['head_dim']}, {case['dtype']}. Fast memory of the models:"
        f" {_gigabytes(first['fast_memory_bytes'])} ({first['fast_memory_source']})."
    )
    return title, Table(headers, rows)


def moved_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """What was measured to cross: a title and a table for each call and each way of measuring."""
    by_call: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("suite") not in ("traffic", "misses"):
            continue
        cache = line.get("cache_bytes")
        how = line.get("measured_by", "ncu") + ("" if cache is None else f" of {_gigabytes(cache)}")
        cell = Cell.of_line({**line, "part": line.get("part", ""), "needs_grad": False})
        by_call.setdefault(f"{cell}; measured by {how} on {line['device']}", []).append(line)
    names = ("read_bytes", "written_bytes", "moved_bytes", "bytes_model", "bytes_cached_model", "bytes_least")
    headers = (
        "", "read (measured)", "written (measured)", "moved (measured)", "moved (model)", "behind a cache (model)",
        "least (model)",
    )  # fmt: skip
    return [
        (
            f"{call}.",
            Table(headers, [(line["provider"], *(_gigabytes(line.get(name)) for name in names)) for line in own]),
        )
        for call, own in by_call.items()
    ]


def figure_table(name: str, lines: Sequence[Line]) -> Table:
    """The numbers of the figure of that name."""
    if name == "roofline":
        return _roofline_table([line for line in lines if line.get("part") in ("lengths", "setting")])
    own = [line for line in lines if line.get("part") == name]
    if name != "kept":
        return _sourced(measurement_table(own))
    rows: list[tuple[str, ...]] = [
        (f"{line['kept_fraction']:.1%}", *(_gigabytes(line[size]) for size in ("bytes_model", "bytes_standard")))
        for line in own
    ]
    return Table(("blocks kept", "tilestream (model)", "standard attention (model)"), rows)


def _run_cells(line: Line | None) -> tuple[str, str]:
    """Time and memory of a run, and whose it was."""
    if line is None or line["ms_p50"] is None:
        return _NOTHING, _NOTHING
    return f"{line['ms_p50']:.4g} ms ({line['provider']})", _gigabytes(line["extra_memory_bytes"])


def _sourced(table: Table) -> Table:
    """The harness's table, with the source of each column in its header."""
    sources = {
        "ms (p20 to p80)": "measured", "TFLOP/s": "measured", "extra memory": "measured", "must move": "model",
        "error vs float64": "measured",
    }  # fmt: skip
    headers = (f"{header} ({sources[header]})" if header in sources else header for header in table.headers)
    return Table(tuple(headers), table.rows)


def _roofline_table(lines: Sequence[Line]) -> Table:
    rows: list[tuple[str, ...]] = []
    for line in lines:
        moved = line["bytes_model"]
        rows.append((
            line["case"], line["provider"],
            _NOTHING if moved is None else f"{line['flops'] / moved:.3g}", f"{line['flops'] / line['bytes_least']:.3g}",
            _NOTHING if line["tflops"] is None else f"{line['tflops']:.3g}",
        ))  # fmt: skip
    headers = ("case", "provider", "FLOP/byte (model)", "FLOP/byte at the least (model)", "TFLOP/s (measured)")
    return Table(headers, rows)


def _gigabytes(count: Any) -> str:
    return _NOTHING if count is None else f"{format_count(count)}B"
