"""Regressions: large, tiny, tied and negative scores, soft caps, and precision."""

from __future__ import annotations

import torch
from regression import FLASH, PYTORCH, TRITON, Call, Draw, assert_near, regression

import tilestream
from tilestream import reference


@regression(PYTORCH + "issues/121558")
def test_n01_one_key_of_huge_values(fixed_draw: Draw) -> Call:
    """With query = key = value = 133120 in bfloat16 the output is exactly the value."""
    ones = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16, device=fixed_draw.device)
    return Call(ones, ones.clone(), ones.clone(), grads=(), dout=torch.zeros_like(ones))


@regression(FLASH + "issues/334", atol_grad=6e-2)
def test_n02_single_token(fixed_draw: Draw) -> Call:
    """dq and dk are 0 and dv is dout."""
    query, key, value = fixed_draw.dense(1, (1, 1), (1, 1), 16, dtype=torch.float16, spread=3.0)
    return Call(query, key, value * 3, dout=torch.ones_like(query))


@regression(FLASH + "issues/1052")
def test_n03_half_precision_of_wide_spread(fixed_draw: Draw) -> Call:
    """Values times 3 over 1024 causal tokens: gradients are finite and right."""
    query, key, value = fixed_draw.dense(1, (1024, 1024), (1, 1), 128, dtype=torch.float16, spread=3.0)
    return Call(query, key, value * 3, {"causal": True})


@regression("https://github.com/NVIDIA/cudnn-frontend/issues/1072")
def test_n05_very_negative_lse(fixed_draw: Draw) -> Call:
    """One query over 128 keys with lse near -122: dk and dv stay finite."""
    query, key, value = fixed_draw.dense(1, (1, 128), (2, 2), 64, dtype=torch.bfloat16, spread=0.1)
    query[..., 0] = 1.0
    key[..., 0] = -128.0 * 8
    return Call(query, key, value)


@regression("https://github.com/huggingface/optimum/issues/1100", atol_grad=5e-2)
def test_n06_dot_product_beyond_half_precision(fixed_draw: Draw) -> Call:
    """The unscaled product passes 65504."""
    query, key, value = fixed_draw.dense(1, (9, 40), (2, 2), 64, dtype=torch.float16, spread=0.5)
    query += 60.0
    key += 60.0
    return Call(query, key, value, grads=("value",))


@regression(FLASH + "issues/1461")
def test_n07_negative_scale(draw: Draw) -> Call:
    """The running maximum must follow the scaled score."""
    return Call(*draw.dense(1, (70, 130), (2, 2), 32, spread=3.0), {"scale": -0.5, "causal": True})


@regression(FLASH + "issues/1461")
def test_n23_negative_scale_square_causal(draw: Draw) -> Call:
    """Masking with -inf before a negative scale would give +inf."""
    return Call(*draw.dense(2, (33, 33), (2, 2), 32, spread=2.0), {"scale": -0.5, "causal": True})


@regression(FLASH + "issues/1046", atol_grad=5e-2)
def test_n09_one_hot_rows(fixed_draw: Draw) -> Call:
    """Scores spread over +-1e4; probabilities made again from a float32 lse of 2e4 are good to about 5e-3."""
    return Call(*fixed_draw.dense(1, (65, 129), (1, 1), 32, dtype=torch.float32, spread=60.0))


@regression(FLASH + "issues/2322")
def test_n11_tied_maxima(fixed_draw: Draw) -> Call:
    """Repeated keys: many scores are exactly the maximum."""
    query, key, value = fixed_draw.dense(1, (64, 16), (2, 2), 64, dtype=torch.bfloat16)
    key = key.repeat(1, 8, 1, 1)
    value = (value.repeat(1, 8, 1, 1).abs() * -1).contiguous()
    return Call(query * 4, key, value)


@regression(FLASH + "pull/2402")
def test_n13_softcap(draw: Draw) -> Call:
    """Scores near +-40 under a cap of 15: softcap * tanh(s / softcap), forward and backward."""
    return Call(*draw.dense(2, (65, 97), (4, 2), 64, spread=2.5), {"softcap": 15.0, "causal": True})


@regression(FLASH + "issues/2466", atol_grad=1e-3)
def test_n15_saturated_softcap(fixed_draw: Draw) -> Call:
    """Scores near 1e3 under a cap of 1: gradients vanish without NaN."""
    inputs = fixed_draw.dense(1, (33, 70), (1, 1), 32, dtype=torch.float32, spread=20.0)
    return Call(*inputs, {"softcap": 1.0, "scale": 1.0})


@regression(FLASH + "pull/1025")
def test_n16_mask_after_softcap(draw: Draw) -> Call:
    """A cap of 5 must not bring a masked key back."""
    return Call(*draw.dense(1, (40, 72), (2, 2), 32), {"softcap": 5.0, "causal": True, "window": (9, 0)})


@regression(TRITON + "issues/1821")
def test_n18_float32_stays_float32(fixed_draw: Draw) -> Call:
    """No TF32 or bfloat16 inside: the error is near 1e-6, not 1e-3."""
    return Call(*fixed_draw.dense(1, (128, 128), (1, 1), 32, dtype=torch.float32), {"causal": True})


@regression(PYTORCH + "issues/153799", atol_grad=2e-2)
def test_n19_bias_that_grows_with_distance(fixed_draw: Draw) -> Call:
    """257 causal tokens in bfloat16: finite gradients."""
    query, key, value = fixed_draw.dense(1, (257, 257), (1, 1), 64, dtype=torch.bfloat16)
    distance = (torch.arange(257)[:, None] - torch.arange(257)[None, :]).to(torch.bfloat16)
    return Call(query, key, value, {"causal": True, "bias": distance.to(fixed_draw.device)[None, None]})


def test_n22_invisible_nan_stays_invisible(draw: Draw, backend: str) -> None:
    """NaN in keys and values that a row does not see does not reach that row.

    Source: https://github.com/pytorch/pytorch/issues/101967
    """
    query, key, value = draw.dense(1, (40, 40), (2, 2), 16)
    wanted = reference.attention(query, key, value, causal=True).out
    key[:, 30:], value[:, 30:] = float("nan"), float("nan")
    got = tilestream.attention(query, key, value, causal=True, backend=backend)
    assert_near("rows before the NaN keys", got[:, :30], wanted[:, :30], draw.dtype)
