"""The geometry of a band over tiles: the only place that knows which tiles are EMPTY, PARTIAL or FULL.

A tile is the rectangle of queries ``m_start <= i < m_end`` and keys ``n_start <= j < n_end``. Along a row of tiles
the order is always EMPTY* PARTIAL* FULL* PARTIAL* EMPTY*, so a plan is three ranges.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from tilestream.spec import Band

__all__ = [
    "Tile",
    "TileKind",
    "TileRanges",
    "classify",
    "key_span",
    "key_tile_ranges",
    "query_span",
    "tile_row",
    "visible_pairs",
]


class TileKind(enum.Enum):
    """EMPTY: no visible pair, never loaded. PARTIAL: needs the mask. FULL: every pair visible, no mask code."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True)
class Tile:
    """A rectangle of scores and its kind."""

    m_start: int
    m_end: int
    n_start: int
    n_end: int
    kind: TileKind


@dataclass(frozen=True)
class TileRanges:
    """Key-tile indices of one row of tiles: PARTIAL in [lo, full_lo) and [full_hi, hi), FULL in [full_lo, full_hi)."""

    lo: int
    full_lo: int
    full_hi: int
    hi: int


def classify(band: Band, shift: int, m_start: int, m_end: int, n_start: int, n_end: int) -> TileKind:
    """The kind of one non-empty rectangle, from its two extreme distances j - (i + shift)."""
    lowest = n_start - (m_end - 1 + shift)
    highest = n_end - 1 - (m_start + shift)
    # The distances of a rectangle are contiguous integers, so comparing its extremes with the band is exact.
    if (band.right is not None and lowest > band.right) or (band.left is not None and highest < -band.left):
        return TileKind.EMPTY
    if band.left is not None and band.right is not None and -band.left > band.right:
        return TileKind.EMPTY
    if (band.right is None or highest <= band.right) and (band.left is None or lowest >= -band.left):
        return TileKind.FULL
    return TileKind.PARTIAL


def key_span(band: Band, shift: int, m_start: int, m_end: int, seqlen_k: int) -> tuple[int, int]:
    """The keys [lo, hi) that at least one query of [m_start, m_end) sees; lo == hi where none does."""
    lo = 0 if band.left is None else max(0, m_start + shift - band.left)
    hi = seqlen_k if band.right is None else min(seqlen_k, m_end + shift + band.right)
    is_void = band.left is not None and band.right is not None and -band.left > band.right
    return (0, 0) if hi <= lo or is_void else (lo, hi)


def query_span(band: Band, shift: int, n_start: int, n_end: int, seqlen_q: int) -> tuple[int, int]:
    """The queries [lo, hi) that see at least one key of [n_start, n_end); the transpose of `key_span`."""
    return key_span(Band(band.right, band.left), -shift, n_start, n_end, seqlen_q)


def key_tile_ranges(band: Band, shift: int, m_start: int, m_end: int, seqlen_k: int, block_n: int) -> TileRanges:
    """The three ranges of key tiles for one row of tiles, in units of block_n.

    A tile cut short by seqlen_k counts as FULL when all of its existing keys are visible.
    """
    span_lo, span_hi = key_span(band, shift, m_start, m_end, seqlen_k)
    if span_lo == span_hi:
        return TileRanges(0, 0, 0, 0)
    lo, hi = span_lo // block_n, -(-span_hi // block_n)
    # Keys that *every* query of the row sees: from the last query's left edge to the first query's right edge.
    all_lo = 0 if band.left is None else max(0, m_end - 1 + shift - band.left)
    all_hi = seqlen_k if band.right is None else min(seqlen_k, m_start + shift + band.right + 1)
    full_lo = max(lo, -(-all_lo // block_n))
    full_hi = hi if all_hi >= seqlen_k else min(hi, all_hi // block_n)
    if full_lo >= full_hi:
        return TileRanges(lo, hi, hi, hi)
    return TileRanges(lo, full_lo, full_hi, hi)


def tile_row(band: Band, shift: int, m_start: int, m_end: int, seqlen_k: int, block_n: int) -> Iterator[Tile]:
    """The tiles that one row of queries visits, left to right, trimmed to the keys that some query sees."""
    lo, hi = key_span(band, shift, m_start, m_end, seqlen_k)
    for n_start in range(lo - lo % block_n, hi, block_n):
        n_lo, n_hi = max(lo, n_start), min(hi, n_start + block_n)
        yield Tile(m_start, m_end, n_lo, n_hi, classify(band, shift, m_start, m_end, n_lo, n_hi))


def visible_pairs(band: Band, shift: int, seqlen_q: int, seqlen_k: int) -> int:
    """How many (query, key) pairs the band shows; closed form, exact."""

    def pairs_up_to(limit: int) -> int:
        """Pairs with j - (i + shift) <= limit: the sum over i of clamp(i + shift + limit + 1, 0, seqlen_k)."""
        offset = shift + limit + 1
        first_positive = min(max(0, 1 - offset), seqlen_q)
        first_saturated = min(max(first_positive, seqlen_k - offset), seqlen_q)
        ramp = first_saturated - first_positive
        ramp_sum = ramp * offset + (first_positive + first_saturated - 1) * ramp // 2
        return ramp_sum + (seqlen_q - first_saturated) * seqlen_k

    upper = seqlen_q * seqlen_k if band.right is None else pairs_up_to(band.right)
    lower = 0 if band.left is None else pairs_up_to(-band.left - 1)
    return max(0, upper - lower)
