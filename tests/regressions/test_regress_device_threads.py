"""Regressions: devices, memory and threads."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from regression import Call, Draw, assert_near, oracle
from torch import Tensor

import tilestream
from tilestream import AttentionOutput

_NAMES = ("query", "key", "value")
_Wanted = tuple[AttentionOutput, dict[str, Tensor]]


def _check(inputs: tuple[Tensor, ...], dout: Tensor, wanted: _Wanted, backend: str) -> None:
    """Forward and backward of one causal call."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = tilestream.attention(*leaves, causal=True, backend=backend)
    assert_near("out", out.detach(), wanted[0].out, dout.dtype)
    for name, gradient in zip(_NAMES, torch.autograd.grad(out, leaves, dout), strict=True):
        assert_near(f"d{name}", gradient, wanted[1][name], dout.dtype)


@pytest.mark.gpu
def test_p01_tensors_on_another_gpu(fixed_draw: Draw, backend: str) -> None:
    """Tensors on cuda:1 while cuda:0 is current.

    Source: https://github.com/triton-lang/triton/issues/2441
    """
    if fixed_draw.device.type != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        draws = (fixed_draw.randn(2, 100, 4, 64, dtype=torch.bfloat16).to("cuda:1") for _ in range(4))
        query, key, value, dout = draws
        wanted = oracle(Call(query, key, value, {"causal": True}, dout=dout))
        _check((query, key, value), dout, wanted, backend)


@pytest.mark.gpu
def test_p04_no_memory_stays_behind(fixed_draw: Draw, backend: str) -> None:
    """Thirty calls of changing lengths leave no memory behind.

    Source: https://github.com/pytorch/pytorch/issues/165407
    """
    device = fixed_draw.device
    if device.type != "cuda":
        pytest.skip("needs a GPU")

    def once(seqlen: int) -> None:
        inputs = [fixed_draw.randn(1, seqlen, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        tilestream.attention(*inputs, causal=True, backend=backend).sum().backward()

    def allocated_bytes() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)

    for seqlen in (100, 131, 257):
        once(seqlen)
    before = allocated_bytes()
    for index in range(30):
        once(90 + 13 * index)
    assert allocated_bytes() - before <= 1 << 20


def test_p06_four_threads_at_once(draw: Draw, backend: str) -> None:
    """Four Python threads with different shapes, forward and backward.

    Source: https://github.com/Dao-AILab/flash-attention/issues/2281
    """
    jobs = []
    for seqlen_q, seqlen_k, heads in ((33, 90, 2), (64, 64, 4), (100, 120, 1), (5, 200, 8)):
        inputs = draw.dense(1, (seqlen_q, seqlen_k), (heads, heads), 32)
        dout = draw.randn(1, seqlen_q, heads, 32)
        jobs.append((inputs, dout, oracle(Call(*inputs, {"causal": True}, dout=dout)), backend))

    def work(job: tuple[tuple[Tensor, ...], Tensor, _Wanted, str]) -> None:
        for _ in range(5):
            _check(*job)

    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(work, jobs))


def test_p07_any_number_of_threads(draw: Draw, backend: str) -> None:
    """A CPU result does not depend on the thread count.

    Source: https://github.com/pytorch/pytorch/issues/156022
    """
    if draw.device.type != "cpu":
        pytest.skip("about CPU threads")
    inputs = draw.dense(3, (130, 210), (4, 2), 40)
    dout = draw.randn(3, 130, 4, 40)
    wanted = oracle(Call(*inputs, {"causal": True}, dout=dout))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, threads + 3):
            torch.set_num_threads(count)
            _check(inputs, dout, wanted, backend)
    finally:
        torch.set_num_threads(threads)
