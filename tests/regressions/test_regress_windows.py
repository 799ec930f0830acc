"""Regressions: causal alignment and windows."""

from __future__ import annotations

import torch
from regression import FLASH, FLASHINFER, PYTORCH, TRANSFORMERS, Call, Draw, assert_near, regression

import tilestream
from tilestream import reference


@regression(PYTORCH + "issues/108108")
def test_w01_causal_aligns_the_ends(draw: Draw) -> Call:
    """With 2 queries and 5 keys the last query meets the last key."""
    return Call(*draw.dense(1, (2, 5), (2, 2), 16), {"causal": True})


@regression(FLASH + "issues/282")
def test_w02_chunked_prefill(draw: Draw) -> Call:
    """The last 70 queries of 200: the diagonal crosses a tile edge."""
    return Call(*draw.dense(1, (70, 200), (4, 2), 64), {"causal": True})


@regression("https://github.com/NVIDIA/cutlass/issues/2336")
def test_w03_few_queries(draw: Draw) -> Call:
    """Causal with 3 queries and 128 keys."""
    return Call(*draw.dense(1, (3, 128), (1, 1), 128), {"causal": True})


@regression(TRANSFORMERS + "issues/39408")
def test_w04_window_counts_the_query_itself(draw: Draw) -> Call:
    """A window (w - 1, 0) sees exactly w keys; the values are the identity."""
    query, key, _ = draw.dense(1, (16, 16), (1, 1), 16)
    value = torch.eye(16, dtype=draw.dtype, device=draw.device).reshape(1, 16, 1, 16).contiguous()
    return Call(query, key, value, {"causal": True, "window": (3, 0)})


def test_w05_wide_windows_equal_causal(draw: Draw, backend: str) -> None:
    """Windows of the sequence's length, unlimited or huge, all equal plain causal.

    Source: https://github.com/Dao-AILab/flash-attention/issues/1133
    """
    query, key, value = draw.dense(1, (150, 150), (2, 2), 32)
    wanted = reference.attention(query, key, value, causal=True).out
    for left in (149, 150, None, 10**6, 2**31 - 1):
        for causal in (False, True):
            got = tilestream.attention(query, key, value, causal=causal, window=(left, 0), backend=backend)
            assert_near(f"window ({left}, 0), causal {causal}", got, wanted, draw.dtype)


@regression(FLASHINFER + "issues/4893")
def test_w07_two_sided_window(draw: Draw) -> Call:
    """Without causal the right limit must not be ignored."""
    return Call(*draw.dense(2, (97, 97), (4, 2), 32), {"window": (5, 3)})


@regression("https://github.com/ROCm/flash-attention/issues/158")
def test_w08_decode_with_window(draw: Draw) -> Call:
    """One query sees the last keys, not the first."""
    return Call(*draw.dense(2, (1, 256), (8, 2), 64), {"causal": True, "window": (127, 0)})


@regression("https://github.com/onnx/onnx/pull/8006", atol_grad=1e-4)
def test_w10_window_of_the_diagonal(fixed_draw: Draw) -> Call:
    """(0, 0) is the diagonal alone; 0 does not mean unlimited."""
    return Call(*fixed_draw.dense(1, (70, 70), (2, 2), 32, dtype=torch.float32), {"window": (0, 0)})


@regression(FLASH + "issues/2424")
def test_w12_window_causal_softcap_and_bias(draw: Draw) -> Call:
    """Forward and backward agree on the mask when all four meet."""
    query, key, value = draw.dense(2, (75, 110), (4, 2), 32)
    options = {"causal": True, "window": (40, 0), "softcap": 8.0, "bias": draw.randn(1, 4, 75, 110)}
    return Call(query, key, value, options, grads=("query", "key", "value", "bias"))


@regression("https://github.com/NVIDIA/TransformerEngine/issues/629")
def test_w13_cross_attention(draw: Draw) -> Call:
    """7 queries and 133 keys without causal must not pick up a causal mask."""
    return Call(*draw.dense(2, (7, 133), (2, 2), 32))


@regression("https://github.com/vllm-project/vllm/pull/30887")
def test_w14_nan_beside_the_window(draw: Draw) -> Call:
    """Invisible NaN keys inside the first visited tile: skipping tiles is not enough, values need the mask too."""
    query, key, value = draw.dense(1, (1, 512), (4, 1), 64)
    key[:, :464] = float("nan")
    value[:, :464] = float("nan")
    return Call(query, key, value, {"causal": True, "window": (41, 0)})
