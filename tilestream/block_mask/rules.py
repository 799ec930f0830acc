"""Which pairs of a mask are visible, one by one: cheap descriptions, each right for every pair of its mask.

A rule is called as a FlexAttention ``mask_mod``: batch entry b, query head h, query i and key j are integer tensors
that broadcast against each other, and the answer is bool of their joint shape (or of one that broadcasts to it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tilestream.block_mask.lists import EMPTY, FULL, PARTIAL, BlockLists
from tilestream.spec import Band

__all__ = [
    "Banded",
    "Bits",
    "Both",
    "Dilated",
    "Documents",
    "Either",
    "Fixed",
    "InBlocks",
    "Predicate",
    "Prefix",
    "Rule",
    "Strided",
    "Tokens",
    "Transposed",
    "Within",
    "tabulated",
]


class Rule(Protocol):
    """See the module's docstring."""

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """bool, whether query i of head h and batch entry b sees key j."""
        ...


def _of_entry(x: Tensor, b: Tensor, place: Tensor) -> Tensor:
    """``x[b, place]``; of x[0] where x has one entry for all."""
    x = x.to(place.device)
    return x[0][place] if x.shape[0] == 1 else x[b, place]


@dataclass(frozen=True)
class Banded:
    """The band of `spec.Band`, with a shift of its own."""

    band: Band
    shift: int

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        distance = j - (i + self.shift)
        is_seen = torch.ones_like(distance, dtype=torch.bool)
        if self.band.left is not None:
            is_seen = is_seen & (distance >= -self.band.left)
        if self.band.right is not None:
            is_seen = is_seen & (distance <= self.band.right)
        return is_seen


@dataclass(frozen=True)
class Dilated:
    """Every `dilation`-th key of a band."""

    band: Band
    dilation: int
    shift: int

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        return Banded(self.band, self.shift)(b, h, i, j) & ((j - (i + self.shift)) % self.dilation == 0)


@dataclass(frozen=True)
class Strided:
    """The last `stride` keys and the query's own, and every `stride`-th before; causal."""

    stride: int
    shift: int

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        back = i + self.shift - j
        return (back >= 0) & ((back <= self.stride) | (back % self.stride == 0))


@dataclass(frozen=True)
class Fixed:
    """Keys of the query's own part of `stride`, and the last `num_summary` of every part; causal."""

    stride: int
    num_summary: int
    shift: int

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        place = i + self.shift
        own = place.div(self.stride, rounding_mode="floor") == j.div(self.stride, rounding_mode="floor")
        return (j <= place) & (own | self.is_summary(j))

    def is_summary(self, j: Tensor) -> Tensor:
        """bool, shaped as `j`: the keys that later parts see."""
        return j % self.stride >= self.stride - self.num_summary


@dataclass(frozen=True)
class Documents:
    """Queries see keys of their own document: int64 ids (B | 1, seqlen_q) and (B | 1, seqlen_k)."""

    ids_q: Tensor
    ids_k: Tensor

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        return _of_entry(self.ids_q, b, i) == _of_entry(self.ids_k, b, j)


@dataclass(frozen=True)
class Prefix:
    """The first `lengths` (B | 1, 1) keys are visible to all."""

    lengths: Tensor

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        return (j < _of_entry(self.lengths, b, torch.zeros_like(j))) & (i >= 0)


@dataclass(frozen=True)
class Tokens:
    """Chosen queries see everything, chosen keys are seen by all: bool (1, seqlen_q) and (1, seqlen_k)."""

    queries: Tensor
    keys: Tensor

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        return _of_entry(self.queries, b, i) | _of_entry(self.keys, b, j)


@dataclass(frozen=True)
class Predicate:
    """A function of the caller, which is told batch entry 0 and head 0 where the mask is one for all."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    per_batch: bool
    per_head: bool

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        b = b if self.per_batch else torch.zeros_like(b)
        h = h if self.per_head else torch.zeros_like(h)
        return self.function(b, h, i, j)


@dataclass(frozen=True)
class InBlocks:
    """All pairs of the kept blocks. Planes are (num_batch, num_heads), each 1 or all of them."""

    lists: BlockLists
    planes: tuple[int, int]
    block_size: tuple[int, int]
    table: Tensor | None = None  # the kind of every block, where that is wanted; see `tabulated`

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        kinds = self.kinds(b, h, i, j)
        return kinds.ne(EMPTY)

    def places(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """int64, where the pairs' blocks are on the line of the lists."""
        num_rows = self.lists.num_rows // max(1, self.planes[0] * self.planes[1])
        plane = (b if self.planes[0] > 1 else 0) * self.planes[1] + (h if self.planes[1] > 1 else 0)
        return (plane * num_rows + i // self.block_size[0]) * self.lists.num_columns + j // self.block_size[1]

    def kinds(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """int8, the kinds of the pairs' blocks."""
        places = self.places(b, h, i, j)
        return self.lists.kinds_at(places) if self.table is None else self.table[places]


@dataclass(frozen=True)
class Within:
    """What `rule` shows in PARTIAL blocks and everything in FULL ones, whatever the rule says elsewhere."""

    blocks: InBlocks
    rule: Rule

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        kinds = self.blocks.kinds(b, h, i, j)
        return kinds.eq(FULL) | (kinds.eq(PARTIAL) & self.rule(b, h, i, j))


@dataclass(frozen=True)
class Bits:
    """Stored bits of PARTIAL blocks: uint8 (num_partial, bytes of a block), eight pairs a byte, row after row."""

    blocks: InBlocks
    slots: Tensor  # int64 (num_partial,), sorted: where each block is on the line of the lists
    bits: Tensor
    table: Tensor | None = None  # the slot of every block, where that is wanted; see `tabulated`

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`; elsewhere than in PARTIAL blocks the answer means nothing."""
        bits, places = self.bits.to(i.device), self.blocks.places(b, h, i, j)
        if self.table is None:
            slot = torch.searchsorted(self.slots.to(i.device), places).clamp_max(len(self.slots) - 1)
        else:
            slot = self.table[places].to(torch.int64)
        block_m, block_n = self.blocks.block_size
        pair = i % block_m * block_n + j % block_n
        is_set: Tensor = (bits[slot, pair // 8] >> (pair % 8)) & 1
        return is_set.bool()


@dataclass(frozen=True)
class Both:
    """What both rules show."""

    one: Rule
    other: Rule

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        return self.one(b, h, i, j) & self.other(b, h, i, j)


@dataclass(frozen=True)
class Either:
    """What one of the rules shows."""

    one: Rule
    other: Rule

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        return self.one(b, h, i, j) | self.other(b, h, i, j)


@dataclass(frozen=True)
class Transposed:
    """Queries and keys exchanged."""

    rule: Rule

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """See `Rule`."""
        return self.rule(b, h, j, i)


def tabulated(rule: Any, device: torch.device) -> Any:
    """The same rule on `device`, with tables instead of searches: what a compiler can trace. Bytes for every block."""
    if isinstance(rule, Tensor):
        return rule.to(device)
    if isinstance(rule, BlockLists) or not dataclasses.is_dataclass(rule):
        return rule
    if isinstance(rule, InBlocks):
        kinds = rule.lists.to_kinds(slice(0, rule.lists.num_rows))
        return dataclasses.replace(rule, table=kinds.flatten().to(device))
    changes = {field.name: tabulated(getattr(rule, field.name), device) for field in dataclasses.fields(rule)}
    if isinstance(rule, Bits):
        table = torch.zeros(rule.blocks.lists.num_rows * rule.blocks.lists.num_columns, dtype=torch.int32)
        table[rule.slots] = torch.arange(len(rule.slots), dtype=torch.int32)
        changes["table"] = table.to(device)
    return dataclasses.replace(rule, **changes)  # type: ignore[type-var]
