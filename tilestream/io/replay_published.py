"""FlashAttention as published, replayed: algorithms 1, 2, 4 and 5 of arXiv:2205.14135 over a two-level memory.

What it loads and stores is counted by the memory, and modelled by `published.py`; the results are real.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.io.memory import FastTile, TwoLevelMemory
from tilestream.io.published import BlockMatrix, PublishedBlocks
from tilestream.io.replay import DenseCall, Results, evict, spans

__all__ = ["published_backward", "published_forward"]

_NEGATIVE_INFINITY = float("-inf")


def published_forward(
    call: DenseCall, memory: TwoLevelMemory, tiles: PublishedBlocks, blocks: BlockMatrix | None = None
) -> Results:
    """out, row_max and row_sum, key tiles outside; a tile is masked, never skipped, unless `blocks` leave it out.

    Raises:
        FastMemoryError: the tiles do not fit on chip.
    """
    call.bind_inputs(memory)
    results = Results(
        out=call.allocate_out(memory),
        row_max=call.allocate_rows(memory, "row_max", is_extra=True),
        row_sum=call.allocate_rows(memory, "row_sum", is_extra=True),
    )
    memory.begin("initialise")
    for name, number in (("out", 0.0), ("row_sum", 0.0), ("row_max", _NEGATIVE_INFINITY)):
        memory.fill(name, number)
    memory.begin("forward")
    for b, head_kv, heads in call.streams(packs_group=False):
        for c, keys in enumerate(spans(call.problem.seqlen_k, tiles.block_n)):
            k_n, v_n = memory.load("k", (b, head_kv, keys)), memory.load("v", (b, head_kv, keys))
            for r, rows in enumerate(spans(call.problem.seqlen_q, tiles.block_m)):
                if blocks is None or blocks[r][c]:
                    _update_rows(call, memory, (k_n, v_n), (b, heads, rows, keys))
            evict(k_n, v_n)
    return results


def _update_rows(
    call: DenseCall,
    memory: TwoLevelMemory,
    key_tiles: tuple[FastTile, FastTile],
    place: tuple[int, slice, slice, slice],
) -> None:
    """Lines 8 to 13 of algorithm 1: a row tile's out, row_sum and row_max with one more tile of keys in them."""
    (k_n, v_n), (b, heads, rows, keys) = key_tiles, place
    index = (b, heads.start, rows)
    q_m, out_m, row_sum, row_max = (memory.load(name, index) for name in ("q", "out", "row_sum", "row_max"))
    s_mn = call.reserve(memory, rows.stop - rows.start, keys.stop - keys.start)
    s_mn.set(call.scores(memory, q_m.data, k_n.data) + call.hidden(rows, keys))
    tile_max = s_mn.data.amax(1)
    finite_tile_max = _finite(tile_max)
    s_mn.set(torch.exp(s_mn.data - finite_tile_max[:, None]))
    tile_sum = s_mn.data.sum(1)
    new_max = torch.maximum(row_max.data, tile_max)
    before, now = torch.exp(row_max.data - _finite(new_max)), torch.exp(tile_max - _finite(new_max))
    new_sum = before * row_sum.data + now * tile_sum
    s_mn.set(s_mn.data * call.kept(b, heads, rows, keys) * call.dropout_factor)
    summed = (row_sum.data * before)[:, None] * out_m.data + now[:, None] * memory.product(s_mn.data, v_n.data)
    out_m.set(summed / new_sum.masked_fill(new_sum == 0, 1)[:, None])
    row_sum.set(new_sum)
    row_max.set(new_max)
    for name, tile in (("out", out_m), ("row_sum", row_sum), ("row_max", row_max)):
        memory.store(name, index, tile)
    evict(q_m, out_m, row_sum, row_max, s_mn)


def published_backward(
    call: DenseCall,
    memory: TwoLevelMemory,
    tiles: PublishedBlocks,
    forward: Results,
    blocks: BlockMatrix | None = None,
) -> Results:
    """dq, dk, dv by algorithm 4: key tiles outside, dq read and written in each step.

    Args:
        forward: out, row_max and row_sum of the forward.

    Raises:
        FastMemoryError: the tiles do not fit on chip.
    """
    call.bind_inputs(memory)
    assert forward.out is not None
    memory.bind("out", forward.out, call.element_bytes)
    for name in ("row_max", "row_sum"):
        memory.bind(name, getattr(forward, name), call.accumulator_bytes)
    gradients = (("dq", call.q), ("dk", call.k), ("dv", call.v))
    results = Results(**{name: call.allocate_like(memory, name, tensor) for name, tensor in gradients})
    memory.begin("initialise")
    for name, _ in gradients:
        memory.fill(name, 0.0)
    memory.begin("backward")
    for b, head_kv, heads in call.streams(packs_group=False):
        is_first_of_group = heads.start % call.problem.group == 0
        for c, keys in enumerate(spans(call.problem.seqlen_k, tiles.block_n)):
            index = (b, head_kv, keys)
            k_n, v_n = memory.load("k", index), memory.load("v", index)
            dk_n, dv_n = call.reserve(memory, *k_n.data.shape), call.reserve(memory, *v_n.data.shape)
            for r, rows in enumerate(spans(call.problem.seqlen_q, tiles.block_m)):
                if blocks is None or blocks[r][c]:
                    _add_gradients(call, memory, (k_n, v_n, dk_n, dv_n), (b, heads, rows, keys))
            evict(k_n, v_n)  # before dk and dv come in: there is no room for both
            for name, tile in (("dk", dk_n), ("dv", dv_n)):
                if not is_first_of_group:
                    before = memory.load(name, index)
                    tile.set(tile.data + before.data)
                    evict(before)
                memory.store(name, index, tile)
            evict(dk_n, dv_n)
    return results


def _add_gradients(
    call: DenseCall, memory: TwoLevelMemory, key_tiles: tuple[FastTile, ...], place: tuple[int, slice, slice, slice]
) -> None:
    """Lines 10 to 22 of algorithm 4."""
    (k_n, v_n, dk_n, dv_n), (b, heads, rows, keys) = key_tiles, place
    index, scale = (b, heads.start, rows), call.problem.spec.scale
    names = ("q", "out", "dout", "dq", "row_sum", "row_max")
    q_m, out_m, dout_m, dq_m, row_sum, row_max = loaded = [memory.load(name, index) for name in names]
    shape = (rows.stop - rows.start, keys.stop - keys.start)
    p_mn, ds_mn, delta_m = call.reserve(memory, *shape), call.reserve(memory, *shape), call.reserve(memory, shape[0])
    s_mn = call.scores(memory, q_m.data, k_n.data) + call.hidden(rows, keys)
    inverse_sum = 1 / row_sum.data.masked_fill(row_sum.data == 0, 1)
    p_mn.set(torch.exp(s_mn - _finite(row_max.data)[:, None]) * inverse_sum[:, None])
    kept = call.kept(b, heads, rows, keys) * call.dropout_factor
    dv_n.set(dv_n.data + memory.product((p_mn.data * kept).T, dout_m.data))
    dp_mn = memory.product(dout_m.data, v_n.data.T) * kept
    delta_m.set((dout_m.data * out_m.data).sum(1))
    ds_mn.set(p_mn.data * (dp_mn - delta_m.data[:, None]))
    dq_m.set(dq_m.data + scale * memory.product(ds_mn.data, k_n.data))
    memory.store("dq", index, dq_m)
    dk_n.set(dk_n.data + scale * memory.product(ds_mn.data.T, q_m.data))
    evict(*loaded, p_mn, ds_mn, delta_m)


def _finite(row_max: Tensor) -> Tensor:
    """0 where a row has seen no key."""
    return row_max.masked_fill(row_max == _NEGATIVE_INFINITY, 0)
