"""Where a program's tiles lie: which rows and keys, of which sequence and KV head, and which of them the band shows.

The rows of a KV head are packed: row r is query ``r // group`` of query head ``head_kv * group + r % group``, so that
GQA is more rows and K and V are read once per group. The device twin of `tilestream.tiles`.

Shapes: M packed rows of a tile; N keys of a tile; D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    "Ranges",
    "Sequence",
    "is_partial",
    "key_offsets",
    "key_pointers",
    "key_ranges",
    "load_keys",
    "load_tile",
    "locate",
    "next_row_offsets",
    "numbers_at",
    "padded_keys",
    "padded_rows",
    "padded_rows_of_head",
    "query_ranges",
    "row_heads",
    "row_lse",
    "row_offsets",
    "row_pointers",
    "sequence_of",
    "tile_index",
]


class Sequence(NamedTuple):
    """One sequence (of a dense call: one batch entry) and one KV head of it."""

    batch: Any
    head_kv: Any  # with a block mask a query head: see `visits.py`
    q_start: Any  # first token in the packed tensors; 0 in dense ones
    k_start: Any
    seqlen_q: Any
    seqlen_k: Any
    shift: Any
    # Key j is visible to query i iff i + left_edge <= j <= i + right_edge.
    left_edge: Any
    right_edge: Any


class Ranges(NamedTuple):
    """Starts of tiles: PARTIAL in [lo, full_lo) and [full_hi, hi), FULL in [full_lo, full_hi)."""

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


@triton.jit
def tile_index(program, numbers, facts: tl.constexpr):
    """(tile, head_kv, batch, split) of a program: tiles fastest, so that neighbours share K and V in the caches.

    Packed calls have one row of tiles over all sequences, so batch is 0.
    """
    split = 0
    if facts.has_splits:
        split = program // numbers.num_programs
        program = program % numbers.num_programs
    tile = program % numbers.num_tiles
    rest = program // numbers.num_tiles
    # With a right edge the last rows see most keys: longest first, so that the short ones fill the end.
    if facts.starts_last:
        tile = numbers.num_tiles - 1 - tile
    return tile, rest % numbers.num_heads_kv, rest // numbers.num_heads_kv, split


@triton.jit
def _search(cu_seqlens, total, tile, num_sequences, num_steps, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr):
    """The sequence b of a packed call's tile, and the tile's index within it.

    Sequence b owns the tiles from ``cu_seqlens[b] * PER_TOKEN // BLOCK + b`` on: never fewer than it needs, at most one
    more, and no host has to know the lengths. The tokens after the last sequence are sequence ``num_sequences``.
    """
    low = tile * 0
    high = low + num_sequences
    for _ in range(num_steps):
        middle = (low + high + 1) // 2
        start = tl.load(cu_seqlens + middle)
        is_at_or_before = tl.minimum(tl.maximum(start, 0), total) * PER_TOKEN // BLOCK + middle <= tile
        low = tl.where(is_at_or_before, middle, low)
        high = tl.where(is_at_or_before, high, middle - 1)
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + low), 0), total)
    index = tile - (start * PER_TOKEN // BLOCK + low)
    # A first entry that is not 0 leaves tiles that are of no sequence: they lie beyond the rows of any.
    return low, tl.where(index < 0, 2**30 // BLOCK, index)


@triton.jit
def _bounds(cu_seqlens, sequence, num_sequences, total):
    """First token and length of a sequence, within the tensor whatever cu_seqlens holds."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), total)
    stop = tl.load(cu_seqlens + sequence + 1, sequence < num_sequences, other=total)
    # Clamped at both ends, as the start is: the difference of other numbers could overflow.
    return start, tl.maximum(tl.minimum(tl.maximum(stop, 0), total) - start, 0)


@triton.jit
def sequence_of(batch, head_kv, tensors, numbers, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """A batch entry or packed sequence; sequence ``num_sequences`` is the tokens after the last one."""
    if facts.is_varlen:
        q_start, seqlen_q = _bounds(tensors.cu_seqlens_q, batch, numbers.batch, numbers.total_q)
        k_start, seqlen_k = _bounds(tensors.cu_seqlens_k, batch, numbers.batch, numbers.total_k)
        # The tokens after the last sequence see nothing and are seen by nothing.
        is_sequence = batch < numbers.batch
        if BY_KEYS:
            seqlen_q = tl.where(is_sequence, seqlen_q, 0)
        else:
            seqlen_k = tl.where(is_sequence, seqlen_k, 0)
        shift = seqlen_k - seqlen_q
        return Sequence(
            batch, head_kv, q_start, k_start, seqlen_q, seqlen_k, shift, shift - numbers.left, shift + numbers.right
        )
    else:
        zero = head_kv * 0
        return Sequence(
            batch, head_kv, zero, zero, numbers.seqlen_q, numbers.seqlen_k, numbers.shift, numbers.left_edge,
            numbers.right_edge,
        )  # fmt: skip


@triton.jit
def locate(tile, head_kv, batch, tensors, numbers, facts: tl.constexpr, BY_KEYS: tl.constexpr):
    """The `Sequence` of a tile (of keys: BY_KEYS, else of rows), and the tile's index within it."""
    if facts.is_varlen:
        if BY_KEYS:
            batch, tile = _search(
                tensors.cu_seqlens_k,
                numbers.total_k,
                tile,
                numbers.batch,
                numbers.num_steps,
                facts.block_n * facts.num_slices,
                1,
            )
        else:
            batch, tile = _search(
                tensors.cu_seqlens_q,
                numbers.total_q,
                tile,
                numbers.batch,
                numbers.num_steps,
                facts.block_m,
                facts.group,
            )
    return sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS), tile


@triton.jit
def key_ranges(m_start, sequence, facts: tl.constexpr):
    """The keys that the rows from `m_start` on visit. A tile cut short by seqlen_k is PARTIAL here."""
    first = m_start // facts.group
    last = tl.minimum(m_start + facts.block_m, sequence.seqlen_q * facts.group)
    last = (last - 1) // facts.group
    lo = 0
    hi = sequence.seqlen_k
    full_lo = 0
    full_hi = sequence.seqlen_k
    if facts.has_left:
        lo = tl.maximum(first + sequence.left_edge, 0)
        full_lo = tl.maximum(last + sequence.left_edge, 0)
    if facts.has_right:
        hi = tl.minimum(last + sequence.right_edge + 1, hi)
        full_hi = tl.minimum(first + sequence.right_edge + 1, full_hi)
    return _whole_tiles(lo, full_lo, full_hi, hi, facts.block_n)


@triton.jit
def query_ranges(n_start, sequence, facts: tl.constexpr):
    """The packed rows that see the keys from `n_start` on; the transpose of `key_ranges`.

    Tiles cut short by a length are FULL here: rows that are none have P = 0, and what keys that are none collect is
    not stored.
    """
    last = tl.minimum(n_start + facts.block_n, sequence.seqlen_k) - 1
    lo = 0
    hi = sequence.seqlen_q
    full_lo = 0
    if facts.has_right:
        lo = tl.maximum(n_start - sequence.right_edge, 0)
        full_lo = tl.maximum(last - sequence.right_edge, 0)
    if facts.has_left:
        hi = tl.minimum(last - sequence.left_edge + 1, hi)
        full_hi = tl.minimum(n_start - sequence.left_edge + 1, hi)
    else:
        full_hi = (hi * facts.group + facts.block_m - 1) // facts.block_m * facts.block_m
        return _whole_tiles(lo * facts.group, full_lo * facts.group, full_hi, hi * facts.group, facts.block_m)
    return _whole_tiles(lo * facts.group, full_lo * facts.group, full_hi * facts.group, hi * facts.group, facts.block_m)


@triton.jit
def _whole_tiles(lo, full_lo, full_hi, hi, BLOCK: tl.constexpr):
    """Element bounds as starts of tiles, in order and not beyond each other."""
    hi = tl.where(lo < hi, (hi + BLOCK - 1) // BLOCK * BLOCK, 0)
    lo = lo // BLOCK * BLOCK
    hi = tl.maximum(hi, lo)
    full_lo = tl.minimum(tl.maximum((full_lo + BLOCK - 1) // BLOCK * BLOCK, lo), hi)
    full_hi = tl.minimum(tl.maximum(tl.maximum(full_hi, 0) // BLOCK * BLOCK, full_lo), hi)
    return Ranges(lo, full_lo, full_hi, hi)


@triton.jit
def is_partial(start, ranges):
    """Whether the tile at `start` needs the mask.

    A branch in one loop, not a loop for each range: where a sum goes from one loop to the next, ptxas (CUDA 12.8) waits
    for every single matrix product of both (its note C7515).
    """
    return (start < ranges.full_lo) | (start >= ranges.full_hi)


@triton.jit
def row_heads(rows, sequence, facts: tl.constexpr):
    """(query, query head) of packed rows."""
    return rows // facts.group, sequence.head_kv * facts.group + rows % facts.group


@triton.jit
def row_offsets(rows, sequence, strides, facts: tl.constexpr):
    """Element offsets of packed rows in a tensor with query heads; `strides` of batch, token and head, in units."""
    i, head = row_heads(rows, sequence, facts)
    token = (sequence.q_start + i).to(tl.int64)
    offsets = (token * strides[1] + head.to(tl.int64) * strides[2]) * facts.unit
    if not facts.is_varlen:
        offsets += sequence.batch.to(tl.int64) * strides[0] * facts.unit
    return offsets


@triton.jit
def next_row_offsets(first_offsets, rows, m_start, head, sequence, strides, facts: tl.constexpr):
    """`row_offsets` of the tile at `m_start`, from those of the tile at 0 where whole groups fill a tile.

    Args:
        head: how many query heads further than those are, where each has row tiles of its own.
    """
    if facts.kv_share > 1:
        step = m_start * strides[1].to(tl.int64) + head * strides[2].to(tl.int64)
        return first_offsets + step * facts.unit
    elif facts.block_m % facts.group == 0:
        return first_offsets + (m_start // facts.group) * (strides[1].to(tl.int64) * facts.unit)
    else:
        return row_offsets(rows, sequence, strides, facts)


@triton.jit
def key_offsets(j, sequence, strides, facts: tl.constexpr):
    """Element offsets of keys in a tensor with KV heads; `strides` as in `row_offsets`."""
    token = (sequence.k_start + j).to(tl.int64)
    head = sequence.head_kv
    if facts.kv_share > 1:
        head = head // facts.kv_share
    offsets = (token * strides[1] + head.to(tl.int64) * strides[2]) * facts.unit
    if not facts.is_varlen:
        offsets += sequence.batch.to(tl.int64) * strides[0] * facts.unit
    return offsets


@triton.jit
def numbers_at(rows, sequence, numbers, facts: tl.constexpr):
    """Offsets of packed rows in lse and its kin: (batch, heads, seqlen_q), or (heads, total_q)."""
    i, head = row_heads(rows, sequence, facts)
    if facts.is_varlen:
        return head.to(tl.int64) * numbers.total_q + sequence.q_start + i
    head = sequence.batch.to(tl.int64) * (numbers.num_heads_kv * facts.group) + head
    return head * numbers.seqlen_q + i


@triton.jit
def key_pointers(base, sequence, strides, facts: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the first tile of a sequence's keys, which `load_keys` moves on."""
    n, columns = tl.arange(0, facts.block_n), tl.arange(0, BLOCK)
    return base + key_offsets(n, sequence, strides, facts)[:, None] + columns[None, :]


@triton.jit
def load_keys(pointers, n_start, sequence, strides, facts: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of keys from `n_start` on; 0 beyond the sequence and beyond WIDTH."""
    inside = n_start + tl.arange(0, facts.block_n) < sequence.seqlen_k
    step = n_start * (strides[1].to(tl.int64) * facts.unit)
    return load_tile(pointers + step, inside, tl.arange(0, BLOCK), WIDTH, BLOCK)


@triton.jit
def row_pointers(base, rows, sequence, strides, facts: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to packed rows."""
    return base + row_offsets(rows, sequence, strides, facts)[:, None] + tl.arange(0, BLOCK)[None, :]


@triton.jit
def row_lse(rows, rows_inside, sequence, tensors, numbers, facts: tl.constexpr):
    """lse of packed rows in units of log 2; +inf, so that every P is 0, where a row sees no key or is none."""
    places = numbers_at(rows, sequence, numbers, facts)
    lse_log2 = tl.load(tensors.lse + places, rows_inside, other=float("inf")) * 1.4426950408889634
    return tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)


@triton.jit
def padded_rows(sequence, numbers, facts: tl.constexpr):
    """Where a sequence's packed rows start in arrays that hold whole tiles of rows, so that none is masked."""
    return _padded(sequence, sequence.q_start * facts.group, numbers.row_tiles, numbers, facts)


@triton.jit
def padded_rows_of_head(first, head, numbers, facts: tl.constexpr):
    """`padded_rows` of a query head that is so many further, from those of the first."""
    return first + head * (numbers.row_tiles.to(tl.int64) * facts.row_block)


@triton.jit
def padded_keys(sequence, numbers, facts: tl.constexpr):
    """Where a sequence's keys start in arrays that hold whole tiles of keys."""
    return _padded(sequence, sequence.k_start, numbers.key_tiles, numbers, facts)


@triton.jit
def _padded(sequence, start, num_tiles, numbers, facts: tl.constexpr):
    batch, tile = sequence.batch, 0
    if facts.is_varlen:
        batch, tile = 0, start // facts.row_block + sequence.batch
    row = (batch * numbers.num_heads_kv + sequence.head_kv).to(tl.int64) * num_tiles + tile
    return row * facts.row_block


@triton.jit
def load_tile(pointers, are_inside, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows, 0 where a row is not inside or a column beyond WIDTH."""
    if WIDTH == BLOCK:
        return tl.load(pointers, are_inside[:, None], other=0.0)
    else:
        return tl.load(pointers, are_inside[:, None] & (columns < WIDTH)[None, :], other=0.0)
