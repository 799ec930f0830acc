"""The softmax state: (row_max, row_sum, acc) on chip, (out, lse) off chip, and the one merge of both.

Shapes: R any leading dimensions and the query rows; n keys of one tile; E head_dim_v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.errors import ArgumentError, DtypeError, ShapeError, describe_shapes

__all__ = ["AttentionOutput", "SoftmaxState", "exp_", "finite_or_zero", "merge", "sink_gradient"]

_NEGATIVE_INFINITY = float("-inf")
# exp(log(smallest)) comes back within this factor of `smallest`.
_MARGIN = 1.001


class AttentionOutput(NamedTuple):
    """Attention and the natural log-sum-exp of each row's scores; together they can be merged."""

    out: Tensor
    lse: Tensor


def exp_(x: Tensor) -> Tensor:
    """The exponential in place, with results below about 3 * finfo.tiny flushed to 0.

    Clamped first, because PyTorch's float32 exp on a CPU takes 0.6 ns an element but 6 to 36 ns where the result is 0
    or subnormal, which is every masked score. exp2 would be faster still, but its last bit depends on where in the
    tensor an element stands, so a permuted batch would not give permuted bits (docs/measured-facts.md).
    """
    smallest = math.e * torch.finfo(x.dtype).tiny
    x = x.clamp_(min=math.log(smallest)).exp_()
    return torch.threshold_(x, _MARGIN * smallest, 0.0)


def finite_or_zero(row_max: Tensor) -> Tensor:
    """`row_max` with -inf replaced by 0: what to subtract so that a row without keys gives exp(-inf) = 0, not NaN."""
    return row_max.masked_fill(row_max == _NEGATIVE_INFINITY, 0.0)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key of value 0: its probability times (0 - delta), summed over all rows of its head.

    `sinks` (heads,); `lse`, with 0 for rows without keys, and `delta` (..., heads, rows).
    """
    by_head = ((sinks[:, None] - lse).exp_() * delta).sum(dim=-1)
    return -by_head.sum_to_size(sinks.shape)


@dataclass
class SoftmaxState:
    """A running softmax over key tiles: ``row_max`` and ``row_sum`` (R, 1), ``acc`` (R, E), all in one dtype."""

    row_max: Tensor
    row_sum: Tensor
    acc: Tensor

    @classmethod
    def identity(cls, rows: tuple[int, ...], head_dim_v: int, dtype: torch.dtype, device: torch.device) -> SoftmaxState:
        """The state of rows that have seen no key."""
        return cls(
            torch.full((*rows, 1), _NEGATIVE_INFINITY, dtype=dtype, device=device),
            torch.zeros((*rows, 1), dtype=dtype, device=device),
            torch.zeros((*rows, head_dim_v), dtype=dtype, device=device),
        )

    @classmethod
    def from_sink(cls, sink: Tensor, head_dim_v: int) -> SoftmaxState:
        """The state after one phantom key of score `sink` (R, 1) and value 0; a sink of -inf is the identity."""
        return cls(
            sink.clone(),
            (sink > _NEGATIVE_INFINITY).to(sink.dtype),
            sink.new_zeros(*sink.shape[:-1], head_dim_v),
        )

    def rescale(self, s_mn: Tensor) -> Tensor:
        """Fold a tile's maximum in; turns `s_mn` (R, n) into p_mn = exp(s_mn - row_max) in place and returns it.

        `row_sum` already includes the tile afterwards; the caller adds ``p_mn @ v_n`` to `acc`.
        """
        new_max = torch.maximum(self.row_max, s_mn.amax(dim=-1, keepdim=True))
        subtrahend = finite_or_zero(new_max)
        alpha = exp_(self.row_max - subtrahend)
        p_mn = exp_(s_mn.sub_(subtrahend))
        self.row_sum.mul_(alpha).add_(p_mn.sum(dim=-1, keepdim=True))
        self.acc.mul_(alpha)
        self.row_max = new_max
        return p_mn

    def finalize(self) -> AttentionOutput:
        """``out = acc / row_sum`` (R, E) and ``lse`` (R,); rows that saw nothing give 0 and -inf."""
        divisor = self.row_sum.masked_fill(self.row_sum == 0, 1.0)
        lse = self.row_max + divisor.log()
        return AttentionOutput(self.acc / divisor, lse.squeeze(-1))


def merge(*pairs: tuple[Tensor, Tensor], out_dtype: torch.dtype | None = None) -> AttentionOutput:
    """Merge attention over disjoint sets of keys into attention over their union.

    ``out = sum_p exp(lse_p - lse) out_p`` with ``lse = log(sum_p exp(lse_p))``. Associative and commutative, with
    ``(0, -inf)`` as identity; differentiable in every argument. Split-KV decoding, ring steps, shared prefixes and
    cascades are all this function.

    Args:
        pairs: one or more ``(out, lse)``, as `attention_with_lse` or `attention_varlen_with_lse` return them:
            ``out`` (batch, seqlen_q, heads, head_dim_v) with ``lse`` (batch, heads, seqlen_q), or
            ``out`` (total_q, heads, head_dim_v) with ``lse`` (heads, total_q).
        out_dtype: dtype of the merged ``out``; the first ``out``'s by default. Pass float32 to keep the sum
            unrounded between merges.

    Returns:
        AttentionOutput(out, lse): ``lse`` in the widest of the lse dtypes.

    Raises:
        ArgumentError: no pair was given.
        ShapeError, DtypeError: pairs that do not fit each other; the message shows all shapes.

    Cost: reads every pair once, writes one; O(1) extra memory per row and pair.
    Source: arXiv:2205.14135, section 3.1 (the softmax decomposition).

    Example:
        >>> import torch, tilestream
        >>> query, key, value = (torch.randn(1, 8, 2, 16) for _ in range(3))
        >>> halves = [tilestream.attention_with_lse(query, key[:, s], value[:, s]) for s in (slice(5), slice(5, 8))]
        >>> merged = tilestream.merge(*halves)
        >>> torch.allclose(merged.out, tilestream.attention(query, key, value), atol=1e-6)
        True
    """
    _check_pairs(pairs)
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise DtypeError(f"merge: out_dtype must be floating point, got {out_dtype}.")
    lse = torch.stack([pair_lse for _, pair_lse in pairs])
    compute_dtype = lse.dtype
    # Detaching the maximum is exact (it cancels), and finite_or_zero keeps rows without keys free of NaN.
    subtrahend = finite_or_zero(lse.detach().amax(dim=0))
    weights = (lse - subtrahend).exp()
    total = weights.sum(dim=0)
    is_void = total == 0
    divisor = total.masked_fill(is_void, 1.0)
    merged_lse = (subtrahend + divisor.log()).masked_fill(is_void, _NEGATIVE_INFINITY)
    merged = sum(
        (weight / divisor).transpose(-1, -2).unsqueeze(-1) * out.to(compute_dtype)
        for weight, (out, _) in zip(weights.unbind(0), pairs, strict=True)
    )
    assert isinstance(merged, Tensor)
    return AttentionOutput(merged.to(out_dtype or pairs[0][0].dtype), merged_lse)


def _check_pairs(pairs: tuple[tuple[Tensor, Tensor], ...]) -> None:
    if not pairs:
        raise ArgumentError("merge needs at least one (out, lse) pair.")
    shapes: dict[str, tuple[object, ...]] = {}
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise ArgumentError(f"merge takes (out, lse) pairs of tensors; argument {index} is {type(pair).__name__}.")
        shapes[f"out[{index}]"], shapes[f"lse[{index}]"] = tuple(pair[0].shape), tuple(pair[1].shape)
    listed = describe_shapes(shapes, "..., seqlen_q, heads, head_dim_v / ..., heads, seqlen_q")
    for index, (out, lse) in enumerate(pairs):
        if out.shape != pairs[0][0].shape or lse.shape != pairs[0][1].shape:
            raise ShapeError(f"merge: pair {index} has other shapes than pair 0.{listed}")
        if out.dim() not in (3, 4) or lse.shape != (*out.shape[:-3], out.shape[-2], out.shape[-3]):
            raise ShapeError(f"merge: lse[{index}] does not belong to out[{index}].{listed}")
        if not (out.is_floating_point() and lse.dtype in (torch.float32, torch.float64)):
            raise DtypeError(
                f"merge: out must be floating point and lse float32 or float64, got {out.dtype} and {lse.dtype}."
            )
