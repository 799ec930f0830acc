"""The bar of what a forward moves through HBM, judged from the lines of ``tilestream bench traffic``, and its table."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.bench import bars
from tilestream.bench.bars import Bar, Verdict, distinct, number
from tilestream.bench.gpu_bars import machine_text, reasons
from tilestream.bench.gpu_cells import Cell, traffic_plan
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_bytes, markdown_table

__all__ = ["bars_table", "judge", "markdown_report", "part_tables"]

_OVER_LEAST = 1.15


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """The bar's verdict."""
    return bars.judge(_bars(), traffic_plan(), {Cell.of_line(line).key: line for line in lines})


def _bars() -> list[Bar[Cell]]:
    name = "HBM traffic over the least there can be, forward of GPT-2 medium, each cell"
    return [
        Bar(
            name, _OVER_LEAST, lambda cell: not cell.is_layer, lambda line: number(line, "over_least"), wanted="at most"
        )
    ]


def bars_table(lines: Sequence[Line]) -> Table:
    """What is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


def part_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """The title and the table of all cells."""
    rows: list[tuple[str, ...]] = []
    for line in lines:
        over = number(line, "over_least")
        rows.append((
            str(Cell.of_line(line)),
            *(format_bytes(line[name]) for name in ("read_bytes", "written_bytes", "moved_bytes", "bytes_least")),
            bars.MISSING if over is None else f"{over:.3f}",
            format_bytes(line["bytes_model"]), str(len(line["kernels"])),
        ))  # fmt: skip
    headers = ("", "read", "written", "moved", "least", "moved over least", "model of the tile loop", "kernels")
    return [(f"HBM traffic of {distinct(lines, 'provider')}", Table(headers, rows))]


def markdown_report(lines: Sequence[Line]) -> str:
    """The bar, then every cell, then why some have no number."""
    parts = [f"Measured on {machine_text(lines)}.", markdown_table(bars_table(lines))]
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in part_tables(lines)]
    if found := reasons(lines):
        parts.append("Without a number:\n\n" + "\n".join(f"- {reason}" for reason in found))
    return "\n\n".join(parts)
