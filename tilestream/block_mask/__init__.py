"""Which blocks of the score matrix block-sparse attention computes, and which pairs of them are visible."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilestream.block_mask import checks, flex, patterns
from tilestream.block_mask.lists import AND, EMPTY, FULL, OR, PARTIAL, UNSETTLED, BlockLists, cut_rows
from tilestream.block_mask.patterns import Grid, grid_of
from tilestream.block_mask.picture import picture
from tilestream.block_mask.rules import (
    Banded,
    Both,
    Dilated,
    Either,
    Fixed,
    InBlocks,
    Predicate,
    Prefix,
    Rule,
    Strided,
    Transposed,
    Within,
)
from tilestream.errors import ArgumentError, DtypeError, ShapeError
from tilestream.spec import Band

__all__ = ["BlockMask"]

BlockSize = int | tuple[int, int]
Window = tuple[int | None, int | None] | None

_handles = itertools.count(1)
# Operators take numbers and tensors alone: a mask goes through them as its handle.
_ALIVE: weakref.WeakValueDictionary[int, BlockMask] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Blocks of ``block_m`` queries x ``block_n`` keys, each EMPTY, PARTIAL (some pairs) or FULL; immutable.

    Made by the class methods, each of which takes ``block_size``: one int, or (queries, keys) of a block; 128 by
    default. None of them makes seqlen_q x seqlen_k entries: kept blocks are runs of blocks along a row, and visible
    pairs of PARTIAL blocks follow from a description. Positions align the ends, as everywhere: query i stands at key
    ``i + seqlen_k - seqlen_q``, unless ``shift`` says otherwise. Blocks are told as exactly as can be: a block that is
    cut short by the end of a sequence is FULL if all of its pairs are visible.

    A mask is one for all batch entries or has ``batch`` of them, and likewise for query heads.

    Raises: ShapeError, DtypeError or ArgumentError (all ValueErrors), which name the argument that does not fit.
    Cost: of the makers of patterns time and memory in proportion to runs of blocks, where they do not say otherwise;
    O(seqlen_q * seqlen_k) time, in pieces, where pairs must be looked at. Lists are on the CPU, int32.
    Source: arXiv:2205.14135, section 3.3; docs/block-sparse.md.

    ``mask & other``, ``mask | other`` and ``mask.transpose()`` are masks; operands have the same lengths and blocks.
    """

    grid: Grid
    planes: tuple[int, int]
    lists: BlockLists
    rule: Rule
    handle: int = field(default_factory=lambda: next(_handles))

    def __post_init__(self) -> None:
        _ALIVE[self.handle] = self

    @classmethod
    def from_handle(cls, handle: int) -> BlockMask:
        """The mask whose ``handle`` this is.

        Raises:
            ArgumentError: it is gone; whoever uses a compiled function that was given a mask must keep the mask.
        """
        found = _ALIVE.get(int(handle))
        if found is None:
            raise ArgumentError(
                "block_mask no longer exists; keep it as long as the compiled function that was given it."
            )
        return found

    # ---- patterns

    @classmethod
    def from_band(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        causal: bool = False,
        window: Window = None,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """Causal, a window of (left, right) keys, or both; with neither everything is kept. O(rows of blocks)."""
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        band = checks.band(causal, window)
        return cls(grid, (1, 1), patterns.band_lists(grid, band), Banded(band, grid.shift))

    @classmethod
    def dilated(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        window: Window,
        dilation: int,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """A dilated window: ``window`` = (left, right) keys on each side, ``dilation`` apart. arXiv:2004.05150.

        In blocks larger than the dilation every pair of blocks in reach is PARTIAL: nothing is saved inside.
        """
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        dilation = checks.integer("dilation", dilation, 1)
        reach = checks.band(False, window)
        band = Band(*(None if limit is None else limit * dilation for limit in (reach.left, reach.right)))
        return cls._of_distances(grid, Dilated(band, dilation, grid.shift))

    @classmethod
    def strided(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        stride: int,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """Sparse Transformer's strided pattern: the last ``stride`` keys, and every ``stride``-th before. Causal;
        both of the paper's heads in one. arXiv:1904.10509."""
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        return cls._of_distances(grid, Strided(checks.integer("stride", stride, 1), grid.shift))

    @classmethod
    def fixed(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        stride: int,
        num_summary: int,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """Sparse Transformer's fixed pattern: keys of the query's own part of ``stride``, and the last
        ``num_summary`` keys of every part before. Causal; both of the paper's heads in one. arXiv:1904.10509."""
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        stride = checks.integer("stride", stride, 1)
        if checks.integer("num_summary", num_summary) > stride:
            raise ArgumentError(f"num_summary is {num_summary}, but a part has only stride = {stride} keys.")
        rule = Fixed(stride, num_summary, grid.shift)
        return cls._settled(grid, (1, 1), patterns.fixed_lists(grid, rule), rule)

    @classmethod
    def local_global(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        window: Window,
        global_tokens: int | Tensor,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """Longformer: a window, and global tokens that see and are seen by all. arXiv:2004.05150.

        Args:
            global_tokens: their number (the first ones), or bool (seqlen_k,). Of queries those that stand at such keys.
        """
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        band = checks.band(False, window)
        keys = checks.chosen("global_tokens", global_tokens, grid.seqlen_k)
        lists, rule = patterns.local_global(grid, band, keys)
        return cls._settled(grid, (1, 1), lists, rule)

    @classmethod
    def bigbird(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        num_window: int = 1,
        num_global: int = 1,
        num_random: int = 3,
        seed: int = 0,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """BigBird: whole blocks; ``num_window`` on each side of the diagonal, the first ``num_global`` rows and
        columns, and ``num_random`` others a row, drawn with ``seed``. arXiv:2007.14062."""
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        numbers = (("num_window", num_window), ("num_global", num_global), ("num_random", num_random))
        counts = [checks.integer(name, number) for name, number in numbers]
        lists = patterns.bigbird_lists(grid, counts, checks.integer("seed", seed))
        return cls._of_blocks(grid, (1, 1), lists)

    @classmethod
    def butterfly(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """The fixed butterfly pattern of FlashAttention's block-sparse measurements: whole blocks, kept where the
        numbers of row and column differ in one binary digit or none. arXiv:2205.14135, arXiv:2112.00029.

        Blocks that are not square are kept or not in squares of their longer side, which the other must divide.
        """
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        if max(grid.block_size) % min(grid.block_size) != 0:
            raise ArgumentError(f"block_size {grid.block_size}: one side must divide the other for a butterfly.")
        if grid.shift % max(grid.block_size) != 0 or grid.shift < 0:
            raise ArgumentError(f"shift is {grid.shift}, but a butterfly needs whole blocks of {max(grid.block_size)}.")
        return cls._of_blocks(grid, (1, 1), patterns.butterfly_lists(grid))

    @classmethod
    def prefix_lm(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        prefix_lengths: int | Sequence[int] | Tensor,
        shift: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """Causal, but that the first ``prefix_lengths`` keys (one number, or one per batch entry) are seen by all."""
        grid = grid_of(seqlen_q, seqlen_k, block_size, shift)
        lengths = checks.lengths_of("prefix_lengths", prefix_lengths)
        causal = patterns.band_lists(grid, Band(None, 0))
        parts = [patterns.prefix_lists(grid, length).combine(causal, OR) for length in lengths.flatten().tolist()]
        rule = Either(Banded(Band(None, 0), grid.shift), Prefix(lengths))
        return cls._settled(grid, (len(lengths), 1), BlockLists.stack(grid.num_columns, parts), rule)

    @classmethod
    def from_document_ids(cls, ids_q: Tensor, ids_k: Tensor | None = None, *, block_size: BlockSize = 128) -> BlockMask:
        """Queries see the keys of their own document.

        Args:
            ids_q, ids_k: integers (seqlen,) or (batch, seqlen); the keys' are the queries' if left out. In O(tokens)
                where ids never decrease along a sequence; in any other order every pair is looked at, a few at a time.
        """
        found = checks.document_ids(ids_q, ids_q if ids_k is None else ids_k)
        grid = grid_of(found[0].shape[1], found[1].shape[1], block_size, None)
        lists, rule = patterns.documents(grid, *found)
        return cls._settled(grid, (max(map(len, found)), 1), lists, rule)

    # ---- given

    @classmethod
    def from_blocks(
        cls, blocks: Tensor, seqlen_q: int, seqlen_k: int | None = None, *, block_size: BlockSize = 128
    ) -> BlockMask:
        """The blocks that a matrix keeps, whole; FlashAttention 1 has such masks, with block_size=(16, 256).

        Args:
            blocks: bool, or integers of which 0 is not kept; (rows, columns) of blocks, or with (num_heads,) or
                (batch, num_heads) before, each 1 or all of them.
        """
        grid = grid_of(seqlen_q, seqlen_k, block_size, None)
        kept = checks.planes_of("blocks", blocks, (grid.num_rows, grid.num_columns), "(rows, columns) of blocks")
        flat = kept.flatten(0, 2)
        parts = (BlockLists.from_kinds(flat[cut].to(torch.int8) * FULL) for cut in cut_rows(*flat.shape))
        return cls._of_blocks(grid, (kept.shape[0], kept.shape[1]), BlockLists.stack(grid.num_columns, parts))

    @classmethod
    def from_dense(cls, mask: Tensor, *, block_size: BlockSize = 128) -> BlockMask:
        """Of a mask that exists already: bool (seqlen_q, seqlen_k), or with (num_heads,) or (batch, num_heads) before.

        PARTIAL blocks are stored as bits.
        """
        checks.has_two_axes("mask", mask)
        lengths = (mask.shape[-2], mask.shape[-1])
        dense = checks.planes_of("mask", mask, lengths, "(seqlen_q, seqlen_k)")
        grid, planes = grid_of(*lengths, block_size, None), (dense.shape[0], dense.shape[1])
        return cls(grid, planes, *patterns.packed(grid, planes, dense))

    @classmethod
    def from_predicate(
        cls,
        predicate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        batch: int | None = None,
        num_heads: int | None = None,
        block_size: BlockSize = 128,
    ) -> BlockMask:
        """Of ``predicate(b, h, i, j)``, which is asked about every pair once, some blocks at a time.

        Args:
            predicate: a pure function: integer tensors that broadcast (batch entry, query head, query, key) to bool. It
                is kept, and asked again about PARTIAL blocks whenever they are computed. A FlexAttention
                ``mask_mod`` is one if it takes tensors of any shape.
            batch, num_heads: how many it tells apart; None: none, and it is asked about entry 0 or head 0.
        """
        if not callable(predicate):
            raise DtypeError(f"predicate must be a function of (b, h, i, j), got {type(predicate).__name__}.")
        grid = grid_of(seqlen_q, seqlen_k, block_size, None)
        planes = checks.plane_counts(batch, num_heads)
        rule = Predicate(predicate, planes[0] > 1, planes[1] > 1)
        return cls._settled(grid, planes, patterns.whole_lists(grid, UNSETTLED, math.prod(planes)), rule)

    @classmethod
    def from_flex_attention(cls, block_mask: Any) -> BlockMask:
        """Of a torch.nn.attention.flex_attention.BlockMask, whose ``mask_mod`` must take tensors of any shape."""
        lengths, block_size, planes, lists, mask_mod = flex.from_flex(block_mask)
        grid = grid_of(*lengths, block_size, None)
        rule = Predicate(mask_mod, planes[0] > 1, planes[1] > 1)
        settled = patterns.settle(grid, planes, lists, rule)
        return cls(grid, planes, settled, Within(InBlocks(settled, planes, block_size), rule))

    def to_flex_attention(self, device: torch.device | str = "cpu") -> Any:
        """The same mask as a torch.nn.attention.flex_attention.BlockMask; int32 per block and plane, kept or not."""
        lengths = (self.seqlen_q, self.seqlen_k)
        return flex.to_flex(lengths, self.block_size, self.planes, self.lists, self.rule, torch.device(device))

    # ---- algebra

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both masks show."""
        return self._combined(other, AND, Both, "&")

    def __or__(self, other: BlockMask) -> BlockMask:
        """What one of the masks shows."""
        return self._combined(other, OR, Either, "|")

    def transpose(self) -> BlockMask:
        """Queries and keys exchanged."""
        return BlockMask(self.grid.transposed, self.planes, self.transposed_lists, Transposed(self.rule))

    # ---- facts

    @property
    def seqlen_q(self) -> int:
        return self.grid.seqlen_q

    @property
    def seqlen_k(self) -> int:
        return self.grid.seqlen_k

    @property
    def block_size(self) -> tuple[int, int]:
        return self.grid.block_size

    @property
    def batch(self) -> int:
        return self.planes[0]

    @property
    def num_heads(self) -> int:
        return self.planes[1]

    @functools.cached_property
    def transposed_lists(self) -> BlockLists:
        """Per column of blocks the rows that keep it: what makes dk and dv. Made when first asked for."""
        return self.lists.transposed(math.prod(self.planes))

    @property
    def density(self) -> float:
        """The fraction of blocks that are kept, PARTIAL ones included; exact. 1.0 where there are no blocks."""
        num_blocks = self.lists.num_rows * self.grid.num_columns
        kept = self.lists.num_blocks(PARTIAL) + self.lists.num_blocks(FULL)
        return kept / num_blocks if num_blocks else 1.0

    def num_pairs(self) -> int:
        """How many pairs are visible, over all planes; exact. Looks at every pair of PARTIAL blocks."""
        return patterns.count_pairs(self.grid, self.planes, self.lists, self.rule)

    def pair_density(self) -> float:
        """The fraction of pairs that are visible; as `num_pairs`. 1.0 where there are no pairs."""
        num_pairs = math.prod(self.planes) * self.seqlen_q * self.seqlen_k
        return self.num_pairs() / num_pairs if num_pairs else 1.0

    def to_blocks(self) -> Tensor:
        """bool (batch, num_heads, rows, columns): which blocks are kept. A byte per block."""
        kinds = self.lists.to_kinds(slice(0, self.lists.num_rows))
        return kinds.gt(EMPTY).view(*self.planes, self.grid.num_rows, self.grid.num_columns)

    def to_dense(self) -> Tensor:
        """bool (batch, num_heads, seqlen_q, seqlen_k): every pair, for small masks and for tests."""
        (batch, num_heads), grid = self.planes, self.grid
        kinds = self.lists.to_kinds(slice(0, self.lists.num_rows))
        kinds = kinds.view(batch, num_heads, grid.num_rows, grid.num_columns)
        kinds = kinds.repeat_interleave(grid.block_m, 2).repeat_interleave(grid.block_n, 3)
        kinds = kinds[:, :, : self.seqlen_q, : self.seqlen_k]
        if kinds.numel() == 0:
            return kinds.eq(FULL)
        b, h, i, j = (torch.arange(size) for size in kinds.shape)
        visible = self.rule(b[:, None, None, None], h[:, None, None], i[:, None], j)
        return kinds.eq(FULL) | (kinds.eq(PARTIAL) & visible)

    def show(self, plane: tuple[int, int] = (0, 0), max_columns: int = 64) -> str:
        """A picture of one plane, a character per block: ``#`` FULL, ``+`` PARTIAL, ``.`` EMPTY.

        Where there are more than ``max_columns`` rows or columns of blocks, a character stands for several: ``#`` if
        all are FULL, ``.`` if all are EMPTY.

        Example:
            >>> print(BlockMask.from_band(512, window=(128, 0), block_size=64).show())
            +.......
            #+......
            +#+.....
            .+#+....
            ..+#+...
            ...+#+..
            ....+#+.
            .....+#+
        """
        checks.integer("max_columns", max_columns, 1)
        rows = self.grid.num_rows
        first = self.plane(*plane) * rows
        return picture(self.lists.to_kinds, slice(first, first + rows), self.grid.num_columns, max_columns)

    def __repr__(self) -> str:
        """Sizes and density."""
        return (
            f"BlockMask(seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, block_size={self.block_size}, "
            f"batch={self.batch}, num_heads={self.num_heads}, density={self.density:.4g})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is another mask, with a handle of its own."""
        return (BlockMask, (self.grid, self.planes, self.lists, self.rule))

    # ---- for kernels

    def plane(self, b: int, h: int) -> int:
        """The number of the plane that batch entry b and query head h read."""
        return (b if self.batch > 1 else 0) * self.num_heads + (h if self.num_heads > 1 else 0)

    def visible(self, b: int, h: int, queries: range, keys: range, device: torch.device) -> Tensor:
        """bool (queries, keys): the pairs of a rectangle, for PARTIAL tiles."""
        entry, head = (torch.tensor(x, device=device) for x in (b, h))
        i = torch.arange(queries.start, queries.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)
        return self.rule(entry, head, i, j).expand(len(queries), len(keys))

    # ---- making

    @classmethod
    def _settled(cls, grid: Grid, planes: tuple[int, int], lists: BlockLists, rule: Rule) -> BlockMask:
        return cls(grid, planes, patterns.settle(grid, planes, lists, rule), rule)

    @classmethod
    def _of_blocks(cls, grid: Grid, planes: tuple[int, int], lists: BlockLists) -> BlockMask:
        return cls(grid, planes, lists, InBlocks(lists, planes, grid.block_size))

    @classmethod
    def _of_distances(cls, grid: Grid, rule: Dilated | Strided) -> BlockMask:
        """Of a rule that looks at j - (i + shift) alone."""
        zero, lowest = torch.tensor(0), -(grid.seqlen_q - 1) - grid.shift
        if min(grid.seqlen_q, grid.seqlen_k) == 0:
            return cls(grid, (1, 1), patterns.whole_lists(grid), rule)
        highest = lowest + grid.seqlen_q + grid.seqlen_k - 1
        dtype = torch.int32 if -(2**30) < lowest < highest < 2**30 else torch.int64
        visible = rule(zero, zero, torch.tensor(-grid.shift), torch.arange(lowest, highest, dtype=dtype))
        return cls(grid, (1, 1), patterns.periodic_lists(grid, visible), rule)

    def _combined(self, other: BlockMask, table: Tensor, rule: type[Both | Either], sign: str) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        mine, theirs = ((mask.seqlen_q, mask.seqlen_k, *mask.block_size) for mask in (self, other))
        if mine != theirs:
            raise ShapeError(
                f"{sign} needs masks of the same lengths and blocks, got (seqlen_q, seqlen_k, block_m, block_n) {mine}"
                f" and {theirs}; make both with the same block_size."
            )
        if any(1 not in pair and pair[0] != pair[1] for pair in zip(self.planes, other.planes, strict=True)):
            raise ShapeError(f"{sign} of masks with (batch, num_heads) {self.planes} and {other.planes}.")
        planes = (max(self.batch, other.batch), max(self.num_heads, other.num_heads))
        one, two = (mask._repeated(planes) for mask in (self, other))
        return BlockMask._settled(self.grid, planes, one.combine(two, table), rule(self.rule, other.rule))

    def _repeated(self, planes: tuple[int, int]) -> BlockLists:
        """The lists, with those of one plane for all as often as there are planes."""
        if planes == self.planes:
            return self.lists
        numbers = [self.plane(b, h) for b in range(planes[0]) for h in range(planes[1])]
        rows = torch.tensor(numbers)[:, None] * self.grid.num_rows + torch.arange(self.grid.num_rows)
        return self.lists.select(rows.flatten())
