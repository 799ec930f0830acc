"""What every replay shares: a dense call's tensors in slow memory, and its mask, dropout and softmax step on one tile.

Shapes: B batch, H query heads, M queries, N keys, D head_dim, E head_dim_v; heads stand before tokens in here.
Lower-case m are the rows of a tile: those of each of its heads, one head after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.dropout import keep_mask
from tilestream.io.memory import FastTile, TwoLevelMemory
from tilestream.io.sizes import accumulator_bytes
from tilestream.problem import Problem
from tilestream.teaching import hide

__all__ = ["DenseCall", "Results", "evict", "spans"]


@dataclass
class Results:
    """Tensors of slow memory after a replay, heads before tokens; None where the replay does not write them.

    FlashAttention as published leaves `row_max` and `row_sum` (B, H, M), and the caller makes `lse` of them.
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    row_max: Tensor | None = None
    row_sum: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


@dataclass(frozen=True)
class DenseCall:
    """Tensors of one dense call in the precision of the replay: q (B, H, M, D), k (B, KV heads, N, D), v, dout.

    `sequences` (B,) are the batch indices that the dropout mask is made from.
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    sequences: Tensor
    seed: Tensor | None = None
    dout: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def element_bytes(self) -> int:
        """Bytes of a number of the call's tensors."""
        return self.problem.dtype.itemsize

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of a running sum."""
        return accumulator_bytes(self.problem)

    def bind_inputs(self, memory: TwoLevelMemory) -> None:
        """q, k, v, and dout where there is one, lie in slow memory."""
        for name in ("q", "k", "v", "dout"):
            tensor = getattr(self, name)
            if tensor is not None:
                memory.bind(name, tensor, self.element_bytes)

    def allocate_like(self, memory: TwoLevelMemory, name: str, tensor: Tensor) -> Tensor:
        """A result of the shape of an input."""
        return memory.allocate(name, tensor.shape, self.element_bytes, self.dtype)

    def allocate_out(self, memory: TwoLevelMemory) -> Tensor:
        """`out` (B, H, M, E)."""
        return memory.allocate("out", (*self.q.shape[:3], self.v.shape[3]), self.element_bytes, self.dtype)

    def allocate_rows(self, memory: TwoLevelMemory, name: str, is_extra: bool = False) -> Tensor:
        """A number per row (B, H, M), of the accumulators' size."""
        return memory.allocate(name, self.q.shape[:3], self.accumulator_bytes, self.dtype, is_extra)

    def reserve(self, memory: TwoLevelMemory, *shape: int) -> FastTile:
        """Room for sums or scores."""
        return memory.reserve(shape, self.accumulator_bytes, self.dtype)

    def streams(self, packs_group: bool) -> Iterator[tuple[int, int, slice]]:
        """(batch entry, KV head, its query heads that share a tile)."""
        problem = self.problem
        step = problem.group if packs_group else 1
        for b in range(problem.batch):
            for head in range(0, problem.num_heads_q, step):
                yield b, head // problem.group, slice(head, head + step)

    def hidden(self, rows: slice, keys: slice, num_heads: int = 1) -> Tensor:
        """0 where the band shows key j to query i and -inf elsewhere, (num_heads * m, n); one 0 if it has no limit."""
        assert self.problem.shift is not None
        if self.problem.spec.band.is_unlimited:
            return torch.zeros((), dtype=self.dtype)
        shape = (rows.stop - rows.start, keys.stop - keys.start)
        mask_mn = torch.zeros(shape, dtype=self.dtype)
        return hide(mask_mn, self.problem.spec.band, self.problem.shift, rows.start, keys.start).repeat(num_heads, 1)

    def scores(self, memory: TwoLevelMemory, q_m: Tensor, k_n: Tensor) -> Tensor:
        """scale * q k^T of a tile."""
        return self.problem.spec.scale * memory.product(q_m, k_n.T)

    def kept(self, b: int, heads: slice, rows: slice, keys: slice) -> Tensor:
        """Which weights dropout keeps, as 0 and 1, (heads * m, n); made on chip. One 1 if there is no dropout."""
        num_rows = (heads.stop - heads.start) * (rows.stop - rows.start)
        if self.problem.spec.dropout_p == 0:
            return torch.ones((), dtype=self.dtype)
        assert self.seed is not None
        head_numbers = torch.arange(heads.start, heads.stop)
        mask = keep_mask(
            self.seed, self.problem.spec.dropout_p, self.sequences[b : b + 1], head_numbers,
            range(rows.start, rows.stop), range(keys.start, keys.stop),
        )  # fmt: skip
        return mask.to(self.dtype).reshape(num_rows, -1)

    @property
    def dropout_factor(self) -> float:
        """What kept weights are multiplied by."""
        return 1.0 / (1.0 - self.problem.spec.dropout_p)


def spans(length: int, block: int) -> list[slice]:
    """The blocks that `length` is cut into."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def evict(*tiles: FastTile) -> None:
    """Give up tiles that are done with."""
    for tile in tiles:
        tile.evict()
