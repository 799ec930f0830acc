"""The tables of ``tilestream traffic``; every header says whether its numbers are of the model, counted or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilestream.bench.measure import Line
from tilestream.bench.report import Table, format_count
from tilestream.io.compare import OURS, PUBLISHED, STANDARD, Algorithm, Direction, SweepPoint
from tilestream.io.cost import Cost, Traffic
from tilestream.io.theorems import optimal_range
from tilestream.problem import Problem

__all__ = [
    "DIRECTIONS",
    "Column",
    "by_size",
    "by_tensor",
    "columns_of",
    "optimal_lines",
    "passes_of_standard",
    "sizes_to_sweep",
    "summary",
]


class Column(NamedTuple):
    """One algorithm by one source of numbers."""

    header: str
    tiles: str
    cost: Cost


DIRECTIONS: dict[Direction, str] = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
_NOTHING = "-"
# Each size of fast memory is this many times the one before.
_SWEEP_FACTOR = 4
_MOST_SIZES = 10


def columns_of(found: Sequence[Algorithm], counted: Mapping[str, Cost]) -> list[Column]:
    """A column per algorithm and source of its numbers."""
    columns = []
    for algorithm in found:
        tiles = ", ".join(f"{block_m} x {block_n}" for block_m, block_n in algorithm.tiles)
        columns.append(Column(f"{algorithm.name} (model)", tiles or _NOTHING, algorithm.cost))
        if algorithm.name in counted:
            columns.append(Column(f"{algorithm.name} (counted)", tiles or _NOTHING, counted[algorithm.name]))
    return columns


def summary(columns: Sequence[Column], lines: Sequence[Line], fast_memory_bytes: int) -> Table:
    """What each moves, how far that is from compulsory, FLOPs, memory, tiles; `lines` are measurements."""
    least = columns[0].cost.traffic.total_bytes
    cells = [_summary_cells(column, least, fast_memory_bytes) for column in columns] + [
        _measured_cells(line, least) for line in lines
    ]
    names = (
        "tiles, queries x keys", "read", "written", "total", "total over compulsory", "FLOP", "FLOP/byte",
        "extra memory", "fast memory needed",
    )  # fmt: skip
    headers = ("", *(column.header for column in columns), *map(_measured_header, lines))
    return Table(headers, list(zip(names, *cells, strict=True)))


def _summary_cells(column: Column, least: int, fast_memory_bytes: int) -> tuple[str, ...]:
    cost, moved = column.cost, column.cost.traffic
    needed = _size(cost.fast_memory_bytes) if cost.fast_memory_bytes else _NOTHING
    if cost.fast_memory_bytes > fast_memory_bytes:
        needed += f" ({cost.fast_memory_bytes / fast_memory_bytes:.2g} M)"
    return (
        column.tiles,
        _size(moved.read_bytes),
        _size(moved.written_bytes),
        _size(moved.total_bytes),
        _over(moved.total_bytes, least),
        format_count(cost.flops).strip(),
        _NOTHING if cost.intensity is None else f"{cost.intensity:.3g}",
        _size(cost.extra_memory_bytes),
        needed,
    )


def _measured_header(line: Line) -> str:
    """Whose bytes, and in which cache they missed where that was simulated."""
    cache = line.get("cache_bytes")
    return f"{line['provider']} (measured{'' if cache is None else f', simulated cache of {_size(cache)}'})"


def _measured_cells(line: Line, least: int) -> tuple[str, ...]:
    """What was moved may be more than read and written: writes that the profiler did not see are added (docs)."""
    moved = tuple(_size(line[name]) for name in ("read_bytes", "written_bytes", "moved_bytes"))
    return (_NOTHING, *moved, _over(line["moved_bytes"], least), *[_NOTHING] * 4)


def by_tensor(columns: Sequence[Column]) -> Table:
    """A row per tensor that any of them touches."""
    names = dict.fromkeys(name for column in columns for name in column.cost.tensors)
    rows = [(name, *(_read_and_written(column.cost.tensors.get(name)) for column in columns)) for name in names]
    return Table(("", *(column.header for column in columns)), rows)


def passes_of_standard(found: Sequence[Algorithm]) -> Table:
    """A row per pass: what it reads and writes."""
    [standard] = [algorithm for algorithm in found if algorithm.name == STANDARD]
    rows: list[tuple[str, ...]] = []
    for one in standard.cost.passes:
        read = [f"{name} {_size(moved.read_bytes)}" for name, moved in one.tensors.items() if moved.read_bytes]
        written = [f"{name} {_size(moved.written_bytes)}" for name, moved in one.tensors.items() if moved.written_bytes]
        rows.append((one.name, ", ".join(read) or _NOTHING, ", ".join(written) or _NOTHING))
    return Table(("pass", "reads (model)", "writes (model)"), rows)


def by_size(points: Sequence[SweepPoint], least: int) -> Table:
    """A row per size of fast memory: how many times the compulsory bytes the tiled algorithms move."""

    rows: list[tuple[str, ...]] = [
        (_size(point.fast_memory_bytes), *(_over(moved, least) for moved in (point.published_bytes, point.ours_bytes)))
        for point in points
    ]
    return Table(("fast memory", *(f"{name}, over compulsory (model)" for name in (PUBLISHED, OURS))), rows)


def sizes_to_sweep(problem: Problem) -> list[int]:
    """Sizes of fast memory in bytes, from a few rows to more than all keys and values of a head."""
    least, _, most = optimal_range(problem.seqlen_k, problem.head_dim)
    sizes = [_SWEEP_FACTOR * most, most]
    while sizes[-1] >= _SWEEP_FACTOR * least and len(sizes) < _MOST_SIZES:
        sizes.append(sizes[-1] // _SWEEP_FACTOR)
    return [size * problem.dtype.itemsize for size in reversed(sizes)]


def optimal_lines(problem: Problem, fast_memory_bytes: int) -> list[str]:
    """Proposition 3 and what followed, in bytes, of one head of `problem` with at least one key."""
    element = problem.dtype.itemsize
    least, each_from, most = (size * element for size in optimal_range(problem.seqlen_k, problem.head_dim))
    place = "above" if fast_memory_bytes > most else "within" if fast_memory_bytes >= each_from else "below"
    numbers, size = f"{problem.seqlen_k} x {problem.head_dim} numbers, {_size(most)}", _size(fast_memory_bytes)
    return [
        f"K of one head is {numbers}. From a row, {_size(least)}, to that, no exact algorithm beats the tiled one",
        "at all sizes by more than a constant (arXiv:2205.14135, proposition 3), and from head_dim squared, "
        f"{_size(each_from)},",
        f"on at none (arXiv:2402.07443). M of {size} lies {place} {_size(each_from)} to {_size(most)}.",
    ]


def _read_and_written(traffic: Traffic | None) -> str:
    if traffic is None:
        return _NOTHING
    return f"{_size(traffic.read_bytes)} / {_size(traffic.written_bytes)}"


def _over(moved: int | None, least: int) -> str:
    return "does not fit" if moved is None else f"{moved / least:.3g}x" if least else _NOTHING


def _size(num_bytes: int) -> str:
    """Decimal units, as the papers print them."""
    return f"{format_count(num_bytes)}B" if num_bytes else "0"
