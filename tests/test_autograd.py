"""Autograd in all its forms: operator checks, numerical derivatives, transforms, checkpointing, autocast, threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilestream
from tilestream import reference

_INFINITY = float("inf")
Output = tuple[Tensor, Tensor]


def _leaves(
    device: torch.device,
    *,
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int = 6,
    heads: tuple[int, int] = (2, 1),
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """query, key (head_dim 4) and value (head_dim_v 3)."""
    shapes = ((seqlen_q, heads[0], 4), (seqlen_k, heads[1], 4), (seqlen_k, heads[1], 3))
    return [torch.randn(batch, *shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def _features(device: torch.device) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Per feature: plain arguments, and differentiable ones; for (2, 5, 2, 4) queries and 6 keys."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    return {
        "plain": ({}, {}),
        "causal": ({"causal": True}, {}),
        "void_rows": ({"causal": True, "shift": -2}, {}),
        "window": ({"window": (1, 1), "scale": -0.7}, {}),
        "softcap": ({"softcap": 0.8, "scale": 1.3}, {}),
        "bias": ({}, {"bias": randn(2, 2, 5, 6)}),
        "bias_broadcast": ({"softcap": 2.0}, {"bias": randn(1, 2, 1, 6)}),
        "sinks": ({"causal": True}, {"sinks": randn(2)}),
        "alibi": ({"alibi_slopes": randn(2, 2).abs()}, {}),
        "dropout": ({"dropout_p": 0.4, "seed": 3}, {}),
        "everything": (
            {"causal": True, "window": (4, None), "softcap": 3.0, "alibi_slopes": randn(2).abs(), "dropout_p": 0.2,
             "seed": 4},
            {"bias": randn(1, 1, 5, 6), "sinks": randn(2)},
        ),
    }  # fmt: skip


FEATURE_NAMES = tuple(_features(torch.device("cpu")))


def _finite(result: Output) -> Output:
    """lse without its -inf, which finite differences cannot subtract."""
    out, lse = result
    return out, torch.where(lse == -_INFINITY, torch.zeros_like(lse), lse)


@pytest.mark.parametrize("feature", FEATURE_NAMES)
def test_gradcheck_and_gradgradcheck(feature: str, device: torch.device) -> None:
    plain, learned = _features(device)[feature]
    names = list(learned)

    def call(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Output:
        return _finite(tilestream.attention_with_lse(query, key, value, **plain, **dict(zip(names, rest, strict=True))))

    inputs = [*_leaves(device), *(x.requires_grad_() for x in learned.values())]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=False)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def _packed(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Packed sequences of 3, 0 and 2 queries and 2, 3 and 3 keys, and a token of no sequence on either side."""
    shapes = ((6, 4, 4), (9, 2, 4), (9, 2, 3))
    leaves = [torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]
    cu_seqlens = [torch.tensor(starts, dtype=torch.int32, device=device) for starts in ([0, 3, 3, 5], [0, 2, 5, 8])]
    return leaves, cu_seqlens


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"dropout_p": 0.3, "seed": 1}], ids=str)
def test_gradcheck_and_gradgradcheck_of_packed_sequences(options: dict[str, Any], device: torch.device) -> None:
    leaves, cu_seqlens = _packed(device)
    bias = torch.randn(3, 1, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, device=device, requires_grad=True)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Output:
        return _finite(
            tilestream.attention_varlen_with_lse(query, key, value, *cu_seqlens, bias=bias, sinks=sinks, **options)
        )

    assert torch.autograd.gradcheck(call, [*leaves, bias, sinks], fast_mode=False)
    assert torch.autograd.gradgradcheck(call, [*leaves, bias, sinks], fast_mode=True)


_OPCHECKS = [("dense", name) for name in (*FEATURE_NAMES, "strided")]
_OPCHECKS += [("varlen", name) for name in ("plain", "causal", "sinks", "softcap", "strided")]


@pytest.mark.parametrize(("layout", "feature"), _OPCHECKS, ids=str)
def test_opcheck(layout: str, feature: str, device: torch.device) -> None:
    """Schema, fake kernels (strides included), autograd registration and AOT dispatch of every operator that runs."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "tilestream":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    plain, learned = _features(device)["plain" if feature == "strided" else feature]
    heads = (4, 2) if feature == "strided" else (2, 1)
    leaves, cu_seqlens = (_leaves(device, heads=heads), []) if layout == "dense" else _packed(device)
    if layout == "varlen":
        learned = {name: torch.randn(4, dtype=torch.float64, device=device) for name in learned}
    if feature == "strided":
        leaves = [x.detach().mT.contiguous().mT.requires_grad_() for x in leaves]
        assert not any(x.is_contiguous() for x in leaves)
    everything = [*leaves, *(x.requires_grad_() for x in learned.values())]
    function = tilestream.attention_with_lse if layout == "dense" else tilestream.attention_varlen_with_lse
    with Record():
        out, lse = _finite(function(*leaves, *cu_seqlens, **plain, **learned))
        gradients = torch.autograd.grad(out.sum() + lse.sum(), everything, create_graph=True)
        torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), everything)
    assert len({func for func, _ in calls}) == 3, "forward, backward and double backward"
    for func, args in calls:
        # opcheck wants leaves. There are no third derivatives.
        wants_grad = "double" not in func.name()
        fresh = [
            x.detach().requires_grad_(x.requires_grad and wants_grad) if isinstance(x, Tensor) else x for x in args
        ]
        torch.library.opcheck(func, tuple(fresh))


@pytest.mark.parametrize("subset", list(itertools.product([False, True], repeat=5)), ids=str)
def test_any_subset_of_inputs_may_want_gradients(subset: tuple[bool, ...], device: torch.device) -> None:
    tensors = [x.detach() for x in _leaves(device)]
    tensors += [torch.randn(s, dtype=torch.float64, device=device) for s in ((1, 2, 5, 6), (2,))]
    wanted = [x for x, is_wanted in zip(tensors, subset, strict=True) if is_wanted]
    for x in wanted:
        x.requires_grad_()
    query, key, value, bias, sinks = tensors
    result = tilestream.attention_with_lse(query, key, value, bias=bias, sinks=sinks)
    assert result.out.requires_grad == result.lse.requires_grad == any(subset)
    if not wanted:
        return
    exact = reference.attention(query, key, value, bias=bias, sinks=sinks)
    got = torch.autograd.grad(result.out.square().sum() + result.lse.sum(), wanted)
    for one, other in zip(got, torch.autograd.grad(exact.out.square().sum() + exact.lse.sum(), wanted), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_only_one_output_is_used(used: str, device: torch.device) -> None:
    leaves = _leaves(device)
    got = torch.autograd.grad(getattr(tilestream.attention_with_lse(*leaves), used).square().sum(), leaves,
                              materialize_grads=True, allow_unused=True)  # fmt: skip
    wanted = torch.autograd.grad(getattr(reference.attention(*leaves), used).square().sum(), leaves,
                                 materialize_grads=True, allow_unused=True)  # fmt: skip
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_two_backward_passes_over_one_graph(device: torch.device) -> None:
    leaves = _leaves(device, dtype=torch.float32)
    out = tilestream.attention(*leaves, causal=True)
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    second = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    doubled = torch.autograd.grad(out, leaves, 2 * torch.ones_like(out))
    for one, other, twice in zip(first, second, doubled, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(twice, 2 * one)


def test_an_input_changed_in_place_before_backward_is_noticed(device: torch.device) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in _leaves(device)]
    key = leaves[1] * 1.0
    out = tilestream.attention(leaves[0], key, leaves[2])
    key.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_grad_modes(device: torch.device) -> None:
    leaves = _leaves(device)
    wanted = tilestream.attention(*leaves).detach()
    with torch.no_grad():
        out = tilestream.attention(*leaves)
        assert not out.requires_grad
        assert torch.equal(out, wanted)
    with torch.inference_mode():
        out = tilestream.attention(*leaves)
        assert out.is_inference()
        assert torch.equal(out, wanted)
        made_inside = [x.clone() for x in leaves]
    assert torch.equal(tilestream.attention(*made_inside), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    """query, key and value take the autocast dtype, gradients come back in theirs; float64 stays."""
    leaves = _leaves(device, dtype=torch.float32)
    mixed = [leaves[0], leaves[1].detach().to(dtype), leaves[2]]
    with torch.autocast(device.type, dtype=dtype):
        out, lse = tilestream.attention_with_lse(*mixed)
        assert tilestream.attention(*_leaves(device)).dtype == torch.float64
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert torch.equal(out, tilestream.attention(*(x.to(dtype) for x in mixed)))
    for gradient in torch.autograd.grad(out.float().sum(), (leaves[0], leaves[2])):
        assert gradient.dtype == torch.float32
    with torch.autocast(device.type, enabled=False):
        assert tilestream.attention(*leaves).dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"dropout_p": 0.5, "seed": 7}], ids=str)
def test_activation_checkpointing(options: dict[str, Any], use_reentrant: bool, device: torch.device) -> None:
    """The recomputed forward draws the same dropout mask, because the seed comes from torch's generator."""
    leaves = _leaves(device, dtype=torch.float32)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return tilestream.attention(query, key, value, causal=True, **options).square()

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        fresh = [x.detach().clone().requires_grad_() for x in leaves]
        torch.manual_seed(3)
        run(*fresh).sum().backward()
        return [x.grad for x in fresh if x.grad is not None]

    plain = gradients(call)
    recomputed = gradients(lambda *tensors: checkpoint(call, *tensors, use_reentrant=use_reentrant))
    assert len(plain) == len(recomputed) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


# ---- torch.func


def _loop(call: Callable[..., Any], in_dims: tuple[int | None, ...], tensors: list[Tensor], size: int) -> list[Tensor]:
    results = [
        call(*(x if dim is None else x.select(dim, index) for x, dim in zip(tensors, in_dims, strict=True)))
        for index in range(size)
    ]
    return [torch.stack(column) for column in zip(*results, strict=True)]


@pytest.mark.parametrize("in_dims", [
    (0, 0, 0, None, None), (0, None, None, None, None), (None, 0, 1, None, None), (1, 2, 4, None, None),
    (None, None, 0, None, None), (0, 0, 0, 0, None), (0, 0, 0, None, 0), (None, None, None, 0, 0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_gradient", [False, True])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], is_gradient: bool, device: torch.device) -> None:
    size = 3
    tensors = [x.detach() for x in _leaves(device)]
    tensors += [torch.randn(s, dtype=torch.float64, device=device) for s in ((1, 2, 5, 6), (2,))]
    tensors = [
        x if dim is None else torch.randn(size, *x.shape, dtype=x.dtype, device=device).movedim(0, dim)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]

    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Output:
        return tilestream.attention_with_lse(query, key, value, bias=bias, sinks=sinks, causal=True)

    def loss(*inputs: Tensor) -> Tensor:
        out, lse = forward(*inputs)
        return out.square().sum() + lse.sum()

    call = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4)) if is_gradient else forward
    for got, wanted in zip(torch.vmap(call, in_dims)(*tensors), _loop(call, in_dims, tensors, size), strict=True):
        torch.testing.assert_close(got, wanted)


def test_vmap_of_packed_sequences_and_slopes(device: torch.device) -> None:
    leaves, cu_seqlens = _packed(device)
    query = torch.randn(2, *leaves[0].shape, dtype=torch.float64, device=device)
    slopes = torch.rand(2, 4, dtype=torch.float64, device=device)
    tensors = [query, leaves[1].detach(), leaves[2].detach(), slopes]

    def call(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Output:
        return tilestream.attention_varlen_with_lse(query, key, value, *cu_seqlens, alibi_slopes=slopes, causal=True)

    in_dims = (0, None, None, 0)
    for got, wanted in zip(torch.vmap(call, in_dims)(*tensors), _loop(call, in_dims, tensors, 2), strict=True):
        torch.testing.assert_close(got, wanted)


def test_nested_vmap(device: torch.device) -> None:
    tensors = [torch.randn(2, 3, *x.shape, dtype=torch.float64, device=device) for x in _leaves(device)]
    got = torch.vmap(torch.vmap(tilestream.attention))(*tensors)
    for outer, inner in itertools.product(range(2), range(3)):
        torch.testing.assert_close(got[outer, inner], tilestream.attention(*(x[outer, inner] for x in tensors)))


def test_vmap_over_nothing_and_over_empty_lengths(device: torch.device) -> None:
    empty = torch.randn(2, 1, 0, 2, 4, device=device)
    assert torch.vmap(tilestream.attention)(empty, empty, empty).shape == (2, 1, 0, 2, 4)


@pytest.mark.parametrize("feature", ["plain", "causal", "everything"])
def test_torch_func(feature: str, device: torch.device) -> None:
    """grad, vjp and the Hessian-vector product of torch.func equal autograd's on the oracle."""
    plain, learned = _features(device)[feature]
    leaves = [x.detach() for x in _leaves(device)]
    names = list(learned)
    inputs = (*leaves, *learned.values())
    oracle_options = {**plain, **({"seed": torch.tensor([plain["seed"]], device=device)} if "seed" in plain else {})}

    def losses(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Tensor]:
        def loss(*tensors: Tensor) -> Tensor:
            out, lse = function(*tensors[:3], **options, **dict(zip(names, tensors[3:], strict=True)))
            return out.square().sum() + lse.sin().sum()

        return loss

    ours, oracle = losses(tilestream.attention_with_lse, plain), losses(reference.attention, oracle_options)
    everything = tuple(range(len(inputs)))
    got = torch.func.grad(ours, argnums=everything)(*inputs)
    leaves_of_oracle = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(oracle(*leaves_of_oracle), leaves_of_oracle, create_graph=True)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other.detach())

    def directional(*tensors: Tensor) -> Tensor:
        return sum((g.sum() for g in torch.func.grad(ours, argnums=everything)(*tensors)), torch.zeros(()))

    second = torch.func.grad(directional, argnums=everything)(*inputs)
    wanted_second = torch.autograd.grad(sum(g.sum() for g in wanted), leaves_of_oracle)
    for one, other in zip(second, wanted_second, strict=True):
        torch.testing.assert_close(one, other)


# ---- memory and threads


class _LargestAllocation(TorchDispatchMode):
    """The largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_no_pass_stores_the_scores(device: torch.device) -> None:
    """Forward, backward and double backward at a length where N x N would dwarf every tile and every input."""
    seqlen = 4096
    leaves = _leaves(device, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads=(1, 1), dtype=torch.float32)
    with _LargestAllocation() as mode:
        out = tilestream.attention(*leaves, window=(64, 64))
        gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves)
    assert mode.elements < seqlen * seqlen // 8, f"{mode.elements} elements at once"


def test_several_python_threads(device: torch.device) -> None:
    """Forward and backward of different calls at the same time equal those one after the other."""
    calls = [(_leaves(device, seqlen_q=40 + n, seqlen_k=50 + n), {"causal": n % 2 == 0}) for n in range(8)]

    def gradients(index: int) -> tuple[Tensor, ...]:
        leaves, options = calls[index]
        return torch.autograd.grad(tilestream.attention(*leaves, **options).square().sum(), leaves)

    alone = [gradients(index) for index in range(len(calls))]
    together: dict[int, tuple[Tensor, ...]] = {}
    threads = [
        threading.Thread(target=lambda index=index: together.update({index: gradients(index)}))
        for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, wanted in enumerate(alone):
        assert all(torch.equal(one, other) for one, other in zip(together[index], wanted, strict=True)), index
