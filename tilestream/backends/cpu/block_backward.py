"""Block-sparse attention backward in PyTorch operations.

Computes   dq, dk, dv and, where asked for, dbias and dsinks, over the blocks that a mask keeps.
Algorithm  FlashAttention, algorithms 4 and 5 (arXiv:2205.14135): the tiles of backward.py, key blocks outside.
Schedule   chunks as the forward, one plane of the mask at a time; in each, the key blocks; for each the queries that
           the transposed lists name, in order. dk and dv of a chunk are added up in its compute dtype, and so is dq.
Traffic    reads K and V once; Q, dout, lse and delta, and reads and writes dq, once per kept tile; writes dk, dv.
On chip    three tiles of scores, as backward.py.
Numerics   as backward.py, in a fixed order: equal bit for bit from run to run.
Limits     none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilestream.backends.cpu.backward import Keys, Rows, add_sink_gradient, packed_rows, tile_gradients
from tilestream.backends.cpu.block_tiles import column_tiles
from tilestream.backends.cpu.layout import Chunk, DenseCall, chunks, compute_dtype, key_walk_shape
from tilestream.backends.cpu.score import is_tame
from tilestream.problem import Gradients
from tilestream.state import AttentionOutput

__all__ = ["backward"]


def backward(
    call: DenseCall,
    output: AttentionOutput,
    dout: Tensor,
    dlse: Tensor | None,
    needs_dbias: bool,
    needs_dsinks: bool,
) -> Gradients:
    """Gradients of one dense call: dq, dk, dv in the input dtype, dbias and dsinks in the compute dtype."""
    dtype = compute_dtype(call.query.dtype)
    (seqlen_q, seqlen_k), mask = (call.query.shape[1], call.key.shape[1]), call.problem.block_mask
    assert mask is not None

    def zeros(x: Tensor | None, is_needed: bool = True) -> Tensor | None:
        return torch.zeros(x.shape, dtype=dtype, device=x.device) if is_needed and x is not None else None

    dq, dk, dv, dbias, dsinks = map(
        zeros,
        (call.query, call.key, call.value, call.bias, call.sinks),
        (True, True, True, needs_dbias, needs_dsinks),
    )
    assert dq is not None
    assert dk is not None
    assert dv is not None
    block_m, block_n = key_walk_shape(call.problem, seqlen_q, seqlen_k)
    tame = is_tame((call.query, call.key), (dout, call.value), scale=call.problem.spec.scale)
    for chunk in chunks(call, block_m, block_n) if seqlen_q else ():
        rows = packed_rows(call, chunk, 0, seqlen_q, output, dout, dlse)
        k, v = chunk.key_rows(call.key, dtype), chunk.key_rows(call.value, dtype)
        keys = Keys(k, v, *(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v)))
        scratch = k.new_empty(3, chunk.num_groups * block_m * chunk.group * block_n)
        for column in range(0, seqlen_k, mask.block_size[1]):
            end = min(column + mask.block_size[1], seqlen_k)
            for n_start in range(column, end, block_n):
                for score_tile in column_tiles(call, chunk, n_start, min(n_start + block_n, end), block_m, tame):
                    part = _cut(chunk, rows, score_tile.tile.m_start, score_tile.tile.m_end)
                    tile_gradients(score_tile, part, keys, dbias, scratch)
                    _by_head(chunk, rows.dq_m)[:, :, part.m_start : part.m_end] += _by_head(chunk, part.dq_m)
        of_chunk = rows.dq_m.mul_(call.problem.spec.scale)
        chunk.query_rows(dq).copy_(of_chunk.view(chunk.query_rows(dq).shape))
        for total, gradient in ((keys.dk, dk), (keys.dv, dv)):
            # Added, because heads with masks of their own may share keys.
            gradient[chunk.batch, :, chunk.kv_heads] += total.unflatten(
                0, (chunk.num_batch, chunk.num_heads_kv)
            ).transpose(1, 2)
        if dsinks is not None:
            add_sink_gradient(call, chunk, rows, dsinks)
    return Gradients(dq.to(call.query.dtype), dk.to(call.key.dtype), dv.to(call.value.dtype), dbias, dsinks)


def _by_head(chunk: Chunk, packed: Tensor) -> Tensor:
    """(C, G * m, W) as (C, G, m, W)."""
    return packed.view(packed.shape[0], chunk.group, -1, packed.shape[-1])


def _cut(chunk: Chunk, rows: Rows, m_start: int, m_end: int) -> Rows:
    """Some of the rows, with dq_m = 0."""

    def cut(packed: Tensor) -> Tensor:
        return _by_head(chunk, packed)[:, :, m_start:m_end].flatten(1, 2)

    q_m = cut(rows.q_m)
    return replace(
        rows,
        m_start=m_start,
        m_end=m_end,
        q_m=q_m,
        dout_m=cut(rows.dout_m),
        lse_m=cut(rows.lse_m),
        delta_m=cut(rows.delta_m),
        dq_m=torch.zeros(q_m.shape, dtype=q_m.dtype, device=q_m.device),
    )
