"""Attention forward.

Computes   out and lse of a tile of packed rows; with splits of the keys, float32 parts of them, which combine_kernel
           merges.
Algorithm  FlashAttention-2, algorithm 1 (arXiv:2307.08691): query tiles outside, online softmax over key tiles.
Schedule   a program per (row tile, KV head, batch entry, split), row tiles fastest, longest first where a right edge
           makes them unequal; key tiles left to right, in three ranges: PARTIAL, FULL, PARTIAL.
           With a block mask those of a list, longest lists first (`visits.py`).
Traffic    reads Q once, K and V once per row tile, writes out and lse once; with splits, float32 parts besides.
           formula: io.schedule.schedule_cost
On chip    q_m and the pipelined k_n, v_n in shared memory; s_mn, acc and the state in registers.
Numerics   softmax state and acc in float32; p_mn is rounded to the input dtype for its product. Rows that come out not
           finite are computed again with `careful.exact_product`.
Limits     head_dim and head_dim_v in powers of two on chip. Scores beyond 2**30 overflow: one instruction multiplies
           the scale in and takes the maximum off.

Shapes: M packed rows of a tile; N keys of a tile; D head_dim; E head_dim_v.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.backends.triton.careful import exact_product, flag, for_flagged
from tilestream.backends.triton.score import LN2, keep_tile, probabilities, row_slopes, score_tile, sink_log2
from tilestream.backends.triton.tiles import (
    Ranges,
    key_pointers,
    key_ranges,
    load_keys,
    load_tile,
    locate,
    numbers_at,
    row_heads,
    row_lse,
    row_pointers,
    tile_index,
)
from tilestream.backends.triton.visits import entry_of, first_visit, needs_mask, place, steps_of, visit, visits_of

__all__ = ["combine_kernel", "exact_forward_kernel", "exact_program", "forward_kernel"]


@triton.jit
def _initial_state(rows, split, sequence, tensors, numbers, facts: tl.constexpr):
    """(row_max, row_sum) before any key: a sink is one key of value 0. Maxima are in units of log 2."""
    row_max = tl.full([facts.block_m], float("-inf"), tl.float32)
    row_sum = tl.full([facts.block_m], 0.0, tl.float32)
    if facts.has_sinks:
        _, head = row_heads(rows, sequence, facts)
        # One split has the sink, and tokens after the last sequence have none.
        has_sink = (split == 0) & (sequence.batch < numbers.batch)
        row_max = tl.where(has_sink, sink_log2(tl.load(tensors.sinks + head)), float("-inf"))
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def _softmax_step(s_mn, row_max, row_sum, numbers, facts: tl.constexpr):
    """p_mn, the new state, and the factor that rescales what was summed before."""
    if facts.folds_scale:
        new_max = tl.maximum(row_max, tl.max(s_mn, 1) * numbers.scale_log2)
    else:
        new_max = tl.maximum(row_max, tl.max(s_mn, 1))
    # A row that has seen no key yet: exp2(-inf - 0) = 0, not NaN.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p_mn = probabilities(s_mn, finite_max[:, None], numbers, facts)
    alpha = tl.exp2(row_max - finite_max)
    return p_mn, new_max, row_sum * alpha + tl.sum(p_mn, 1), alpha


@triton.jit
def _attend(
    state, q_m, rows, slopes, ranges, visits, span, sequence, tensors, numbers, facts: tl.constexpr
):  # fmt: skip
    """Fold the key tiles of `ranges`, or of `visits`, into `state`, (row_max, row_sum, acc)."""
    row_max, row_sum, acc = state
    n = tl.arange(0, facts.block_n)
    i, head = row_heads(rows, sequence, facts)
    rows_inside = i < sequence.seqlen_q
    keys = key_pointers(tensors.k, sequence, numbers.k_strides, facts, facts.block_d)
    values = key_pointers(tensors.v, sequence, numbers.v_strides, facts, facts.block_dv)
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
        s_mn = tl.dot(q_m, tl.trans(k_n), input_precision=facts.precision)
        s_mn, _capped = score_tile(
            s_mn, i[:, None], (n_start + n)[None, :], head[:, None], slopes[:, None], rows_inside[:, None], sequence,
            tensors, numbers, needs_mask(n_start, step, visits, ranges, facts, False), n_start, entry, facts,
        )  # fmt: skip
        p_mn, row_max, row_sum, alpha = _softmax_step(s_mn, row_max, row_sum, numbers, facts)
        if facts.has_dropout:
            p_mn = tl.where(keep_tile(rows, n_start, sequence, tensors, numbers, facts), p_mn, 0.0)
        v_n = load_keys(values, n_start, sequence, numbers.v_strides, facts, facts.head_dim_v, facts.block_dv)
        acc = tl.dot(p_mn.to(v_n.dtype), v_n, acc * alpha[:, None], input_precision=facts.precision)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["numbers"])
def forward_kernel(tensors, numbers, facts: tl.constexpr):
    """out and lse of a tile of packed rows."""
    sequence, tile, span, split = place(tl.program_id(0), tensors, numbers, facts, False)
    m_start = tile * facts.block_m
    num_rows = sequence.seqlen_q * facts.group
    if m_start >= num_rows:
        return
    rows = m_start + tl.arange(0, facts.block_m)
    rows_inside = rows < num_rows
    d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
    q_rows = row_pointers(tensors.q, rows, sequence, numbers.q_strides, facts, facts.block_d)
    q_m = load_tile(q_rows, rows_inside, d, facts.head_dim, facts.block_d)
    slopes = rows
    if facts.has_alibi:
        slopes = row_slopes(rows, sequence, tensors, numbers, facts)

    row_max, row_sum = _initial_state(rows, split, sequence, tensors, numbers, facts)
    state = row_max, row_sum, tl.full([facts.block_m, facts.block_dv], 0.0, tl.float32)
    ranges = key_ranges(m_start, sequence, facts)
    if facts.has_splits:
        ranges = _clip(ranges, split * numbers.split_keys, (split + 1) * numbers.split_keys)
    visits = visits_of(span, ranges, tensors, facts, False)
    state = _attend(state, q_m, rows, slopes, ranges, visits, span, sequence, tensors, numbers, facts)
    row_max, row_sum, acc = state

    lse_log2 = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
    acc = acc * tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
    if facts.flags and not facts.has_splits:
        flag(acc, acc, rows_inside, tensors)
    if facts.has_dropout:
        acc = acc * numbers.keep_scale
    places = numbers_at(rows, sequence, numbers, facts)
    inside = rows_inside[:, None] & (e < facts.head_dim_v)[None, :]
    if facts.has_splits:
        parts = tensors.out_parts + split * (numbers.num_rows.to(tl.int64) * facts.head_dim_v)
        parts += (places * facts.head_dim_v)[:, None] + e[None, :]
        tl.store(parts, acc, inside)
        tl.store(tensors.lse_parts + split * numbers.num_rows.to(tl.int64) + places, lse_log2, rows_inside)
    else:
        out = row_pointers(tensors.out, rows, sequence, numbers.out_strides, facts, facts.block_dv)
        tl.store(out, acc.to(tensors.out.dtype.element_ty), inside)
        tl.store(tensors.lse + places, lse_log2 * LN2, rows_inside)


@triton.jit
def _clip(ranges, lo, hi):
    """The part of `ranges` within [lo, hi), whole tiles both."""
    return Ranges(
        tl.minimum(tl.maximum(ranges.lo, lo), hi),
        tl.minimum(tl.maximum(ranges.full_lo, lo), hi),
        tl.minimum(tl.maximum(ranges.full_hi, lo), hi),
        tl.minimum(tl.maximum(ranges.hi, lo), hi),
    )


@triton.jit(do_not_specialize=["numbers"])
def combine_kernel(tensors, numbers, facts: tl.constexpr):
    """out and lse of a tile of packed rows from the parts of the splits: `state.merge`, in order of the splits."""
    tile, head_kv, batch, _split = tile_index(tl.program_id(0), numbers, facts)
    sequence, tile = locate(tile, head_kv, batch, tensors, numbers, facts, BY_KEYS=False)
    rows = tile * facts.block_m + tl.arange(0, facts.block_m)
    rows_inside = rows < sequence.seqlen_q * facts.group
    e = tl.arange(0, facts.block_dv)
    inside = rows_inside[:, None] & (e < facts.head_dim_v)[None, :]
    places = numbers_at(rows, sequence, numbers, facts)
    row_max = tl.full([facts.block_m], float("-inf"), tl.float32)
    for split in range(numbers.num_splits):
        lse_parts = tensors.lse_parts + split * numbers.num_rows.to(tl.int64) + places
        row_max = tl.maximum(row_max, tl.load(lse_parts, rows_inside, other=float("-inf")))
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.full([facts.block_m], 0.0, tl.float32)
    acc = tl.full([facts.block_m, facts.block_dv], 0.0, tl.float32)
    for split in range(numbers.num_splits):
        first = split * numbers.num_rows.to(tl.int64) + places
        weight = tl.exp2(tl.load(tensors.lse_parts + first, rows_inside, other=float("-inf")) - finite_max)
        part = tl.load(tensors.out_parts + (first * facts.head_dim_v)[:, None] + e[None, :], inside, other=0.0)
        # A part without keys weighs nothing.
        acc += tl.where(weight[:, None] == 0.0, 0.0, part * weight[:, None])
        row_sum += weight
    acc = acc * tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
    out = row_pointers(tensors.out, rows, sequence, numbers.out_strides, facts, facts.block_dv)
    tl.store(out, acc.to(tensors.out.dtype.element_ty), inside)
    if facts.flags:
        flag(acc, acc, rows_inside, tensors)
    lse_log2 = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
    tl.store(tensors.lse + places, lse_log2 * LN2, rows_inside)


@triton.jit(do_not_specialize=["numbers"])
def exact_forward_kernel(tensors, numbers, facts: tl.constexpr):
    """out of tiles that `forward_kernel` or `combine_kernel` has flagged."""
    for_flagged(exact_program, tensors, numbers, facts)


@triton.jit
def exact_program(program, tensors, numbers, facts: tl.constexpr):
    """out of a program's tile."""
    sequence, tile, span, split = place(program, tensors, numbers, facts, False)
    # Programs without rows have flagged nothing, and their flag holds anything.
    if tile * facts.block_m < sequence.seqlen_q * facts.group:
        _exact_tile(tile, sequence, span, split, tensors, numbers, facts)


@triton.jit
def _exact_tile(tile, sequence, span, split, tensors, numbers, facts: tl.constexpr):
    """out of a tile of packed rows, exact where values are not finite.

    lse stands for the row maximum: P is divided by its own sum, because a large lse is not known to P's last places.
    """
    rows = tile * facts.block_m + tl.arange(0, facts.block_m)
    i, head = row_heads(rows, sequence, facts)
    rows_inside = i < sequence.seqlen_q
    d, e, n = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv), tl.arange(0, facts.block_n)
    q_rows = row_pointers(tensors.q, rows, sequence, numbers.q_strides, facts, facts.block_d)
    q_m = load_tile(q_rows, rows_inside, d, facts.head_dim, facts.block_d)
    lse_log2 = row_lse(rows, rows_inside, sequence, tensors, numbers, facts)
    slopes = rows
    if facts.has_alibi:
        slopes = row_slopes(rows, sequence, tensors, numbers, facts)
    keys = key_pointers(tensors.k, sequence, numbers.k_strides, facts, facts.block_d)
    values = key_pointers(tensors.v, sequence, numbers.v_strides, facts, facts.block_dv)
    ranges = key_ranges(tile * facts.block_m, sequence, facts)
    visits = visits_of(span, ranges, tensors, facts, False)
    STEP: tl.constexpr = 1 if facts.has_blocks else facts.block_n
    lo, hi = steps_of(ranges, visits, numbers, facts, False)
    acc = tl.full([facts.block_m, facts.block_dv], 0.0, tl.float32)
    sink, row_sum = _initial_state(rows, split, sequence, tensors, numbers, facts)
    row_sum *= tl.exp2(sink - lse_log2)
    for step in tl.range(lo, hi, STEP):
        n_start, entry = step, -1
        if facts.has_blocks:
            n_start, _head = visit(step, visits, tensors, facts, False)
            entry = entry_of(step, visits, facts, False)
        k_n = load_keys(keys, n_start, sequence, numbers.k_strides, facts, facts.head_dim, facts.block_d)
        s_mn = tl.dot(q_m, tl.trans(k_n), input_precision=facts.precision)
        s_mn, _capped = score_tile(
            s_mn, i[:, None], (n_start + n)[None, :], head[:, None], slopes[:, None], rows_inside[:, None], sequence,
            tensors, numbers, True, n_start, entry, facts,
        )  # fmt: skip
        visible = s_mn != float("-inf")
        p_mn = tl.where(visible, probabilities(s_mn, lse_log2[:, None], numbers, facts), 0.0)
        row_sum += tl.sum(p_mn, 1)
        if facts.has_dropout:
            keep = keep_tile(rows, n_start, sequence, tensors, numbers, facts)
            p_mn = tl.where(keep, p_mn * numbers.keep_scale, 0.0)
        v_n = load_keys(values, n_start, sequence, numbers.v_strides, facts, facts.head_dim_v, facts.block_dv)
        acc += exact_product(p_mn, visible, v_n, facts)
    acc = acc * tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)[:, None]
    out = row_pointers(tensors.out, rows, sequence, numbers.out_strides, facts, facts.block_dv)
    inside = rows_inside[:, None] & (e < facts.head_dim_v)[None, :]
    tl.store(out, acc.to(tensors.out.dtype.element_ty), inside)
