"""A 4-D boolean mask that is known by its rule and not by its entries.

Models hand the result of the mask function to every layer as ``attention_mask``. `BandMask` looks like the boolean
(batch, 1, seqlen_q, seqlen_k) tensor they expect (True = attend), holds O(batch * seqlen) bytes, and turns into the
real tensor as soon as any operation other than the attention function touches it. Its `BandRule` is what counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

__all__ = ["BandMask", "BandRule", "Packing"]

_aten = torch.ops.aten


class Packing(NamedTuple):
    """Where the tokens of a (batch, seqlen) grid stand once packed.

    indices: int64 (total,) into the flattened grid, or None where nothing is left out.
    cu_seqlens: int32 (num_sequences + 1,). max_seqlen: the longest sequence, or None where that is not known.
    """

    indices: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int | None


class BandRule:
    """Key j is visible to query i iff ``-left <= j - (i + shift) <= right``, key j is no padding, documents are equal.

    Args:
        shape: (batch, 1, seqlen_q, seqlen_k).
        left, right: inclusive limits; None = no limit.
        shift: position of the first query minus position of the first key.
        documents: (batch, seqlen_q) with seqlen_q == seqlen_k; None = one document.
        may_be_packed: whether the caller gave no padding mask, so that restarting position_ids mean documents.

    Attributes:
        key_mask: bool (batch, reach), False at padding; None = no padding.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        left: int | None,
        right: int | None,
        shift: int,
        *,
        documents: Tensor | None = None,
        may_be_packed: bool = True,
    ) -> None:
        self.shape = shape
        self.left = left
        self.right = right
        self.shift = shift
        self.documents = documents
        self.may_be_packed = may_be_packed
        self.key_mask: Tensor | None = None
        # Answers to the last question, because every layer asks the same: (question, answer).
        self._restarts: tuple[Tensor, Tensor | None] | None = None
        self._packing: tuple[Tensor | None, Packing | None] | None = None

    def __repr__(self) -> str:
        band = f"left={self.left}, right={self.right}, shift={self.shift}"
        return f"BandRule({self.shape}, {band}, padded={self.key_mask is not None})"

    def to(self, device: torch.device) -> BandRule:
        """The same rule with its tensors on `device`."""
        documents = None if self.documents is None else self.documents.to(device)
        moved = BandRule(
            self.shape, self.left, self.right, self.shift, documents=documents, may_be_packed=self.may_be_packed
        )
        moved.key_mask = None if self.key_mask is None else self.key_mask.to(device)
        return moved

    @property
    def reach(self) -> int:
        """How many keys, from the first, any query can see: the unfilled part of a static cache lies beyond."""
        seqlen_q, seqlen_k = self.shape[-2:]
        return seqlen_k if self.right is None else max(0, min(seqlen_k, seqlen_q + self.shift + self.right))

    def dense(self, device: torch.device, documents: Tensor | None = None) -> Tensor:
        """The entries: bool (batch, 1, seqlen_q, seqlen_k); `documents` (batch, seqlen_q) replaces the rule's own."""
        batch, _, seqlen_q, seqlen_k = self.shape
        i = torch.arange(seqlen_q, device=device)[:, None] + self.shift
        j = torch.arange(seqlen_k, device=device)
        seen = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
        if self.left is not None:
            seen = seen & (j - i >= -self.left)
        if self.right is not None:
            seen = seen & (j - i <= self.right)
        if self.key_mask is not None:
            # Beyond the reach the band hides all keys, so any fill value will do.
            seen = seen & pad(self.key_mask, (0, seqlen_k - self.key_mask.shape[1]))[:, None, None, :]
        documents = self.documents if documents is None else documents
        if documents is not None:
            key_documents = pad(documents, (0, seqlen_k - seqlen_q))
            seen = seen & (documents[:, None, :, None] == key_documents[:, None, None, :])
        return seen

    def documents_with(self, position_ids: Tensor | None) -> Tensor | None:
        """(batch, seqlen_q), the rule's own documents or those of restarting `position_ids`; None = one document.

        A document starts where a position is not its predecessor plus one, which is transformers' own convention; it
        holds here for causal masks over whole sequences without padding. While compiling the values are not known,
        so that position_ids always count as documents.
        """
        batch, _, seqlen_q, _ = self.shape
        is_causal_grid = self.right == 0 and self.shift == 0
        if self.documents is not None or self.key_mask is not None or not (self.may_be_packed and is_causal_grid):
            return self.documents
        if position_ids is None or position_ids.dim() != 2 or seqlen_q < 2:
            return None
        if position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != seqlen_q:
            return None
        if self._restarts is None or self._restarts[0] is not position_ids:
            restarts = torch.diff(position_ids, dim=1) != 1
            documents = pad(restarts.cumsum(dim=1), (1, 0)).expand(batch, -1)
            if torch.compiler.is_compiling():
                return documents
            self._restarts = (position_ids, documents if bool(restarts.any()) else None)
        return self._restarts[1]

    def packing(self, position_ids: Tensor | None) -> Packing | None:
        """How to run this mask as packed sequences, or None where that is not possible or nothing would be packed.

        Reads values, hence synchronises with a GPU; every layer of one forward shares the answer.
        """
        documents = self.documents_with(position_ids)
        if self._packing is None or self._packing[0] is not documents:
            self._packing = (documents, self._find_packing(documents))
        return self._packing[1]

    def _find_packing(self, documents: Tensor | None) -> Packing | None:
        seqlen_q = self.shape[2]
        if self.reach != seqlen_q or self.shift != 0 or seqlen_q == 0:
            return None
        if documents is not None:
            return _pack_documents(documents) if self.key_mask is None else None
        return None if self.key_mask is None else self._pack_padding()

    def _pack_padding(self) -> Packing | None:
        key_mask = self.key_mask
        assert key_mask is not None
        if self.left is not None or self.right not in (None, 0):
            # Distances count here beyond their order, so a gap between real tokens must not be packed away.
            before = pad(key_mask[:, :-1], (1, 0))
            num_runs = (key_mask & ~before).sum(dim=1)
            if int(num_runs.max()) > 1:
                return None
        lengths = key_mask.sum(dim=1)
        indices = key_mask.flatten().nonzero().flatten()
        return Packing(indices, _cumulate(lengths), int(lengths.max()))


class BandMask(Tensor):
    """The tensor that a model sees: bool, of the shape of its `rule`, without entries until somebody asks."""

    rule: BandRule

    @staticmethod
    def __new__(cls: type[BandMask], rule: BandRule, device: torch.device) -> BandMask:
        mask = Tensor._make_wrapper_subclass(cls, rule.shape, dtype=torch.bool, device=device)
        mask.rule = rule
        return mask

    def __init__(self, *_args: Any) -> None:
        """All state is set in `__new__`, as PyTorch wants it."""

    def __repr__(self, **_kwargs: Any) -> str:  # type: ignore[override]
        return f"BandMask({self.rule!r}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            return BandMask(args[0].rule, args[0].device)
        if func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            device = kwargs.get("device")
            device = args[0].device if device is None else torch.device(device)
            return BandMask(args[0].rule.to(device), device)
        args, kwargs = tree_map(
            lambda value: value.rule.dense(value.device) if isinstance(value, BandMask) else value, (args, kwargs)
        )
        return func(*args, **kwargs)


def _pack_documents(documents: Tensor) -> Packing | None:
    """None where a document is scattered: only sorted numbers are known to be contiguous."""
    batch, seqlen = documents.shape
    if bool((documents[:, 1:] < documents[:, :-1]).any()):
        return None
    starts = torch.ones(batch, seqlen, dtype=torch.bool, device=documents.device)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = starts.flatten().nonzero().flatten()
    lengths = torch.diff(first, append=first.new_full((1,), batch * seqlen))
    return Packing(None, _cumulate(lengths), int(lengths.max()))


def _cumulate(lengths: Tensor) -> Tensor:
    return pad(lengths.cumsum(dim=0), (1, 0)).to(torch.int32)
