"""FlashAttention's forward and backward on one screen, for one head; every kernel is this loop with more care.

Shapes: M queries, N keys, D head_dim, E head_dim_v; lower-case m, n are the rows and keys of one tile.
Source: arXiv:2205.14135, algorithms 1 and 4; query rows outside as in arXiv:2307.08691.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.spec import Band
from tilestream.tiles import TileKind, tile_row

__all__ = ["backward", "forward"]


def hide(s_mn: Tensor, band: Band, shift: int, m_start: int, n_start: int) -> Tensor:
    """-inf where the band hides key j from query i; only PARTIAL tiles need it."""
    i = torch.arange(m_start, m_start + s_mn.shape[0])[:, None]
    distance = torch.arange(n_start, n_start + s_mn.shape[1]) - (i + shift)
    left, right = (float("inf") if limit is None else limit for limit in (band.left, band.right))
    return s_mn.masked_fill((distance < -left) | (distance > right), float("-inf"))


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, *, block_m: int = 64, block_n: int = 64
) -> tuple[Tensor, Tensor]:
    """out (M, E) and lse (M,) of q (M, D), k (N, D), v (N, E), never holding more than one tile of scores."""
    seqlen_q, seqlen_k = len(q), len(k)
    shift = seqlen_k - seqlen_q
    out, lse = torch.empty(seqlen_q, v.shape[1]), torch.empty(seqlen_q)
    for m_start in range(0, seqlen_q, block_m):
        rows = slice(m_start, min(m_start + block_m, seqlen_q))
        q_m = q[rows]
        row_max, row_sum = torch.full((len(q_m), 1), float("-inf")), torch.zeros(len(q_m), 1)
        acc = torch.zeros(len(q_m), v.shape[1])
        for tile in tile_row(band, shift, rows.start, rows.stop, seqlen_k, block_n):  # EMPTY tiles never appear
            k_n, v_n = k[tile.n_start : tile.n_end], v[tile.n_start : tile.n_end]
            s_mn = scale * q_m @ k_n.T
            if tile.kind is TileKind.PARTIAL:
                s_mn = hide(s_mn, band, shift, rows.start, tile.n_start)
            new_max = torch.maximum(row_max, s_mn.amax(1, keepdim=True))
            finite_max = new_max.masked_fill(new_max == float("-inf"), 0)  # a row without keys yet
            alpha = torch.exp(row_max - finite_max)
            p_mn = torch.exp(s_mn - finite_max)
            row_sum = alpha * row_sum + p_mn.sum(1, keepdim=True)
            acc = alpha * acc + p_mn @ v_n
            row_max = new_max
        out[rows] = acc / row_sum.masked_fill(row_sum == 0, 1)
        lse[rows] = (row_max + torch.log(row_sum)).squeeze(1)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, scale: float, band: Band,
    *, block_m: int = 64, block_n: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv: the scores are made again from lse, tile by tile, instead of being read back."""
    seqlen_q, seqlen_k = len(q), len(k)
    shift = seqlen_k - seqlen_q
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (out * dout).sum(1, keepdim=True)
    finite_lse = lse.masked_fill(lse == float("-inf"), 0)[:, None]
    for m_start in range(0, seqlen_q, block_m):
        rows = slice(m_start, min(m_start + block_m, seqlen_q))
        q_m, dout_m = q[rows], dout[rows]
        for tile in tile_row(band, shift, rows.start, rows.stop, seqlen_k, block_n):
            keys = slice(tile.n_start, tile.n_end)
            s_mn = scale * q_m @ k[keys].T
            if tile.kind is TileKind.PARTIAL:
                s_mn = hide(s_mn, band, shift, rows.start, tile.n_start)
            p_mn = torch.exp(s_mn - finite_lse[rows])
            dv[keys] += p_mn.T @ dout_m
            dp_mn = dout_m @ v[keys].T
            ds_mn = p_mn * (dp_mn - delta[rows])
            dq[rows] += scale * ds_mn @ k[keys]
            dk[keys] += scale * ds_mn.T @ q_m
    return dq, dk, dv
