"""The score pipeline on one tile and its backward twin: softcap, bias, ALiBi, mask, in that order.

Shapes: s_mn, p_mn, ds_mn are (C, G * m, n), viewed as (b, heads, m, n) where a feature needs positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.backends.cpu.layout import Chunk, DenseCall, compute_dtype
from tilestream.dropout import keep_mask
from tilestream.tiles import Tile, TileKind

__all__ = ["ScoreTile", "add_product", "is_tame", "per_row", "product"]

_INFINITY = float("inf")


@dataclass(frozen=True)
class ScoreTile:
    """One tile of one chunk of a call."""

    call: DenseCall
    chunk: Chunk
    tile: Tile
    # False where products may be NaN or infinite, which must not reach a row through a key it cannot see.
    is_tame: bool
    # bool (m, n): what a PARTIAL block hides.
    hidden: Tensor | None = None

    def forward(self, s_mn: Tensor) -> Tensor:
        """Turn scaled dot products into masked scores, in place."""
        spec = self.call.problem.spec
        if spec.softcap > 0:
            s_mn.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if self.call.bias is not None:
            block = self.bias_block(self.call.bias)
            self.by_position(s_mn).add_(block)
            if not self.is_tame:
                self.by_position(s_mn).masked_fill_(block == -_INFINITY, -_INFINITY)
        if self.call.alibi_slopes is not None:
            slopes = self._per_head(self.call.alibi_slopes).to(s_mn.dtype)
            self.by_position(s_mn).addcmul_(slopes, self._distance().abs().to(s_mn.dtype), value=-1)
        if self.tile.kind is TileKind.PARTIAL:
            self.by_position(s_mn).masked_fill_(self._hidden(), -_INFINITY)
        if self.hidden is not None:
            self.by_position(s_mn).masked_fill_(self.hidden, -_INFINITY)
        return s_mn

    def backward(self, ds_mn: Tensor, raw_mn: Tensor | None, dbias: Tensor | None) -> Tensor:
        """Turn gradients of the scores into gradients of the scaled dot products `raw_mn`, in place.

        `raw_mn` is only needed, and then overwritten, where softcap is on. `dbias` is added to, where given.
        """
        if dbias is not None:
            self.add_bias_gradient(ds_mn, dbias)
        if raw_mn is not None:
            tanh_mn = raw_mn.div_(self.call.problem.spec.softcap).tanh_()
            # d tanh(x) = 1 - tanh(x)^2
            ds_mn.addcmul_(ds_mn, tanh_mn.square_(), value=-1)
        return ds_mn

    def visible(self, s_mn: Tensor) -> Tensor | None:
        """bool, shaped as the masked scores: what `add_product` needs where an operand is not finite, else None."""
        return None if self.is_tame else s_mn != -_INFINITY

    def add_bias_gradient(self, ds_mn: Tensor, dbias: Tensor) -> None:
        """Add the tile's gradients to `dbias` in place, summed over the dimensions that the bias broadcasts."""
        broadcast = [axis for axis, size in enumerate(dbias.shape) if size == 1]
        gradient = self.by_position(ds_mn)
        self.bias_block(dbias).add_(gradient.sum(dim=broadcast, keepdim=True) if broadcast else gradient)

    def dropout_factor(self, dtype: torch.dtype) -> Tensor | None:
        """(C, G * m, n): 0 where a weight is dropped, 1 / (1 - dropout_p) where it is kept; None without dropout."""
        dropout_p = self.call.problem.spec.dropout_p
        if dropout_p == 0:
            return None
        assert self.call.seed is not None
        heads, tile = self.chunk.heads, self.tile
        kept = keep_mask(
            self.call.seed,
            dropout_p,
            self.call.batch_index[self.chunk.batch],
            torch.arange(heads.start, heads.stop, device=self.call.query.device),
            range(tile.m_start, tile.m_end),
            range(tile.n_start, tile.n_end),
        )
        factor = kept.to(dtype).div_(1.0 - dropout_p)
        num_rows = self.chunk.group * (tile.m_end - tile.m_start)
        return factor.view(self.chunk.num_groups, num_rows, tile.n_end - tile.n_start)

    def by_position(self, x: Tensor) -> Tensor:
        """(C, G * m, n) viewed as (b, heads, m, n)."""
        num_heads = self.chunk.num_heads_kv * self.chunk.group
        return x.view(self.chunk.num_batch, num_heads, self.tile.m_end - self.tile.m_start, x.shape[-1])

    def _distance(self) -> Tensor:
        """j - (i + shift), int64 (m, n)."""
        device, tile = self.call.query.device, self.tile
        i = torch.arange(tile.m_start, tile.m_end, device=device)[:, None] + self.call.shift
        return torch.arange(tile.n_start, tile.n_end, device=device) - i

    def _hidden(self) -> Tensor:
        """bool (m, n): where the band hides key j from query i. Triangles are cheaper than comparing positions."""
        band, tile = self.call.problem.spec.band, self.tile
        everything = torch.ones(
            tile.m_end - tile.m_start, tile.n_end - tile.n_start, dtype=torch.bool, device=self.call.query.device
        )
        # Distance j - (i + shift) of the tile's first entry; a diagonal of the tile is one distance.
        corner = tile.n_start - (tile.m_start + self.call.shift)
        num_rows, num_keys = everything.shape

        def diagonal(distance: int) -> int:
            """A diagonal of the tile; limits may be any int, and triu takes 64 bits."""
            return max(-num_rows, min(distance - corner, num_keys))

        if band.right is None:
            assert band.left is not None
            return everything.tril(diagonal(-band.left - 1))
        right = everything.triu(diagonal(band.right + 1))
        return right if band.left is None else right.logical_or_(everything.tril_(diagonal(-band.left - 1)))

    def _per_head(self, x: Tensor) -> Tensor:
        """(heads,) or (B, heads) as (b | 1, heads of the chunk, 1, 1)."""
        x = x[None] if x.dim() == 1 else x[self.chunk.batch]
        return x[:, self.chunk.heads, None, None]

    def bias_block(self, bias: Tensor) -> Tensor:
        """The tile's view of a tensor broadcastable to (B, heads, M, N)."""
        tile = self.tile
        wanted = (
            self.chunk.batch,
            self.chunk.heads,
            slice(tile.m_start, tile.m_end),
            slice(tile.n_start, tile.n_end),
        )
        return bias[tuple(slice(None) if size == 1 else cut for size, cut in zip(bias.shape, wanted, strict=True))]


def per_row(x: Tensor, chunk: Chunk, num_rows: int, dtype: torch.dtype) -> Tensor:
    """(heads,) as (C, G * m, 1): each packed query row's own number."""
    by_head = x[chunk.heads].to(dtype).view(1, chunk.num_heads_kv, chunk.group, 1)
    return by_head.expand(chunk.num_batch, -1, -1, num_rows).reshape(chunk.num_groups, -1, 1)


def is_tame(*pairs: tuple[Tensor, Tensor], scale: float = 1.0) -> bool:
    """Whether no row product of any pair can be or become NaN or infinite, so that no care for 0 * NaN is needed.

    Each pair is two tensors whose last dimensions are multiplied and summed. Looking costs a synchronisation off the
    CPU: there the answer is no.
    """
    for one, other in pairs:
        if one.device.type != "cpu":
            return False
        bound = _largest(one) * _largest(other) * max(1.0, abs(scale)) * max(1, one.shape[-1])
        if not bound < 0.01 * torch.finfo(compute_dtype(one.dtype)).max:
            return False
    return True


def _largest(x: Tensor) -> float:
    """The largest magnitude, NaN if there is one; one pass, no copy."""
    if x.numel() == 0:
        return 0.0
    lowest, highest = torch.aminmax(x)
    return max(abs(lowest.item()), abs(highest.item())) if highest == highest else float("nan")


def product(weights: Tensor, operand: Tensor, visible: Tensor | None) -> Tensor:
    """``weights @ operand``, with `visible` as in `add_product`."""
    if visible is None:
        return torch.bmm(weights, operand)
    total = torch.zeros(*weights.shape[:-1], operand.shape[-1], dtype=operand.dtype, device=operand.device)
    add_product(total, weights, operand, visible)
    return total


def add_product(acc: Tensor, weights: Tensor, operand: Tensor, visible: Tensor | None) -> None:
    """``acc += weights @ operand`` in place, all batched over C.

    With `visible` (bool, shaped as `weights`) an operand row that is not finite reaches only the rows of `acc` that
    see it; without, 0 * NaN would poison the others.
    """
    finite = None if visible is None else torch.isfinite(operand)
    safe = operand if finite is None else operand.masked_fill(~finite, 0.0)
    if acc.is_contiguous():
        acc.baddbmm_(weights, safe)
    else:
        # Into a slice of a larger accumulator baddbmm_ would run one product after the other.
        acc.add_(torch.bmm(weights, safe))
    if visible is None:
        return
    sees = visible.to(acc.dtype)
    for is_kind, kind in (
        (operand == _INFINITY, _INFINITY),
        (operand == -_INFINITY, -_INFINITY),
        (operand.isnan(), float("nan")),
    ):
        acc.add_(torch.zeros_like(acc).masked_fill_(torch.bmm(sees, is_kind.to(acc.dtype)) > 0, kind))
