"""Attention backward of float32 inputs on Hopper: dq, dk and dv from operands in bfloat16 parts (`parts.py`).

Computes   as `backward.py`, whose delta_kernel comes first and writes the parts of Q and dout; split_kernel writes
           those of K and V.
Schedule   as there: a program per tile of keys, and one per tile of rows.
Traffic    10 bytes per element of Q, K, V and dout to split them (4 read, 6 written); then as `backward.py`, with 6
           bytes an element instead of 4.
On chip    Tiles of K and V (or Q and dout) in parts stay in shared memory. With `Facts.takes_turns` they leave room for
           one streamed tile: those take turns in it, and the next one waits in registers.
Numerics   as float32 products: see `parts.py`. Flags are always written, because of what is not finite.
Limits     no softcap, ALiBi, bias or dropout, for which there is no room in registers; head dimensions up to 128.

Shapes: M packed rows of a tile; N keys of a tile; D head_dim; E head_dim_v, both padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.backends.triton.careful import flag
from tilestream.backends.triton.parts import (
    delayed,
    dot_parts,
    load_parts,
    part_offsets,
    part_pointers,
    split,
    store_parts,
    trans_parts,
    zeros_after,
)
from tilestream.backends.triton.score import probabilities, score_tile
from tilestream.backends.triton.tiles import (
    is_partial,
    key_offsets,
    key_ranges,
    load_tile,
    locate,
    padded_keys,
    padded_rows,
    query_ranges,
    row_heads,
    row_pointers,
    tile_index,
)

__all__ = ["key_parts_kernel", "query_parts_kernel", "split_kernel"]


@triton.jit(do_not_specialize=["numbers"])
def split_kernel(tensors, numbers, facts: tl.constexpr):
    """Parts of a tile of K and V."""
    tile, head_kv, batch, _split = tile_index(tl.program_id(0), numbers, facts)
    sequence, tile = locate(tile, head_kv, batch, tensors, numbers, facts, BY_KEYS=True)
    n_start = tile * facts.block_n
    if n_start < sequence.seqlen_k:
        j = n_start + tl.arange(0, facts.block_n)
        keys_inside = j < sequence.seqlen_k
        d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
        k_keys = tensors.k + key_offsets(j, sequence, numbers.k_strides, facts)[:, None] + d[None, :]
        v_keys = tensors.v + key_offsets(j, sequence, numbers.v_strides, facts)[:, None] + e[None, :]
        first = padded_keys(sequence, numbers, facts) + n_start
        k_parts = part_pointers(tensors.k_parts, first, facts.block_n, facts.block_d)
        v_parts = part_pointers(tensors.v_parts, first, facts.block_n, facts.block_dv)
        store_parts(k_parts, load_tile(k_keys, keys_inside, d, facts.head_dim, facts.block_d), facts.block_d)
        store_parts(v_parts, load_tile(v_keys, keys_inside, e, facts.head_dim_v, facts.block_dv), facts.block_dv)


@triton.jit
def _key_loop(k_n, v_n, n_start, ranges, sequence, tensors, numbers, facts: tl.constexpr):
    """(dk, dv) of a tile of keys from the row tiles of `ranges`."""
    D: tl.constexpr = 3 * facts.block_d
    E: tl.constexpr = 3 * facts.block_dv
    m = tl.arange(0, facts.block_m)
    j = n_start + tl.arange(0, facts.block_n)
    padded = padded_rows(sequence, numbers, facts)
    q_tile = tensors.q_parts + part_offsets(facts.block_m, facts.block_d)
    dout_tile = tensors.dout_parts + part_offsets(facts.block_m, facts.block_dv)
    nothing = tl.full([facts.block_n, facts.block_m], 0.0, tl.float32)
    dk = tl.full([facts.block_n, facts.block_d], 0.0, tl.float32)
    dv = tl.full([facts.block_n, facts.block_dv], 0.0, tl.float32)
    if facts.takes_turns:
        # A band may show no row at all; the first tile of rows is there nevertheless.
        start = padded + tl.where(ranges.lo < ranges.hi, ranges.lo, 0)
        q_0, q_1, q_2 = load_parts(q_tile + start * D, facts.block_d)
    for m_start in tl.range(ranges.lo, ranges.hi, facts.block_m):
        rows = m_start + m
        i, head = row_heads(rows, sequence, facts)
        here, following = padded + m_start, padded + tl.minimum(m_start + facts.block_m, ranges.hi - facts.block_m)
        lse_log2 = tl.load(tensors.row_lse + padded + rows)
        delta = tl.load(tensors.row_delta + padded + rows)
        q_m = (q_0, q_1, q_2) if facts.takes_turns else load_parts(q_tile + here * D, facts.block_d)
        dout_m = load_parts(dout_tile + here * E, facts.block_dv)
        s_nm = dot_parts(k_n, trans_parts(q_m), nothing)
        s_nm, _capped = score_tile(
            s_nm, i[None, :], j[:, None], head[None, :], rows[None, :], (i < sequence.seqlen_q)[None, :], sequence,
            tensors, numbers, facts.is_band and is_partial(m_start, ranges), m_start, -1, facts,
        )  # fmt: skip
        if facts.takes_turns:
            dout_m = delayed(dout_m)
        p_nm = probabilities(s_nm, lse_log2[None, :], numbers, facts)
        dv += dot_parts(split(p_nm), dout_m, tl.full([facts.block_n, facts.block_dv], 0.0, tl.float32))
        if facts.takes_turns:
            q_m = load_parts(q_tile + here * D, facts.block_d)
        dp_nm = dot_parts(v_n, trans_parts(dout_m), nothing)
        ds_nm = p_nm * (dp_nm - delta[None, :])
        if facts.takes_turns:
            q_m = delayed(q_m)
        if facts.block_d == facts.block_dv:
            dk += dot_parts(split(ds_nm), q_m, zeros_after(dv, numbers))
        else:
            dk += dot_parts(split(ds_nm), q_m, tl.full([facts.block_n, facts.block_d], 0.0, tl.float32))
        if facts.takes_turns:
            q_0, q_1, q_2 = load_parts(q_tile + following * D, facts.block_d)
    return dk, dv


@triton.jit(do_not_specialize=["numbers"])
def key_parts_kernel(tensors, numbers, facts: tl.constexpr):
    """dk and dv of a tile of keys."""
    tile, head_kv, batch, _split = tile_index(tl.program_id(0), numbers, facts)
    sequence, tile = locate(tile, head_kv, batch, tensors, numbers, facts, BY_KEYS=True)
    n_start = tile * facts.block_n
    if n_start < sequence.seqlen_k:
        j = n_start + tl.arange(0, facts.block_n)
        keys_inside = j < sequence.seqlen_k
        first = padded_keys(sequence, numbers, facts) + n_start
        k_parts = part_pointers(tensors.k_parts, first, facts.block_n, facts.block_d)
        v_parts = part_pointers(tensors.v_parts, first, facts.block_n, facts.block_dv)
        k_n, v_n = load_parts(k_parts, facts.block_d), load_parts(v_parts, facts.block_dv)
        ranges = query_ranges(n_start, sequence, facts)
        dk, dv = _key_loop(k_n, v_n, n_start, ranges, sequence, tensors, numbers, facts)
        flag(dk, dv, keys_inside, tensors)
        d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
        dk_keys = tensors.dk + key_offsets(j, sequence, numbers.dk_strides, facts)[:, None] + d[None, :]
        dv_keys = tensors.dv + key_offsets(j, sequence, numbers.dv_strides, facts)[:, None] + e[None, :]
        tl.store(dk_keys, dk * numbers.scale, keys_inside[:, None] & (d < facts.head_dim)[None, :])
        tl.store(dv_keys, dv, keys_inside[:, None] & (e < facts.head_dim_v)[None, :])


@triton.jit
def _query_loop(q_m, dout_m, rows, ranges, sequence, tensors, numbers, facts: tl.constexpr):
    """dq of a tile of packed rows from the key tiles of `ranges`."""
    D: tl.constexpr = 3 * facts.block_d
    E: tl.constexpr = 3 * facts.block_dv
    n = tl.arange(0, facts.block_n)
    i, head = row_heads(rows, sequence, facts)
    rows_inside = i < sequence.seqlen_q
    padded = padded_rows(sequence, numbers, facts)
    lse_log2 = tl.load(tensors.row_lse + padded + rows)
    delta = tl.load(tensors.row_delta + padded + rows)
    keys = padded_keys(sequence, numbers, facts)
    k_tile = tensors.k_parts + part_offsets(facts.block_n, facts.block_d)
    v_tile = tensors.v_parts + part_offsets(facts.block_n, facts.block_dv)
    nothing = tl.full([facts.block_m, facts.block_n], 0.0, tl.float32)
    dq = tl.full([facts.block_m, facts.block_d], 0.0, tl.float32)
    if facts.takes_turns:
        start = keys + tl.where(ranges.lo < ranges.hi, ranges.lo, 0)
        v_0, v_1, v_2 = load_parts(v_tile + start * E, facts.block_dv)
        k_0, k_1, k_2 = load_parts(k_tile + start * D, facts.block_d)
    for n_start in tl.range(ranges.lo, ranges.hi, facts.block_n):
        here, following = keys + n_start, keys + tl.minimum(n_start + facts.block_n, ranges.hi - facts.block_n)
        v_n = (v_0, v_1, v_2) if facts.takes_turns else load_parts(v_tile + here * E, facts.block_dv)
        dp_mn = dot_parts(dout_m, trans_parts(v_n), nothing)
        if facts.takes_turns:
            v_0, v_1, v_2 = load_parts(v_tile + following * E, facts.block_dv)
            k_n = delayed((k_0, k_1, k_2))
        else:
            k_n = load_parts(k_tile + here * D, facts.block_d)
        s_mn = dot_parts(q_m, trans_parts(k_n), nothing)
        s_mn, _capped = score_tile(
            s_mn, i[:, None], (n_start + n)[None, :], head[:, None], rows[:, None], rows_inside[:, None], sequence,
            tensors, numbers, is_partial(n_start, ranges), n_start, -1, facts,
        )  # fmt: skip
        if facts.takes_turns:
            k_0, k_1, k_2 = load_parts(k_tile + following * D, facts.block_d)
        p_mn = probabilities(s_mn, lse_log2[:, None], numbers, facts)
        ds_mn = p_mn * (dp_mn - delta[:, None])
        dq += dot_parts(split(ds_mn), k_n, tl.full([facts.block_m, facts.block_d], 0.0, tl.float32))
    return dq


@triton.jit(do_not_specialize=["numbers"])
def query_parts_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of a tile of packed rows."""
    tile, head_kv, batch, _split = tile_index(tl.program_id(0), numbers, facts)
    sequence, tile = locate(tile, head_kv, batch, tensors, numbers, facts, BY_KEYS=False)
    m_start = tile * facts.block_m
    num_rows = sequence.seqlen_q * facts.group
    if m_start < num_rows:
        rows = m_start + tl.arange(0, facts.block_m)
        rows_inside = rows < num_rows
        first = padded_rows(sequence, numbers, facts) + m_start
        q_parts = part_pointers(tensors.q_parts, first, facts.block_m, facts.block_d)
        dout_parts = part_pointers(tensors.dout_parts, first, facts.block_m, facts.block_dv)
        q_m, dout_m = load_parts(q_parts, facts.block_d), load_parts(dout_parts, facts.block_dv)
        ranges = key_ranges(m_start, sequence, facts)
        dq = _query_loop(q_m, dout_m, rows, ranges, sequence, tensors, numbers, facts)
        flag(dq, dq, rows_inside, tensors)
        d = tl.arange(0, facts.block_d)
        dq_rows = row_pointers(tensors.dq, rows, sequence, numbers.dq_strides, facts, facts.block_d)
        tl.store(dq_rows, dq * numbers.scale, rows_inside[:, None] & (d < facts.head_dim)[None, :])
