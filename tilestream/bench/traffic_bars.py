"""The bars of what calls move through HBM, judged from the lines of ``tilestream bench traffic``, and their tables."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.bench import bars
from tilestream.bench.bars import Bar, Verdict, distinct, number
from tilestream.bench.gpu_bars import machine_text, reasons
from tilestream.bench.gpu_cells import Cell, traffic_plan
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_bytes, format_count, markdown_table

__all__ = ["bars_table", "judge", "markdown_report", "off_the_model", "part_tables", "training_table"]

_OVER_LEAST = 1.15
# Measured bytes over those of the model, off by at most: of operators that store scores, and of our kernels.
_EAGER_OFF, _OURS_OFF = 0.03, 0.15


def judge(lines: Sequence[Line]) -> list[Verdict[Cell]]:
    """The verdicts of the bars."""
    return bars.judge(_bars(), traffic_plan(), {Cell.of_line(line).key: line for line in lines})


def _bars() -> list[Bar[Cell]]:
    name = "HBM traffic over the least there can be, forward of GPT-2 medium, each cell"
    least: Bar[Cell] = Bar(
        name, _OVER_LEAST, lambda cell: cell.part == "traffic" and not cell.is_layer,
        lambda line: number(line, "over_least"), wanted="at most",
    )  # fmt: skip
    off = "HBM traffic of GPT-2 medium forward and backward, off the model's"
    return [
        least,
        Bar(
            f"{off}, eager", _EAGER_OFF, lambda cell: cell.provider == "eager",
            off_the_model, wanted="at most", unit="%",
        ),
        Bar(
            f"{off} behind a cache, tilestream", _OURS_OFF, lambda cell: str(cell.provider).startswith("tilestream"),
            off_the_model, wanted="at most", unit="%",
        ),
    ]  # fmt: skip


def off_the_model(line: Line) -> float | None:
    """How far what was measured is from the model, either way."""
    over = number(line, "over_cached_model")
    return None if over is None else abs(over - 1)


def bars_table(lines: Sequence[Line]) -> Table:
    """What is wanted, what was measured, whether that is met, and the worst cell."""
    return bars.bars_table(judge(lines))


def part_tables(lines: Sequence[Line]) -> list[tuple[str, Table]]:
    """The title and the table of forwards, and of forwards with backwards; those that there are."""
    forwards = [line for line in lines if line["part"] == "traffic"]
    trainings = [line for line in lines if line["part"] == "training"]
    tables = []
    if forwards:
        tables.append((f"HBM traffic of {distinct(forwards, 'provider')}", _forward_table(forwards)))
    if trainings:
        tables.append(("HBM traffic of forward and backward", training_table(trainings)))
    return tables


def _forward_table(lines: Sequence[Line]) -> Table:
    headers = ("", "read", "written", "moved", "least", "moved over least", "model of the tile loop", "kernels")
    rows: list[tuple[str, ...]] = [
        (
            str(Cell.of_line(line)),
            *(format_bytes(line[name]) for name in ("read_bytes", "written_bytes", "moved_bytes", "bytes_least")),
            _ratio(line, "over_least"), format_bytes(line["bytes_model"]), str(len(line["kernels"])),
        )
        for line in lines
    ]  # fmt: skip
    return Table(headers, rows)


def training_table(lines: Sequence[Line]) -> Table:
    """Decimal units, as the paper prints them."""
    headers = (
        "", "provider", "read (measured)", "written (measured)", "moved (measured)", "model", "model behind a cache",
        "moved over that", "least (model)", "moved over least", "kernels",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for line in lines:
        rows.append((
            str(Cell.of_line(line)), line["provider"],
            *(_gigabytes(line[name]) for name in ("read_bytes", "written_bytes", "moved_bytes")),
            *(_gigabytes(line[name]) for name in ("bytes_model", "bytes_cached_model")),
            _ratio(line, "over_cached_model"), _gigabytes(line["bytes_least"]), _ratio(line, "over_least"),
            str(len(line["kernels"])),
        ))  # fmt: skip
    return Table(headers, rows)


def _gigabytes(count: int | None) -> str:
    return bars.MISSING if count is None else f"{format_count(count)}B"


def _ratio(line: Line, name: str) -> str:
    over = number(line, name)
    return bars.MISSING if over is None else f"{over:.3f}"


def markdown_report(lines: Sequence[Line]) -> str:
    """The bars, then every cell, then why some have no number."""
    parts = [f"Measured on {machine_text(lines)}.", markdown_table(bars_table(lines))]
    parts += [f"{title}:\n\n{markdown_table(table)}" for title, table in part_tables(lines)]
    if found := reasons(lines):
        parts.append("Without a number:\n\n" + "\n".join(f"- {reason}" for reason in found))
    return "\n\n".join(parts)
