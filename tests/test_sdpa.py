"""PyTorch's scaled_dot_product_attention served by tilestream: the scope, and the kernels under PyTorch's registry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilestream
from tilestream.integrations import sdpa
from tilestream.integrations._sdpa_kernels import CPU_KERNELS, CUDA_KERNELS, install_kernels
from tilestream.integrations.sdpa import tilestream_sdpa

attend = functional.scaled_dot_product_attention
registry = pytest.importorskip("torch.nn.attention._registry", reason="this torch has no registry")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def _math(*args: object, **kwargs: object) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attend(*args, **kwargs)


def _same(inputs: tuple[Tensor, ...], **kwargs: object) -> None:
    """Output and gradients inside the scope equal PyTorch's materialised attention."""
    want = _math(*inputs, **kwargs)
    with tilestream_sdpa():
        got = attend(*inputs, **kwargs)
    torch.testing.assert_close(got, want, **TOLERANCE)
    dout = torch.randn_like(want)
    leaves = [tensor for tensor in (*inputs, *kwargs.values()) if isinstance(tensor, Tensor) and tensor.requires_grad]
    for one, other in zip(torch.autograd.grad(want, leaves, dout), torch.autograd.grad(got, leaves, dout), strict=True):
        torch.testing.assert_close(other, one, **TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        [(5, 8), (7, 8), (7, 8)],
        [(3, 5, 8), (3, 7, 8), (3, 7, 8)],
        [(2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 6)],
        [(2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)],
        [(2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)],
        [(2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)],
        [(1, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
        [(2, 3, 5, 8), (3, 7, 8), (3, 7, 8)],
    ],
    ids=str,
)
def test_shapes(shapes: list[tuple[int, ...]], is_causal: bool) -> None:
    _same(_inputs(*shapes), is_causal=is_causal, scale=0.7)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (3, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7), (2, 3, 5, 1), (1, 3, 5, 7)])
def test_masks_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    mask: Tensor = torch.randn(shape, dtype=torch.float64)
    # A row without keys is 0 here by contract, and NaN in some of PyTorch's kernels; that has a test of its own.
    mask = mask > -2.0 if kind == "bool" else mask.requires_grad_()
    _same(_inputs((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), attn_mask=mask)


def test_mask_over_many_leading_dimensions() -> None:
    inputs = _inputs((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 8))
    for shape in ((2, 1, 1, 5, 7), (1, 4, 3, 1, 7), (4, 1, 5, 7)):
        _same(inputs, attn_mask=torch.randn(shape, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("heads", [(2, 2), (1, 1), (2, 1)])
@pytest.mark.parametrize("leading", [(), (2,), (2, 2)])
def test_grouped_heads(heads: tuple[int, int], leading: tuple[int, ...]) -> None:
    inputs = _inputs((*leading, 4, 5, 8), (*leading, heads[0], 7, 8), (*leading, heads[1], 7, 8))
    _same(inputs, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize(
    "shapes", [((2, 3, 0, 8), (2, 3, 5, 8)), ((2, 3, 4, 8), (2, 3, 0, 8)), ((0, 3, 4, 8), (0, 3, 5, 8))]
)
def test_empty(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    query, key = (torch.randn(shape) for shape in shapes)
    with tilestream_sdpa():
        out = attend(query, key, key)
    assert out.shape == query.shape
    assert not out.any()


def test_a_query_without_keys_gives_zero() -> None:
    query, key, value = _inputs((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    for given in (mask, torch.zeros(3, 4).masked_fill(~mask, -torch.inf)):
        with tilestream_sdpa():
            out = attend(query, key, value, attn_mask=given)
        assert not out[:, :, 1].any()
        for gradient in torch.autograd.grad(out.sum(), (query, key, value)):
            assert torch.isfinite(gradient).all()


def test_dropout_is_applied_and_drawn_from_torchs_generator() -> None:
    query, key, _ = _inputs((2, 4, 64, 8), (2, 4, 256, 8), (2, 4, 256, 8))
    value = torch.ones(2, 4, 256, 8, dtype=torch.float64)
    with tilestream_sdpa():
        torch.manual_seed(7)
        first = attend(query, key, value, dropout_p=0.3)
        second = attend(query, key, value, dropout_p=0.3)
        torch.manual_seed(7)
        again = attend(query, key, value, dropout_p=0.3)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert abs(first.mean().item() - 1.0) < 0.01


def test_what_pytorch_refuses_is_refused() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    square = torch.ones(5, 5)
    bad: list[tuple[type[Exception], tuple[object, ...], dict[str, object]]] = [
        (tilestream.ShapeError, (q, k, k), {}),  # heads differ without enable_gqa
        (tilestream.ShapeError, (q, torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)), {"enable_gqa": True}),
        (tilestream.ShapeError, (q, q[..., :7], q), {}),
        (tilestream.ShapeError, (q, q, q), {"attn_mask": torch.ones(5, 4)}),
        (tilestream.ShapeError, (q, q, q), {"attn_mask": torch.ones(5)}),
        (tilestream.ShapeError, (q, q, q), {"attn_mask": torch.ones(1, 2, 4, 5, 5)}),
        (tilestream.ShapeError, (q[:1], q[:1], q[:1]), {"attn_mask": torch.ones(2, 4, 5, 5)}),
        (tilestream.ShapeError, (q[0, 0, 0], q[0, 0, 0], q[0, 0, 0]), {}),
        (tilestream.ShapeError, (q, torch.randn(3, 4, 7, 8), torch.randn(3, 4, 7, 8)), {}),
        (tilestream.DtypeError, (q, q.half(), q), {}),
        (tilestream.DtypeError, (q, q, q), {"attn_mask": square.long()}),
        (tilestream.DtypeError, (q, q, q), {"attn_mask": square.double()}),
        (tilestream.ArgumentError, (q, q, q), {"attn_mask": square, "is_causal": True}),
        (tilestream.ArgumentError, (q, q, q), {"dropout_p": 2.0}),
        (tilestream.UnsupportedError, (q.long(), q.long(), q.long()), {}),
        (tilestream.ShapeError, (q, torch.randn(2, 4, 7, 8), q), {}),  # PyTorch lets this one pass, and reads anything
    ]
    for error, args, kwargs in bad:
        with tilestream_sdpa(), pytest.raises(error):
            attend(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strict_and_not_strict() -> None:
    rows = torch.randn(8, 2, 8)
    nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 8])).transpose(1, 2)
    with tilestream_sdpa(), pytest.raises(tilestream.UnsupportedError, match="nested"):
        attend(nested, nested, nested)
    with tilestream_sdpa(strict=False):
        out = attend(nested, nested, nested)
    assert out.is_nested
    q = torch.randn(2, 4, 5, 8)
    with tilestream_sdpa(strict=False), pytest.raises(tilestream.ShapeError):
        attend(q, q[..., :7], q)  # a mistake is a mistake, strict or not


def test_the_scope_ends_and_reaches_torch_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    ours = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or ours(*a, **k))
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    for mode in (True, False):
        layer.train(mode)
        want = layer(x, src_key_padding_mask=padding)
        with tilestream_sdpa():
            got = layer(x, src_key_padding_mask=padding)
        torch.testing.assert_close(got[~padding], want[~padding], rtol=1e-5, atol=1e-5)
        assert len(calls) == (1 if mode else 2)
    attend(x, x, x)
    assert len(calls) == 2


# ---- kernels under PyTorch's registry


@pytest.fixture
def _activated() -> object:
    name = sdpa.register_sdpa()
    assert name in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl(name)
    yield name
    torch.nn.attention.restore_flash_attention_impl()


def test_registering_does_not_activate() -> None:
    sdpa.register_sdpa()
    sdpa.register_sdpa()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("_activated")
@pytest.mark.parametrize(("is_causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")])
def test_cpu_kernels(is_causal: bool, mask: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.nn.attention.current_flash_attention_impl() == "tilestream"
    query, key, value = (
        torch.randn(2, 7, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    given = torch.randn(7, 7, dtype=torch.float64) if mask else None
    given = given > -2.0 if mask == "bool" else given
    calls = _count_backend_calls(monkeypatch)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = attend(query, key, value, attn_mask=given, is_causal=is_causal)
    dout = torch.randn_like(got)
    got_gradients = torch.autograd.grad(got, (query, key, value), dout)
    assert calls == ["forward", "backward"]
    want = _math(query, key, value, attn_mask=given, is_causal=is_causal)
    torch.testing.assert_close(got, want, **TOLERANCE)
    for one, other in zip(torch.autograd.grad(want, (query, key, value), dout), got_gradients, strict=True):
        torch.testing.assert_close(other, one, **TOLERANCE)


def _count_backend_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from tilestream import dispatch

    calls: list[str] = []

    def count(backend: object, method: str) -> None:
        run = getattr(backend, method)
        monkeypatch.setattr(backend, method, lambda *arguments: calls.append(method) or run(*arguments))

    for name in dispatch.BACKENDS:
        for method in ("forward", "backward"):
            count(dispatch.backend(name), method)
    return calls


def test_restoring_brings_pytorchs_kernels_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _count_backend_calls(monkeypatch)
    query = torch.randn(1, 2, 5, 8)
    handle = sdpa.install_sdpa_kernels(["CPU"])
    attend(query, query, query)
    handle.remove()
    handle.remove()
    attend(query, query, query)
    assert calls == ["forward"]
    with pytest.raises(ValueError, match="devices must be among"):
        sdpa.install_sdpa_kernels(["MPS"])


@pytest.mark.usefixtures("_activated")
def test_cpu_kernels_under_compile() -> None:
    query, key, value = _inputs((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, is_causal=True), fullgraph=True, backend="aot_eager")
    got, want = compiled(query, key, value), _math(query, key, value, is_causal=True)
    torch.testing.assert_close(got, want, **TOLERANCE)
    for one, other in zip(
        torch.autograd.grad(want.sum(), (query, key, value)),
        torch.autograd.grad(got.sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(other, one, **TOLERANCE)


@pytest.fixture
def _cuda_kernels_on_cpu() -> object:
    """The schemas of the CUDA operators, tried without a GPU."""
    library = install_kernels(CUDA_KERNELS, "CPU")
    yield
    library._destroy()


def test_operators_exist_with_the_arguments_we_take() -> None:
    for name in (*CPU_KERNELS, *CUDA_KERNELS):
        assert hasattr(torch.ops.aten, name), name


@pytest.mark.usefixtures("_cuda_kernels_on_cpu")
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_cuda_operator(is_causal: bool, dropout_p: float) -> None:
    query, key, value = _inputs((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8), dtype=torch.float32)
    out, lse, *_, rng_state, _, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal
    )
    seed = rng_state.view(torch.int64)[:1] if dropout_p else None
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    want = tilestream.attention_with_lse(q, k, v, causal=is_causal, dropout_p=dropout_p, seed=seed)
    torch.testing.assert_close(out, want.out.transpose(1, 2))
    torch.testing.assert_close(lse, want.lse)
    assert (out.shape, out.stride()) == (query.shape, query.stride())
    dout = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(want.out.transpose(1, 2), (query, key, value), dout),
        torch.autograd.grad(out, (query, key, value), dout),
        strict=True,
    ):
        torch.testing.assert_close(other, one)
    with pytest.raises(tilestream.UnsupportedError, match="return_debug_mask"):
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, True)


@pytest.mark.usefixtures("_cuda_kernels_on_cpu")
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attention_operator(packed: bool, window: tuple[int, int]) -> None:
    shape_q, shape_k = ((9, 3, 8), (11, 3, 8)) if packed else ((2, 5, 3, 8), (2, 7, 3, 8))
    query, key, value = _inputs(shape_q, shape_k, shape_k, dtype=torch.float32)
    cu_q = torch.tensor([0, 4, 9], dtype=torch.int32) if packed else None
    cu_k = torch.tensor([0, 6, 11], dtype=torch.int32) if packed else None
    limits = {"window_size_left": window[0], "window_size_right": window[1]}
    arguments = (cu_q, cu_k, 5, 7, 0.0, False, False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(query, key, value, *arguments, **limits)
    given = tuple(None if size < 0 else size for size in window)
    if packed:
        want = tilestream.attention_varlen_with_lse(query, key, value, cu_q, cu_k, window=given)
    else:
        want = tilestream.attention_with_lse(query, key, value, window=given)
    torch.testing.assert_close(out, want.out)
    torch.testing.assert_close(lse, want.lse)
    if "_flash_attention_forward_no_dropout_inplace" in CUDA_KERNELS:  # torch 2.13
        written = torch.empty_like(query)
        torch.ops.aten._flash_attention_forward_no_dropout_inplace(
            written, query.detach(), key.detach(), value.detach(), *arguments, **limits
        )
        torch.testing.assert_close(written, want.out.detach())
    dout = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(want.out, (query, key, value), dout),
        torch.autograd.grad(out, (query, key, value), dout),
        strict=True,
    ):
        torch.testing.assert_close(other, one)


@pytest.mark.usefixtures("_cuda_kernels_on_cpu")
def test_varlen_attn_of_torch() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    query = torch.randn(9, 3, 8)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    got = varlen.varlen_attn(query, query, query, cu_seqlens, cu_seqlens, 5, 5, window_size=(-1, 0))
    want = tilestream.attention_varlen(query, query, query, cu_seqlens, cu_seqlens, causal=True)
    torch.testing.assert_close(got, want)


def test_the_scope_holds_inside_compiled_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    calls = _count_backend_calls(monkeypatch)

    def outside(query: Tensor) -> Tensor:
        return attend(query, query, query, is_causal=True)

    def inside(query: Tensor) -> Tensor:
        with tilestream_sdpa():
            return outside(query)

    queries = [torch.randn(1, 2, seqlen, 8) for seqlen in (5, 9)]
    with tilestream_sdpa():
        compiled = torch.compile(outside, fullgraph=True, dynamic=True, backend="aot_eager")
        results = [compiled(query) for query in queries]
    compiled = torch.compile(inside, fullgraph=True, dynamic=True, backend="aot_eager")
    results += [compiled(query) for query in queries]
    assert len(calls) == 4
    for got, query in zip(results, queries * 2, strict=True):
        torch.testing.assert_close(got, _math(query, query, query, is_causal=True))
