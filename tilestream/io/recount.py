"""The algorithms that `compare.py` models, counted: replayed on random numbers, and their results checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilestream import reference
from tilestream.errors import ArgumentError
from tilestream.io.compare import BLOCK_SPARSE, OURS, PUBLISHED, STANDARD, STANDARD_ROWS, Algorithm, Settings
from tilestream.io.cost import Cost
from tilestream.io.counters import Counted, count_published, count_schedule, count_standard
from tilestream.io.published import PublishedBlocks
from tilestream.problem import AttentionInputs, Problem
from tilestream.state import AttentionOutput

__all__ = ["recount"]

# A tile takes some 0.2 ms, and the oracle stores all scores.
_MOST_TILES = 50_000
_MOST_SCORES = 1 << 24
# Numbers are float32 or float64 and of size 1; what is wrong is wrong by much more.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10}


def recount(
    parts: Sequence[Problem], is_packed: bool, found: Sequence[Algorithm], settings: Settings
) -> dict[str, Cost]:
    """Count every one of `found` that is an algorithm (the compulsory cost is none).

    Args:
        parts: the dense calls that the call is.
        is_packed: whether they are sequences of one packed call.
        found: from `compare.algorithms`, with the same `parts` and `settings`.

    Returns:
        Costs by name, of replays whose results were right.

    Raises:
        ArgumentError: the call is too large to be replayed, or has features that traffic is not counted of.
        AssertionError: a result is not that of the oracle, so the replay did not do what it should.

    Cost: some 0.2 ms per tile, and the oracle's score matrices.
    """
    _check_size(parts, found)
    inputs, dout = _random_call(parts, is_packed)
    return {
        algorithm.name: _count(parts[0], inputs, dout, algorithm, settings)
        for algorithm in found
        if algorithm.name in (STANDARD, PUBLISHED, OURS, BLOCK_SPARSE)
    }


def _count(problem: Problem, inputs: AttentionInputs, dout: Tensor, algorithm: Algorithm, settings: Settings) -> Cost:
    """One algorithm, one direction after the other."""
    blocks = settings.blocks if algorithm.name == BLOCK_SPARSE else None
    cost = Cost()
    for place, backward in enumerate(settings.backwards):
        given = dout if backward else None
        # Where the call is packed each sequence has its own shift, which is the default.
        shift = None if inputs.is_varlen else problem.shift
        if algorithm.name == STANDARD:
            counted = count_standard(inputs, problem.spec, dout=given, block_m=STANDARD_ROWS, shift=shift)
        elif algorithm.name == PUBLISHED:
            [tiles] = (PublishedBlocks(*pair) for pair in algorithm.tiles)
            counted = count_published(inputs, problem.spec, tiles, dout=given, shift=shift)
        else:
            counted = count_schedule(
                inputs, problem.spec, algorithm.shapes[place], dout=given, blocks=blocks,
                fast_memory_bytes=settings.fast_memory_bytes, shift=shift,
            )  # fmt: skip
        bias = None if blocks is None else _bias_of(blocks, algorithm.tiles[0], problem)
        _check_result(problem, inputs, given, bias, counted)
        cost = cost.then(counted.cost)
    return cost


def _check_size(parts: Sequence[Problem], found: Sequence[Algorithm]) -> None:
    scores = sum(part.batch * part.num_heads_q * part.seqlen_q * part.seqlen_k for part in parts)
    tiles = sum(
        part.batch * part.num_heads_q * -(-part.seqlen_q // block_m) * -(-part.seqlen_k // block_n)
        for algorithm in found
        for block_m, block_n in algorithm.tiles
        for part in parts
    )
    if scores > _MOST_SCORES or tiles > _MOST_TILES:
        raise ArgumentError(
            f"the call is too large to be counted: {scores} scores in {tiles} tiles, at most {_MOST_SCORES} in"
            f" {_MOST_TILES}; leave --count out, or ask about fewer heads or tokens."
        )


def _random_call(parts: Sequence[Problem], is_packed: bool) -> tuple[AttentionInputs, Tensor]:
    """Standard normal inputs and dout."""
    problem, generator = parts[0], torch.Generator().manual_seed(0)
    tokens_q, tokens_k = sum(part.seqlen_q for part in parts), sum(part.seqlen_k for part in parts)
    leading = () if is_packed else (problem.batch,)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*leading, *shape, generator=generator).to(problem.dtype)

    def starts(lengths: Sequence[int]) -> Tensor | None:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) if is_packed else None

    inputs = AttentionInputs(
        query=randn(tokens_q, problem.num_heads_q, problem.head_dim),
        key=randn(tokens_k, problem.num_heads_kv, problem.head_dim),
        value=randn(tokens_k, problem.num_heads_kv, problem.head_dim_v),
        seed=torch.tensor([0]) if problem.spec.dropout_p > 0 else None,
        cu_seqlens_q=starts([part.seqlen_q for part in parts]),
        cu_seqlens_k=starts([part.seqlen_k for part in parts]),
    )
    return inputs, randn(tokens_q, problem.num_heads_q, problem.head_dim_v)


def _bias_of(blocks: Sequence[Sequence[bool]], tiles: tuple[int, int], problem: Problem) -> Tensor:
    """-inf where a block is not kept."""
    kept = torch.tensor(blocks, dtype=torch.bool).reshape(len(blocks), -1)
    kept = kept.repeat_interleave(tiles[0], 0).repeat_interleave(tiles[1], 1)[: problem.seqlen_q, : problem.seqlen_k]
    return torch.zeros(kept.shape).masked_fill(~kept, float("-inf"))[None, None]


def _check_result(
    problem: Problem, inputs: AttentionInputs, dout: Tensor | None, bias: Tensor | None, counted: Counted
) -> None:
    """What was computed on the way is what the oracle says."""
    leaves = [tensor.to(torch.float64, copy=True).requires_grad_() for tensor in inputs[:3]]
    band, spec = problem.spec.band, problem.spec
    attend: Callable[..., AttentionOutput] = reference.attention
    extra: dict[str, Tensor | int | None] = {"shift": problem.shift}
    if inputs.is_varlen:
        attend = reference.attention_varlen
        extra = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    out = attend(
        *leaves, window=(band.left, band.right), scale=spec.scale, dropout_p=spec.dropout_p, seed=inputs.seed,
        bias=bias, **extra,
    ).out  # fmt: skip
    pairs: list[tuple[Tensor | None, Tensor]] = [(counted.out, out.detach())]
    if dout is not None:
        exact = torch.autograd.grad(out, leaves, dout.double(), allow_unused=True, materialize_grads=True)
        assert counted.gradients is not None
        pairs = list(zip(counted.gradients[:3], exact, strict=True))
    for got, wanted in pairs:
        assert got is not None
        tolerance = _TOLERANCES[got.dtype]
        if not torch.allclose(got.double(), wanted, rtol=tolerance, atol=tolerance):
            raise AssertionError("a replay came to a wrong result; please report this call")
