"""What travels to the backward kernel: its compile-time facts as one hashable object, its numbers as one."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tilestream.backends.hopper.call import block_of
from tilestream.backends.triton.call import sizes_of
from tilestream.problem import Problem
from tilestream.spec import Band

__all__ = [
    "BLOCK_M",
    "CONSUMER_KEYS",
    "ROW_BLOCK",
    "BackwardConfig",
    "BackwardFacts",
    "BackwardNumbers",
    "BackwardOthers",
    "BlockBackwardOthers",
    "backward_config_for",
    "backward_facts_of",
    "backward_numbers_of",
    "block_n_of",
]

# Queries of a tile, and keys of a consumer: what one product of a warpgroup takes.
BLOCK_M = 64
CONSUMER_KEYS = 64
_NUM_CONSUMERS = 2
# What lse and delta of a head are padded to.
ROW_BLOCK = 128

# Of Q, dout and the sums of dq that are worked on at a time: half of Hopper's L2 cache.
_CACHED_BYTES = 24 << 20
_SIDES_TOGETHER, _WIDE_TOGETHER = 16, 4


@dataclass(frozen=True)
class BackwardConfig:
    """How the kernel is cut; what each of these does is in `backward.py` and `backward_wide.py`."""

    num_stages: int
    num_slots: int
    num_tiles: int
    # Of a thread of a consumer.
    registers: int = 240
    num_teams: int = 1  # as of the forward


@dataclass(frozen=True)
class BackwardFacts:
    """What the kernel is compiled for. Plain values only: a function here would be missing from Triton's cache key."""

    config: BackwardConfig
    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    has_left: bool
    has_right: bool
    flags: bool
    is_dynamic: bool
    has_blocks: bool = False
    # Of the functions of `backends/triton/` that kernels call: rows are not packed here.
    group: int = 1
    is_varlen: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether the kernel is that of `backward_wide.py`."""
        return self.block_n == CONSUMER_KEYS

    @property
    def row_step(self) -> int:
        """From one row tile to the next, in rows or in places of lists."""
        return 1 if self.has_blocks else self.block_m

    @property
    def producer_registers(self) -> int:
        """Of a thread of the producer."""
        return 32 if self.has_blocks else 24

    @property
    def of_consumer(self) -> BackwardFacts:
        """The facts of a consumer's keys."""
        return replace(self, block_n=CONSUMER_KEYS)


class BackwardOthers(NamedTuple):
    """Tensors that no TMA reads or writes."""

    dq_sums: Any
    flags: Any = None
    counter: Any = None  # of the units that are taken, where a schedule is dynamic


class BlockBackwardOthers(NamedTuple):
    """Of calls with a block mask: `BackwardOthers`, and `block_lists.KeyLists`."""

    dq_sums: Any
    flags: Any = None
    counter: Any = None
    units: Any = None
    lists: Any = None
    row_tiles: Any = None
    patterns: Any = None
    bits: Any = None


class BackwardNumbers(NamedTuple):
    """Sizes and factors."""

    num_units: int  # key tiles of all KV heads
    num_key_tiles: int
    # KV heads of all batch entries, and how many of them are worked on at a time.
    num_sides: int
    num_together: int
    num_heads_kv: int
    group: int
    num_row_tiles: int  # of a head
    num_padded_rows: int  # of a head, in lse and delta
    num_key_flags: int  # of a KV head
    seqlen_q: int
    seqlen_k: int
    left_edge: int
    right_edge: int
    shift: int
    scale: float
    scale_log2: float
    zero: int = 0  # which the compiler does not know


# By head_dim and head_dim_v on chip.
_CONFIGS = {
    (64, 64): BackwardConfig(4, 3, 2),
    (64, 128): BackwardConfig(3, 2, 2),
    (128, 64): BackwardConfig(2, 2, 2),
    (128, 128): BackwardConfig(3, 2, 1),
    # Of `backward_wide.py`: as many stages as there is room for.
    (64, 256): BackwardConfig(4, 2, 1),
    (256, 64): BackwardConfig(4, 2, 1),
    (128, 256): BackwardConfig(3, 2, 1),
    (256, 128): BackwardConfig(3, 2, 1),
    (256, 256): BackwardConfig(2, 2, 1),
}
_LARGEST_NARROW = 128


def backward_config_for(problem: Problem) -> BackwardConfig:
    """The tiles of a call."""
    return _CONFIGS[block_of(problem.head_dim), block_of(problem.head_dim_v)]


def block_n_of(problem: Problem) -> int:
    """Keys of a tile: beyond a head dimension of 128 both consumers have the same ones."""
    is_wide = max(problem.head_dim, problem.head_dim_v) > _LARGEST_NARROW
    return CONSUMER_KEYS if is_wide else _NUM_CONSUMERS * CONSUMER_KEYS


def backward_facts_of(problem: Problem, config: BackwardConfig) -> BackwardFacts:
    """The facts of a call."""
    has_blocks = problem.block_mask is not None
    # With a block mask the lists know of the band.
    band = Band(None, None) if has_blocks else problem.spec.band
    hides = has_blocks or not band.is_unlimited
    return BackwardFacts(
        config=config,
        block_m=BLOCK_M,
        block_n=block_n_of(problem),
        block_d=block_of(problem.head_dim),
        block_dv=block_of(problem.head_dim_v),
        has_left=band.left is not None,
        has_right=band.right is not None,
        # Where nothing can be hidden, nothing hidden can get in.
        flags=hides,
        # Where all tiles take as long, 1 % faster with narrow heads, and up to 10 % slower with wide ones.
        is_dynamic=hides or block_n_of(problem) > CONSUMER_KEYS,
        has_blocks=has_blocks,
    )


@functools.lru_cache(maxsize=1024)
def backward_numbers_of(problem: Problem, block_n: int) -> BackwardNumbers:
    """The numbers of a call."""
    sizes = sizes_of(problem)
    num_key_tiles, num_sides = -(-problem.seqlen_k // block_n), problem.num_heads_kv * problem.batch
    same = {name: getattr(sizes, name) for name in BackwardNumbers._fields if name in sizes._fields}
    return BackwardNumbers(
        **same,
        num_units=num_key_tiles * num_sides,
        num_key_tiles=num_key_tiles,
        num_sides=num_sides,
        num_together=_num_together(problem, num_sides),
        group=problem.group,
        num_row_tiles=-(-problem.seqlen_q // BLOCK_M),
        num_padded_rows=-(-problem.seqlen_q // ROW_BLOCK) * ROW_BLOCK,
        num_key_flags=-(-problem.seqlen_k // CONSUMER_KEYS),
    )


def _num_together(problem: Problem, num_sides: int) -> int:
    """KV heads that are worked on at a time: one where all tiles take as long, else many, as in the forward."""
    if problem.spec.band.is_unlimited:
        return 1
    row_bytes = 4 * block_of(problem.head_dim) + problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    cached = _CACHED_BYTES // max(1, problem.seqlen_q * problem.group * row_bytes)
    fewest = _WIDE_TOGETHER if block_n_of(problem) == CONSUMER_KEYS else _SIDES_TOGETHER
    num_groups = -(-num_sides // max(cached, fewest))
    return -(-num_sides // num_groups)
