"""Attention forward in PyTorch operations.

Computes   out = softmax(score(q, k)) v  and  lse.
Algorithm  FlashAttention-2, algorithm 1 (arXiv:2307.08691), as in teaching.py: the tile loop is Python, each step is
           one batched PyTorch operation over the groups of a chunk.
Schedule   chunks of (batch, KV head) groups; in each, tiles of queries; in each, tiles of keys from left to right.
           EMPTY tiles are never loaded, PARTIAL ones masked; with a block mask the same loop runs over its lists.
Traffic    reads Q once, K and V once per visited (query tile, key tile); writes out and lse once.
           Not counted: one more look at each input for its largest magnitude.   formula: io.model.tiled_bytes
On chip    a tile of scores (256 packed rows x 512 keys per group) and the state; the caches hold them.
Numerics   scores and state in float32 (float64 for float64 inputs), natural exponential.
Limits     none: every feature, any width, any device. Half types are converted to float32 chunk by chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.backends.cpu.block_tiles import row_tiles, rows_of
from tilestream.backends.cpu.layout import Chunk, DenseCall, chunks, compute_dtype, pack_rows, tile_shape
from tilestream.backends.cpu.score import ScoreTile, add_product, is_tame, per_row
from tilestream.state import AttentionOutput, SoftmaxState

__all__ = ["forward", "scaled_dot_products"]


def forward(call: DenseCall) -> AttentionOutput:
    """out (B, M, heads, E) and lse (B, heads, M) of one dense call."""
    num_batch, seqlen_q, num_heads, _ = call.query.shape
    dtype = compute_dtype(call.query.dtype)
    out = call.query.new_empty(num_batch, seqlen_q, num_heads, call.value.shape[-1])
    lse = call.query.new_empty(num_batch, num_heads, seqlen_q, dtype=dtype)
    block_m, block_n = tile_shape(call.problem, seqlen_q, call.key.shape[1])
    # Values meet weights of at most 1, so for them finite is enough: a pair with nothing.
    tame = is_tame((call.query, call.key), (call.value, call.value[:0]), scale=call.problem.spec.scale)
    for chunk in chunks(call, block_m, block_n):
        q, k, v = chunk.query_rows(call.query), chunk.key_rows(call.key, dtype), chunk.key_rows(call.value, dtype)
        out_rows, lse_rows = chunk.query_rows(out), chunk.row_numbers(lse)
        scratch = k.new_empty(chunk.num_groups * block_m * chunk.group * block_n)
        for m_start, m_end in rows_of(call, block_m):
            q_m = pack_rows(q, m_start, m_end, dtype) * call.problem.spec.scale
            state = _initial_state(call, chunk, m_end - m_start, v)
            for score_tile in row_tiles(call, chunk, m_start, m_end, block_n, tame):
                _attend(score_tile, q_m, k, v, state, scratch)
            finished = state.finalize()
            out_rows[..., m_start:m_end, :] = finished.out.view(*out_rows.shape[:3], -1, out_rows.shape[-1])
            lse_rows[..., m_start:m_end, :] = finished.lse.view(*lse_rows.shape[:3], -1, 1)
    return AttentionOutput(out, lse)


def _attend(score_tile: ScoreTile, q_m: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, scratch: Tensor) -> None:
    """Fold one key tile into `state`."""
    cut = slice(score_tile.tile.n_start, score_tile.tile.n_end)
    s_mn = score_tile.forward(scaled_dot_products(q_m, k[:, cut], scratch))
    visible = score_tile.visible(s_mn)
    p_mn = state.rescale(s_mn)
    factor = score_tile.dropout_factor(p_mn.dtype)
    if factor is not None:
        p_mn.mul_(factor)
    add_product(state.acc, p_mn, v[:, cut], visible)


def _initial_state(call: DenseCall, chunk: Chunk, num_rows: int, v: Tensor) -> SoftmaxState:
    """The identity, or each head's sink."""
    if call.sinks is None:
        rows = (chunk.num_groups, chunk.group * num_rows)
        return SoftmaxState.identity(rows, v.shape[-1], v.dtype, v.device)
    sink = per_row(call.sinks, chunk, num_rows, v.dtype)
    return SoftmaxState.from_sink(sink, v.shape[-1])


def scaled_dot_products(q_m: Tensor, k_n: Tensor, scratch: Tensor) -> Tensor:
    """``q_m @ k_n^T`` (C, G * m, n) of already scaled queries, in the front of `scratch`."""
    shape = (q_m.shape[0], q_m.shape[1], k_n.shape[1])
    s_mn = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
    return torch.bmm(q_m, k_n.transpose(1, 2), out=s_mn)
