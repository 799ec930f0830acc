"""Steps of a plan: the kernels of a call, with their facts and numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilestream.backends.triton import backward as backward_kernels
from tilestream.backends.triton.block_lists import ListSizes, per_query_head
from tilestream.backends.triton.call import (
    Numbers,
    facts_of,
    num_key_tiles,
    num_row_tiles,
    sizes_of,
    strides_of,
)
from tilestream.backends.triton.configs import Config
from tilestream.backends.triton.launch import Step
from tilestream.problem import Problem

__all__ = ["ROW_BLOCK", "Builder", "How", "list_facts", "list_numbers", "num_sides"]

# Rows and keys that the tiles of every key kernel are made of: what lse, delta and parts are padded to.
ROW_BLOCK = 128


class How(NamedTuple):
    """What the kernels of a call follow from besides the problem: where and how its tensors lie."""

    device: torch.device
    precision: str  # `call.precision_of`
    strides: tuple[tuple[int, ...], ...]  # of rows: q, k, v and, in a backward, out and dout
    slopes_stride: int = 0
    bias_dtype: torch.dtype | None = None
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    has_dlse: bool = False
    # Of a call with a block mask, which is no part of the problem then.
    row_lists: ListSizes | None = None
    key_lists: ListSizes | None = None

    def rows_of(self, problem: Problem) -> Problem:
        """The problem as row tiles see it."""
        return problem if self.row_lists is None else per_query_head(problem)


class Builder:
    """Makes the steps of one plan."""

    def __init__(self, problem: Problem, how: How) -> None:
        # Rows and keys have heads of their own.
        self._rows, self._keys, self._how = how.rows_of(problem), problem, how
        self._numbers: Numbers = sizes_of(self._rows)._replace(
            row_tiles=num_row_tiles(self._rows, ROW_BLOCK),
            key_tiles=num_key_tiles(problem, ROW_BLOCK),
            slopes_stride=how.slopes_stride,
            bias_strides=how.bias_strides,
            **strides_of(problem, how.strides),
        )

    def delta_step(self, writes_parts: bool = False) -> Step:
        """What every backward begins with."""
        facts = {"has_dlse": self._how.has_dlse, "writes_parts": writes_parts, **list_facts(None)}
        config = Config(ROW_BLOCK, 16, 8 if writes_parts else 4, 1)
        return self.row_step(backward_kernels.delta_kernel, config, facts)

    def row_step(
        self, kernel: Any, config: Config, facts: dict[str, Any] | None = None, sizes: dict[str, Any] | None = None
    ) -> Step:
        """A kernel with a program per tile of packed rows, longest first."""
        problem, lists = self._rows, self._how.row_lists
        made = {"starts_last": problem.spec.band.right is not None, **list_facts(lists), **(facts or {})}
        numbers = {**list_numbers(problem, lists), **(sizes or {})}
        return self._tile_step(kernel, config, problem, num_row_tiles(problem, config.block_m), made, numbers)

    def key_step(self, kernel: Any, config: Config, facts: dict[str, Any] | None = None) -> Step:
        """A kernel with a program per tile of keys."""
        problem, lists = self._keys, self._how.key_lists
        made = {"starts_last": self._rows.spec.band.left is not None, **list_facts(lists), **(facts or {})}
        tiles = num_key_tiles(problem, config.block_n * config.num_slices)
        numbers = list_numbers(problem, lists)
        return self._tile_step(kernel, config, problem, tiles, {"by_keys": True, **made}, numbers)

    def _tile_step(
        self, kernel: Any, config: Config, side: Problem, tiles: int, facts: dict[str, Any], sizes: dict[str, Any]
    ) -> Step:
        programs = tiles * num_sides(side)
        total = programs * sizes["num_splits"] if facts.get("has_splits") else programs
        return self.step(kernel, config, total, facts, {"num_tiles": tiles, "num_programs": programs, **sizes})

    def step(self, kernel: Any, config: Config, programs: int, facts: dict[str, Any], sizes: dict[str, Any]) -> Step:
        """A kernel with so many programs."""
        problem, how = self._rows, self._how
        facts = {"kv_share": self._keys.group // problem.group, **facts}
        made = facts_of(problem, config, how.precision, row_block=ROW_BLOCK, **facts)
        numbers = self._numbers._replace(**sizes)
        return Step(kernel, config, made, programs, numbers, problem.dtype, how.bias_dtype or problem.dtype)


def list_facts(lists: ListSizes | None) -> dict[str, Any]:
    """Those of `call.Facts` that lists add."""
    if lists is None:
        return {"has_blocks": False, "list_m": 1, "list_n": 1}
    return {"has_blocks": True, "list_m": lists.tile[0], "list_n": lists.tile[1]}


def list_numbers(problem: Problem, lists: ListSizes | None) -> dict[str, Any]:
    """Of `call.Numbers`. The tiles of packed calls are in order of the sequences."""
    if lists is None:
        return {}
    return lists.numbers if problem.layout == "dense" else {**lists.numbers, "num_long": 0}


def num_sides(problem: Problem) -> int:
    """How often the tiles of one side come: per KV head, and of dense calls per batch entry."""
    return problem.num_heads_kv * (1 if problem.layout == "varlen" else problem.batch)
