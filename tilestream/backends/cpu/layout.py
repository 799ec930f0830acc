"""How a call is cut into chunks of (batch, KV head) groups and into tiles, and the packed tensors of one chunk.

Shapes: C groups of a chunk (batch entries times KV heads), G query heads per group, M queries, N keys, W any width,
D head_dim, E head_dim_v. A tile's rows are the G * m query rows of one group, so GQA is one matrix product per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.problem import Problem

__all__ = [
    "Chunk",
    "DenseCall",
    "block_tile",
    "chunks",
    "compute_dtype",
    "key_walk_shape",
    "pack_rows",
    "tile_shape",
]

# One tile of scores per group: small enough for a core's second-level cache (512 KiB in float32), large enough that
# the dozen PyTorch calls of a tile cost little beside its products.
_TILE_ROWS = 256
_TILE_KEYS = 512
_TILE_ELEMENTS = _TILE_ROWS * _TILE_KEYS
# All tiles of a chunk together: more groups at once are more parallel work, until they leave the shared cache.
_CHUNK_ELEMENTS = 8 * _TILE_ELEMENTS
# A batch entry with this many key elements is worth a chunk of its own, because it can then be read in place.
_IN_PLACE_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class DenseCall:
    """A dense call, or one batch of equally long packed sequences: rank-4 tensors and the facts a tile needs."""

    problem: Problem
    shift: int
    query: Tensor  # (B, M, heads, D)
    key: Tensor  # (B, N, kv heads, D)
    value: Tensor  # (B, N, kv heads, E)
    bias: Tensor | None  # broadcastable to (B, heads, M, N)
    alibi_slopes: Tensor | None  # (heads,) or (B, heads)
    sinks: Tensor | None  # (heads,)
    seed: Tensor | None
    batch_index: Tensor  # (B,), names the entries for the dropout mask


@dataclass(frozen=True)
class Chunk:
    """Batch entries ``batch`` and KV heads ``kv_heads`` that are worked on together."""

    batch: slice
    kv_heads: slice
    group: int
    head: int | None = None  # the only query head, where each has a block mask of its own; then `group` is 1

    @property
    def heads(self) -> slice:
        """The query heads of the chunk."""
        if self.head is not None:
            return slice(self.head, self.head + 1)
        return slice(self.kv_heads.start * self.group, self.kv_heads.stop * self.group)

    @property
    def num_batch(self) -> int:
        return int(self.batch.stop - self.batch.start)

    @property
    def num_heads_kv(self) -> int:
        return int(self.kv_heads.stop - self.kv_heads.start)

    @property
    def num_groups(self) -> int:
        return self.num_batch * self.num_heads_kv

    def query_rows(self, x: Tensor) -> Tensor:
        """(B, M, heads, W) as a view (b, kv heads, G, M, W) of the chunk."""
        view: Tensor = x[self.batch, :, self.heads].unflatten(2, (self.num_heads_kv, self.group))
        return view.permute(0, 2, 3, 1, 4)

    def row_numbers(self, x: Tensor) -> Tensor:
        """(B, heads, M), one number per query row, as a view (b, kv heads, G, M, 1) of the chunk."""
        view: Tensor = x[self.batch, self.heads].unflatten(1, (self.num_heads_kv, self.group))
        return view.unsqueeze(-1)

    def key_rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, N, kv heads, W) as (C, N, W) in `dtype`: a view where a matrix product can read it in place."""
        rows = x[self.batch, :, self.kv_heads].permute(0, 2, 1, 3).flatten(0, 1)
        if rows.dtype != dtype or rows.stride(-1) != 1:
            rows = rows.to(dtype, memory_format=torch.contiguous_format)
        return rows


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, state and accumulators: float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_shape(problem: Problem, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(block_m, block_n): `_TILE_ROWS` packed rows and `_TILE_ELEMENTS` scores, wider where rows are few."""
    mask = problem.block_mask
    most = seqlen_q if mask is None else min(seqlen_q, mask.block_size[0])
    block_m = max(1, min(most, _TILE_ROWS // problem.group))
    block_n = max(1, min(seqlen_k, _TILE_ELEMENTS // (block_m * problem.group)))
    return block_m, block_n


def key_walk_shape(problem: Problem, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(block_m, block_n) of a backward along the columns of a block mask: blocks side by side are one tile."""
    assert problem.block_mask is not None
    block_n = max(1, min(seqlen_k, problem.block_mask.block_size[1], _TILE_KEYS))
    block_m = max(1, min(seqlen_q, _TILE_ELEMENTS // (block_n * problem.group)))
    return block_m, block_n


def block_tile(problem: Problem) -> tuple[int, int]:
    """Queries and keys that are loaded together with a block mask: a block, or the piece of one that a tile can hold.

    Tiles of several blocks side by side load what those load.
    """
    assert problem.block_mask is not None
    block_m, block_n = problem.block_mask.block_size
    if problem.is_backward:
        return block_m, min(block_n, _TILE_KEYS)
    return min(block_m, max(1, _TILE_ROWS // problem.group)), block_n


def chunks(call: DenseCall, block_m: int, block_n: int) -> Iterator[Chunk]:
    """Cut (batch, kv heads) into chunks whose score tiles fit the cache together but keep all threads busy."""
    num_batch, seqlen_k, num_heads_kv, head_dim = call.key.shape
    group, mask = call.problem.group, call.problem.block_mask
    if mask is not None and mask.planes != (1, 1):
        yield from _plane_chunks(call, mask)
        return
    wanted = max(torch.get_num_threads(), _CHUNK_ELEMENTS // (group * block_m * block_n))
    batch_step = max(1, wanted // num_heads_kv)
    if seqlen_k * num_heads_kv * head_dim >= _IN_PLACE_ELEMENTS:
        batch_step = 1
    head_step = min(wanted, num_heads_kv)
    for b in range(0, num_batch, batch_step):
        for h in range(0, num_heads_kv, head_step):
            yield Chunk(slice(b, min(b + batch_step, num_batch)), slice(h, min(h + head_step, num_heads_kv)), group)


def _plane_chunks(call: DenseCall, mask: BlockMask) -> Iterator[Chunk]:
    """One plane of a block mask at a time."""
    num_batch, _, num_heads_kv, _ = call.key.shape
    group = call.problem.group
    entries = [slice(b, b + 1) for b in range(num_batch)] if mask.batch > 1 else [slice(0, num_batch)]
    for batch in entries:
        if mask.num_heads == 1:
            yield Chunk(batch, slice(0, num_heads_kv), group)
            continue
        for head in range(num_heads_kv * group):
            yield Chunk(batch, slice(head // group, head // group + 1), 1, head)


def pack_rows(rows: Tensor, m_start: int, m_end: int, dtype: torch.dtype) -> Tensor:
    """Rows [m_start, m_end) of a (b, kv heads, G, M, W) view as (C, G * m, W) in `dtype`."""
    tile = rows[..., m_start:m_end, :]
    return tile.to(dtype).reshape(tile.shape[0] * tile.shape[1], -1, tile.shape[-1])
