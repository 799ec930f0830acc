"""Run by test_native_process.py in a process of its own, which a stray read or write ends.

Every tensor that the kernels read or write lies against an unmapped page: its last byte is the last before one,
or its first is the first after one. The results must have the bits of ordinary tensors.
triton_guard_worker.py does the same with other kernels.
Usage: python guard_worker.py ISA, or "astray" to go there on purpose.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import mmap
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tilestream.backends.base import Backend
from tilestream.backends.cpu import native
from tilestream.backends.cpu.native import library, lists
from tilestream.block_mask import BlockMask
from tilestream.block_mask.tiles import TileLists, tile_lists
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import AttentionSpec, Band
from tilestream.state import AttentionOutput

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTHS = ((1, 1), (7, 40), (40, 7), (64, 64), (72, 96), (96, 72))
_GAP = 5  # elements of NaN between the rows of a strided tensor
_keep: list[mmap.mmap] = []


def guarded(num_bytes: int, at_end: bool) -> int:
    """The address of fresh memory against an unmapped page, after it or before it."""
    page = mmap.PAGESIZE
    pages = max(1, -(-num_bytes // page))
    region = mmap.mmap(-1, (pages + 2) * page)
    _keep.append(region)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address in (start, start + (pages + 1) * page):
        assert protect(address, page, 0) == 0, ctypes.get_errno()
    return start + (pages + 1) * page - num_bytes if at_end else start + page


def allocate(shape: tuple[int, ...], dtype: torch.dtype, at_end: bool) -> Tensor:
    """A contiguous guarded tensor, full of NaN where it can be."""
    tensor = torch.tensor([], dtype=dtype)
    size = int(torch.Size(shape).numel())
    if size == 0:
        return tensor.reshape(shape)
    num_bytes = size * tensor.element_size()
    memory = (ctypes.c_char * num_bytes).from_address(guarded(num_bytes, at_end))
    tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape)
    return tensor.fill_(float("nan")) if dtype.is_floating_point else tensor


def guard(x: Tensor | None, at_end: bool, strided: bool = False) -> Tensor | None:
    """A copy of `x` in guarded memory; its rows have gaps of NaN where it is strided."""
    if x is None:
        return None
    if not strided:
        return allocate(tuple(x.shape), x.dtype, at_end).copy_(x)
    width = x.shape[-1] + _GAP
    num_rows = x[..., 0].numel()
    flat = allocate(((num_rows - 1) * width + x.shape[-1],), x.dtype, at_end)
    strides = [width]
    for size in reversed(x.shape[1:-1]):
        strides.insert(0, strides[0] * size)
    return flat.as_strided(x.shape, (*strides, 1)).copy_(x)


@contextlib.contextmanager
def results_guarded(at_end: bool) -> Iterator[None]:
    """The backend's results lie in guarded memory inside."""

    def empty(*size: Any, dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
        return allocate(tuple(size[0]) if isinstance(size[0], tuple) else size, dtype, at_end)

    def zeros(*size: Any, **options: Any) -> Tensor:
        return empty(*size, **options).zero_()

    of_torch = {"empty": empty, "zeros": zeros, "zeros_like": lambda x, **_: zeros(tuple(x.shape), dtype=x.dtype)}
    of_tensors = {
        "new_empty": lambda x, *size, dtype=None, device=None: empty(*size, dtype=dtype or x.dtype),
        "new_zeros": lambda x, size, dtype=None: zeros(tuple(size), dtype=dtype or x.dtype),
        "new_full": lambda x, size, value, dtype=None: empty(tuple(size), dtype=dtype or x.dtype).fill_(value),
    }
    with mock.patch.multiple(torch, **of_torch), mock.patch.multiple(Tensor, **of_tensors):
        yield


def problems(dtype: torch.dtype, widths: tuple[int, int]) -> Iterator[tuple[Problem, AttentionInputs]]:
    """A plain call, and one with every feature; dense and packed."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for is_varlen, is_rich in itertools.product((False, True), repeat=2):
        lead_q, lead_k = ((71,), (90,)) if is_varlen else ((2, 37), (2, 53))
        starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 37, 37, 71], [0, 53, 60, 90])] if is_varlen else []
        inputs = AttentionInputs(
            randn(*lead_q, 6, widths[0]),
            randn(*lead_k, 2, widths[0]),
            randn(*lead_k, 2, widths[1]),
            randn(1, 6, 37, 53) if is_rich else None,
            torch.rand(6, generator=generator) if is_rich else None,
            randn(6, dtype=torch.float32) if is_rich else None,
            torch.tensor([5]) if is_rich else None,
            *starts,
        )
        spec = AttentionSpec(
            band=Band(20, 0) if is_rich else Band(None, None),
            scale=0.2,
            softcap=9.0 if is_rich else 0.0,
            dropout_p=0.2 if is_rich else 0.0,
            has_bias=is_rich,
            has_alibi=is_rich,
            has_sinks=is_rich,
        )
        yield Problem.from_inputs(inputs, spec, shift=None if is_varlen else 16), inputs


def masked(problem: Problem) -> Problem:
    """The call with bits for pairs: one plane for all, or where it has every feature one for each query head."""
    generator = torch.Generator().manual_seed(9)
    shown = torch.rand(1, 6 if problem.spec.has_bias else 1, 37, 53, generator=generator) < 0.6
    shown[:, :, :, 32:40] = True
    shown[:, :, 20:] = shown[:, :, 20:, :1]
    return dataclasses.replace(problem, block_mask=BlockMask.from_dense(shown, block_size=(8, 12)))


@contextlib.contextmanager
def lists_guarded(at_end: bool) -> Iterator[None]:
    """The lists of block masks lie in guarded memory inside."""
    kept = []

    def guarded_lists(*arguments: Any, **options: Any) -> TileLists:
        found = tile_lists(*arguments, **options)
        tensors = {name: x for name, x in vars(found).items() if isinstance(x, Tensor)}
        kept.append(dataclasses.replace(found, **{name: guard(x, at_end) for name, x in tensors.items()}))
        return kept[-1]

    with mock.patch.object(lists, "tile_lists", guarded_lists):
        yield


def run(
    problem: Problem,
    inputs: AttentionInputs,
    copy: Callable[..., Tensor | None],
    backend: Backend = native.BACKEND,
) -> list[Tensor]:
    """Everything that forward and backward return; `copy` places the tensors that they read."""
    rows = [copy(x, strided=True) for x in inputs[:3]]
    inputs = AttentionInputs(*rows, *(copy(x) for x in inputs[3:6]), inputs.seed, *(copy(x) for x in inputs[7:]))
    out, lse = backend.forward(problem, inputs)
    generator = torch.Generator().manual_seed(8)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator)
    output = AttentionOutput(copy(out, strided=True), copy(lse))
    has_bias, has_sinks = inputs.bias is not None, inputs.sinks is not None
    gradients = backend.backward(problem, inputs, output, copy(dout, strided=True), copy(dlse), has_bias, has_sinks)
    return [x for x in (out, lse, *gradients) if x is not None]


def main(isa: str) -> None:
    """Raises, or dies, at the first call that goes astray."""
    with library.use(isa), mock.patch.object(native, "varlen", None):
        for dtype, widths in itertools.product(_DTYPES, _WIDTHS):
            plain = list(problems(dtype, widths))
            for problem, inputs in plain + [(masked(problem), inputs) for problem, inputs in plain]:
                wanted = run(problem, inputs, lambda x, strided=False: x)
                for at_end, gaps in itertools.product((True, False), repeat=2):
                    what = f"{isa} {dtype} {widths} {problem.layout} bias={inputs.bias is not None} at_end={at_end}"
                    what += f" {problem.block_mask}"
                    # Flushed, so that the last words of a process that dies say what it was doing.
                    print(what, flush=True)
                    with lists_guarded(at_end), results_guarded(at_end):
                        got = run(problem, inputs, lambda x, strided=False: guard(x, at_end, strided and gaps))  # noqa: B023
                    for one, other in zip(got, wanted, strict=True):
                        assert torch.isfinite(other).logical_or(other == -float("inf")).all(), what
                        assert torch.equal(one, other), what


if __name__ == "__main__":
    if sys.argv[1] == "astray":
        ctypes.string_at(guarded(16, at_end=True), 17)
    main(sys.argv[1])
    print("all in bounds")
