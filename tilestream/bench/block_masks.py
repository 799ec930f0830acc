"""Block masks of benchmarks, by name: what a case says of its mask, and the dense call that it is compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tilestream.block_mask import BlockMask
from tilestream.errors import ArgumentError

__all__ = ["DENSITIES", "MASKS", "band_of", "kept_name", "mask_named"]

# One in so many blocks of each row of blocks, and of each column.
DENSITIES = (2, 4, 8, 16)
_SEED = 0
_NUM_DOCUMENTS = 8
# In blocks.
_WINDOW, _SIDE, _STRIDE = 8, 4, 4


def kept_name(one_in: int) -> str:
    """The name of a random mask that keeps one in so many blocks."""
    return f"kept_1/{one_in}"


def _random(tokens: int, block: int, one_in: int) -> BlockMask:
    """Whole blocks: as many in every row as in every column, at random places that do not change.

    Shifted diagonals of blocks have that, and still have it when rows and columns change places.
    """
    side = -(-tokens // block)
    if side % one_in != 0:
        raise ArgumentError(f"{side} blocks in a row cannot be kept one in {one_in}; make tokens a multiple.")
    generator = torch.Generator().manual_seed(_SEED)
    rows, columns, diagonals = (torch.randperm(side, generator=generator) for _ in range(3))
    places = (torch.arange(side)[:, None] + diagonals[: side // one_in]) % side
    kept = torch.zeros(side, side, dtype=torch.bool)
    kept[rows[:, None], columns[places]] = True
    return BlockMask.from_blocks(kept, tokens, block_size=block)


def _documents(tokens: int, block: int) -> BlockMask:
    """Of different lengths, which know nothing of blocks."""
    ends = torch.rand(_NUM_DOCUMENTS - 1, generator=torch.Generator().manual_seed(_SEED)).mul(tokens).long().sort()
    return BlockMask.from_document_ids(torch.bucketize(torch.arange(tokens), ends.values, right=True), block_size=block)


def _local_global(tokens: int, block: int) -> BlockMask:
    window = (_SIDE * block, _SIDE * block)
    return BlockMask.local_global(tokens, window=window, global_tokens=block // 2, block_size=block)


# Made of (tokens, block).
MASKS: dict[str, Callable[[int, int], BlockMask]] = {
    **{kept_name(one_in): functools.partial(_random, one_in=one_in) for one_in in DENSITIES},
    "butterfly": lambda tokens, block: BlockMask.butterfly(tokens, block_size=block),
    "causal": lambda tokens, block: BlockMask.from_band(tokens, causal=True, block_size=block),
    "window": lambda tokens, block: BlockMask.from_band(
        tokens, causal=True, window=(_WINDOW * block - 1, 0), block_size=block
    ),
    "documents": _documents,
    "local_global": _local_global,
    "strided": lambda tokens, block: BlockMask.strided(tokens, stride=_STRIDE * block, block_size=block),
}


@functools.cache
def mask_named(name: str, seqlen_q: int, seqlen_k: int, block: int) -> BlockMask:
    """The mask called `name` over as many keys as queries, in blocks of `block`; always the same one.

    Raises:
        ArgumentError: there is none; the message says why.
    """
    if name not in MASKS:
        raise ArgumentError(f"mask {name!r} does not exist; choose from {', '.join(MASKS)}.")
    if seqlen_q != seqlen_k:
        raise ArgumentError(f"masks of benchmarks are square, got {seqlen_q} queries and {seqlen_k} keys.")
    return MASKS[name](seqlen_q, block)


def band_of(name: str, block: int) -> tuple[bool, tuple[int, int] | None]:
    """(causal, window) of the dense call to compare with: what shows the same pairs, if a band does, else all pairs."""
    return name in ("causal", "window"), (_WINDOW * block - 1, 0) if name == "window" else None
