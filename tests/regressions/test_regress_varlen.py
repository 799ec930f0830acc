"""Regressions: packed sequences."""

from __future__ import annotations

import math

import torch
from regression import FLASH, Call, Draw, assert_near, oracle, regression, starts

import tilestream
from tilestream import reference
from tilestream.errors import TilestreamError

_LIGHTX2V = "https://github.com/ModelTC/LightX2V/"
_SWIFT = "https://github.com/modelscope/ms-swift/"


@regression(FLASH + "issues/1537")
def test_v01_empty_sequences_between(draw: Draw) -> Call:
    """max_seqlen_q is 1, with empty sequences and a group of 3."""
    return draw.packed([0, 1, 0, 1], [0, 3, 0, 5], (9, 3), 64, options={"causal": True, "scale": 1.0})


@regression(FLASH + "issues/1619", atol_grad=1e-3)
def test_v02_one_token_in_all(draw: Draw) -> Call:
    """Four sequences share one token; 21 heads over 7, head_dim 120."""
    return draw.packed([0, 0, 0, 1], [0, 0, 0, 1], (21, 7), 120, options={"scale": math.sqrt(120)})


@regression(FLASH + "pull/2324", atol_grad=1e-4)
def test_v04_tokens_past_the_last_sequence(fixed_draw: Draw) -> Call:
    """Tensors longer than cu_seqlens[-1] with NaN in the tail: the tail gives 0 and gets gradient 0."""
    query, key, value = (fixed_draw.randn(40, 2, 32, dtype=torch.float32) for _ in range(3))
    for tensor in (query, key, value):
        tensor[29:] = float("nan")
    cu_seqlens = fixed_draw.int32([0, 11, 29])
    cu_seqlens_pair = (cu_seqlens, cu_seqlens.clone())
    return Call(query, key, value, {"causal": True}, cu_seqlens=cu_seqlens_pair, max_seqlens=(18, 18))


def test_v05_nan_stays_in_its_sequence(draw: Draw, backend: str) -> None:
    """NaN tokens of one sequence never reach its neighbours in a shared tile, forward or backward.

    Source: https://github.com/Dao-AILab/flash-attention/issues/2860
    """
    call = draw.packed([5, 7, 9], [6, 7, 10], (4, 2), 32)
    call.dout = draw.randn(21, 4, 32)
    expected, expected_gradients = oracle(call)
    leaves = [tensor.detach().clone() for tensor in (call.query, call.key, call.value)]
    for leaf, sick in zip(leaves, (slice(5, 12), slice(6, 13), slice(6, 13)), strict=True):
        leaf[sick] = float("nan")
        leaf.requires_grad_()
    assert call.cu_seqlens is not None
    out = tilestream.attention_varlen(*leaves, *call.cu_seqlens, backend=backend)
    gradients = torch.autograd.grad(out, leaves, call.dout)
    rows = [i for i in range(21) if not 5 <= i < 12]
    keys = [j for j in range(23) if not 6 <= j < 13]
    assert_near("out", out.detach()[rows], expected.out[rows], draw.dtype)
    for name, gradient, healthy in zip(("query", "key", "value"), gradients, (rows, keys, keys), strict=True):
        assert_near(f"d{name}", gradient[healthy], expected_gradients[name][healthy], draw.dtype)


@regression(FLASH + "issues/1664")
def test_v06_loose_max_seqlen(draw: Draw) -> Call:
    """max_seqlen is an upper bound: 4096 for lengths below 40."""
    return draw.packed([17, 39, 3], [17, 39, 3], (2, 2), 32, options={"causal": True}, max_seqlens=(4096, 4096))


@regression(FLASH + "issues/1311", may_refuse=True)
def test_v08_long_cu_seqlens(draw: Draw) -> Call:
    """int64 cu_seqlens are right or refused."""
    call = draw.packed([9, 14, 2], [20, 14, 7], (2, 2), 32, options={"causal": True})
    assert call.cu_seqlens is not None
    call.cu_seqlens = (call.cu_seqlens[0].long(), call.cu_seqlens[1].long())
    return call


@regression(_LIGHTX2V + "pull/1031", may_refuse=True)
def test_v09_cu_seqlens_on_the_cpu(draw: Draw) -> Call:
    """cu_seqlens on another device than query are right or refused."""
    call = draw.packed([9, 14, 2], [20, 14, 7], (2, 2), 32, options={"causal": True})
    assert call.cu_seqlens is not None
    call.cu_seqlens = (call.cu_seqlens[0].cpu(), call.cu_seqlens[1].cpu())
    return call


@regression(_SWIFT + "pull/9798", may_refuse=True)
def test_v10_max_seqlen_as_a_tensor(draw: Draw) -> Call:
    """A 0-dimensional max_seqlen is right or refused."""
    longest = torch.tensor(14, device=draw.device)
    options = {"causal": True}
    return draw.packed([9, 14, 2], [9, 14, 2], (2, 2), 32, options=options, max_seqlens=(longest, longest))


@regression(FLASH + "issues/1298")
def test_v12_queries_are_suffixes(draw: Draw) -> Call:
    """The queries are a suffix of each sequence, of a different length in each."""
    return draw.packed([1, 10, 33, 64], [20, 10, 100, 65], (4, 2), 64, options={"causal": True})


@regression(FLASH + "pull/2337")
def test_v14_many_short_sequences(draw: Draw) -> Call:
    """200 sequences of 1 to 5 tokens: offsets into padded scratch memory of the backward."""
    lengths = [1 + 7 * index % 5 for index in range(200)]
    return draw.packed(lengths, lengths, (2, 1), 64, options={"causal": True})


def test_v16_strided_cu_seqlens(draw: Draw, backend: str) -> None:
    """cu_seqlens that is a column of a table is right or refused.

    Source: https://github.com/NVIDIA/cudnn-frontend/pull/1183
    """
    call = draw.packed([9, 14, 2], [9, 14, 2], (2, 2), 32)
    packed = draw.int32(starts([9, 14, 2]))
    column = torch.stack([packed, torch.full_like(packed, 7)], dim=1)[:, 0]
    inputs = (call.query, call.key, call.value)
    wanted = reference.attention_varlen(*inputs, packed, packed, causal=True).out
    try:
        got = tilestream.attention_varlen(
            *inputs, column, column, max_seqlen_q=14, max_seqlen_k=14, causal=True, backend=backend
        )
    except TilestreamError:
        return
    assert_near("out", got, wanted, draw.dtype)
