"""Regressions: which gradients are asked for, how often, and through what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from regression import PYTORCH, Call, Draw, assert_near, oracle, regression
from torch import Tensor

import tilestream
from tilestream import reference

_SPARSE = "https://github.com/HKUSTDial/flash-sparse-attention/"


@regression(PYTORCH + "issues/148476")
def test_g01_only_bias_needs_a_gradient(draw: Draw) -> Call:
    """Only the bias requires a gradient."""
    return Call(*draw.dense(1, (64, 64), (1, 1), 16), {"bias": draw.randn(1, 1, 64, 64)}, grads=("bias",))


@regression(_SPARSE + "pull/194")
def test_g02_gradient_of_a_broadcast_bias(draw: Draw) -> Call:
    """dbias of a bias broadcast over queries is a sum over queries."""
    inputs = draw.dense(2, (70, 90), (4, 2), 32)
    return Call(*inputs, {"bias": draw.randn(1, 4, 1, 90), "causal": True}, grads=("query", "bias"))


def test_g04_any_subset_of_gradients(draw: Draw, backend: str) -> None:
    """Any subset of query, key and value may require gradients.

    Source: https://github.com/PaddlePaddle/Paddle/issues/58461
    """
    inputs = dict(zip("qkv", draw.dense(1, (30, 40), (4, 2), 32), strict=True))
    call = Call(inputs["q"], inputs["k"], inputs["v"], {"causal": True}, dout=draw.randn(1, 30, 4, 32))
    wanted = dict(zip("qkv", oracle(call)[1].values(), strict=True))
    for subset in ("q", "k", "v", "qk", "qv", "kv"):
        given = {name: tensor.detach().clone().requires_grad_(name in subset) for name, tensor in inputs.items()}
        out = tilestream.attention(*given.values(), causal=True, backend=backend)
        gradients = torch.autograd.grad(out, [given[name] for name in subset], call.dout)
        for name, gradient in zip(subset, gradients, strict=True):
            assert_near(f"d{name} of {subset}", gradient, wanted[name], draw.dtype)


def test_g06_gradient_through_lse(draw: Draw, backend: str) -> None:
    """A returned lse carries its right gradient.

    Source: https://github.com/Dao-AILab/flash-attention/issues/1137
    """
    leaves = [tensor.requires_grad_() for tensor in draw.dense(1, (30, 40), (4, 2), 32)]
    weight = torch.randn(1, 4, 30, generator=draw.generator).to(draw.device)
    lse = tilestream.attention_with_lse(*leaves, causal=True, backend=backend).lse
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    exact_lse = reference.attention(*exact, causal=True).lse
    gradients, wanted = (
        torch.autograd.grad((value * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for value, inputs in ((lse, leaves), (exact_lse, exact))
    )
    for name, gradient, exact_gradient in zip(("query", "key", "value"), gradients, wanted, strict=True):
        assert_near(f"d{name}", gradient, exact_gradient, draw.dtype)


def test_g08_second_derivative(fixed_draw: Draw, backend: str) -> None:
    """The second derivative is right, never silently wrong.

    Source: https://github.com/Dao-AILab/flash-attention/issues/699
    """
    inputs = fixed_draw.dense(1, (9, 12), (2, 2), 16, dtype=torch.float32)

    def second(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        (dq,) = torch.autograd.grad(attend(*leaves).square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(dq.square().sum(), leaves)

    exact = [tensor.double() for tensor in inputs]
    wanted = second(lambda *leaves: reference.attention(*leaves, causal=True).out, exact)
    got = second(lambda *leaves: tilestream.attention(*leaves, causal=True, backend=backend), inputs)
    for name, gradient, exact_gradient in zip(("query", "key", "value"), got, wanted, strict=True):
        assert_near(f"second d{name}", gradient, exact_gradient, torch.float32, rtol=1e-3)


def test_g09_two_backwards_over_one_graph(draw: Draw, backend: str) -> None:
    """Two backward passes agree: no scratch memory is left dirty.

    Source: https://github.com/Dao-AILab/flash-attention/issues/359
    """
    leaves = [tensor.requires_grad_() for tensor in draw.dense(2, (90, 70), (4, 2), 32)]
    out = tilestream.attention(*leaves, backend=backend)
    dout = draw.randn(2, 90, 4, 32)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, dout)
    for name, one, other in zip(("query", "key", "value"), first, second, strict=True):
        assert_near(f"d{name}", one, other, draw.dtype)


def test_g10_first_backward_of_a_new_shape(draw: Draw, backend: str) -> None:
    """The first backward equals the second: a trial run of a tuner must not accumulate.

    Source: https://github.com/triton-lang/triton/issues/4217
    """
    leaves = [tensor.requires_grad_() for tensor in draw.dense(1, (171, 263), (3, 3), 48)]
    dout = draw.randn(1, 171, 3, 48)
    wanted = oracle(Call(*leaves, dout=dout))[1]
    for turn in ("first", "second"):
        gradients = torch.autograd.grad(tilestream.attention(*leaves, backend=backend), leaves, dout)
        for (name, exact), gradient in zip(wanted.items(), gradients, strict=True):
            assert_near(f"{turn} d{name}", gradient, exact, draw.dtype)


def test_g12_joint_backward_of_several_calls(draw: Draw, backend: str) -> None:
    """Several forwards of different shapes, one backward: saved state belongs to its call.

    Source: https://github.com/Dao-AILab/flash-attention/issues/681
    """
    _, key, value = draw.dense(1, (1, 70), (4, 2), 32)
    queries = [draw.randn(1, seqlen, 4, 32) for seqlen in (5, 70, 33)]

    def gradients(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        outs = [attend(query, *leaves[3:], causal=True) for query in leaves[:3]]
        return torch.autograd.grad(torch.stack([out.square().sum() for out in outs]).sum(), leaves)

    inputs = [*queries, key, value]
    got = gradients(lambda *args, **options: tilestream.attention(*args, backend=backend, **options), inputs)
    exact = [tensor.double() for tensor in inputs]
    wanted = gradients(lambda *args, **options: reference.attention(*args, **options).out, exact)
    for name, gradient, exact_gradient in zip(("q0", "q1", "q2", "key", "value"), got, wanted, strict=True):
        assert_near(f"d{name}", gradient, exact_gradient, draw.dtype)
