"""Regressions: head dimensions, groups, lengths that divide nothing, and sizes past a grid's or an index's limit."""

from __future__ import annotations

import pytest
import torch
from regression import FLASH, PYTORCH, TRITON, Call, Draw, assert_near, regression

import tilestream
from tilestream import reference


@regression(FLASH + "pull/2896")
def test_s01_head_dim_72(fixed_draw: Draw) -> Call:
    """Padded accumulator columns must not reach dq."""
    return fixed_draw.packed([512], [512], (2, 2), 72, dtype=torch.bfloat16)


@regression(FLASH + "issues/2492")
def test_s02_head_dim_104(draw: Draw) -> Call:
    """The backward at head_dim 104."""
    return Call(*draw.dense(2, (70, 70), (2, 2), 104), {"causal": True})


@regression(FLASH + "issues/498")
def test_s04_head_dim_160(draw: Draw) -> Call:
    """97 tokens at head_dim 160, forward and backward."""
    return Call(*draw.dense(2, (97, 97), (2, 2), 160), {"causal": True})


@regression("https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27")
def test_s06_wider_values(draw: Draw) -> Call:
    """head_dim_v is larger than head_dim."""
    return Call(*draw.dense(2, (50, 70), (4, 2), (32, 64)), {"causal": True})


@regression(PYTORCH + "issues/176767")
def test_s07_narrower_values(draw: Draw) -> Call:
    """head_dim_v is smaller than head_dim; the output takes value's width."""
    return Call(*draw.dense(1, (16, 16), (1, 1), (32, 24)))


@regression("https://github.com/marin-community/levanter/pull/449")
def test_s10_gqa_gradients(draw: Draw) -> Call:
    """dk and dv sum over the group, and groups are consecutive heads."""
    return Call(*draw.dense(2, (33, 47), (8, 2), 32), {"causal": True})


@regression(PYTORCH + "issues/151359")
def test_s11_group_of_six(draw: Draw) -> Call:
    """A group that is no power of two, one query over 300 keys."""
    return Call(*draw.dense(1, (1, 300), (12, 2), 16), {"causal": True})


@regression("https://github.com/openxla/tokamax/issues/316", atol_grad=1e-4)
def test_s14_shorter_than_a_tile(draw: Draw) -> Call:
    """All-ones inputs shorter than a tile: finite gradients."""
    query = torch.ones(2, 13, 2, 32, dtype=draw.dtype, device=draw.device)
    key = torch.ones(2, 8, 2, 32, dtype=draw.dtype, device=draw.device)
    return Call(query, key, key.clone(), dout=torch.ones_like(query))


@regression(TRITON + "issues/2059")
def test_s15_prime_lengths(draw: Draw) -> Call:
    """113 queries and 217 keys divide nothing."""
    return Call(*draw.dense(2, (113, 217), (2, 2), 64))


@pytest.mark.slow
@regression(FLASH + "issues/1786")
def test_s16_batch_beyond_a_grid_dimension(draw: Draw) -> Call:
    """65537 sequences of two tokens."""
    return Call(*draw.dense(65537, (2, 2), (1, 1), 16), {"causal": True})


@pytest.mark.gpu
@pytest.mark.slow
@regression(FLASH + "pull/1500", atol_grad=2e-1)
def test_s19_padded_offsets_beyond_31_bits(fixed_draw: Draw) -> Call:
    """8300 sequences of one token: offsets in a padded dq accumulator pass 2**31."""
    return Call(*fixed_draw.dense(8300, (1, 1), (16, 16), 128, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.slow
def test_s21_bias_beyond_31_bits(fixed_draw: Draw, backend: str) -> None:
    """A bias of more than 2**31 elements, checked on sampled rows.

    Source: https://github.com/pytorch/pytorch/issues/162588
    """
    device = fixed_draw.device
    if device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory < 40e9:
        pytest.skip("needs a GPU of 40 GB")
    seqlen_q, seqlen_k = 40000, 60000
    query, key, value = fixed_draw.dense(1, (seqlen_q, seqlen_k), (1, 1), 64, dtype=torch.bfloat16)
    bias = torch.full((1, 1, seqlen_q, seqlen_k), float("-inf"), device=device, dtype=torch.bfloat16)
    for i in range(0, seqlen_q, 64):
        bias[0, 0, i : i + 64, i : i + 64] = 0
    got = tilestream.attention(query, key, value, bias=bias, backend=backend)
    for i in (0, 17, 35791, 35792, 39999):
        row = reference.attention(query[:, i : i + 1], key, value, bias=bias[:, :, i : i + 1]).out
        assert_near(f"row {i}", got[:, i : i + 1], row, torch.bfloat16)


@regression(PYTORCH + "issues/130196", atol_grad=1e-4)
def test_s22_single_token_many_heads(draw: Draw) -> Call:
    """No dimension of size 1 may be squeezed away."""
    return Call(*draw.dense(1, (1, 1), (8, 8), 16), {"causal": True})


@regression(PYTORCH + "issues/156022")
def test_s23_many_queries_few_keys(fixed_draw: Draw) -> Call:
    """1030 queries, 17 keys and a bias: a backward elsewhere corrupted the heap."""
    query, key, value = fixed_draw.dense(2, (1030, 17), (3, 3), 8, dtype=torch.bfloat16)
    return Call(query, key, value, {"bias": fixed_draw.randn(1, 1, 1030, 17, dtype=torch.bfloat16)})


def test_s24_same_bits_every_time(fixed_draw: Draw, backend: str) -> None:
    """The same call at head_dim 72 gives the same bits: nothing uninitialised is read.

    Source: https://github.com/turboderp-org/exllamav3/pull/316
    """
    inputs = fixed_draw.dense(1, (300, 300), (4, 4), 72, dtype=torch.float16)
    first, *others = (tilestream.attention(*inputs, backend=backend) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)
