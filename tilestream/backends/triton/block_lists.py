"""The lists of a block mask as kernels read them (`visits.py`): on the device, once per mask, and kept with it.

Shapes: R rows of tiles of all planes; T kept tiles; P patterns.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.block_mask.tiles import TileLists, tile_lists, turned
from tilestream.problem import Problem
from tilestream.spec import Band

__all__ = ["ListSizes", "Lists", "lists_for", "per_query_head"]

# A row is far longer than most if it has so many times the tiles of the mean.
_LONG = 4
_MADE: weakref.WeakKeyDictionary[BlockMask, dict[tuple[Any, ...], Lists]] = weakref.WeakKeyDictionary()


class ListSizes(NamedTuple):
    """What a plan knows of lists besides where they lie."""

    tile: tuple[int, int]  # queries, keys
    rows: int  # of a plane
    strides: tuple[int, int]  # rows from one batch entry, and one head, to the next
    num_long: int  # rows of a plane that are far longer than most
    repeats: int  # how often the query heads of a group read the list of a row of keys

    @property
    def numbers(self) -> dict[str, Any]:
        """Those of `call.Numbers`."""
        return {
            "list_rows": self.rows,
            "list_strides": self.strides,
            "num_long": self.num_long,
            "list_repeats": self.repeats,
        }


@dataclass(frozen=True, eq=False)
class Lists:
    """Tensors for `visits.py`, int32."""

    sizes: ListSizes
    spans: Tensor  # (R, 8), the rows of each plane with the longest first
    spans_in_order: Tensor  # (R, 8), by row
    tiles: Tensor  # (T + 1, 2)
    bits: Tensor  # (P, queries, words); by keys (P, keys, words)

    def tensors(self, is_ordered: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Those of `call.Tensors`; rows with the longest first, or in order."""
        return self.spans_in_order if is_ordered else self.spans, self.tiles, self.bits


@functools.lru_cache(maxsize=1024)
def per_query_head(problem: Problem) -> Problem:
    """A problem with a mask as its kernels see it: no rows of a group are packed, and of dense calls no band, which is
    in the lists."""
    spec = problem.spec if problem.layout == "varlen" else replace(problem.spec, band=Band(None, None))
    return replace(problem, num_heads_kv=problem.num_heads_q, spec=spec, block_mask=None)


def lists_for(
    mask: BlockMask, problem: Problem, tile: tuple[int, int], device: torch.device, *, by_keys: bool = False
) -> Lists:
    """Lists of a mask for tiles of (queries, keys).

    Args:
        problem: the call, for its band, which joins the mask of a dense call, and its group, whose heads are in one
            list of a row of keys.
    """
    made = _MADE.setdefault(mask, {})
    if (found := made.get((problem, tile, device, by_keys))) is not None:
        return found
    band, shift = (problem.spec.band, problem.shift or 0) if problem.layout == "dense" else (Band(None, None), 0)
    group = problem.group if by_keys else 1
    key = (tile, band, shift if band != Band(None, None) else 0, by_keys, group, device)
    found = made.get(key)
    if found is None:
        lists = tile_lists(mask, tile, torch.device("cpu"), band=band, shift=shift, by_keys=by_keys)
        found = made[key] = _arranged(lists, mask, group, by_keys, device)
    # Found by what is hashed already.
    made[problem, tile, device, by_keys] = found
    return found


def _arranged(lists: TileLists, mask: BlockMask, group: int, by_keys: bool, device: torch.device) -> Lists:
    counts = lists.offsets.diff().to(torch.int64)
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    columns, patterns, heads, repeats = lists.columns.to(torch.int64) * group, lists.patterns, mask.num_heads, group
    if group > 1 and heads > 1:
        # The heads of a group in one list, tile by tile.
        plane = rows // lists.num_rows
        rows, columns = plane // group * lists.num_rows + rows % lists.num_rows, columns + plane % group
        heads, repeats = heads // group, 1
        counts = torch.bincount(rows, minlength=mask.batch * heads * lists.num_rows)
    is_masked = patterns >= 0
    if not by_keys:
        # Keys that are none must not weigh anything.
        is_masked |= (columns + 1) * lists.tile[1] > mask.seqlen_k
    taken = ((rows * 2 + ~is_masked) * (int(columns.amax()) + 1 if len(rows) else 1) + columns).argsort()
    # An entry more than there are: loops look ahead.
    tiles = torch.zeros(len(rows) + 1, 2, dtype=torch.int64)
    tiles[:-1, 0], tiles[:-1, 1] = columns[taken], patterns[taken]
    ends = counts.cumsum(0)
    num_masked = torch.bincount(rows[is_masked], minlength=len(counts))
    in_order = torch.zeros(len(counts), 8, dtype=torch.int64)
    in_order[:, 0] = torch.arange(len(counts)) % max(1, lists.num_rows)
    in_order[:, 1], in_order[:, 2], in_order[:, 3] = ends - counts, ends, num_masked
    in_order[:, 4] = tiles[ends - counts, 0]
    of_planes = counts.view(mask.batch * heads, lists.num_rows)
    order = of_planes.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(len(of_planes))[:, None] * lists.num_rows
    num_long = int((of_planes > _LONG * counts.double().mean()).sum(1).max()) if len(counts) else 0
    strides = (heads * lists.num_rows if mask.batch > 1 else 0, lists.num_rows if heads > 1 else 0)
    bits = turned(lists.bits, lists.tile[1]) if by_keys else lists.bits
    tensors = (in_order[(first + order).flatten()], in_order, tiles, bits)
    return Lists(
        ListSizes(lists.tile, lists.num_rows, strides, num_long, repeats),
        *(x.to(device=device, dtype=torch.int32).contiguous() for x in tensors),
    )
