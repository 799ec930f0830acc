"""The schedule of this library's kernels: rows outside, keys streamed; bytes and FLOPs as formulas.

Forward: a program per row tile. Backward of the Triton kernels: delta per row tile, then dk and dv per key tile (rows
streamed), then dq per row tile (keys streamed). Of the CPU kernels: one walk over the row tiles, which adds to sums of
dk and dv in memory. Of the Hopper kernels: one walk over the key tiles, which adds to sums of dq in memory. EMPTY tiles
are never loaded. Sources: arXiv:2307.08691, algorithms 1 and 2; `teaching.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tilestream.block_mask.tiles import tile_lists
from tilestream.errors import ArgumentError
from tilestream.io.cost import Cost, Pass, Traffic, pass_of
from tilestream.io.published import BlockMatrix, check_blocks
from tilestream.io.sizes import Sizes, accumulator_bytes, num_visible_pairs
from tilestream.problem import Problem
from tilestream.tiles import key_span, query_span

__all__ = ["TileShape", "compulsory_cost", "fitting_shape", "once_per_pass", "schedule_cost"]

# Tokens that `fitting_shape` streams at a time, best first: fewer would starve the matrix units of hardware.
_STREAMED = (64, 16, 4, 1)
# The side of the smallest product of matrix units.
_GRANULE = 16


@dataclass(frozen=True)
class TileShape:
    """`block_m` queries and `block_n` keys; with `packs_group` the heads of a group are rows of one tile.

    `key_pass` is (queries, keys) of the pass that makes dk and dv, where they are others: it wants many keys and few
    queries, the other passes the opposite. With `sums_in_memory` there is no such pass: each row tile adds to sums of
    dk and dv in memory. With `dq_in_memory` that pass is the only one over the scores, and adds to sums of dq.

    Raises:
        ArgumentError: a number is below 1, or there are tiles for a pass that there is not.
    """

    block_m: int
    block_n: int
    packs_group: bool = True
    key_pass: tuple[int, int] | None = None
    sums_in_memory: bool = False
    dq_in_memory: bool = False

    def __post_init__(self) -> None:
        for place, numbers in (("", (self.block_m, self.block_n)), (" of key_pass", self.key_pass or (1, 1))):
            for name, number in zip(("block_m", "block_n"), numbers, strict=True):
                if number < 1:
                    raise ArgumentError(f"{name}{place} must be at least 1, got {number}.")
        if self.sums_in_memory and self.key_pass is not None:
            raise ArgumentError("with sums_in_memory there is no pass over key tiles; leave key_pass out.")
        if self.sums_in_memory and self.dq_in_memory:
            raise ArgumentError("sums_in_memory has row tiles outside, dq_in_memory key tiles; give one of them.")

    @property
    def of_key_pass(self) -> TileShape:
        """The tiles of dk and dv."""
        if self.key_pass is None:
            return self
        return TileShape(*self.key_pass, self.packs_group, dq_in_memory=self.dq_in_memory)

    def rows_per_query(self, problem: Problem) -> int:
        """Rows of a tile that one query position makes."""
        return problem.group if self.packs_group else 1


def compulsory_cost(problem: Problem, backward: bool = False) -> Cost:
    """What no algorithm can avoid: each input read once, each result written once.

    FLOPs are those of the visible pairs, five products in the backward.

    Args:
        problem: a dense call.
        backward: the backward alone: reads q, k, v, out, lse, dout; writes dq, dk, dv.

    Raises:
        ArgumentError: a packed problem.
    """
    sizes = Sizes.of(problem)
    inputs, product = {"q": sizes.q, "k": sizes.k, "v": sizes.v}, 2 * num_visible_pairs(problem)
    if not backward:
        flops = product * (problem.head_dim + problem.head_dim_v)
        return Cost((pass_of("forward", inputs, {"out": sizes.out, "lse": sizes.lse}, flops),))
    flops = product * (3 * problem.head_dim + 2 * problem.head_dim_v)
    reads = {**inputs, "out": sizes.out, "lse": sizes.lse, "dout": sizes.out}
    return Cost((pass_of("backward", reads, {"dq": sizes.q, "dk": sizes.k, "dv": sizes.v}, flops),))


def schedule_cost(
    problem: Problem, shape: TileShape, backward: bool = False, blocks: BlockMatrix | None = None
) -> Cost:
    """What the kernels of this library move, over the kept tiles if `blocks` are given.

    A tile is cut to the keys that some query of it sees (to the queries that see some key of it, where rows are
    streamed), so that a row of tiles visits the same keys however they are cut: without `blocks`, `block_n` has no part
    in the forward.

    Args:
        problem: a dense call; bias, slopes and sinks are not counted, mask and dropout are made on chip.
        shape: the tiles, and how dk and dv are added up. A pass over key tiles sums over the heads of a group on chip
            in any case.
        backward: the backward alone.
        blocks: (row tiles, key tiles), those that are kept; by default those with a pair that the problem's block mask
            shows, or all.

    Returns:
        Cost. fast_memory_bytes is for whole tiles; extra_memory_bytes is delta, in the backward, or the sums.

    Raises:
        ArgumentError: a packed problem, `blocks` of another shape than the tiles, or a block mask that tells batch
            entries or heads apart.
    """
    sizes = Sizes.of(problem)
    check_blocks(blocks, -(-problem.seqlen_q // shape.block_m), -(-problem.seqlen_k // shape.block_n))
    if blocks is not None and shape.key_pass is not None:
        raise ArgumentError("kept blocks are those of one shape of tiles; leave key_pass out.")
    walk = _Walk(problem, shape, _kept_tiles(problem, shape, blocks))
    keys, row_pairs = walk.streamed_keys()
    num_streams = problem.batch * (problem.num_heads_kv if shape.packs_group else problem.num_heads_q)
    streamed = num_streams * keys * sizes.element_bytes
    k, v = streamed * problem.head_dim, streamed * problem.head_dim_v
    pairs = 2 * problem.batch * problem.num_heads_q * row_pairs
    fast = _fast_memory(problem, shape, backward)
    if not backward:
        writes = {"out": sizes.out, "lse": sizes.lse}
        flops = pairs * (problem.head_dim + problem.head_dim_v)
        return Cost((pass_of("forward", {"q": sizes.q, "k": k, "v": v}, writes, flops),), 0, fast)
    if shape.sums_in_memory:
        flops = pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)
        return Cost(_one_walk(sizes, {"k": k, "v": v}, flops), _sums(sizes, sizes.k + sizes.v), fast)
    delta = pass_of("delta", {"out": sizes.out, "dout": sizes.out}, {"delta": sizes.lse})
    key_shape = shape.of_key_pass
    key_walk = _Walk(problem, key_shape, _kept_tiles(problem, key_shape, blocks))
    if shape.dq_in_memory:
        return Cost((delta, *_key_walk(problem, sizes, key_walk)), sizes.lse + _sums(sizes, sizes.q), fast)
    rows = {"q": sizes.q, "dout": sizes.out, "lse": sizes.lse, "delta": sizes.lse}
    flops = pairs * (2 * problem.head_dim + problem.head_dim_v)
    dq = pass_of("dq", {**rows, "k": k, "v": v}, {"dq": sizes.q}, flops)
    return Cost((delta, _key_pass(problem, sizes, key_walk), dq), sizes.lse, fast)


def _kept_tiles(problem: Problem, shape: TileShape, blocks: BlockMatrix | None) -> BlockMatrix | None:
    """`blocks`, or the tiles of `shape` that the problem's block mask keeps; None where all are."""
    mask = problem.block_mask
    if blocks is not None or mask is None:
        return blocks
    if mask.planes != (1, 1):
        raise ArgumentError(
            f"traffic is modelled of one block mask for all heads, and this one has (batch, num_heads) {mask.planes};"
            " pass blocks=mask.to_blocks()[b, h].tolist(), with the mask's blocks as tiles."
        )
    lists = tile_lists(mask, (shape.block_m, shape.block_n), torch.device("cpu"))
    kept = torch.zeros(lists.num_rows, -(-mask.seqlen_k // shape.block_n), dtype=torch.bool)
    rows = torch.arange(lists.num_rows).repeat_interleave(lists.offsets.diff())
    kept[rows, lists.columns.to(torch.int64)] = True
    found: BlockMatrix = kept.tolist()
    return found


def once_per_pass(problem: Problem, cost: Cost) -> Cost:
    """What of `cost` crosses where a large cache stands before slow memory, as the level-2 cache of a GPU does.

    A pass that reads or writes a tensor again and again moves it once; nothing lasts from one pass to the next.

    Args:
        problem: the dense call that `cost` is of. N x N tensors, which no pass moves twice, stay as they are.
    """
    sizes = Sizes.of(problem)
    of_tensors = {
        "q": sizes.q, "k": sizes.k, "v": sizes.v, "out": sizes.out, "lse": sizes.lse, "dout": sizes.out,
        "delta": sizes.lse, "dq": sizes.q, "dk": sizes.k, "dv": sizes.v,
        "dk_sum": _sums(sizes, sizes.k), "dv_sum": _sums(sizes, sizes.v), "dq_sum": _sums(sizes, sizes.q),
    }  # fmt: skip
    passes = []
    for one in cost.passes:
        tensors = {
            name: Traffic(min(moved.read_bytes, most), min(moved.written_bytes, most))
            for name, moved in one.tensors.items()
            for most in (of_tensors.get(name, sizes.scores),)
        }
        passes.append(Pass(one.name, tensors, one.flops))
    return Cost(tuple(passes), cost.extra_memory_bytes, cost.fast_memory_bytes)


def _key_pass(problem: Problem, sizes: Sizes, walk: _Walk) -> Pass:
    """dk and dv: key tiles outside, the rows of all heads of a group streamed."""
    rows, pairs = walk.streamed_rows()
    num_heads = problem.batch * problem.num_heads_q
    streamed = num_heads * rows
    statistics = streamed * sizes.accumulator_bytes
    reads = {
        "k": sizes.k, "v": sizes.v, "q": streamed * problem.head_dim * sizes.element_bytes,
        "dout": streamed * problem.head_dim_v * sizes.element_bytes, "lse": statistics, "delta": statistics,
    }  # fmt: skip
    flops = 4 * num_heads * pairs * (problem.head_dim + problem.head_dim_v)
    return pass_of("dk, dv", reads, {"dk": sizes.k, "dv": sizes.v}, flops)


def _one_walk(sizes: Sizes, streamed: dict[str, int], flops: int) -> tuple[Pass, ...]:
    """Row tiles outside; dk and dv are summed in memory: set to 0 before, rounded to the input dtype after."""
    sums = {"dk_sum": _sums(sizes, sizes.k), "dv_sum": _sums(sizes, sizes.v)}
    added = {"dk_sum": _sums(sizes, streamed["k"]), "dv_sum": _sums(sizes, streamed["v"])}
    rows = {"q": sizes.q, "out": sizes.out, "dout": sizes.out, "lse": sizes.lse}
    return (
        pass_of("zero", {}, sums),
        pass_of("backward", {**rows, **streamed, **added}, {"dq": sizes.q, **added}, flops),
        pass_of("round", sums, {"dk": sizes.k, "dv": sizes.v}),
    )


def _key_walk(problem: Problem, sizes: Sizes, walk: _Walk) -> tuple[Pass, ...]:
    """Key tiles outside; dq is summed in memory: set to 0 before, rounded to the input dtype after."""
    plain, sums = _key_pass(problem, sizes, walk), {"dq_sum": _sums(sizes, sizes.q)}
    rows, pairs = walk.streamed_rows()
    num_heads = problem.batch * problem.num_heads_q
    added = num_heads * rows * problem.head_dim * sizes.accumulator_bytes
    reads = {**{name: moved.read_bytes for name, moved in plain.tensors.items()}, "dq_sum": added}
    writes = {**{name: moved.written_bytes for name, moved in plain.tensors.items()}, "dq_sum": added}
    flops = plain.flops + 2 * num_heads * pairs * problem.head_dim
    return (
        pass_of("zero", {}, sums),
        pass_of("dk, dv, dq", reads, writes, flops),
        pass_of("round", sums, {"dq": sizes.q}),
    )


def _sums(sizes: Sizes, num_bytes: int) -> int:
    """Bytes of as many running sums as there are numbers of the input dtype in `num_bytes`."""
    return num_bytes // sizes.element_bytes * sizes.accumulator_bytes


@dataclass(frozen=True)
class _Walk:
    """How many keys and rows one head's tiles visit."""

    problem: Problem
    shape: TileShape
    blocks: BlockMatrix | None

    def streamed_keys(self) -> tuple[int, int]:
        """Keys loaded by all row tiles, and pairs of scores made there."""
        problem, block = self.problem, self.shape.block_m
        assert problem.shift is not None
        keys = pairs = 0
        for m_start in range(0, problem.seqlen_q, block):
            m_end = min(m_start + block, problem.seqlen_q)
            span = key_span(problem.spec.band, problem.shift, m_start, m_end, problem.seqlen_k)
            kept = None if self.blocks is None else self.blocks[m_start // block]
            seen = _kept_length(span, kept, self.shape.block_n)
            keys, pairs = keys + seen, pairs + seen * (m_end - m_start)
        return keys, pairs

    def streamed_rows(self) -> tuple[int, int]:
        """Query rows of one head loaded by all key tiles, and pairs of scores made there."""
        problem, block = self.problem, self.shape.block_n
        assert problem.shift is not None
        rows = pairs = 0
        for n_start in range(0, problem.seqlen_k, block):
            n_end = min(n_start + block, problem.seqlen_k)
            span = query_span(problem.spec.band, problem.shift, n_start, n_end, problem.seqlen_q)
            kept = None if self.blocks is None else [row[n_start // block] for row in self.blocks]
            seen = _kept_length(span, kept, self.shape.block_m)
            rows, pairs = rows + seen, pairs + seen * (n_end - n_start)
        return rows, pairs


def _kept_length(span: tuple[int, int], kept: Iterable[bool] | None, block: int) -> int:
    """How much of `span` lies in the kept blocks."""
    lo, hi = span
    if kept is None:
        return hi - lo
    return sum(max(0, min(hi, (c + 1) * block) - max(lo, c * block)) for c, is_kept in enumerate(kept) if is_kept)


def fitting_shape(
    problem: Problem,
    fast_memory_bytes: int,
    backward: bool = False,
    *,
    block_m: int | None = None,
    block_n: int | None = None,
) -> TileShape:
    """The tiles that fit into fast memory and move least, if the streamed side has 64 of its tokens at a time.

    The forward and dq hold as many queries as fit and stream keys, dk and dv hold keys and stream queries. Held tokens
    are all there are or a multiple of 16, where 16 fit; fewer are streamed at a time where there would be fewer held.
    A number that is given stays, in all passes.

    Raises:
        ArgumentError: not even a tile of one query and one key fits, or the given one does not.
    """
    is_chosen = block_m is None and block_n is None

    def fits(queries: int, keys: int, is_key_pass: bool) -> bool:
        return _need(problem, TileShape(queries, keys), backward, is_key_pass) <= fast_memory_bytes

    queries, keys = _fitting_pair(lambda m, n: fits(m, n, False), problem.seqlen_q, block_m, block_n)
    key_pass = None
    if backward and is_chosen:
        held, streamed = _fitting_pair(lambda n, m: fits(m, n, True), problem.seqlen_k, None, None)
        key_pass = (streamed, held)
    shape = TileShape(queries, keys, key_pass=key_pass)
    if (need := _fast_memory(problem, shape, backward)) > fast_memory_bytes:
        what = "smaller than a row" if is_chosen else "too small"
        raise ArgumentError(
            f"fast memory of {fast_memory_bytes} bytes is {what}: tiles of {queries} x {keys} (queries x keys) need"
            f" {need} bytes in this call."
        )
    return shape


def _fitting_pair(
    fits: Callable[[int, int], bool], num_tokens: int, held: int | None, streamed: int | None
) -> tuple[int, int]:
    """(held, streamed) tokens of a tile; the smallest that was tried where none fits."""
    best = None
    for few in _STREAMED if streamed is None else (streamed,):
        found = _most_held(fits, few, num_tokens) if held is None else held
        if found and fits(found, few):
            best = (found, few)
            if held is not None or found >= min(few, num_tokens):
                break
    return (held or 1, few) if best is None else best


def _most_held(fits: Callable[[int, int], bool], streamed: int, num_tokens: int) -> int:
    """How many of `num_tokens` fit: all, or a multiple of 16, or fewer than 16; 0 where not one fits."""
    most, too_many = 0, max(1, num_tokens) + 1
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle, streamed) else (most, middle)
    return most if most >= num_tokens or most < _GRANULE else most - most % _GRANULE


def _fast_memory(problem: Problem, shape: TileShape, backward: bool) -> int:
    """Bytes of whole tiles on chip, of the hungriest pass."""
    need = _need(problem, shape, backward, is_key_pass=False)
    if backward and shape.sums_in_memory:
        return need
    if backward and shape.dq_in_memory:
        rows = min(shape.block_m, problem.seqlen_q) * shape.rows_per_query(problem)
        need = _delta_need(problem, rows)
    return max(need, _need(problem, shape.of_key_pass, backward, is_key_pass=True)) if backward else need


def _need(problem: Problem, shape: TileShape, backward: bool, is_key_pass: bool) -> int:
    """Of one pass: what is loaded is in the input dtype, scores and sums are in the accumulators'."""
    element, sums = problem.dtype.itemsize, accumulator_bytes(problem)
    width, width_v = problem.head_dim, problem.head_dim_v
    queries, keys = min(shape.block_m, problem.seqlen_q), min(shape.block_n, problem.seqlen_k)
    rows = queries * shape.rows_per_query(problem)
    loaded = keys * (width + width_v) * element
    if not backward:
        return rows * width * element + loaded + rows * keys * sums + rows * (width_v + 2) * sums
    if shape.sums_in_memory:
        # q, out, dout, lse and delta; keys, values and their sums; P and dP.
        rows_bytes = rows * ((width + 2 * width_v) * element + (width + 2) * sums)
        return loaded + keys * (width + width_v) * sums + rows_bytes + 2 * rows * keys * sums
    if is_key_pass:
        # Rows of one head at a time, P and dP.
        rows_bytes = queries * ((width + width_v) * element + 2 * sums)
        rows_bytes += queries * width * sums if shape.dq_in_memory else 0
        return loaded + keys * (width + width_v) * sums + rows_bytes + 2 * queries * keys * sums
    delta = _delta_need(problem, rows)
    # Rows of all packed heads, P and dP.
    return max(delta, loaded + rows * ((width + width_v) * element + (width + 2) * sums) + 2 * rows * keys * sums)


def _delta_need(problem: Problem, rows: int) -> int:
    return rows * (2 * problem.head_dim_v * problem.dtype.itemsize + accumulator_bytes(problem))
