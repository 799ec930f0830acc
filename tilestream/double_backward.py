"""The derivative of the backward, by recomputing a few query rows at a time and differentiating twice.

The materialised rows of the oracle are exact and twice differentiable, and a block of rows against all keys is
O(seqlen_k) memory however long the queries are. Second derivatives are rare, so nothing here is tuned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream import reference
from tilestream.problem import AttentionInputs, Problem
from tilestream.tiles import key_span

__all__ = ["DoubleGradients", "double_backward"]

# Scores held at once; a row block never holds fewer than one row of all heads.
_BLOCK_ELEMENTS = 1 << 20


class DoubleGradients(NamedTuple):
    """Gradients with respect to the backward's inputs, shaped as those; of all of them, asked for or not."""

    dout: Tensor
    dlse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True)
class _Block:
    """Query rows of one sequence and the keys they see: indices into every tensor of the call."""

    sequence: int
    first_row: int
    first_key: int
    shift: int
    query: tuple[slice, ...]
    key: tuple[slice, ...]
    lse: tuple[slice, ...]
    bias: tuple[slice, ...] | None


def double_backward(
    problem: Problem, inputs: AttentionInputs, dout: Tensor, dlse: Tensor, cotangents: tuple[Tensor | None, ...]
) -> DoubleGradients:
    """Pull `cotangents` of (dq, dk, dv, dbias, dsinks), each shaped as its input or None, back through the backward.

    Returns:
        DoubleGradients, in the dtypes of the tensors they belong to.

    Cost: about 4 forwards and 2 backwards of materialised attention; O(seqlen_k) memory beside the gradients.
    """
    dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    operands = (dout, dlse, *inputs[:4], inputs.sinks)
    totals = [None if x is None else torch.zeros(x.shape, dtype=dtype, device=x.device) for x in operands]
    for block in _blocks(problem, inputs):
        cuts = (block.query, block.lse, block.query, block.key, block.key, block.bias, (slice(None),))
        leaves = [
            None if x is None or cut is None else x[cut].detach().to(dtype).requires_grad_()
            for x, cut in zip(operands, cuts, strict=True)
        ]
        pulled = [
            None if x is None or cut is None else x[cut].to(dtype) for x, cut in zip(cotangents, cuts[2:], strict=True)
        ]
        for total, cut, gradient in zip(totals, cuts, _block_gradients(problem, inputs, block, leaves, pulled), strict=True):
            if total is not None and cut is not None and gradient is not None:
                total[cut] += gradient
    cast = [None if total is None or x is None else total.to(x.dtype) for total, x in zip(totals, operands, strict=True)]
    return DoubleGradients(*cast)  # type: ignore[arg-type]


def _block_gradients(
    problem: Problem,
    inputs: AttentionInputs,
    block: _Block,
    leaves: list[Tensor | None],
    pulled: list[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of <first gradients of the block, pulled> with respect to every leaf."""
    dout, dlse, query, key, value, bias, sinks = leaves
    assert dout is not None and dlse is not None and query is not None and key is not None and value is not None
    slopes = inputs.alibi_slopes
    if inputs.is_varlen:
        # One packed sequence becomes a batch of one.
        dout, dlse, query, key, value = dout[None], dlse[None], query[None], key[None], value[None]
        slopes = slopes[block.sequence] if slopes is not None and slopes.dim() == 2 else slopes
    with torch.enable_grad():
        output = reference.attention_rows(
            query,
            key,
            value,
            problem.spec,
            shift=block.shift,
            bias=bias,
            alibi_slopes=slopes,
            sinks=sinks,
            seed=inputs.seed,
            first_row=block.first_row,
            first_key=block.first_key,
            batch_index=torch.tensor([block.sequence], device=query.device) if inputs.is_varlen else None,
            dtype=query.dtype,
        )
        wanted = [(x, cotangent) for x, cotangent in zip(leaves[2:], pulled, strict=True) if x is not None and cotangent is not None]
        # lse is -inf in rows without keys; its gradient there is 0, not 0 * inf.
        first = torch.autograd.grad(
            (output.out, output.lse),
            [x for x, _ in wanted],
            (dout, dlse),
            create_graph=True,
            allow_unused=True,
        )
        pairs = [(x, y) for x, (_, y) in zip(first, wanted, strict=True) if x is not None and x.requires_grad]
        present = [leaf for leaf in leaves if leaf is not None]
        if not pairs:
            return [None] * len(leaves)
        second = iter(
            torch.autograd.grad([x for x, _ in pairs], present, [y for _, y in pairs], allow_unused=True)
        )
    return [None if leaf is None else next(second) for leaf in leaves]


def _blocks(problem: Problem, inputs: AttentionInputs) -> Iterator[_Block]:
    """Blocks of query rows, sequence by sequence (the whole batch at once for a dense call)."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        spans = [(0, 0, problem.seqlen_q, 0, problem.seqlen_k)]
        num_entries = problem.batch
    else:
        starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
        spans = [
            (b, starts_q[b], starts_q[b + 1], starts_k[b], starts_k[b + 1]) for b in range(problem.batch)
        ]
        num_entries = 1
    everything = slice(None)
    for b, start_q, stop_q, start_k, stop_k in spans:
        seqlen_q, seqlen_k = stop_q - start_q, stop_k - start_k
        shift = seqlen_k - seqlen_q if problem.shift is None else problem.shift
        block_m = max(1, _BLOCK_ELEMENTS // max(1, num_entries * problem.num_heads_q * seqlen_k))
        for m_start in range(0, seqlen_q, block_m):
            m_end = min(m_start + block_m, seqlen_q)
            n_start, n_end = key_span(problem.spec.band, shift, m_start, m_end, seqlen_k)
            rows = slice(start_q + m_start, start_q + m_end)
            keys = slice(start_k + n_start, start_k + n_end)
            is_packed = inputs.is_varlen
            yield _Block(
                sequence=b,
                first_row=m_start,
                first_key=n_start,
                shift=shift,
                query=(rows,) if is_packed else (everything, rows),
                key=(keys,) if is_packed else (everything, keys),
                lse=(everything, rows) if is_packed else (everything, everything, rows),
                bias=_bias_cut(inputs, b, slice(m_start, m_end), slice(n_start, n_end)),
            )


def _bias_cut(inputs: AttentionInputs, sequence: int, rows: slice, keys: slice) -> tuple[slice, ...] | None:
    """Where a block lies in the bias; broadcast dimensions are taken whole."""
    if inputs.bias is None:
        return None
    entry = slice(sequence, sequence + 1) if inputs.is_varlen else slice(None)
    wanted = (entry, slice(None), rows, keys)
    return tuple(slice(None) if size == 1 else cut for size, cut in zip(inputs.bias.shape, wanted, strict=True))
