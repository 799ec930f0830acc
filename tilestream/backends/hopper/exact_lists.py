"""`exact.py`, and the exact key kernel, of calls with a block mask: what is visible are the bits of listed tiles.

Rows of query heads are not packed, because heads may have masks of their own. Tiles of the lists are those of
`block_lists.py`, which are cut into slices here.

Shapes: M rows of a tile; N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilestream.backends.hopper.exact import for_flagged_rows
from tilestream.backends.triton.careful import exact_product, for_flagged
from tilestream.backends.triton.score import probabilities, sink_log2
from tilestream.backends.triton.tiles import (
    key_offsets,
    key_pointers,
    load_keys,
    load_tile,
    numbers_at,
    row_lse,
    row_offsets,
    row_pointers,
    sequence_of,
    tile_index,
)

__all__ = ["exact_listed_dq_kernel", "exact_listed_key_kernel", "exact_listed_rows_kernel"]


@triton.jit(do_not_specialize=["numbers"])
def exact_listed_rows_kernel(tensors, numbers, facts: tl.constexpr):
    """out of tiles with flagged rows."""
    # It was launched early (`Config.starts_early`).
    gdc_wait()
    for_flagged_rows(_exact_rows, tensors, numbers, facts)


@triton.jit(do_not_specialize=["numbers"])
def exact_listed_dq_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of tiles with flagged rows."""
    for_flagged_rows(_exact_dq, tensors, numbers, facts)


@triton.jit(do_not_specialize=["numbers"])
def exact_listed_key_kernel(tensors, numbers, facts: tl.constexpr):
    """dk and dv of flagged tiles of keys."""
    for_flagged(_exact_keys, tensors, numbers, facts)


@triton.jit
def _list_of(tile, head, batch, tensors, numbers, facts: tl.constexpr):
    """(place of the first tile, number of `_shown` slices, KV head) of the rows of a tile."""
    row_tile = tile * facts.block_m // facts.row_block
    side = batch * numbers.num_heads_kv + head
    record = tensors.list_rows + (side * numbers.row_tiles + row_tile).to(tl.int64) * 4
    return tl.load(record), tl.load(record + 1) * facts.num_slices, tl.load(record + 2)


@triton.jit
def _shown(first, index, rows, tensors, facts: tl.constexpr):
    """(first key, which pairs with `rows` are visible) of slice number `index` of the tiles from `first` on."""
    WORDS: tl.constexpr = facts.num_slices * facts.block_n // 32
    place = first + index // facts.num_slices
    start = index % facts.num_slices * facts.block_n
    pattern = tl.load(tensors.list_patterns + place)
    row = tl.maximum(pattern, 0).to(tl.int64) * facts.row_block + rows % facts.row_block
    words = tl.load(tensors.list_bits + row * WORDS + start // 32)
    are_set = (words[:, None] >> (start % 32 + tl.arange(0, facts.block_n))[None, :]) & 1
    return tl.load(tensors.list_starts + place) + start, (pattern < 0) | (are_set != 0)


@triton.jit
def _exact_rows(program, tensors, numbers, facts: tl.constexpr):
    """`triton.forward.exact_program`, of the keys that a list says."""
    tile, head, batch, _split = tile_index(program, numbers, facts)
    rows = tile * facts.block_m + tl.arange(0, facts.block_m)
    sequence = sequence_of(batch, head, tensors, numbers, facts, BY_KEYS=False)
    rows_inside = rows < sequence.seqlen_q
    d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
    q_rows = row_pointers(tensors.q, rows, sequence, numbers.q_strides, facts, facts.block_d)
    q_m = load_tile(q_rows, rows_inside, d, facts.head_dim, facts.block_d)
    lse_log2 = row_lse(rows, rows_inside, sequence, tensors, numbers, facts)
    first, num_slices, head_kv = _list_of(tile, head, batch, tensors, numbers, facts)
    # Of the keys.
    sequence_kv = sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS=False)
    keys = key_pointers(tensors.k, sequence_kv, numbers.k_strides, facts, facts.block_d)
    values = key_pointers(tensors.v, sequence_kv, numbers.v_strides, facts, facts.block_dv)
    acc = tl.full([facts.block_m, facts.block_dv], 0.0, tl.float32)
    row_sum = tl.full([facts.block_m], 0.0, tl.float32)
    if facts.has_sinks:
        row_sum += tl.exp2(sink_log2(tl.load(tensors.sinks + head)) - lse_log2)
    for index in tl.range(0, num_slices):
        n_start, shown = _shown(first, index, rows, tensors, facts)
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
def _exact_dq(program, tensors, numbers, facts: tl.constexpr):
    """`triton.backward.query_program`, of the keys that a list says."""
    tile, head, batch, _split = tile_index(program, numbers, facts)
    rows = tile * facts.block_m + tl.arange(0, facts.block_m)
    sequence = sequence_of(batch, head, tensors, numbers, facts, BY_KEYS=False)
    rows_inside = rows < sequence.seqlen_q
    d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
    q_rows = row_pointers(tensors.q, rows, sequence, numbers.q_strides, facts, facts.block_d)
    dout_rows = row_pointers(tensors.dout, rows, sequence, numbers.dout_strides, facts, facts.block_dv)
    q_m = load_tile(q_rows, rows_inside, d, facts.head_dim, facts.block_d)
    dout_m = load_tile(dout_rows, rows_inside, e, facts.head_dim_v, facts.block_dv)
    lse_log2 = row_lse(rows, rows_inside, sequence, tensors, numbers, facts)
    delta = tl.load(tensors.delta + numbers_at(rows, sequence, numbers, facts), rows_inside, other=0.0)
    first, num_slices, head_kv = _list_of(tile, head, batch, tensors, numbers, facts)
    sequence_kv = sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS=False)
    keys = key_pointers(tensors.k, sequence_kv, numbers.k_strides, facts, facts.block_d)
    values = key_pointers(tensors.v, sequence_kv, numbers.v_strides, facts, facts.block_dv)
    dq = tl.full([facts.block_m, facts.block_d], 0.0, tl.float32)
    for index in tl.range(0, num_slices):
        n_start, shown = _shown(first, index, rows, tensors, facts)
        k_n = load_keys(keys, n_start, sequence_kv, numbers.k_strides, facts, facts.head_dim, facts.block_d)
        v_n = load_keys(values, n_start, sequence_kv, numbers.v_strides, facts, facts.head_dim_v, facts.block_dv)
        s_mn = tl.dot(q_m, tl.trans(k_n), input_precision=facts.precision)
        dp_mn = tl.dot(dout_m, tl.trans(v_n), input_precision=facts.precision)
        visible = shown & (s_mn != float("-inf"))
        _, ds_mn = _gradients(s_mn, dp_mn, visible, lse_log2[:, None], delta[:, None], numbers, facts)
        dq += exact_product(ds_mn, visible, k_n, facts)
    dq_rows = row_pointers(tensors.dq, rows, sequence, numbers.dq_strides, facts, facts.block_d)
    dq = (dq * numbers.scale).to(tensors.dq.dtype.element_ty)
    tl.store(dq_rows, dq, rows_inside[:, None] & (d < facts.head_dim)[None, :])


@triton.jit
def _gradients(s, dp, visible, lse_log2, delta, numbers, facts: tl.constexpr):
    """(P, dS) of one tile, either way round; 0 where a pair is not visible, whatever it holds."""
    p = tl.where(visible, probabilities(s, lse_log2, numbers, facts), 0.0)
    return p, tl.where(visible, p * (dp - delta), 0.0)


@triton.jit
def _exact_keys(program, tensors, numbers, facts: tl.constexpr):
    for slice_index in tl.range(0, facts.num_slices):
        tile, head_kv, batch, _split = tile_index(program, numbers, facts)
        sequence = sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS=True)
        n_start = (tile * facts.num_slices + slice_index) * facts.block_n
        if n_start < sequence.seqlen_k:
            _exact_slice(n_start, sequence, tensors, numbers, facts)


@triton.jit
def _exact_slice(n_start, sequence, tensors, numbers, facts: tl.constexpr):
    """dk and dv of a tile of keys, of the rows that lists say."""
    d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
    j = n_start + tl.arange(0, facts.block_n)
    keys_inside = j < sequence.seqlen_k
    k_keys = tensors.k + key_offsets(j, sequence, numbers.k_strides, facts)[:, None] + d[None, :]
    v_keys = tensors.v + key_offsets(j, sequence, numbers.v_strides, facts)[:, None] + e[None, :]
    k_n = load_tile(k_keys, keys_inside, d, facts.head_dim, facts.block_d)
    v_n = load_tile(v_keys, keys_inside, e, facts.head_dim_v, facts.block_dv)
    dk = tl.full([facts.block_n, facts.block_d], 0.0, tl.float32)
    dv = tl.full([facts.block_n, facts.block_dv], 0.0, tl.float32)
    # Lists by keys have tiles of 64 queries.
    SLICES: tl.constexpr = 64 // facts.block_m
    for index in tl.range(0, facts.group):
        head = (sequence.batch * numbers.num_heads_kv + sequence.head_kv) * facts.group + index
        record = tensors.list_rows + (head * numbers.key_tiles + n_start // facts.row_block).to(tl.int64) * 4
        first = tl.load(record)
        for number in tl.range(0, tl.load(record + 2) * SLICES):
            place = first + number // SLICES
            start = number % SLICES * facts.block_m
            i = tl.load(tensors.list_starts + place) * 64 + start + tl.arange(0, facts.block_m)
            shown = _shown_rows(place, start, j, tensors, facts)
            # As packed rows.
            rows = i * facts.group + index
            rows_inside = i < sequence.seqlen_q
            q_offsets = row_offsets(rows, sequence, numbers.q_strides, facts)
            dout_offsets = row_offsets(rows, sequence, numbers.dout_strides, facts)
            q_m = load_tile(tensors.q + q_offsets[:, None] + d[None, :], rows_inside, d, facts.head_dim, facts.block_d)
            dout_rows = tensors.dout + dout_offsets[:, None] + e[None, :]
            dout_m = load_tile(dout_rows, rows_inside, e, facts.head_dim_v, facts.block_dv)
            lse_log2 = row_lse(rows, rows_inside, sequence, tensors, numbers, facts)
            delta = tl.load(tensors.delta + numbers_at(rows, sequence, numbers, facts), rows_inside, other=0.0)
            s_nm = tl.dot(k_n, tl.trans(q_m), input_precision=facts.precision)
            dp_nm = tl.dot(v_n, tl.trans(dout_m), input_precision=facts.precision)
            visible = shown & rows_inside[None, :] & (s_nm != float("-inf"))
            p_nm, ds_nm = _gradients(s_nm, dp_nm, visible, lse_log2[None, :], delta[None, :], numbers, facts)
            dv += exact_product(p_nm, visible, dout_m, facts)
            dk += exact_product(ds_nm, visible, q_m, facts)
    dk_keys = tensors.dk + key_offsets(j, sequence, numbers.dk_strides, facts)[:, None] + d[None, :]
    dv_keys = tensors.dv + key_offsets(j, sequence, numbers.dv_strides, facts)[:, None] + e[None, :]
    dk = (dk * numbers.scale).to(tensors.dk.dtype.element_ty)
    tl.store(dk_keys, dk, keys_inside[:, None] & (d < facts.head_dim)[None, :])
    tl.store(dv_keys, dv.to(tensors.dv.dtype.element_ty), keys_inside[:, None] & (e < facts.head_dim_v)[None, :])


@triton.jit
def _shown_rows(place, start, j, tensors, facts: tl.constexpr):
    """Which pairs (N, M) of the rows from `start` on of a listed row tile with the keys j are visible."""
    pattern = tl.load(tensors.list_patterns + place)
    key = tl.maximum(pattern, 0).to(tl.int64) * facts.row_block + j % facts.row_block
    words = tl.load(tensors.list_bits + key * 2 + start // 32)
    are_set = (words[:, None] >> (start % 32 + tl.arange(0, facts.block_m))[None, :]) & 1
    return (pattern < 0) | (are_set != 0)
