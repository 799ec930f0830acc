"""What must hold for every input: symmetries of attention, equivalent ways to say the same, and the dropout mask."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import is_ready
from torch import Tensor

import tilestream
from tilestream import reference
from tilestream.dropout import keep_mask, keep_threshold, philox4x32

_INFINITY = float("inf")
# Of a property with as many calls as `test_equivalent_calls`, what there is time for where they are interpreted.
_MOST_INTERPRETED = 5
seeds = st.integers(0, 10**6)
lengths = st.integers(0, 40)
# The best dtype of a backend, and how far two ways to say the same may then be apart.
_PRECISIONS = {"native": (torch.float32, 2e-5), "triton": (torch.float32, 2e-5)}
_PRECISION = (torch.float64, 1e-11)


def _randn(
    seed: int, device: torch.device, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@given(seed=seeds, batch=st.integers(1, 7), seqlen_q=lengths, seqlen_k=lengths, causal=st.booleans())
# 48 scores: PyTorch's vector code takes some of them and its scalar code the rest.
@example(seed=0, batch=3, seqlen_q=1, seqlen_k=4, causal=False)
@settings(max_examples=40, deadline=None)
def test_permuting_the_batch_permutes_the_bits(
    backend: str, device: torch.device, seed: int, batch: int, seqlen_q: int, seqlen_k: int, causal: bool
) -> None:
    shapes = (
        (batch, seqlen_q, 4, 16),
        (batch, seqlen_k, 2, 16),
        (batch, seqlen_k, 2, 16),
        (batch, 1, seqlen_q, seqlen_k),
    )
    query, key, value, bias, slopes = _randn(seed, device, *shapes, (batch, 4))
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)).to(device)

    def attend(*tensors: Tensor) -> tilestream.AttentionOutput:
        q, k, v, b, s = tensors
        return tilestream.attention_with_lse(q, k, v, bias=b, alibi_slopes=s.abs(), causal=causal, backend=backend)

    plain = attend(query, key, value, bias, slopes)
    permuted = attend(*(x[order] for x in (query, key, value, bias, slopes)))
    assert torch.equal(permuted.out, plain.out[order])
    assert torch.equal(permuted.lse, plain.lse[order])


@given(seed=seeds, seqlen=st.integers(1, 40), head=st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_heads_do_not_meet(backend: str, device: torch.device, seed: int, seqlen: int, head: int) -> None:
    """Query head h reads KV head h // group and no other."""
    query, key, value = _randn(seed, device, (1, seqlen, 4, 8), (1, seqlen, 2, 8), (1, seqlen, 2, 8))
    everything = tilestream.attention(query, key, value, backend=backend)
    kv = slice(head // 2, head // 2 + 1)
    alone = tilestream.attention(query[:, :, head : head + 1], key[:, :, kv], value[:, :, kv], backend=backend)
    torch.testing.assert_close(everything[:, :, head : head + 1], alone)


def few_interpreted(check: Callable[..., None]) -> Callable[..., None]:
    """`check` for every example; interpreted, for the first few alone (and for these again, as often as they come)."""
    known: set[str] = set()

    @functools.wraps(check)
    def check_some(**arguments: Any) -> None:
        example = repr(sorted(arguments.items()))
        is_interpreted = arguments["backend"] == "triton" and is_ready()
        if not is_interpreted or example in known or len(known) < _MOST_INTERPRETED:
            if is_interpreted:
                known.add(example)
            check(**arguments)

    return check_some


@given(seed=seeds, seqlen_q=lengths, seqlen_k=lengths, scale=st.floats(-2, 2), shift=st.integers(-45, 45))
# A scale that float32 does not tell from 0.
@example(seed=0, seqlen_q=3, seqlen_k=4, scale=2e-311, shift=0)
@example(seed=0, seqlen_q=33, seqlen_k=40, scale=-1.5, shift=-3)
@settings(max_examples=40, deadline=None)
@few_interpreted
def test_equivalent_calls(
    backend: str, device: torch.device, seed: int, seqlen_q: int, seqlen_k: int, scale: float, shift: int
) -> None:
    dtype, tolerance = _PRECISIONS.get(backend, _PRECISION)
    shapes = ((2, seqlen_q, 2, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 8))
    query, key, value = _randn(seed, device, *shapes, dtype=dtype)

    def same(one: dict[str, Any], other: dict[str, Any], q: Tensor = query) -> None:
        got = tilestream.attention_with_lse(query, key, value, **one, backend=backend)
        wanted = tilestream.attention_with_lse(q, key, value, **other, backend=backend)
        torch.testing.assert_close(got.out, wanted.out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.lse, wanted.lse, rtol=tolerance, atol=tolerance)

    same({}, {"scale": 1 / math.sqrt(8)})
    same({"scale": scale}, {"scale": 1.0}, query * scale)
    same({"causal": True}, {"window": (None, 0)})
    same({"causal": True, "window": (3, 7)}, {"window": (3, 0)})
    same({"causal": True}, {"causal": True, "shift": seqlen_k - seqlen_q})
    same({}, {"shift": shift})
    distance = (torch.arange(seqlen_k)[None] - torch.arange(seqlen_q)[:, None] - shift).to(device)
    hidden = torch.zeros(distance.shape, dtype=dtype, device=device).masked_fill(distance > 0, -_INFINITY)
    same({"causal": True, "shift": shift}, {"bias": hidden[None, None]})
    slopes = torch.tensor([0.3, 1.5], dtype=dtype, device=device)
    ramp = -slopes[None, :, None, None] * distance.abs()
    same({"alibi_slopes": slopes, "shift": shift}, {"bias": ramp})
    same({"softcap": 1e9}, {})


@given(seed=seeds, offset=st.floats(-50, 50))
@settings(max_examples=20, deadline=None)
def test_a_constant_bias_moves_lse_and_nothing_else(
    backend: str, device: torch.device, seed: int, offset: float
) -> None:
    dtype, tolerance = _PRECISIONS.get(backend, _PRECISION)
    query, key, value = _randn(seed, device, (1, 9, 2, 8), (1, 13, 2, 8), (1, 13, 2, 8), dtype=dtype)
    plain = tilestream.attention_with_lse(query, key, value, backend=backend)
    bias = torch.full((1, 1, 1, 1), offset, dtype=dtype, device=device)
    moved = tilestream.attention_with_lse(query, key, value, bias=bias, backend=backend)
    torch.testing.assert_close(moved.out, plain.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(moved.lse, plain.lse + offset, rtol=tolerance, atol=tolerance)


sequences = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5)


@given(seed=seeds, pairs=sequences, causal=st.booleans(), dropout_p=st.sampled_from([0.0, 0.4]))
@settings(max_examples=40, deadline=None)
def test_varlen_is_dense_sequence_by_sequence(
    backend: str, device: torch.device, seed: int, pairs: list[tuple[int, int]], causal: bool, dropout_p: float
) -> None:
    dtype, tolerance = _PRECISIONS.get(backend, _PRECISION)
    total_q, total_k = sum(m for m, _ in pairs), sum(n for _, n in pairs)
    query, key, value = _randn(seed, device, (total_q, 4, 8), (total_k, 2, 8), (total_k, 2, 8), dtype=dtype)
    starts = [torch.tensor([0, *(pair[side] for pair in pairs)]).cumsum(0).to(device, torch.int32) for side in (0, 1)]
    options: dict[str, Any] = {"causal": causal, "backend": backend}
    packed = tilestream.attention_varlen_with_lse(query, key, value, *starts, dropout_p=dropout_p, seed=seed, **options)
    seed_tensor = torch.tensor([seed], device=device)
    start_q = start_k = 0
    for b, (seqlen_q, seqlen_k) in enumerate(pairs):
        rows, keys = slice(start_q, start_q + seqlen_q), slice(start_k, start_k + seqlen_k)
        one = [query[None, rows], key[None, keys], value[None, keys]]
        if dropout_p == 0:
            dense = tilestream.attention_with_lse(*one, **options)
        else:
            # The mask names the sequence, which a dense call of one batch entry cannot: pad the batch up to it.
            repeated = [x.expand(b + 1, -1, -1, -1) for x in one]
            whole = reference.attention(*repeated, causal=causal, dropout_p=dropout_p, seed=seed_tensor, dtype=dtype)
            dense = tilestream.AttentionOutput(whole.out[b:], whole.lse[b:])
        torch.testing.assert_close(packed.out[rows], dense.out[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(packed.lse[:, rows], dense.lse[0], rtol=tolerance, atol=tolerance)
        start_q, start_k = rows.stop, keys.stop


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("garbage", [float("nan"), _INFINITY, -_INFINITY])
@pytest.mark.parametrize("hidden_by", ["causal", "window", "bias"])
def test_invisible_garbage_reaches_no_row(
    backend: str, device: torch.device, hidden_by: str, garbage: float, where: str
) -> None:
    """A key that *some* queries see stays out of the rows that do not see it."""
    seqlen, bad = 70, 50
    query, key, value = _randn(1, device, *[(1, seqlen, 2, 16)] * 3)
    (key if where == "key" else value)[:, bad] = garbage
    sees = torch.zeros(seqlen, dtype=torch.bool)
    options: dict[str, Any]
    if hidden_by == "causal":
        options, sees[bad:] = {"causal": True}, True
    elif hidden_by == "window":
        options, sees[bad - 3 : bad + 5] = {"window": (4, 3)}, True
    else:
        bias = torch.zeros(1, 1, seqlen, seqlen, device=device)
        bias[..., :13, bad] = -_INFINITY
        options, sees[13:] = {"bias": bias}, True
    out = tilestream.attention(query, key, value, backend=backend, **options)
    assert bool(torch.isfinite(out[:, ~sees.to(device)]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_result(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Bit for bit with one number of threads; within rounding between numbers, because sums may be cut elsewhere."""
    query, key, value = _randn(0, device, (2, 300, 6, 32), (2, 300, 2, 32), (2, 300, 2, 32), dtype=dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            leaves = [x.detach().requires_grad_() for x in (query, key, value)]
            out = tilestream.attention(*leaves, causal=True, backend=backend)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for got, wanted in zip(result, results[0], strict=True):
            # Sums of 300 terms: a few units in the last place of the largest entry.
            tolerance = 8 * torch.finfo(dtype).eps * float(wanted.abs().max())
            torch.testing.assert_close(got, wanted, rtol=0.0, atol=tolerance)
    assert torch.equal(results[3][0], results[0][0])


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
def test_large_scores_neither_overflow_nor_vanish(backend: str, device: torch.device, magnitude: float) -> None:
    """exp(10000) is no float; softmax of such scores is."""
    query, key, value = _randn(0, device, *[(1, 70, 2, 16)] * 3)
    leaves = [x.requires_grad_() for x in (magnitude * query, key, value)]
    result = tilestream.attention_with_lse(*leaves, backend=backend)
    gradients = torch.autograd.grad((result.out.sum(), result.lse.sum()), leaves)
    for tensor in (*result, *gradients):
        assert bool(torch.isfinite(tensor).all())


# ---- the dropout mask


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: list[int], key: list[int], wanted: list[int], device: torch.device) -> None:
    """Random123's kat_vectors for philox4x32-10."""
    words = [torch.tensor(word, device=device) for word in (*counter, *key)]
    got = philox4x32((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert [int(word) for word in got] == wanted


def _mask(seed: int, dropout_p: float, i: range, j: range, batch: int = 2, heads: int = 3) -> Tensor:
    return keep_mask(torch.tensor([seed]), dropout_p, torch.arange(batch), torch.arange(heads), i, j)


@given(seed=st.integers(-(2**63), 2**63 - 1), rows=st.tuples(lengths, lengths), keys=st.tuples(lengths, lengths))
@settings(max_examples=100, deadline=None)
def test_the_mask_does_not_depend_on_tiling(seed: int, rows: tuple[int, int], keys: tuple[int, int]) -> None:
    i, j = range(min(rows), max(rows)), range(min(keys), max(keys))
    whole = _mask(seed, 0.3, range(40), range(40))
    assert torch.equal(_mask(seed, 0.3, i, j), whole[..., i.start : i.stop, j.start : j.stop])


@pytest.mark.parametrize("dropout_p", [0.01, 0.3, 0.5, 0.99])
def test_dropout_statistics(dropout_p: float) -> None:
    """The keep rate overall, per head, row and column; and neighbours are independent."""
    kept = _mask(7, dropout_p, range(256), range(256), batch=2, heads=4).double()
    keep_p = 1 - dropout_p

    def within_five_sigma(rate: Tensor, count: int, probability: float) -> bool:
        sigma = math.sqrt(probability * (1 - probability) / count)
        return float((rate - probability).abs().max()) < 5 * sigma

    assert within_five_sigma(kept.mean(), kept.numel(), keep_p)
    for axes, count in (((2, 3), 256 * 256), ((0, 1, 2), 8 * 256), ((0, 1, 3), 8 * 256)):
        assert within_five_sigma(kept.mean(dim=axes), count, keep_p), axes
    for axis in range(4):
        both = kept.narrow(axis, 1, kept.shape[axis] - 1) * kept.narrow(axis, 0, kept.shape[axis] - 1)
        assert within_five_sigma(both.mean(), both.numel() // 2, keep_p**2), axis


def test_keep_threshold_is_exact() -> None:
    assert keep_threshold(0.0) == 2**32
    assert keep_threshold(0.5) == 2**31
    assert keep_threshold(0.25) == 3 * 2**30
    assert bool(_mask(3, 0.0, range(9), range(9)).all())


def test_seeds_differ_in_all_64_bits() -> None:
    masks = [_mask(seed, 0.5, range(16), range(16)) for seed in (0, 1, 2**31, 2**32, 2**62, -1)]
    assert all(not torch.equal(a, b) for index, a in enumerate(masks) for b in masks[:index])


def test_forward_and_backward_use_the_same_mask(backend: str, device: torch.device) -> None:
    """With value = identity, out is the dropped-out P itself, and dvalue of a one-hot dout is one of its rows."""
    query, key = _randn(2, device, (1, 70, 2, 16), (1, 70, 2, 16))
    value = torch.eye(70, device=device)[None, :, None].expand(1, 70, 2, 70).clone().requires_grad_()
    out = tilestream.attention(query, key, value, dropout_p=0.5, seed=11, backend=backend)
    kept = keep_mask(
        torch.tensor([11], device=device), 0.5, torch.arange(1), torch.arange(2), range(70), range(70)
    ).transpose(1, 2)
    assert torch.equal(out != 0, kept)
    for i in (0, 33, 69):
        dout = torch.zeros_like(out)
        dout[:, i, :, 0] = 1.0
        (dvalue,) = torch.autograd.grad(out, value, dout, retain_graph=True)
        torch.testing.assert_close(dvalue[..., 0], out[:, i].detach().transpose(1, 2))


def test_dropout_without_a_seed_follows_the_generator_of_torch(device: torch.device) -> None:
    query, key, value = _randn(0, device, *[(1, 16, 2, 8)] * 3)

    def draw() -> Tensor:
        return tilestream.attention(query, key, value, dropout_p=0.5)

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert torch.equal(draw(), first)
    assert not torch.equal(first, second)
    of_int = tilestream.attention(query, key, value, dropout_p=0.5, seed=9)
    of_tensor = tilestream.attention(query, key, value, dropout_p=0.5, seed=torch.tensor([9], device=device))
    assert torch.equal(of_int, of_tensor)


def test_dropout_keeps_the_mean(device: torch.device) -> None:
    """Survivors are divided by 1 - dropout_p, so the expectation over seeds is attention without dropout."""
    query, key, value = _randn(0, device, *[(1, 12, 2, 8)] * 3)
    many = [tilestream.attention(query, key, value, dropout_p=0.3, seed=seed) for seed in range(400)]
    mean, spread = torch.stack(many).mean(0), torch.stack(many).std(0) / math.sqrt(400)
    plain = tilestream.attention(query, key, value)
    assert float(((mean - plain).abs() / spread).max()) < 5
