"""Attention forward on Hopper, warp-specialised.

Computes   out and lse of a call; where something can be hidden also flags for
           `exact.exact_rows_kernel`, which computes again what is not finite in out: one per consumer of a
           program, whether any of its rows is, and behind them one per row.
Algorithm  FlashAttention-3, algorithms 1 and 2 (arXiv:2407.08608): S of the next key tile is multiplied while the
           softmax of this one runs. A row maximum that grows by at most 8 (a factor of 256) is kept, as in
           FlashAttention-4, so that acc is rescaled a few times per row tile and not once per key tile.
Schedule   persistent: a program per processor takes one row tile after the other: every so-manyth where all take as
           long, else the next that nobody has, longest first (`schedule.place_of`). Key tiles right to left: PARTIAL,
           FULL, PARTIAL; a consumer skips first ones that none of its rows sees. The first S of a row tile is
           multiplied while out of the one before is stored.
Roles      consumers are warpgroups 0 to n - 1, each with its own rows of a tile; the producer is one warp that issues
           all loads. Tile t of a program is the t-th use of q, key tile s of a program the s-th use of a stage.
           q_full[c]   loaded: q of consumer c           q_empty[c]  consumer c is done with it (one arrival)
           k_full[s]   loaded: k of stage s              k_empty[s]  all consumers are done with it (n arrivals)
           v_full[s], v_empty[s]                         the same of v
           turn[c]     consumer c may issue products; one arrival each, from the consumer before it in the ring, the
                       first one from the start of the kernel
           unit_full[t], unit_empty[t]    which row tile follows number t (modulo 2) of a program: from the producer
           Producer and consumers walk through the same tiles and key tiles, at least one each, so phases follow from
           two counters. out[c] is consumer c's own; a store by TMA has read it before it is written again.
           A program may be two teams, each of which is all of this and knows nothing of the other one.
Traffic    as `triton.forward` without packed rows: Q once, K and V once per row tile of each query head.
On chip    q_m, out_m (in the place of q_m where that leaves no room), stages of k_n and v_n in shared memory; s_mn,
           p_mn in the input dtype, acc and the state in registers. s_mn and p_mn are of different key tiles.
Numerics   as `triton.forward`. Sums of a row are four, one of each thread that shares it, added after the last tile.
Limits     head_dim and head_dim_v up to 256, on chip 64, 128 or 256: TMA fills with zeros what the tensors do not have.
           Where maxima are kept, sums of values overflow from a 256th of float32's range on.

Shapes: M rows of a consumer; N keys of a tile; D head_dim; E head_dim_v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.gluon_names import (
    fence_async_shared,
    gdc_launch_dependents,
    gl,
    jit,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilestream.backends.hopper.places import key_place, numbers_at, row_place
from tilestream.backends.hopper.schedule import (
    fetch,
    fetch_step,
    first_unit,
    following,
    key_start,
    next_keys,
    num_first_partial,
    own_keys,
    place_of,
    publish,
)
from tilestream.backends.hopper.score import Rows, head_sink, head_slope, masked, scores
from tilestream.backends.hopper.shared import barriers, tiles_like
from tilestream.backends.hopper.softmax import lane_sums, rescaled, scaled, softmax
from tilestream.backends.triton.tiles import is_partial

__all__ = ["forward_kernel"]

# With 24, the fewest, it keeps some in local memory.
_PRODUCER_REGISTERS = gl.constexpr(32)


class Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that guard them."""

    q: Any
    k: Any
    v: Any
    out: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    turn: Any
    unit: Any
    unit_full: Any
    unit_empty: Any


@jit
def _produce(team: gl.constexpr, q_desc, k_desc, v_desc, shared, tensors, numbers, facts: gl.constexpr):
    """The producer warp: fill shared memory as it empties."""
    num_consumers: gl.constexpr = facts.config.num_consumers
    step = 0
    tile = 0
    unit = first_unit(team)
    place, num_steps = place_of(unit, tensors, numbers, facts)
    next_unit = unit
    next_place = place
    next_num_steps = num_steps
    while unit < numbers.num_units:
        n_start = place.hi - facts.block_n
        fetch_at = fetch_step(num_steps, facts)
        for index in range(num_steps):
            stage = step % facts.config.num_stages
            is_odd = (step // facts.config.num_stages) & 1
            # Before the wait, which hides where the lists are read.
            keys = key_place(key_start(n_start, index, place, tensors, facts), place.sequence, facts)
            mbarrier.wait(shared.k_empty.index(stage), is_odd ^ 1)
            mbarrier.expect(shared.k_full.index(stage), k_desc.block_type.nbytes)
            load_tile(k_desc, keys, shared.k_full.index(stage), shared.k.index(stage))
            # After the first k, whose stage is empty before consumers are done with the last q.
            if index == 0:
                for c in gl.static_range(num_consumers):
                    mbarrier.wait(shared.q_empty.index(c), (tile & 1) ^ 1)
                    mbarrier.expect(shared.q_full.index(c), q_desc.block_type.nbytes)
                    rows = row_place(place.m_start + c * facts.rows, place.head, place.sequence, facts)
                    load_tile(q_desc, rows, shared.q_full.index(c), shared.q.index(c))
            mbarrier.wait(shared.v_empty.index(stage), is_odd ^ 1)
            mbarrier.expect(shared.v_full.index(stage), v_desc.block_type.nbytes)
            load_tile(v_desc, keys, shared.v_full.index(stage), shared.v.index(stage))
            # Now, because stages have to empty before what is next can be loaded.
            if index == fetch_at:
                next_unit = fetch(unit, tensors, numbers, facts)
                publish(next_unit, tile, shared, facts)
                next_place, next_num_steps = place_of(next_unit, tensors, numbers, facts)
            n_start -= facts.block_n
            step += 1
        tile += 1
        unit = next_unit
        place = next_place
        num_steps = next_num_steps


@jit
def _await_turn(c: gl.constexpr, turns, exists, shared, facts: gl.constexpr):
    """Products of one consumer at a time: while one multiplies, another has its softmax."""
    if facts.config.takes_turns:
        mbarrier.wait(shared.turn.index(c), turns & 1, pred=exists)


@jit
def _end_turn(c: gl.constexpr, exists, shared, facts: gl.constexpr):
    if facts.config.takes_turns:
        mbarrier.arrive(shared.turn.index((c + 1) % facts.config.num_consumers), pred=exists)


@jit
def _skip(num_skipped, n_start, step, turns, c: gl.constexpr, shared, facts: gl.constexpr):
    """Hand back the stages of steps that show consumer c nothing: (n_start, step, turns) of the first that does."""
    for _ in range(num_skipped):
        stage = step % facts.config.num_stages
        is_odd = (step // facts.config.num_stages) & 1
        # Not before it is loaded: an arrival would count for what the stage held before.
        mbarrier.wait(shared.k_full.index(stage), is_odd)
        _await_turn(c, turns, True, shared, facts)
        _end_turn(c, True, shared, facts)
        mbarrier.arrive(shared.k_empty.index(stage))
        mbarrier.wait(shared.v_full.index(stage), is_odd)
        mbarrier.arrive(shared.v_empty.index(stage))
        turns += 1
        step += 1
        n_start -= facts.block_n
    return n_start, step, turns


@jit
def _first_keys(num_skipped, place, step, turns, c: gl.constexpr, shared, facts: gl.constexpr):
    """(n_start, step, turns) of the first key tile that shows consumer c anything."""
    if facts.has_blocks:
        return place.first, step, turns
    else:
        return _skip(num_skipped, place.hi - facts.block_n, step, turns, c, shared, facts)


@jit
def _multiply_keys(stage, c: gl.constexpr, shared, facts: gl.constexpr):
    """S of the keys in a stage, still being multiplied."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_n, 16])
    q_m = shared.q.index(c).reshape([facts.rows, facts.block_d])
    k_n = shared.k.index(stage).reshape([facts.block_n, facts.block_d])
    zeros = gl.full([facts.rows, facts.block_n], 0.0, gl.float32, s_layout)
    return warpgroup_mma(q_m, k_n.permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def _multiply_values(p_mn, acc, step, shared, facts: gl.constexpr):
    """acc plus the product of P and the values of a step, still being multiplied."""
    stage = step % facts.config.num_stages
    mbarrier.wait(shared.v_full.index(stage), (step // facts.config.num_stages) & 1)
    v_n = shared.v.index(stage).reshape([facts.block_n, facts.block_dv])
    return warpgroup_mma(p_mn, v_n, acc, is_async=True)


@jit
def _first_scores(tile, step, turns, exists, c: gl.constexpr, shared, facts: gl.constexpr):
    """The first S of a tile, still being multiplied: of whatever lies there where there is no such tile."""
    stage = step % facts.config.num_stages
    mbarrier.wait(shared.q_full.index(c), tile & 1, pred=exists)
    mbarrier.wait(shared.k_full.index(stage), (step // facts.config.num_stages) & 1, pred=exists)
    _await_turn(c, turns, exists, shared, facts)
    s_mn = _multiply_keys(stage, c, shared, facts)
    _end_turn(c, exists, shared, facts)
    return s_mn


@jit
def _totals(row_max, row_sum, place, tensors, numbers, facts: gl.constexpr):
    """(lse_log2, what acc is multiplied with) of rows whose `lane_sums` are `row_sum`.

    A sink is one more key, whose value is 0: it is added here, so that the loop knows nothing of it.
    """
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    factor = 1.0
    if facts.has_sinks:
        sink = head_sink(place.head, place.sequence, tensors, numbers)
        new_max = gl.maximum(row_max, sink)
        finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        factor = gl.exp2(row_max - finite_max)
        row_sum = row_sum * factor + gl.exp2(sink - finite_max)
        row_max = new_max
    lse_log2 = gl.where(row_sum == 0.0, float("-inf"), row_max + gl.log2(row_sum))
    return lse_log2, gl.where(row_sum == 0.0, 0.0, factor / row_sum)


@jit
def _finish(
    acc, row_sum, row_max, place, c: gl.constexpr, out_desc, shared, tensors, numbers, facts: gl.constexpr
):  # fmt: skip
    """Store out, lse and the flags of a tile's rows; (M), 1 where a row is flagged."""
    m_first = place.m_start + c * facts.rows
    i = m_first + gl.arange(0, facts.rows, layout=row_max.type.layout)
    are_inside = i < place.sequence.seqlen_q
    lse_log2, weight = _totals(row_max, row_sum, place, tensors, numbers, facts)
    acc = scaled(acc, weight)
    at = numbers_at(i, place.head, place.sequence, numbers, facts)
    gl.store(tensors.lse + at, lse_log2 * 0.6931471805599453, are_inside)
    are_flagged = i * 0
    if facts.flags:
        # 0 times a number is 0 unless that is not finite.
        is_bad = gl.convert_layout(gl.sum(acc * 0.0, 1), i.type.layout) != 0.0
        # A row whose lse is NaN or infinite is NaN whatever it does not see.
        are_flagged = (is_bad & are_inside & (lse_log2 < float("inf"))).to(gl.int32)
        num_flaggers = facts.config.num_teams * facts.config.num_consumers * gl.num_programs(0)
        gl.store(tensors.flags + num_flaggers + at, are_flagged, are_inside)
    # The store before has read what the next one writes.
    if not facts.shares_q:
        store_wait(0)
    out_m = shared.out.index(c)
    out_m.reshape([facts.rows, facts.block_dv]).store(acc.to(out_desc.dtype))
    fence_async_shared()
    store_tile(out_desc, row_place(m_first, place.head, place.sequence, facts), out_m)
    if facts.shares_q:
        store_wait(0)
        mbarrier.arrive(shared.q_empty.index(c))
    return are_flagged


class Steps(NamedTuple):
    """Where a consumer is: the last key tile whose scores it has, and how many of its row tile are left."""

    n_start: Any  # with a block mask: its place in the lists
    num_left: Any
    step: Any
    turns: Any


@jit
def _scores(steps, c: gl.constexpr, shared, facts: gl.constexpr):
    """(S of the next key tile, `steps` there), with nothing beside it."""
    n_start = next_keys(steps.n_start, facts)
    steps = Steps(n_start, steps.num_left - 1, steps.step + 1, steps.turns + 1)
    stage = steps.step % facts.config.num_stages
    mbarrier.wait(shared.k_full.index(stage), (steps.step // facts.config.num_stages) & 1)
    _await_turn(c, steps.turns - 1, True, shared, facts)
    s_mn = _multiply_keys(stage, c, shared, facts)
    _end_turn(c, True, shared, facts)
    s_mn = warpgroup_mma_wait(0, deps=[s_mn])
    mbarrier.arrive(shared.k_empty.index(stage))
    if not facts.shares_q:
        mbarrier.arrive(shared.q_empty.index(c), pred=steps.num_left == 0)
    return s_mn, steps


@jit
def _fold(s_mn, row_sum, row_max, acc, rows, steps, shared, tensors, numbers, facts: gl.constexpr):
    """(row_sum, row_max, acc) with a PARTIAL key tile, with nothing beside it."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    s_mn = scores(s_mn, rows, steps.n_start, tensors, numbers, facts)
    s_mn = masked(s_mn, rows, steps.n_start, tensors, facts)
    p_mn, new_sum, row_max, alpha = softmax(s_mn, row_max, numbers, facts)
    p_mn = gl.convert_layout(p_mn.to(shared.v.dtype), p_layout)
    acc = _multiply_values(p_mn, rescaled(acc, alpha, facts), steps.step, shared, facts)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(shared.v_empty.index(steps.step % facts.config.num_stages))
    return scaled(row_sum, alpha) + new_sum, row_max, acc


@jit
def _attend(
    p_mn, row_sum, row_max, acc, rows, steps, num_steps, c: gl.constexpr, shared, tensors, numbers, facts: gl.constexpr
):  # fmt: skip
    """(P, row_sum, row_max, acc, steps) after as many FULL key tiles, where the product with the last P is to come."""
    dtype: gl.constexpr = p_mn.dtype
    p_layout: gl.constexpr = p_mn.type.layout
    s_layout: gl.constexpr = row_max.type.layout.parent
    n_start, num_left, step, turns = steps
    zeros = gl.full([facts.rows, facts.block_n], 0.0, gl.float32, s_layout)
    q_m = shared.q.index(c).reshape([facts.rows, facts.block_d])
    for _ in range(num_steps):
        num_left -= 1
        n_start = next_keys(n_start, facts)
        stage = step % facts.config.num_stages
        is_odd = (step // facts.config.num_stages) & 1
        next_stage = (step + 1) % facts.config.num_stages
        next_is_odd = ((step + 1) // facts.config.num_stages) & 1
        mbarrier.wait(shared.k_full.index(next_stage), next_is_odd)
        _await_turn(c, turns, True, shared, facts)
        k_n = shared.k.index(next_stage).reshape([facts.block_n, facts.block_d])
        s_mn = warpgroup_mma(q_m, k_n.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(shared.v_full.index(stage), is_odd)
        v_n = shared.v.index(stage).reshape([facts.block_n, facts.block_dv])
        acc = warpgroup_mma(p_mn, v_n, acc, is_async=True)
        _end_turn(c, True, shared, facts)
        turns += 1
        s_mn = warpgroup_mma_wait(1, deps=[s_mn])
        mbarrier.arrive(shared.k_empty.index(next_stage))
        if not facts.shares_q:
            mbarrier.arrive(shared.q_empty.index(c), pred=num_left == 0)
        s_mn = scores(s_mn, rows, n_start, tensors, numbers, facts)
        p_mn, new_sum, row_max, alpha = softmax(s_mn, row_max, numbers, facts)
        row_sum = scaled(row_sum, alpha) + new_sum
        # Here and not where it is needed: 64 registers less, and no spills with three consumers.
        p_mn = gl.convert_layout(p_mn.to(dtype), p_layout)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_empty.index(stage))
        acc = rescaled(acc, alpha, facts)
        step += 1
    return p_mn, row_sum, row_max, acc, Steps(n_start, num_left, step, turns)


@jit
def _consume(team: gl.constexpr, c: gl.constexpr, out_desc, shared, tensors, numbers, facts: gl.constexpr):
    """A warpgroup of consumers: the rows of its share of each tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_n, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_dv, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile = gl.to_tensor(0)
    unit = first_unit(team)
    exists = True
    # The last program's second team may have nothing to do.
    if facts.config.num_teams > 1:
        exists = unit < numbers.num_units
    place, num_steps = place_of(unit, tensors, numbers, facts)
    ranges, num_skipped = own_keys(place, num_steps, c, facts)
    n_start, step, turns = _first_keys(num_skipped, place, gl.to_tensor(0), gl.to_tensor(0), c, shared, facts)
    s_mn = warpgroup_mma_wait(0, deps=[_first_scores(tile, step, turns, exists, c, shared, facts)])
    are_flagged = gl.full([facts.rows], 0, gl.int32, row_layout)
    while exists:
        steps = Steps(n_start, num_steps - num_skipped - 1, step, turns + 1)
        i = place.m_start + c * facts.rows + gl.arange(0, facts.rows, layout=row_layout)
        # Not before the tile is known to exist: beyond the last one heads are any numbers.
        slope = head_slope(place.head, place.sequence, tensors, numbers, facts)
        rows = Rows(i, place.head, slope, place.sequence)
        acc = gl.full([facts.rows, facts.block_dv], 0.0, gl.float32, acc_layout)
        row_max = gl.full([facts.rows], float("-inf"), gl.float32, row_layout)
        row_sum = lane_sums(gl.full([facts.rows, facts.block_n], 0.0, gl.float32, s_layout), facts)
        mbarrier.arrive(shared.k_empty.index(step % facts.config.num_stages))
        if not facts.shares_q:
            mbarrier.arrive(shared.q_empty.index(c), pred=steps.num_left == 0)
        # PARTIAL tiles have loops of their own, but the last one on the right: a branch in the loop over FULL ones, or
        # P carried from one loop to another, makes it slower.
        num_first = 0
        if facts.has_right or facts.has_blocks:
            num_first = num_first_partial(steps, ranges, facts)
            for _ in range(num_first):
                row_sum, row_max, acc = _fold(s_mn, row_sum, row_max, acc, rows, steps, shared, tensors, numbers, facts)
                s_mn, steps = _scores(steps, c, shared, facts)
        s_mn = scores(s_mn, rows, steps.n_start, tensors, numbers, facts)
        if is_partial(steps.n_start, ranges):
            s_mn = masked(s_mn, rows, steps.n_start, tensors, facts)
        p_mn, new_sum, row_max, alpha = softmax(s_mn, row_max, numbers, facts)
        p_mn = gl.convert_layout(p_mn.to(shared.v.dtype), p_layout)
        row_sum = scaled(row_sum, alpha) + new_sum
        if num_first > 0:
            acc = rescaled(acc, alpha, facts)
        num_full = steps.num_left
        if facts.has_left:
            num_full = gl.minimum(num_full, gl.maximum(steps.n_start - ranges.full_lo, 0) // facts.block_n)
        p_mn, row_sum, row_max, acc, steps = _attend(
            p_mn, row_sum, row_max, acc, rows, steps, num_full, c, shared, tensors, numbers, facts
        )
        acc = _multiply_values(p_mn, acc, steps.step, shared, facts)
        # Now, because the product hides the divisions.
        unit = following(unit, tile, shared, facts)
        next_place, num_steps = place_of(unit, tensors, numbers, facts)
        next_ranges, num_skipped = own_keys(next_place, num_steps, c, facts)
        exists = unit < numbers.num_units
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_empty.index(steps.step % facts.config.num_stages))
        if facts.has_left:
            for _ in range(steps.num_left):
                s_mn, steps = _scores(steps, c, shared, facts)
                row_sum, row_max, acc = _fold(s_mn, row_sum, row_max, acc, rows, steps, shared, tensors, numbers, facts)
        tile += 1
        if facts.shares_q:
            are_flagged |= _finish(acc, row_sum, row_max, place, c, out_desc, shared, tensors, numbers, facts)
        num_next = gl.where(exists, num_skipped, 0)
        n_start, step, turns = _first_keys(num_next, next_place, steps.step + 1, steps.turns, c, shared, facts)
        s_mn = _first_scores(tile, step, turns, exists, c, shared, facts)
        if not facts.shares_q:
            are_flagged |= _finish(acc, row_sum, row_max, place, c, out_desc, shared, tensors, numbers, facts)
        s_mn = warpgroup_mma_wait(0, deps=[s_mn])
        place = next_place
        ranges = next_ranges
    if facts.flags:
        gl.store(tensors.flags + first_unit(team) * facts.config.num_consumers + c, gl.max(are_flagged, 0))
    store_wait(0)


@jit
def _shared_of_team(q_desc, k_desc, v_desc, out_desc, facts: gl.constexpr):
    """`Shared` of a team."""
    n: gl.constexpr = facts.config.num_consumers
    stages: gl.constexpr = facts.config.num_stages
    q = tiles_like(n, q_desc)
    k = tiles_like(stages, k_desc)
    v = tiles_like(stages, v_desc)
    out = q
    if not facts.shares_q:
        out = tiles_like(n, out_desc)
    shared = Shared(
        q, k, v, out, barriers(n, 1), barriers(n, 1), barriers(stages, 1), barriers(stages, n),
        barriers(stages, 1), barriers(stages, n), barriers(n, 1),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(2, 1), barriers(2, n),
    )  # fmt: skip
    mbarrier.arrive(shared.turn.index(0))
    return shared


@jit
def forward_kernel(q_desc, k_desc, v_desc, out_desc, tensors, numbers, facts: gl.constexpr):
    """out and lse of a call."""
    registers: gl.constexpr = facts.config.registers
    shared = _shared_of_team(q_desc, k_desc, v_desc, out_desc, facts)
    if facts.config.num_teams == 2:
        other = _shared_of_team(q_desc, k_desc, v_desc, out_desc, facts)
    # What follows may be launched; it waits for the end of this kernel.
    gdc_launch_dependents()
    if facts.config.num_teams == 2:
        gl.warp_specialize(
            [
                (_consume, (0, 0, out_desc, shared, tensors, numbers, facts)),
                (_consume, (0, 1, out_desc, shared, tensors, numbers, facts)),
                (_consume, (1, 0, out_desc, other, tensors, numbers, facts)),
                (_consume, (1, 1, out_desc, other, tensors, numbers, facts)),
                (_produce, (0, q_desc, k_desc, v_desc, shared, tensors, numbers, facts)),
                (_produce, (1, q_desc, k_desc, v_desc, other, tensors, numbers, facts)),
            ],
            [4, 4, 4, 1, 1],
            [registers, registers, registers, _PRODUCER_REGISTERS, _PRODUCER_REGISTERS],
        )
    elif facts.config.num_consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (0, 0, out_desc, shared, tensors, numbers, facts)),
                (_consume, (0, 1, out_desc, shared, tensors, numbers, facts)),
                (_produce, (0, q_desc, k_desc, v_desc, shared, tensors, numbers, facts)),
            ],
            [4, 1],
            [registers, _PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, 0, out_desc, shared, tensors, numbers, facts)),
                (_consume, (0, 1, out_desc, shared, tensors, numbers, facts)),
                (_consume, (0, 2, out_desc, shared, tensors, numbers, facts)),
                (_produce, (0, q_desc, k_desc, v_desc, shared, tensors, numbers, facts)),
            ],
            [4, 4, 1],
            [registers, registers, _PRODUCER_REGISTERS],
        )
