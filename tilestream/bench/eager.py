"""Attention as operators of PyTorch, one after the other: the passes that `io.standard` counts, scores and all."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["eager_attention"]


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout_p: float) -> Tensor:
    """softmax(scale q k^T + mask), dropped out, times v; every N x N tensor of `standard_cost` is stored.

    Args:
        q, k, v: (sequences x heads, tokens, head_dim), each contiguous, so that no operator copies it.
        mask: (queries, keys), 0 or -inf, or None where nothing is hidden.
        dropout_p: PyTorch draws the mask, so the result is not that of any other implementation.

    Returns:
        (sequences x heads, queries, head_dim of v).
    """
    # With beta 0 what is added is never read.
    nothing = torch.empty(1, 1, 1, dtype=q.dtype, device=q.device)
    s = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=scale)
    if mask is not None:
        s = s + mask
    p = torch.softmax(s, dim=-1)
    if dropout_p > 0:
        # What F.dropout is on a GPU: one kernel, and a mask of bytes.
        p, _ = torch.native_dropout(p, dropout_p, True)
    return p @ v
