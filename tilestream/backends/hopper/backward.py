"""Attention backward on Hopper, warp-specialised.

Computes   dk and dv of a dense call with or without a band, and float32 sums of dq, of which `dq_sums.dq_kernel` makes
           dq; where something can be hidden also flags, one of each consumer's keys, whether dk and dv are finite.
Algorithm  FlashAttention-2, algorithm 2 (arXiv:2307.08691), in one pass of five products. S and dP are transposed, keys
           by queries, so that P and dS are operands of the products for dv and dk from registers; dS goes through
           shared memory for dq alone, which is added to memory (`dq.py`).
Schedule   persistent: a program per processor takes one tile of keys after the other, the next that nobody has, with a
           band the longest first. A tile of keys meets the row tiles that see any of
           it, of one query head of its group after the other, so that dk and dv are summed over a group in registers:
           PARTIAL, FULL, PARTIAL.
Roles      consumers are warpgroups 0 and 1, each with 64 keys of a tile; of dq each multiplies half of the columns, one
           row tile later. The producer is one warp that issues all loads. Row tile s of a program is the s-th use of a
           stage and of a place for dS, tile of keys t the t-th use of a place for K and V.
           rows_full[s]   loaded: q, dout, lse and delta    rows_empty[s]  both consumers are done with them
           ds_full_c[s]   consumer c has written its dS     ds_empty[s]    both consumers are done with dS
           k_full[t], v_full[t]   loaded        k_empty[t], v_empty[t]  dk and dv, which take the places of K and V,
                                                are stored by both consumers
           k_done[t]      both consumers have multiplied dq of the last row tile
           unit_full[t], unit_empty[t]    as in `forward.py`
           All walk through the same tiles, so phases follow from two counters.
Traffic    K and V once, Q, dout, lse and delta once per tile of keys and query head; writes dk, dv; adds 4 bytes per
           element of dq and tile of keys to memory, which the L2 cache holds.
On chip    k_n, v_n (two tiles, so that the next one loads early), stages of q_m and dout_m, and ds_nm in shared memory;
           dk, dv, s_nm, dp_nm in registers. Products of 64 x 64 need 128 bytes of shared memory a clock, which is all
           there is: dq is added from registers.
Numerics   as `triton.backward`, but sums of dq are in no fixed order. Keys beyond the last one are masked: their K and
           V are 0, but 0 times a weight that overflows is not.
Limits     head_dim and head_dim_v up to 128, on chip 64 or 128; beyond that `backward_wide.py`.

Shapes: M rows of a tile; N keys of a consumer; D head_dim; E head_dim_v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.backward_places import (
    key_place_of,
    listed_rows,
    masked,
    own_rows,
    phase,
    row_start,
    rows_of,
)
from tilestream.backends.hopper.dq import (
    add_dq,
    arrive_ds,
    await_ds,
    drain_dq,
    first_step,
    multiply_dq,
    next_head,
    next_step,
    row_tile_of,
)
from tilestream.backends.hopper.gluon_names import (
    fence_async_shared,
    gl,
    jit,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilestream.backends.hopper.schedule import fetch, following, publish
from tilestream.backends.hopper.shared import barriers, tiles_like

__all__ = ["backward_kernel", "produce"]


class Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that guard them."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    ds: Any
    k_full: Any
    k_done: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    rows_full: Any
    rows_empty: Any
    ds_full_0: Any
    ds_full_1: Any
    ds_empty: Any
    unit: Any
    unit_full: Any
    unit_empty: Any


@jit
def produce(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tensors, numbers, facts: gl.constexpr):
    """The producer warp: fill shared memory as it empties."""
    # Of 64 keys, in a tile of keys.
    pieces: gl.constexpr = facts.block_n // 64
    row_bytes: gl.constexpr = q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 8 * facts.block_m
    step = 0
    tile = 0
    unit = gl.program_id(0)
    while unit < numbers.num_units:
        place = key_place_of(unit, tensors, numbers, facts)
        batch = place.sequence.batch
        head_kv = place.sequence.head_kv
        slot, is_odd = phase(tile, facts.config.num_tiles)
        mbarrier.wait(shared.k_empty.index(slot), is_odd ^ 1)
        mbarrier.expect(shared.k_full.index(slot), pieces * k_desc.block_type.nbytes)
        mbarrier.wait(shared.v_empty.index(slot), is_odd ^ 1)
        mbarrier.expect(shared.v_full.index(slot), pieces * v_desc.block_type.nbytes)
        for c in gl.static_range(pieces):
            keys = [batch, place.n_start + c * 64, head_kv, 0]
            load_tile(k_desc, keys, shared.k_full.index(slot), shared.k.index(pieces * slot + c))
            load_tile(v_desc, keys, shared.v_full.index(slot), shared.v.index(pieces * slot + c))
        if not facts.has_blocks:
            unit = fetch(unit, tensors, numbers, facts)
            publish(unit, tile, shared, facts)
        for index in range(numbers.group):
            head = head_kv * numbers.group + index
            numbers_at = (batch * numbers.num_heads_kv * numbers.group + head) * numbers.num_padded_rows
            first, last = rows_of(index, place, tensors, numbers, facts)
            for at in range(first, last, facts.row_step):
                m_start = row_start(at, tensors, facts)
                stage, is_odd = phase(step, facts.config.num_stages)
                if facts.is_wide:
                    # Each by itself, and dout first, which is done with half a row tile before q.
                    full = shared.dout_full.index(stage)
                    mbarrier.wait(shared.dout_empty.index(stage), is_odd ^ 1)
                    mbarrier.expect(full, dout_desc.block_type.nbytes + 4 * facts.block_m)
                    load_tile(dout_desc, [batch, m_start, head, 0], full, shared.dout.index(stage))
                    load_tile(delta_desc, [numbers_at + m_start], full, shared.delta.index(stage))
                    full = shared.q_full.index(stage)
                    mbarrier.wait(shared.q_empty.index(stage), is_odd ^ 1)
                    mbarrier.expect(full, q_desc.block_type.nbytes + 4 * facts.block_m)
                    load_tile(q_desc, [batch, m_start, head, 0], full, shared.q.index(stage))
                    load_tile(lse_desc, [numbers_at + m_start], full, shared.lse.index(stage))
                else:
                    full = shared.rows_full.index(stage)
                    mbarrier.wait(shared.rows_empty.index(stage), is_odd ^ 1)
                    mbarrier.expect(full, row_bytes)
                    load_tile(q_desc, [batch, m_start, head, 0], full, shared.q.index(stage))
                    load_tile(lse_desc, [numbers_at + m_start], full, shared.lse.index(stage))
                    load_tile(delta_desc, [numbers_at + m_start], full, shared.delta.index(stage))
                    load_tile(dout_desc, [batch, m_start, head, 0], full, shared.dout.index(stage))
                step += 1
        # There may be few row tiles: not before all of them are on their way.
        if facts.has_blocks:
            unit = fetch(unit, tensors, numbers, facts)
            publish(unit, tile, shared, facts)
        tile += 1


@jit
def _weights(s_nm, stage, shared, numbers, facts: gl.constexpr):
    """(P, P as an operand) from dot products."""
    rows: gl.constexpr = gl.SliceLayout(0, s_nm.type.layout)
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_dv, 16])
    lse_log2 = shared.lse.index(stage).load(rows)
    p_nm = gl.exp2(s_nm * numbers.scale_log2 - lse_log2[None, :])
    return p_nm, gl.convert_layout(p_nm.to(shared.q.dtype), gl.DotOperandLayout(0, dv_layout, 2))


@jit
def _hand_over(p_nm, dp_nm, step, c: gl.constexpr, shared, facts: gl.constexpr):
    """dS as an operand, after it is in shared memory."""
    stage, _is_odd = phase(step, facts.config.num_stages)
    ds_slot, ds_is_odd = phase(step, facts.config.num_slots)
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_d, 16])
    delta = shared.delta.index(stage).load(gl.SliceLayout(0, p_nm.type.layout))
    ds_nm = (p_nm * (dp_nm - delta[None, :])).to(shared.q.dtype)
    mbarrier.wait(shared.ds_empty.index(ds_slot), ds_is_odd ^ 1)
    shared.ds.index(2 * ds_slot + c).store(ds_nm)
    fence_async_shared()
    arrive_ds(ds_slot, c, shared)
    return gl.convert_layout(ds_nm, gl.DotOperandLayout(0, dk_layout, 2))


@jit
def _add_tile(
    dk, dv, m_start, n_first, steps, sequence, c: gl.constexpr, shared, tensors, numbers,
    facts: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """(dk, dv, steps) of a consumer with one more row tile, whose dS goes to shared memory."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_m, 16])
    slot = steps.slot
    step = steps.step
    k_n = shared.k.index(2 * slot + c).reshape([64, facts.block_d])
    v_n = shared.v.index(2 * slot + c).reshape([64, facts.block_dv])
    stage, is_odd = phase(step, facts.config.num_stages)
    q_m = shared.q.index(stage).reshape([facts.block_m, facts.block_d])
    dout_m = shared.dout.index(stage).reshape([facts.block_m, facts.block_dv])
    zeros = gl.full([64, facts.block_m], 0.0, gl.float32, s_layout)
    mbarrier.wait(shared.rows_full.index(stage), is_odd)
    s_nm = warpgroup_mma(k_n, q_m.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp_nm = warpgroup_mma(v_n, dout_m.permute((1, 0)), zeros, use_acc=False, is_async=True)
    row_tile = row_tile_of(steps, m_start, tensors, facts)
    s_nm = warpgroup_mma_wait(1, deps=[s_nm])
    if MASKED:
        s_nm = masked(s_nm, m_start, n_first, sequence, tensors, facts)
    p_nm, p_16 = _weights(s_nm, stage, shared, numbers, facts)
    dv = warpgroup_mma(p_16, dout_m, dv, is_async=True)
    dp_nm = warpgroup_mma_wait(1, deps=[dp_nm])
    await_ds(steps, c, shared, numbers, facts)
    ds_16 = _hand_over(p_nm, dp_nm, step, c, shared, facts)
    # Of the row tile before, whose dS the other consumer has written for long.
    dq = multiply_dq(steps, c, shared, facts)
    dk = warpgroup_mma(ds_16, q_m, dk, is_async=True)
    dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
    add_dq(dq, steps, c, shared, tensors, numbers, facts)
    dk = warpgroup_mma_wait(0, deps=[dk])
    mbarrier.arrive(shared.rows_empty.index(stage))
    return dk, dv, next_step(steps, row_tile, numbers, facts)


@jit
def _pass_tile(steps, c: gl.constexpr, shared, tensors, numbers, facts: gl.constexpr):
    """A row tile that sees no key of this consumer, but some of the other's: its dS is 0."""
    step = steps.step
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_m, 16])
    stage, is_odd = phase(step, facts.config.num_stages)
    ds_slot, ds_is_odd = phase(step, facts.config.num_slots)
    # Not before it is loaded: an arrival would count for what the stage held before.
    mbarrier.wait(shared.rows_full.index(stage), is_odd)
    mbarrier.arrive(shared.rows_empty.index(stage))
    mbarrier.wait(shared.ds_empty.index(ds_slot), ds_is_odd ^ 1)
    shared.ds.index(2 * ds_slot + c).store(gl.full([64, facts.block_m], 0.0, shared.q.dtype, s_layout))
    fence_async_shared()
    arrive_ds(ds_slot, c, shared)
    drain_dq(steps, c, shared, tensors, numbers, facts)
    return next_step(steps, steps.row_tile, numbers, facts)


@jit
def _add_banded(dk, dv, place, own, steps, c: gl.constexpr, shared, tensors, numbers, facts: gl.constexpr):
    """(dk, dv, steps) with the row tiles of a query head."""
    if facts.has_right:
        for _m in range(place.lo, own.lo, facts.block_m):
            steps = _pass_tile(steps, c, shared, tensors, numbers, facts)
    for m_start in range(own.lo, own.full_lo, facts.block_m):
        dk, dv, steps = _add_tile(
            dk, dv, m_start, own.n_first, steps, place.sequence, c, shared, tensors, numbers, facts, True
        )
    for _m in range(own.full_lo, own.full_hi, facts.block_m):
        dk, dv, steps = _add_tile(
            dk, dv, 0, own.n_first, steps, place.sequence, c, shared, tensors, numbers, facts, False
        )
    if facts.has_left:
        for m_start in range(own.full_hi, own.hi, facts.block_m):
            dk, dv, steps = _add_tile(
                dk, dv, m_start, own.n_first, steps, place.sequence, c, shared, tensors, numbers, facts, True
            )
    for _m in range(own.hi, place.hi, facts.block_m):
        steps = _pass_tile(steps, c, shared, tensors, numbers, facts)
    return dk, dv, steps


@jit
def _add_listed(dk, dv, index, place, own, steps, c: gl.constexpr, shared, tensors, numbers, facts: gl.constexpr):
    """(dk, dv, steps) with the row tiles that the lists have of a query head."""
    rows = listed_rows(index, place, tensors, numbers, facts)
    for at in range(rows.lo, rows.full_lo):
        dk, dv, steps = _add_tile(
            dk, dv, at, own.n_first, steps, place.sequence, c, shared, tensors, numbers, facts, True
        )
    for at in range(rows.full_lo, rows.hi):
        dk, dv, steps = _add_tile(
            dk, dv, at, own.n_first, steps, place.sequence, c, shared, tensors, numbers, facts, False
        )
    return dk, dv, steps


@jit
def _finish(
    dk, dv, place, own, slot, tile, c: gl.constexpr, dk_desc, dv_desc, shared, tensors, numbers, facts: gl.constexpr
):
    """Store dk and dv of a consumer's keys, and whether all of it is finite."""
    sequence = place.sequence
    if facts.flags:
        # 0 times a number is 0 unless that is not finite.
        bad = gl.sum(gl.sum(dk * 0.0, 1), 0) + gl.sum(gl.sum(dv * 0.0, 1), 0)
        index = own.n_first // 64
        if facts.has_left:
            index = numbers.num_key_flags - 1 - index
        side = sequence.batch * numbers.num_heads_kv + sequence.head_kv
        if own.n_first < sequence.seqlen_k:
            gl.store(tensors.flags + side * numbers.num_key_flags + index, (bad != 0.0).to(gl.int32))
    keys = [sequence.batch, own.n_first, sequence.head_kv, 0]
    v_n = shared.v.index(2 * slot + c)
    v_n.reshape([64, facts.block_dv]).store(dv.to(dv_desc.dtype))
    fence_async_shared()
    store_tile(dv_desc, keys, v_n)
    # dq of the last row tile has been multiplied.
    mbarrier.wait(shared.k_done.index(slot), (tile // facts.config.num_tiles) & 1)
    k_n = shared.k.index(2 * slot + c)
    k_n.reshape([64, facts.block_d]).store((dk * numbers.scale).to(dk_desc.dtype))
    fence_async_shared()
    store_tile(dk_desc, keys, k_n)
    store_wait(0)
    mbarrier.arrive(shared.k_empty.index(slot))
    mbarrier.arrive(shared.v_empty.index(slot))


@jit
def _consume(c: gl.constexpr, dk_desc, dv_desc, shared, tensors, numbers, facts: gl.constexpr):
    """A warpgroup of consumers: 64 keys of each tile."""
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_d, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_dv, 16])
    step = gl.to_tensor(0)
    tile = gl.to_tensor(0)
    unit = gl.program_id(0)
    while unit < numbers.num_units:
        place = key_place_of(unit, tensors, numbers, facts)
        own = own_rows(place, c, facts)
        slot, is_odd = phase(tile, facts.config.num_tiles)
        dk = gl.full([64, facts.block_d], 0.0, gl.float32, dk_layout)
        dv = gl.full([64, facts.block_dv], 0.0, gl.float32, dv_layout)
        mbarrier.wait(shared.k_full.index(slot), is_odd)
        mbarrier.wait(shared.v_full.index(slot), is_odd)
        steps = first_step(step, slot, numbers)
        for index in range(numbers.group):
            steps = next_head(steps, index, place, numbers, facts)
            if facts.has_blocks:
                dk, dv, steps = _add_listed(dk, dv, index, place, own, steps, c, shared, tensors, numbers, facts)
            else:
                dk, dv, steps = _add_banded(dk, dv, place, own, steps, c, shared, tensors, numbers, facts)
        drain_dq(steps, c, shared, tensors, numbers, facts)
        mbarrier.arrive(shared.k_done.index(slot))
        step = steps.step
        unit = following(unit, tile, shared, facts)
        _finish(dk, dv, place, own, slot, tile, c, dk_desc, dv_desc, shared, tensors, numbers, facts)
        tile += 1
    store_wait(0)


@jit
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, lse_desc, delta_desc, tensors, numbers, facts: gl.constexpr
):  # fmt: skip
    """dk, dv and sums of dq of a call."""
    stages: gl.constexpr = facts.config.num_stages
    slots: gl.constexpr = facts.config.num_slots
    tiles: gl.constexpr = facts.config.num_tiles
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, facts.block_m], q_desc.dtype)
    shared = Shared(
        tiles_like(2 * tiles, k_desc), tiles_like(2 * tiles, v_desc), tiles_like(stages, q_desc),
        tiles_like(stages, dout_desc), tiles_like(stages, lse_desc), tiles_like(stages, delta_desc),
        gl.allocate_shared_memory(q_desc.dtype, [2 * slots, 64, facts.block_m], ds_layout),
        barriers(tiles, 1), barriers(tiles, 2), barriers(tiles, 2), barriers(tiles, 1), barriers(tiles, 2),
        barriers(stages, 1), barriers(stages, 2), barriers(slots, 1), barriers(slots, 1),
        barriers(slots, 2),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2, 1), barriers(2, 2),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (0, dk_desc, dv_desc, shared, tensors, numbers, facts)),
            (_consume, (1, dk_desc, dv_desc, shared, tensors, numbers, facts)),
            (produce, (q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, shared, tensors, numbers, facts)),
        ],
        [4, 1],
        [facts.config.registers, facts.producer_registers],
    )
