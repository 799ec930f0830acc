"""Standard attention, which stores its N x N matrices: bytes, FLOPs and memory of each pass, as formulas.

Each product is at its best: it reads each operand once, because what it needs again stays in fast memory. Scale is part
of the first product. Sources: arXiv:2205.14135, algorithms 0 and 3; PyTorch's eager operations for mask and dropout.
"""

from __future__ import annotations

from tilestream.io.cost import Cost, Pass, pass_of
from tilestream.io.sizes import Sizes, accumulator_bytes, num_pairs
from tilestream.problem import Problem

__all__ = ["standard_cost"]


def standard_cost(
    problem: Problem,
    backward: bool = False,
    *,
    block_m: int = 1,
    has_mask: bool | None = None,
    has_dropout: bool | None = None,
) -> Cost:
    """What standard attention moves, pass by pass.

    Forward::

        scores         reads q, k               writes scores
        mask           reads scores, mask       writes masked_scores              where the band hides something
        softmax        reads masked_scores      writes p
        dropout        reads p                  writes p_dropped, keep_mask       where dropout_p > 0
        out            reads p_dropped, v       writes out

    Backward, from what the forward kept (p, p_dropped, keep_mask)::

        dv             reads p_dropped, dout       writes dv
        dp             reads dout, v               writes dp_dropped
        dropout        reads dp_dropped, keep_mask writes dp                      where dropout_p > 0
        softmax        reads p, dp                 writes ds
        dq             reads ds, k                 writes dq
        dk             reads ds, q                 writes dk

    Without a mask pass `masked_scores` is `scores`, without dropout the dropped tensors are the others. An added mask
    has no backward. N x N tensors are of the input dtype, keep_mask is of bytes, mask is shared by batch and heads.

    Args:
        problem: a dense call; soft cap, bias, ALiBi and sinks are not counted.
        backward: the backward alone.
        block_m: rows that a pass streams at a time; it changes fast_memory_bytes alone.
        has_mask: whether masking is a pass; by default where the band has a limit. Without, it costs nothing.
        has_dropout: whether dropout is a pass; by default where the call has it.

    Returns:
        Cost. extra_memory_bytes is the peak of N x N tensors that are alive at once, if each is freed after its last
        use. fast_memory_bytes is what "at their best" needs: an operand of one head, and `block_m` rows.

    Raises:
        ArgumentError: a packed problem.
    """
    sizes = Sizes.of(problem)
    has_mask = not problem.spec.band.is_unlimited if has_mask is None else has_mask
    has_dropout = problem.spec.dropout_p > 0 if has_dropout is None else has_dropout
    list_passes = _backward_passes if backward else _forward_passes
    num_alive = 3 if backward else 2
    # Peaks: masked_scores (or scores) beside p, or p beside p_dropped; backward p, dp_dropped or dp, and what follows.
    extra = num_alive * sizes.scores + (sizes.keep_mask if has_dropout else 0)
    passes = tuple(list_passes(problem, sizes, has_mask, has_dropout))
    return Cost(passes, extra, _fast_memory(problem, block_m, {one.name for one in passes}))


def _forward_passes(problem: Problem, sizes: Sizes, has_mask: bool, has_dropout: bool) -> list[Pass]:
    square, product = sizes.scores, 2 * num_pairs(problem)
    scores, p = "masked_scores" if has_mask else "scores", "p_dropped" if has_dropout else "p"
    passes = [
        pass_of("scores", {"q": sizes.q, "k": sizes.k}, {"scores": square}, product * problem.head_dim),
        pass_of("mask", {"scores": square, "mask": _mask_read(problem, sizes)}, {"masked_scores": square}),
        pass_of("softmax", {scores: square}, {"p": square}),
        pass_of("dropout", {"p": square}, {"p_dropped": square, "keep_mask": sizes.keep_mask}),
        pass_of("out", {p: square, "v": sizes.v}, {"out": sizes.out}, product * problem.head_dim_v),
    ]
    left_out = {"mask": not has_mask, "dropout": not has_dropout}
    return [one for one in passes if not left_out.get(one.name, False)]


def _backward_passes(problem: Problem, sizes: Sizes, has_mask: bool, has_dropout: bool) -> list[Pass]:
    square, product = sizes.scores, 2 * num_pairs(problem)
    p, dp = ("p_dropped", "dp_dropped") if has_dropout else ("p", "dp")
    passes = [
        pass_of("dv", {p: square, "dout": sizes.out}, {"dv": sizes.v}, product * problem.head_dim_v),
        pass_of("dp", {"dout": sizes.out, "v": sizes.v}, {dp: square}, product * problem.head_dim_v),
        pass_of("dropout backward", {"dp_dropped": square, "keep_mask": sizes.keep_mask}, {"dp": square}),
        pass_of("softmax backward", {"p": square, "dp": square}, {"ds": square}),
        pass_of("dq", {"ds": square, "k": sizes.k}, {"dq": sizes.q}, product * problem.head_dim),
        pass_of("dk", {"ds": square, "q": sizes.q}, {"dk": sizes.k}, product * problem.head_dim),
    ]
    return [one for one in passes if has_dropout or one.name != "dropout backward"]


def _mask_read(problem: Problem, sizes: Sizes) -> int:
    """The mask is read once, for all batch entries and heads; not at all where there is none of them."""
    return sizes.mask if problem.batch else 0


def _fast_memory(problem: Problem, block_m: int, pass_names: set[str]) -> int:
    """The hungriest pass: an operand or the sums of one head, and rows of what is streamed and made."""
    element, sums = problem.dtype.itemsize, accumulator_bytes(problem)
    rows, width, width_v = min(block_m, problem.seqlen_q), problem.head_dim, problem.head_dim_v
    square, keys = rows * problem.seqlen_k, problem.seqlen_k
    needs = {
        "scores": (keys + rows) * width * element + square * sums,
        "mask": square * (2 * element + sums),
        "softmax": square * (element + sums),
        "dropout": square * (element + sums + 1),
        "out": keys * width_v * element + square * element + rows * width_v * sums,
        "dv": keys * width_v * sums + square * element + rows * width_v * element,
        "dp": (keys + rows) * width_v * element + square * sums,
        "dropout backward": square * (element + 1 + sums),
        "softmax backward": square * (2 * element + sums),
        "dq": keys * width * element + square * element + rows * width * sums,
        "dk": keys * width * sums + square * element + rows * width * element,
    }
    return max(needs[name] for name in pass_names)
