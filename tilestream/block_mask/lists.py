"""Which blocks are kept: runs of blocks of one kind along each row, in compressed form, and their algebra.

A row is a row of blocks of one plane (a batch entry and head, or all of them); the rows of all planes stand one after
the other. Runs instead of single blocks: a causal mask of 1M tokens has 33 million blocks and 16 thousand runs.
Shapes: R rows of all planes, C columns of blocks, U runs.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.tiles import TileKind

__all__ = ["AND", "EMPTY", "FULL", "OR", "PARTIAL", "UNSETTLED", "BlockLists", "cut_rows"]

EMPTY, PARTIAL, FULL = (kind.value for kind in (TileKind.EMPTY, TileKind.PARTIAL, TileKind.FULL))
# PARTIAL in both operands of an algebra: only its pairs can say what it is. Never in a finished mask.
UNSETTLED = 3

# The kind of a block in the result, from those in the operands.
AND = torch.tensor([[0, 0, 0, 0], [0, 3, 1, 3], [0, 1, 2, 3], [0, 3, 3, 3]], dtype=torch.int8)
OR = torch.tensor([[0, 1, 2, 3], [1, 3, 2, 3], [2, 2, 2, 2], [3, 3, 2, 3]], dtype=torch.int8)

# Blocks that are looked at together: some temporaries of a byte each.
_BLOCKS_AT_ONCE = 1 << 18
_RUNS_AT_ONCE = 1 << 18


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Runs of kept blocks: run u covers the columns ``starts[u] : stops[u]`` of its row, all of kind ``kinds[u]``.

    Row r has the runs ``offsets[r] : offsets[r + 1]``, from left to right, and neighbours differ in kind. On the CPU.
    """

    num_columns: int
    offsets: Tensor  # (R + 1,) int64
    starts: Tensor  # (U,) int32
    stops: Tensor  # (U,) int32
    kinds: Tensor  # (U,) int8

    @property
    def num_rows(self) -> int:
        return self.offsets.shape[0] - 1

    @classmethod
    def from_line(cls, num_rows: int, num_columns: int, lo: Tensor, hi: Tensor, kinds: Tensor) -> BlockLists:
        """Of disjoint sorted intervals [lo, hi) on the line ``row * num_columns + column``, each within one row."""
        kept = (kinds != EMPTY) & (hi > lo)
        lo, hi, kinds = lo[kept], hi[kept], kinds[kept]
        rows = lo.div(max(1, num_columns), rounding_mode="floor")
        is_first = torch.ones(lo.shape, dtype=torch.bool)
        is_first[1:] = (lo[1:] != hi[:-1]) | (kinds[1:] != kinds[:-1]) | (rows[1:] != rows[:-1])
        is_last = torch.ones(lo.shape, dtype=torch.bool)
        is_last[:-1] = is_first[1:]
        rows = rows[is_first]
        starts = (lo[is_first] - rows * num_columns).to(torch.int32)
        stops = (hi[is_last] - rows * num_columns).to(torch.int32)
        return cls(num_columns, _offsets(rows, num_rows), starts, stops, kinds[is_first].to(torch.int8))

    @classmethod
    def from_runs(cls, num_columns: int, rows: Iterable[Iterable[tuple[int, int, int]]]) -> BlockLists:
        """Of (start, stop, kind) of every row, in order."""
        # Lists would take five times the memory.
        lo, hi, kinds = array("q"), array("q"), array("q")
        num_rows = 0
        for num_rows, runs in enumerate(rows, 1):
            first = (num_rows - 1) * num_columns
            for start, stop, kind in runs:
                lo.append(first + start)
                hi.append(first + stop)
                kinds.append(kind)
        line = (
            torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
            for numbers in (lo, hi, kinds)
        )
        return cls.from_line(num_rows, num_columns, *line)

    @classmethod
    def from_kinds(cls, kinds: Tensor) -> BlockLists:
        """Of the kind of every block, int8 (R, C)."""
        num_rows, num_columns = kinds.shape
        begins = torch.ones(num_rows, num_columns, dtype=torch.bool)
        begins[:, 1:] = kinds[:, 1:] != kinds[:, :-1]
        places = begins.view(-1).nonzero().squeeze(1)
        ends = torch.cat([places[1:], torch.tensor([num_rows * num_columns])]) if len(places) else places
        of_run = kinds.reshape(-1)[places]
        is_kept = of_run != EMPTY
        places, ends, of_run = places[is_kept], ends[is_kept], of_run[is_kept]
        rows = places.div(max(1, num_columns), rounding_mode="floor")
        first = rows * num_columns
        starts, stops = (places - first).to(torch.int32), (ends - first).to(torch.int32)
        return cls(num_columns, _offsets(rows, num_rows), starts, stops, of_run)

    @classmethod
    def from_points(cls, num_rows: int, num_columns: int, points: Tensor) -> BlockLists:
        """FULL blocks at these places of the line, in any order and as often as they like."""
        points = points.unique()
        return cls.from_line(num_rows, num_columns, points, points + 1, torch.full_like(points, FULL))

    @classmethod
    def stack(cls, num_columns: int, parts: Iterable[BlockLists]) -> BlockLists:
        """The rows of the parts, one part after the other."""
        pieces: list[list[Tensor]] = [
            [torch.empty(0, dtype=dtype)] for dtype in (torch.int64, torch.int32, torch.int32, torch.int8)
        ]
        for part in parts:
            for piece, tensor in zip(pieces, (part.offsets.diff(), part.starts, part.stops, part.kinds), strict=True):
                piece.append(tensor)
        joined = []
        for piece in pieces:
            joined.append(torch.cat(piece))
            # No more than one of the tensors is there twice.
            piece.clear()
        offsets = torch.zeros(len(joined[0]) + 1, dtype=torch.int64)
        torch.cumsum(joined[0], 0, out=offsets[1:])
        return cls(num_columns, offsets, *joined[1:])

    def cut(self, rows: slice) -> BlockLists:
        """These rows alone; shares memory."""
        lo, hi = self.offsets[[rows.start, rows.stop]].tolist()
        offsets = self.offsets[rows.start : rows.stop + 1] - lo
        return BlockLists(self.num_columns, offsets, self.starts[lo:hi], self.stops[lo:hi], self.kinds[lo:hi])

    def row(self, r: int) -> list[tuple[int, int, int]]:
        """(start, stop, kind) of the runs of one row, from left to right."""
        lo, hi = self.offsets[r : r + 2].tolist()
        columns = (numbers[lo:hi].tolist() for numbers in (self.starts, self.stops, self.kinds))
        return list(zip(*columns, strict=True))

    def select(self, rows: Tensor) -> BlockLists:
        """These rows (int64), in this order."""
        counts = self.offsets.diff()[rows]
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=offsets[1:])
        runs = torch.arange(int(offsets[-1])) + (self.offsets[:-1][rows] - offsets[:-1]).repeat_interleave(counts)
        return BlockLists(self.num_columns, offsets, self.starts[runs], self.stops[runs], self.kinds[runs])

    def num_blocks(self, kind: int) -> int:
        """How many blocks of this kind there are, EMPTY left out."""
        is_kind = self.kinds == kind
        return int((self.stops[is_kind].to(torch.int64) - self.starts[is_kind]).sum())

    @functools.cached_property
    def line(self) -> tuple[Tensor, Tensor]:
        """int64 (U,) starts and stops on the line ``row * num_columns + column``."""
        first = torch.arange(self.num_rows).repeat_interleave(self.offsets.diff()) * self.num_columns
        return first + self.starts, first + self.stops

    def kinds_at(self, points: Tensor) -> Tensor:
        """int8, the kinds of the blocks at these places of the line; shaped as `points`."""
        if not len(self.starts):
            return torch.zeros(points.shape, dtype=torch.int8, device=points.device)
        lo, hi = (x.to(points.device) for x in self.line)
        run = torch.searchsorted(lo, points, right=True) - 1
        inside = (run >= 0) & (points < hi[run.clamp_min(0)])
        return torch.where(inside, self.kinds.to(points.device)[run.clamp_min(0)], 0).to(torch.int8)

    def combine(self, other: BlockLists, table: Tensor) -> BlockLists:
        """Block by block what `table` (`AND` or `OR`) says. O(U log U)."""
        assert (self.num_rows, self.num_columns) == (other.num_rows, other.num_columns)
        # Between two neighbouring ends of runs nothing changes in either operand.
        points = torch.cat([*self.line, *other.line]).unique()
        if not len(points):
            return self
        ends = torch.cat([points[1:], points[-1:]])
        kinds = table[self.kinds_at(points).to(torch.int64), other.kinds_at(points).to(torch.int64)]
        return BlockLists.from_line(self.num_rows, self.num_columns, points, ends, kinds)

    def to_kinds(self, rows: slice, columns: slice | None = None) -> Tensor:
        """int8 (rows, columns), the kind of every block of these rows and columns."""
        columns = slice(0, self.num_columns) if columns is None else columns
        num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
        lo, hi = self.offsets[[rows.start, rows.stop]].tolist()
        counts = self.offsets[rows.start : rows.stop + 1].diff()
        first = torch.arange(num_rows).repeat_interleave(counts) * (num_columns + 1)
        changes = torch.zeros(num_rows * (num_columns + 1), dtype=torch.int8)
        for ends, kinds in ((self.starts, self.kinds[lo:hi]), (self.stops, -self.kinds[lo:hi])):
            places = (ends[lo:hi].to(torch.int64) - columns.start).clamp_(0, num_columns)
            changes.scatter_add_(0, places.add_(first), kinds)
        return changes.view(num_rows, num_columns + 1)[:, :num_columns].cumsum(1, dtype=torch.int8)

    def transposed(self, num_planes: int) -> BlockLists:
        """The runs along columns: row c of a plane is what its column c was. O(blocks) time, in pieces."""
        rows_of_plane = self.num_rows // max(1, num_planes)
        # Each piece looks at all runs, so that there may not be many pieces.
        step = max(1, _BLOCKS_AT_ONCE // max(1, rows_of_plane), self.num_columns // 16)

        def pieces() -> Iterator[BlockLists]:
            for plane in range(num_planes):
                rows = slice(plane * rows_of_plane, (plane + 1) * rows_of_plane)
                for start in range(0, self.num_columns, step):
                    columns = slice(start, min(start + step, self.num_columns))
                    yield BlockLists.from_kinds(self.to_kinds(rows, columns).t().contiguous())

        return BlockLists.stack(rows_of_plane, pieces())

    def blocks(self, kind: int) -> Iterator[Tensor]:
        """Places on the line of all blocks of this kind, int64, a piece at a time."""
        lo, hi = (x[self.kinds == kind] for x in self.line)
        lengths = hi - lo
        run = 0
        while run < len(lo):
            # As many runs as have few blocks together, but one at least.
            taken = max(1, int((lengths[run:].cumsum(0) <= _BLOCKS_AT_ONCE).sum()))
            part = slice(run, run + taken)
            first = lengths[part].cumsum(0) - lengths[part]
            places = torch.arange(int(lengths[part].sum())) + (lo[part] - first).repeat_interleave(lengths[part])
            yield places
            run += taken

    def settle(self, decide: Callable[[Tensor], Tensor]) -> BlockLists:
        """Every UNSETTLED block gets the kind that `decide` says: places on the line (int64) to kinds (int8)."""
        if not bool((self.kinds == UNSETTLED).any()):
            return self
        if len(self.starts) > _RUNS_AT_ONCE and self.num_rows > 1:
            step = max(1, self.num_rows * _RUNS_AT_ONCE // len(self.starts))
            pieces = [slice(start, min(start + step, self.num_rows)) for start in range(0, self.num_rows, step)]
            first = self.num_columns
            return BlockLists.stack(
                self.num_columns,
                (self.cut(rows)._settle(functools.partial(_decide_at, decide, rows.start * first)) for rows in pieces),
            )
        return self._settle(decide)

    def _settle(self, decide: Callable[[Tensor], Tensor]) -> BlockLists:
        places = list(self.blocks(UNSETTLED))
        kinds = [decide(some) for some in places]
        lo, hi = self.line
        settled = self.kinds != UNSETTLED
        lo = torch.cat([lo[settled], *places])
        hi = torch.cat([hi[settled], *(some + 1 for some in places)])
        order = lo.argsort()
        return BlockLists.from_line(
            self.num_rows, self.num_columns, lo[order], hi[order], torch.cat([self.kinds[settled], *kinds])[order]
        )


def cut_rows(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Rows in pieces of which every block can be looked at at once."""
    step = max(1, _BLOCKS_AT_ONCE // max(1, num_columns))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _offsets(rows: Tensor, num_rows: int) -> Tensor:
    """int64 (num_rows + 1,): where the runs of each row begin, from the sorted row of every run."""
    return torch.searchsorted(rows, torch.arange(num_rows + 1))


def _decide_at(decide: Callable[[Tensor], Tensor], first: int, places: Tensor) -> Tensor:
    """`decide`, of places that are counted from `first`."""
    return decide(places + first)
