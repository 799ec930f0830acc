"""dq from the float32 sums of the Hopper backward.

Computes   dq = scale * sums in the input dtype; where something can be hidden also flags for `exact.py`: one,
           whether any row is not finite, then one per row.
Algorithm  none.
Schedule   a program per row tile of a query head, last ones first.
Traffic    reads 4 bytes an element of dq, on chip widths, and writes 2.
On chip    a tile of sums, whose order (`dq.py`) becomes that of rows by way of shared memory.
Numerics   the sums are of all tiles of keys, in no fixed order.
Limits     as the backward.

Shapes: M rows of a tile; D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.backends.triton.tiles import locate, numbers_at, row_pointers, tile_index

__all__ = ["dq_kernel"]


@triton.jit(do_not_specialize=["numbers"])
def dq_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of a row tile; its sums are `out_parts`."""
    # Backwards, because the sums that were added to last are in the L2 cache.
    tile, head, batch, _split = tile_index(tl.num_programs(0) - 1 - tl.program_id(0), numbers, facts)
    sequence, tile = locate(tile, head, batch, tensors, numbers, facts, BY_KEYS=False)
    rows = tile * facts.block_m + tl.arange(0, facts.block_m)
    are_inside = rows < sequence.seqlen_q
    # Pieces of 64 columns, and at least one.
    PIECES: tl.constexpr = (facts.block_d + 63) // 64
    row_tile = (batch * numbers.num_heads_kv + head).to(tl.int64) * numbers.num_tiles + tile
    size: tl.constexpr = facts.block_m * 64 * PIECES
    # A new tensor's, of whole tiles: 16 bytes are read at once.
    first = tl.multiple_of(tensors.out_parts + row_tile * size, 16)
    sums = tl.load(first + tl.arange(0, size))
    # Columns are 64 p + 8 a + 2 b + c, rows 16 w + 8 h + g.
    p_a_w_g_b_h_c = sums.reshape(PIECES, 8, facts.block_m // 16, 8, 4, 2, 2)
    dq = tl.permute(p_a_w_g_b_h_c, (2, 5, 3, 0, 1, 4, 6)).reshape(facts.block_m, 64 * PIECES)
    if facts.flags:
        is_bad = tl.sum((~(tl.abs(dq) < float("inf"))).to(tl.int32), 1) != 0
        flags = tensors.flags + 1 + numbers_at(rows, sequence, numbers, facts)
        tl.store(flags, is_bad.to(tl.int32), are_inside)
        if tl.max((is_bad & are_inside).to(tl.int32), 0) != 0:
            tl.store(tensors.flags, 1)
    pointers = row_pointers(tensors.dq, rows, sequence, numbers.dq_strides, facts, 64 * PIECES)
    columns = tl.arange(0, 64 * PIECES)
    dq = (dq * numbers.scale).to(tensors.dq.dtype.element_ty)
    tl.store(pointers, dq, are_inside[:, None] & (columns < facts.head_dim)[None, :])
