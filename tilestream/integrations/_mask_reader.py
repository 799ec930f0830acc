"""Read what a transformers mask function means, by running it once on symbols instead of on index tensors.

A mask function ``f(batch, head, query, key) -> bool`` is written for broadcast index tensors. Called with the symbols
of this file, its comparisons become bounds on ``key - query``, and its table look-ups become a table of documents. What
the symbols cannot express (unions, chunks, arbitrary code) raises `NotABandError`; the caller then evaluates the
function on real indices, which is exact but costs O(seqlen_q * seqlen_k) memory. Nothing is guessed from names.

torch.compile can trace a reading as long as the mask function looks nothing up in a table (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MaskPattern", "NotABandError", "read_mask_function"]


class NotABandError(Exception):
    """The mask function does something that is neither a band nor a comparison of documents."""


class _Symbol:
    """Refuses what Python would answer by itself; operations that are not defined raise TypeError anyway."""

    def __bool__(self) -> bool:
        raise NotABandError

    def __eq__(self, other: object) -> Any:
        raise NotABandError

    def __ne__(self, other: object) -> Any:
        raise NotABandError


class MaskPattern(_Symbol):
    """What one mask function allows: ``-left <= key - query <= right`` and equal documents.

    Args:
        left, right: inclusive bounds in absolute positions; None = no limit.
        documents: (batch, positions), any dtype; a query sees the keys of its own document only. None = one document.
    """

    def __init__(self, left: int | None = None, right: int | None = None, documents: Tensor | None = None) -> None:
        self.left = left
        self.right = right
        self.documents = documents

    # Mask functions are combined with `&` and with `.to(result.device)`; symbols live on no device.
    device = None

    def to(self, *_args: Any, **_kwargs: Any) -> MaskPattern:
        return self

    def __and__(self, other: object) -> MaskPattern:
        if not isinstance(other, MaskPattern):
            raise NotABandError
        documents = self.documents
        if documents is None:
            documents = other.documents
        elif other.documents is not None and other.documents is not documents:
            raise NotABandError
        return MaskPattern(_tighter(self.left, other.left), _tighter(self.right, other.right), documents)


def read_mask_function(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """What `mask_function` allows, or None where that is more than a band and documents."""
    try:
        pattern = mask_function(_Index("batch"), _Index("head"), _Index("query"), _Index("key"))
    except (NotABandError, TypeError, AttributeError):
        # The last two come from functions that ask a symbol for what only a tensor has. If they are genuine mistakes
        # of the function, its evaluation on tensors raises them again.
        return None
    return pattern if isinstance(pattern, MaskPattern) else None


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None:
        return b
    return a if b is None else min(a, b)


class _Index(_Symbol):
    """The position on one axis, plus a constant."""

    def __init__(self, axis: str, offset: int = 0) -> None:
        self.axis = axis
        self.offset = offset

    def new_ones(self, *_args: Any, **_kwargs: Any) -> MaskPattern:
        return MaskPattern()

    def __add__(self, other: object) -> _Index:
        return _Index(self.axis, self.offset + _plain_int(other))

    __radd__ = __add__

    def __sub__(self, other: object) -> _Index | _Distance:
        if isinstance(other, _Index):
            return _distance(self, other)
        return _Index(self.axis, self.offset - _plain_int(other))

    def __le__(self, other: object) -> MaskPattern:
        return _distance(self, other) <= 0

    def __lt__(self, other: object) -> MaskPattern:
        return _distance(self, other) < 0

    def __ge__(self, other: object) -> MaskPattern:
        if isinstance(other, int) and other <= self.offset and self.axis in ("query", "key"):
            return MaskPattern()  # positions are never negative
        return _distance(self, other) >= 0

    def __gt__(self, other: object) -> MaskPattern:
        return _distance(self, other) > 0

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> _Lookup:
        if func is not Tensor.__getitem__ or kwargs:
            raise NotABandError
        table, index = args
        return _lookup(table, index)


class _Distance(_Symbol):
    """``sign * (key - query) + offset``, or its absolute value where sign is 0."""

    def __init__(self, sign: int, offset: int) -> None:
        self.sign = sign
        self.offset = offset

    def __add__(self, other: object) -> _Distance:
        if self.sign == 0:
            raise NotABandError
        return _Distance(self.sign, self.offset + _plain_int(other))

    def __sub__(self, other: object) -> _Distance:
        if self.sign == 0:
            raise NotABandError
        return _Distance(self.sign, self.offset - _plain_int(other))

    def __abs__(self) -> _Distance:
        if self.offset != 0:
            raise NotABandError
        return _Distance(0, 0)

    def __le__(self, other: object) -> MaskPattern:
        bound = _plain_int(other) - self.offset
        if self.sign > 0:
            return MaskPattern(right=bound)
        if self.sign < 0:
            return MaskPattern(left=bound)
        return MaskPattern(bound, bound)

    def __lt__(self, other: object) -> MaskPattern:
        return self <= _plain_int(other) - 1

    def __ge__(self, other: object) -> MaskPattern:
        if self.sign == 0:
            raise NotABandError
        return _Distance(-self.sign, -self.offset) <= -_plain_int(other)

    def __gt__(self, other: object) -> MaskPattern:
        return self >= _plain_int(other) + 1


class _Lookup(_Symbol):
    """``table[batch, position]``."""

    def __init__(self, table: Tensor, axis: str) -> None:
        self.table = table
        self.axis = axis

    def __eq__(self, other: object) -> MaskPattern:  # type: ignore[override]
        if not isinstance(other, _Lookup) or other.table is not self.table or other.axis == self.axis:
            raise NotABandError
        return MaskPattern(documents=self.table)


def _lookup(table: object, index: object) -> _Lookup:
    if not isinstance(table, Tensor) or table.dim() != 2 or not isinstance(index, tuple) or len(index) != 2:
        raise NotABandError
    batch, position = index
    if not isinstance(batch, _Index) or batch.axis != "batch" or batch.offset != 0:
        raise NotABandError
    if not isinstance(position, _Index) or position.axis not in ("query", "key") or position.offset != 0:
        raise NotABandError
    return _Lookup(table, position.axis)


def _plain_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise NotABandError
    return value  # type: ignore[return-value]


def _distance(a: object, b: object) -> _Distance:
    if isinstance(a, _Index) and isinstance(b, _Index):
        if (a.axis, b.axis) == ("key", "query"):
            return _Distance(1, a.offset - b.offset)
        if (a.axis, b.axis) == ("query", "key"):
            return _Distance(-1, a.offset - b.offset)
    raise NotABandError
