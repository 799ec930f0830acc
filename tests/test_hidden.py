"""What a query may not see reaches nothing: not through NaN, not through overflow, not at second order."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import tilestream
from tilestream import UnsupportedError

_NAN, _INF = float("nan"), float("inf")


def _leaves(lengths: tuple[int, int], device: torch.device, heads: int = 1) -> list[Tensor]:
    shapes = ((1, lengths[0], heads, 3), (1, lengths[1], heads, 3), (1, lengths[1], heads, 3))
    return [torch.randn(shape, device=device) for shape in shapes]


def _second(leaves: list[Tensor], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """First derivatives, and those of their sum of squares."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = tilestream.attention_with_lse(*leaves, **options)
    loss = out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return list(first), list(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))


@pytest.mark.parametrize("feature", ["bias", "alibi", "dropout", "sinks"])
@pytest.mark.parametrize("case", ["no_keys", "all_hidden"])
def test_second_derivatives_of_rows_without_keys_are_zero(
    case: str, feature: str, backend: str, device: torch.device
) -> None:
    lengths = (3, 0) if case == "no_keys" else (3, 5)
    options: dict[str, Any] = {
        "bias": {"bias": torch.randn(1, 2, 3, lengths[1], device=device)},
        "alibi": {"alibi_slopes": torch.rand(2, device=device)},
        "dropout": {"dropout_p": 0.5, "seed": 3},
        "sinks": {"sinks": torch.randn(2, device=device)},
    }[feature]
    hidden = {} if case == "no_keys" else {"causal": True, "shift": -10}
    first, second = _second(_leaves(lengths, device, heads=2), **options, **hidden, backend=backend)
    assert all(not x.any() for x in (*first, *second))


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("how", ["bias", "window"])
@pytest.mark.parametrize("garbage", [_NAN, _INF, 1e36])
@pytest.mark.parametrize("operand", ["key", "value"])
def test_garbage_behind_the_mask(
    operand: str, garbage: float, how: str, softcap: float, backend: str, device: torch.device
) -> None:
    """Outputs and both derivatives of the visible part equal those of a call without the hidden key."""
    query, key, value = _leaves((4, 5), device)
    query = query * 1e3
    (key if operand == "key" else value)[:, 4] = garbage
    bias = torch.zeros(1, 1, 1, 5, device=device)
    bias[..., 4] = -_INF
    hidden: dict[str, Any] = {"bias": bias} if how == "bias" else {"window": (None, 0), "shift": 0}
    kept: dict[str, Any] = {} if how == "bias" else hidden
    options: dict[str, Any] = {"softcap": softcap, "scale": 1e-3, "backend": backend}
    got = _second([query, key, value], **options, **hidden)
    wanted = _second([query, key[:, :4], value[:, :4]], **options, **kept)
    for ours, theirs in zip(got[0] + got[1], wanted[0] + wanted[1], strict=True):
        torch.testing.assert_close(ours[:, :4], theirs, rtol=1e-4, atol=1e-5)
        assert not ours[:, 4:].any()


def test_a_query_that_is_nan_and_sees_nothing(backend: str, device: torch.device) -> None:
    query, key, value = _leaves((3, 4), device)
    query[:, 2] = _NAN
    bias = torch.zeros(1, 1, 3, 4, device=device)
    bias[..., 2, :] = -_INF
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = tilestream.attention_with_lse(*leaves, bias=bias, backend=backend)
    assert not out[:, 2].any()
    assert lse[0, 0, 2] == -_INF
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), leaves))


def test_limits_as_large_as_ints_go(backend: str, device: torch.device) -> None:
    query, key, value = _leaves((300, 700), device)
    for window in ((0, sys.maxsize), (sys.maxsize, 0), (sys.maxsize, sys.maxsize)):
        limits = tuple(None if limit == sys.maxsize else limit for limit in window)
        got, wanted = (tilestream.attention(query, key, value, window=w, backend=backend) for w in (window, limits))
        assert torch.equal(got, wanted)


def test_forward_mode_is_refused(device: torch.device) -> None:
    query, key, value = _leaves((3, 3), device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.randn_like(query))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            tilestream.attention(dual, key, value)
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda q: tilestream.attention(q, key, value), (query,), (query,))
