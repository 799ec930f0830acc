"""Bytes of the tensors of a call, the dense calls that a packed one is, and what must cross in any case."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilestream.block_mask import BlockMask
from tilestream.errors import ArgumentError
from tilestream.io.cost import Cost
from tilestream.problem import Problem
from tilestream.spec import Band
from tilestream.tiles import visible_pairs

__all__ = ["Sizes", "accumulator_bytes", "dense_parts", "num_pairs", "num_visible_pairs", "total_cost"]

# Of masks whose pairs were counted, which takes a look at every pair of their PARTIAL blocks.
_COUNTED: weakref.WeakKeyDictionary[BlockMask, dict[tuple[Band, int], int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Sizes:
    """Bytes of each tensor of a dense call; gradients have the sizes of what they are gradients of.

    `rows` is batch x query heads x queries; `scores` is an N x N tensor in the input dtype, `keep_mask` one of bools
    and `mask` one in the input dtype that batch entries and heads share; `lse` has the accumulators' type.
    """

    q: int
    k: int
    v: int
    out: int
    lse: int
    scores: int
    mask: int
    keep_mask: int
    rows: int
    element_bytes: int
    accumulator_bytes: int

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        """The sizes of a dense problem.

        Raises:
            ArgumentError: it is packed.
        """
        check_dense(problem)
        element_bytes = problem.dtype.itemsize
        rows = problem.batch * problem.seqlen_q * problem.num_heads_q
        keys = problem.batch * problem.seqlen_k * problem.num_heads_kv
        return cls(
            q=rows * problem.head_dim * element_bytes,
            k=keys * problem.head_dim * element_bytes,
            v=keys * problem.head_dim_v * element_bytes,
            out=rows * problem.head_dim_v * element_bytes,
            lse=rows * accumulator_bytes(problem),
            scores=rows * problem.seqlen_k * element_bytes,
            mask=problem.seqlen_q * problem.seqlen_k * element_bytes,
            keep_mask=rows * problem.seqlen_k,
            rows=rows,
            element_bytes=element_bytes,
            accumulator_bytes=accumulator_bytes(problem),
        )


def accumulator_bytes(problem: Problem) -> int:
    """Bytes of a running sum: float32, and float64 for float64 inputs."""
    return max(4, problem.dtype.itemsize)


def check_dense(problem: Problem) -> None:
    """Refuse a packed problem, which does not hold the lengths that its cost depends on."""
    if problem.layout != "dense":
        raise ArgumentError("a packed call has no cost of its own: add up one dense Problem per sequence.")


def dense_parts(problem: Problem, seqlens_q: Sequence[int], seqlens_k: Sequence[int]) -> list[Problem]:
    """The dense calls of one sequence each that a packed `problem` with these lengths is."""
    return [
        dataclasses.replace(
            problem, batch=1, seqlen_q=length_q, seqlen_k=length_k, shift=length_k - length_q, layout="dense",
            total_q=length_q, total_k=length_k,
        )
        for length_q, length_k in zip(seqlens_q, seqlens_k, strict=True)
    ]  # fmt: skip


def total_cost(cost_of: Callable[[Problem], Cost], parts: Sequence[Problem]) -> Cost:
    """What `cost_of` says of the `parts` of one call, together."""
    return functools.reduce(Cost.together, map(cost_of, parts), Cost())


def num_pairs(problem: Problem) -> int:
    """(batch, query head, query, key) pairs, visible or not."""
    check_dense(problem)
    return problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k


def num_visible_pairs(problem: Problem) -> int:
    """Visible (batch, query head, query, key) pairs."""
    check_dense(problem)
    assert problem.shift is not None
    band, num_heads = problem.spec.band, problem.batch * problem.num_heads_q
    if (mask := problem.block_mask) is not None:
        num_planes = mask.batch * mask.num_heads
        return num_heads * _pairs_of(mask, band, problem.shift) // num_planes if num_planes else 0
    return num_heads * visible_pairs(band, problem.shift, problem.seqlen_q, problem.seqlen_k)


def _pairs_of(mask: BlockMask, band: Band, shift: int) -> int:
    """Pairs of all planes of a mask that the band shows too."""
    found = _COUNTED.setdefault(mask, {})
    if (band, shift) not in found:
        seen = mask
        if not band.is_unlimited:
            window = (band.left, band.right)
            lengths = (mask.seqlen_q, mask.seqlen_k)
            seen = mask & BlockMask.from_band(*lengths, window=window, shift=shift, block_size=mask.block_size)
        found[band, shift] = seen.num_pairs()
    return found[band, shift]
