"""The lists that kernels read: every maker's mask in tiles of other sizes shows the same pairs, from either side."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import MASKS, mask_of
from torch import Tensor

from tilestream import BlockMask
from tilestream.block_mask import tiles
from tilestream.block_mask.tiles import TileLists, tile_lists
from tilestream.spec import Band

CPU = torch.device("cpu")
TILES = ((8, 32), (16, 16), (3, 5), (64, 64), (1, 1), (4, 40))


def pairs_of(lists: TileLists, planes: int, lengths: tuple[int, int], by_keys: bool) -> Tensor:
    """bool (planes, seqlen_q, seqlen_k), read as a kernel reads them, and what a list promises of its order."""
    (height, width), (seqlen_q, seqlen_k) = lists.tile, lengths
    shown = torch.zeros(planes, seqlen_q, seqlen_k, dtype=torch.bool)
    for plane, r in itertools.product(range(planes), range(lists.num_rows)):
        lo, hi = lists.offsets[plane * lists.num_rows + r :][:2].tolist()
        kept = list(zip(lists.columns[lo:hi].tolist(), lists.patterns[lo:hi].tolist(), strict=True))
        assert kept == sorted(kept, key=lambda tile: (tile[1] < 0, tile[0]))
        for column, pattern in kept:
            m, n = (column, r) if by_keys else (r, column)
            part = shown[plane, m * height : (m + 1) * height, n * width : (n + 1) * width]
            assert part.numel() > 0
            assert not part.any()
            if pattern < 0:
                part[:] = True
                continue
            words = lists.bits[pattern].repeat_interleave(32, dim=1)[:, :width]
            pairs = ((words >> (torch.arange(width) % 32)) & 1).bool()
            part[:] = pairs[: part.shape[0], : part.shape[1]]
            assert pairs.sum() == part.sum() > 0
            assert not part.all()
    return shown


def check(mask: BlockMask, tile: tuple[int, int], band: Band | None = None, shift: int = 0) -> None:
    """Lists by rows and by keys show what the mask and the band show."""
    distance = torch.arange(mask.seqlen_k) - (torch.arange(mask.seqlen_q)[:, None] + shift)
    wanted = mask.to_dense().flatten(0, 1).clone()
    if band is not None and band.left is not None:
        wanted &= distance >= -band.left
    if band is not None and band.right is not None:
        wanted &= distance <= band.right
    planes, lengths = wanted.shape[0], (mask.seqlen_q, mask.seqlen_k)
    for by_keys in (False, True):
        lists = tile_lists(mask, tile, CPU, band=band, shift=shift, by_keys=by_keys)
        assert lists.num_rows == -(-lengths[by_keys] // tile[by_keys])
        assert torch.equal(pairs_of(lists, planes, lengths, by_keys), wanted)
        counts = lists.offsets.diff().view(planes, -1)
        order = lists.order.view(planes, -1).to(torch.int64)
        assert torch.equal(order.sort(dim=1).values, torch.arange(lists.num_rows).expand(planes, -1))
        assert (counts.gather(1, order).diff(dim=1) <= 0).all()
        for b, h in itertools.product(range(mask.batch), range(mask.num_heads)):
            assert b * lists.plane_strides[0] + h * lists.plane_strides[1] == mask.plane(b, h)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_in_every_tile(name: str, tile: tuple[int, int]) -> None:
    mask = mask_of(name, 37, 70, 2, 3)
    check(mask, tile)
    check(mask, tile, Band(20, 3), shift=-4)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_blocks_in_any_tiles(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(0, 40), label=name) for name in ("seqlen_q", "seqlen_k")]
    sides: Any = st.tuples(st.integers(1, 20), st.integers(1, 40))
    mask = BlockMask.from_dense(
        torch.rand(*sizes, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
        < data.draw(st.sampled_from((0.02, 0.5, 0.999))),
        block_size=data.draw(sides, label="block"),
    )
    limits = st.none() | st.integers(0, 30)
    band = Band(data.draw(limits, label="left"), data.draw(limits, label="right"))
    check(mask, data.draw(sides, label="tile"), band, data.draw(st.integers(-30, 30), label="shift"))


def test_patterns_are_shared() -> None:
    # The diagonal's tile, and the last one, which is cut short.
    causal = tile_lists(BlockMask.from_band(1000, causal=True, block_size=64), (64, 64), CPU)
    assert causal.bits.shape == (2, 64, 2)
    folded = tile_lists(BlockMask.from_band(1000, block_size=128), (64, 64), CPU, band=Band(None, 0))
    assert folded.bits.shape == (2, 64, 2)
    assert torch.equal(folded.columns, causal.columns)


def test_equal_fingerprints_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were two patterns ever to have one fingerprint, each would still be what it is."""
    monkeypatch.setattr(tiles, "_fingerprints", lambda words: torch.zeros(len(words), dtype=torch.int64))
    mask = BlockMask.from_dense(torch.rand(40, 40, generator=torch.Generator().manual_seed(1)) < 0.5, block_size=8)
    monkeypatch.setattr(tiles, "_PAIRS_AT_ONCE", 256)
    check(mask, (8, 8))


def test_lists_are_made_once_and_go_with_the_mask() -> None:
    mask = BlockMask.from_band(64, causal=True, block_size=16)
    assert tile_lists(mask, (16, 32), CPU) is tile_lists(mask, (16, 32), CPU, shift=3)
    assert tile_lists(mask, (16, 32), CPU) is not tile_lists(mask, (16, 32), CPU, by_keys=True)
    known = len(tiles._MADE)
    del mask
    assert len(tiles._MADE) == known - 1
