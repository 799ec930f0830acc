"""What travels to the kernel: its compile-time facts as one hashable object, its numbers as one."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.backends.triton.call import contiguous_strides, is_in_place, sizes_of
from tilestream.problem import Problem
from tilestream.spec import Band

__all__ = [
    "ALIGNMENT",
    "SHARED_BYTES",
    "BlockOthers",
    "Config",
    "Facts",
    "Numbers",
    "Others",
    "block_of",
    "config_for",
    "configs_for",
    "facts_of",
    "is_readable",
    "numbers_of",
    "packed_layout",
    "readable",
    "readable_bias",
    "tma_strides",
    "usual_seqlen_q",
]

# Bytes; what TMA takes as addresses and as strides.
ALIGNMENT = 16

# Half of Hopper's L2 cache.
_CACHED_BYTES = 24 << 20
_HEADS_TOGETHER = 16

# Of dimensions of packed tensors: no end, one that `places.py` knows, and a multiple of what addresses wrap at.
_LONGEST = 0x7FFF0000
_NUM_TOKENS = 2**30
_WRAP = 2**64


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
    keeps_max: bool = True
    # Each with consumers, a producer and row tiles of its own.
    num_teams: int = 1


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
    is_varlen: bool = False
    has_softcap: bool = False
    has_alibi: bool = False
    has_bias: bool = False
    # Of the bias from key to key; 0 where it is the same for all.
    bias_step: int = 1
    has_sinks: bool = False
    has_blocks: bool = False
    # Whether scores stay dot products, whose scale goes into the argument of the exponential.
    folds_scale: bool = True
    # Of the functions of `backends/triton/` that kernels call: rows are not packed here, and inputs have 16 bits.
    group: int = 1
    is_float32: bool = False

    @property
    def of_consumer(self) -> Facts:
        """The facts of a consumer's rows."""
        return replace(self, block_m=self.rows)


class Others(NamedTuple):
    """Tensors without rows, of which most calls have few. Names here and in `Numbers` are those of `triton.call`."""

    lse: Any = None
    flags: Any = None
    counter: Any = None  # of the row tiles that are taken, where a schedule is dynamic
    bias: Any = None
    slopes: Any = None
    sinks: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None


class BlockOthers(NamedTuple):
    """Of calls with a block mask: `Others` without what these do not have, and `block_lists.Lists`."""

    lse: Any = None
    flags: Any = None
    counter: Any = None
    sinks: Any = None
    units: Any = None
    key_starts: Any = None
    patterns: Any = None
    bits: Any = None


class Numbers(NamedTuple):
    """Sizes and factors."""

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
    batch: int
    total_q: int
    total_k: int
    num_steps: int
    left: int
    right: int
    shift: int
    softcap_in: float
    softcap_out: float
    slopes_stride: int = 0
    bias_strides: tuple[int, ...] = (0, 0, 0)  # of batch, head and query


# By the larger head dimension on chip.
_CONFIGS = {
    64: Config(192, 128, num_consumers=3, num_stages=4, registers=160),
    128: Config(128, 128, num_consumers=2, num_stages=2, registers=240, takes_turns=False, keeps_max=False),
    256: Config(128, 64, num_consumers=2, num_stages=2, registers=240, takes_turns=False),
}

# Of head dimensions up to 64, for queries that do not fill the tiles above.
_SHORT_CONFIG = Config(128, 128, num_consumers=2, num_stages=4, registers=240, takes_turns=False, keeps_max=False)
_MOST_PADDED = 1.08

# What stands between the dot products and the softmax takes registers.
_RICH_CONFIGS = {
    64: Config(128, 128, num_consumers=2, num_stages=4, registers=240),
    128: Config(128, 128, num_consumers=2, num_stages=2, registers=240),
    256: Config(128, 64, num_consumers=2, num_stages=2, registers=240),
}
_RICHEST_CONFIGS = {
    64: _RICH_CONFIGS[64],
    128: Config(128, 64, num_consumers=2, num_stages=3, registers=240),
    256: Config(128, 32, num_consumers=2, num_stages=3, registers=240),
}

# With a block mask: of tiles that blocks of 128 are whole ones of. Four consumers, like the three above, shall keep a
# processor busier than two, and one team computes while the other one is between row tiles; to be measured.
_BLOCK_CONFIGS = {
    64: Config(128, 64, num_consumers=2, num_stages=5, registers=112, takes_turns=False, num_teams=2),
    128: _CONFIGS[128],
    256: _CONFIGS[256],
}


def block_of(width: int) -> int:
    """A head dimension as it is on chip."""
    return max(64, 1 << (width - 1).bit_length())


def configs_for(problem: Problem) -> tuple[Config, ...]:
    """The tiles that calls like this one have at one length or another: the first those of most."""
    spec, width = problem.spec, max(block_of(problem.head_dim), block_of(problem.head_dim_v))
    if problem.block_mask is not None:
        return (_BLOCK_CONFIGS[width],)
    if _folds_scale(problem):
        return (_CONFIGS[width], _SHORT_CONFIG) if width == 64 else (_CONFIGS[width],)
    is_richest = spec.has_bias or (spec.has_alibi and spec.band.left is not None)
    return ((_RICHEST_CONFIGS if is_richest else _RICH_CONFIGS)[width],)


def config_for(problem: Problem) -> Config:
    """The tiles of a call: the shorter ones where the last of the longer ones would be empty for the most part."""
    *_, shorter = configs = configs_for(problem)
    seqlen_q = usual_seqlen_q(problem)
    padded, least = (-(-seqlen_q // config.block_m) * config.block_m for config in (configs[0], shorter))
    return shorter if padded > _MOST_PADDED * least else configs[0]


def usual_seqlen_q(problem: Problem) -> int:
    """Queries of a sequence: of a packed call the average, because no length is known to the host."""
    return problem.seqlen_q if problem.layout == "dense" else problem.total_q // max(1, problem.batch)


def _folds_scale(problem: Problem) -> bool:
    """Whether nothing but the scale stands between the dot products and the softmax."""
    spec = problem.spec
    return spec.softcap == 0 and not spec.has_alibi and not spec.has_bias


def facts_of(problem: Problem, config: Config, bias_step: int = 1) -> Facts:
    """The facts of a call; `bias_step` is the stride of its bias from key to key."""
    spec, has_blocks = problem.spec, problem.block_mask is not None
    # With a block mask the lists know of the band.
    band = Band(None, None) if has_blocks else spec.band
    hides = has_blocks or not band.is_unlimited
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
        flags=hides or spec.has_bias,
        # Without a band all tiles of a dense call take as long.
        is_dynamic=hides or problem.layout == "varlen",
        shares_q=_shared_bytes(config, block_d, block_dv) > SHARED_BYTES,
        is_varlen=problem.layout == "varlen",
        has_softcap=spec.softcap > 0,
        has_alibi=spec.has_alibi,
        has_bias=spec.has_bias,
        bias_step=bias_step,
        has_sinks=spec.has_sinks,
        has_blocks=has_blocks,
        folds_scale=_folds_scale(problem),
    )


def _shared_bytes(config: Config, block_d: int, block_dv: int) -> int:
    """Of the tiles, if q_m and out_m have places of their own; and about what barriers take."""
    rows = config.num_teams * (config.block_m + config.num_stages * config.block_n)
    return 2 * rows * (block_d + block_dv) + 1024


@functools.lru_cache(maxsize=1024)
def numbers_of(problem: Problem, block_m: int) -> Numbers:
    """The numbers of a call."""
    sizes = sizes_of(problem)
    num_row_tiles, num_sides = -(-problem.seqlen_q // block_m), problem.num_heads_q * problem.batch
    if problem.layout == "varlen":
        # See `triton.tiles._search`.
        num_row_tiles, num_sides = problem.total_q // block_m + problem.batch + 1, problem.num_heads_q
    same = {name: getattr(sizes, name) for name in Numbers._fields if name in sizes._fields}
    return Numbers(
        **same,
        num_units=num_row_tiles * num_sides,
        num_row_tiles=num_row_tiles,
        num_sides=num_sides,
        num_together=_num_together(problem, num_sides),
        num_heads=problem.num_heads_q,
        group=problem.group,
    )


def _num_together(problem: Problem, num_sides: int) -> int:
    """Heads that are worked on at a time: one where all tiles take as long, else many, to have short tiles for the end.

    So many that their K and V stay in the L2 cache; or `_HEADS_TOGETHER`, which then share what is read often enough.
    """
    if problem.spec.band.is_unlimited:
        return 1
    num_keys = problem.total_k if problem.layout == "varlen" else problem.seqlen_k
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    cached = _CACHED_BYTES * problem.group // max(1, num_keys * row_bytes)
    num_groups = -(-num_sides // max(cached, _HEADS_TOGETHER))
    return -(-num_sides // num_groups)


def is_readable(x: Tensor) -> bool:
    """Whether TMA takes `x` as it is: it reads no dimension twice, and counts in 16 bytes."""
    return is_in_place(x) and all([size == 1 or step > 0 for size, step in zip(x.shape, x.stride(), strict=True)])


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy where TMA could not take it."""
    # A copy and not `contiguous`, which would return a tensor that merely starts at an odd address.
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def tma_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides as TMA takes them: that of a dimension of size 1 may be anything in a tensor."""
    given = zip(shape, strides, contiguous_strides(shape), strict=True)
    return tuple(fallback if size == 1 else stride for size, stride, fallback in given)


def packed_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides that describe a packed tensor to TMA in the way of `places.py`.

    Args:
        strides: what `tma_strides` returns.
    """
    _, *sizes = shape
    token, *others = strides
    return (_LONGEST, _LONGEST, _NUM_TOKENS, *sizes), (_WRAP // _NUM_TOKENS - token, token, token, *others)


def readable_bias(bias: Tensor) -> Tensor:
    """`bias`, or a copy where its keys are not side by side."""
    return bias if bias.shape[-1] == 1 or bias.stride(-1) in (0, 1) else bias.contiguous()
