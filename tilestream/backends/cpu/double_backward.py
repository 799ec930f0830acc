"""The derivative of the backward, by recomputing whole rows of scores, a few rows at a time.

Computes   given cotangents (a, b, c, e, f) of (dq, dk, dv, dbias, dsinks), the gradients of
           <dq, a> + <dk, b> + <dv, c> + <dbias, e> + <dsinks, f> with respect to dout, dlse, q, k, v, bias, sinks.
Algorithm  with X = scale q k^T, S the scores, P their softmax, K the dropout factor, t = tanh(X / softcap),
           r = 1 - t^2 (1 without softcap), and the backward's dP = K * (dout v^T), delta = rowsum(P * dP),
           u = dP - delta + dlse, dS = P * u, dX = dS * r:
               A  = scale (a k^T + q b^T)                      cotangent of dX
               G  = A * r + e;   g = rowsum(P * G)             cotangent of dS; g is also the gradient of dlse
               H  = P * (G - g)                                cotangent of dP
               Pb = G * u - g * dP + K * (dout c^T)            cotangent of P
               Sb = P * (Pb - rowsum(P * Pb))                  gradient of S, hence of bias
               Xb = Sb * r - A * dS * 2 t r / softcap          gradient of X
           gradients: dout = (K * H) v + (K * P) c;   v = (K * H)^T dout;
                      q = scale (Xb k + dX b);        k = scale (Xb^T q + dX^T a).
           A sink is one more column with value 0: its dP is 0 and its G is f.
Schedule   chunks as the forward; in each, blocks of query rows against all keys that they see.
On chip    about a dozen (rows, seqlen_k) matrices: O(seqlen_k) memory beside the gradients.
Numerics   as the backward.
Limits     none. Second derivatives are rare, so nothing here is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.backends.cpu.block_tiles import in_block_mask
from tilestream.backends.cpu.layout import Chunk, DenseCall, chunks, compute_dtype, pack_rows
from tilestream.backends.cpu.score import ScoreTile, is_tame, per_row, product
from tilestream.problem import DoubleGradients
from tilestream.state import exp_, finite_or_zero
from tilestream.tiles import Tile, classify, key_span

__all__ = ["Cotangents", "double_backward"]

# Scores of one block of rows, all heads of a chunk.
_BLOCK_ELEMENTS = 1 << 19


class Cotangents(NamedTuple):
    """Cotangents of the backward's results, each shaped as its input, or None for zero."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsinks: Tensor | None


@dataclass(frozen=True)
class _Keys:
    """One chunk's keys and values, their cotangents and their gradients; (C, N, D | E)."""

    k: Tensor
    v: Tensor
    b: Tensor
    c: Tensor
    grad_k: Tensor
    grad_v: Tensor


def double_backward(call: DenseCall, dout: Tensor, dlse: Tensor, cotangents: Cotangents) -> DoubleGradients:
    """Gradients of one dense call, in its compute dtype."""
    dtype = compute_dtype(call.query.dtype)
    seqlen_q, seqlen_k = call.query.shape[1], call.key.shape[1]
    operands = (dout, dlse, call.query, call.key, call.value, call.bias, call.sinks)
    totals = DoubleGradients(
        *(None if x is None else torch.zeros(x.shape, dtype=dtype, device=x.device) for x in operands)  # type: ignore[arg-type]
    )
    num_rows = call.problem.group * max(1, seqlen_k)
    block_m = max(1, min(seqlen_q, _BLOCK_ELEMENTS // num_rows))
    scale = call.problem.spec.scale
    pairs = [(call.query, call.key), (dout, call.value), (cotangents.dq, call.key), (call.query, cotangents.dk)]
    pairs.append((dout, cotangents.dv))
    tame = is_tame(*((x, y) for x, y in pairs if x is not None and y is not None), scale=scale)
    for chunk in chunks(call, block_m, max(1, seqlen_k)):
        keys = _keys(call, chunk, cotangents)
        for m_start in range(0, seqlen_q, block_m):
            m_end = min(m_start + block_m, seqlen_q)
            n_start, n_end = key_span(call.problem.spec.band, call.shift, m_start, m_end, seqlen_k)
            kind = classify(call.problem.spec.band, call.shift, m_start, m_end, n_start, n_end)
            score_tile = ScoreTile(call, chunk, Tile(m_start, m_end, n_start, n_end, kind), tame)
            _block_gradients(in_block_mask(score_tile), keys, dout, dlse, cotangents, totals)
        for source, target in ((keys.grad_k, totals.key), (keys.grad_v, totals.value)):
            by_head = source.unflatten(0, (chunk.num_batch, chunk.num_heads_kv))
            target[chunk.batch, :, chunk.kv_heads] = by_head.transpose(1, 2)
    return totals


def _keys(call: DenseCall, chunk: Chunk, cotangents: Cotangents) -> _Keys:
    dtype = compute_dtype(call.query.dtype)
    k, v = chunk.key_rows(call.key, dtype), chunk.key_rows(call.value, dtype)
    zero_k, zero_v = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    b = zero_k if cotangents.dk is None else chunk.key_rows(cotangents.dk, dtype)
    c = zero_v if cotangents.dv is None else chunk.key_rows(cotangents.dv, dtype)
    return _Keys(k, v, b, c, zero_k.clone(), zero_v.clone())


def _block_gradients(
    score_tile: ScoreTile,
    keys: _Keys,
    dout: Tensor,
    dlse: Tensor,
    cotangents: Cotangents,
    totals: DoubleGradients,
) -> None:
    """Add the share of one block of rows; the names are those of the header."""
    call, chunk, tile = score_tile.call, score_tile.chunk, score_tile.tile
    spec, dtype = call.problem.spec, keys.k.dtype
    cut = slice(tile.n_start, tile.n_end)
    k, v, b, c = keys.k[:, cut], keys.v[:, cut], keys.b[:, cut], keys.c[:, cut]

    def pack(view: Tensor) -> Tensor:
        return pack_rows(view, tile.m_start, tile.m_end, dtype)

    q, dout_m = pack(chunk.query_rows(call.query)), pack(chunk.query_rows(dout))
    a = torch.zeros_like(q) if cotangents.dq is None else pack(chunk.query_rows(cotangents.dq))
    x = q @ k.mT * spec.scale
    raw_tanh = (x / spec.softcap).tanh() if spec.softcap > 0 else None
    sink = None if call.sinks is None else per_row(call.sinks, chunk, tile.m_end - tile.m_start, dtype)
    s = score_tile.forward(x)
    visible = score_tile.visible(s)

    def hide(x_mn: Tensor) -> Tensor:
        """0 where an invisible key may have left something that is not finite."""
        return x_mn if visible is None else x_mn.masked_fill(~visible, 0.0)

    p, p_sink = _softmax(s, sink)
    factor = score_tile.dropout_factor(dtype)
    factor = torch.ones_like(p) if factor is None else factor

    tanh = None if raw_tanh is None else hide(raw_tanh)
    r = torch.ones_like(p) if tanh is None else 1 - tanh.square()
    dp = factor * hide(dout_m @ v.mT)
    # dlse - delta: what every column of a row shares, and all of u in the sink's column.
    u_sink = pack(chunk.row_numbers(dlse)) - (p * dp).sum(-1, keepdim=True)
    u = dp + u_sink
    ds = p * u
    big_a = hide(spec.scale * (a @ k.mT + q @ b.mT))
    big_g = big_a * r
    if cotangents.dbias is not None:
        big_g = score_tile.by_position(big_g).add(score_tile.bias_block(cotangents.dbias)).view(big_g.shape)
    g = (p * big_g).sum(-1, keepdim=True)
    f = None
    if p_sink is not None and cotangents.dsinks is not None:
        f = per_row(cotangents.dsinks, chunk, tile.m_end - tile.m_start, dtype)
        g = g + p_sink * f
    h = p * (big_g - g)
    pb = big_g * u - g * dp + factor * hide(dout_m @ c.mT)
    mean_pb = (p * pb).sum(-1, keepdim=True)
    if p_sink is not None and f is not None:
        mean_pb = mean_pb + p_sink * f * u_sink
    sb = p * (pb - mean_pb)
    xb = sb * r
    if tanh is not None:
        xb = xb - big_a * ds * (2 / spec.softcap) * tanh * r
    dx = ds * r
    dropped = factor * h

    rows = slice(tile.m_start, tile.m_end)
    for target, gradient in (
        (chunk.query_rows(totals.dout), product(dropped, v, visible) + product(factor * p, c, visible)),
        (chunk.row_numbers(totals.dlse), g),
        (chunk.query_rows(totals.query), spec.scale * (product(xb, k, visible) + product(dx, b, visible))),
    ):
        target[..., rows, :] = gradient.view(*target.shape[:3], -1, target.shape[-1])
    seen_by_keys = None if visible is None else visible.mT
    keys.grad_v[:, cut] += product(dropped.mT, dout_m, seen_by_keys)
    keys.grad_k[:, cut] += spec.scale * (product(xb.mT, q, seen_by_keys) + product(dx.mT, a, seen_by_keys))
    if totals.bias is not None:
        score_tile.add_bias_gradient(sb, totals.bias)
    if totals.sinks is not None and p_sink is not None:
        pb_sink = torch.zeros_like(p_sink) if f is None else f * u_sink
        by_head = (p_sink * (pb_sink - mean_pb)).view(chunk.num_batch, -1, tile.m_end - tile.m_start)
        totals.sinks[chunk.heads] += by_head.sum(dim=(0, 2))


def _softmax(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Softmax of whole rows (C, G * m, n), and the sink's probability (C, G * m, 1); 0 where nothing is visible."""
    columns = s if sink is None else torch.cat([s, sink], dim=-1)
    if columns.shape[-1] == 0:
        return s, None
    weights = exp_(columns - finite_or_zero(columns.amax(dim=-1, keepdim=True)))
    total = weights.sum(dim=-1, keepdim=True)
    p = weights / total.masked_fill(total == 0, 1.0)
    return (p, None) if sink is None else (p[..., :-1], p[..., -1:])
