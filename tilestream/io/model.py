"""FLOPs and slow-memory traffic of one Problem, as exact formulas.

Bytes are those that cross between the big slow memory and the small fast one (HBM and shared memory on a GPU, DRAM
and cache on a CPU), if nothing but the algorithm decides what is read again. Bias, slopes, sinks and the dropout seed
are not counted. Source: arXiv:2205.14135, section 3.2 and algorithms 0, 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilestream.errors import ArgumentError
from tilestream.problem import Problem
from tilestream.tiles import key_span, visible_pairs

__all__ = [
    "Traffic",
    "backward_flops",
    "compulsory_bytes",
    "forward_flops",
    "materialised_bytes",
    "tiled_bytes",
]


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to slow memory."""

    read_bytes: int
    written_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Traffic) -> Traffic:
        """The traffic of one call after the other."""
        return Traffic(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes)


def forward_flops(problem: Problem) -> int:
    """Multiplications and additions of QK^T and PV over the visible pairs; the softmax is not counted."""
    return 2 * _pairs(problem) * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: Problem) -> int:
    """The five products of the backward: QK^T again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q."""
    return 2 * _pairs(problem) * (3 * problem.head_dim + 2 * problem.head_dim_v)


def compulsory_bytes(problem: Problem, backward: bool = False) -> Traffic:
    """The traffic no algorithm can avoid: each input read once, each output written once.

    Args:
        problem: a dense call.
        backward: the backward alone: reads q, k, v, out, lse, dout; writes dq, dk, dv.

    Returns:
        Traffic in bytes.

    Raises:
        ArgumentError: a packed problem, whose cost depends on lengths that it does not hold.
    """
    sizes = _Sizes.of(problem)
    inputs = sizes.query + sizes.key + sizes.value
    if backward:
        return Traffic(read_bytes=inputs + 2 * sizes.out + sizes.lse, written_bytes=inputs)
    return Traffic(read_bytes=inputs, written_bytes=sizes.out + sizes.lse)


def materialised_bytes(problem: Problem, backward: bool = False) -> Traffic:
    """The traffic of standard attention, which stores scores and probabilities in the input dtype.

    Forward, one kernel per line (scale and mask count as part of the softmax, in this algorithm's favour)::

        s = q k^T          reads q, k          writes s
        p = softmax(s)     reads s             writes p
        out = p v          reads p, v          writes out

    Backward, from the p that the forward kept::

        dv = p^T dout             reads p, dout       writes dv
        dp = dout v^T             reads dout, v       writes dp
        ds = p (dp - rowsum)      reads p, dp         writes ds
        dq = ds k                 reads ds, k         writes dq
        dk = ds^T q               reads ds, q         writes dk

    Hidden pairs are stored like visible ones. Args, Returns and Raises as `compulsory_bytes`.
    """
    sizes = _Sizes.of(problem)
    inputs = sizes.query + sizes.key + sizes.value
    if backward:
        return Traffic(read_bytes=5 * sizes.scores + 2 * sizes.out + inputs, written_bytes=2 * sizes.scores + inputs)
    return Traffic(read_bytes=inputs + 2 * sizes.scores, written_bytes=2 * sizes.scores + sizes.out)


def tiled_bytes(problem: Problem, block_m: int, backward: bool = False, packs_group: bool = False) -> Traffic:
    """The traffic of the tile loop of `teaching.py`: scores never leave fast memory.

    Forward: per query tile reads q once and k, v of every visited key tile; writes out and lse once.
    Backward: per query tile reads q, out, dout, lse once, reads k, v and reads and writes the accumulators of dk, dv
    of every visited key tile, and writes dq once; the accumulators (float32, float64 for float64 inputs) are zeroed
    before and read once after, to write dk and dv.

    The width of a key tile does not enter: `tile_row` trims tiles to the keys that some query of the row sees, so
    that a row visits the same keys however they are cut.

    Args:
        problem: a dense call.
        block_m: queries per tile, at least 1.
        backward: the backward alone.
        packs_group: the query heads of one KV head are rows of one tile and share each load of k and v. Otherwise
            every query head loads them for itself.

    Returns, Raises: as `compulsory_bytes`.
    """
    if block_m < 1:
        raise ArgumentError(f"block_m must be at least 1, got {block_m}.")
    sizes = _Sizes.of(problem)
    num_streams = problem.batch * (problem.num_heads_kv if packs_group else problem.num_heads_q)
    visited_numbers = num_streams * (problem.head_dim + problem.head_dim_v) * sum(_visited_keys(problem, block_m))
    streamed = visited_numbers * sizes.element_bytes
    if not backward:
        return Traffic(read_bytes=sizes.query + streamed, written_bytes=sizes.out + sizes.lse)
    accumulated = visited_numbers * sizes.accumulator_element_bytes
    gradients = sizes.key + sizes.value
    accumulators = gradients * sizes.accumulator_element_bytes // sizes.element_bytes
    return Traffic(
        read_bytes=sizes.query + 2 * sizes.out + sizes.lse + streamed + accumulated + accumulators,
        written_bytes=sizes.query + accumulators + accumulated + gradients,
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes of each tensor of a call."""

    query: int
    key: int
    value: int
    out: int
    lse: int
    scores: int
    element_bytes: int
    accumulator_element_bytes: int

    @classmethod
    def of(cls, problem: Problem) -> _Sizes:
        _check_dense(problem)
        element_bytes = problem.dtype.itemsize
        accumulator_element_bytes = max(4, element_bytes)
        rows = problem.batch * problem.seqlen_q * problem.num_heads_q
        keys = problem.batch * problem.seqlen_k * problem.num_heads_kv
        return cls(
            query=rows * problem.head_dim * element_bytes,
            key=keys * problem.head_dim * element_bytes,
            value=keys * problem.head_dim_v * element_bytes,
            out=rows * problem.head_dim_v * element_bytes,
            lse=rows * accumulator_element_bytes,
            scores=rows * problem.seqlen_k * element_bytes,
            element_bytes=element_bytes,
            accumulator_element_bytes=accumulator_element_bytes,
        )


def _check_dense(problem: Problem) -> None:
    if problem.layout != "dense":
        raise ArgumentError("a packed call has no cost of its own: add up one dense Problem per sequence.")


def _pairs(problem: Problem) -> int:
    """Visible (batch, query head, query, key) pairs."""
    _check_dense(problem)
    assert problem.shift is not None
    pairs = visible_pairs(problem.spec.band, problem.shift, problem.seqlen_q, problem.seqlen_k)
    return problem.batch * problem.num_heads_q * pairs


def _visited_keys(problem: Problem, block_m: int) -> Iterator[int]:
    """How many keys each query tile visits."""
    assert problem.shift is not None
    for m_start in range(0, problem.seqlen_q, block_m):
        m_end = min(m_start + block_m, problem.seqlen_q)
        lo, hi = key_span(problem.spec.band, problem.shift, m_start, m_end, problem.seqlen_k)
        yield hi - lo
