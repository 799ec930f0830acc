"""FLOPs and slow-memory traffic of one Problem in a number or two, from the models of each algorithm beside this file.

Bytes are those that cross between the big slow memory and the small fast one (HBM and shared memory on a GPU, DRAM
and cache on a CPU), if nothing but the algorithm decides what is read again. Bias, slopes, sinks and the dropout seed
are not counted. Per tensor and per pass: `standard.py`, `published.py`, `schedule.py`; counted: `counters.py`.
"""

from __future__ import annotations

from tilestream.io.cost import Traffic
from tilestream.io.schedule import TileShape, compulsory_cost, schedule_cost
from tilestream.io.standard import standard_cost
from tilestream.problem import Problem

__all__ = [
    "Traffic",
    "backward_flops",
    "compulsory_bytes",
    "forward_flops",
    "materialised_bytes",
    "tiled_bytes",
]


def forward_flops(problem: Problem) -> int:
    """Multiplications and additions of QK^T and PV over the visible pairs; the softmax is not counted."""
    return compulsory_cost(problem).flops


def backward_flops(problem: Problem) -> int:
    """The five products of the backward: QK^T again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q."""
    return compulsory_cost(problem, backward=True).flops


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
    return compulsory_cost(problem, backward).traffic


def materialised_bytes(problem: Problem, backward: bool = False) -> Traffic:
    """The traffic of standard attention, which stores scores and probabilities in the input dtype.

    Scale, mask and dropout count as part of the softmax, in this algorithm's favour: three passes forward, five
    backward, those of `standard_cost` without mask and dropout. Hidden pairs are stored like visible ones.
    Args, Returns and Raises as `compulsory_bytes`.
    """
    return standard_cost(problem, backward, has_mask=False, has_dropout=False).traffic


def tiled_bytes(problem: Problem, block_m: int, backward: bool = False, packs_group: bool = False) -> Traffic:
    """The traffic of the tile loop of `teaching.py`: scores never leave fast memory.

    Forward: per query tile reads q once and k, v of every visited key tile; writes out and lse once.
    Backward: per query tile reads q, out, dout, lse once, reads k, v and reads and writes the accumulators of dk, dv
    of every visited key tile, and writes dq once; the accumulators (float32, float64 for float64 inputs) are zeroed
    before and read once after, to write dk and dv. `schedule_cost` has the passes of this, and the backward of the GPU
    kernels, which has no accumulators in memory.

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
    return schedule_cost(problem, TileShape(block_m, 1, packs_group, sums_in_memory=True), backward).traffic
