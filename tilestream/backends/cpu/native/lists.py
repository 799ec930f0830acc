"""A block mask as the kernels read it: the lists of its tiles, and which tiles those are (src/lists.h)."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.block_mask.tiles import TileLists, tile_lists
from tilestream.problem import Problem

__all__ = ["LISTS_BYTES", "ListTiles", "lists_of", "tiles_of"]

_CPU = torch.device("cpu")
# Rows that fill the lanes of a panel on most instruction sets.
_LANES = 32
# Keys: a word of a PARTIAL tile's bits; what a counter of dropout has of them; the most of a tile.
_WORD, _UNIT, _WIDEST = 32, 4, 256
_FIELDS = 11
LISTS_BYTES = 8 * _FIELDS
# Lists as the library takes them go with what they point to.
_PACKED: weakref.WeakKeyDictionary[TileLists, dict[int, Tensor]] = weakref.WeakKeyDictionary()


class ListTiles(NamedTuple):
    """Tiles of a call with a block mask."""

    tile: tuple[int, int]  # queries, keys
    packed_heads: int  # query heads whose rows a task holds: all of a KV head, or 1


def tiles_of(mask: BlockMask, group: int, most_rows: int) -> ListTiles:
    """Blocks of the mask where they fit, pieces of them or several where they do not.

    Args:
        mask: of any block size.
        group: query heads of a KV head. They are packed where they share a plane and a task has room for them.
        most_rows: packed rows that a task has room for.
    """
    block_m, block_n = mask.block_size
    packed_heads = group if mask.num_heads == 1 and group <= most_rows else 1
    most = most_rows // packed_heads
    if block_m > most:
        tile_m = _part_of(block_m, most, 1)
    else:
        tile_m = block_m * min(-(-_LANES // (block_m * packed_heads)), most // block_m)
    if block_n % _UNIT:
        tile_n = _WORD
    elif block_n < _WORD:
        tile_n = block_n * -(-_WORD // block_n)
    else:
        tile_n = block_n if block_n <= _WIDEST else _part_of(block_n, _WIDEST, _UNIT)
    return ListTiles((tile_m, tile_n), packed_heads)


def _part_of(block: int, most: int, unit: int) -> int:
    """The largest of equal parts of a block that are multiples of `unit`, or `most` where those are less than half."""
    parts = range(-(-block // most), 2 * block // most + 1)
    return next((block // k for k in parts if block % (k * unit) == 0), most)


def lists_of(problem: Problem, most_rows: int) -> Tensor:
    """The struct that a call with a block mask points to, int64 (fields,); it lives as long as the mask does.

    The band of a dense call is in the lists. Sequences of a packed call each have another shift, and it is not.
    """
    mask = problem.block_mask
    assert mask is not None
    # Another length would be wrong addresses.
    lengths = (problem.seqlen_q, problem.seqlen_k)
    assert problem.layout != "dense" or (mask.seqlen_q, mask.seqlen_k) == lengths, lengths
    tile, packed_heads = tiles_of(mask, problem.group, most_rows)
    band = problem.spec.band if problem.layout == "dense" else None
    lists = tile_lists(mask, tile, _CPU, band=band, shift=problem.shift or 0)
    packed = _PACKED.setdefault(lists, {})
    if (found := packed.get(packed_heads)) is None:
        tensors = (lists.offsets, lists.columns, lists.patterns, lists.order, lists.bits)
        addresses = [x.data_ptr() for x in tensors]
        numbers = [*addresses, *tile, lists.num_rows, *lists.plane_strides, packed_heads]
        found = packed[packed_heads] = torch.tensor(numbers, dtype=torch.int64)
    return found
