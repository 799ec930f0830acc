"""This library's schedule, replayed: the loops of `teaching.py` and of the GPU backward over a two-level memory.

What it loads and stores is counted by the memory, and modelled by `schedule.py`; the results are real.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilestream.io.memory import FastTile, TwoLevelMemory
from tilestream.io.published import BlockMatrix
from tilestream.io.replay import DenseCall, Results, evict, spans
from tilestream.io.schedule import TileShape
from tilestream.spec import Band
from tilestream.tiles import tile_row

__all__ = ["schedule_backward", "schedule_forward"]

_NEGATIVE_INFINITY = float("-inf")
# What the backward streams of a row tile.
_ROW_TENSORS = ("q", "dout", "lse", "delta")


def schedule_forward(
    call: DenseCall, memory: TwoLevelMemory, shape: TileShape, blocks: BlockMatrix | None = None
) -> Results:
    """out and lse, row tiles outside.

    Raises:
        FastMemoryError: the tiles do not fit on chip.
    """
    call.bind_inputs(memory)
    results = Results(out=call.allocate_out(memory), lse=call.allocate_rows(memory, "lse"))
    memory.begin("forward")
    for b, head_kv, heads in call.streams(shape.packs_group):
        for rows in spans(call.problem.seqlen_q, shape.block_m):
            q_m = memory.load("q", (b, heads, rows))
            num_rows = _flat(q_m).shape[0]
            row_max, row_sum = call.reserve(memory, num_rows, 1), call.reserve(memory, num_rows, 1)
            acc = call.reserve(memory, num_rows, call.problem.head_dim_v)
            row_max.data.fill_(_NEGATIVE_INFINITY)
            for keys in _key_tiles(call, shape, rows, blocks):
                k_n, v_n = memory.load("k", (b, head_kv, keys)), memory.load("v", (b, head_kv, keys))
                s_mn = call.reserve(memory, num_rows, keys.stop - keys.start)
                s_mn.set(call.scores(memory, _flat(q_m), k_n.data) + call.hidden(rows, keys, heads.stop - heads.start))
                new_max = torch.maximum(row_max.data, s_mn.data.amax(1, keepdim=True))
                finite_max = new_max.masked_fill(new_max == _NEGATIVE_INFINITY, 0)
                alpha = torch.exp(row_max.data - finite_max)
                s_mn.set(torch.exp(s_mn.data - finite_max))
                row_sum.set(alpha * row_sum.data + s_mn.data.sum(1, keepdim=True))
                row_max.set(new_max)
                s_mn.set(s_mn.data * call.kept(b, heads, rows, keys) * call.dropout_factor)
                acc.set(alpha * acc.data + memory.product(s_mn.data, v_n.data))
                state = {"acc": acc, "row_max": row_max, "row_sum": row_sum}
                memory.at_tile(rows, keys, {"q": q_m, "k": k_n, "v": v_n, "scores": s_mn, **state})
                evict(k_n, v_n, s_mn)
            acc.set(acc.data / row_sum.data.masked_fill(row_sum.data == 0, 1))
            row_max.set(row_max.data + torch.log(row_sum.data))
            memory.store("out", (b, heads, rows), acc)
            memory.store("lse", (b, heads, rows), row_max)
            memory.at_tile(rows, None, {"q": q_m, "acc": acc, "row_max": row_max, "row_sum": row_sum})
            evict(q_m, row_max, row_sum, acc)
    return results


def schedule_backward(
    call: DenseCall, memory: TwoLevelMemory, shape: TileShape, forward: Results, blocks: BlockMatrix | None = None
) -> Results:
    """dq, dk, dv: delta, then dk and dv with key tiles outside, then dq with row tiles outside; or all in one walk over
    the row tiles, with sums in memory.

    Args:
        forward: out and lse of the forward.

    Raises:
        FastMemoryError: the tiles do not fit on chip.
    """
    assert forward.out is not None
    assert forward.lse is not None
    call.bind_inputs(memory)
    memory.bind("out", forward.out, call.element_bytes)
    memory.bind("lse", forward.lse, call.accumulator_bytes)
    gradients = (("dq", call.q), ("dk", call.k), ("dv", call.v))
    results = Results(**{name: call.allocate_like(memory, name, tensor) for name, tensor in gradients})
    if shape.sums_in_memory:
        _one_walk(call, memory, shape, blocks)
        return results
    call.allocate_rows(memory, "delta", is_extra=True)
    _delta_pass(call, memory, shape)
    if shape.dq_in_memory:
        memory.begin("zero")
        memory.allocate("dq_sum", call.q.shape, call.accumulator_bytes, call.dtype, is_extra=True)
        memory.fill("dq_sum", 0.0)
    _key_pass(call, memory, shape.of_key_pass, blocks)
    if shape.dq_in_memory:
        _round_dq(call, memory, shape)
        return results
    _query_pass(call, memory, shape, blocks)
    return results


def _delta_pass(call: DenseCall, memory: TwoLevelMemory, shape: TileShape) -> None:
    memory.begin("delta")
    for b, _, heads in call.streams(shape.packs_group):
        for rows in spans(call.problem.seqlen_q, shape.block_m):
            out_m, dout_m = memory.load("out", (b, heads, rows)), memory.load("dout", (b, heads, rows))
            delta_m = call.reserve(memory, *out_m.data.shape[:2])
            delta_m.set((out_m.data * dout_m.data).sum(-1))
            memory.store("delta", (b, heads, rows), delta_m)
            memory.at_tile(rows, None, {"out": out_m, "dout": dout_m, "delta": delta_m})
            evict(out_m, dout_m, delta_m)


def _key_pass(call: DenseCall, memory: TwoLevelMemory, shape: TileShape, blocks: BlockMatrix | None) -> None:
    memory.begin("dk, dv, dq" if shape.dq_in_memory else "dk, dv")
    problem = call.problem
    for b, head_kv, group in call.streams(packs_group=True):
        for keys in spans(problem.seqlen_k, shape.block_n):
            k_n, v_n = memory.load("k", (b, head_kv, keys)), memory.load("v", (b, head_kv, keys))
            dk_n, dv_n = call.reserve(memory, *k_n.data.shape), call.reserve(memory, *v_n.data.shape)
            for head in range(group.start, group.stop):
                heads = slice(head, head + 1)
                for rows in _row_tiles(call, shape, keys, blocks):
                    loaded = _load_rows(memory, b, heads, rows)
                    p_mn, ds_mn = _p_and_ds(call, memory, loaded, (k_n, v_n), (b, heads, rows, keys))
                    q_m, dout_m = loaded[:2]
                    dropped = p_mn.data * call.kept(b, heads, rows, keys) * call.dropout_factor
                    dv_n.set(dv_n.data + memory.product(dropped.T, _flat(dout_m)))
                    dk_n.set(dk_n.data + problem.spec.scale * memory.product(ds_mn.data.T, _flat(q_m)))
                    made = {"p": p_mn, "ds": ds_mn, "dk": dk_n, "dv": dv_n}
                    if shape.dq_in_memory:
                        dq_m = memory.load("dq_sum", (b, heads, rows))
                        added = problem.spec.scale * memory.product(ds_mn.data, k_n.data)
                        dq_m.set(dq_m.data + added.reshape(dq_m.data.shape))
                        memory.store("dq_sum", (b, heads, rows), dq_m)
                        dq_m.evict()
                    memory.at_tile(rows, keys, {"k": k_n, "v": v_n, **_named(loaded), **made})
                    evict(*loaded, p_mn, ds_mn)
            memory.store("dk", (b, head_kv, keys), dk_n)
            memory.store("dv", (b, head_kv, keys), dv_n)
            memory.at_tile(None, keys, {"k": k_n, "v": v_n, "dk": dk_n, "dv": dv_n})
            evict(k_n, v_n, dk_n, dv_n)


def _round_dq(call: DenseCall, memory: TwoLevelMemory, shape: TileShape) -> None:
    """dq of its sums."""
    memory.begin("round")
    for b, _, heads in call.streams(packs_group=False):
        for rows in spans(call.problem.seqlen_q, shape.block_m):
            tile = memory.load("dq_sum", (b, heads, rows))
            memory.store("dq", (b, heads, rows), tile)
            tile.evict()


def _query_pass(call: DenseCall, memory: TwoLevelMemory, shape: TileShape, blocks: BlockMatrix | None) -> None:
    memory.begin("dq")
    for b, head_kv, heads in call.streams(shape.packs_group):
        for rows in spans(call.problem.seqlen_q, shape.block_m):
            loaded = _load_rows(memory, b, heads, rows)
            dq_m = call.reserve(memory, *_flat(loaded[0]).shape)
            for keys in _key_tiles(call, shape, rows, blocks):
                k_n, v_n = memory.load("k", (b, head_kv, keys)), memory.load("v", (b, head_kv, keys))
                p_mn, ds_mn = _p_and_ds(call, memory, loaded, (k_n, v_n), (b, heads, rows, keys))
                dq_m.set(dq_m.data + call.problem.spec.scale * memory.product(ds_mn.data, k_n.data))
                made = {"k": k_n, "v": v_n, "p": p_mn, "ds": ds_mn, "dq": dq_m}
                memory.at_tile(rows, keys, {**_named(loaded), **made})
                evict(k_n, v_n, p_mn, ds_mn)
            memory.store("dq", (b, heads, rows), dq_m)
            memory.at_tile(rows, None, {**_named(loaded), "dq": dq_m})
            evict(*loaded, dq_m)


def _one_walk(call: DenseCall, memory: TwoLevelMemory, shape: TileShape, blocks: BlockMatrix | None) -> None:
    """Row tiles outside; what they add to dk and dv is read from memory and written back."""
    problem = call.problem
    memory.begin("zero")
    for name, tensor in (("dk_sum", call.k), ("dv_sum", call.v)):
        memory.allocate(name, tensor.shape, call.accumulator_bytes, call.dtype, is_extra=True)
        memory.fill(name, 0.0)
    memory.begin("backward")
    for b, head_kv, heads in call.streams(shape.packs_group):
        for rows in spans(problem.seqlen_q, shape.block_m):
            q_m, out_m, dout_m, lse_m = (memory.load(name, (b, heads, rows)) for name in ("q", "out", "dout", "lse"))
            delta_m, dq_m = call.reserve(memory, *lse_m.data.shape), call.reserve(memory, *_flat(q_m).shape)
            delta_m.set((out_m.data * dout_m.data).sum(-1))
            loaded = [q_m, dout_m, lse_m, delta_m]
            for keys in _key_tiles(call, shape, rows, blocks):
                place = (b, head_kv, keys)
                k_n, v_n, dk_n, dv_n = (memory.load(name, place) for name in ("k", "v", "dk_sum", "dv_sum"))
                p_mn, ds_mn = _p_and_ds(call, memory, loaded, (k_n, v_n), (b, heads, rows, keys))
                dropped = p_mn.data * call.kept(b, heads, rows, keys) * call.dropout_factor
                dv_n.set(dv_n.data + memory.product(dropped.T, _flat(dout_m)))
                dq_m.set(dq_m.data + problem.spec.scale * memory.product(ds_mn.data, k_n.data))
                dk_n.set(dk_n.data + problem.spec.scale * memory.product(ds_mn.data.T, _flat(q_m)))
                memory.store("dk_sum", place, dk_n)
                memory.store("dv_sum", place, dv_n)
                evict(k_n, v_n, dk_n, dv_n, p_mn, ds_mn)
            memory.store("dq", (b, heads, rows), dq_m)
            evict(*loaded, out_m, dq_m)
    memory.begin("round")
    for b, head_kv, _ in call.streams(packs_group=True):
        for keys in spans(problem.seqlen_k, shape.block_n):
            for total, gradient in (("dk_sum", "dk"), ("dv_sum", "dv")):
                tile = memory.load(total, (b, head_kv, keys))
                memory.store(gradient, (b, head_kv, keys), tile)
                tile.evict()


def _load_rows(memory: TwoLevelMemory, b: int, heads: slice, rows: slice) -> list[FastTile]:
    """q, dout, lse and delta of a row tile."""
    return [memory.load(name, (b, heads, rows)) for name in _ROW_TENSORS]


def _named(loaded: list[FastTile]) -> dict[str, FastTile]:
    return dict(zip(_ROW_TENSORS, loaded, strict=True))


def _p_and_ds(
    call: DenseCall,
    memory: TwoLevelMemory,
    loaded: list[FastTile],
    key_tiles: tuple[FastTile, FastTile],
    place: tuple[int, slice, slice, slice],
) -> tuple[FastTile, FastTile]:
    """P made again from lse, and dS, of one tile."""
    (q_m, dout_m, lse_m, delta_m), (k_n, v_n), (b, heads, rows, keys) = loaded, key_tiles, place
    shape = (_flat(q_m).shape[0], keys.stop - keys.start)
    p_mn, ds_mn = call.reserve(memory, *shape), call.reserve(memory, *shape)
    lse = lse_m.data.reshape(-1, 1)
    finite_lse = lse.masked_fill(lse == _NEGATIVE_INFINITY, 0)
    s_mn = call.scores(memory, _flat(q_m), k_n.data) + call.hidden(rows, keys, heads.stop - heads.start)
    p_mn.set(torch.exp(s_mn - finite_lse))
    dp_mn = memory.product(_flat(dout_m), v_n.data.T) * call.kept(b, heads, rows, keys) * call.dropout_factor
    ds_mn.set(p_mn.data * (dp_mn - delta_m.data.reshape(-1, 1)))
    return p_mn, ds_mn


def _key_tiles(call: DenseCall, shape: TileShape, rows: slice, blocks: BlockMatrix | None) -> Iterator[slice]:
    """Keys that a row tile visits, tile by tile."""
    problem = call.problem
    assert problem.shift is not None
    for tile in tile_row(problem.spec.band, problem.shift, rows.start, rows.stop, problem.seqlen_k, shape.block_n):
        if blocks is None or blocks[rows.start // shape.block_m][tile.n_start // shape.block_n]:
            yield slice(tile.n_start, tile.n_end)


def _row_tiles(call: DenseCall, shape: TileShape, keys: slice, blocks: BlockMatrix | None) -> Iterator[slice]:
    """Queries that a key tile visits, tile by tile: `_key_tiles` with queries and keys exchanged."""
    problem = call.problem
    assert problem.shift is not None
    band = Band(problem.spec.band.right, problem.spec.band.left)
    for tile in tile_row(band, -problem.shift, keys.start, keys.stop, problem.seqlen_q, shape.block_m):
        if blocks is None or blocks[tile.n_start // shape.block_m][keys.start // shape.block_n]:
            yield slice(tile.n_start, tile.n_end)


def _flat(tile: FastTile) -> Tensor:
    """(heads, m, width) as (heads * m, width)."""
    return tile.data.flatten(0, 1)
