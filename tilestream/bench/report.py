"""Tables from the lines that `measure` yields; every number shown anywhere comes from such a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tilestream.bench.measure import Line

__all__ = [
    "Table",
    "format_bytes",
    "format_count",
    "format_threads",
    "json_line",
    "markdown_table",
    "measurement_table",
    "read_lines",
    "write_lines",
]

_MISSING = "-"


class Table(NamedTuple):
    """Headers, and rows of as many cells, all text."""

    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """One JSON object per line."""
    path.write_text("".join(map(json_line, lines)), encoding="utf-8")


def json_line(line: Line) -> str:
    """`line` as one line of text."""
    return json.dumps(line) + "\n"


def read_lines(path: Path) -> list[Line]:
    """The lines that `write_lines` wrote."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]


def measurement_table(lines: Sequence[Line]) -> Table:
    """One row per line: time, rate, memory beyond inputs and results, modelled traffic, error in out."""
    headers = (
        "case", "mode", "provider", "ms (p20 to p80)", "TFLOP/s", "extra memory", "must move", "error vs float64",
    )  # fmt: skip
    rows = []
    for line in lines:
        if line["ms_p50"] is None:
            rows.append((line["case"], line["mode"], line["provider"], f"no number: {line['reason']}", *[_MISSING] * 4))
            continue
        time = f"{line['ms_p50']:.4g} ({line['ms_p20']:.4g} to {line['ms_p80']:.4g})"
        cells = (
            f"{line['tflops']:.3g}",
            format_bytes(line["extra_memory_bytes"]),
            format_bytes(line["bytes_model"]),
            f"{line['error_vs_float64']:.1e}",
        )
        rows.append((line["case"], line["mode"], line["provider"], time, *cells))
    return Table(headers, rows)


def markdown_table(table: Table) -> str:
    """A GitHub table, first column left, the others as they come."""
    lines = [table.headers, tuple("---" for _ in table.headers), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def format_bytes(count: int | None) -> str:
    """Three digits and a binary unit; `-` where there is no number."""
    if count is None:
        return _MISSING
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


def format_threads(count: int) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count} thread{'' if count == 1 else 's'}"


def format_count(count: int) -> str:
    """Three digits, a space and a decimal prefix, ready for a unit."""
    size, prefixes = float(count), ["", "K", "M", "G", "T", "P", "E"]
    while size >= 999.5 and len(prefixes) > 1:
        size, prefixes = size / 1000, prefixes[1:]
    return f"{size:.3g} {prefixes[0]}"
