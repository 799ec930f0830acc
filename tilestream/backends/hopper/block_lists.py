"""A block mask as the Hopper kernels read it: `block_mask.tiles.TileLists`, and in which order programs take rows.

Nothing but bits hides anything: a tile that the end of the keys cuts short has bits. In the forward no row of tiles is
empty: one that keeps nothing has a tile beyond all others, which TMA fills with zeros, with bits of which none is set.
Shapes: U units, rows of tiles of all heads; T kept tiles; P different patterns.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.block_mask.tiles import TileLists, tile_lists, turned
from tilestream.problem import Problem

__all__ = ["KEY_RECORD", "RECORD", "KeyLists", "Lists", "key_lists_of", "lists_of"]

# Numbers of a unit.
RECORD, KEY_RECORD = 8, 4
_WORD = 32
# Half of Hopper's L2 cache.
_CACHED_BYTES = 24 << 20


class Lists(NamedTuple):
    """Of all query heads, on the device; int32."""

    # (U * RECORD,): batch entry, query head, KV head, first query, place of the first tile, number of PARTIAL tiles,
    # number of tiles. In the order in which programs take them.
    units: Tensor
    key_starts: Tensor  # (T,): first key of a tile; PARTIAL tiles first in each row
    patterns: Tensor  # (T,): -1 of a FULL tile
    bits: Tensor  # (P, queries, words), as of `TileLists`
    # (heads of all batch entries, row tiles, 4), for the exact kernel: place of the first tile, their number, KV head.
    rows: Tensor
    # Whether any pair is hidden in a tile that is loaded, but keys beyond the last one, which are zeros.
    hides: bool

    def for_exact(self) -> dict[str, Tensor]:
        """What the exact kernel reads, by names of `triton.call.Tensors`."""
        return {
            "list_rows": self.rows,
            "list_starts": self.key_starts,
            "list_patterns": self.patterns,
            "list_bits": self.bits,
        }


class KeyLists(NamedTuple):
    """Of all heads by tiles of keys, on the device; int32."""

    # (U * KEY_RECORD,): batch entry, KV head, first key. In the order in which programs take them.
    units: Tensor
    # (query heads of all batch entries, key tiles, 4): place of the first row tile, number of PARTIAL ones, of all.
    lists: Tensor
    row_tiles: Tensor  # (T,): which row tile of its head; PARTIAL ones first
    patterns: Tensor  # (T,): -1 of a FULL tile
    bits: Tensor  # (P, keys, words): pair (i, j) is bit i % 32 of word i // 32
    hides: bool  # as of `Lists`

    def for_exact(self) -> dict[str, Tensor]:
        """What the exact kernel reads, by names of `triton.call.Tensors`."""
        return {
            "list_rows": self.lists,
            "list_starts": self.row_tiles,
            "list_patterns": self.patterns,
            "list_bits": self.bits,
        }


def lists_of(
    problem: Problem, mask: BlockMask, tile: tuple[int, int], num_processors: int, device: torch.device
) -> Lists:
    """The lists of a dense call's forward, with its band.

    Args:
        problem: the call; its `block_mask` is not read, so that nothing that remembers the problem keeps it.
        tile: (queries, keys) of a kernel's tile.
    """
    found = tile_lists(mask, tile, torch.device("cpu"), band=problem.spec.band, shift=problem.shift or 0)
    offsets, columns, patterns, bits = _without_ends(found, problem.seqlen_k)
    firsts, num_partial, sizes = _of_heads(problem, found, offsets, patterns)
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    cached = _CACHED_BYTES * problem.group // max(1, problem.seqlen_k * row_bytes)
    side, row = _longest_first(sizes, cached, num_processors)
    head = side % problem.num_heads_q
    units = torch.stack([
        side // problem.num_heads_q, head, head // problem.group, row * tile[0], firsts[side, row],
        num_partial[side, row], sizes[side, row], torch.zeros_like(head),
    ], dim=1)  # fmt: skip
    head_kv = torch.arange(len(sizes))[:, None] % problem.num_heads_q // problem.group
    table = torch.stack([firsts, sizes, head_kv.expand_as(sizes), torch.zeros_like(sizes)], dim=2)
    made = units.flatten(), columns * tile[1], patterns, bits, table
    return Lists._make([*_on_device(made, device), len(found.bits) > 0])


def key_lists_of(
    problem: Problem, mask: BlockMask, tile: tuple[int, int], num_processors: int, device: torch.device
) -> KeyLists:
    """The lists of a dense call's backward; arguments as of `lists_of`."""
    cpu = torch.device("cpu")
    found = tile_lists(mask, tile, cpu, band=problem.spec.band, shift=problem.shift or 0, by_keys=True)
    offsets, row_tiles, patterns, bits = _without_last_keys(found, problem.seqlen_k)
    firsts, num_partial, sizes = _of_heads(problem, found, offsets, patterns)
    # A tile of keys meets the row tiles of all query heads of a group.
    of_group = sizes.view(-1, problem.group, found.num_rows).sum(1)
    # Rounded up, as sums of dq are.
    width = 64 if problem.head_dim <= 64 else 128
    row_bytes = 4 * width + problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    cached = _CACHED_BYTES // max(1, problem.seqlen_q * problem.group * row_bytes)
    side, row = _longest_first(of_group, cached, num_processors)
    units = torch.stack(
        [side // problem.num_heads_kv, side % problem.num_heads_kv, row * tile[1], torch.zeros_like(row)], dim=1
    )
    table = torch.stack([firsts, num_partial, sizes, torch.zeros_like(sizes)], dim=2)
    made = units.flatten(), table, row_tiles, patterns, bits
    return KeyLists._make([*_on_device(made, device), len(found.bits) > 0])


def _on_device(made: tuple[Tensor, ...], device: torch.device) -> list[Tensor]:
    return [x.to(torch.int32).to(device) for x in made]


def _of_heads(problem: Problem, lists: TileLists, offsets: Tensor, patterns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows of every query head, each int64 (heads of all batch entries, rows): place of the first tile, number
    of PARTIAL tiles, number of tiles."""
    counts = offsets.diff()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    num_partial = torch.bincount(rows[patterns >= 0], minlength=len(counts))
    batch, head = torch.arange(problem.batch)[:, None], torch.arange(problem.num_heads_q)
    plane = (batch * lists.plane_strides[0] + head * lists.plane_strides[1]).flatten()
    of_head = plane[:, None] * lists.num_rows + torch.arange(lists.num_rows)
    return offsets[of_head], num_partial[of_head], counts[of_head]


def _without_last_keys(lists: TileLists, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offsets, columns, patterns, bits) of lists by keys in which bits, which are turned, hide keys that are none."""
    _, block_n = lists.tile
    counts = lists.offsets.diff().long()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    patterns = lists.patterns.clone()
    is_cut = (rows % max(1, lists.num_rows) + 1) * block_n > seqlen_k
    patterns[(patterns < 0) & is_cut] = len(lists.bits)
    taken = (rows * 2 + (patterns < 0)).argsort(stable=True)
    bits = turned(torch.cat([lists.bits, _end_bits(lists, seqlen_k)]), block_n)
    return lists.offsets.long(), lists.columns[taken], patterns[taken], bits


def _without_ends(lists: TileLists, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offsets, columns, patterns, bits) of lists by queries in which bits hide keys beyond the last one, too, and no
    row is empty."""
    _, block_n = lists.tile
    counts, num_patterns = lists.offsets.diff().long(), len(lists.bits)
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    columns, patterns = lists.columns.long(), lists.patterns.clone()
    patterns[(patterns < 0) & ((columns + 1) * block_n > seqlen_k)] = num_patterns
    (empty,) = (counts == 0).nonzero(as_tuple=True)
    rows = torch.cat([rows, empty])
    columns = torch.cat([columns, torch.full_like(empty, -(-seqlen_k // block_n))])
    patterns = torch.cat([patterns, torch.full_like(empty, num_patterns + 1, dtype=torch.int32)])
    # PARTIAL ones first; of each kind the order stays.
    taken = (rows * 2 + (patterns < 0)).argsort(stable=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(rows, minlength=len(counts)).cumsum(0)])
    return offsets, columns[taken], patterns[taken], torch.cat([lists.bits, _end_bits(lists, seqlen_k)])


def _end_bits(lists: TileLists, seqlen_k: int) -> Tensor:
    """(2, queries, words): a tile that the end of the keys cuts short, and one that is beyond it."""
    block_m, block_n = lists.tile
    inside = torch.zeros(-(-block_n // _WORD) * _WORD, dtype=torch.int64)
    inside[: seqlen_k % block_n] = 1
    words = (inside.view(-1, _WORD) << torch.arange(_WORD)).sum(1).to(torch.int32)
    return torch.stack([words, torch.zeros_like(words)])[:, None, :].expand(-1, block_m, -1)


def _longest_first(sizes: Tensor, cached: int, num_processors: int) -> tuple[Tensor, Tensor]:
    """(side, row) of units, of the lengths (sides, rows), in the order in which they are taken: some sides at a time,
    and the longest rows of these first.

    Args:
        cached: of how many sides the L2 cache holds what their rows share.
    """
    num_sides, num_rows = sizes.shape
    # So many that the longest row takes no longer than all of theirs do on all processors.
    balanced = int(sizes.max()) * num_processors * num_sides // max(1, int(sizes.sum())) + 1
    num_groups = -(-num_sides // min(num_sides, max(cached, balanced)))
    together = -(-num_sides // num_groups)
    # Those that make no whole number come first: the last ones shall have short rows enough to end with.
    bounds = sorted({0, *range(num_sides % together, num_sides + 1, together)})
    orders = [
        sizes[start:end].flatten().argsort(descending=True, stable=True) + start * num_rows
        for start, end in itertools.pairwise(bounds)
    ]
    order = torch.cat(orders)
    return order // num_rows, order % num_rows
