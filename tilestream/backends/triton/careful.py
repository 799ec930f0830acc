"""Products that NaN and infinities of invisible pairs stay out of, for the rare tiles that hold some.

In the kernels' loops an invisible pair has weight 0, and 0 times NaN or infinity is NaN. No check in the loops would be
free, and none is needed: such a product leaves a number that is not finite in its sum. A kernel whose tiles can hide a
pair flags the programs that end with one, and a second kernel, which returns at once where nothing is flagged, computes
them again with `exact_product`. (As a branch of the first kernel it would take the registers that the loops need, and
the compiler would wait for every single product: 80 waits instead of 10 in the key kernel.)
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["exact_product", "flag", "is_flagged"]


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
def is_flagged(tensors):
    """Whether the program of the same number in the kernel before has flagged its tile."""
    return tl.load(tensors.flags + tl.program_id(0)) != 0


@triton.jit
def exact_product(weights, visible, x, facts: tl.constexpr):
    """The sum over visible pairs of weights (A, B) times x (B, C), with IEEE's rules for every single product."""
    wide = x.to(tl.float32)
    total = tl.dot(
        weights.to(x.dtype),
        tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(x.dtype),
        input_precision=facts.precision,
    )
    # Counts of products that are +-infinity or NaN; sums of a few hundred ones are exact in every dtype's product.
    weight_sign = tl.where(visible, tl.where(weights > 0.0, 1.0, tl.where(weights < 0.0, -1.0, 0.0)), 0.0)
    x_sign = tl.where(wide == float("inf"), 1.0, tl.where(wide == float("-inf"), -1.0, 0.0))
    signed = tl.dot(weight_sign.to(x.dtype), x_sign.to(x.dtype), input_precision=facts.precision)
    count = tl.dot(tl.abs(weight_sign).to(x.dtype), tl.abs(x_sign).to(x.dtype), input_precision=facts.precision)
    is_zero = (visible & (weights == 0.0)).to(tl.float32)
    lost = tl.dot(is_zero.to(x.dtype), tl.abs(x_sign).to(x.dtype), input_precision=facts.precision)
    is_nan = tl.where(wide != wide, 1.0, 0.0)
    lost += tl.dot(visible.to(tl.float32).to(x.dtype), is_nan.to(x.dtype), input_precision=facts.precision)
    total += tl.where(count + signed > 0.0, float("inf"), 0.0)
    total += tl.where(count - signed > 0.0, float("-inf"), 0.0)
    return tl.where(lost > 0.0, float("nan"), total)
