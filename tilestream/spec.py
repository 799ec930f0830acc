"""What is computed: the visible band of keys, and the facts of one attention call.

The score pipeline has one order, and the order is semantics. For query i and key j of one head:

    s = scale * dot(q_i, k_j)
    s = softcap * tanh(s / softcap)                    where softcap > 0
    s = s + bias[i, j] - slope * |j - (i + shift)|     where given
    s = -inf                                           where the band hides j from i
    p = softmax over j, with exp(sink) added to the denominator where sinks are given
    out = sum over j of dropout(p) * v_j;  lse = log(sum over j of exp(s) [+ exp(sink)])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AttentionSpec", "Band", "band_limits", "default_scale"]


@dataclass(frozen=True)
class Band:
    """Key j is visible to query i iff ``-left <= j - (i + shift) <= right``; None is no limit.

    ``Band(None, 0)`` is causal, ``Band(w - 1, 0)`` sees the last w keys. ``shift`` belongs to the call, not to
    the band: ``seqlen_k - seqlen_q`` lets the last query meet the last key.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def from_arguments(cls, causal: bool, window: tuple[int | None, int | None] | None) -> Band:
        """The band of the public arguments."""
        return cls(*band_limits(causal, window))

    @property
    def is_unlimited(self) -> bool:
        return self.left is None and self.right is None

    def sees(self, i: int, j: int, shift: int) -> bool:
        """Whether query i sees key j."""
        distance = j - (i + shift)
        return (self.left is None or distance >= -self.left) and (self.right is None or distance <= self.right)


@dataclass(frozen=True)
class AttentionSpec:
    """What one call computes, without its tensors and without anything about speed."""

    band: Band = Band()
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    has_bias: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    deterministic: bool = False

    def features(self) -> tuple[str, ...]:
        """The optional features this call uses, by name, in a fixed order."""
        left, right = self.band.left, self.band.right
        present = {
            "causal": left is None and right == 0,
            "window": not self.band.is_unlimited and (left is not None or right != 0),
            "softcap": self.softcap > 0,
            "bias": self.has_bias,
            "alibi": self.has_alibi,
            "sinks": self.has_sinks,
            "dropout": self.dropout_p > 0,
            "deterministic": self.deterministic,
        }
        return tuple(name for name, is_on in present.items() if is_on)


def band_limits(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """(left, right) of the public arguments' band; ``causal`` only ever narrows ``window``."""
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim) of the unpadded head_dim."""
    return 1.0 / math.sqrt(head_dim)
