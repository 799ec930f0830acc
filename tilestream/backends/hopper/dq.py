"""dq of the Hopper backward: products of dS with the keys of a tile, added to float32 sums in memory.

Sums of a row tile lie as threads hold them: pieces of 64 columns, and in each of these four numbers of a thread side by
side, then those of the next thread (`_reduce`). So a warp adds 512 bytes with an instruction, and no sum passes through
shared memory, which the products need: written there by threads and read by TMA, dq would take a fifth of its time.

Shapes: M rows of a tile; N keys of a consumer; D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.backward_places import phase
from tilestream.backends.hopper.gluon_names import gl, jit, mbarrier, warpgroup_mma, warpgroup_mma_wait

__all__ = [
    "Steps",
    "add_dq",
    "arrive_ds",
    "await_ds",
    "drain_dq",
    "first_step",
    "multiply_dq",
    "next_head",
    "next_step",
    "row_tile_of",
]

# Of four numbers and the addresses of theirs, of which only the first is used.
_REDUCE = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$5], {$1, $2, $3, $4}; mov.b32 $0, 0;")


class Steps(NamedTuple):
    """Where a consumer is, whose products for dq are those of the row tile before."""

    step: Any  # row tiles of this program before this one
    slot: Any  # of the tile of keys
    row_tile: Any  # among those of all heads; with a block mask, the first one of this head
    last: Any  # the one before; the number of all where there is none


@jit
def _row_tile(index, place, numbers, facts: gl.constexpr):
    """The first row tile of the query head `index` of a group that sees a key."""
    head = (place.sequence.batch * numbers.num_heads_kv + place.sequence.head_kv) * numbers.group + index
    return head * numbers.num_row_tiles + place.lo // facts.block_m


@jit
def _num_all(numbers):
    return numbers.num_sides * numbers.group * numbers.num_row_tiles


@jit
def first_step(step, slot, numbers):
    """`Steps` before the first row tile of a tile of keys. What is multiplied for the one before that is no number of
    anyone, and is added to sums behind all others."""
    nowhere = _num_all(numbers)
    return Steps(step, slot, nowhere, nowhere)


@jit
def next_head(steps, index, place, numbers, facts: gl.constexpr):
    """`Steps` at the first row tile of another query head."""
    return Steps(steps.step, steps.slot, _row_tile(index, place, numbers, facts), steps.last)


@jit
def row_tile_of(steps, at, tensors, facts: gl.constexpr):
    """The row tile of `steps`, which with a block mask is at a place in the lists."""
    if facts.has_blocks:
        return steps.row_tile + gl.load(tensors.row_tiles + at)
    else:
        return steps.row_tile


@jit
def next_step(steps, row_tile, numbers, facts: gl.constexpr):
    """`Steps` at the row tile of a head that follows `row_tile`."""
    # Not the same number to the compiler: else it would keep the addresses of K and V in registers, 32 of them.
    slot = steps.slot ^ numbers.zero
    if facts.has_blocks:
        return Steps(steps.step + 1, slot, steps.row_tile, row_tile)
    else:
        return Steps(steps.step + 1, slot, steps.row_tile + 1, steps.row_tile)


@jit
def _product(ds_slot, slot, part: gl.constexpr, width: gl.constexpr, shared, facts: gl.constexpr):
    """dS times `width` columns of K of all keys of a tile, still being multiplied."""
    # Of 64 keys.
    pieces: gl.constexpr = facts.block_n // 64
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    dq = gl.full([facts.block_m, width], 0.0, gl.float32, layout)
    for c in gl.static_range(pieces):
        k_n = shared.k.index(pieces * slot + c).reshape([64, facts.block_d])
        if width < facts.block_d:
            k_n = k_n.slice(part * width, width, 1)
        dq = warpgroup_mma(shared.ds.index(pieces * ds_slot + c).permute((1, 0)), k_n, dq, use_acc=c > 0, is_async=True)
    return dq


@jit
def _reduce(dq, row_tile, part: gl.constexpr, tensors, facts: gl.constexpr):
    """Add part number `part` of the columns of dq to their sums."""
    eighths: gl.constexpr = dq.shape[1] // 8
    size: gl.constexpr = dq.shape[1] * facts.block_m
    pointer = tensors.dq_sums + (row_tile.to(gl.int64) * (facts.block_m * facts.block_d) + part * size)
    flat = dq.reshape([4, 2, 8, eighths, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([size])
    pointers = pointer + gl.arange(0, size, layout=flat.type.layout)
    gl.inline_asm_elementwise(
        _REDUCE, "=r,f,f,f,f,l,l,l,l", [flat, pointers.to(gl.int64)], dtype=gl.int8, is_pure=False, pack=4
    )


@jit
def _other(c: gl.constexpr, shared):
    """The barriers of dS of the other consumer: a warpgroup needs not wait for its own."""
    if c == 0:
        return shared.ds_full_1
    else:
        return shared.ds_full_0


@jit
def arrive_ds(ds_slot, c: gl.constexpr, shared):
    """Consumer c has written dS."""
    if c == 0:
        mbarrier.arrive(shared.ds_full_0.index(ds_slot))
    else:
        mbarrier.arrive(shared.ds_full_1.index(ds_slot))


@jit
def await_ds(steps, c: gl.constexpr, shared, numbers, facts: gl.constexpr):
    """Wait for what the other consumer has made of the row tile before.

    In the first row tile of a tile of keys there is none, but a product without a branch.
    """
    last, is_odd = phase(gl.maximum(steps.step - 1, 0), facts.config.num_slots)
    mbarrier.wait(_other(c, shared).index(last), is_odd, pred=steps.last != _num_all(numbers))


@jit
def multiply_dq(steps, c: gl.constexpr, shared, facts: gl.constexpr):
    """Consumer c's half of the columns of dq of the row tile before, still being multiplied."""
    last, _is_odd = phase(gl.maximum(steps.step - 1, 0), facts.config.num_slots)
    return _product(last, steps.slot, c, facts.block_d // 2, shared, facts)


@jit
def add_dq(dq, steps, c: gl.constexpr, shared, tensors, numbers, facts: gl.constexpr):
    """Add what `multiply_dq` has multiplied."""
    last, _is_odd = phase(gl.maximum(steps.step - 1, 0), facts.config.num_slots)
    mbarrier.arrive(shared.ds_empty.index(last), pred=steps.last != _num_all(numbers))
    _reduce(dq, steps.last, c, tensors, facts)


@jit
def drain_dq(steps, c: gl.constexpr, shared, tensors, numbers, facts: gl.constexpr):
    """`multiply_dq` and `add_dq` with nothing beside them."""
    await_ds(steps, c, shared, numbers, facts)
    dq = warpgroup_mma_wait(0, deps=[multiply_dq(steps, c, shared, facts)])
    add_dq(dq, steps, c, shared, tensors, numbers, facts)
