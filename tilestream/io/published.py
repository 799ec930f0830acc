"""FlashAttention as published: keys outside, rows inside, out rewritten in each step; bytes and FLOPs as formulas.

Source: arXiv:2205.14135, algorithms 1 and 2 (forward), 4 (backward) and 5 (block-sparse).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tilestream.errors import ArgumentError
from tilestream.io.cost import Cost, pass_of
from tilestream.io.sizes import Sizes
from tilestream.problem import Problem

__all__ = ["BlockMatrix", "PublishedBlocks", "check_blocks", "published_blocks", "published_cost", "widths"]

# Which tiles are kept: a row per query block, a column per key block.
BlockMatrix = Sequence[Sequence[bool]]


class PublishedBlocks(NamedTuple):
    """Rows (B_r) and keys (B_c) of a tile."""

    block_m: int
    block_n: int


def published_blocks(fast_memory_elements: int, head_dim: int) -> PublishedBlocks:
    """The block sizes of algorithm 1: B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d).

    They use M up to a constant factor: four blocks of ceil(M / 4d) rows fill it, and the scores come on top, so that
    the tiles need 1.25 M where M is at most 4 d^2; `Cost.fast_memory_bytes` says how much.

    Args:
        fast_memory_elements: M, in numbers, not bytes.
        head_dim: d.

    Raises:
        ArgumentError: M holds less than one row.
    """
    if fast_memory_elements < head_dim:
        raise ArgumentError(
            f"fast memory of {fast_memory_elements} elements is smaller than a row of {head_dim}; the paper has"
            " head_dim <= M."
        )
    block_n = -(-fast_memory_elements // (4 * head_dim))
    return PublishedBlocks(min(block_n, head_dim), block_n)


def published_cost(
    problem: Problem, tiles: PublishedBlocks, backward: bool = False, blocks: BlockMatrix | None = None
) -> Cost:
    """What algorithms 1 and 2 move, algorithm 5 with `blocks`, and algorithm 4 backward.

    Forward: out, row_sum and row_max are initialised; per key block k, v are read; per row block inside q, out,
    row_sum, row_max are read and the last three written. Backward: dq, dk, dv are initialised; per key block k, v are
    read and dk, dv written; per row block inside q, out, dout, dq, row_sum, row_max are read and dq written.

    A mask and dropout are made on chip and cost nothing; as published, a mask spares nothing either. Every query head
    reads its own keys and values, and with several to a KV head dk and dv are added to in memory from the second on.

    Args:
        problem: a dense call; soft cap, bias, ALiBi and sinks are not counted.
        tiles: rows and keys of a tile, from `published_blocks`.
        backward: the backward alone.
        blocks: (row blocks, key blocks), those that are kept; all by default.

    Returns:
        Cost. extra_memory_bytes of the forward are row_sum and row_max, which stand in for lse.

    Raises:
        ArgumentError: a packed problem, or `blocks` of another shape than the tiles.
    """
    sizes = Sizes.of(problem)
    rows_of, keys_of = widths(problem.seqlen_q, tiles.block_m), widths(problem.seqlen_k, tiles.block_n)
    check_blocks(blocks, len(rows_of), len(keys_of))
    num_heads = problem.batch * problem.num_heads_q
    inner, pairs = problem.seqlen_q * len(keys_of), problem.seqlen_q * problem.seqlen_k
    if blocks is not None:
        kept = [(rows, keys) for r, rows in enumerate(rows_of) for c, keys in enumerate(keys_of) if blocks[r][c]]
        inner, pairs = sum(rows for rows, _ in kept), sum(rows * keys for rows, keys in kept)
    inner, pairs = num_heads * inner, num_heads * pairs
    row_q, row_v = problem.head_dim * sizes.element_bytes, problem.head_dim_v * sizes.element_bytes
    stats = inner * sizes.accumulator_bytes
    k, v = sizes.k * problem.group, sizes.v * problem.group
    fast = _fast_memory(problem, tiles, backward)
    if backward:
        start = pass_of("initialise", {}, {"dq": sizes.q, "dk": sizes.k, "dv": sizes.v})
        reads = {
            "k": k, "v": v, "q": inner * row_q, "out": inner * row_v, "dout": inner * row_v, "dq": inner * row_q,
            "row_sum": stats, "row_max": stats, "dk": k - sizes.k, "dv": v - sizes.v,
        }  # fmt: skip
        flops = 2 * pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)
        return Cost((start, pass_of("backward", reads, {"dq": inner * row_q, "dk": k, "dv": v}, flops)), 0, fast)
    start = pass_of("initialise", {}, {"out": sizes.out, "row_sum": sizes.lse, "row_max": sizes.lse})
    updated = {"out": inner * row_v, "row_sum": stats, "row_max": stats}
    flops = 2 * pairs * (problem.head_dim + problem.head_dim_v)
    return Cost(
        (start, pass_of("forward", {"k": k, "v": v, "q": inner * row_q, **updated}, updated, flops)),
        2 * sizes.lse,
        fast,
    )


def widths(length: int, block: int) -> list[int]:
    """Lengths of the blocks that `length` is cut into; the last may be shorter."""
    return [min(block, length - start) for start in range(0, length, block)]


def check_blocks(blocks: BlockMatrix | None, num_rows: int, num_columns: int) -> None:
    """Refuse a matrix of kept tiles that has another shape than the tiles.

    Raises:
        ArgumentError: the shapes differ; the message shows both.
    """
    if blocks is not None and [len(row) for row in blocks] != [num_columns] * num_rows:
        shown = f"{len(blocks)} x {' or '.join(map(str, sorted({len(row) for row in blocks}))) or 0}"
        raise ArgumentError(f"blocks must be {num_rows} x {num_columns}, the tiles of the call, got {shown}.")


def _fast_memory(problem: Problem, tiles: PublishedBlocks, backward: bool) -> int:
    sizes = Sizes.of(dataclasses.replace(problem, batch=0))
    element, sums = sizes.element_bytes, sizes.accumulator_bytes
    rows, keys = min(tiles.block_m, problem.seqlen_q), min(tiles.block_n, problem.seqlen_k)
    width, width_v = problem.head_dim, problem.head_dim_v
    if not backward:
        return (keys + rows) * (width + width_v) * element + 2 * rows * sums + rows * keys * sums
    keys_bytes = keys * (width + width_v) * (element + sums)
    # q, dq, out, dout; then row_sum, row_max and delta; then P and dP.
    rows_bytes = rows * (2 * width + 2 * width_v) * element + 3 * rows * sums
    return keys_bytes + rows_bytes + 2 * rows * keys * sums
