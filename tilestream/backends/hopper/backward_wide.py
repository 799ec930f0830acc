"""Attention backward on Hopper for head dimensions above 128, warp-specialised.

Computes   as `backward.py`.
Algorithm  as `backward.py`, with 64 keys a tile: dk and dv of more do not fit into registers.
Schedule   as `backward.py`.
Roles      consumers are warpgroups 0 and 1, of the same keys. Consumer 0 makes S and P and keeps dv; consumer 1 makes
           dP, and dS of the P that it is given, and keeps dk. So each has a sum of 128 numbers a thread and two and a
           half products, for of dq each multiplies half of the columns: consumer 1 those of the row tile that it has
           just made dS of, consumer 0 those of the row tile before, because it had to wait for this one's. Consumer 1
           is about half a row tile behind: products of one run beside what the other does between its own. The
           producer is one warp that issues all loads. Row tile s of a program is the s-th use of a stage and of a place
           for P and then dS, tile of keys t the t-th use of a place for K and V.
           q_full[s]      loaded: q and lse        q_empty[s]     both consumers are done with them
           dout_full[s]   loaded: dout and delta   dout_empty[s]  both consumers are done with them
           p_full[s]      consumer 0 has written P ds_full_1[s]   consumer 1 has written dS in its place
           ds_empty[s]    both have multiplied their dq of it
           k_full[t], v_full[t]   loaded
           k_done[t]      consumer 0 reads K no more, and has said whether dv is finite
           k_empty[t]     dk, which takes the place of K, is stored by consumer 1
           v_empty[t]     dv, which takes the place of V, is stored by consumer 0: with dS of the last row tile, which
                          it has waited for, consumer 1 is done with V
           unit_full[t], unit_empty[t]    as in `forward.py`
           Both walk through the same row tiles, so phases follow from two counters.
Traffic    as `backward.py`, for tiles of half as many keys: twice as much of Q, dout and dq per product.
On chip    k_n, v_n, stages of q_m and dout_m, and p_nm and then ds_nm in its place in shared memory; dv, s_nm or dk,
           dp_nm in registers. A row tile of 64 x 64 pairs takes the tensor cores 2560 clocks and shared memory about
           2560 too, 1024 of which are S and dP.
Numerics   as `backward.py`, but P is 2**14 times as large, so that it reaches consumer 1 as float16 whatever the dtype
           is: with 11 bits from 2**-28 on. dv is that much larger until it is stored.
Limits     head_dim and head_dim_v up to 256, the larger one 256 on chip and the other 64, 128 or 256. Sums of dv
           overflow from 2**-14 of float32's range on.

Shapes: M rows of a tile; N keys of a tile; D head_dim; E head_dim_v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.backward import produce
from tilestream.backends.hopper.backward_places import key_place_of, masked, own_rows, phase
from tilestream.backends.hopper.dq import (
    add_dq,
    arrive_ds,
    await_ds,
    drain_dq,
    first_step,
    multiply_dq,
    next_head,
    next_step,
)
from tilestream.backends.hopper.gluon_names import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilestream.backends.hopper.schedule import following
from tilestream.backends.hopper.shared import barriers, tiles_like

__all__ = ["backward_wide_kernel"]

# P and dv are 2**14 times as large. P is 1 at most, and a bit more where lse is rounded: float16 ends at 2**16.
_SHIFT = gl.constexpr(14.0)
_FACTOR = gl.constexpr(2.0**-14)


class Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that guard them. Names are those that `dq.py` and `produce` know."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    ds: Any  # of P first
    is_bad: Any  # whether dv is not finite
    k_full: Any
    k_done: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    q_full: Any
    q_empty: Any
    dout_full: Any
    dout_empty: Any
    p_full: Any
    ds_full_1: Any
    ds_empty: Any
    unit: Any
    unit_full: Any
    unit_empty: Any


@jit
def _add_to_dv(
    dv, m_start, n_start, steps, sequence, shared, tensors, numbers, facts: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """(dv, steps) of consumer 0 with one more row tile, whose P goes to consumer 1."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_m, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_dv, 16])
    stage, is_odd = phase(steps.step, facts.config.num_stages)
    ds_slot, ds_is_odd = phase(steps.step, facts.config.num_slots)
    k_n = shared.k.index(steps.slot).reshape([64, facts.block_d])
    q_m = shared.q.index(stage).reshape([facts.block_m, facts.block_d])
    dout_m = shared.dout.index(stage).reshape([facts.block_m, facts.block_dv])
    zeros = gl.full([64, facts.block_m], 0.0, gl.float32, s_layout)
    mbarrier.wait(shared.q_full.index(stage), is_odd)
    s_nm = warpgroup_mma(k_n, q_m.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse_log2 = shared.lse.index(stage).load(gl.SliceLayout(0, s_layout)) - _SHIFT
    s_nm = warpgroup_mma_wait(0, deps=[s_nm])
    mbarrier.arrive(shared.q_empty.index(stage))
    if MASKED:
        s_nm = masked(s_nm, m_start, n_start, sequence, tensors, facts)
    p_nm = gl.exp2(s_nm * numbers.scale_log2 - lse_log2[None, :])
    mbarrier.wait(shared.ds_empty.index(ds_slot), ds_is_odd ^ 1)
    shared.ds.index(ds_slot).store(p_nm.to(gl.float16).to(shared.q.dtype, bitcast=True))
    mbarrier.arrive(shared.p_full.index(ds_slot))
    p_16 = gl.convert_layout(p_nm.to(shared.q.dtype), gl.DotOperandLayout(0, dv_layout, 2))
    mbarrier.wait(shared.dout_full.index(stage), is_odd)
    await_ds(steps, 0, shared, numbers, facts)
    dq = multiply_dq(steps, 0, shared, facts)
    dv = warpgroup_mma(p_16, dout_m, dv, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    add_dq(dq, steps, 0, shared, tensors, numbers, facts)
    dv = warpgroup_mma_wait(0, deps=[dv])
    mbarrier.arrive(shared.dout_empty.index(stage))
    return dv, next_step(steps, steps.row_tile, numbers, facts)


@jit
def _add_to_dk(dk, steps, shared, tensors, numbers, facts: gl.constexpr):
    """(dk, steps) of consumer 1 with one more row tile, whose dS takes the place of P."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_m, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_d, 16])
    stage, is_odd = phase(steps.step, facts.config.num_stages)
    ds_slot, ds_is_odd = phase(steps.step, facts.config.num_slots)
    v_n = shared.v.index(steps.slot).reshape([64, facts.block_dv])
    q_m = shared.q.index(stage).reshape([facts.block_m, facts.block_d])
    dout_m = shared.dout.index(stage).reshape([facts.block_m, facts.block_dv])
    zeros = gl.full([64, facts.block_m], 0.0, gl.float32, s_layout)
    mbarrier.wait(shared.dout_full.index(stage), is_odd)
    dp_nm = warpgroup_mma(v_n, dout_m.permute((1, 0)), zeros, use_acc=False, is_async=True)
    delta = shared.delta.index(stage).load(gl.SliceLayout(0, s_layout)) * _FACTOR
    dp_nm = warpgroup_mma_wait(0, deps=[dp_nm])
    mbarrier.arrive(shared.dout_empty.index(stage))
    mbarrier.wait(shared.q_full.index(stage), is_odd)
    mbarrier.wait(shared.p_full.index(ds_slot), ds_is_odd)
    p_nm = shared.ds.index(ds_slot).load(s_layout).to(gl.float16, bitcast=True).to(gl.float32)
    ds_nm = (p_nm * (dp_nm * _FACTOR - delta[None, :])).to(shared.q.dtype)
    shared.ds.index(ds_slot).store(ds_nm)
    fence_async_shared()
    arrive_ds(ds_slot, 1, shared)
    ds_16 = gl.convert_layout(ds_nm, gl.DotOperandLayout(0, dk_layout, 2))
    steps = next_step(steps, steps.row_tile, numbers, facts)
    dq = multiply_dq(steps, 1, shared, facts)
    dk = warpgroup_mma(ds_16, q_m, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    add_dq(dq, steps, 1, shared, tensors, numbers, facts)
    dk = warpgroup_mma_wait(0, deps=[dk])
    mbarrier.arrive(shared.q_empty.index(stage))
    return dk, steps


@jit
def _is_bad(x):
    """Whether a tile holds anything that is not finite."""
    # 0 times a number is 0 unless that is not finite.
    return (gl.sum(gl.sum(x * 0.0, 1), 0) != 0.0).to(gl.int32)


@jit
def _store(x, desc, place, shared_tile):
    """Store a tile of gradients by way of a place in shared memory."""
    shape: gl.constexpr = x.shape
    shared_tile.reshape(shape).store(x.to(desc.dtype))
    fence_async_shared()
    store_tile(desc, [place.sequence.batch, place.n_start, place.sequence.head_kv, 0], shared_tile)
    store_wait(0)


@jit
def _consume_0(dv_desc, shared, tensors, numbers, facts: gl.constexpr):
    """The warpgroup that keeps dv."""
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_dv, 16])
    number: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    step = gl.to_tensor(0)
    tile = gl.to_tensor(0)
    unit = gl.program_id(0)
    while unit < numbers.num_units:
        place = key_place_of(unit, tensors, numbers, facts)
        own = own_rows(place, 0, facts)
        slot, is_odd = phase(tile, facts.config.num_tiles)
        dv = gl.full([64, facts.block_dv], 0.0, gl.float32, dv_layout)
        mbarrier.wait(shared.k_full.index(slot), is_odd)
        steps = first_step(step, slot, numbers)
        for index in range(numbers.group):
            steps = next_head(steps, index, place, numbers, facts)
            for m_start in range(own.lo, own.full_lo, facts.block_m):
                dv, steps = _add_to_dv(
                    dv, m_start, place.n_start, steps, place.sequence, shared, tensors, numbers, facts, True
                )
            for _m in range(own.full_lo, own.full_hi, facts.block_m):
                dv, steps = _add_to_dv(
                    dv, 0, place.n_start, steps, place.sequence, shared, tensors, numbers, facts, False
                )
            if facts.has_left:
                for m_start in range(own.full_hi, own.hi, facts.block_m):
                    dv, steps = _add_to_dv(
                        dv, m_start, place.n_start, steps, place.sequence, shared, tensors, numbers, facts, True
                    )
        drain_dq(steps, 0, shared, tensors, numbers, facts)
        step = steps.step
        unit = following(unit, tile, shared, facts)
        if facts.flags:
            shared.is_bad.index(slot).store(gl.full([1], 0, gl.int32, number) + _is_bad(dv))
        mbarrier.arrive(shared.k_done.index(slot))
        # Nothing says so yet where no row sees a key: V would be loaded over dv.
        mbarrier.wait(shared.v_full.index(slot), is_odd)
        _store(dv * _FACTOR, dv_desc, place, shared.v.index(slot))
        mbarrier.arrive(shared.v_empty.index(slot))
        tile += 1


@jit
def _consume_1(dk_desc, shared, tensors, numbers, facts: gl.constexpr):
    """The warpgroup that keeps dk."""
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_d, 16])
    number: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    step = gl.to_tensor(0)
    tile = gl.to_tensor(0)
    unit = gl.program_id(0)
    while unit < numbers.num_units:
        place = key_place_of(unit, tensors, numbers, facts)
        slot, is_odd = phase(tile, facts.config.num_tiles)
        dk = gl.full([64, facts.block_d], 0.0, gl.float32, dk_layout)
        # K is for dq.
        mbarrier.wait(shared.k_full.index(slot), is_odd)
        mbarrier.wait(shared.v_full.index(slot), is_odd)
        steps = first_step(step, slot, numbers)
        for index in range(numbers.group):
            steps = next_head(steps, index, place, numbers, facts)
            for _m in range(place.lo, place.hi, facts.block_m):
                dk, steps = _add_to_dk(dk, steps, shared, tensors, numbers, facts)
        step = steps.step
        unit = following(unit, tile, shared, facts)
        mbarrier.wait(shared.k_done.index(slot), is_odd)
        if facts.flags:
            sequence = place.sequence
            is_bad = _is_bad(dk) | gl.max(shared.is_bad.index(slot).load(number), 0)
            index = place.n_start // 64
            if facts.has_left:
                index = numbers.num_key_flags - 1 - index
            side = sequence.batch * numbers.num_heads_kv + sequence.head_kv
            gl.store(tensors.flags + side * numbers.num_key_flags + index, is_bad)
        _store(dk * numbers.scale, dk_desc, place, shared.k.index(slot))
        mbarrier.arrive(shared.k_empty.index(slot))
        tile += 1


@jit
def backward_wide_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, lse_desc, delta_desc, tensors, numbers, facts: gl.constexpr
):  # fmt: skip
    """dk, dv and sums of dq of a call."""
    stages: gl.constexpr = facts.config.num_stages
    slots: gl.constexpr = facts.config.num_slots
    tiles: gl.constexpr = facts.config.num_tiles
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, facts.block_m], q_desc.dtype)
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        tiles_like(tiles, k_desc), tiles_like(tiles, v_desc), tiles_like(stages, q_desc),
        tiles_like(stages, dout_desc), tiles_like(stages, lse_desc), tiles_like(stages, delta_desc),
        gl.allocate_shared_memory(q_desc.dtype, [slots, 64, facts.block_m], ds_layout),
        gl.allocate_shared_memory(gl.int32, [tiles, 1], number),
        barriers(tiles, 1), barriers(tiles, 1), barriers(tiles, 1), barriers(tiles, 1), barriers(tiles, 1),
        barriers(stages, 1), barriers(stages, 2), barriers(stages, 1), barriers(stages, 2),
        barriers(slots, 1), barriers(slots, 1), barriers(slots, 2),
        gl.allocate_shared_memory(gl.int32, [2, 1], number), barriers(2, 1), barriers(2, 2),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume_0, (dv_desc, shared, tensors, numbers, facts)),
            (_consume_1, (dk_desc, shared, tensors, numbers, facts)),
            (produce, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tensors, numbers, facts)),
        ],
        [4, 1],
        [facts.config.registers, 24],
    )
