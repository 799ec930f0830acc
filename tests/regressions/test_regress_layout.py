"""Regressions: strides, offsets, slices and alignment."""

from __future__ import annotations

import math

import pytest
import torch
from regression import FLASH, INF, PYTORCH, XFORMERS, Call, Draw, regression
from torch import Tensor


@regression(PYTORCH + "pull/187506")
def test_l01_strided_last_dimension(draw: Draw) -> Call:
    """The innermost dimension of query, key and value is not contiguous."""
    query, key, value = (draw.randn(2, 16, 2, 33).permute(0, 3, 2, 1) for _ in range(3))
    return Call(query, key, value, {"causal": True})


@regression("https://github.com/flagos-ai/FlagGems/issues/5896")
def test_l02_only_value_is_a_view(draw: Draw) -> Call:
    """Only value is a transposed view."""
    query, key = draw.randn(1, 62, 4, 64), draw.randn(1, 62, 4, 64)
    return Call(query, key, draw.randn(1, 4, 62, 64).transpose(1, 2))


@regression(FLASH + "issues/355")
def test_l04_strided_dout(draw: Draw) -> Call:
    """Non-contiguous dout with one KV head."""
    query, key, value = draw.dense(2, (32, 32), (4, 1), 128)
    return Call(query, key, value, {"causal": True}, dout=draw.randn(2, 4, 128, 32).permute(0, 3, 1, 2))


@regression(PYTORCH + "issues/138529")
def test_l05_expanded_dout(draw: Draw) -> Call:
    """All strides of dout are 0, as from out.sum().backward()."""
    query, key, value = draw.dense(2, (50, 50), (2, 2), 32)
    dout = torch.ones((), dtype=draw.dtype, device=draw.device).expand(2, 50, 2, 32)
    return Call(query, key, value, {"causal": True}, dout=dout)


@regression("https://github.com/sgl-project/sgl-kernel-xpu/pull/471")
def test_l07_slices_of_a_packed_projection(draw: Draw) -> Call:
    """Query, key and value are slices of one tensor; dout is a slice of wider rows."""
    projection = draw.randn(2, 37, 3, 4, 32)
    dout = draw.randn(2, 37, 4 * 32 + 72)[..., : 4 * 32].unflatten(-1, (4, 32))
    return Call(*projection.unbind(2), {"causal": True}, dout=dout)


@regression(FLASH + "pull/617")
def test_l09_odd_storage_offset(draw: Draw) -> Call:
    """Data pointers are not aligned to 16 bytes."""

    def shifted(*shape: int) -> Tensor:
        size = math.prod(shape)
        return draw.randn(size + 8)[1 : 1 + size].view(*shape)

    return Call(shifted(1, 70, 2, 32), shifted(1, 70, 2, 32), shifted(1, 70, 2, 32), {"causal": True})


@regression(XFORMERS + "issues/813")
def test_l11_bias_of_odd_row_stride(draw: Draw) -> Call:
    """43 keys, and the bias is a slice of a wider buffer."""
    query, key, value = draw.dense(2, (21, 43), (2, 2), 32)
    bias = draw.randn(2, 2, 21, 50)[..., 5:48]
    return Call(query, key, value, {"bias": bias}, grads=("query", "key", "value", "bias"))


@regression(PYTORCH + "pull/184180")
def test_l12_bias_broadcast_over_heads(draw: Draw) -> Call:
    """The bias broadcasts over heads but not over the batch."""
    bias = torch.zeros(2, 1, 8, 8)
    bias[0, 0, 4:, :4] = -INF
    return Call(*draw.dense(2, (8, 8), (4, 4), 64), {"bias": bias.to(draw.dtype).to(draw.device)})


@regression(PYTORCH + "issues/181133")
def test_l13_head_major_storage(draw: Draw) -> Call:
    """84 batch entries of 3 tokens, stored head by head."""
    query, key, value = (draw.randn(84, 3, 3, 64).permute(0, 2, 1, 3) for _ in range(3))
    return Call(query, key, value)


@regression(FLASH + "issues/1417")
def test_l14_slice_of_a_longer_cache(draw: Draw) -> Call:
    """Decode on the first 77 rows of a cache whose other rows hold NaN."""
    query = draw.randn(3, 1, 8, 64)
    cached_key, cached_value = draw.randn(3, 256, 2, 64), draw.randn(3, 256, 2, 64)
    cached_key[:, 77:], cached_value[:, 77:] = float("nan"), float("nan")
    return Call(query, cached_key[:, :77], cached_value[:, :77], {"causal": True})


# Untouched pages of the buffer are never backed by memory, unless the suite poisons them.
@pytest.mark.no_poison
@regression(PYTORCH + "issues/190857")
def test_l16_offsets_beyond_31_bits(fixed_draw: Draw) -> Call:
    """Rows of key and value lie 2**25 elements apart, so that their offsets pass 2**31."""
    apart, seqlen = 2**25, 66
    buffer = torch.empty((seqlen - 1) * apart + 128, dtype=torch.bfloat16, device=fixed_draw.device)
    strides = (seqlen * apart, apart, 64, 1)
    key, value = (buffer.as_strided((1, seqlen, 1, 64), strides, offset) for offset in (0, 64))
    key.copy_(fixed_draw.randn(1, seqlen, 1, 64, dtype=torch.bfloat16))
    value.copy_(fixed_draw.randn(1, seqlen, 1, 64, dtype=torch.bfloat16))
    return Call(fixed_draw.randn(1, seqlen, 2, 64, dtype=torch.bfloat16), key, value, {"causal": True})
