"""A mask as kernels read it: per row of tiles a list of the kept ones, and the visible pairs of PARTIAL tiles as bits.

A kernel's tiles need not be the mask's blocks. Whatever describes the pairs (a formula, ids, somebody's function), a
kernel sees bits alone; PARTIAL tiles that look alike share them, so that a causal mask has one pattern at any length.
Shapes: R rows of tiles of all planes; T kept tiles; P different patterns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.block_mask.lists import AND, EMPTY, FULL, UNSETTLED, BlockLists, cut_rows
from tilestream.block_mask.patterns import Grid, band_lists, pairs_of, settle
from tilestream.block_mask.rules import Banded, Both
from tilestream.spec import Band

__all__ = ["TileLists", "tile_lists", "turned"]

_WORD = 32
_PAIRS_AT_ONCE = 1 << 21
# Lists live as long as their mask does.
_MADE: weakref.WeakKeyDictionary[BlockMask, dict[tuple[object, ...], TileLists]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class TileLists:
    """Row r keeps the tiles ``offsets[r] : offsets[r + 1]``: PARTIAL ones first, each kind from left to right.

    A row is one of queries and its tiles are columns of keys, or by keys the other way round; bits are always those of
    (query, key). Plane p has the rows ``p * num_rows`` on; batch entry b and query head h read the plane
    ``b * plane_strides[0] + h * plane_strides[1]``.
    """

    tile: tuple[int, int]  # queries, keys
    num_rows: int  # of one plane
    plane_strides: tuple[int, int]
    offsets: Tensor  # (R + 1,) int32
    columns: Tensor  # (T,) int32
    patterns: Tensor  # (T,) int32: which of `bits` a PARTIAL tile has; -1 of a FULL one
    bits: Tensor  # (P, queries, words) int32: pair (i, j) is bit j % 32 of word j // 32; 0 beyond the lengths
    order: Tensor  # (R,) int32: rows of each plane, those with most tiles first; numbered within the plane


def tile_lists(
    mask: BlockMask,
    tile: tuple[int, int],
    device: torch.device,
    *,
    band: Band | None = None,
    shift: int = 0,
    by_keys: bool = False,
) -> TileLists:
    """The lists of a mask for a kernel's tiles; made once for each mask, and kept with it.

    Args:
        mask: of any block size.
        tile: (queries, keys) of a kernel's tile.
        device: where the lists go.
        band, shift: a band that hides pairs too, and where its queries stand.
        by_keys: rows are tiles of keys, as dk and dv want them.

    Cost: O(tiles) and the pairs of PARTIAL tiles in time, on the CPU, in pieces; 8 bytes per kept tile and a bit for
        each pair of a different pattern in memory.
    """
    band = Band(None, None) if band is None else band
    made = _MADE.setdefault(mask, {})
    key = (tile, device, band, shift if band != Band(None, None) else 0, by_keys)
    if (found := made.get(key)) is None:
        found = made[key] = _lists_of(_cut_by(_retiled(mask, tile), band, shift), by_keys, device)
    return found


def _retiled(mask: BlockMask, tile: tuple[int, int]) -> BlockMask:
    """The same mask in other blocks."""
    if mask.block_size == tile:
        return mask
    grid = Grid(mask.seqlen_q, mask.seqlen_k, *tile, mask.grid.shift)
    num_planes = mask.planes[0] * mask.planes[1]

    def pieces() -> Iterator[BlockLists]:
        for plane in range(num_planes):
            for rows in cut_rows(grid.num_rows, max(grid.num_columns, mask.grid.num_columns)):
                yield BlockLists.from_kinds(_kinds_of(mask, plane * mask.grid.num_rows, grid, rows))

    lists = BlockLists.stack(grid.num_columns, pieces())
    return BlockMask(grid, mask.planes, settle(grid, mask.planes, lists, mask.rule), mask.rule)


def _kinds_of(mask: BlockMask, first: int, grid: Grid, rows: slice) -> Tensor:
    """int8 (rows, columns): FULL or EMPTY where all blocks that a tile touches are; UNSETTLED otherwise."""
    top, bottom = _touched(rows, grid.block_m, mask.grid.block_m, grid.seqlen_q)
    left, right = _touched(slice(0, grid.num_columns), grid.block_n, mask.grid.block_n, grid.seqlen_k)
    start = int(top[0])
    kinds = mask.lists.to_kinds(slice(first + start, first + int(bottom[-1])))
    sums = torch.zeros(2, kinds.shape[0] + 1, kinds.shape[1] + 1, dtype=torch.int32)
    sums[:, 1:, 1:] = torch.stack([kinds == FULL, kinds != EMPTY]).cumsum(1, dtype=torch.int32).cumsum(2)
    upper, lower = sums[:, top - start], sums[:, bottom - start]
    num_full, num_kept = lower[:, :, right] - lower[:, :, left] - upper[:, :, right] + upper[:, :, left]
    num_blocks = (bottom - top)[:, None] * (right - left)
    found = torch.where(num_full == num_blocks, FULL, torch.where(num_kept == 0, EMPTY, UNSETTLED))
    return found.to(torch.int8)


def _touched(tiles: slice, tile: int, block: int, length: int) -> tuple[Tensor, Tensor]:
    """[first, last) of the blocks that each tile along one side touches."""
    starts = torch.arange(tiles.start, tiles.stop) * tile
    ends = (starts + tile).clamp_max(length)
    return starts // block, (ends + block - 1) // block


def _cut_by(mask: BlockMask, band: Band, shift: int) -> BlockMask:
    """The mask, and what the band hides hidden."""
    if band == Band(None, None):
        return mask
    grid = mask.grid
    lists = band_lists(Grid(grid.seqlen_q, grid.seqlen_k, grid.block_m, grid.block_n, shift), band)
    lists = BlockLists.stack(grid.num_columns, [lists] * (mask.planes[0] * mask.planes[1]))
    rule = Both(mask.rule, Banded(band, shift))
    return BlockMask(grid, mask.planes, settle(grid, mask.planes, mask.lists.combine(lists, AND), rule), rule)


def _lists_of(mask: BlockMask, by_keys: bool, device: torch.device) -> TileLists:
    """Of a mask whose blocks are the tiles."""
    grid, (batch, num_heads) = mask.grid, mask.planes
    lists = mask.transposed_lists if by_keys else mask.lists
    num_rows = grid.num_columns if by_keys else grid.num_rows
    counts = lists.stops - lists.starts
    rows = torch.arange(lists.num_rows).repeat_interleave(lists.offsets.diff()).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts - lists.starts).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - first
    is_full = lists.kinds.repeat_interleave(counts) == FULL
    # PARTIAL ones first within each row; the order from left to right stays.
    taken = (rows * 2 + is_full).argsort(stable=True)
    rows, columns, is_full = rows[taken], columns[taken], is_full[taken]
    points = rows * lists.num_columns + columns
    if by_keys:
        plane, n = rows // max(1, num_rows), rows % max(1, num_rows)
        points = (plane * grid.num_rows + columns) * grid.num_columns + n
    patterns = torch.full(points.shape, -1, dtype=torch.int32)
    patterns[~is_full], bits = _patterns_of(mask, points[~is_full])
    lengths = torch.bincount(rows, minlength=lists.num_rows)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    order = lengths.view(batch * num_heads, num_rows).argsort(dim=1, descending=True, stable=True).flatten()
    strides = (num_heads if batch > 1 else 0, 1 if num_heads > 1 else 0)
    tensors = (x.to(device=device, dtype=torch.int32) for x in (offsets, columns, patterns, bits, order))
    return TileLists(grid.block_size, num_rows, strides, *tensors)


@dataclass
class _Patterns:
    """Different patterns, each once."""

    numbers: dict[int, int] = field(default_factory=dict)
    found: list[Tensor] = field(default_factory=list)

    def number(self, fingerprint: int, words: Tensor) -> int:
        """Of a pattern: its own, or that of an equal one."""
        number = self.numbers.setdefault(fingerprint, len(self.found))
        if number == len(self.found) or not torch.equal(self.found[number], words):
            number = len(self.found)
            self.found.append(words)
        return number


def _patterns_of(mask: BlockMask, points: Tensor) -> tuple[Tensor, Tensor]:
    """int32 (T,) and (P, queries, words): which pattern each PARTIAL tile has, and all patterns."""
    height, num_words = mask.grid.block_m, -(-mask.grid.block_n // _WORD)
    patterns = _Patterns()
    pieces = [torch.empty(0, dtype=torch.int32)]
    for some in points.split(max(1, _PAIRS_AT_ONCE // (mask.grid.block_m * mask.grid.block_n))):
        visible, exists = pairs_of(mask.grid, mask.planes, some, mask.rule)
        words = _words_of(visible & exists).flatten(1)
        fingerprints, which = _fingerprints(words).unique(return_inverse=True)
        example = torch.empty(len(fingerprints), dtype=torch.int64)
        example[which] = torch.arange(len(some))
        if not torch.equal(words, words[example[which]]):
            # Different patterns of one fingerprint, which nobody has seen: each by itself.
            which = example = torch.arange(len(some))
            fingerprints = _fingerprints(words)
        numbers = [patterns.number(*pair) for pair in zip(fingerprints.tolist(), words[example], strict=True)]
        pieces.append(torch.tensor(numbers, dtype=torch.int32)[which])
    bits = torch.stack(patterns.found) if patterns.found else torch.empty(0, height * num_words, dtype=torch.int64)
    return torch.cat(pieces), bits.view(-1, height, num_words)


def _fingerprints(words: Tensor) -> Tensor:
    """int64 (K,) of int64 (K, words of a tile): the same for equal ones."""
    generator = torch.Generator().manual_seed(0)
    return (words * torch.randint(-(2**62), 2**62, words.shape[1:], generator=generator)).sum(1)


def turned(bits: Tensor, num_keys: int) -> Tensor:
    """int32 (P, keys, words of queries) of `TileLists.bits`, (P, queries, words of keys)."""
    pieces = [torch.empty(0, num_keys, -(-bits.shape[1] // _WORD), dtype=torch.int32)]
    place = torch.arange(num_keys)
    for some in bits.split(max(1, _PAIRS_AT_ONCE // (bits.shape[1] * num_keys))):
        pairs = (some[:, :, place // _WORD] >> (place % _WORD).to(torch.int32)) & 1
        pieces.append(_words_of(pairs.transpose(1, 2).bool()).to(torch.int32))
    return torch.cat(pieces)


def _words_of(pairs: Tensor) -> Tensor:
    """int64 (K, queries, words), each an int32's worth, of bool (K, queries, keys)."""
    num_words = -(-pairs.shape[2] // _WORD)
    padded = torch.zeros(*pairs.shape[:2], num_words * _WORD, dtype=torch.uint8)
    padded[:, :, : pairs.shape[2]] = pairs
    octets = padded.view(*pairs.shape[:2], num_words * 4, 8) << torch.arange(8, dtype=torch.uint8)
    return octets.sum(3, dtype=torch.uint8).view(torch.int32).to(torch.int64)
