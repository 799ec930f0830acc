"""Regressions: torch.compile, fake tensors, function transforms, autocast, and cached kernels."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from regression import Call, Draw, assert_near, oracle
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilestream
from tilestream import reference
from tilestream.errors import TilestreamError

_NAMES = ("query", "key", "value")


def test_k01_compiled_for_changing_lengths(draw: Draw, backend: str) -> None:
    """torch.compile(dynamic=True) is right for changing lengths: the causal offset is not baked in.

    Source: https://github.com/pytorch/pytorch/issues/137779
    """
    torch._dynamo.reset()
    attend = torch.compile(
        lambda *inputs: tilestream.attention(*inputs, causal=True, backend=backend),
        backend="aot_eager",
        dynamic=True,
        fullgraph=True,
    )
    for seqlens in ((17, 17), (33, 50), (64, 64), (1, 90), (128, 130)):
        leaves = [tensor.requires_grad_() for tensor in draw.dense(2, seqlens, (4, 2), 32)]
        dout = draw.randn(2, seqlens[0], 4, 32)
        out = attend(*leaves)
        wanted, wanted_gradients = oracle(Call(*leaves, {"causal": True}, dout=dout))
        assert_near(f"out {seqlens}", out.detach(), wanted.out, draw.dtype)
        for name, gradient in zip(_NAMES, torch.autograd.grad(out, leaves, dout), strict=True):
            assert_near(f"d{name} {seqlens}", gradient, wanted_gradients[name], draw.dtype)
    torch._dynamo.reset()


@pytest.mark.parametrize("is_head_major", [False, True])
def test_k02_fake_tensors_predict_the_output(fixed_draw: Draw, backend: str, is_head_major: bool) -> None:
    """A fake run predicts shape, dtype, strides and device of the real one.

    Source: https://github.com/Comfy-Org/ComfyUI/pull/15044
    """
    sizes = ((12, 4, 32), (20, 2, 32), (20, 2, 48))
    inputs = [
        fixed_draw.randn(2, heads, seqlen, width, dtype=torch.float32).transpose(1, 2)
        if is_head_major
        else fixed_draw.randn(2, seqlen, heads, width, dtype=torch.float32)
        for seqlen, heads, width in sizes
    ]
    real = tilestream.attention(*inputs, causal=True, backend=backend)
    with FakeTensorMode() as mode:
        fake = tilestream.attention(*(mode.from_tensor(tensor) for tensor in inputs), causal=True, backend=backend)

    def facts(tensor: Tensor) -> tuple[Any, ...]:
        return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device.type

    assert facts(fake) == facts(real)


def test_k04_no_option_is_cached(draw: Draw, backend: str) -> None:
    """Same shapes, changing options, twice over: no cached kernel may ignore an option.

    Source: https://github.com/Dao-AILab/flash-attention/pull/2402
    """
    inputs = draw.dense(1, (40, 40), (2, 2), 32, spread=2.0)
    biases = draw.randn(1, 1, 40, 40), draw.randn(1, 2, 40, 40)
    options: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"scale": 0.1},
        {"scale": 1.0},
        {"window": (3, 0)},
        {"window": (9, 2)},
        {"bias": biases[0]},
        {"bias": biases[1]},
        {"causal": True, "window": (5, None)},
        {"alibi_slopes": torch.tensor([0.5, 0.1], device=draw.device)},
        {"softcap": 4.0},
        {"softcap": 12.0},
        {},
    ]
    for turn in range(2):
        for option in options:
            got = tilestream.attention(*inputs, **option, backend=backend)
            wanted = reference.attention(*inputs, **option).out
            assert_near(f"turn {turn} {sorted(option)}", got, wanted, draw.dtype)


def test_k06_function_transforms(fixed_draw: Draw, backend: str) -> None:
    """torch.func.grad is right; jvp is right or clearly refused.

    Source: https://github.com/Dao-AILab/flash-attention/issues/1672
    """
    query, key, value = fixed_draw.dense(1, (10, 14), (2, 2), 16, dtype=torch.float32)
    tangent = fixed_draw.randn(1, 10, 2, 16, dtype=torch.float32)

    def attend(q: Tensor) -> Tensor:
        return tilestream.attention(q, key, value, causal=True, backend=backend)

    def exact(q: Tensor) -> Tensor:
        return reference.attention(q, key.double(), value.double(), causal=True).out

    gradient = torch.func.grad(lambda q: attend(q).square().sum())(query)
    wanted = torch.func.grad(lambda q: exact(q).square().sum())(query.double())
    assert_near("grad", gradient, wanted, torch.float32, rtol=1e-4)
    wanted = torch.func.jvp(exact, (query.double(),), (tangent.double(),))[1]
    with contextlib.suppress(RuntimeError):
        got = torch.func.jvp(attend, (query,), (tangent,))[1]
        assert_near("jvp", got, wanted, torch.float32, rtol=1e-4)


def test_k07_autocast_and_mixed_dtypes(fixed_draw: Draw, backend: str) -> None:
    """Autocast makes float32 inputs and a float32 bias right; mixed dtypes outside it are refused.

    Source: https://github.com/pytorch/pytorch/issues/99012
    """
    device = fixed_draw.device
    query, key, value = fixed_draw.dense(1, (30, 30), (2, 2), 32, dtype=torch.float32)
    is_hidden = torch.ones(30, 30, dtype=torch.bool, device=device).triu(1)
    bias = torch.zeros(1, 1, 30, 30, device=device).masked_fill(is_hidden, float("-inf"))
    wanted = reference.attention(query, key, value, bias=bias).out
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for given_value in (value, value.bfloat16()):
            out = tilestream.attention(query, key, given_value, bias=bias, backend=backend)
            assert_near(f"value {given_value.dtype}", out, wanted, torch.bfloat16)
    for mixed in ((query, key.bfloat16(), value.bfloat16()), (query, key, value.half())):
        with pytest.raises(TilestreamError, match="dtype"):
            tilestream.attention(*mixed, bias=bias, backend=backend)


def test_k09_inference_tensors(draw: Draw, backend: str) -> None:
    """Works under inference_mode and no_grad, and on inference tensors outside.

    Source: https://github.com/pytorch/pytorch/pull/176015
    """
    query, key, value = draw.dense(1, (30, 40), (4, 2), 32)
    wanted = reference.attention(query, key, value, causal=True).out
    with torch.inference_mode():
        inference_tensors = [tensor.clone() for tensor in (query, key, value)]
        out = tilestream.attention(*inference_tensors, causal=True, backend=backend)
        assert_near("inference_mode", out, wanted, draw.dtype)
    with torch.no_grad():
        out = tilestream.attention(query.requires_grad_(), key, value, causal=True, backend=backend)
        assert not out.requires_grad
        assert_near("no_grad", out, wanted, draw.dtype)
    out = tilestream.attention(*inference_tensors, causal=True, backend=backend)
    assert_near("inference tensors", out, wanted, draw.dtype)


def test_k10_no_layout_is_cached(draw: Draw, backend: str) -> None:
    """The same shapes in another memory layout: a cached kernel must not assume the first one.

    Source: https://github.com/Dao-AILab/flash-attention/issues/2886
    """
    inputs = draw.dense(1, (64, 64), (4, 2), 64)
    dout = draw.randn(1, 64, 4, 64)
    wanted, wanted_gradients = oracle(Call(*inputs, {"causal": True}, dout=dout))

    def stored(tensor: Tensor, first: int, second: int) -> Tensor:
        return tensor.transpose(first, second).contiguous().transpose(first, second)

    layouts = {
        "contiguous": lambda tensor: tensor,
        "head major": lambda tensor: stored(tensor, 1, 2),
        "strided last": lambda tensor: stored(tensor, 1, 3),
        "wider rows": lambda tensor: torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]],
        "copied slice": lambda tensor: torch.stack([tensor, tensor], dim=1).flatten(1, 2)[:, : tensor.shape[1]] * 1,
    }
    for layout, arrange in layouts.items():
        for dout_layout in (dout, stored(dout, 1, 2)):
            leaves = [arrange(tensor).detach().requires_grad_() for tensor in inputs]
            out = tilestream.attention(*leaves, causal=True, backend=backend)
            assert_near(f"out, {layout}", out.detach(), wanted.out, draw.dtype)
            for name, gradient in zip(_NAMES, torch.autograd.grad(out, leaves, dout_layout), strict=True):
                assert_near(f"d{name}, {layout}", gradient, wanted_gradients[name], draw.dtype)
