"""Masks of torch.nn.attention.flex_attention, taken and given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilestream.block_mask.lists import FULL, PARTIAL, UNSETTLED, BlockLists, cut_rows
from tilestream.block_mask.rules import Rule, tabulated
from tilestream.errors import ArgumentError, DtypeError, UnsupportedError

__all__ = ["from_flex", "to_flex"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _flex_class() -> Any:
    try:
        from torch.nn.attention.flex_attention import BlockMask
    except ImportError as missing:
        raise UnsupportedError(f"this torch {torch.__version__} has no FlexAttention.") from missing
    return BlockMask


def from_flex(mask: Any) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], BlockLists, MaskMod]:
    """Lengths, block size, (batch, num_heads), lists and mask_mod; PARTIAL blocks are UNSETTLED."""
    if not isinstance(mask, _flex_class()):
        raise DtypeError(
            f"block_mask must be a torch.nn.attention.flex_attention.BlockMask, got {type(mask).__name__}."
        )
    if mask.kv_indices.dim() != 4:
        raise ArgumentError(
            f"block_mask must have axes (batch, heads, rows, columns), got kv_indices {tuple(mask.kv_indices.shape)}."
        )
    lengths = (int(mask.seq_lengths[0]), int(mask.seq_lengths[1]))
    block_size = (int(mask.BLOCK_SIZE[0]), int(mask.BLOCK_SIZE[1]))
    batch, num_heads, num_rows, _ = mask.kv_indices.shape
    num_columns = -(-lengths[1] // block_size[1])
    line = torch.arange(batch * num_heads * num_rows)
    places, kinds = [], []
    for counts, indices, kind in (
        (mask.kv_num_blocks, mask.kv_indices, UNSETTLED),
        (mask.full_kv_num_blocks, mask.full_kv_indices, FULL),
    ):
        if counts is None:
            continue
        indices = indices.detach().cpu().reshape(len(line), -1).to(torch.int64)
        is_listed = torch.arange(indices.shape[1]) < counts.detach().cpu().reshape(-1, 1)
        found = (line[:, None] * num_columns + indices)[is_listed]
        places.append(found)
        kinds.append(torch.full_like(found, kind))
    lo, order = torch.cat(places).sort()
    lists = BlockLists.from_line(len(line), num_columns, lo, lo + 1, torch.cat(kinds)[order])
    return lengths, block_size, (batch, num_heads), lists, mask.mask_mod


def to_flex(
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    planes: tuple[int, int],
    lists: BlockLists,
    rule: Rule,
    device: torch.device,
) -> Any:
    """The same mask for FlexAttention: dense lists of int32 (batch, heads, rows, columns), and a `mask_mod`."""
    num_rows, found = lists.num_rows // max(1, planes[0] * planes[1]), []
    for kind in (PARTIAL, FULL):
        counts = torch.zeros(lists.num_rows, dtype=torch.int32)
        indices = torch.zeros(lists.num_rows, lists.num_columns, dtype=torch.int32)
        for cut in cut_rows(lists.num_rows, lists.num_columns):
            is_kind = lists.to_kinds(cut) == kind
            counts[cut] = is_kind.sum(1, dtype=torch.int32)
            # The blocks of this kind first, in order, as FlexAttention has them.
            indices[cut] = is_kind.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
        found += [counts.view(*planes, num_rows), indices.view(*planes, num_rows, lists.num_columns)]
    return _flex_class().from_kv_blocks(
        *(x.to(device) for x in found),
        BLOCK_SIZE=block_size,
        mask_mod=_mask_mod(tabulated(rule, device)),
        seq_lengths=lengths,
    )


def _mask_mod(rule: Rule) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(b, h, i, j)

    return mask_mod
