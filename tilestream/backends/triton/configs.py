"""Tile shapes, warps and pipeline stages by kernel, head dimension, dtype and features: measured best on an H200.

They depend on no length, so that a changed length compiles nothing; but a handful of packed rows (decoding) has tiles
of its own. GPUs with little shared memory have smaller tiles, which were compiled and not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilestream.problem import Problem

__all__ = ["Config", "config_for", "num_splits", "padded", "takes_parts"]

# Packed rows up to which a call has small row tiles and splits its keys.
_FEW_ROWS = 16
# Keys of a tile of the exact key kernel, which compiles for long where they are many. Not 64, and no 64 rows on 8 warps
# either: there Triton 3.6 multiplies 64 x 16 with operands from beyond the end of a tile.
_EXACT_KEYS = 32
# Programs that a processor runs side by side, and what a split is worth at least.
_PROGRAMS_EACH = 2
_FEWEST_KEY_TILES = 4


@dataclass(frozen=True)
class Config:
    """How one kernel is cut and compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # Of a thread, where the compiler shall take fewer than it would, for one more program per processor; NVIDIA only.
    max_registers: int | None = None
    # Of operands in parts: streamed tiles share one place in shared memory (`backward_parts.py`).
    takes_turns: bool = False
    # Tiles of keys that a program takes one after the other; of the exact key kernel.
    num_slices: int = 1
    # Launched before the kernel ahead of it ends, for whose end it waits itself; of Hopper.
    starts_early: bool = False


_Table = dict[int, dict[str, Config]]

# Kernel -> Config, by the larger head dimension on chip. 16-bit inputs and a plain call:
_HALF: _Table = {
    64: {"forward": Config(64, 64, 4, 3, 128), "key": Config(64, 64, 4, 3), "query": Config(64, 64, 4, 3)},
    128: {"forward": Config(128, 128, 8, 3), "key": Config(64, 64, 4, 2), "query": Config(128, 64, 8, 3)},
    256: {"forward": Config(128, 64, 8, 2), "key": Config(64, 64, 8, 2), "query": Config(128, 32, 8, 3)},
    512: {"forward": Config(64, 32, 8, 1), "key": Config(16, 32, 8, 1), "query": Config(64, 16, 8, 1)},
}
# What stands between the dot products and the softmax takes registers.
_HALF_RICH: _Table = {
    64: {"forward": Config(64, 64, 4, 3), "key": Config(32, 64, 8, 2), "query": Config(64, 32, 4, 2)},
    128: {"forward": Config(64, 64, 8, 2), "key": Config(32, 32, 4, 2), "query": Config(128, 32, 8, 2)},
    256: {"forward": Config(64, 32, 8, 2), "key": Config(32, 32, 8, 2), "query": Config(64, 16, 8, 2)},
    512: {"forward": Config(32, 32, 8, 1), "key": Config(16, 32, 8, 1), "query": Config(32, 16, 8, 1)},
}
_SINGLE: _Table = {
    64: {"forward": Config(128, 64, 8, 2), "key": Config(32, 64, 4, 1), "query": Config(64, 64, 4, 1)},
    128: {"forward": Config(128, 64, 8, 2), "key": Config(64, 32, 8, 2), "query": Config(128, 32, 8, 1)},
    256: {"forward": Config(32, 32, 8, 1), "key": Config(16, 16, 4, 1), "query": Config(32, 16, 8, 1)},
    512: {"forward": Config(16, 16, 8, 1), "key": Config(16, 16, 8, 1), "query": Config(16, 16, 8, 1)},
}
_SINGLE_RICH: _Table = {
    64: {"forward": Config(64, 32, 4, 2), "key": Config(32, 32, 4, 1), "query": Config(32, 32, 4, 1)},
    128: {"forward": Config(64, 32, 8, 1), "key": Config(32, 32, 8, 1), "query": Config(32, 32, 8, 1)},
    256: _SINGLE[256],
    512: _SINGLE[512],
}
# Operands in bfloat16 parts, which are split before.
_PARTS: _Table = {
    64: {"key": Config(32, 64, 4, 2), "query": Config(128, 64, 8, 2)},
    128: {"key": Config(32, 128, 8, 1, takes_turns=True), "query": Config(128, 32, 8, 1, takes_turns=True)},
}
# At most 64 KiB of shared memory.
_SMALL_HALF: _Table = {
    64: {"forward": Config(64, 64, 4, 1), "key": Config(32, 64, 4, 1), "query": Config(64, 32, 4, 1)},
    128: {"forward": Config(64, 32, 4, 1), "key": Config(32, 32, 4, 1), "query": Config(32, 32, 4, 1)},
    256: {"forward": Config(32, 32, 4, 1), "key": Config(16, 32, 8, 1), "query": Config(32, 16, 8, 1)},
    512: {"forward": Config(16, 16, 4, 1), "key": Config(16, 16, 8, 1), "query": Config(16, 16, 8, 1)},
}
_SMALL_SINGLE: _Table = {
    64: {"forward": Config(32, 32, 4, 1), "key": Config(16, 32, 4, 1), "query": Config(32, 16, 4, 1)},
    128: {"forward": Config(32, 16, 4, 1), "key": Config(16, 16, 4, 1), "query": Config(16, 16, 4, 1)},
    256: {"forward": Config(16, 16, 4, 1), "key": Config(16, 16, 8, 1), "query": Config(16, 16, 8, 1)},
    512: {"forward": Config(16, 16, 8, 1), "key": Config(16, 16, 8, 1), "query": Config(16, 16, 8, 1)},
}


def padded(width: int) -> int:
    """A head dimension as it is on chip: a power of two that the matrix units take."""
    return max(16, 1 << (width - 1).bit_length())


def config_for(kernel: str, problem: Problem, is_small: bool = False, has_blocks: bool = False) -> Config:
    """The tiles of a kernel: ``forward``, ``key``, ``query``, ``bias``, or one of those as ``exact_...``; ``key`` and
    ``query`` also as ``parts_...``, which `takes_parts` allows.

    Args:
        is_small: for a GPU with less shared memory than Hopper's.
        has_blocks: with a block mask, whose tiles divide the usual blocks of 128.
    """
    if kernel.startswith("exact_"):
        found = config_for(kernel.removeprefix("exact_"), problem, is_small, has_blocks)
        # Its programs have the tiles of those that flag them; what it streams comes in small tiles, without haste.
        if kernel.endswith("key"):
            block_n = min(found.block_n, _EXACT_KEYS)
            return Config(16, block_n, 8, 1, num_slices=found.block_n // block_n)
        return Config(found.block_m, 16, 4 if found.block_m == 64 else 8, 1)
    width = _width(problem)
    if kernel.startswith("parts_"):
        return _PARTS[width][kernel.removeprefix("parts_")]
    found = _table(problem, is_small)[width]["query" if kernel == "bias" else kernel]
    if kernel == "forward" and problem.layout == "dense" and problem.seqlen_q * problem.group <= _FEW_ROWS:
        return Config(_FEW_ROWS, min(found.block_n, 64), 4, found.num_stages)
    return found


def takes_parts(problem: Problem) -> bool:
    """Whether there are tiles for operands in parts, which need the shared memory and the matrix units of Hopper."""
    return problem.dtype == torch.float32 and _width(problem) in _PARTS and not _is_rich(problem)


def _width(problem: Problem) -> int:
    return max(64, padded(problem.head_dim), padded(problem.head_dim_v))


def _table(problem: Problem, is_small: bool) -> _Table:
    is_half = problem.dtype.itemsize == 2
    if is_small:
        return _SMALL_HALF if is_half else _SMALL_SINGLE
    if _is_rich(problem):
        return _HALF_RICH if is_half else _SINGLE_RICH
    return _HALF if is_half else _SINGLE


def _is_rich(problem: Problem) -> bool:
    """Whether anything but the band stands between the dot products and the softmax."""
    spec = problem.spec
    return spec.softcap > 0 or spec.has_alibi or spec.has_bias or spec.dropout_p > 0


def num_splits(problem: Problem, config: Config, num_processors: int) -> tuple[int, int]:
    """(splits, keys of each) of a forward: more than one where a few rows meet many keys."""
    tiles = problem.batch * problem.num_heads_kv * -(-problem.seqlen_q * problem.group // config.block_m)
    key_tiles = -(-problem.seqlen_k // config.block_n)
    most = min(num_processors * _PROGRAMS_EACH // max(1, tiles), key_tiles // _FEWEST_KEY_TILES)
    if problem.layout != "dense" or most < 2:
        return 1, problem.seqlen_k
    split_keys = -(-key_tiles // most) * config.block_n
    return -(-problem.seqlen_k // split_keys), split_keys
