"""Block masks by name, for any lengths: what the cases of block-sparse attention have, and their plain definitions."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream import BlockMask

__all__ = ["MASKS", "PATTERNS", "Pattern", "mask_of", "plain"]


class Pattern(NamedTuple):
    """A pattern: its maker, given (seqlen_q, seqlen_k) and keywords, and whether query position p sees key j."""

    make: Callable[..., BlockMask]
    sees: Callable[[Tensor, Tensor], Tensor]


# Position p is i + shift.
PATTERNS: dict[str, Pattern] = {
    "everything": Pattern(BlockMask.from_band, lambda p, j: (p == p) & (j == j)),
    "causal": Pattern(functools.partial(BlockMask.from_band, causal=True), lambda p, j: j <= p),
    "window": Pattern(
        functools.partial(BlockMask.from_band, window=(20, 7)), lambda p, j: (p - j <= 20) & (j - p <= 7)
    ),
    "causal_window": Pattern(
        functools.partial(BlockMask.from_band, causal=True, window=(3, 9)), lambda p, j: (p - j <= 3) & (j <= p)
    ),
    "dilated": Pattern(
        functools.partial(BlockMask.dilated, window=(4, 2), dilation=3),
        lambda p, j: ((p - j) % 3 == 0) & (p - j <= 12) & (j - p <= 6),
    ),
    "strided": Pattern(
        functools.partial(BlockMask.strided, stride=9), lambda p, j: (j <= p) & ((p - j <= 9) | ((p - j) % 9 == 0))
    ),
    "fixed": Pattern(
        functools.partial(BlockMask.fixed, stride=12, num_summary=2),
        lambda p, j: (j <= p) & ((p // 12 == j // 12) | (j % 12 >= 10)),
    ),
    "local_global": Pattern(
        functools.partial(BlockMask.local_global, window=(5, 5), global_tokens=3),
        lambda p, j: ((p - j).abs() <= 5) | (j < 3) | ((p >= 0) & (p < 3)),
    ),
    "prefix_lm": Pattern(functools.partial(BlockMask.prefix_lm, prefix_lengths=21), lambda p, j: (j <= p) | (j < 21)),
}


def plain(name: str, seqlen_q: int, seqlen_k: int, shift: int | None = None) -> Tensor:
    """bool (seqlen_q, seqlen_k), pair by pair from the definition."""
    shift = seqlen_k - seqlen_q if shift is None else shift
    p, j = torch.arange(seqlen_q)[:, None] + shift, torch.arange(seqlen_k)
    # A global query stands at a key that there is.
    found = PATTERNS[name].sees(p, j)
    return found.expand(seqlen_q, seqlen_k)


def _predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i * 7 + j * j + h) % 5 < 2


class _Sizes(NamedTuple):
    seqlen_q: int
    seqlen_k: int
    batch: int
    num_heads: int
    generator: torch.Generator

    def blocks(self, batch: int, num_heads: int, block_size: tuple[int, int], fraction: float = 0.4) -> BlockMask:
        """Random whole blocks."""
        sides = (-(-length // side) for length, side in zip(self[:2], block_size, strict=True))
        kept = torch.rand(batch, num_heads, *sides, generator=self.generator) < fraction
        return BlockMask.from_blocks(kept, *self[:2], block_size=block_size)

    def documents(self, block_size: int) -> BlockMask:
        """Sorted ids, others in every batch entry; some documents have no queries, or no keys."""
        ids = [torch.randint(0, 6, (self.batch, length), generator=self.generator).sort().values for length in self[:2]]
        return BlockMask.from_document_ids(*ids, block_size=block_size)

    def bits(self, batch: int, num_heads: int, block_size: int) -> BlockMask:
        """Random pairs, and some rows without any."""
        shown = torch.rand(batch, num_heads, *self[:2], generator=self.generator) < 0.5
        shown[..., ::7, :] = False
        return BlockMask.from_dense(shown, block_size=block_size)


def _pattern(name: str, block_size: int | tuple[int, int]) -> Callable[[_Sizes], BlockMask]:
    return lambda sizes: PATTERNS[name].make(*sizes[:2], block_size=block_size)


_MAKERS: dict[str, Callable[[_Sizes], BlockMask]] = {
    "window": _pattern("window", (16, 32)),
    "strided": _pattern("strided", 16),
    "local_global": _pattern("local_global", (32, 16)),
    "documents": lambda sizes: sizes.documents(32),
    "prefixes": lambda sizes: BlockMask.prefix_lm(
        *sizes[:2], prefix_lengths=[5 * b for b in range(sizes.batch)], block_size=16
    ),
    "bigbird": lambda sizes: BlockMask.bigbird(*sizes[:2], num_random=1, block_size=16),
    "butterfly": lambda sizes: BlockMask.butterfly(*sizes[:2], shift=0, block_size=(8, 16)),
    "v1": lambda sizes: sizes.blocks(1, 1, (16, 256)),
    "planes": lambda sizes: sizes.blocks(sizes.batch, sizes.num_heads, (32, 16)),
    "predicate": lambda sizes: BlockMask.from_predicate(
        _predicate, *sizes[:2], num_heads=sizes.num_heads, block_size=(16, 8)
    ),
    "bits": lambda sizes: sizes.bits(sizes.batch, 1, 32),
    "combined": lambda sizes: (
        (sizes.documents(16) | sizes.blocks(1, sizes.num_heads, (16, 16))) & _pattern("fixed", 16)(sizes)
    ),
    "transposed": lambda sizes: BlockMask.dilated(
        sizes.seqlen_k, sizes.seqlen_q, window=(3, 8), dilation=2, block_size=(32, 16)
    ).transpose(),
    "nothing": lambda sizes: sizes.blocks(1, 1, (16, 16), 0.0),
    "everything": _pattern("everything", 64),
}
MASKS = tuple(_MAKERS)
_MAKERS["large_blocks"] = lambda sizes: _pattern("local_global", (700, 700))(sizes)


@functools.cache
def mask_of(name: str, seqlen_q: int, seqlen_k: int, batch: int, num_heads: int) -> BlockMask:
    """The mask called `name`; the same one for the same arguments."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return _MAKERS[name](_Sizes(seqlen_q, seqlen_k, batch, num_heads, generator))
