"""The tiles of a call: along a row of queries or a column of keys, those of a band or those that a block mask keeps.

A tile has a kind by the band (PARTIAL: some pairs are beyond it), and `hidden` where it lies in PARTIAL blocks. Blocks
of one kind side by side are one tile, up to the width of tiles; EMPTY ones never appear.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tilestream.backends.cpu.layout import Chunk, DenseCall
from tilestream.backends.cpu.score import ScoreTile
from tilestream.block_mask import BlockMask
from tilestream.block_mask.lists import PARTIAL
from tilestream.tiles import Tile, TileKind, classify, key_span, query_span, tile_row

__all__ = ["column_tiles", "in_block_mask", "row_tiles", "rows_of"]


def rows_of(call: DenseCall, block_m: int) -> Iterator[tuple[int, int]]:
    """The rows of tiles [m_start, m_end); none reaches over the edge of a block."""
    seqlen_q, mask = call.query.shape[1], call.problem.block_mask
    side = seqlen_q if mask is None else mask.block_size[0]
    for start in range(0, seqlen_q, max(1, side)):
        yield from _pieces(start, min(start + side, seqlen_q), block_m)


def row_tiles(
    call: DenseCall, chunk: Chunk, m_start: int, m_end: int, block_n: int, is_tame: bool
) -> Iterator[ScoreTile]:
    """The tiles that one row of queries visits, from left to right."""
    band, seqlen_k, mask = call.problem.spec.band, call.key.shape[1], call.problem.block_mask
    if mask is None:
        for tile in tile_row(band, call.shift, m_start, m_end, seqlen_k, block_n):
            yield ScoreTile(call, chunk, tile, is_tame)
        return
    side = mask.block_size[1]
    row = _plane(call, chunk, mask) * mask.grid.num_rows + m_start // mask.block_size[0]
    span_lo, span_hi = key_span(band, call.shift, m_start, m_end, seqlen_k)
    for start, stop, kind in mask.lists.row(row):
        for n_start, n_end in _pieces(max(start * side, span_lo), min(stop * side, span_hi), block_n):
            found = _tile(call, chunk, (m_start, m_end, n_start, n_end), kind, is_tame)
            if found is not None:
                yield found


def column_tiles(
    call: DenseCall, chunk: Chunk, n_start: int, n_end: int, block_m: int, is_tame: bool
) -> Iterator[ScoreTile]:
    """The tiles that keys of one column of blocks visit, from the first query to the last; by the transposed lists."""
    band, seqlen_q, mask = call.problem.spec.band, call.query.shape[1], call.problem.block_mask
    assert mask is not None
    side = mask.block_size[0]
    column = _plane(call, chunk, mask) * mask.grid.num_columns + n_start // mask.block_size[1]
    span_lo, span_hi = query_span(band, call.shift, n_start, n_end, seqlen_q)
    for start, stop, kind in mask.transposed_lists.row(column):
        for m_start, m_end in _pieces(max(start * side, span_lo), min(stop * side, span_hi), block_m):
            found = _tile(call, chunk, (m_start, m_end, n_start, n_end), kind, is_tame)
            if found is not None:
                yield found


def in_block_mask(score_tile: ScoreTile) -> ScoreTile:
    """The same tile with what the block mask hides, whatever blocks it reaches over."""
    call, tile, mask = score_tile.call, score_tile.tile, score_tile.call.problem.block_mask
    if mask is None:
        return score_tile
    hidden = ~_visible(call, score_tile.chunk, mask, tile)
    return ScoreTile(call, score_tile.chunk, tile, score_tile.is_tame, hidden)


def _tile(
    call: DenseCall, chunk: Chunk, edges: tuple[int, int, int, int], kind: int, is_tame: bool
) -> ScoreTile | None:
    of_band = classify(call.problem.spec.band, call.shift, *edges)
    if of_band is TileKind.EMPTY:
        return None
    score_tile = ScoreTile(call, chunk, Tile(*edges, of_band), is_tame)
    return in_block_mask(score_tile) if kind == PARTIAL else score_tile


def _plane(call: DenseCall, chunk: Chunk, mask: BlockMask) -> int:
    return mask.plane(*_entry(call, chunk, mask))


def _entry(call: DenseCall, chunk: Chunk, mask: BlockMask) -> tuple[int, int]:
    """Batch entry (of the whole call, where sequences are packed) and head whose plane the chunk reads."""
    b = int(call.batch_index[chunk.batch.start]) if mask.batch > 1 else 0
    return b, chunk.heads.start if mask.num_heads > 1 else 0


def _visible(call: DenseCall, chunk: Chunk, mask: BlockMask, tile: Tile) -> Tensor:
    queries, keys = range(tile.m_start, tile.m_end), range(tile.n_start, tile.n_end)
    return mask.visible(*_entry(call, chunk, mask), queries, keys, call.query.device)


def _pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, size):
        yield first, min(first + size, stop)
