"""Bars: numbers that kernels must reach, judged from the lines of a suite alone.

A bar is met only by a full set of its cells: from part of them it can be missed, never met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from tilestream.bench.measure import Line
from tilestream.bench.report import Table
from tilestream.errors import ArgumentError

__all__ = ["MISSING", "Bar", "Cell", "Verdict", "bars_table", "distinct", "judge", "number", "suite_lines"]

# What a table shows where there is no number.
MISSING = "-"


class Cell(Protocol):
    """What a suite measures with one line."""

    @property
    def key(self) -> Hashable:
        """What names it, in the plan and in the lines."""
        ...


CellT = TypeVar("CellT", bound=Cell)


@dataclass(frozen=True)
class Bar(Generic[CellT]):
    """A number over the cells that it selects, and the limit that it must keep."""

    name: str
    limit: float
    selects: Callable[[CellT], bool]
    # The number of one line, or None where the line has none.
    value: Callable[[Line], float | None]
    combine: Literal["each", "geomean"] = "each"
    wanted: Literal["at least", "more than", "at most"] = "at least"
    unit: str = "x"

    def clears(self, value: float) -> bool:
        """Written so that a NaN does not."""
        if self.wanted == "more than":
            return value > self.limit
        return value >= self.limit if self.wanted == "at least" else value <= self.limit

    def show(self, value: float) -> str:
        """`value` with its unit."""
        if self.unit == "%":
            return f"{value:.1%}"
        return f"{value:.3g}{self.unit if self.unit == 'x' else f' {self.unit}'}"

    def badness(self, value: float) -> float:
        """Larger is worse; a NaN is worst."""
        if math.isnan(value):
            return math.inf
        return value if self.wanted == "at most" else -value


@dataclass(frozen=True)
class Verdict(Generic[CellT]):
    """What the lines say about a bar; `is_met` is None where they do not suffice."""

    bar: Bar[CellT]
    value: float | None
    is_met: bool | None
    num_measured: int
    num_cells: int
    worst: str | None

    @property
    def met(self) -> str:
        """The verdict in words."""
        if self.is_met is not None:
            return "yes" if self.is_met else "no"
        if self.num_measured == 0:
            return "not measured"
        return f"not measured in full: {self.num_measured} of {self.num_cells} cells"


# What the tables read of every line.
_OF_EVERY_LINE = ("config", "device", "torch", "commit", "date", "is_wrong")


def suite_lines(lines: Iterable[Line], suite: str) -> list[Line]:
    """Those of the lines that ``tilestream bench`` wrote for `suite`.

    Raises:
        ArgumentError: there is none.
    """
    found = [line for line in lines if isinstance(line, dict) and line.get("suite") == suite]
    if not found or any(name not in line for line in found for name in _OF_EVERY_LINE):
        raise ArgumentError(
            f"--from names a file without lines of `tilestream bench {suite}`, or with broken ones; write one with"
            " --output."
        )
    return found


def judge(
    bars: Sequence[Bar[CellT]], expected: Sequence[CellT], by_key: Mapping[Hashable, Line]
) -> list[Verdict[CellT]]:
    """Every bar's verdict about the `expected` cells, from the lines by the keys of their cells."""
    return [_verdict(bar, expected, by_key) for bar in bars]


def _verdict(bar: Bar[CellT], expected: Sequence[CellT], by_key: Mapping[Hashable, Line]) -> Verdict[CellT]:
    cells = [cell for cell in expected if bar.selects(cell)]
    known = [(cell, by_key[cell.key]) for cell in cells if cell.key in by_key]
    wrong = [cell for cell, line in known if line["is_wrong"]]
    values = [(value, cell) for cell, line in known if (value := bar.value(line)) is not None]
    if wrong:
        return Verdict(bar, None, False, len(values), len(cells), f"{wrong[0]}: wrong result")
    if not values:
        return Verdict(bar, None, None, 0, len(cells), None)
    worst, where = max(values, key=lambda pair: bar.badness(pair[0]))
    value = math.exp(sum(math.log(each) for each, _ in values) / len(values)) if bar.combine == "geomean" else worst
    is_full = len(values) == len(cells)
    is_met: bool | None = bar.clears(value)
    # One cell is enough to miss a bar that holds for each; nothing is enough but all to meet one.
    if not is_full and (is_met or bar.combine == "geomean"):
        is_met = None
    return Verdict(bar, value, is_met, len(values), len(cells), f"{where}: {bar.show(worst)}")


def bars_table(verdicts: Iterable[Verdict[CellT]]) -> Table:
    """One row per bar: what is wanted, what was measured, whether that is met, and the worst cell."""
    rows: list[tuple[str, ...]] = []
    for verdict in verdicts:
        bar = verdict.bar
        measured = MISSING if verdict.value is None else bar.show(verdict.value)
        wanted = f"{bar.wanted} {bar.show(bar.limit)}"
        rows.append((bar.name, wanted, measured, verdict.met, verdict.worst or MISSING))
    return Table(("bar", "wanted", "measured", "met", "worst cell"), rows)


def number(line: Line, name: str) -> float | None:
    """The number of that name, or None where the line has none."""
    value = line.get(name)
    return None if value is None else float(value)


def distinct(lines: Iterable[Line], name: str) -> str:
    """What the lines have under `name`, each value once."""
    return ", ".join(dict.fromkeys(str(line[name]) for line in lines))
