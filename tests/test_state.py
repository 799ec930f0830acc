"""The softmax state and its merge: a commutative monoid, differentiable, and equal to attending to all keys at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilestream
from tilestream import AttentionOutput, reference
from tilestream.errors import ArgumentError, DtypeError, ShapeError
from tilestream.state import SoftmaxState, merge

_INFINITY = float("inf")
_SHAPE = (2, 3, 2, 4)  # batch, seqlen_q, heads, head_dim_v
seeds = st.integers(0, 10**6)


def _pair(seed: int, dtype: torch.dtype = torch.float64) -> AttentionOutput:
    """A random (out, lse) in which some rows have seen nothing and the weights differ by many powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(_SHAPE, generator=generator, dtype=dtype)
    lse = 20 * torch.randn(_SHAPE[0], _SHAPE[2], _SHAPE[1], generator=generator, dtype=dtype)
    is_void = torch.rand(lse.shape, generator=generator) < 0.3
    lse[is_void] = -_INFINITY
    out[is_void.transpose(1, 2)] = 0
    return AttentionOutput(out, lse)


def _assert_close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@given(seeds, seeds, seeds)
@settings(max_examples=50, deadline=None)
def test_merge_is_associative_and_commutative(a: int, b: int, c: int) -> None:
    one, two, three = _pair(a), _pair(b), _pair(c)
    whole = merge(one, two, three)
    _assert_close(merge(merge(one, two), three), whole)
    _assert_close(merge(one, merge(two, three)), whole)
    _assert_close(merge(three, one, two), whole)


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_merge_has_an_identity(seed: int) -> None:
    pair = _pair(seed)
    nothing = AttentionOutput(torch.zeros_like(pair.out), torch.full_like(pair.lse, -_INFINITY))
    for merged in (merge(pair), merge(pair, nothing), merge(nothing, pair), merge(nothing, pair, nothing)):
        _assert_close(merged, pair)
    assert not any(torch.isnan(tensor).any() for tensor in merge(nothing, nothing))


@given(seeds, st.lists(st.integers(0, 13), max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_splitting_the_keys_anywhere_and_merging_is_the_whole(seed: int, cuts: list[int], causal: bool) -> None:
    """Empty parts included. Each part tells the band where its keys lie through `shift`."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, n, 2, 8, generator=generator, dtype=torch.float64) for n in (9, 13, 13))
    edges = [0, *sorted(cuts), 13]
    parts = [
        tilestream.attention_with_lse(query, key[:, lo:hi], value[:, lo:hi], causal=causal, shift=13 - 9 - lo)
        for lo, hi in itertools.pairwise(edges)
    ]
    _assert_close(merge(*parts), reference.attention(query, key, value, causal=causal))


def test_merge_is_differentiable() -> None:
    """Splitting, attending and merging has the gradients of attending at once; lse carries part of them."""
    query, key, value = (torch.randn(1, n, 2, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    dout, dlse = torch.randn(1, 5, 2, 4, dtype=torch.float64), torch.randn(1, 2, 5, dtype=torch.float64)

    def gradients(result: AttentionOutput) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, (query, key, value), (dout, dlse))

    parts = [tilestream.attention_with_lse(query, key[:, cut], value[:, cut]) for cut in (slice(3), slice(3, 7))]
    for got, wanted in zip(gradients(merge(*parts)), gradients(reference.attention(query, key, value)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_gradcheck_of_merge() -> None:
    def merged(*tensors: Tensor) -> AttentionOutput:
        return merge((tensors[0], tensors[1]), (tensors[2], tensors[3]))

    pairs = [tensor.requires_grad_() for seed in (0, 1) for tensor in _finite_pair(seed)]
    assert torch.autograd.gradcheck(merged, pairs)
    assert torch.autograd.gradgradcheck(merged, pairs)


def _finite_pair(seed: int) -> AttentionOutput:
    out, lse = _pair(seed)
    return AttentionOutput(out[:1, :2], lse[:1, :, :2].masked_fill(lse[:1, :, :2] == -_INFINITY, 0.5) / 20)


def test_gradients_of_merge_with_void_rows_are_zero_not_nan() -> None:
    pairs = [[tensor.requires_grad_() for tensor in _pair(seed)] for seed in (0, 1)]
    merged = merge(*[AttentionOutput(*pair) for pair in pairs])
    leaves = [tensor for pair in pairs for tensor in pair]
    finite_lse = merged.lse.masked_fill(merged.lse == -_INFINITY, 0.0)
    for gradient in torch.autograd.grad((merged.out.sum() + finite_lse.sum()), leaves):
        assert bool(torch.isfinite(gradient).all())


def test_merge_of_packed_outputs() -> None:
    """(total_q, heads, head_dim_v) with (heads, total_q), as attention_varlen_with_lse returns them."""
    dense = [_pair(seed) for seed in (0, 1)]
    packed = [(out[0], lse[0]) for out, lse in dense]
    wanted = merge(*dense)
    _assert_close(merge(*packed), (wanted.out[0], wanted.lse[0]))


def test_merge_does_not_round_between() -> None:
    """bfloat16 outputs merge in float32; out_dtype keeps it."""
    pairs = [AttentionOutput(out.to(torch.bfloat16), lse.float()) for out, lse in (_pair(0), _pair(1))]
    exact = merge(*[(out.double(), lse.double()) for out, lse in pairs])
    kept = merge(*pairs, out_dtype=torch.float32)
    assert kept.out.dtype == torch.float32
    assert kept.lse.dtype == torch.float32
    torch.testing.assert_close(kept.out.double(), exact.out, rtol=1e-5, atol=1e-5)
    assert merge(*pairs).out.dtype == torch.bfloat16


@pytest.mark.parametrize("magnitude", [300.0, -300.0, 80_000.0])
def test_merge_of_extreme_scores_neither_overflows_nor_vanishes(magnitude: float) -> None:
    out, lse = _finite_pair(0)
    merged = merge((out.float(), lse.float() + magnitude), (out.float(), lse.float() + magnitude))
    _assert_close(merged, (out.float(), lse.float() + magnitude + 0.6931472), 1e-5)


@pytest.mark.parametrize(
    ("pairs", "error", "words"),
    [
        ((), ArgumentError, ["at least one"]),
        (((torch.zeros(_SHAPE), 3.0),), ArgumentError, ["argument 0"]),
        ((torch.zeros(_SHAPE),), ArgumentError, ["argument 0", "Tensor"]),
        ((_pair(0), (torch.zeros(2, 3, 2, 5), _pair(0).lse)), ShapeError, ["pair 1", "(2, 3, 2, 5)", "(2, 3, 2, 4)"]),
        (((torch.zeros(_SHAPE), torch.zeros(2, 3, 2)),), ShapeError, ["lse[0]", "(2, 3, 2)", "(2, 3, 2, 4)"]),
        (((torch.zeros(_SHAPE), torch.zeros(2, 2, 3, dtype=torch.bfloat16)),), DtypeError, ["bfloat16"]),
        (((torch.zeros(_SHAPE, dtype=torch.int64), torch.zeros(2, 2, 3)),), DtypeError, ["int64"]),
    ],
    ids=["none", "not_a_tensor", "not_a_pair", "other_shapes", "lse_of_another_out", "half_lse", "integer_out"],
)
def test_merge_refuses(pairs: tuple[tuple[Tensor, Tensor], ...], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        merge(*pairs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_softmax_state_is_softmax(seed: int, widths: list[int], has_sink: bool) -> None:
    """Tile after tile, with wholly hidden tiles and rows between them, against one softmax over everything."""
    generator = torch.Generator().manual_seed(seed)
    rows, head_dim_v = 6, 3
    s = 30 * torch.randn(rows, sum(widths), generator=generator, dtype=torch.float64)
    s[torch.rand(s.shape, generator=generator) < 0.4] = -_INFINITY
    s[0] = -_INFINITY
    v = torch.randn(sum(widths), head_dim_v, generator=generator, dtype=torch.float64)
    sink = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    if has_sink:
        state = SoftmaxState.from_sink(sink, head_dim_v)
    else:
        state = SoftmaxState.identity((rows,), head_dim_v, torch.float64, s.device)
    start = 0
    for width in widths:
        tile = slice(start, start + width)
        state.acc += state.rescale(s[:, tile].clone()) @ v[tile]
        start += width
    scores = torch.cat([s, sink], dim=1) if has_sink else s
    p = torch.softmax(scores, dim=1).nan_to_num(0.0)[:, : s.shape[1]]
    _assert_close(state.finalize(), (p @ v, torch.logsumexp(scores, dim=1)))


def test_from_sink_of_minus_infinity_is_the_identity() -> None:
    sink = torch.full((4, 1), -_INFINITY, dtype=torch.float64)
    from_sink = SoftmaxState.from_sink(sink, 3)
    identity = SoftmaxState.identity((4,), 3, torch.float64, sink.device)
    for name in ("row_max", "row_sum", "acc"):
        assert torch.equal(getattr(from_sink, name), getattr(identity, name)), name
    finished = from_sink.finalize()
    assert torch.equal(finished.out, torch.zeros(4, 3, dtype=torch.float64))
    assert torch.equal(finished.lse, sink.squeeze(1))


def test_from_sink_does_not_share_memory_with_the_sink() -> None:
    sink = torch.zeros(2, 1)
    SoftmaxState.from_sink(sink, 3).row_max.fill_(7.0)
    assert torch.equal(sink, torch.zeros(2, 1))


def test_a_sink_is_a_merge_with_a_key_of_value_zero() -> None:
    query, key, value = (torch.randn(2, n, 2, 8, dtype=torch.float64) for n in (5, 6, 6))
    sinks = torch.tensor([0.7, -_INFINITY], dtype=torch.float64)
    plain = tilestream.attention_with_lse(query, key, value)
    phantom = AttentionOutput(torch.zeros_like(plain.out), sinks[None, :, None].expand(2, 2, 5))
    _assert_close(tilestream.attention_with_lse(query, key, value, sinks=sinks), merge(plain, phantom))
