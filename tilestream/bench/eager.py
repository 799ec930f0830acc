"""Attention as operators of PyTorch, one after the other, scores and all, and what their passes move."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tilestream.io.cost import Cost, Pass, pass_of
from tilestream.io.sizes import Sizes
from tilestream.io.standard import standard_cost
from tilestream.problem import Problem

__all__ = ["eager_attention", "eager_cost"]


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


def eager_cost(problem: Problem, backward: bool = False) -> Cost:
    """`standard_cost`, and the passes that PyTorch's backward adds to it on a GPU.

    There the gradient of softmax is two kernels, the first of which stores dp * p, and dq and dk are multiplied by the
    scale after their products. On a CPU both happen in the pass before.
    """
    cost = standard_cost(problem, backward)
    if not backward or problem.device_type != "cuda":
        return cost
    sizes = Sizes.of(problem)
    square = sizes.scores
    added = (
        pass_of("dp * p", {"p": square, "dp": square}, {"dp_p": square}),
        *(_scaling(name, size) for name, size in (("dq", sizes.q), ("dk", sizes.k))),
    )
    return dataclasses.replace(cost, passes=(*cost.passes, *added))


def _scaling(name: str, size: int) -> Pass:
    return pass_of(f"scale of {name}", {name: size}, {name: size})
