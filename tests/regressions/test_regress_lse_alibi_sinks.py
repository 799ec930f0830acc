"""Regressions: log-sum-exp and merging, ALiBi, attention sinks."""

from __future__ import annotations

import torch
from regression import FLASH, INF, PYTORCH, Call, Draw, assert_near, regression

import tilestream
from tilestream import reference

_ALL_GRADS = ("query", "key", "value", "sinks")


@regression(PYTORCH + "issues/181645")
def test_i01_lse_is_natural(draw: Draw) -> Call:
    """lse is a natural logarithm."""
    return Call(*draw.dense(1, (30, 60), (2, 2), 64))


def test_i03_merged_halves_equal_the_whole(draw: Draw, backend: str) -> None:
    """Keys split in two (and an empty part) merge through their lse into the whole.

    Source: https://github.com/zhuzilin/ring-flash-attention/issues/42
    """
    query, key, value = draw.dense(2, (50, 120), (4, 2), 32)
    cuts = (slice(0, 70), slice(70, 120), slice(0, 0))
    parts = [tilestream.attention_with_lse(query, key[:, cut], value[:, cut], backend=backend) for cut in cuts]
    got = tilestream.merge(*parts, out_dtype=torch.float32)
    wanted = reference.attention(query, key, value)
    assert_near("out", got.out, wanted.out, draw.dtype)
    assert_near("lse", got.lse, wanted.lse, torch.float32, rtol=2e-5 if draw.dtype == torch.float32 else 3e-3)


@regression("https://github.com/meta-pytorch/attention-gym/pull/86")
def test_i04_alibi_is_symmetric(draw: Draw) -> Call:
    """ALiBi lowers far keys on both sides, with 40 queries and 65 keys."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=draw.device)
    return Call(*draw.dense(2, (40, 65), (4, 2), 32), {"alibi_slopes": slopes})


@regression(FLASH + "pull/540")
def test_i06_alibi_in_gqa_decode(draw: Draw) -> Call:
    """Each query head of a group keeps its own slope; the slopes are a strided view."""
    slopes = torch.rand(16, generator=draw.generator).to(draw.device)[::2]
    return Call(*draw.dense(2, (1, 100), (8, 2), 64), {"causal": True, "alibi_slopes": slopes})


@regression(FLASH + "issues/1973")
def test_i07_learnable_sinks(draw: Draw) -> Call:
    """Sinks with GQA and causal, forward and backward."""
    inputs = draw.dense(2, (45, 60), (4, 2), 64)
    sinks = torch.randn(4, generator=draw.generator).to(draw.device)
    return Call(*inputs, {"causal": True, "sinks": sinks}, grads=_ALL_GRADS)


@regression("https://github.com/PaddlePaddle/PaddleFleet/pull/1439")
def test_i09_sink_above_every_score(fixed_draw: Draw) -> Call:
    """A sink of 100: the output is near 0 and nothing overflows."""
    inputs = fixed_draw.dense(1, (20, 30), (2, 2), 32, dtype=torch.float32)
    return Call(*inputs, {"sinks": torch.tensor([100.0, 3.0], device=fixed_draw.device)}, grads=_ALL_GRADS)


@regression(FLASH + "issues/1797")
def test_i10_sink_of_negative_infinity(draw: Draw) -> Call:
    """A sink of -inf is the same as no sink."""
    sinks = torch.tensor([-INF, 0.0], device=draw.device)
    return Call(*draw.dense(1, (20, 30), (2, 2), 32), {"sinks": sinks})
