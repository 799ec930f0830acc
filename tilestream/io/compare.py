"""The algorithms side by side for one call and one size of fast memory, as ``tilestream traffic`` shows them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from tilestream.errors import ArgumentError
from tilestream.io.cost import Cost
from tilestream.io.published import BlockMatrix, published_blocks, published_cost
from tilestream.io.schedule import TileShape, compulsory_cost, fitting_shape, once_per_pass, schedule_cost
from tilestream.io.sizes import total_cost
from tilestream.io.standard import standard_cost
from tilestream.problem import Problem

__all__ = [
    "BLOCK_SPARSE",
    "COMPULSORY",
    "OURS",
    "OURS_CACHED",
    "PUBLISHED",
    "STANDARD",
    "STANDARD_ROWS",
    "Algorithm",
    "Direction",
    "Settings",
    "SweepPoint",
    "algorithms",
    "sweep",
]


class _CostOf(Protocol):
    """The model of one algorithm."""

    def __call__(self, problem: Problem, /, backward: bool) -> Cost: ...


# Rows that a pass of standard attention streams at a time.
STANDARD_ROWS = 64
Direction = Literal["forward", "backward", "both"]
COMPULSORY, STANDARD, PUBLISHED = "compulsory", "standard", "FlashAttention"
OURS, OURS_CACHED, BLOCK_SPARSE = "tilestream", "tilestream, behind a cache", "tilestream, block-sparse"
_BACKWARDS: dict[Direction, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "both": (False, True)}


@dataclass(frozen=True)
class Settings:
    """Fast memory in bytes, tiles of this library's schedule (None: the largest that fit), and kept tiles."""

    fast_memory_bytes: int
    direction: Direction = "forward"
    block_m: int | None = None
    block_n: int | None = None
    blocks: BlockMatrix | None = None

    @property
    def backwards(self) -> tuple[bool, ...]:
        """Of each direction, in order, whether it is the backward."""
        return _BACKWARDS[self.direction]


@dataclass(frozen=True)
class Algorithm:
    """One algorithm and its model; `shapes` are the tiles of each direction, none where it has no tiles."""

    name: str
    cost: Cost
    shapes: tuple[TileShape, ...] = ()

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """(queries, keys) of all its tiles, each once."""
        pairs = [(shape.block_m, shape.block_n) for whole in self.shapes for shape in (whole, whole.of_key_pass)]
        return list(dict.fromkeys(pairs))


class SweepPoint(NamedTuple):
    """Bytes moved with one size of fast memory; None where a tile of the algorithm does not fit."""

    fast_memory_bytes: int
    published_bytes: int | None
    ours_bytes: int | None


def algorithms(parts: Sequence[Problem], settings: Settings) -> list[Algorithm]:
    """The models of every algorithm, the compulsory cost first.

    Args:
        parts: the dense calls that the call is, not none.
        settings: as the class; blocks need a dense call.

    Raises:
        ArgumentError: fast memory is smaller than a row, or tiles do not fit, or blocks do not.
    """
    widest = _widest(parts)
    shapes = [
        fitting_shape(widest, settings.fast_memory_bytes, backward, block_m=settings.block_m, block_n=settings.block_n)
        for backward in settings.backwards
    ]
    # M of the paper counts numbers of the input dtype.
    published = published_blocks(settings.fast_memory_bytes // widest.dtype.itemsize, widest.head_dim)

    def of_part(part: Problem, backward: bool, blocks: BlockMatrix | None = None) -> Cost:
        return schedule_cost(part, shapes[settings.backwards.index(backward)], backward, blocks)

    found = [
        Algorithm(COMPULSORY, _in_order(parts, settings, compulsory_cost)),
        Algorithm(STANDARD, _in_order(parts, settings, functools.partial(standard_cost, block_m=STANDARD_ROWS))),
        Algorithm(
            PUBLISHED,
            _in_order(parts, settings, lambda part, backward: published_cost(part, published, backward)),
            (TileShape(*published),) * len(settings.backwards),
        ),
        Algorithm(OURS, _in_order(parts, settings, of_part), tuple(shapes)),
        Algorithm(
            OURS_CACHED,
            _in_order(parts, settings, lambda part, backward: once_per_pass(part, of_part(part, backward))),
            tuple(shapes),
        ),
    ]
    if settings.blocks is not None:
        if len(parts) > 1:
            raise ArgumentError("kept blocks are of one dense call, not of packed sequences.")
        if settings.block_m is None or settings.block_n is None:
            raise ArgumentError("kept blocks are those of one shape of tiles; give block_m and block_n.")
        sparse = functools.partial(of_part, blocks=settings.blocks)
        found.append(Algorithm(BLOCK_SPARSE, _in_order(parts, settings, sparse), tuple(shapes)))
    return found


def sweep(parts: Sequence[Problem], direction: Direction, sizes: Sequence[int]) -> list[SweepPoint]:
    """What the tiled algorithms move with each of these sizes of fast memory, in bytes, with the largest tiles."""
    widest = _widest(parts)

    def published(part: Problem, backward: bool, size: int) -> Cost:
        return published_cost(part, published_blocks(size // widest.dtype.itemsize, widest.head_dim), backward)

    def ours(part: Problem, backward: bool, size: int) -> Cost:
        return schedule_cost(part, fitting_shape(widest, size, backward), backward)

    points = []
    for size in sizes:
        settings = Settings(size, direction)
        costs = (functools.partial(cost_of, size=size) for cost_of in (published, ours))
        points.append(SweepPoint(size, *(_moved_if_it_fits(parts, settings, cost_of) for cost_of in costs)))
    return points


def _moved_if_it_fits(parts: Sequence[Problem], settings: Settings, cost_of: _CostOf) -> int | None:
    try:
        return _in_order(parts, settings, cost_of).traffic.total_bytes
    except ArgumentError:
        return None


def _in_order(parts: Sequence[Problem], settings: Settings, cost_of: _CostOf) -> Cost:
    """Every part together, one direction after the other."""
    cost = Cost()
    for backward in settings.backwards:
        cost = cost.then(total_cost(functools.partial(cost_of, backward=backward), parts))
    return cost


def _widest(parts: Sequence[Problem]) -> Problem:
    """A call whose tiles are as large as those of any part."""
    longest = {name: max(getattr(part, name) for part in parts) for name in ("seqlen_q", "seqlen_k")}
    return dataclasses.replace(parts[0], **longest)
