"""Regressions: dropout. With the identity as values, the output is the dropped probability matrix itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from regression import Draw, assert_near
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilestream

_NAMES = ("query", "key", "value")


def _inputs(draw: Draw, batch: int, heads: tuple[int, int], seqlen: int = 64) -> list[Tensor]:
    """query, key, and the identity as value; all require gradients."""
    query, key, _ = draw.dense(batch, (seqlen, seqlen), heads, 32, dtype=torch.float32)
    identity = torch.eye(seqlen, device=draw.device).reshape(1, seqlen, 1, seqlen)
    value = identity.expand(batch, seqlen, heads[1], seqlen).contiguous()
    return [tensor.requires_grad_() for tensor in (query, key, value)]


def _dropped_reference(
    inputs: list[Tensor], keep: Tensor, dropout_p: float, causal: bool
) -> tuple[Tensor, list[Tensor]]:
    """float64 attention under a known dropout mask `keep` (batch, heads, seqlen_q, seqlen_k), and its leaves.

    The mask that was really used is an input here, so the library's own generator is not trusted.
    """
    query, key, value = leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    group = query.shape[2] // key.shape[2]
    k, v = (tensor.repeat_interleave(group, dim=2) for tensor in (key, value))
    s = torch.einsum("bihd,bjhd->bhij", query, k) * query.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    p = torch.softmax(s, dim=-1) * keep / (1.0 - dropout_p)
    return torch.einsum("bhij,bjhe->bihe", p, v), leaves


def _check(
    draw: Draw, inputs: list[Tensor], out: Tensor, dropout_p: float, causal: bool = False, **near: Any
) -> Tensor:
    """Output and gradients belong to one mask, which is returned."""
    keep = (out.detach() != 0).transpose(1, 2)
    wanted, leaves = _dropped_reference(inputs, keep, dropout_p, causal)
    assert_near("out", out.detach(), wanted.detach(), torch.float32)
    dout = draw.randn(*out.shape, dtype=torch.float32)
    gradients = torch.autograd.grad(out, inputs, dout)
    exact = torch.autograd.grad(wanted, leaves, dout.double())
    for name, gradient, exact_gradient in zip(_NAMES, gradients, exact, strict=True):
        assert_near(f"d{name}", gradient, exact_gradient, torch.float32, rtol=1e-4, **near)
    return keep


def test_d01_survivors_rate_and_gradients(fixed_draw: Draw, backend: str) -> None:
    """Survivors are p / (1 - dropout_p), the rate is dropout_p, and gradients use the same mask.

    Source: https://github.com/NVIDIA/apex/pull/816
    """
    dropout_p = 0.3
    inputs = _inputs(fixed_draw, 2, (4, 2))
    out = tilestream.attention(*inputs, dropout_p=dropout_p, backend=backend)
    keep = _check(fixed_draw, inputs, out, dropout_p)
    rate = 1.0 - keep.double().mean().item()
    assert abs(rate - dropout_p) <= 5 * math.sqrt(dropout_p * (1 - dropout_p) / keep.numel())


def test_d02_every_call_draws_a_new_mask(fixed_draw: Draw, backend: str) -> None:
    """Consecutive calls draw different masks; the same seed repeats one.

    Source: https://github.com/Dao-AILab/flash-attention/issues/314
    """
    inputs = _inputs(fixed_draw, 1, (2, 2))
    torch.manual_seed(5)
    first, second = (tilestream.attention(*inputs, dropout_p=0.5, backend=backend) for _ in range(2))
    torch.manual_seed(5)
    again = tilestream.attention(*inputs, dropout_p=0.5, backend=backend)
    assert not torch.equal(first != 0, second != 0)
    assert torch.equal(first, again)


def test_d04_wholly_dropped_rows(fixed_draw: Draw, backend: str) -> None:
    """With dropout_p = 0.9 and causal whole rows are dropped: 0, never 0/0.

    Source: https://github.com/aws-neuron/nki-samples/pull/80
    """
    inputs = _inputs(fixed_draw, 2, (2, 2))
    out = tilestream.attention(*inputs, causal=True, dropout_p=0.9, backend=backend)
    keep = _check(fixed_draw, inputs, out, 0.9, causal=True, atol=1e-5)
    assert not keep.any(dim=-1).all()


def test_d05_checkpoint_replays_the_mask(fixed_draw: Draw, backend: str) -> None:
    """Activation checkpointing recomputes with the same mask.

    Source: https://github.com/allenai/OLMo-core/pull/828
    """
    inputs = _inputs(fixed_draw, 1, (2, 2))

    def attend(*leaves: Tensor) -> Tensor:
        return tilestream.attention(*leaves, dropout_p=0.3, backend=backend)

    _check(fixed_draw, inputs, checkpoint(attend, *inputs, use_reentrant=False), 0.3)


def test_d07_no_dropout_draws_nothing(draw: Draw, backend: str) -> None:
    """dropout_p = 0 leaves the generator alone and repeats bit for bit.

    Source: https://github.com/pytorch/pytorch/issues/112015
    """
    inputs = draw.dense(2, (130, 130), (4, 2), 64)

    def state() -> Tensor:
        return torch.cuda.get_rng_state(draw.device) if draw.device.type == "cuda" else torch.get_rng_state()

    before = state().clone()
    first, second = (tilestream.attention(*inputs, causal=True, backend=backend) for _ in range(2))
    assert torch.equal(before, state())
    assert torch.equal(first, second)
