"""Attention backward in PyTorch operations.

Computes   dq, dk, dv and, where asked for, dbias and dsinks.
Algorithm  FlashAttention, algorithm 4 (arXiv:2205.14135), query tiles outside: P is made again from lse, then
           dv += P^T dout;  dS = P * (dout V^T - delta);  dq += dS K;  dk += dS^T Q.
           delta = rowsum(out * dout) - dlse, which is all that a gradient of lse changes.
Schedule   as the forward; dk and dv of a chunk are accumulated in its compute dtype.
Traffic    reads Q, out, dout once, K and V once per visited tile; writes dq once; reads and writes the dk, dv
           accumulators once per visited tile. Not counted: one more look at each input for its largest magnitude.
           formula: io.model.tiled_bytes
On chip    three tiles of scores (P, dP and, with dropout or softcap, one more).
Numerics   as the forward. Gradients are summed in a fixed order, hence equal bit for bit from run to run.
Limits     none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.backends.cpu.forward import scaled_dot_products
from tilestream.backends.cpu.layout import Chunk, DenseCall, chunks, compute_dtype, pack_rows, tile_shape
from tilestream.backends.cpu.score import ScoreTile, add_product, is_tame
from tilestream.problem import Gradients
from tilestream.state import AttentionOutput, exp_, finite_or_zero, sink_gradient
from tilestream.tiles import tile_row

__all__ = ["Keys", "Rows", "add_sink_gradient", "backward", "packed_rows", "tile_gradients"]


@dataclass(frozen=True)
class Keys:
    """Keys and values of one chunk and the accumulators of their gradients, (C, N, D) and (C, N, E)."""

    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Rows:
    """One row of tiles, packed: q scaled, and lse with 0 for rows without keys; (C, G * m, D | E | 1)."""

    m_start: int
    m_end: int
    q_m: Tensor
    dout_m: Tensor
    lse_m: Tensor
    delta_m: Tensor
    dq_m: Tensor


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
    seqlen_q, seqlen_k = call.query.shape[1], call.key.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.query, call.key, call.value))
    dbias = (
        torch.zeros(call.bias.shape, dtype=dtype, device=dq.device) if needs_dbias and call.bias is not None else None
    )
    dsinks = torch.zeros(dq.shape[2], dtype=dtype, device=dq.device) if needs_dsinks else None
    block_m, block_n = tile_shape(call.problem, seqlen_q, seqlen_k)
    tame = is_tame((call.query, call.key), (dout, call.value), scale=call.problem.spec.scale)
    for chunk in chunks(call, block_m, block_n):
        k, v = chunk.key_rows(call.key, dtype), chunk.key_rows(call.value, dtype)
        keys = Keys(
            k, v, torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device)
        )
        scratch = k.new_empty(3, chunk.num_groups * block_m * chunk.group * block_n)
        dq_rows = chunk.query_rows(dq)
        for m_start in range(0, seqlen_q, block_m):
            rows = packed_rows(call, chunk, m_start, min(m_start + block_m, seqlen_q), output, dout, dlse)
            for tile in tile_row(call.problem.spec.band, call.shift, rows.m_start, rows.m_end, seqlen_k, block_n):
                tile_gradients(ScoreTile(call, chunk, tile, tame), rows, keys, dbias, scratch)
            dq_rows[..., rows.m_start : rows.m_end, :] = rows.dq_m.mul_(call.problem.spec.scale).view(
                *dq_rows.shape[:3], -1, dq_rows.shape[-1]
            )
            if dsinks is not None:
                add_sink_gradient(call, chunk, rows, dsinks)
        _store_key_gradients(chunk, keys, dk, dv)
    return Gradients(dq, dk, dv, dbias, dsinks)


def packed_rows(
    call: DenseCall, chunk: Chunk, m_start: int, m_end: int, output: AttentionOutput, dout: Tensor, dlse: Tensor | None
) -> Rows:
    """Rows [m_start, m_end) of a chunk, with dq_m = 0."""
    dtype = compute_dtype(call.query.dtype)

    def pack(view: Tensor) -> Tensor:
        return pack_rows(view, m_start, m_end, dtype)

    q_m, dout_m = pack(chunk.query_rows(call.query)), pack(chunk.query_rows(dout))
    delta_m = (pack(chunk.query_rows(output.out)) * dout_m).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta_m = delta_m - pack(chunk.row_numbers(dlse))
    lse_m = finite_or_zero(pack(chunk.row_numbers(output.lse)))
    dq_m = torch.zeros(q_m.shape, dtype=dtype, device=q_m.device)
    return Rows(m_start, m_end, q_m * call.problem.spec.scale, dout_m, lse_m, delta_m, dq_m)


def tile_gradients(score_tile: ScoreTile, rows: Rows, keys: Keys, dbias: Tensor | None, scratch: Tensor) -> None:
    """Add one tile's share to dq_m, dk, dv and dbias."""
    cut = slice(score_tile.tile.n_start, score_tile.tile.n_end)
    k_n, v_n, dk_n, dv_n = keys.k[:, cut], keys.v[:, cut], keys.dk[:, cut], keys.dv[:, cut]
    s_mn = scaled_dot_products(rows.q_m, k_n, scratch[0])
    has_softcap = score_tile.call.problem.spec.softcap > 0
    raw_mn = s_mn.clone() if has_softcap else None
    s_mn = score_tile.forward(s_mn)
    visible = score_tile.visible(s_mn)
    p_mn = exp_(s_mn.sub_(rows.lse_m))
    dp_mn = scaled_dot_products(rows.dout_m, v_n, scratch[1])
    if visible is not None:
        p_mn.masked_fill_(~visible, 0.0)
        dp_mn.masked_fill_(~visible, 0.0)
    factor = score_tile.dropout_factor(p_mn.dtype)
    weights = p_mn
    if factor is not None:
        weights = torch.mul(p_mn, factor)
        dp_mn.mul_(factor)
    seen_by_keys = None if visible is None else visible.transpose(1, 2)
    add_product(dv_n, weights.transpose(1, 2), rows.dout_m, seen_by_keys)
    ds_mn = dp_mn.sub_(rows.delta_m).mul_(p_mn)
    if visible is not None:
        ds_mn.masked_fill_(~visible, 0.0)
    ds_mn = score_tile.backward(ds_mn, raw_mn, dbias)
    if visible is not None and raw_mn is not None:
        # softcap multiplied by a derivative that is NaN where the dot product is.
        ds_mn.masked_fill_(~visible, 0.0)
    add_product(rows.dq_m, ds_mn, k_n, visible)
    add_product(dk_n, ds_mn.transpose(1, 2), rows.q_m, seen_by_keys)


def add_sink_gradient(call: DenseCall, chunk: Chunk, rows: Rows, dsinks: Tensor) -> None:
    """Add the share of these rows to dsinks."""
    assert call.sinks is not None
    num_rows = rows.m_end - rows.m_start
    by_head = (chunk.num_batch, chunk.num_heads_kv * chunk.group, num_rows)
    sinks = call.sinks[chunk.heads].to(dsinks.dtype)
    dsinks[chunk.heads] += sink_gradient(sinks, rows.lse_m.view(by_head), rows.delta_m.view(by_head))


def _store_key_gradients(chunk: Chunk, keys: Keys, dk: Tensor, dv: Tensor) -> None:
    """(C, N, W) accumulators into (B, N, kv heads, W)."""
    for total, gradient in ((keys.dk, dk), (keys.dv, dv)):
        by_head = total.unflatten(0, (chunk.num_batch, chunk.num_heads_kv))
        gradient[chunk.batch, :, chunk.kv_heads] = by_head.transpose(1, 2)
