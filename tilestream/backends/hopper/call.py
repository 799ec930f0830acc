"""What travels to the kernel: its compile-time facts as one hashable object, its numbers as one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.backends.triton.call import contiguous_strides, sizes_of
from tilestream.problem import Problem

__all__ = [
    "ALIGNMENT",
    "SHARED_BYTES",
    "Config",
    "Facts",
    "Numbers",
    "block_of",
    "config_for",
    "facts_of",
    "numbers_of",
    "readable",
    "tma_strides",
]

# Bytes; what TMA takes as addresses and as strides.
ALIGNMENT = 16

# Half of Hopper's L2 cache.
_CACHED_BYTES = 24 << 20
_HEADS_TOGETHER = 16

# Of a program on Hopper.
SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class Config:
    """How the kernel is cut; what each of these does is in `forward.py`."""

    block_m: int
    block_n: int
    num_consumers: int
    num_stages: int
    registers: int
    takes_turns: bool = True
    splits_exp2: bool = False
    keeps_max: bool = True


@dataclass(frozen=True)
class Facts:
    """What a kernel is compiled for. Plain values only: a function here would be missing from Triton's cache key."""

    config: Config
    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    # Rows of a tile that one consumer has.
    rows: int
    has_left: bool
    has_right: bool
    flags: bool
    is_dynamic: bool
    shares_q: bool
    # Of `triton.tiles.key_ranges`: rows are not packed here.
    group: int = 1

    @property
    def of_consumer(self) -> Facts:
        """The facts of a consumer's rows."""
        return replace(self, block_m=self.rows)


class Numbers(NamedTuple):
    """Sizes and factors. The names that `triton.tiles.key_ranges` reads are those of its `Sequence`."""

    num_units: int  # row tiles of all heads
    num_row_tiles: int
    # Heads of all batch entries, and how many of them are worked on at a time.
    num_sides: int
    num_together: int
    num_heads: int
    group: int
    seqlen_q: int
    seqlen_k: int
    left_edge: int
    right_edge: int
    scale_log2: float


# By the larger head dimension on chip.
_CONFIGS = {
    64: Config(192, 128, num_consumers=3, num_stages=4, registers=160),
    128: Config(128, 128, num_consumers=2, num_stages=2, registers=240, takes_turns=False, keeps_max=False),
    256: Config(128, 64, num_consumers=2, num_stages=2, registers=240, takes_turns=False),
}


def block_of(width: int) -> int:
    """A head dimension as it is on chip."""
    return max(64, 1 << (width - 1).bit_length())


def config_for(problem: Problem) -> Config:
    """The tiles of a call; they depend on no length, so that a changed length compiles nothing."""
    return _CONFIGS[max(block_of(problem.head_dim), block_of(problem.head_dim_v))]


def facts_of(problem: Problem, config: Config) -> Facts:
    """The facts of a call."""
    band = problem.spec.band
    block_d, block_dv = block_of(problem.head_dim), block_of(problem.head_dim_v)
    return Facts(
        config=config,
        block_m=config.block_m,
        block_n=config.block_n,
        block_d=block_d,
        block_dv=block_dv,
        rows=config.block_m // config.num_consumers,
        has_left=band.left is not None,
        has_right=band.right is not None,
        # Where nothing can be hidden, nothing hidden can get in.
        flags=not band.is_unlimited,
        # Without a band all tiles take as long.
        is_dynamic=not band.is_unlimited,
        shares_q=_shared_bytes(config, block_d, block_dv) > SHARED_BYTES,
    )


def _shared_bytes(config: Config, block_d: int, block_dv: int) -> int:
    """Of the tiles, if q_m and out_m have places of their own; and about what barriers take."""
    rows = config.block_m + config.num_stages * config.block_n
    return 2 * rows * (block_d + block_dv) + 1024


@functools.lru_cache(maxsize=1024)
def numbers_of(problem: Problem, block_m: int) -> Numbers:
    """The numbers of a call."""
    sizes = sizes_of(problem)
    num_row_tiles = -(-problem.seqlen_q // block_m)
    num_sides = problem.num_heads_q * problem.batch
    return Numbers(
        num_units=num_row_tiles * num_sides,
        num_row_tiles=num_row_tiles,
        num_sides=num_sides,
        num_together=_num_together(problem, num_sides),
        num_heads=problem.num_heads_q,
        group=problem.group,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        left_edge=sizes.left_edge,
        right_edge=sizes.right_edge,
        scale_log2=problem.spec.scale * math.log2(math.e),
    )


def _num_together(problem: Problem, num_sides: int) -> int:
    """Heads that are worked on at a time: one where all tiles take as long, else many, to have short tiles for the end.

    So many that their K and V stay in the L2 cache; or `_HEADS_TOGETHER`, which then share what is read often enough.
    """
    if problem.spec.band.is_unlimited:
        return 1
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    cached = _CACHED_BYTES * problem.group // max(1, problem.seqlen_k * row_bytes)
    num_groups = -(-num_sides // max(cached, _HEADS_TOGETHER))
    return -(-num_sides // num_groups)


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy where TMA could not take it: it reads no dimension twice, and counts in 16 bytes."""
    *outer, last = x.stride()
    sizes = x.shape
    units = ALIGNMENT // x.element_size()
    takes = last == 1 and x.data_ptr() % ALIGNMENT == 0
    for size, stride in zip(sizes, outer, strict=False):
        takes = takes and (size == 1 or (stride > 0 and stride % units == 0))
    # A copy and not `contiguous`, which would return a tensor that merely starts at an odd address.
    return x if takes else x.clone(memory_format=torch.contiguous_format)


def tma_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides as TMA takes them: that of a dimension of size 1 may be anything in a tensor."""
    given = zip(shape, strides, contiguous_strides(shape), strict=True)
    return tuple(fallback if size == 1 else stride for size, stride, fallback in given)
