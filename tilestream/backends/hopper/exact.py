"""Rows of the Hopper kernels that are not finite, exact: `triton`'s exact kernels, for flags of rows.

Launched for every call that can hide something, and at their end soon where nothing is flagged; that of the forward is
launched before the forward ends.

Shapes: P programs of tiles of packed rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilestream.backends.triton.backward import query_program
from tilestream.backends.triton.careful import FLAGS, exact_product, first_of, num_rounds
from tilestream.backends.triton.configs import Config
from tilestream.backends.triton.forward import exact_program
from tilestream.backends.triton.score import probabilities, sink_log2
from tilestream.backends.triton.tiles import (
    key_pointers,
    load_keys,
    load_tile,
    locate,
    numbers_at,
    row_lse,
    row_pointers,
    sequence_of,
    tile_index,
)

__all__ = ["EXACT_CONFIG", "exact_dq_kernel", "exact_listed_rows_kernel", "exact_rows_kernel"]

# Small, so that nothing is in local memory, and compiled soon.
EXACT_CONFIG = Config(32, 16, 8, 1)
# At most, before the flags of rows.
_FLAGGERS = tl.constexpr(1024)


@triton.jit(do_not_specialize=["numbers"])
def exact_rows_kernel(tensors, numbers, facts: tl.constexpr):
    """out of tiles with flagged rows."""
    # It was launched early (`Config.starts_early`).
    gdc_wait()
    _for_flagged_rows(exact_program, tensors, numbers, facts)


@triton.jit(do_not_specialize=["numbers"])
def exact_listed_rows_kernel(tensors, numbers, facts: tl.constexpr):
    """out of tiles with flagged rows, of a call with a block mask: every query head is like a KV head of its own."""
    gdc_wait()
    _for_flagged_rows(_exact_listed_rows, tensors, numbers, facts)


@triton.jit
def _exact_listed_rows(program, tensors, numbers, facts: tl.constexpr):
    """`triton.forward.exact_program`, of the keys that a list says."""
    tile, head, batch, _split = tile_index(program, numbers, facts)
    rows = tile * facts.block_m + tl.arange(0, facts.block_m)
    sequence = sequence_of(batch, head, tensors, numbers, facts, BY_KEYS=False)
    rows_inside = rows < sequence.seqlen_q
    d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
    q_rows = row_pointers(tensors.q, rows, sequence, numbers.q_strides, facts, facts.block_d)
    q_m = load_tile(q_rows, rows_inside, d, facts.head_dim, facts.block_d)
    lse_log2 = row_lse(rows, rows_inside, sequence, tensors, numbers, facts)
    first, num_slices, head_kv = list_of(batch * numbers.num_heads_kv + head, tile, tensors, numbers, facts)
    # Of the keys.
    sequence_kv = sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS=False)
    keys = key_pointers(tensors.k, sequence_kv, numbers.k_strides, facts, facts.block_d)
    values = key_pointers(tensors.v, sequence_kv, numbers.v_strides, facts, facts.block_dv)
    acc = tl.full([facts.block_m, facts.block_dv], 0.0, tl.float32)
    row_sum = tl.full([facts.block_m], 0.0, tl.float32)
    if facts.has_sinks:
        row_sum += tl.exp2(sink_log2(tl.load(tensors.sinks + head)) - lse_log2)
    for index in tl.range(0, num_slices):
        n_start, shown = shown_slice(first, index, rows, tensors, facts)
        k_n = load_keys(keys, n_start, sequence_kv, numbers.k_strides, facts, facts.head_dim, facts.block_d)
        s_mn = tl.dot(q_m, tl.trans(k_n), input_precision=facts.precision)
        visible = shown & (s_mn != float("-inf"))
        p_mn = tl.where(visible, probabilities(s_mn, lse_log2[:, None], numbers, facts), 0.0)
        row_sum += tl.sum(p_mn, 1)
        v_n = load_keys(values, n_start, sequence_kv, numbers.v_strides, facts, facts.head_dim_v, facts.block_dv)
        acc += exact_product(p_mn, visible, v_n, facts)
    acc = acc * tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
    out = row_pointers(tensors.out, rows, sequence, numbers.out_strides, facts, facts.block_dv)
    inside = rows_inside[:, None] & (e < facts.head_dim_v)[None, :]
    tl.store(out, acc.to(tensors.out.dtype.element_ty), inside)


@triton.jit
def list_of(side, tile, tensors, numbers, facts: tl.constexpr):
    """(place of the first tile, number of `shown_slice`s, KV head) of the rows of a tile of a head."""
    row_tile = tile * facts.block_m // facts.row_block
    record = tensors.list_rows + (side * numbers.row_tiles + row_tile).to(tl.int64) * 4
    return tl.load(record), tl.load(record + 1) * facts.num_slices, tl.load(record + 2)


@triton.jit
def shown_slice(first, index, rows, tensors, facts: tl.constexpr):
    """(first key, which pairs with `rows` are visible) of slice number `index` of the tiles from `first` on."""
    WORDS: tl.constexpr = facts.num_slices * facts.block_n // 32
    place = first + index // facts.num_slices
    start = index % facts.num_slices * facts.block_n
    pattern = tl.load(tensors.list_patterns + place)
    row = tl.maximum(pattern, 0).to(tl.int64) * facts.row_block + rows % facts.row_block
    words = tl.load(tensors.list_bits + row * WORDS + start // 32)
    are_set = (words[:, None] >> (start % 32 + tl.arange(0, facts.block_n))[None, :]) & 1
    return tl.load(tensors.list_starts + place) + start, (pattern < 0) | (are_set != 0)


@triton.jit(do_not_specialize=["numbers"])
def exact_dq_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of tiles with flagged rows."""
    _for_flagged_rows(_exact_dq, tensors, numbers, facts)


@triton.jit
def _exact_dq(program, tensors, numbers, facts: tl.constexpr):
    query_program(program, tensors, numbers, facts, True)


@triton.jit
def _for_flagged_rows(PROGRAM: tl.constexpr, tensors, numbers, facts: tl.constexpr):
    """`PROGRAM` of tiles with flagged rows: of kernels whose rows are not packed.

    Their flags lie as lse does, behind `num_flaggers` others; where none of these is set, none of those is.
    """
    are_set = tl.arange(0, _FLAGGERS) < numbers.num_flaggers
    if tl.max(tl.load(tensors.flags + tl.arange(0, _FLAGGERS), are_set, other=0), 0) == 0:
        return
    for round_index in tl.range(0, num_rounds(numbers)):
        first = first_of(round_index)
        programs = first + tl.arange(0, FLAGS) * tl.num_programs(0)
        if tl.max(_num_flagged_rows(programs, tensors, numbers, facts), 0) != 0:
            for index in tl.range(0, FLAGS):
                program = first + index * tl.num_programs(0) + tl.arange(0, 1)
                if tl.max(_num_flagged_rows(program, tensors, numbers, facts), 0) != 0:
                    PROGRAM(first + index * tl.num_programs(0), tensors, numbers, facts)


@triton.jit
def _num_flagged_rows(programs, tensors, numbers, facts: tl.constexpr):
    """How many rows of the tiles of these programs (P) are flagged."""
    tiles, head_kv, batch, _split = tile_index(programs, numbers, facts)
    sequence, tiles = locate(tiles[:, None], head_kv[:, None], batch[:, None], tensors, numbers, facts, BY_KEYS=False)
    rows = tiles * facts.block_m + tl.arange(0, facts.block_m)[None, :]
    are_rows = (programs < numbers.num_programs)[:, None] & (rows < sequence.seqlen_q * facts.group)
    places = numbers.num_flaggers + numbers_at(rows, sequence, numbers, facts)
    flags = tl.load(tensors.flags + places, are_rows, other=0)
    return tl.sum((flags != 0).to(tl.int32), 1)
