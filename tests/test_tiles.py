"""The band and its tile geometry against dense masks, pair by pair."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilestream.spec import AttentionSpec, Band
from tilestream.tiles import (
    TileKind,
    classify,
    key_span,
    key_tile_ranges,
    query_span,
    tile_row,
    visible_pairs,
)


@dataclass(frozen=True)
class Geometry:
    band: Band
    shift: int
    seqlen_q: int
    seqlen_k: int

    def mask(self) -> Tensor:
        """bool (seqlen_q, seqlen_k) from the definition of a band."""
        rows = [[self.band.sees(i, j, self.shift) for j in range(self.seqlen_k)] for i in range(self.seqlen_q)]
        return torch.tensor(rows, dtype=torch.bool).reshape(self.seqlen_q, self.seqlen_k)


# Negative limits are bands that exclude the diagonal; left < -right is a band that shows nothing (void).
_limits = st.one_of(st.none(), st.integers(-6, 14))
geometries = st.builds(
    Geometry,
    band=st.builds(Band, _limits, _limits),
    shift=st.integers(-25, 25),
    seqlen_q=st.integers(0, 17),
    seqlen_k=st.integers(0, 17),
)
blocks = st.integers(1, 7)
VOID = Geometry(Band(-3, 1), 0, 8, 8)
CAUSAL = Geometry(Band(None, 0), 3, 7, 10)


@pytest.mark.parametrize("geometry", [VOID, CAUSAL, Geometry(Band(2, 0), -4, 9, 5)], ids=str)
def test_sees_is_the_definition(geometry: Geometry) -> None:
    distance = torch.arange(geometry.seqlen_k)[None] - torch.arange(geometry.seqlen_q)[:, None] - geometry.shift
    left, right = geometry.band.left, geometry.band.right
    wanted = torch.ones_like(distance, dtype=torch.bool)
    wanted &= distance >= (-left if left is not None else -1000)
    wanted &= distance <= (right if right is not None else 1000)
    assert torch.equal(geometry.mask(), wanted)


@given(geometries, st.data())
@settings(max_examples=300, deadline=None)
def test_classify(geometry: Geometry, data: st.DataObject) -> None:
    if geometry.seqlen_q == 0 or geometry.seqlen_k == 0:
        return
    m_start = data.draw(st.integers(0, geometry.seqlen_q - 1))
    m_end = data.draw(st.integers(m_start + 1, geometry.seqlen_q))
    n_start = data.draw(st.integers(0, geometry.seqlen_k - 1))
    n_end = data.draw(st.integers(n_start + 1, geometry.seqlen_k))
    assert classify(geometry.band, geometry.shift, m_start, m_end, n_start, n_end) is _kind(
        geometry.mask()[m_start:m_end, n_start:n_end]
    )


def _kind(tile: Tensor) -> TileKind:
    if bool(tile.all()):
        return TileKind.FULL
    return TileKind.PARTIAL if bool(tile.any()) else TileKind.EMPTY


def _span(seen: Tensor) -> tuple[int, int]:
    """[first, last + 1) of the set entries; (0, 0) where there are none."""
    indices = seen.nonzero().flatten().tolist()
    return (indices[0], indices[-1] + 1) if indices else (0, 0)


@given(geometries, blocks)
@example(VOID, 3)
@settings(max_examples=300, deadline=None)
def test_spans_are_exact(geometry: Geometry, block: int) -> None:
    mask = geometry.mask()
    for m_start in range(0, geometry.seqlen_q, block):
        m_end = min(m_start + block, geometry.seqlen_q)
        lo, hi = key_span(geometry.band, geometry.shift, m_start, m_end, geometry.seqlen_k)
        assert ((lo, hi) if lo < hi else (0, 0)) == _span(mask[m_start:m_end].any(dim=0)), (m_start, m_end)
    for n_start in range(0, geometry.seqlen_k, block):
        n_end = min(n_start + block, geometry.seqlen_k)
        lo, hi = query_span(geometry.band, geometry.shift, n_start, n_end, geometry.seqlen_q)
        assert ((lo, hi) if lo < hi else (0, 0)) == _span(mask[:, n_start:n_end].any(dim=1)), (n_start, n_end)


@given(geometries, blocks, blocks)
@example(VOID, 3, 2)
@example(CAUSAL, 4, 4)
@settings(max_examples=300, deadline=None)
def test_key_tile_ranges(geometry: Geometry, block_m: int, block_n: int) -> None:
    """EMPTY* PARTIAL* FULL* PARTIAL* EMPTY*, and each range holds exactly the tiles of its kind."""
    mask = geometry.mask()
    for m_start in range(0, geometry.seqlen_q, block_m):
        rows = mask[m_start : m_start + block_m]
        ranges = key_tile_ranges(
            geometry.band, geometry.shift, m_start, m_start + len(rows), geometry.seqlen_k, block_n
        )
        assert 0 <= ranges.lo <= ranges.full_lo <= ranges.full_hi <= ranges.hi
        for n_block in range(-(-geometry.seqlen_k // block_n)):
            kind = _kind(rows[:, n_block * block_n : (n_block + 1) * block_n])
            if ranges.full_lo <= n_block < ranges.full_hi:
                assert kind is TileKind.FULL
            elif ranges.lo <= n_block < ranges.hi:
                assert kind is TileKind.PARTIAL
            else:
                assert kind is TileKind.EMPTY


@given(geometries, blocks, blocks)
@example(VOID, 3, 2)
@settings(max_examples=300, deadline=None)
def test_tile_row_visits_every_visible_pair_once(geometry: Geometry, block_m: int, block_n: int) -> None:
    mask = geometry.mask()
    visits = torch.zeros(mask.shape, dtype=torch.int64)
    for m_start in range(0, geometry.seqlen_q, block_m):
        m_end = min(m_start + block_m, geometry.seqlen_q)
        tiles = list(tile_row(geometry.band, geometry.shift, m_start, m_end, geometry.seqlen_k, block_n))
        for tile in tiles:
            cut = mask[tile.m_start : tile.m_end, tile.n_start : tile.n_end]
            assert cut.numel() > 0
            assert (tile.m_start, tile.m_end) == (m_start, m_end)
            assert tile.kind is _kind(cut)
            assert tile.kind is not TileKind.EMPTY
            # A tile never crosses a multiple of block_n, so its keys are one block of a block-aligned layout.
            assert tile.n_start // block_n == (tile.n_end - 1) // block_n
            visits[tile.m_start : tile.m_end, tile.n_start : tile.n_end] += 1
        assert [tile.n_start for tile in tiles] == sorted(tile.n_start for tile in tiles)
    assert bool((visits[mask] == 1).all())
    assert bool((visits <= 1).all())


@given(geometries)
@example(VOID)
@settings(max_examples=500, deadline=None)
def test_visible_pairs(geometry: Geometry) -> None:
    counted = visible_pairs(geometry.band, geometry.shift, geometry.seqlen_q, geometry.seqlen_k)
    assert counted == int(geometry.mask().sum())


def test_visible_pairs_is_closed_form() -> None:
    """Lengths at which counting would not end; causal pairs are n (n + 1) / 2."""
    seqlen = 10**9
    assert visible_pairs(Band(None, 0), 0, seqlen, seqlen) == seqlen * (seqlen + 1) // 2
    assert visible_pairs(Band(), 0, seqlen, seqlen) == seqlen**2


@pytest.mark.parametrize(
    ("causal", "window", "wanted"),
    [
        (False, None, Band(None, None)),
        (True, None, Band(None, 0)),
        (True, (3, 5), Band(3, 0)),
        (True, (3, None), Band(3, 0)),
        (False, (3, None), Band(3, None)),
        (False, (0, 0), Band(0, 0)),
    ],
)
def test_band_from_arguments(causal: bool, window: tuple[int | None, int | None] | None, wanted: Band) -> None:
    assert Band.from_arguments(causal, window) == wanted


def test_features_are_named_in_a_fixed_order() -> None:
    everything = AttentionSpec(Band(3, 0), softcap=1.0, dropout_p=0.1, has_bias=True, has_alibi=True, has_sinks=True)
    assert everything.features() == ("window", "softcap", "bias", "alibi", "sinks", "dropout")
    assert AttentionSpec(Band(None, 0), deterministic=True).features() == ("causal", "deterministic")
    assert AttentionSpec().features() == ()
