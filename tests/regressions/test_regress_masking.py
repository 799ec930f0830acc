"""Regressions: rows that see no key, masks as bias, and empty inputs."""

from __future__ import annotations

import pytest
import torch
from regression import FLASH, FLASHINFER, INF, PYTORCH, Call, Draw, regression


@regression(FLASH + "issues/443", atol_grad=2e-2)
def test_m01_packed_causal_with_more_queries_than_keys(fixed_draw: Draw) -> Call:
    """Rows without keys must not give NaN in dq."""
    call = fixed_draw.packed([76, 34, 146], [1, 1, 1], (1, 1), 32, dtype=torch.float16, spread=3.0)
    call.value = call.value * 3
    call.options = {"causal": True}
    call.dout = torch.ones_like(call.query)
    return call


@regression(FLASH + "issues/1778")
def test_m02_causal_with_more_queries_than_keys(draw: Draw) -> Call:
    """The first seqlen_q - seqlen_k rows are empty: 0 and -inf."""
    return Call(*draw.dense(1, (5, 2), (2, 2), 16), {"causal": True})


@regression(PYTORCH + "issues/127055")
def test_m04_band_as_bias(draw: Draw) -> Call:
    """Over 600 tokens the leading key tiles of late rows are wholly masked by -inf in the bias."""
    i, j = torch.arange(600)[:, None], torch.arange(600)[None, :]
    bias = torch.zeros(1, 1, 600, 600).masked_fill((j > i) | (j <= i - 10), -INF).to(draw.dtype).to(draw.device)
    return Call(*draw.dense(1, (600, 600), (1, 1), 8), {"bias": bias})


@regression(PYTORCH + "issues/110213", check_lse=False)
def test_m05_bias_row_of_the_smallest_float(fixed_draw: Draw) -> Call:
    """A row of finfo.min is the plain mean of the values: folding log2(e) in must not overflow."""
    query, key, value = fixed_draw.dense(1, (3, 3), (1, 1), 16, dtype=torch.float32)
    bias = fixed_draw.zeros(1, 1, 3, 3)
    bias[..., 0, :] = torch.finfo(torch.float32).min
    dout = fixed_draw.randn(1, 3, 1, 16, dtype=torch.float32)
    dout[:, 0] = 0  # as for a padded row; M19 asks for its gradients too
    return Call(query, key, value, {"bias": bias}, dout=dout)


@regression(PYTORCH + "issues/41508")
def test_m07_one_batch_entry_has_masked_rows(draw: Draw) -> Call:
    """Wholly masked rows are zero, and nothing else in the batch is poisoned."""
    bias = torch.zeros(2, 1, 8, 8)
    bias[0, :, 3:, :] = -INF
    bias[0, :, :3, 5:] = -INF
    return Call(*draw.dense(2, (8, 8), (2, 2), 16), {"bias": bias.to(draw.dtype).to(draw.device)})


@regression(FLASH + "issues/1713")
def test_m08_packed_sequence_without_keys(draw: Draw) -> Call:
    """A sequence with queries but no keys gives zeros and -inf."""
    return draw.packed([4, 5, 3], [5, 0, 6], (2, 2), 32)


@regression(FLASH + "pull/2776")
def test_m10_no_keys(draw: Draw) -> Call:
    """With seqlen_k = 0 the output is 0, lse -inf and dq 0."""
    return Call(*draw.dense(2, (5, 0), (2, 2), 32))


@regression(FLASH + "pull/2776")
def test_m11_no_queries(draw: Draw) -> Call:
    """With seqlen_q = 0 dk and dv are zeros of full shape."""
    return Call(*draw.dense(2, (0, 5), (4, 2), 32), {"causal": True})


@regression(PYTORCH + "issues/141219")
def test_m12_no_batch(draw: Draw) -> Call:
    """Dispatch and grid arithmetic must not divide by a batch of 0."""
    return Call(*draw.dense(0, (7, 7), (2, 2), 32), {"causal": True})


@regression(FLASH + "issues/2199")
def test_m13_window_leaves_rows_without_keys(draw: Draw) -> Call:
    """A two-sided window with seqlen_q > seqlen_k leaves the first rows without keys."""
    return Call(*draw.dense(1, (129, 33), (2, 1), 32), {"window": (32, 64)})


@regression("https://github.com/tracel-ai/burn/issues/4694")
def test_m14_left_padding_and_causal(draw: Draw) -> Call:
    """Left padding by bias plus causal takes every key from the early rows."""
    bias = torch.zeros(2, 1, 1, 6)
    bias[0, ..., :3] = -INF
    options = {"causal": True, "bias": bias.to(draw.dtype).to(draw.device)}
    return Call(*draw.dense(2, (6, 6), (2, 2), 16), options)


@regression("https://github.com/ohdearquant/lattice/issues/361")
def test_m16_very_negative_score_beside_a_masked_key(fixed_draw: Draw) -> Call:
    """A finite mask value would win against a valid score of -20000."""
    query, key = fixed_draw.zeros(1, 2, 1, 8), fixed_draw.zeros(1, 2, 1, 8)
    query[0, 0, 0, 0], key[0, 0, 0, 0] = -20000.0, 1.0
    value = torch.stack([torch.full((1, 8), 1.0), torch.full((1, 8), 100.0)])[None].to(fixed_draw.device)
    bias = torch.tensor([0.0, -INF], device=fixed_draw.device).reshape(1, 1, 1, 2)
    return Call(query, key, value, {"bias": bias, "scale": 1.0}, grads=())


@regression(FLASHINFER + "issues/4267")
def test_m17_all_scores_very_negative(fixed_draw: Draw) -> Call:
    """Valid scores below -5e4 still give a softmax, not zeros."""
    like = {"dtype": torch.bfloat16, "device": fixed_draw.device}
    query = torch.ones(1, 1, 16, 128, **like)
    key = torch.full((1, 64, 1, 128), -2.0e5 / 128, **like)
    key[:, 5] = (-2.0e5 + 5000) / 128
    return Call(query, key, fixed_draw.randn(1, 64, 1, 128, dtype=torch.bfloat16), grads=())


@pytest.mark.xfail(strict=False, reason="a float32 lse beyond 2**24 cannot hold the logarithm of the row sum")
@regression(PYTORCH + "issues/109517", check_lse=False)
def test_m19_gradients_of_a_row_of_the_smallest_float(fixed_draw: Draw) -> Call:
    """exp(s - lse) gives 1 instead of 1/n where the row sum is lost in lse = max + log(sum)."""
    query, key, value = fixed_draw.dense(1, (3, 3), (1, 1), 16, dtype=torch.float32)
    bias = fixed_draw.zeros(1, 1, 3, 3)
    bias[..., 0, :] = torch.finfo(torch.float32).min
    return Call(query, key, value, {"bias": bias})


@regression(FLASH + "issues/2082")
def test_m20_leading_tiles_masked_and_low_scores(draw: Draw) -> Call:
    """130 padded keys by bias, and every real score near -200."""
    query, key, value = draw.dense(2, (40, 300), (2, 1), 64, spread=0.1)
    query[..., 0] = 1.0
    key[..., 0] = -1600.0
    bias = torch.zeros(2, 1, 1, 300)
    bias[0, ..., :130] = -INF
    return Call(query, key, value, {"bias": bias.to(draw.dtype).to(draw.device)})
