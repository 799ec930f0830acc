"""The patterns: for each, which blocks are kept and which pairs of them are visible. Arguments are validated before.

Nothing here has seqlen_q x seqlen_k entries: a row of blocks is a few runs, or the kinds of a few rows at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.block_mask import checks
from tilestream.block_mask.lists import EMPTY, FULL, OR, PARTIAL, UNSETTLED, BlockLists, cut_rows
from tilestream.block_mask.rules import (
    Banded,
    Bits,
    Documents,
    Either,
    Fixed,
    InBlocks,
    Predicate,
    Rule,
    Tokens,
    Within,
)
from tilestream.spec import Band
from tilestream.tiles import key_tile_ranges

__all__ = [
    "Grid",
    "band_lists",
    "bigbird_lists",
    "butterfly_lists",
    "count_pairs",
    "documents",
    "fixed_lists",
    "grid_of",
    "local_global",
    "packed",
    "periodic_lists",
    "prefix_lists",
    "settle",
    "whole_lists",
]

# Pairs that are evaluated together.
_PAIRS_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Grid:
    """How a mask is cut into blocks, and where its queries stand: query i meets key ``i + shift`` on the diagonal."""

    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int
    shift: int = 0

    @property
    def num_rows(self) -> int:
        return -(-self.seqlen_q // self.block_m)

    @property
    def num_columns(self) -> int:
        return -(-self.seqlen_k // self.block_n)

    @property
    def block_size(self) -> tuple[int, int]:
        return self.block_m, self.block_n

    def rows(self) -> Iterator[tuple[int, int]]:
        """The queries [m_start, m_end) of every row of blocks."""
        for m_start in range(0, self.seqlen_q, self.block_m):
            yield m_start, min(m_start + self.block_m, self.seqlen_q)

    @property
    def transposed(self) -> Grid:
        return Grid(self.seqlen_k, self.seqlen_q, self.block_n, self.block_m, -self.shift)


def grid_of(seqlen_q: int, seqlen_k: int | None, block_size: int | tuple[int, int], shift: int | None) -> Grid:
    """Of the arguments that every maker of masks has; the ends are aligned where no shift is given."""
    lengths = checks.seqlens(seqlen_q, seqlen_k)
    shift = lengths[1] - lengths[0] if shift is None else checks.shift(shift)
    return Grid(*lengths, *checks.block_shape(block_size, lengths), shift)


def whole_lists(grid: Grid, kind: int = FULL, num_planes: int = 1) -> BlockLists:
    """Every block of this kind."""
    runs = [(0, grid.num_columns, kind)] if grid.num_columns else []
    return BlockLists.from_runs(grid.num_columns, (runs for _ in range(num_planes * grid.num_rows)))


def band_lists(grid: Grid, band: Band) -> BlockLists:
    """Of a band: the three ranges of `tiles.key_tile_ranges`, row by row."""

    def runs(m_start: int, m_end: int) -> list[tuple[int, int, int]]:
        ranges = key_tile_ranges(band, grid.shift, m_start, m_end, grid.seqlen_k, grid.block_n)
        return [
            (ranges.lo, ranges.full_lo, PARTIAL),
            (ranges.full_lo, ranges.full_hi, FULL),
            (ranges.full_hi, ranges.hi, PARTIAL),
        ]

    return BlockLists.from_runs(grid.num_columns, (runs(*row) for row in grid.rows()))


def document_lists(grid: Grid, ids_q: Tensor, ids_k: Tensor) -> BlockLists | None:
    """Of one plane's ids (seqlen,), if neither ever decreases; else None. O(tokens)."""
    if bool((ids_q[1:] < ids_q[:-1]).any()) or bool((ids_k[1:] < ids_k[:-1]).any()):
        return None
    documents = ids_q.unique_consecutive()
    q_start, q_end = (torch.searchsorted(ids_q, documents, right=right) for right in (False, True))
    k_start, k_end = (torch.searchsorted(ids_k, documents, right=right) for right in (False, True))
    is_seen = k_end > k_start
    q_start, q_end, k_start, k_end = (x[is_seen] for x in (q_start, q_end, k_start, k_end))
    # A line for every row of blocks that a document reaches into.
    first, last = q_start // grid.block_m, (q_end - 1) // grid.block_m
    document = torch.arange(len(first)).repeat_interleave(last - first + 1)
    within = torch.arange(len(document)) - (torch.cumsum(last - first + 1, 0) - (last - first + 1))[document]
    rows = first[document] + within
    covers_row = (q_start[document] <= rows * grid.block_m) & (
        q_end[document] >= ((rows + 1) * grid.block_m).clamp_max(grid.seqlen_q)
    )
    lo, hi = k_start[document] // grid.block_n, (k_end[document] - 1) // grid.block_n + 1
    full_lo = -(-k_start[document] // grid.block_n)
    full_hi = torch.where(k_end[document] == grid.seqlen_k, grid.num_columns, k_end[document] // grid.block_n)
    full_hi = torch.maximum(full_lo, full_hi)
    full_lo, full_hi = (torch.where(covers_row, x, hi) for x in (full_lo, full_hi))
    # Documents side by side in one row of blocks may share a block: a run begins where the one before has ended.
    base = rows * grid.num_columns
    ends = base + hi
    reached = torch.cat([torch.zeros(1, dtype=torch.int64), ends.cummax(0).values])[: len(ends)]
    runs = []
    for start, stop, kind in ((lo, full_lo, PARTIAL), (full_lo, full_hi, FULL), (full_hi, hi, PARTIAL)):
        start, stop = (torch.minimum(x, hi) for x in (start, stop))
        begin = torch.maximum(base + start, reached)
        runs.append((begin, torch.maximum(base + stop, begin), torch.full_like(begin, kind)))
    # Three runs a line, in order.
    interleaved = (torch.stack(parts, dim=1).flatten() for parts in zip(*runs, strict=True))
    return BlockLists.from_line(grid.num_rows, grid.num_columns, *interleaved)


def periodic_lists(grid: Grid, visible: Tensor) -> BlockLists:
    """Of a rule that looks at the distance j - (i + shift) alone: bool (seqlen_q + seqlen_k - 1,), upwards."""
    sums = torch.zeros(len(visible) + 1, dtype=torch.int32)
    torch.cumsum(visible, 0, dtype=torch.int32, out=sums[1:])

    def kinds(lowest: Tensor, num_distances: Tensor | int) -> Tensor:
        """Of blocks whose distances are `num_distances` from `lowest` on; both counted from the smallest."""
        end = (lowest + num_distances).clamp(0, len(visible))
        count = sums[end] - sums[lowest.clamp(0, len(visible))]
        return torch.where(count == 0, EMPTY, torch.where(count == num_distances, FULL, PARTIAL)).to(torch.int8)

    # Blocks at one distance from the diagonal have one kind, so that a row is a piece of the row before, shifted.
    known: dict[tuple[int, int], Tensor] = {}

    def row(m_start: int, m_end: int) -> Tensor:
        key = (m_end - m_start, m_start % grid.block_n)
        most = grid.num_rows * grid.block_m // grid.block_n + 1
        if key not in known:
            column = torch.arange(-most, grid.num_columns)
            lowest = column * grid.block_n - key[1] - (m_end - m_start - 1) + grid.seqlen_q - 1
            known[key] = kinds(lowest, grid.block_n + m_end - m_start - 1)
        first = most - m_start // grid.block_n
        return known[key][first : first + grid.num_columns]

    rows = list(grid.rows())
    n_start = (grid.num_columns - 1) * grid.block_n

    def piece(cut: slice) -> BlockLists:
        found = torch.stack([row(*spans) for spans in rows[cut]])
        if grid.num_columns:
            ends = torch.tensor([m_end for _, m_end in rows[cut]])
            lengths = torch.tensor([m_end - m_start for m_start, m_end in rows[cut]])
            # The last column of blocks may be narrower.
            lowest = n_start - (ends - 1) + grid.seqlen_q - 1
            found[:, -1] = kinds(lowest, grid.seqlen_k - n_start + lengths - 1)
        return BlockLists.from_kinds(found)

    return BlockLists.stack(grid.num_columns, map(piece, cut_rows(grid.num_rows, grid.num_columns)))


def fixed_lists(grid: Grid, rule: Fixed) -> BlockLists:
    """The fixed pattern: a query's own part of `stride` keys, and summary keys before; UNSETTLED at a part's edges."""
    stride = rule.stride
    own = _key_kinds(grid, rule.is_summary(torch.arange(grid.seqlen_k, dtype=torch.int32)))
    columns = torch.arange(grid.num_columns, dtype=torch.int32)
    limits = []
    for m_start, m_end in grid.rows():
        first, last = m_start + grid.shift, m_end - 1 + grid.shift
        # Keys before `lo` are in no query's own part; those of [full_lo, full_hi) are in all queries' part and come
        # before all of them; blocks from `full_hi` on hold a query's own key, and one behind the first query's.
        lo = max(0, first // stride * stride) // grid.block_n
        full_lo = max(0, -(-(last // stride * stride) // grid.block_n))
        full_hi = grid.num_columns if first + 1 >= grid.seqlen_k else max(0, (first + 1) // grid.block_n)
        hi = max(0, min(grid.num_columns, last // grid.block_n + 1))
        limits.append((lo, full_lo if first >= last // stride * stride else hi, full_hi, hi))
    of_row = torch.tensor(limits, dtype=torch.int32).reshape(-1, 4)

    def piece(cut: slice) -> BlockLists:
        lo, full_lo, full_hi, hi = of_row[cut].t()[..., None]
        kinds = torch.where(columns < lo, own, UNSETTLED)
        kinds.masked_fill_((columns >= full_lo) & (columns < full_hi), FULL)
        kinds.masked_fill_(columns >= full_hi, PARTIAL).masked_fill_(columns >= hi, EMPTY)
        return BlockLists.from_kinds(kinds)

    return BlockLists.stack(grid.num_columns, map(piece, cut_rows(grid.num_rows, grid.num_columns)))


def _key_kinds(grid: Grid, keys: Tensor) -> Tensor:
    """int8 (columns,): blocks with none, some or all of the chosen keys."""
    padded = torch.zeros(grid.num_columns * grid.block_n, dtype=torch.bool)
    padded[: grid.seqlen_k] = keys
    some = padded.view(-1, grid.block_n).any(1)
    padded[grid.seqlen_k :] = True
    every = padded.view(-1, grid.block_n).all(1)
    return torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)).to(torch.int8)


def token_lists(grid: Grid, queries: Tensor, keys: Tensor) -> BlockLists:
    """Chosen queries see everything and chosen keys are seen by all; few of both."""
    columns, rows = _key_kinds(grid, keys), _key_kinds(grid.transposed, queries)
    # Where a block has some of the queries, it is FULL if it has all of the keys, and PARTIAL if not.
    of_kind = {EMPTY: columns, PARTIAL: columns.clamp_min(PARTIAL), FULL: torch.full_like(columns, FULL)}
    runs = {kind: BlockLists.from_kinds(of_row[None]).row(0) for kind, of_row in of_kind.items()}
    return BlockLists.from_runs(grid.num_columns, (runs[kind] for kind in rows.tolist()))


def prefix_lists(grid: Grid, length: int) -> BlockLists:
    """The first `length` keys of every row."""
    length = min(length, grid.seqlen_k)
    full = grid.num_columns if length == grid.seqlen_k else length // grid.block_n
    runs = [(0, full, FULL), (full, -(-length // grid.block_n), PARTIAL)]
    return BlockLists.from_runs(grid.num_columns, (runs for _ in range(grid.num_rows)))


def bigbird_lists(grid: Grid, counts: Sequence[int], seed: int) -> BlockLists:
    """Of (num_window, num_global, num_random): blocks within the first number of the diagonal, as many first rows and
    columns as the second says, and random ones besides."""
    num_window, num_global, num_random = counts
    generator = random.Random(seed)

    def runs(m: int, m_start: int, m_end: int) -> list[tuple[int, int, int]]:
        if m < num_global:
            return [(0, grid.num_columns, FULL)]
        few = min(num_global, grid.num_columns)
        lo = min(max(few, (m_start + grid.shift) // grid.block_n - num_window), grid.num_columns)
        hi = min(max(lo, (m_end - 1 + grid.shift) // grid.block_n + num_window + 1), grid.num_columns)
        others = few + hi - lo
        # The others in order, without those that are kept already.
        drawn = generator.sample(range(grid.num_columns - others), min(num_random, grid.num_columns - others))
        singles = [few + place if few + place < lo else place + others for place in drawn]
        kept = sorted([*singles, *range(few), *range(lo, hi)])
        return [(column, column + 1, FULL) for column in kept]

    return BlockLists.from_runs(grid.num_columns, (runs(m, *row) for m, row in enumerate(grid.rows())))


def butterfly_lists(grid: Grid) -> BlockLists:
    """Squares of the larger block side: kept where the numbers of row and column differ in one binary digit or none."""
    side = max(grid.block_size)
    wide = side // grid.block_n
    num_squares = -(-grid.seqlen_k // side)
    digits = max(1, (max(grid.seqlen_q + grid.shift, grid.seqlen_k) // side + 1).bit_length())

    def runs(m_start: int) -> list[tuple[int, int, int]]:
        square = (m_start + grid.shift) // side
        squares = sorted({square, *(square ^ (1 << digit) for digit in range(digits))})
        kept = [n for n in squares if 0 <= n < num_squares]
        return [(n * wide, min((n + 1) * wide, grid.num_columns), FULL) for n in kept]

    return BlockLists.from_runs(grid.num_columns, (runs(m_start) for m_start, _ in grid.rows()))


def settle(grid: Grid, planes: tuple[int, int], lists: BlockLists, rule: Rule) -> BlockLists:
    """`lists` with every UNSETTLED block looked at, pair by pair."""

    def decide(places: Tensor) -> Tensor:
        kinds = [_counted_kinds(grid, planes, some, rule) for some in _cut(places, grid)]
        return torch.cat(kinds)

    return lists.settle(decide)


def count_pairs(grid: Grid, planes: tuple[int, int], lists: BlockLists, rule: Rule) -> int:
    """Visible pairs of all planes."""
    heights = torch.full((grid.num_rows,), grid.block_m).repeat(planes[0] * planes[1])
    heights[grid.num_rows - 1 :: max(1, grid.num_rows)] -= grid.num_rows * grid.block_m - grid.seqlen_q
    ends = (lists.stops.to(torch.int64) * grid.block_n).clamp_max(grid.seqlen_k)
    pairs = heights.repeat_interleave(lists.offsets.diff()) * (ends - lists.starts * grid.block_n)
    total = int(pairs[lists.kinds == FULL].sum())
    for places in lists.blocks(PARTIAL):
        for some in _cut(places, grid):
            visible, exists = pairs_of(grid, planes, some, rule)
            total += int((visible & exists).sum())
    return total


def packed(grid: Grid, planes: tuple[int, int], dense: Tensor) -> tuple[BlockLists, Rule]:
    """Of bool (batch, heads, seqlen_q, seqlen_k): the lists, and the bits of PARTIAL blocks."""
    look_up = Predicate(lambda b, h, i, j: dense[b, h, i, j], True, True)
    lists = settle(grid, planes, whole_lists(grid, UNSETTLED, planes[0] * planes[1]), look_up)
    blocks = InBlocks(lists, planes, grid.block_size)
    places = torch.cat([torch.empty(0, dtype=torch.int64), *lists.blocks(PARTIAL)])
    if not len(places):
        return lists, blocks
    bits = [_bytes_of(pairs_of(grid, planes, some, look_up)[0]) for some in _cut(places, grid)]
    return lists, Within(blocks, Bits(blocks, places, torch.cat(bits)))


def _bytes_of(pairs: Tensor) -> Tensor:
    """uint8 (K, bytes) of bool (K, block_m, block_n), eight pairs a byte, the first in the lowest bit."""
    flat = pairs.flatten(1)
    padded = torch.zeros(len(flat), -(-flat.shape[1] // 8) * 8, dtype=torch.uint8)
    padded[:, : flat.shape[1]] = flat
    return (padded.view(len(flat), -1, 8) << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)


def _cut(places: Tensor, grid: Grid) -> Iterator[Tensor]:
    return iter(places.split(max(1, _PAIRS_AT_ONCE // (grid.block_m * grid.block_n))))


def _counted_kinds(grid: Grid, planes: tuple[int, int], places: Tensor, rule: Rule) -> Tensor:
    visible, exists = pairs_of(grid, planes, places, rule)
    some = (visible & exists).flatten(1).any(1)
    every = (visible | ~exists).flatten(1).all(1)
    return torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY)).to(torch.int8)


def pairs_of(grid: Grid, planes: tuple[int, int], places: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """bool (K, block_m, block_n): which pairs of the blocks at these places are visible, and which exist."""
    rows, column = places // max(1, grid.num_columns), places % max(1, grid.num_columns)
    plane, row = rows // max(1, grid.num_rows), rows % max(1, grid.num_rows)
    i = (row * grid.block_m)[:, None, None] + torch.arange(grid.block_m)[:, None]
    j = (column * grid.block_n)[:, None, None] + torch.arange(grid.block_n)
    exists = (i < grid.seqlen_q) & (j < grid.seqlen_k)
    b, h = ((plane // planes[1])[:, None, None], (plane % planes[1])[:, None, None])
    # Rules are asked about pairs that exist.
    i, j = i.clamp_max(grid.seqlen_q - 1), j.clamp_max(grid.seqlen_k - 1)
    return rule(b, h, i, j).expand(exists.shape), exists


def local_global(grid: Grid, band: Band, keys: Tensor) -> tuple[BlockLists, Rule]:
    """Longformer: a band, and chosen tokens, bool (seqlen_k,), that see everything and are seen by all."""
    place = torch.arange(grid.seqlen_q) + grid.shift
    is_inside = (place >= 0) & (place < grid.seqlen_k)
    queries = torch.zeros(grid.seqlen_q, dtype=torch.bool)
    queries[is_inside] = keys[place[is_inside]]
    lists = band_lists(grid, band).combine(token_lists(grid, queries, keys), OR)
    return lists, Either(Banded(band, grid.shift), Tokens(queries[None], keys[None]))


def documents(grid: Grid, ids_q: Tensor, ids_k: Tensor) -> tuple[BlockLists, Documents]:
    """The lists of all batch entries' ids (B | 1, seqlen), UNSETTLED where ids are in no order."""
    parts = []
    for b in range(max(len(ids_q), len(ids_k))):
        lists = document_lists(grid, ids_q[b % len(ids_q)], ids_k[b % len(ids_k)])
        parts.append(whole_lists(grid, UNSETTLED) if lists is None else lists)
    return BlockLists.stack(grid.num_columns, parts), Documents(ids_q, ids_k)
