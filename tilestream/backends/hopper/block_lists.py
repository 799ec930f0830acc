"""A block mask as the Hopper kernels read it: `block_mask.tiles.TileLists`, and in which order programs take rows.

No row of tiles is empty and nothing but bits hides anything: a tile that the end of the keys cuts short has bits, and a
row that keeps nothing has a tile beyond all others, which TMA fills with zeros, with bits of which none is set.
Shapes: U units, rows of tiles of all heads; T kept tiles; P different patterns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.block_mask.tiles import TileLists, tile_lists
from tilestream.problem import Problem

__all__ = ["RECORD", "Lists", "lists_of"]

# Numbers of a unit.
RECORD = 8
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

    def for_exact(self) -> dict[str, Tensor]:
        """What the exact kernel reads, by names of `triton.call.Tensors`."""
        return {
            "list_rows": self.rows,
            "list_starts": self.key_starts,
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
    counts = offsets.diff()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    num_partial = torch.bincount(rows[patterns >= 0], minlength=len(counts))
    # Rows of every head, (heads of all batch entries, row tiles).
    batch, head = torch.arange(problem.batch)[:, None], torch.arange(problem.num_heads_q)
    plane = (batch * found.plane_strides[0] + head * found.plane_strides[1]).flatten()
    of_head = plane[:, None] * found.num_rows + torch.arange(found.num_rows)
    firsts, sizes, head_kv = offsets[of_head], counts[of_head], (head // problem.group).expand_as(batch + head)
    table = torch.stack([firsts, sizes, head_kv.reshape(-1, 1).expand_as(firsts), torch.zeros_like(firsts)], dim=2)
    together = _num_together(problem, sizes, num_processors)
    sides, tiles = torch.arange(len(plane))[:, None].expand_as(of_head), torch.arange(found.num_rows).expand_as(of_head)
    order = _longest_first(sizes, together)
    sides, tiles, of_head = (x.flatten()[order] for x in (sides, tiles, of_head))
    head = sides % problem.num_heads_q
    units = torch.stack([
        sides // problem.num_heads_q, head, head // problem.group, tiles * tile[0], offsets[of_head],
        num_partial[of_head], counts[of_head], torch.zeros_like(head),
    ], dim=1)  # fmt: skip
    return Lists(*(x.to(torch.int32).to(device) for x in (units.flatten(), columns * tile[1], patterns, bits, table)))


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


def _longest_first(counts: Tensor, together: int) -> Tensor:
    """Units, (heads, row tiles), in the order in which they are taken: so many heads at a time, and the longest rows of
    these first."""
    starts = range(0, counts.shape[0], together)
    orders = [counts[start : start + together].flatten().argsort(descending=True, stable=True) for start in starts]
    return torch.cat([order + start * counts.shape[1] for start, order in zip(starts, orders, strict=True)])


def _num_together(problem: Problem, counts: Tensor, num_processors: int) -> int:
    """Heads that are worked on at a time: as many as the L2 cache holds the K and V of, or so many that the longest row
    takes no longer than all of theirs do on all processors."""
    num_sides = counts.shape[0]
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    cached = _CACHED_BYTES * problem.group // max(1, problem.seqlen_k * row_bytes)
    balanced = int(counts.max()) * num_processors * num_sides // int(counts.sum()) + 1
    num_groups = -(-num_sides // min(num_sides, max(cached, balanced)))
    return -(-num_sides // num_groups)
