"""Attention backward.

Computes   delta; dk and dv of a tile of keys; dq of a tile of packed rows; the gradient of a tile of the bias.
Algorithm  FlashAttention-2, algorithm 2 (arXiv:2307.08691): P is made again from lse, then
           dv += P^T dout;  dS = P * (dout V^T - delta);  dk += dS^T Q;  dq += dS K.
           delta = rowsum(out * dout) - dlse, which is all that a gradient of lse changes.
Schedule   delta_kernel: a program per row tile. key_kernel: a program per (key tile, KV head, batch entry) that streams
           the packed rows which see its keys, so dk and dv are summed over a group inside. query_kernel: a program per
           row tile that streams keys. Seven products a tile instead of five, and in return no two programs add to one
           number: bits do not change from run to run, and no float32 sums go through memory. (Adding dq to float32 sums
           from key_kernel was slower: docs/measured-facts.md.)
Traffic    delta_kernel reads out and dout; key_kernel reads K, V once and Q, dout, lse, delta once per key tile, writes
           dk, dv; query_kernel reads Q, dout once and K, V once per row tile, writes dq.
           formula: io.schedule.schedule_cost
On chip    key_kernel: k_n, v_n and the pipelined q_m, dout_m in shared memory; dk, dv, s_nm, dp_nm in registers.
Numerics   as the forward; P and dS are rounded to the input dtype for their products. Sums that come out not finite are
           computed again with `careful.exact_product`.
Limits     as the forward.

Shapes: M packed rows of a tile; N keys of a tile; D head_dim; E head_dim_v.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.backends.triton.careful import exact_product, flag, for_flagged
from tilestream.backends.triton.parts import part_pointers, store_parts
from tilestream.backends.triton.score import (
    keep_tile,
    probabilities,
    row_slopes,
    score_derivative,
    score_tile,
)
from tilestream.backends.triton.tiles import (
    key_offsets,
    key_pointers,
    key_ranges,
    load_keys,
    load_tile,
    locate,
    next_row_offsets,
    numbers_at,
    padded_rows,
    padded_rows_of_head,
    query_ranges,
    row_heads,
    row_lse,
    row_offsets,
    row_pointers,
    tile_index,
)
from tilestream.backends.triton.visits import (
    entry_of,
    first_visit,
    needs_mask,
    of_head,
    place,
    steps_of,
    visit,
    visits_of,
)

__all__ = ["delta_kernel", "exact_key_kernel", "exact_query_kernel", "key_kernel", "query_kernel", "query_program"]


@triton.jit(do_not_specialize=["numbers"])
def delta_kernel(tensors, numbers, facts: tl.constexpr):
    """delta = rowsum(out * dout) - dlse of a tile of packed rows; once more, with lse, as key_kernel reads them; and Q
    and dout in parts, for the kernels that read those."""
    tile, head_kv, batch, _split = tile_index(tl.program_id(0), numbers, facts)
    sequence, tile = locate(tile, head_kv, batch, tensors, numbers, facts, BY_KEYS=False)
    if tile * facts.block_m >= sequence.seqlen_q * facts.group:
        return
    rows = tile * facts.block_m + tl.arange(0, facts.block_m)
    rows_inside = rows < sequence.seqlen_q * facts.group
    e = tl.arange(0, facts.block_dv)
    inside = rows_inside[:, None] & (e < facts.head_dim_v)[None, :]
    out = row_pointers(tensors.out, rows, sequence, numbers.out_strides, facts, facts.block_dv)
    dout = row_pointers(tensors.dout, rows, sequence, numbers.dout_strides, facts, facts.block_dv)
    out, dout = tl.load(out, inside, other=0.0), tl.load(dout, inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    places = numbers_at(rows, sequence, numbers, facts)
    if facts.has_dlse:
        delta -= tl.load(tensors.dlse + places, rows_inside, other=0.0)
    tl.store(tensors.delta + places, delta, rows_inside)
    start = padded_rows(sequence, numbers, facts)
    padded = start + rows
    tl.store(tensors.row_lse + padded, row_lse(rows, rows_inside, sequence, tensors, numbers, facts))
    tl.store(tensors.row_delta + padded, delta)
    if facts.writes_parts:
        first = start + tile * facts.block_m
        q_rows = row_pointers(tensors.q, rows, sequence, numbers.q_strides, facts, facts.block_d)
        q = load_tile(q_rows, rows_inside, tl.arange(0, facts.block_d), facts.head_dim, facts.block_d)
        store_parts(part_pointers(tensors.q_parts, first, facts.block_m, facts.block_d), q, facts.block_d)
        store_parts(part_pointers(tensors.dout_parts, first, facts.block_m, facts.block_dv), dout, facts.block_dv)


@triton.jit
def _row_delta(rows, rows_inside, sequence, tensors, numbers, facts: tl.constexpr):
    return tl.load(tensors.delta + numbers_at(rows, sequence, numbers, facts), rows_inside, other=0.0)


@triton.jit
def _score_gradient(s, capped, dp, keep, lse_log2, delta, numbers, facts: tl.constexpr, EXACT: tl.constexpr):
    """(P after dropout, dS of the scaled dot products) of one tile, either way round; `keep` only with dropout."""
    p = probabilities(s, lse_log2, numbers, facts)
    if EXACT:
        # Where a visible key makes lse NaN, the hidden ones still have no part in it.
        p = tl.where(s == float("-inf"), 0.0, p)
    kept = p
    if facts.has_dropout:
        kept = tl.where(keep, p * numbers.keep_scale, 0.0)
        dp = tl.where(keep, dp * numbers.keep_scale, 0.0)
    ds = score_derivative(p * (dp - delta), capped, facts)
    if EXACT:
        # P is 0 there, but the rest may be what an invisible key holds.
        ds = tl.where(s == float("-inf"), 0.0, ds)
    return kept, ds


@triton.jit
def _key_loop(
    k_n, v_n, n_start, ranges, visits, span, first_sequence, tensors, numbers, facts: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """(dk, dv) of a tile of keys from the row tiles of `ranges`, or of `visits`."""
    d, e, m = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv), tl.arange(0, facts.block_m)
    j = n_start + tl.arange(0, facts.block_n)
    dk = tl.full([facts.block_n, facts.block_d], 0.0, tl.float32)
    dv = tl.full([facts.block_n, facts.block_dv], 0.0, tl.float32)
    q_first = row_offsets(m, first_sequence, numbers.q_strides, facts)
    dout_first = row_offsets(m, first_sequence, numbers.dout_strides, facts)
    padded_first = padded_rows(first_sequence, numbers, facts)
    STEP: tl.constexpr = 1 if facts.has_blocks else facts.block_m
    lo, hi = steps_of(ranges, visits, numbers, facts, True)
    if facts.has_blocks:
        next_start, next_further = first_visit(span, visits, tensors, facts, True)
    for step in tl.range(lo, hi, STEP):
        m_start, entry, further = step, -1, 0
        sequence, padded = first_sequence, padded_first
        if facts.has_blocks:
            m_start, entry, further = next_start, entry_of(step, visits, facts, True), next_further
            next_start, next_further = visit(step + 1, visits, tensors, facts, True)
            if facts.kv_share > 1:
                sequence = of_head(first_sequence, further)
                padded = padded_rows_of_head(padded_first, further, numbers, facts)
        rows = m_start + m
        i, head = row_heads(rows, sequence, facts)
        rows_inside = i < sequence.seqlen_q
        slopes = rows
        if facts.has_alibi:
            slopes = row_slopes(rows, sequence, tensors, numbers, facts)
        q_offsets = next_row_offsets(q_first, rows, m_start, further, sequence, numbers.q_strides, facts)
        q_m = load_tile(tensors.q + q_offsets[:, None] + d[None, :], rows_inside, d, facts.head_dim, facts.block_d)
        if EXACT:
            # Another backend's kernels have them in another order, padded.
            lse_log2 = row_lse(rows, rows_inside, sequence, tensors, numbers, facts)
            delta = _row_delta(rows, rows_inside, sequence, tensors, numbers, facts)
        else:
            lse_log2 = tl.load(tensors.row_lse + padded + rows)
            delta = tl.load(tensors.row_delta + padded + rows)
        masked = EXACT or (
            (facts.is_band or facts.has_blocks) and needs_mask(m_start, step, visits, ranges, facts, True)
        )
        s_nm = tl.dot(k_n, tl.trans(q_m), input_precision=facts.precision)
        s_nm, capped = score_tile(
            s_nm, i[None, :], j[:, None], head[None, :], slopes[None, :], rows_inside[None, :], sequence, tensors,
            numbers, masked, m_start, entry, facts,
        )  # fmt: skip
        dout_offsets = next_row_offsets(dout_first, rows, m_start, further, sequence, numbers.dout_strides, facts)
        dout_rows = tensors.dout + dout_offsets[:, None] + e[None, :]
        dout_m = load_tile(dout_rows, rows_inside, e, facts.head_dim_v, facts.block_dv)
        dp_nm = tl.dot(v_n, tl.trans(dout_m), input_precision=facts.precision)
        keep = s_nm
        if facts.has_dropout:
            keep = tl.trans(keep_tile(rows, n_start, sequence, tensors, numbers, facts).to(tl.int8)) != 0
        kept_nm, ds_nm = _score_gradient(
            s_nm, capped, dp_nm, keep, lse_log2[None, :], delta[None, :], numbers, facts, EXACT
        )
        if EXACT:
            visible = s_nm != float("-inf")
            dv += exact_product(kept_nm, visible, dout_m, facts)
            dk += exact_product(ds_nm, visible, q_m, facts)
        else:
            dv = tl.dot(kept_nm.to(dout_m.dtype), dout_m, dv, input_precision=facts.precision)
            dk = tl.dot(ds_nm.to(q_m.dtype), q_m, dk, input_precision=facts.precision)
    return dk, dv


@triton.jit
def _key_program(program, slice_index, tensors, numbers, facts: tl.constexpr, EXACT: tl.constexpr):
    sequence, tile, span, _split = place(program, tensors, numbers, facts, True)
    n_start = (tile * facts.num_slices + slice_index) * facts.block_n
    if n_start < sequence.seqlen_k:
        j = n_start + tl.arange(0, facts.block_n)
        keys_inside = j < sequence.seqlen_k
        d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
        k_keys = tensors.k + key_offsets(j, sequence, numbers.k_strides, facts)[:, None] + d[None, :]
        v_keys = tensors.v + key_offsets(j, sequence, numbers.v_strides, facts)[:, None] + e[None, :]
        k_n = load_tile(k_keys, keys_inside, d, facts.head_dim, facts.block_d)
        v_n = load_tile(v_keys, keys_inside, e, facts.head_dim_v, facts.block_dv)
        ranges = query_ranges(n_start, sequence, facts)
        visits = visits_of(span, ranges, tensors, facts, True)
        dk, dv = _key_loop(k_n, v_n, n_start, ranges, visits, span, sequence, tensors, numbers, facts, EXACT)
        if facts.flags and not EXACT:
            flag(dk, dv, keys_inside, tensors)
        dk_keys = tensors.dk + key_offsets(j, sequence, numbers.dk_strides, facts)[:, None] + d[None, :]
        dv_keys = tensors.dv + key_offsets(j, sequence, numbers.dv_strides, facts)[:, None] + e[None, :]
        dk = (dk * numbers.scale).to(tensors.dk.dtype.element_ty)
        tl.store(dk_keys, dk, keys_inside[:, None] & (d < facts.head_dim)[None, :])
        dv = dv.to(tensors.dv.dtype.element_ty)
        tl.store(dv_keys, dv, keys_inside[:, None] & (e < facts.head_dim_v)[None, :])


@triton.jit(do_not_specialize=["numbers"])
def key_kernel(tensors, numbers, facts: tl.constexpr):
    """dk and dv of a tile of keys."""
    _key_program(tl.program_id(0), 0, tensors, numbers, facts, False)


@triton.jit(do_not_specialize=["numbers"])
def exact_key_kernel(tensors, numbers, facts: tl.constexpr):
    """dk and dv of flagged tiles of keys, exact where numbers are not finite."""
    for_flagged(_exact_key_program, tensors, numbers, facts)


@triton.jit
def _exact_key_program(program, tensors, numbers, facts: tl.constexpr):
    for slice_index in tl.range(0, facts.num_slices):
        _key_program(program, slice_index, tensors, numbers, facts, True)


@triton.jit
def _query_loop(
    q_m, dout_m, rows, ranges, visits, span, sequence, tensors, numbers, facts: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """dq of a tile of packed rows from the key tiles of `ranges`, or of `visits`."""
    n = tl.arange(0, facts.block_n)
    i, head = row_heads(rows, sequence, facts)
    rows_inside = i < sequence.seqlen_q
    lse_log2 = row_lse(rows, rows_inside, sequence, tensors, numbers, facts)
    delta = _row_delta(rows, rows_inside, sequence, tensors, numbers, facts)
    slopes = rows
    if facts.has_alibi:
        slopes = row_slopes(rows, sequence, tensors, numbers, facts)
    keys = key_pointers(tensors.k, sequence, numbers.k_strides, facts, facts.block_d)
    values = key_pointers(tensors.v, sequence, numbers.v_strides, facts, facts.block_dv)
    dq = tl.full([facts.block_m, facts.block_d], 0.0, tl.float32)
    STEP: tl.constexpr = 1 if facts.has_blocks else facts.block_n
    lo, hi = steps_of(ranges, visits, numbers, facts, False)
    if facts.has_blocks:
        next_start, _head = first_visit(span, visits, tensors, facts, False)
    for step in tl.range(lo, hi, STEP):
        n_start, entry = step, -1
        if facts.has_blocks:
            n_start, entry = next_start, entry_of(step, visits, facts, False)
            next_start, _head = visit(step + 1, visits, tensors, facts, False)
        k_n = load_keys(keys, n_start, sequence, numbers.k_strides, facts, facts.head_dim, facts.block_d)
        v_n = load_keys(values, n_start, sequence, numbers.v_strides, facts, facts.head_dim_v, facts.block_dv)
        masked = EXACT or needs_mask(n_start, step, visits, ranges, facts, False)
        s_mn = tl.dot(q_m, tl.trans(k_n), input_precision=facts.precision)
        s_mn, capped = score_tile(
            s_mn, i[:, None], (n_start + n)[None, :], head[:, None], slopes[:, None], rows_inside[:, None], sequence,
            tensors, numbers, masked, n_start, entry, facts,
        )  # fmt: skip
        dp_mn = tl.dot(dout_m, tl.trans(v_n), input_precision=facts.precision)
        keep = s_mn
        if facts.has_dropout:
            keep = keep_tile(rows, n_start, sequence, tensors, numbers, facts)
        _, ds_mn = _score_gradient(s_mn, capped, dp_mn, keep, lse_log2[:, None], delta[:, None], numbers, facts, EXACT)
        if EXACT:
            dq += exact_product(ds_mn, s_mn != float("-inf"), k_n, facts)
        else:
            dq = tl.dot(ds_mn.to(k_n.dtype), k_n, dq, input_precision=facts.precision)
    return dq


@triton.jit
def query_program(program, tensors, numbers, facts: tl.constexpr, EXACT: tl.constexpr):
    """dq of the tile of packed rows of a program."""
    sequence, tile, span, _split = place(program, tensors, numbers, facts, False)
    m_start = tile * facts.block_m
    num_rows = sequence.seqlen_q * facts.group
    if m_start < num_rows:
        rows = m_start + tl.arange(0, facts.block_m)
        rows_inside = rows < num_rows
        d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
        q_rows = row_pointers(tensors.q, rows, sequence, numbers.q_strides, facts, facts.block_d)
        dout_rows = row_pointers(tensors.dout, rows, sequence, numbers.dout_strides, facts, facts.block_dv)
        q_m = load_tile(q_rows, rows_inside, d, facts.head_dim, facts.block_d)
        dout_m = load_tile(dout_rows, rows_inside, e, facts.head_dim_v, facts.block_dv)
        ranges = key_ranges(m_start, sequence, facts)
        visits = visits_of(span, ranges, tensors, facts, False)
        dq = _query_loop(q_m, dout_m, rows, ranges, visits, span, sequence, tensors, numbers, facts, EXACT)
        if facts.flags and not EXACT:
            flag(dq, dq, rows_inside, tensors)
        dq_rows = row_pointers(tensors.dq, rows, sequence, numbers.dq_strides, facts, facts.block_d)
        dq = (dq * numbers.scale).to(tensors.dq.dtype.element_ty)
        tl.store(dq_rows, dq, rows_inside[:, None] & (d < facts.head_dim)[None, :])


@triton.jit(do_not_specialize=["numbers"])
def query_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of a tile of packed rows."""
    query_program(tl.program_id(0), tensors, numbers, facts, False)


@triton.jit(do_not_specialize=["numbers"])
def exact_query_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of flagged tiles of packed rows, exact where numbers are not finite."""
    for_flagged(_exact_query_program, tensors, numbers, facts)


@triton.jit
def _exact_query_program(program, tensors, numbers, facts: tl.constexpr):
    query_program(program, tensors, numbers, facts, True)
