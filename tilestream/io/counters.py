"""A real call, replayed over an explicit two-level memory: what crosses is counted, and the result is computed from it.

The cost that is counted and the one that is modelled are the same objects, equal pass by pass and tensor by tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.errors import ArgumentError, UnsupportedError
from tilestream.io.cost import Cost
from tilestream.io.memory import TwoLevelMemory
from tilestream.io.published import BlockMatrix, PublishedBlocks, published_cost
from tilestream.io.replay import DenseCall, Results
from tilestream.io.replay_published import published_backward, published_forward
from tilestream.io.replay_schedule import schedule_backward, schedule_forward
from tilestream.io.replay_standard import standard_backward, standard_forward
from tilestream.io.schedule import TileShape, schedule_cost
from tilestream.io.sizes import dense_parts
from tilestream.io.standard import standard_cost
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.spec import AttentionSpec

__all__ = ["Counted", "count_published", "count_schedule", "count_standard"]


class Counted(NamedTuple):
    """What was counted, and what was computed on the way, laid out as the call's tensors are.

    A forward has `out`, and `lse` unless it is standard attention; a backward has `gradients`. Numbers are float32, or
    float64 where the inputs are: what is rounded to a 16-bit type in between is a matter of precision, not of traffic.
    """

    cost: Cost
    out: Tensor | None
    lse: Tensor | None
    gradients: Gradients | None


def count_standard(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    *,
    dout: Tensor | None = None,
    block_m: int = 64,
    fast_memory_bytes: int | None = None,
    shift: int | None = None,
) -> Counted:
    """Replay standard attention pass by pass; `standard_cost` is its model.

    Args:
        inputs: query, key, value (B, M, H, D), (B, N, KV heads, D | E), or packed with cu_seqlens; seed with dropout.
            On a CPU.
        spec: band, scale, dropout_p; soft cap, bias, ALiBi and sinks are refused.
        dout: (B, M, H, E); given, the backward alone is counted.
        block_m: rows that a pass streams at a time.
        fast_memory_bytes: the capacity; by default what the model says is needed, and no byte more.
        shift: as `tilestream.attention`.

    Raises:
        FastMemoryError: something does not fit on chip.
        UnsupportedError: a feature that traffic is not counted of.

    Cost: O(M N) memory, and time of small tensor operations per tile: for shapes of some thousand rows.
    """

    def replay(call: DenseCall) -> tuple[TwoLevelMemory, Results]:
        is_backward = dout is not None
        memory = _memory(fast_memory_bytes, lambda: standard_cost(call.problem, is_backward, block_m=block_m))
        if not is_backward:
            return memory, standard_forward(call, memory, block_m)
        kept = _unlimited()
        standard_forward(call, kept, block_m)
        return memory, standard_backward(call, memory, block_m, kept)

    return _count(inputs, spec, dout, shift, replay)


def count_published(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    tiles: PublishedBlocks,
    *,
    dout: Tensor | None = None,
    blocks: BlockMatrix | None = None,
    fast_memory_bytes: int | None = None,
    shift: int | None = None,
) -> Counted:
    """Replay FlashAttention as published; `published_cost` is its model. Args, Raises and Cost as `count_standard`.

    Args:
        tiles: rows and keys of a tile.
        blocks: (row blocks, key blocks), those that are kept.
    """

    def replay(call: DenseCall) -> tuple[TwoLevelMemory, Results]:
        is_backward = dout is not None
        memory = _memory(fast_memory_bytes, lambda: published_cost(call.problem, tiles, is_backward, blocks))
        forward = published_forward(call, _unlimited() if is_backward else memory, tiles, blocks)
        if is_backward:
            return memory, published_backward(call, memory, tiles, forward, blocks)
        assert forward.row_max is not None
        assert forward.row_sum is not None
        forward.lse = forward.row_max + torch.log(forward.row_sum)
        return memory, forward

    return _count(inputs, spec, dout, shift, replay)


def count_schedule(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    shape: TileShape,
    *,
    dout: Tensor | None = None,
    blocks: BlockMatrix | None = None,
    fast_memory_bytes: int | None = None,
    shift: int | None = None,
) -> Counted:
    """Replay the schedule of this library's kernels; `schedule_cost` is its model. Args and Raises as `count_standard`.

    Args:
        shape: the tiles.
        blocks: (row tiles, key tiles), those that are kept.
    """

    def replay(call: DenseCall) -> tuple[TwoLevelMemory, Results]:
        is_backward = dout is not None
        memory = _memory(fast_memory_bytes, lambda: schedule_cost(call.problem, shape, is_backward, blocks))
        forward = schedule_forward(call, _unlimited() if is_backward else memory, shape, blocks)
        return memory, schedule_backward(call, memory, shape, forward, blocks) if is_backward else forward

    return _count(inputs, spec, dout, shift, replay)


def _memory(fast_memory_bytes: int | None, model: Callable[[], Cost]) -> TwoLevelMemory:
    """Of the size that was given, or that the model needs."""
    return TwoLevelMemory(model().fast_memory_bytes if fast_memory_bytes is None else fast_memory_bytes)


def _unlimited() -> TwoLevelMemory:
    """For the forward before a backward, which is not counted."""
    return TwoLevelMemory(1 << 62)


@torch.no_grad()
def _count(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    dout: Tensor | None,
    shift: int | None,
    replay: Callable[[DenseCall], tuple[TwoLevelMemory, Results]],
) -> Counted:
    """Replay every sequence, and put costs and results together."""
    for feature in ("softcap", "bias", "alibi", "sinks"):
        if feature in spec.features():
            raise UnsupportedError(f"traffic of {feature} is not counted; leave it out.")
    if inputs.query.device.type != "cpu":
        raise ArgumentError(f"a replay runs on the CPU, and query is on {inputs.query.device}.")
    costs, found = [], []
    for call in _calls(inputs, spec, dout, shift):
        memory, results = replay(call)
        assert memory.used_bytes == 0
        costs.append(Cost(memory.passes(), memory.extra_peak_bytes, memory.peak_bytes))
        found.append(results)
    cost = functools.reduce(Cost.together, costs, Cost())
    if not found:
        return Counted(cost, None, None, None)
    out, lse, dq, dk, dv = (_joined(found, name, inputs.is_varlen) for name in ("out", "lse", "dq", "dk", "dv"))
    gradients = None
    if dq is not None:
        assert dk is not None
        assert dv is not None
        gradients = Gradients(dq, dk, dv)
    return Counted(cost, out, lse, gradients)


def _calls(inputs: AttentionInputs, spec: AttentionSpec, dout: Tensor | None, shift: int | None) -> Iterator[DenseCall]:
    """The dense call, or one per packed sequence."""
    problem = Problem.from_inputs(inputs, spec, shift=shift)
    dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32

    def headed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype).transpose(-3, -2)

    q, k, v, headed_dout = map(headed, (inputs.query, inputs.key, inputs.value, dout))
    assert q is not None
    assert k is not None
    assert v is not None
    if inputs.cu_seqlens_q is None:
        yield DenseCall(problem, q, k, v, torch.arange(problem.batch), inputs.seed, headed_dout)
        return
    assert inputs.cu_seqlens_k is not None
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    lengths_q, lengths_k = ([b - a for a, b in itertools.pairwise(s)] for s in (starts_q, starts_k))
    for b, part in enumerate(dense_parts(problem, lengths_q, lengths_k)):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        yield DenseCall(
            part, q[None, :, rows], k[None, :, keys], v[None, :, keys], torch.tensor([b]), inputs.seed,
            None if headed_dout is None else headed_dout[None, :, rows],
        )  # fmt: skip


def _joined(found: list[Results], name: str, is_varlen: bool) -> Tensor | None:
    """One result of all sequences, with tokens before heads again, but for lse."""
    parts = [getattr(results, name) for results in found]
    if parts[0] is None:
        return None
    if name == "lse":
        return torch.cat([part[0] for part in parts], dim=-1) if is_varlen else parts[0]
    laid_out = [part.transpose(1, 2) for part in parts]
    return torch.cat([part[0] for part in laid_out]) if is_varlen else laid_out[0]
