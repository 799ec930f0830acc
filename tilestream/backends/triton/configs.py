"""Tile shapes, warps and pipeline stages by kernel, head dimension and dtype: what was measured best on an H200.

They depend on no length, so that a changed length compiles nothing; but a handful of packed rows (decoding) has tiles of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.problem import Problem

__all__ = ["FEW_ROWS", "Config", "config_for"]

# Packed rows up to which a call has small row tiles and splits its keys.
FEW_ROWS = 16
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


# By the larger head dimension on chip, for 16-bit inputs: kernel -> Config.
_HALF = {
    64: {"forward": Config(64, 64, 4, 3), "key": Config(32, 64, 4, 3), "query": Config(64, 64, 4, 3)},
    128: {"forward": Config(64, 64, 4, 3), "key": Config(32, 64, 4, 3), "query": Config(64, 64, 4, 2)},
    256: {"forward": Config(64, 64, 8, 2), "key": Config(32, 64, 8, 2), "query": Config(64, 32, 8, 2)},
    512: {"forward": Config(32, 32, 8, 2), "key": Config(16, 32, 8, 1), "query": Config(32, 32, 8, 1)},
}
_SINGLE = {
    64: {"forward": Config(64, 32, 4, 2), "key": Config(32, 32, 4, 2), "query": Config(32, 32, 4, 2)},
    128: {"forward": Config(64, 32, 8, 2), "key": Config(32, 32, 8, 2), "query": Config(32, 32, 8, 2)},
    256: {"forward": Config(32, 32, 8, 2), "key": Config(16, 32, 8, 1), "query": Config(32, 16, 8, 1)},
    512: {"forward": Config(16, 16, 8, 1), "key": Config(16, 16, 8, 1), "query": Config(16, 16, 8, 1)},
}


def config_for(kernel: str, problem: Problem, width: int) -> Config:
    """The tiles of a kernel: ``forward``, ``key``, ``query``, ``bias``, or one of those as ``exact_...``.

    Args:
        width: the larger head dimension as it is on chip.
    """
    if kernel.startswith("exact_"):
        found = config_for(kernel.removeprefix("exact_"), problem, width)
        # Its programs have the tiles of those that flag them; what it streams comes in small tiles, without haste.
        if kernel == "exact_key":
            return Config(16, found.block_n, 8, 1)
        return Config(found.block_m, 16, 8, 1)
    table = (_HALF if problem.dtype.itemsize == 2 else _SINGLE)[max(64, width)]
    if kernel == "bias":
        return table["query"]
    found = table[kernel]
    if kernel == "forward" and problem.layout == "dense" and problem.seqlen_q * problem.group <= FEW_ROWS:
        return Config(FEW_ROWS, found.block_n, 4, found.num_stages)
    return found


def num_splits(problem: Problem, config: Config, num_processors: int) -> tuple[int, int]:
    """(splits, keys of each) of a forward: more than one where a few rows meet many keys."""
    tiles = problem.batch * problem.num_heads_kv * -(-problem.seqlen_q * problem.group // config.block_m)
    key_tiles = -(-problem.seqlen_k // config.block_n)
    most = min(num_processors * _PROGRAMS_EACH // max(1, tiles), key_tiles // _FEWEST_KEY_TILES)
    if problem.layout != "dense" or most < 2:
        return 1, problem.seqlen_k
    split_keys = -(-key_tiles // most) * config.block_n
    return -(-problem.seqlen_k // split_keys), split_keys
