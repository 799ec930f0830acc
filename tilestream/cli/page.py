"""The page of ``tilestream report``: one HTML file of lines, figures and the tile viewer, which needs no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from tilestream.bench import viewer
from tilestream.bench.figures import Drawing
from tilestream.bench.gpu_cells import Cell
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_count, format_threads, measurement_table

__all__ = ["page"]

_NOTHING = "-"
# Who runs an algorithm of the models here.
_RUNS = {"standard": "materialised", "tilestream": "tilestream"}
_SLOT = re.compile(r"\{\{([a-z_]+)\}\}")


def page(lines: Sequence[Line], drawings: Sequence[Drawing]) -> str:
    """The whole document.

    Args:
        lines: of `page_suite`, and of ``bench traffic`` or ``traffic --measure``, at least one.
        drawings: the figures of these lines.
    """
    parts = {
        "css": _data("report.css"),
        "script": _data("viewer.js"),
        "machine": html.escape(_machine(lines)),
        "tokens": str(viewer.TOKENS),
        "head_dim": str(viewer.HEAD_DIM),
        "choices": _choices(),
        "sections": "\n".join(_sections(lines, drawings)),
        "data": json.dumps(viewer.viewer_data(), separators=(",", ":")),
    }
    return _SLOT.sub(lambda slot: parts[slot[1]], _data("report.html"))


def _data(name: str) -> str:
    return (resources.files("tilestream.cli") / "data" / name).read_text(encoding="utf-8")


def _choices() -> str:
    """The viewer's lists."""
    sizes = {str(size): str(size) for size in viewer.BLOCK_SIZES}
    lists: tuple[tuple[str, str, dict[str, str], str], ...] = (
        ("direction", "direction", {name: name for name in viewer.DIRECTIONS}, "forward"),
        ("mask", "mask", {name: mask.label for name, mask in viewer.MASKS.items()}, "causal"),
        ("block-m", "queries of a tile", sizes, "16"),
        ("block-n", "keys of a tile", sizes, "16"),
    )
    found = []
    for name, label, options, chosen in lists:
        entries = "".join(
            f'<option value="{value}"{" selected" if value == chosen else ""}>{html.escape(text)}</option>'
            for value, text in options.items()
        )
        found.append(f'<label for="{name}">{label}<select id="{name}">{entries}</select></label>')
    return "\n".join(found)


def _sections(lines: Sequence[Line], drawings: Sequence[Drawing]) -> list[str]:
    found = []
    if (setting := _setting_table(lines)) is not None:
        title, table = setting
        found.append(_section("FLOP, bytes and time", f"<p class=soft>{html.escape(title)}</p>{_table(table)}"))
    if moved := [line for line in lines if line.get("suite") in ("traffic", "misses")]:
        found.append(_section("Measured traffic", _moved_tables(moved)))
    for drawing in drawings:
        found.append(_section(drawing.title, _figure(drawing) + _details(lines, drawing)))
    return found


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{body}\n</section>"


def _figure(drawing: Drawing) -> str:
    label = html.escape(f"{drawing.title}. {drawing.description}", quote=True)
    svg = drawing.svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return (
        f'<figure id="figure-{drawing.name}">{svg}<figcaption>{html.escape(drawing.description)}</figcaption></figure>'
    )


def _details(lines: Sequence[Line], drawing: Drawing) -> str:
    """The numbers of a figure, for whoever cannot see it or wants them exactly."""
    own = [line for line in lines if line.get("part") == drawing.name]
    if drawing.name == "roofline":
        own = [line for line in lines if line.get("part") in ("lengths", "setting")]
        table = _roofline_table(own)
    elif drawing.name == "kept":
        rows: list[tuple[str, ...]] = [
            (f"{line['kept_fraction']:.1%}", *(_gigabytes(line[name]) for name in ("bytes_model", "bytes_standard")))
            for line in own
        ]
        table = Table(("blocks kept", "tilestream (model)", "standard attention (model)"), rows)
    else:
        table = _measured(measurement_table(own))
    return f"<details><summary>The numbers</summary>{_table(table)}</details>"


def _measured(table: Table) -> Table:
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


def _setting_table(lines: Sequence[Line]) -> tuple[str, Table] | None:
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


def _run_cells(line: Line | None) -> tuple[str, str]:
    """Time and memory of a run, and whose it was."""
    if line is None or line["ms_p50"] is None:
        return _NOTHING, _NOTHING
    return f"{line['ms_p50']:.4g} ms ({line['provider']})", _gigabytes(line["extra_memory_bytes"])


def _moved_tables(lines: Sequence[Line]) -> str:
    """A table for each call and each way of measuring."""
    by_call: dict[str, list[Line]] = {}
    for line in lines:
        cache = line.get("cache_bytes")
        how = line.get("measured_by", "ncu") + ("" if cache is None else f" of {_gigabytes(cache)}")
        cell = Cell.of_line({**line, "part": line.get("part", ""), "needs_grad": False})
        by_call.setdefault(f"{cell}; measured by {how} on {line['device']}", []).append(line)
    names = ("read_bytes", "written_bytes", "moved_bytes", "bytes_model", "bytes_cached_model", "bytes_least")
    headers = (
        "", "read (measured)", "written (measured)", "moved (measured)", "moved (model)", "behind a cache (model)",
        "least (model)",
    )  # fmt: skip
    found = []
    for call, own in by_call.items():
        rows: list[tuple[str, ...]] = [
            (line["provider"], *(_gigabytes(line.get(name)) for name in names)) for line in own
        ]
        found.append(f"<p class=soft>{html.escape(call)}.</p>{_table(Table(headers, rows))}")
    return "\n".join(found)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(header)}</th>' for header in table.headers)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    # Reached by keyboard, because it may be wider than the page.
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="Table"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _machine(lines: Sequence[Line]) -> str:
    """Device, threads, versions, commit and date of the lines; each that differs stands once."""
    facts: list[str] = []
    for line in lines:
        threads = f", {format_threads(line['num_threads'])}" if line["device_type"] == "cpu" else ""
        facts.append(
            f"{line['device']}{threads}, torch {line['torch']}, {line['platform']}, tilestream {line['commit']}"
        )
    first, last = min(line["date"] for line in lines), max(line["date"] for line in lines)
    when = first if first == last else f"{first} to {last}"
    return f"{'; '.join(dict.fromkeys(facts))}; {when}"


def _gigabytes(count: Any) -> str:
    return _NOTHING if count is None else f"{format_count(count)}B"
