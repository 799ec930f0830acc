"""Attention forward on Hopper, warp-specialised.

Computes   out and lse of a dense call with or without a band; where something can be hidden also flags for
           `triton.forward.exact_rows_kernel`, which computes again what is not finite in out: one per consumer of a
           program, whether any of its rows is, and behind them one per row.
Algorithm  FlashAttention-3, algorithms 1 and 2 (arXiv:2407.08608): S of the next key tile is multiplied while the
           softmax of this one runs. A row maximum that grows by at most 8 (a factor of 256) is kept, as in
           FlashAttention-4, so that acc is rescaled a few times per row tile and not once per key tile.
Schedule   persistent: a program per processor takes one row tile after the other: every so-manyth where all take as
           long, with a band the next that nobody has, longest first (`_locate`). Key tiles right to left: PARTIAL,
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
Traffic    as `triton.forward` without packed rows: Q once, K and V once per row tile of each query head.
On chip    q_m, out_m (in the place of q_m where that leaves no room), stages of k_n and v_n in shared memory; s_mn,
           p_mn in the input dtype, acc and the state in registers. s_mn and p_mn are of different key tiles.
Numerics   as `triton.forward`. Sums of a row are four, one of each thread that shares it, added after the last tile.
Limits     head_dim and head_dim_v up to 256, on chip 64, 128 or 256: TMA fills with zeros what the tensors do not have.

Shapes: M rows of a consumer; N keys of a tile; D head_dim; E head_dim_v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from tilestream.backends.triton.tiles import is_partial, key_ranges

__all__ = ["forward_kernel"]


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


class Place(NamedTuple):
    """A tile: its first row, whose it is, and where its last key tile ends."""

    m_start: Any
    head: Any
    batch: Any
    hi: Any


@jit
def _locate(unit, numbers, facts: gl.constexpr):
    """A row tile, and its number of steps: one at least, so that rows which see no key need no path of their own.

    Some heads at a time, so that their K and V stay in the L2 cache; the longest tiles of these first.
    """
    first = unit // (numbers.num_row_tiles * numbers.num_together) * numbers.num_together
    num_together = gl.minimum(numbers.num_sides - first, numbers.num_together)
    rest = unit - first * numbers.num_row_tiles
    m_block = rest // num_together
    side = first + rest - m_block * num_together
    if facts.has_right:
        m_block = numbers.num_row_tiles - 1 - m_block
    m_start = m_block * facts.block_m
    ranges = key_ranges(m_start, numbers, facts)
    num_steps = gl.maximum((ranges.hi - ranges.lo) // facts.block_n, 1)
    hi = ranges.lo + num_steps * facts.block_n
    batch = side // numbers.num_heads
    return Place(m_start, side - batch * numbers.num_heads, batch, hi), num_steps


@jit
def _fetch(unit, counter, numbers, facts: gl.constexpr):
    """The unit that a program turns to after this one: the next that nobody has, or every so-manyth."""
    if facts.is_dynamic:
        fetched = gl.atomic_add(counter, 1, sem="relaxed")
        # Every program fetches until there are no more, so this is the last of all: ready for the next launch.
        if fetched == numbers.num_units - 1:
            gl.store(counter, 0)
        return gl.num_programs(0) + fetched
    else:
        return unit + gl.num_programs(0)


@jit
def _publish(unit, tile, shared, facts: gl.constexpr):
    """Tell the consumers what follows tile number `tile`."""
    if facts.is_dynamic:
        slot = tile & 1
        mbarrier.wait(shared.unit_empty.index(slot), ((tile >> 1) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        shared.unit.index(slot).store(gl.full([1], 0, gl.int32, layout) + unit)
        mbarrier.arrive(shared.unit_full.index(slot))


@jit
def _following(unit, tile, shared, facts: gl.constexpr):
    """The unit that follows tile number `tile`."""
    if facts.is_dynamic:
        slot = tile & 1
        mbarrier.wait(shared.unit_full.index(slot), (tile >> 1) & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        unit = gl.max(shared.unit.index(slot).load(layout), 0)
        mbarrier.arrive(shared.unit_empty.index(slot))
        return unit
    else:
        return unit + gl.num_programs(0)


@jit
def _produce(q_desc, k_desc, v_desc, counter, shared, numbers, facts: gl.constexpr):
    """The producer warp: fill shared memory as it empties."""
    num_consumers: gl.constexpr = facts.config.num_consumers
    step = 0
    tile = 0
    unit = gl.program_id(0)
    place, num_steps = _locate(unit, numbers, facts)
    next_unit = unit
    next_place = place
    next_num_steps = num_steps
    while unit < numbers.num_units:
        batch = place.batch
        head_kv = place.head // numbers.group
        n_start = place.hi - facts.block_n
        for index in range(num_steps):
            stage = step % facts.config.num_stages
            is_odd = (step // facts.config.num_stages) & 1
            mbarrier.wait(shared.k_empty.index(stage), is_odd ^ 1)
            mbarrier.expect(shared.k_full.index(stage), k_desc.block_type.nbytes)
            load_tile(k_desc, [batch, n_start, head_kv, 0], shared.k_full.index(stage), shared.k.index(stage))
            # After the first k, whose stage is empty before consumers are done with the last q.
            if index == 0:
                for c in gl.static_range(num_consumers):
                    mbarrier.wait(shared.q_empty.index(c), (tile & 1) ^ 1)
                    mbarrier.expect(shared.q_full.index(c), q_desc.block_type.nbytes)
                    m_first = place.m_start + c * facts.rows
                    load_tile(q_desc, [batch, m_first, place.head, 0], shared.q_full.index(c), shared.q.index(c))
            mbarrier.wait(shared.v_empty.index(stage), is_odd ^ 1)
            mbarrier.expect(shared.v_full.index(stage), v_desc.block_type.nbytes)
            load_tile(v_desc, [batch, n_start, head_kv, 0], shared.v_full.index(stage), shared.v.index(stage))
            # Now, because stages have to empty before what is next can be loaded.
            if index == 0:
                next_unit = _fetch(unit, counter, numbers, facts)
                _publish(next_unit, tile, shared, facts)
                next_place, next_num_steps = _locate(next_unit, numbers, facts)
            n_start -= facts.block_n
            step += 1
        tile += 1
        unit = next_unit
        place = next_place
        num_steps = next_num_steps


@jit
def _own(place, num_steps, c: gl.constexpr, numbers, facts: gl.constexpr):
    """(ranges of consumer c's rows, how many of the tile's first steps show it nothing: never all)."""
    of_consumer: gl.constexpr = facts.of_consumer
    m_first = place.m_start + c * facts.rows
    ranges = key_ranges(m_first, numbers, of_consumer)
    hi = ranges.hi
    # Nobody stores the results of rows that are none.
    if m_first >= numbers.seqlen_q:
        hi = 0
    return ranges, gl.minimum(gl.maximum(place.hi - hi, 0) // facts.block_n, num_steps - 1)


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
def _masked(s_mn, i, n_start, numbers, facts: gl.constexpr):
    """Scores with -inf where the band or the end of the keys hides them.

    Key 8 a + 2 b + c of a tile lies in lane b of four and, in that thread, at a place that follows from a and c: these
    two are constants of the instructions, and no thread holds the numbers of its keys in registers.
    """
    rows: gl.constexpr = s_mn.shape[0]
    eighths: gl.constexpr = facts.block_n // 8
    wide = s_mn.reshape([rows, eighths, 4, 2])
    layout: gl.constexpr = wide.type.layout
    a = gl.arange(0, eighths, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    b = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    c = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    i = gl.convert_layout(i, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    j = 8 * a[None, :, None, None] + c[None, None, None, :]
    start = n_start + 2 * b[None, None, :, None]
    # Opaque: without a band all of this is the same in every tile, and 64 predicates would be kept in registers.
    last = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [i * 0 + (numbers.seqlen_k - 1)], dtype=gl.int32, is_pure=False, pack=1
    )
    if facts.has_right:
        last = gl.minimum(last, i + numbers.right_edge)
    visible = j <= last[:, None, None, None] - start
    if facts.has_left:
        visible = visible & (j >= (i + numbers.left_edge)[:, None, None, None] - start)
    return gl.convert_layout(gl.where(visible, wide, float("-inf")).reshape(s_mn.shape), s_mn.type.layout)


# 2**n times a polynomial in f of x = n + f, n whole: 1.5 * 2**23 added leaves n in the last bits of a number.
_POLYNOMIAL = gl.constexpr(
    """
    {
    .reg .f32 x, r, f;
    .reg .b32 n, y;
    ex2.approx.ftz.f32 $0, $4;
    ex2.approx.ftz.f32 $1, $5;
    ex2.approx.ftz.f32 $2, $6;
    max.ftz.f32 x, $7, 0fC2FC0000;
    add.rn.ftz.f32 r, x, 0f4B400000;
    sub.rn.ftz.f32 f, r, 0f4B400000;
    sub.rn.ftz.f32 f, x, f;
    fma.rn.ftz.f32 x, f, 0f3C1D0165, 0f3D64FE23;
    fma.rn.ftz.f32 x, x, f, 0f3E7601BC;
    fma.rn.ftz.f32 x, x, f, 0f3F317096;
    fma.rn.ftz.f32 x, x, f, 0f3F800000;
    mov.b32 n, r;
    shl.b32 n, n, 23;
    mov.b32 y, x;
    add.s32 n, y, n;
    mov.b32 $3, n;
    }
    """
)


# Registers of `acc` that one branch guards. Of a thread's, four by four, two are of one row and two of another.
_RESCALE_PACK = gl.constexpr(32)
_RESCALE = gl.constexpr(
    "{ .reg .pred p; setp.neu.f32 p, $64, 0f3F800000; setp.neu.or.f32 p, $66, 0f3F800000, p;"
    " vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni KEPT; "
    + " ".join(f"mul.rn.f32 ${i}, ${i}, ${64 + i};" for i in range(32))
    + " KEPT: }"
)
_RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))


@jit
def _exp2(x, facts: gl.constexpr):
    """2**x for x <= 8. With `splits_exp2` every fourth by a polynomial of degree 4 (relative error 3e-6), because
    the unit for the others takes 16 numbers a clock, an eighth of what multiplies and adds.
    """
    if facts.config.splits_exp2:
        return gl.inline_asm_elementwise(
            _POLYNOMIAL, "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4
        )
    else:
        return gl.exp2(x)


@jit
def _lane_sums(p_mn, facts: gl.constexpr):
    """Sums of what every thread holds of a row: four threads share one, and add up after the last tile."""
    rows: gl.constexpr = p_mn.shape[0]
    return gl.sum(gl.sum(p_mn.reshape([rows, facts.block_n // 8, 4, 2]), 3), 1)


@jit
def _scaled(x, factor):
    """Rows of `x` times their factors."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@jit
def _softmax(s_mn, row_max, numbers, facts: gl.constexpr):
    """(p_mn, its `_lane_sums`, new maxima, factors that rescale what was summed before)."""
    new_max = gl.maximum(row_max, gl.max(s_mn, 1) * numbers.scale_log2)
    # A maximum that grows by little stays: the weights are then at most 2**8, and nothing needs to be rescaled.
    if facts.config.keeps_max:
        new_max = gl.where(new_max - row_max > 8.0, new_max, row_max)
    # A row that has seen no key yet: exp2(-inf - 0) = 0, not NaN.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    p_mn = _exp2(s_mn * numbers.scale_log2 - finite_max[:, None], facts)
    alpha = gl.exp2(row_max - finite_max)
    return p_mn, _lane_sums(p_mn, facts), new_max, alpha


@jit
def _rescaled(acc, alpha, facts: gl.constexpr):
    """acc times alpha; nothing at all in a warp whose factors are all 1."""
    if facts.config.keeps_max:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        alpha, acc = gl.broadcast(alpha, acc)
        return gl.inline_asm_elementwise(
            _RESCALE, _RESCALE_OPERANDS, [acc, alpha], dtype=gl.float32, is_pure=True, pack=_RESCALE_PACK
        )
    else:
        return _scaled(acc, alpha)


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
def _first_scores(tile, step, turns, exists, c: gl.constexpr, shared, facts: gl.constexpr):
    """The first S of a tile, still being multiplied: of whatever lies there where there is no such tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_n, 16])
    stage = step % facts.config.num_stages
    mbarrier.wait(shared.q_full.index(c), tile & 1, pred=exists)
    mbarrier.wait(shared.k_full.index(stage), (step // facts.config.num_stages) & 1, pred=exists)
    _await_turn(c, turns, exists, shared, facts)
    q_m = shared.q.index(c).reshape([facts.rows, facts.block_d])
    k_n = shared.k.index(stage).reshape([facts.block_n, facts.block_d])
    zeros = gl.full([facts.rows, facts.block_n], 0.0, gl.float32, s_layout)
    s_mn = warpgroup_mma(q_m, k_n.permute((1, 0)), zeros, use_acc=False, is_async=True)
    _end_turn(c, exists, shared, facts)
    return s_mn


@jit
def _finish(acc, row_sum, row_max, place, c: gl.constexpr, out_desc, lse, flags, shared, numbers, facts: gl.constexpr):
    """Store out, lse and the flags of a tile's rows; (M), 1 where a row is flagged."""
    dtype: gl.constexpr = out_desc.dtype
    row_layout: gl.constexpr = row_max.type.layout
    m_first = place.m_start + c * facts.rows
    i = m_first + gl.arange(0, facts.rows, layout=row_layout)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    lse_log2 = gl.where(row_sum == 0.0, float("-inf"), row_max + gl.log2(row_sum))
    acc = _scaled(acc, gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum))
    places = (place.batch * numbers.num_heads + place.head).to(gl.int64) * numbers.seqlen_q + i
    gl.store(lse + places, lse_log2 * 0.6931471805599453, i < numbers.seqlen_q)
    are_flagged = i * 0
    if facts.flags:
        # 0 times a number is 0 unless that is not finite.
        is_bad = gl.convert_layout(gl.sum(acc * 0.0, 1), row_layout) != 0.0
        are_flagged = (is_bad & (i < numbers.seqlen_q)).to(gl.int32)
        num_flaggers = facts.config.num_consumers * gl.num_programs(0)
        gl.store(flags + num_flaggers + places, are_flagged, i < numbers.seqlen_q)
    # The store before has read what the next one writes.
    if not facts.shares_q:
        store_wait(0)
    out_m = shared.out.index(c)
    out_m.reshape([facts.rows, facts.block_dv]).store(acc.to(dtype))
    fence_async_shared()
    store_tile(out_desc, [place.batch, m_first, place.head, 0], out_m)
    if facts.shares_q:
        store_wait(0)
        mbarrier.arrive(shared.q_empty.index(c))
    return are_flagged


class Steps(NamedTuple):
    """Where a consumer is: the last key tile whose scores it has, and how many of its row tile are left."""

    n_start: Any
    num_left: Any
    step: Any
    turns: Any


@jit
def _scores(steps, c: gl.constexpr, shared, facts: gl.constexpr):
    """(S of the next key tile, `steps` there), with nothing beside it."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_n, 16])
    steps = Steps(steps.n_start - facts.block_n, steps.num_left - 1, steps.step + 1, steps.turns + 1)
    stage = steps.step % facts.config.num_stages
    mbarrier.wait(shared.k_full.index(stage), (steps.step // facts.config.num_stages) & 1)
    _await_turn(c, steps.turns - 1, True, shared, facts)
    q_m = shared.q.index(c).reshape([facts.rows, facts.block_d])
    k_n = shared.k.index(stage).reshape([facts.block_n, facts.block_d])
    zeros = gl.full([facts.rows, facts.block_n], 0.0, gl.float32, s_layout)
    s_mn = warpgroup_mma(q_m, k_n.permute((1, 0)), zeros, use_acc=False, is_async=True)
    _end_turn(c, True, shared, facts)
    s_mn = warpgroup_mma_wait(0, deps=[s_mn])
    mbarrier.arrive(shared.k_empty.index(stage))
    if not facts.shares_q:
        mbarrier.arrive(shared.q_empty.index(c), pred=steps.num_left == 0)
    return s_mn, steps


@jit
def _add_values(p_mn, acc, step, shared, facts: gl.constexpr):
    """acc plus the product of P and the values of a step, still being multiplied."""
    stage = step % facts.config.num_stages
    mbarrier.wait(shared.v_full.index(stage), (step // facts.config.num_stages) & 1)
    v_n = shared.v.index(stage).reshape([facts.block_n, facts.block_dv])
    return warpgroup_mma(p_mn, v_n, acc, is_async=True)


@jit
def _fold(s_mn, row_sum, row_max, acc, i, steps, shared, numbers, facts: gl.constexpr):
    """(row_sum, row_max, acc) with a PARTIAL key tile, with nothing beside it."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    s_mn = _masked(s_mn, i, steps.n_start, numbers, facts)
    p_mn, new_sum, row_max, alpha = _softmax(s_mn, row_max, numbers, facts)
    p_mn = gl.convert_layout(p_mn.to(shared.v.dtype), p_layout)
    acc = _add_values(p_mn, _rescaled(acc, alpha, facts), steps.step, shared, facts)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(shared.v_empty.index(steps.step % facts.config.num_stages))
    return _scaled(row_sum, alpha) + new_sum, row_max, acc


@jit
def _attend(p_mn, row_sum, row_max, acc, steps, num_steps, c: gl.constexpr, shared, numbers, facts: gl.constexpr):
    """(P, row_sum, row_max, acc, steps) after as many FULL key tiles, where the product with the last P is to come."""
    dtype: gl.constexpr = p_mn.dtype
    p_layout: gl.constexpr = p_mn.type.layout
    s_layout: gl.constexpr = row_max.type.layout.parent
    n_start, num_left, step, turns = steps
    zeros = gl.full([facts.rows, facts.block_n], 0.0, gl.float32, s_layout)
    q_m = shared.q.index(c).reshape([facts.rows, facts.block_d])
    for _ in range(num_steps):
        num_left -= 1
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
        p_mn, new_sum, row_max, alpha = _softmax(s_mn, row_max, numbers, facts)
        row_sum = _scaled(row_sum, alpha) + new_sum
        # Here and not where it is needed: 64 registers less, and no spills with three consumers.
        p_mn = gl.convert_layout(p_mn.to(dtype), p_layout)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_empty.index(stage))
        acc = _rescaled(acc, alpha, facts)
        step += 1
    n_start -= num_steps * facts.block_n
    return p_mn, row_sum, row_max, acc, Steps(n_start, num_left, step, turns)


@jit
def _consume(c: gl.constexpr, out_desc, lse, flags, shared, numbers, facts: gl.constexpr):
    """A warpgroup of consumers: the rows of its share of each tile."""
    rows: gl.constexpr = facts.rows
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_n, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_dv, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile = gl.to_tensor(0)
    unit = gl.program_id(0)
    place, num_steps = _locate(unit, numbers, facts)
    ranges, num_skipped = _own(place, num_steps, c, numbers, facts)
    n_start = place.hi - facts.block_n
    n_start, step, turns = _skip(num_skipped, n_start, gl.to_tensor(0), gl.to_tensor(0), c, shared, facts)
    s_mn = warpgroup_mma_wait(0, deps=[_first_scores(tile, step, turns, True, c, shared, facts)])
    are_flagged = gl.full([rows], 0, gl.int32, row_layout)
    exists = True
    while exists:
        steps = Steps(n_start, num_steps - num_skipped - 1, step, turns + 1)
        i = place.m_start + c * rows + gl.arange(0, rows, layout=row_layout)
        acc = gl.full([rows, facts.block_dv], 0.0, gl.float32, acc_layout)
        row_max = gl.full([rows], float("-inf"), gl.float32, row_layout)
        row_sum = _lane_sums(gl.full([rows, facts.block_n], 0.0, gl.float32, s_layout), facts)
        mbarrier.arrive(shared.k_empty.index(step % facts.config.num_stages))
        if not facts.shares_q:
            mbarrier.arrive(shared.q_empty.index(c), pred=steps.num_left == 0)
        # PARTIAL tiles have loops of their own, but the last one on the right: a branch in the loop over FULL ones, or
        # P carried from one loop to another, makes it slower.
        num_first = 0
        if facts.has_right:
            num_first = gl.minimum(gl.maximum(steps.n_start - ranges.full_hi, 0) // facts.block_n, steps.num_left)
            for _ in range(num_first):
                row_sum, row_max, acc = _fold(s_mn, row_sum, row_max, acc, i, steps, shared, numbers, facts)
                s_mn, steps = _scores(steps, c, shared, facts)
        if is_partial(steps.n_start, ranges):
            s_mn = _masked(s_mn, i, steps.n_start, numbers, facts)
        p_mn, new_sum, row_max, alpha = _softmax(s_mn, row_max, numbers, facts)
        p_mn = gl.convert_layout(p_mn.to(shared.v.dtype), p_layout)
        row_sum = _scaled(row_sum, alpha) + new_sum
        if num_first > 0:
            acc = _rescaled(acc, alpha, facts)
        num_full = steps.num_left
        if facts.has_left:
            num_full = gl.minimum(num_full, gl.maximum(steps.n_start - ranges.full_lo, 0) // facts.block_n)
        p_mn, row_sum, row_max, acc, steps = _attend(
            p_mn, row_sum, row_max, acc, steps, num_full, c, shared, numbers, facts
        )
        acc = _add_values(p_mn, acc, steps.step, shared, facts)
        # Now, because the product hides the divisions.
        unit = _following(unit, tile, shared, facts)
        next_place, num_steps = _locate(unit, numbers, facts)
        next_ranges, num_skipped = _own(next_place, num_steps, c, numbers, facts)
        exists = unit < numbers.num_units
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_empty.index(steps.step % facts.config.num_stages))
        if facts.has_left:
            for _ in range(steps.num_left):
                s_mn, steps = _scores(steps, c, shared, facts)
                row_sum, row_max, acc = _fold(s_mn, row_sum, row_max, acc, i, steps, shared, numbers, facts)
        tile += 1
        if facts.shares_q:
            are_flagged |= _finish(acc, row_sum, row_max, place, c, out_desc, lse, flags, shared, numbers, facts)
        num_next = gl.where(exists, num_skipped, 0)
        n_start = next_place.hi - facts.block_n
        n_start, step, turns = _skip(num_next, n_start, steps.step + 1, steps.turns, c, shared, facts)
        s_mn = _first_scores(tile, step, turns, exists, c, shared, facts)
        if not facts.shares_q:
            are_flagged |= _finish(acc, row_sum, row_max, place, c, out_desc, lse, flags, shared, numbers, facts)
        s_mn = warpgroup_mma_wait(0, deps=[s_mn])
        place = next_place
        ranges = next_ranges
    if facts.flags:
        gl.store(flags + gl.program_id(0) * facts.config.num_consumers + c, gl.max(are_flagged, 0))
    store_wait(0)


@jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@jit
def forward_kernel(q_desc, k_desc, v_desc, out_desc, lse, flags, counter, numbers, facts: gl.constexpr):
    """out and lse of a call."""
    dtype: gl.constexpr = q_desc.dtype
    n: gl.constexpr = facts.config.num_consumers
    stages: gl.constexpr = facts.config.num_stages
    q = gl.allocate_shared_memory(dtype, [n, 1, facts.rows, 1, facts.block_d], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [facts.config.num_stages, 1, facts.block_n, 1, facts.block_d], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [facts.config.num_stages, 1, facts.block_n, 1, facts.block_dv], v_desc.layout)
    out = q
    if not facts.shares_q:
        out = gl.allocate_shared_memory(dtype, [n, 1, facts.rows, 1, facts.block_dv], out_desc.layout)
    shared = Shared(
        q, k, v, out, _barriers(n, 1), _barriers(n, 1), _barriers(stages, 1), _barriers(stages, n),
        _barriers(stages, 1), _barriers(stages, n), _barriers(n, 1),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        _barriers(2, 1), _barriers(2, n),
    )  # fmt: skip
    mbarrier.arrive(shared.turn.index(0))
    if n == 2:
        gl.warp_specialize(
            [
                (_consume, (0, out_desc, lse, flags, shared, numbers, facts)),
                (_consume, (1, out_desc, lse, flags, shared, numbers, facts)),
                (_produce, (q_desc, k_desc, v_desc, counter, shared, numbers, facts)),
            ],
            [4, 1],
            [facts.config.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, out_desc, lse, flags, shared, numbers, facts)),
                (_consume, (1, out_desc, lse, flags, shared, numbers, facts)),
                (_consume, (2, out_desc, lse, flags, shared, numbers, facts)),
                (_produce, (q_desc, k_desc, v_desc, counter, shared, numbers, facts)),
            ],
            [4, 4, 1],
            [facts.config.registers, facts.config.registers, 24],
        )
