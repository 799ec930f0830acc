"""Products that NaN and infinities of invisible pairs stay out of, for the rare tiles that hold some.

In the kernels' loops an invisible pair has weight 0, and 0 times NaN or infinity is NaN. No check in the loops would be
free, and none is needed: such a product leaves a number that is not finite in its sum. A kernel whose tiles can hide a
pair flags the programs that end with one, and a second kernel, which ends soon where nothing is flagged, computes them
again with `exact_product`. (As a branch of the first kernel it would take the registers that the loops need, and the
compiler would wait for every single product: 80 waits instead of 10 in the key kernel.) That kernel has a program for
each processor, which looks at many flags together: a program per flag would be 3 us for each on every processor.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FLAGS", "exact_product", "first_of", "flag", "for_flagged", "num_rounds"]

# More than the products of a tile, and so few that as many of them are whole numbers in float32.
_BASE = tl.constexpr(4096.0)
# Programs that are looked at together.
FLAGS = tl.constexpr(64)


@triton.jit
def _all_finite(x, are_inside):
    """Whether every number of a tile is finite, in the rows that are inside."""
    # Not x - x == 0: of a product x the compiler makes a fused multiply-add, which leaves the product's rounding.
    is_bad = (~(tl.abs(x) < float("inf"))) & are_inside[:, None]
    return tl.sum(tl.sum(is_bad.to(tl.int32), 1), 0) == 0


@triton.jit
def flag(x, y, are_inside, tensors):
    """Note whether this program's sums `x` and `y` are finite."""
    is_finite = _all_finite(x, are_inside) & _all_finite(y, are_inside)
    tl.store(tensors.flags + tl.program_id(0), tl.where(is_finite, 0, 1))


@triton.jit
def num_rounds(numbers):
    """How often a program of an exact kernel looks at `FLAGS` programs of the kernel before, to have seen its share."""
    return tl.cdiv(numbers.num_programs, FLAGS * tl.num_programs(0))


@triton.jit
def first_of(round_index):
    """The first program of a round; the others follow in steps of `tl.num_programs`, which spreads the long ones."""
    return tl.program_id(0) + round_index * FLAGS * tl.num_programs(0)


@triton.jit
def _is_flagged(program, tensors, numbers):
    """Whether a program of the kernel before, if it has one of that number, has flagged its tile."""
    return tl.load(tensors.flags + program, program < numbers.num_programs, other=0) != 0


@triton.jit
def for_flagged(PROGRAM: tl.constexpr, tensors, numbers, facts: tl.constexpr):
    """What an exact kernel is: `PROGRAM` of each program of the kernel before that has flagged its tile."""
    for round_index in tl.range(0, num_rounds(numbers)):
        first = first_of(round_index)
        programs = first + tl.arange(0, FLAGS) * tl.num_programs(0)
        if tl.max(_is_flagged(programs, tensors, numbers).to(tl.int32), 0) != 0:
            for index in tl.range(0, FLAGS):
                program = first + index * tl.num_programs(0)
                if _is_flagged(program, tensors, numbers):
                    PROGRAM(program, tensors, numbers, facts)


@triton.jit
def exact_product(weights, visible, x, facts: tl.constexpr):
    """The sum over visible pairs of weights (A, B) times x (B, C), with IEEE's rules for every single product.

    Besides the finite part two products of powers of two, which bfloat16 holds, count what is not finite: positive
    weights below _BASE, negative ones from there on, and from its square on whatever makes NaN.
    """
    wide = x.to(tl.float32)
    total = tl.dot(
        weights.to(x.dtype),
        tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(x.dtype),
        input_precision=facts.precision,
    )
    kinds = tl.where(weights < 0.0, _BASE, tl.where(weights == 0.0, _BASE * _BASE, 1.0))
    kinds = tl.where(visible, kinds, 0.0).to(tl.bfloat16)
    is_nan = tl.where(wide != wide, _BASE * _BASE, 0.0)
    upper = tl.dot(kinds, tl.where(wide == float("inf"), 1.0, is_nan).to(tl.bfloat16))
    lower = tl.dot(kinds, tl.where(wide == float("-inf"), 1.0, 0.0).to(tl.bfloat16))
    has_upper = (_num_positive(upper) > 0.0) | (lower >= _BASE)
    has_lower = (_num_positive(lower) > 0.0) | (upper >= _BASE)
    total += tl.where(has_upper, float("inf"), 0.0)
    total += tl.where(has_lower, float("-inf"), 0.0)
    return tl.where((upper >= _BASE * _BASE) | (lower >= _BASE * _BASE), float("nan"), total)


@triton.jit
def _num_positive(count):
    return count - tl.floor(count * (1.0 / _BASE)) * _BASE
