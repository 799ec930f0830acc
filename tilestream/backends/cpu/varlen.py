"""Dense calls as they are, packed sequences as batches of equal lengths: one gather per distinct pair of lengths.

Shapes: T packed tokens; L sequences of one pair of lengths; M, N their query and key lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.backends.cpu import backward as dense_backward
from tilestream.backends.cpu import block_backward
from tilestream.backends.cpu import forward as dense_forward
from tilestream.backends.cpu.double_backward import Cotangents
from tilestream.backends.cpu.double_backward import double_backward as dense_double_backward
from tilestream.backends.cpu.layout import DenseCall, compute_dtype
from tilestream.block_mask.checks import reach
from tilestream.problem import AttentionInputs, DoubleGradients, Gradients, Problem, crop_bias
from tilestream.state import AttentionOutput

__all__ = ["backward", "double_backward", "forward"]


def forward(problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
    """`Backend.forward` for both layouts."""
    if not inputs.is_varlen:
        return dense_forward.forward(_dense_call(problem, inputs))
    query, value = inputs.query, inputs.value
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
    lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=compute_dtype(query.dtype))
    for sequences in _batches(problem, inputs):
        part = dense_forward.forward(sequences.call)
        out[sequences.rows] = part.out
        lse[:, sequences.rows] = part.lse.transpose(0, 1)
    return AttentionOutput(out, lse)


def backward(
    problem: Problem,
    inputs: AttentionInputs,
    output: AttentionOutput,
    dout: Tensor,
    dlse: Tensor | None,
    needs_dbias: bool,
    needs_dsinks: bool,
) -> Gradients:
    """`Backend.backward` for both layouts."""
    if inputs.is_varlen:
        part = _packed_backward(problem, inputs, output, dout, dlse, needs_dbias, needs_dsinks)
    else:
        part = _walk(problem)(_dense_call(problem, inputs), output, dout, dlse, needs_dbias, needs_dsinks)
    return part._replace(
        dbias=None if part.dbias is None or inputs.bias is None else part.dbias.to(inputs.bias.dtype),
        dsinks=None if part.dsinks is None or inputs.sinks is None else part.dsinks.to(inputs.sinks.dtype),
    )


def _walk(problem: Problem) -> Callable[..., Gradients]:
    """The backward of one dense call: row tiles outside, or with a block mask key tiles."""
    return dense_backward.backward if problem.block_mask is None else block_backward.backward


def _packed_backward(
    problem: Problem,
    inputs: AttentionInputs,
    output: AttentionOutput,
    dout: Tensor,
    dlse: Tensor | None,
    needs_dbias: bool,
    needs_dsinks: bool,
) -> Gradients:
    dtype = compute_dtype(inputs.query.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:3])
    dbias = torch.zeros_like(inputs.bias, dtype=dtype) if needs_dbias and inputs.bias is not None else None
    dsinks = torch.zeros_like(inputs.sinks, dtype=dtype) if needs_dsinks and inputs.sinks is not None else None
    for sequences in _batches(problem, inputs):
        rows, keys = sequences.rows, sequences.keys
        part = _walk(problem)(
            sequences.call,
            AttentionOutput(output.out[rows], output.lse[:, rows].transpose(0, 1)),
            dout[rows],
            None if dlse is None else dlse[:, rows].transpose(0, 1),
            needs_dbias,
            needs_dsinks,
        )
        dq[rows], dk[keys], dv[keys] = part.dq, part.dk, part.dv
        if dbias is not None and part.dbias is not None:
            sequences.add_to_bias(dbias, part.dbias)
        if dsinks is not None and part.dsinks is not None:
            dsinks += part.dsinks
    return Gradients(dq, dk, dv, dbias, dsinks)


def double_backward(
    problem: Problem, inputs: AttentionInputs, dout: Tensor, dlse: Tensor, cotangents: Cotangents
) -> DoubleGradients:
    """The derivative of `backward`, in the dtypes of the tensors that the gradients belong to."""
    operands = (dout, dlse, *inputs[:4], inputs.sinks)
    if inputs.is_varlen:
        dtype = compute_dtype(inputs.query.dtype)
        totals = DoubleGradients(
            *(None if x is None else torch.zeros(x.shape, dtype=dtype, device=x.device) for x in operands)  # type: ignore[arg-type]
        )
        for sequences in _batches(problem, inputs):
            _add_double_gradients(sequences, dout, dlse, cotangents, totals)
    else:
        totals = dense_double_backward(_dense_call(problem, inputs), dout, dlse, cotangents)
    return DoubleGradients(
        *(None if x is None or total is None else total.to(x.dtype) for total, x in zip(totals, operands, strict=True))  # type: ignore[arg-type]
    )


def _add_double_gradients(
    sequences: _Batch, dout: Tensor, dlse: Tensor, cotangents: Cotangents, totals: DoubleGradients
) -> None:
    rows, keys = sequences.rows, sequences.keys

    def at(x: Tensor | None, index: Tensor) -> Tensor | None:
        return None if x is None else x[index]

    part = dense_double_backward(
        sequences.call,
        dout[rows],
        dlse[:, rows].transpose(0, 1),
        Cotangents(
            at(cotangents.dq, rows),
            at(cotangents.dk, keys),
            at(cotangents.dv, keys),
            None if cotangents.dbias is None else sequences.crop(cotangents.dbias),
            cotangents.dsinks,
        ),
    )
    totals.dout[rows], totals.query[rows], totals.dlse[:, rows] = part.dout, part.query, part.dlse.transpose(0, 1)
    totals.key[keys], totals.value[keys] = part.key, part.value
    if totals.bias is not None and part.bias is not None:
        sequences.add_to_bias(totals.bias, part.bias)
    if totals.sinks is not None and part.sinks is not None:
        totals.sinks.add_(part.sinks)


@dataclass(frozen=True)
class _Batch:
    """Sequences of one pair of lengths as a dense call, and the packed positions of their tokens."""

    call: DenseCall
    rows: Tensor  # (L, M) int64
    keys: Tensor  # (L, N) int64

    def crop(self, bias: Tensor) -> Tensor:
        """The part (L | 1, heads | 1, M | 1, N | 1) of a packed call's bias that these sequences read."""
        return crop_bias(bias, self.call.batch_index, self.rows.shape[1], self.keys.shape[1])

    def add_to_bias(self, total: Tensor, part: Tensor) -> None:
        """Add these sequences' bias gradients to the packed call's, in place."""
        entries = self.call.batch_index if total.shape[0] > 1 else slice(None)
        total[entries, :, : part.shape[2], : part.shape[3]] += part


def _dense_call(problem: Problem, inputs: AttentionInputs) -> DenseCall:
    assert problem.shift is not None
    batch_index = torch.arange(problem.batch, device=inputs.query.device)
    return DenseCall(problem, problem.shift, *inputs[:7], batch_index)


def _batches(problem: Problem, inputs: AttentionInputs) -> Iterator[_Batch]:
    """Every sequence with queries or keys, grouped by its pair of lengths. Reads cu_seqlens on the host."""
    assert inputs.cu_seqlens_q is not None
    assert inputs.cu_seqlens_k is not None
    device = inputs.query.device
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for b in range(problem.batch):
        lengths = (starts_q[b + 1] - starts_q[b], starts_k[b + 1] - starts_k[b])
        groups.setdefault(lengths, []).append(b)
    for (seqlen_q, seqlen_k), members in groups.items():
        if problem.block_mask is not None:
            reach((problem.block_mask.seqlen_q, problem.block_mask.seqlen_k), (seqlen_q, seqlen_k))
        if seqlen_q == 0:
            continue  # no output rows, and dk and dv stay zero
        rows, keys = (
            torch.tensor([starts[b] for b in members], device=device)[:, None] + torch.arange(length, device=device)
            for starts, length in ((starts_q, seqlen_q), (starts_k, seqlen_k))
        )
        batch_index = torch.tensor(members, device=device)
        slopes = inputs.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[batch_index]
        call = DenseCall(
            problem,
            seqlen_k - seqlen_q,
            _take(inputs.query, rows, starts_q[members[0]]),
            _take(inputs.key, keys, starts_k[members[0]]),
            _take(inputs.value, keys, starts_k[members[0]]),
            None if inputs.bias is None else crop_bias(inputs.bias, batch_index, seqlen_q, seqlen_k),
            slopes,
            inputs.sinks,
            inputs.seed,
            batch_index,
        )
        yield _Batch(call, rows, keys)


def _take(x: Tensor, index: Tensor, start: int) -> Tensor:
    """Packed (T, heads, width) as (L, length, heads, width); a lone sequence is a view."""
    return x[None, start : start + index.shape[1]] if index.shape[0] == 1 else x[index]
