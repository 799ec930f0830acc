"""The CPU kernels in C++, compiled at install: a library per instruction set, called through ctypes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilestream.backends.cpu import varlen
from tilestream.backends.cpu.native import library
from tilestream.backends.cpu.native.call import LARGEST_SHIFT, BackwardTensors, dtype_number, pack
from tilestream.backends.cpu.native.lists import lists_of, tiles_of
from tilestream.block_mask.checks import reach
from tilestream.io.schedule import TileShape
from tilestream.problem import AttentionInputs, Gradients, Problem, check_cu_seqlens_values
from tilestream.state import AttentionOutput, finite_or_zero, sink_gradient

__all__ = ["BACKEND", "NativeBackend"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What the library returns (src/call.h).
_OK, _NOT_FINITE, _NO_MEMORY = range(3)


class NativeBackend:
    """Every feature in float32, bfloat16 and float16 on the CPU.

    The kernels compute with finite numbers. A call in which they meet another one, read or made by an overflow, is
    computed again by the PyTorch loop, which sends NaN and infinities where the contract says.
    """

    name = "native"

    def supports(self, problem: Problem) -> str | None:
        """None, or why the call cannot run here."""
        if problem.device_type != "cpu":
            return f"it runs on the CPU, not on {problem.device_type}"
        if problem.dtype not in _DTYPES:
            return f"dtype {problem.dtype} is served by the PyTorch loop"
        if problem.shift is not None and abs(problem.shift) > LARGEST_SHIFT:
            return f"shift {problem.shift} is beyond 2**40"
        return library.reason()

    def tile_shape(self, problem: Problem) -> TileShape:
        """See `Backend.tile_shape`."""
        rows, block_n = _library().tile_shape(dtype_number(problem.dtype), problem.is_backward)
        if problem.block_mask is not None:
            tile, packed_heads = tiles_of(problem.block_mask, problem.group, rows)
            return TileShape(*tile, packs_group=packed_heads == problem.group, sums_in_memory=True)
        return TileShape(max(1, rows // problem.group), block_n, sums_in_memory=True)

    def forward(self, problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
        """See `Backend.forward`."""
        _check_offsets(problem, inputs)
        ready = _readable(inputs)
        query, value = ready.query, ready.value
        shape, lse_shape = (*query.shape[:-1], value.shape[-1]), (*query.shape[:-3], query.shape[-2], query.shape[-3])
        if _covers_every_row(ready):
            out, lse = query.new_empty(shape), query.new_empty(lse_shape, dtype=torch.float32)
        else:
            out, lse = query.new_zeros(shape), query.new_full(lse_shape, float("-inf"), dtype=torch.float32)
        if _run(_library().forward, pack(problem, ready, out, lse, _lists_of(problem, is_backward=False))):
            return AttentionOutput(out, lse)
        return varlen.forward(problem, inputs)

    def prepare(self, problem: Problem, inputs: AttentionInputs) -> None:
        """See `Backend.prepare`: a call leaves nothing to remember."""

    def backward(
        self,
        problem: Problem,
        inputs: AttentionInputs,
        output: AttentionOutput,
        dout: Tensor,
        dlse: Tensor | None,
        needs_dbias: bool,
        needs_dsinks: bool,
    ) -> Gradients:
        """See `Backend.backward`."""
        _check_offsets(problem, inputs)
        ready = _readable(inputs)
        # The kernel writes nothing for tokens outside sequences, and no dk and dv of sequences without queries.
        writes_all = problem.layout == "dense" and problem.seqlen_q > 0
        dq, dk, dv = ((torch.empty if writes_all else torch.zeros)(x.shape, dtype=x.dtype) for x in inputs[:3])
        tensors = BackwardTensors(
            _rows_in_place(dout),
            None if dlse is None else dlse.float(),
            dq,
            dk,
            dv,
            _bias_sums(problem, ready.bias) if needs_dbias and ready.bias is not None else None,
            torch.zeros_like(output.lse, memory_format=torch.contiguous_format) if needs_dsinks else None,
        )
        out, lse = _rows_in_place(output.out), output.lse.contiguous()
        if not _run(_library().backward, pack(problem, ready, out, lse, _lists_of(problem, is_backward=True), tensors)):
            return varlen.backward(problem, inputs, output, dout, dlse, needs_dbias, needs_dsinks)
        dbias = dsinks = None
        if tensors.dbias is not None and inputs.bias is not None:
            dbias = tensors.dbias.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
        if tensors.delta is not None and inputs.sinks is not None and ready.sinks is not None:
            dsinks = sink_gradient(ready.sinks, finite_or_zero(lse), tensors.delta).to(inputs.sinks.dtype)
        return Gradients(dq, dk, dv, dbias, dsinks)


def _library() -> library.Library:
    found = library.library()
    assert found is not None  # `supports` was asked
    return found


def _lists_of(problem: Problem, is_backward: bool) -> Tensor | None:
    if problem.block_mask is None:
        return None
    return lists_of(problem, _library().tile_shape(dtype_number(problem.dtype), is_backward)[0])


def _run(function: Callable[[bytes], int], call: bytes) -> bool:
    """Whether the kernel has done it; not, where it met a number that is not finite.

    Raises:
        MemoryError: scratch memory could not be had.
    """
    status = function(call)
    if status == _NO_MEMORY:
        raise MemoryError("tilestream's CPU kernels could not allocate their scratch memory.")
    return status == _OK


def _check_offsets(problem: Problem, inputs: AttentionInputs) -> None:
    """Where the public functions could not read them (compiled calls), wrong offsets would be wrong addresses here."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return
    check_cu_seqlens_values(inputs, problem.seqlen_q, problem.seqlen_k)
    if problem.block_mask is not None:
        lengths = (problem.block_mask.seqlen_q, problem.block_mask.seqlen_k)
        for pair in zip(inputs.cu_seqlens_q.diff().tolist(), inputs.cu_seqlens_k.diff().tolist(), strict=True):
            reach(lengths, pair)


def _rows_in_place(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _readable(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs as the kernels read them: contiguous last dimensions, slopes and sinks in float32, int32 offsets."""
    query, key, value, bias, alibi, sinks, seed, cu_seqlens_q, cu_seqlens_k = inputs
    is_in_place = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    if is_in_place and alibi is None and sinks is None and cu_seqlens_q is None:
        return inputs
    return AttentionInputs(
        _rows_in_place(query),
        _rows_in_place(key),
        _rows_in_place(value),
        bias,
        None if alibi is None else alibi.float(),
        None if sinks is None else sinks.float().contiguous(),
        seed,
        None if cu_seqlens_q is None else cu_seqlens_q.to(torch.int32).contiguous(),
        None if cu_seqlens_k is None else cu_seqlens_k.to(torch.int32).contiguous(),
    )


def _covers_every_row(inputs: AttentionInputs) -> bool:
    """Whether every token belongs to a sequence."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return True
    ends = int(inputs.cu_seqlens_q[-1]), int(inputs.cu_seqlens_k[-1])
    return ends == (inputs.query.shape[0], inputs.key.shape[0])


def _bias_sums(problem: Problem, bias: Tensor) -> Tensor:
    """Zeros that the kernel adds a bias's gradient to.

    Tasks that add to one entry must do so in a fixed order. They do for equal queries and keys of different heads and
    batch entries, and for equal heads and keys; other sums get entries of their own, which costs O(seqlen).
    """
    batch, heads, rows, keys = bias.shape
    # A packed call's bias may be wider than its longest sequence.
    if rows == keys == 1:
        keys = problem.seqlen_k
    if rows == 1 or keys == 1:
        batch, heads = problem.batch, problem.num_heads_q
    return torch.zeros(batch, heads, rows, keys, dtype=torch.float32)


BACKEND = NativeBackend()
