"""The gradient of the additive bias.

Computes   sums of dS over the tiles that share entries of the bias, in a fixed order.
Algorithm  dS = P * (dout V^T - delta), P made again from lse, as in `backward`.
Schedule   a program per tile of bias entries; it goes over the batch entries, heads, queries or keys that the entries
           are broadcast to, one after the other. A kernel of its own, because only then does every entry have one
           program that adds to it: no atomic sums, and O(bias) memory.
Traffic    reads Q, K, V, dout, lse and delta of every tile it visits, writes the bias gradient once.
On chip    q, k, v, dout of one tile in shared memory; s_mn, dp_mn and the sums in registers.
Numerics   sums in float32.
Limits     one program per 64 keys of a bias that is broadcast over queries, heads and batch: use such a bias sparingly.

Shapes: M queries of a tile; N keys of a tile; D head_dim; E head_dim_v.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.backends.triton.score import keep_tile, probabilities, row_slopes, score_tile
from tilestream.backends.triton.tiles import (
    key_offsets,
    load_tile,
    numbers_at,
    row_lse,
    row_offsets,
    sequence_of,
)
from tilestream.backends.triton.visits import entry_at

__all__ = ["bias_kernel"]


@triton.jit
def _tile_gradient(m_start, n_start, entry, head, sequence, tensors, numbers, facts: tl.constexpr):
    """dS of one tile of one query head, 0 where nothing is visible."""
    d, e = tl.arange(0, facts.block_d), tl.arange(0, facts.block_dv)
    i = m_start + tl.arange(0, facts.block_m)
    j = n_start + tl.arange(0, facts.block_n)
    # The packed rows of this head alone.
    rows = i * facts.group + head % facts.group
    rows_inside, keys_inside = i < sequence.seqlen_q, j < sequence.seqlen_k
    q_rows = tensors.q + row_offsets(rows, sequence, numbers.q_strides, facts)[:, None] + d[None, :]
    dout_rows = tensors.dout + row_offsets(rows, sequence, numbers.dout_strides, facts)[:, None] + e[None, :]
    k_keys = tensors.k + key_offsets(j, sequence, numbers.k_strides, facts)[:, None] + d[None, :]
    v_keys = tensors.v + key_offsets(j, sequence, numbers.v_strides, facts)[:, None] + e[None, :]
    q_m = load_tile(q_rows, rows_inside, d, facts.head_dim, facts.block_d)
    k_n = load_tile(k_keys, keys_inside, d, facts.head_dim, facts.block_d)
    dout_m = load_tile(dout_rows, rows_inside, e, facts.head_dim_v, facts.block_dv)
    v_n = load_tile(v_keys, keys_inside, e, facts.head_dim_v, facts.block_dv)
    slopes = rows
    if facts.has_alibi:
        slopes = row_slopes(rows, sequence, tensors, numbers, facts)
    s_mn = tl.dot(q_m, tl.trans(k_n), input_precision=facts.precision)
    s_mn, _capped = score_tile(
        s_mn,
        i[:, None],
        j[None, :],
        head,
        slopes[:, None],
        rows_inside[:, None],
        sequence,
        tensors,
        numbers,
        True,
        n_start,
        entry,
        facts,
    )
    p_mn = probabilities(s_mn, row_lse(rows, rows_inside, sequence, tensors, numbers, facts)[:, None], numbers, facts)
    dp_mn = tl.dot(dout_m, tl.trans(v_n), input_precision=facts.precision)
    if facts.has_dropout:
        keep = keep_tile(rows, n_start, sequence, tensors, numbers, facts)
        dp_mn = tl.where(keep, dp_mn * numbers.keep_scale, 0.0)
    delta = tl.load(tensors.delta + numbers_at(rows, sequence, numbers, facts), rows_inside, other=0.0)
    return tl.where(s_mn == float("-inf"), 0.0, p_mn * (dp_mn - delta[:, None]))


@triton.jit(do_not_specialize=["numbers"])
def bias_kernel(tensors, numbers, facts: tl.constexpr):
    """The gradient of a tile of bias entries, (batch | 1, heads | 1, queries | 1, keys | 1) in float32."""
    _, heads, num_rows, num_keys = numbers.dbias_shape
    # Broadcast dimensions are gone over here; those of batch and heads only beside full queries and keys.
    m_tiles = 1 if facts.sums_rows else tl.cdiv(num_rows, facts.block_m)
    n_tiles = 1 if facts.sums_keys else tl.cdiv(num_keys, facts.block_n)
    program = tl.program_id(0)
    n_tile, rest = program % n_tiles, program // n_tiles
    m_tile, rest = rest % m_tiles, rest // m_tiles
    first_head, first_batch = rest % heads, rest // heads
    head_stop = numbers.num_heads_kv * facts.group if heads == 1 else first_head + 1
    batch_stop = numbers.batch if numbers.dbias_shape[0] == 1 else first_batch + 1
    total = tl.full([facts.block_m, facts.block_n], 0.0, tl.float32)
    # Assigned anew, because the interpreter counts in Python's numbers and makes tensors of what is assigned.
    for batch_index in range(first_batch, batch_stop):
        batch = batch_index
        for head_index in range(first_head, head_stop):
            head = head_index
            head_kv = head // facts.group
            sequence = sequence_of(batch, head_kv, tensors, numbers, facts, False)
            m_lo = m_tile * facts.block_m
            n_lo = n_tile * facts.block_n
            m_hi = sequence.seqlen_q if facts.sums_rows else tl.minimum(m_lo + 1, sequence.seqlen_q)
            n_hi = sequence.seqlen_k if facts.sums_keys else tl.minimum(n_lo + 1, sequence.seqlen_k)
            for m_start in range(m_lo, m_hi, facts.block_m):
                for n_start in range(n_lo, n_hi, facts.block_n):
                    if facts.has_blocks:
                        entry = entry_at(m_start, n_start, sequence, tensors, numbers, facts)
                        # What is not kept is not even loaded.
                        if entry >= 0:
                            total += _tile_gradient(m_start, n_start, entry, head, sequence, tensors, numbers, facts)
                    else:
                        total += _tile_gradient(m_start, n_start, -1, head, sequence, tensors, numbers, facts)
    i = m_tile * facts.block_m + tl.arange(0, facts.block_m)
    j = n_tile * facts.block_n + tl.arange(0, facts.block_n)
    dbias = tensors.dbias + (first_batch.to(tl.int64) * heads + first_head) * num_rows * num_keys
    if facts.sums_rows:
        tl.store(dbias + j, tl.sum(total, 0), j < num_keys)
    elif facts.sums_keys:
        tl.store(dbias + i, tl.sum(total, 1), i < num_rows)
    else:
        places = i.to(tl.int64)[:, None] * num_keys + j[None, :]
        tl.store(dbias + places, total, (i < num_rows)[:, None] & (j < num_keys)[None, :])
