"""Which tiles a program of a call with a block mask visits: those of a list, where others visit a range.

With a mask every query head has row tiles of its own (``facts.group`` is 1 and ``Sequence.head_kv`` is a query head,
of which `kv_share` read one KV head), because masks may differ from head to head. A row of tiles has a span of the
list: those that need the mask first, each kind from left to right (`block_lists.py`). An entry is a place in the list.

In dense calls the lists have the band in them. In packed ones, whose sequences have a band each, a span is cut to what
the sequence's band and lengths leave of it, and the band is in the mask of its tiles.

Shapes: spans (row tiles, 8): its row, [first, last) in the list, how many of those need the mask, the column of the
first, and nothing; tiles (T + 1, 2): its column, and a pattern or -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilestream.backends.triton.tiles import Sequence, is_partial, locate, tile_index

__all__ = [
    "Visits",
    "entry_at",
    "entry_of",
    "first_visit",
    "needs_mask",
    "of_head",
    "place",
    "steps_of",
    "visit",
    "visits_of",
]

# Entries of a list that are looked at together.
_AT_ONCE = tl.constexpr(128)


class Visits(NamedTuple):
    """Entries [first, first + count) of the list, of which the first `num_masked` need the mask, and the others lie
    `jump` further."""

    first: Any
    count: Any
    num_masked: Any
    jump: Any


@triton.jit
def place(program, tensors, numbers, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """(sequence, tile, span, split) of a program: `tile_index`, `locate`, and the row's span of the list."""
    if facts.has_blocks:
        rank, head, batch = _ranked(program, numbers, facts, BY_KEYS)
        split = rank * 0
    else:
        rank, head, batch, split = tile_index(program, numbers, facts)
    sequence, tile = locate(rank, _first_head(head, facts, BY_KEYS), batch, tensors, numbers, facts, BY_KEYS)
    span = rank, rank, rank, rank
    if facts.has_blocks:
        tile, first, last, num_masked, column = _span_at(tile, sequence, tensors, numbers, facts, BY_KEYS)
        span = first, last, num_masked, column
    return sequence, tile, span, split


@triton.jit
def _first_head(head, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """The first of the query heads of a program."""
    if BY_KEYS:
        return head * facts.kv_share
    else:
        return head


@triton.jit
def _ranked(program, numbers, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """(rank, head, batch): rows that are far longer than most first, of all heads; then head after head, so that
    neighbours share K and V in the caches. In packed calls, whose batch is 0, as `tile_index`."""
    heads = numbers.num_heads_kv
    if BY_KEYS:
        heads = heads // facts.kv_share
    sides = heads
    if not facts.is_varlen:
        sides = heads * numbers.batch
    num_long = numbers.num_long
    rest = program - num_long * sides
    others = tl.maximum(numbers.num_tiles - num_long, 1)
    rank = tl.where(rest < 0, program // sides, num_long + rest % others)
    side = tl.where(rest < 0, program % sides, rest // others)
    if facts.starts_last:
        rank = numbers.num_tiles - 1 - rank
    return rank, side % heads, side // heads


@triton.jit
def _span_at(tile, sequence, tensors, numbers, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """(tile, first, last, num_masked, first column) of the row of that rank; ranks are tiles in packed calls."""
    spans = tensors.row_spans
    head = sequence.head_kv
    if BY_KEYS:
        spans = tensors.key_spans
        head = head // facts.kv_share
    # Tokens after the last sequence, and sequences that are longer than the mask, have no list.
    is_listed = (sequence.batch < numbers.batch) & (tile < numbers.list_rows)
    strides = numbers.list_strides
    row = sequence.batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + tile
    spans += row * 8
    first = tl.load(spans + 1, is_listed, other=0)
    last = tl.load(spans + 2, is_listed, other=0)
    num_masked = tl.load(spans + 3, is_listed, other=0)
    column = tl.load(spans + 4, is_listed, other=0)
    if not facts.is_varlen:
        tile = tl.load(spans)
    return tile, first, last, num_masked, column


@triton.jit
def visits_of(span, ranges, tensors, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """`Visits` of a span of the list; only of tiles that `ranges` shows, where those know more than the list."""
    first, last, num_masked, _column_of_first = span
    if facts.has_blocks and facts.is_varlen:
        return _cut(first, last, first + num_masked, ranges, tensors, facts, BY_KEYS)
    else:
        return Visits(first, last - first, num_masked, first * 0)


@triton.jit
def _cut(first, last, middle, ranges, tensors, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """`visits_of` in packed calls, of a span whose entries before `middle` need the mask."""
    LENGTH: tl.constexpr = facts.list_m if BY_KEYS else facts.list_n
    n = tl.arange(0, _AT_ONCE)
    masked_before = tl.full([_AT_ONCE], 0, tl.int32)
    masked_inside = masked_before
    others_before = masked_before
    others_inside = masked_before
    for entry in tl.range(first, last, _AT_ONCE):
        is_entry, is_masked = entry + n < last, entry + n < middle
        start = _start_of(_column(entry + n, is_entry, tensors, BY_KEYS), facts, BY_KEYS)
        is_before = start + LENGTH <= ranges.lo
        is_inside = is_entry & (start < ranges.hi) & (~is_before)
        is_before = is_entry & is_before
        masked_before += (is_before & is_masked).to(tl.int32)
        masked_inside += (is_inside & is_masked).to(tl.int32)
        others_before += (is_before & (~is_masked)).to(tl.int32)
        others_inside += (is_inside & (~is_masked)).to(tl.int32)
    num_masked = tl.sum(masked_inside, 0)
    first = first + tl.sum(masked_before, 0)
    jump = middle + tl.sum(others_before, 0) - first - num_masked
    return Visits(first, num_masked + tl.sum(others_inside, 0), num_masked, jump)


@triton.jit
def _column(entry, is_entry, tensors, BY_KEYS: tl.constexpr):
    """The columns of entries (N), 0 where it is none."""
    if BY_KEYS:
        return tl.load(tensors.key_tiles + entry.to(tl.int64) * 2, is_entry, other=0)
    else:
        return tl.load(tensors.row_tiles + entry.to(tl.int64) * 2, is_entry, other=0)


@triton.jit
def _start_of(column, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """First row or key of a column. Those of rows are of all heads of a group, tile by tile."""
    if BY_KEYS:
        return column // facts.kv_share * facts.list_m
    else:
        return column * facts.list_n


@triton.jit
def steps_of(ranges, visits, numbers, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """[first, end) of the loop over a program's tiles: starts of tiles, or with a block mask numbers of visits.

    A tile of the list is several of a kernel with smaller tiles, and every query head of a group has its own visits,
    also where all have one list.
    """
    if facts.has_blocks and BY_KEYS:
        return visits.count * 0, visits.count * (numbers.list_repeats * (facts.list_m // facts.block_m))
    elif facts.has_blocks:
        return visits.count * 0, visits.count * (facts.list_n // facts.block_n)
    else:
        return ranges.lo, ranges.hi


@triton.jit
def _place_of(step, visits, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """(place in the visits, how often the list was gone through before, part of the tile) of a step."""
    PARTS: tl.constexpr = facts.list_m // facts.block_m if BY_KEYS else facts.list_n // facts.block_n
    at, repeat = step // PARTS, step * 0
    if BY_KEYS and facts.kv_share > 1:
        count = tl.maximum(visits.count, 1)
        repeat = at // count
        at = at % count
    return at, repeat, step % PARTS


@triton.jit
def entry_of(step, visits, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """The entry of a step."""
    at, _repeat, _part = _place_of(step, visits, facts, BY_KEYS)
    if facts.is_varlen:
        at += tl.where(at >= visits.num_masked, visits.jump, 0)
    return visits.first + at


@triton.jit
def visit(step, visits, tensors, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """(start, head of the group) of a step; of the step after the last one those of another entry, or of none.

    Loops ask for the next step's a step ahead: an address that waits for another is a load that nothing hides. No load
    is masked: behind the last entry there is one more.
    """
    _at, repeat, part = _place_of(step, visits, facts, BY_KEYS)
    entry = entry_of(step, visits, facts, BY_KEYS)
    if BY_KEYS:
        column = tl.load(tensors.key_tiles + entry.to(tl.int64) * 2)
        return _start_of(column, facts, BY_KEYS) + part * facts.block_m, column % facts.kv_share + repeat
    else:
        column = tl.load(tensors.row_tiles + entry.to(tl.int64) * 2)
        return _start_of(column, facts, BY_KEYS) + part * facts.block_n, repeat


@triton.jit
def first_visit(span, visits, tensors, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """`visit` of the first step, of a kernel whose tiles are the list's: in dense calls the span has it, which is one
    load fewer to wait for before the first keys."""
    if facts.is_varlen:
        return visit(visits.count * 0, visits, tensors, facts, BY_KEYS)
    else:
        _first, _last, _num_masked, column = span
        start = _start_of(column, facts, BY_KEYS)
        if BY_KEYS:
            return start, column % facts.kv_share
        else:
            return start, column * 0


@triton.jit
def needs_mask(start, step, visits, ranges, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """Whether a tile needs the mask. Keys beyond the last do, rows beyond the last do not: see `query_ranges`.

    In dense calls an entry's place says it, so that nothing has to be loaded or kept for tiles that are FULL.
    """
    if facts.has_blocks:
        at, _repeat, _part = _place_of(step, visits, facts, BY_KEYS)
        if facts.is_varlen and (facts.is_band or not BY_KEYS):
            return (at < visits.num_masked) | is_partial(start, ranges)
        else:
            return at < visits.num_masked
    else:
        return is_partial(start, ranges)


@triton.jit
def of_head(sequence, head):
    """The sequence, of the query head that is so many further."""
    return Sequence(
        sequence.batch, sequence.head_kv + head, sequence.q_start, sequence.k_start, sequence.seqlen_q,
        sequence.seqlen_k, sequence.shift, sequence.left_edge, sequence.right_edge,
    )  # fmt: skip


@triton.jit
def entry_at(m_start, n_start, sequence, tensors, numbers, facts: tl.constexpr):
    """The entry of a tile by rows, or -1 if it is EMPTY. Spans are in order of rows here."""
    _tile, first, last, _masked, _column_of_first = _span_at(
        m_start // facts.list_m, sequence, tensors, numbers, facts, False
    )
    n = tl.arange(0, _AT_ONCE)
    found = tl.full([_AT_ONCE], 0, tl.int32)
    for entry in tl.range(first, last, _AT_ONCE):
        start = _start_of(_column(entry + n, entry + n < last, tensors, False), facts, False)
        found += tl.where((entry + n < last) & (start == n_start), entry + n + 1, 0)
    return tl.sum(found, 0) - 1
