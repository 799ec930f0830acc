"""Attention forward on Hopper, warp-specialised.

Computes   out and lse of a dense call with or without a band; where something can be hidden also a flag per row, which
           is 1 where out is not finite (`triton.forward.exact_rows_kernel` computes those again).
Algorithm  FlashAttention-3, algorithms 1 and 2 (arXiv:2407.08608): S of the next key tile is multiplied while the
           softmax of this one runs. A row maximum that grows by at most 8 (a factor of 256) is kept, as in
           FlashAttention-4, so that acc is rescaled a few times per row tile and not once per key tile.
Schedule   persistent: a program per processor takes every so-manyth unit of work, row tiles fastest, then heads, so
           that few heads' K and V are in use at a time and stay in the L2 cache. With a band a unit is two row tiles, a
           long one and a short one (`_locate`). Key tiles right to left: PARTIAL, FULL, PARTIAL; a consumer skips first
           ones that none of its rows sees.
Roles      consumers are warpgroups 0 to n - 1, each with its own rows of a tile; the producer is one warp that issues
           all loads. Tile t of a program is the t-th use of q, key tile s of a program the s-th use of a stage.
           q_full[c]   loaded: q of consumer c           q_empty[c]  consumer c is done with it (one arrival)
           k_full[s]   loaded: k of stage s              k_empty[s]  all consumers are done with it (n arrivals)
           v_full[s], v_empty[s]                         the same of v
           turn[c]     consumer c may issue products; one arrival each, from the consumer before it in the ring, the
                       first one from the start of the kernel
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
from tilestream.backends.hopper.places import key_place, numbers_at, row_place
from tilestream.backends.hopper.score import head_sink, head_slope, masked, scaled, scores
from tilestream.backends.triton.tiles import is_partial, key_ranges, locate

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


class Place(NamedTuple):
    """A tile: its first row, whose it is, and where its last key tile ends."""

    m_block: Any  # of all row tiles of a head: those of a packed call are of all its sequences
    m_start: Any
    head: Any
    sequence: Any  # `triton.tiles.Sequence`
    hi: Any


@jit
def _locate(unit, half, numbers, tensors, facts: gl.constexpr):
    """A program's tile, and its number of steps: one at least, so that rows which see no key need no path of their own.

    A unit of work is a row tile or, where a band makes them unequal, two: the first and the last of what is left of a
    head's, the last first. All units then take about as long, and those of a head can run side by side.
    """
    num_units = numbers.num_row_tiles
    if facts.has_left or facts.has_right:
        num_units = (num_units + 1) // 2
    first = unit // (num_units * numbers.num_together) * numbers.num_together
    num_together = gl.minimum(numbers.num_sides - first, numbers.num_together)
    rest = unit - first * num_units
    m_block = rest // num_together
    side = first + rest - m_block * num_together
    if facts.has_left or facts.has_right:  # noqa: SIM102
        if half == 0:
            m_block = numbers.num_row_tiles - 1 - m_block
    batch = side // numbers.num_heads
    head = side - batch * numbers.num_heads
    sequence, tile = locate(m_block, head // numbers.group, batch, tensors, numbers, facts, BY_KEYS=False)
    m_start = tile * facts.block_m
    ranges = key_ranges(m_start, sequence, facts)
    num_steps = gl.maximum((ranges.hi - ranges.lo) // facts.block_n, 1)
    if facts.is_varlen:
        # A sequence may own one tile more than it has rows for.
        num_steps = gl.where(m_start < sequence.seqlen_q, num_steps, 1)
    return Place(m_block, m_start, head, sequence, ranges.lo + num_steps * facts.block_n), num_steps


@jit
def _next(unit, half, place, numbers, facts: gl.constexpr):
    """The unit and half that a program turns to after these."""
    next_half = 0
    if facts.has_left or facts.has_right:
        # An odd number of row tiles leaves one in the middle, alone.
        if half == 0 and 2 * place.m_block + 1 != numbers.num_row_tiles:
            next_half = 1
    if next_half == 0:
        unit += gl.num_programs(0)
    return unit, next_half


@jit
def _produce(q_desc, k_desc, v_desc, shared, numbers, tensors, facts: gl.constexpr):
    """The producer warp: fill shared memory as it empties."""
    num_consumers: gl.constexpr = facts.config.num_consumers
    step = 0
    tile = 0
    unit = gl.program_id(0)
    half = 0
    while unit < numbers.num_units:
        place, num_steps = _locate(unit, half, numbers, tensors, facts)
        n_start = place.hi - facts.block_n
        for index in range(num_steps):
            stage = step % facts.config.num_stages
            is_odd = (step // facts.config.num_stages) & 1
            keys = key_place(n_start, place.sequence, facts)
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
            n_start -= facts.block_n
            step += 1
        tile += 1
        unit, half = _next(unit, half, place, numbers, facts)


@jit
def _own(place, num_steps, c: gl.constexpr, facts: gl.constexpr):
    """(ranges of consumer c's rows, how many of the tile's first steps show it nothing: never all)."""
    of_consumer: gl.constexpr = facts.of_consumer
    m_first = place.m_start + c * facts.rows
    ranges = key_ranges(m_first, place.sequence, of_consumer)
    hi = ranges.hi
    # Nobody stores the results of rows that are none.
    if m_first >= place.sequence.seqlen_q:
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
    new_max = gl.maximum(row_max, scaled(gl.max(s_mn, 1), numbers, facts))
    # A maximum that grows by little stays: the weights are then at most 2**8, and nothing needs to be rescaled.
    if facts.config.keeps_max:
        new_max = gl.where(new_max - row_max > 8.0, new_max, row_max)
    # A row that has seen no key yet: exp2(-inf - 0) = 0, not NaN.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    p_mn = _exp2(scaled(s_mn, numbers, facts) - finite_max[:, None], facts)
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
def _totals(row_max, row_sum, place, tensors, numbers, facts: gl.constexpr):
    """(lse_log2, what acc is multiplied with) of rows whose `_lane_sums` are `row_sum`.

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
def _store_numbers(lse_log2, acc, i, place, lse, flags, numbers, facts: gl.constexpr):
    """lse of rows and, where something can be hidden, whether they are not finite."""
    places = numbers_at(i, place.head, place.sequence, numbers, facts)
    gl.store(lse + places, lse_log2 * 0.6931471805599453, i < place.sequence.seqlen_q)
    if facts.flags:
        # 0 times a number is 0 unless that is not finite.
        is_bad = gl.convert_layout(gl.sum(acc * 0.0, 1), i.type.layout) != 0.0
        gl.store(flags + places, is_bad.to(gl.int32), i < place.sequence.seqlen_q)


@jit
def _finish(
    acc, row_sum, row_max, place, c: gl.constexpr, out_desc, lse, flags, shared, numbers, tensors, facts: gl.constexpr
):  # fmt: skip
    """Store out, lse and the flags of a tile."""
    dtype: gl.constexpr = out_desc.dtype
    m_first = place.m_start + c * facts.rows
    i = m_first + gl.arange(0, facts.rows, layout=row_max.type.layout)
    lse_log2, weight = _totals(row_max, row_sum, place, tensors, numbers, facts)
    acc = _scaled(acc, weight)
    _store_numbers(lse_log2, acc, i, place, lse, flags, numbers, facts)
    # The store before has read what the next one writes.
    if not facts.shares_q:
        store_wait(0)
    out_m = shared.out.index(c)
    out_m.reshape([facts.rows, facts.block_dv]).store(acc.to(dtype))
    fence_async_shared()
    store_tile(out_desc, row_place(m_first, place.head, place.sequence, facts), out_m)
    if facts.shares_q:
        store_wait(0)
        mbarrier.arrive(shared.q_empty.index(c))


class State(NamedTuple):
    """Of a consumer amid a tile: p_mn of the last key tile, whose product with v is still to come."""

    p_mn: Any
    row_sum: Any
    row_max: Any
    acc: Any
    n_start: Any
    num_left: Any
    step: Any
    turns: Any


@jit
def _attend(
    state, num_steps, i, slope, place, MASKED: gl.constexpr, c: gl.constexpr, shared, numbers, tensors,
    facts: gl.constexpr,
):  # fmt: skip
    """Go on by so many key tiles of those that are left."""
    p_mn, row_sum, row_max, acc, n_start, num_left, step, turns = state
    dtype: gl.constexpr = p_mn.dtype
    p_layout: gl.constexpr = p_mn.type.layout
    s_layout: gl.constexpr = row_max.type.layout.parent
    zeros = gl.full([facts.rows, facts.block_n], 0.0, gl.float32, s_layout)
    q_m = shared.q.index(c).reshape([facts.rows, facts.block_d])
    for _ in range(gl.minimum(num_steps, num_left)):
        num_left -= 1
        n_start -= facts.block_n
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
        s_mn = scores(s_mn, i, n_start, place.head, slope, place.sequence, tensors, numbers, facts)
        if MASKED:
            s_mn = masked(s_mn, i, n_start, place.sequence, facts)
        p_mn, new_sum, row_max, alpha = _softmax(s_mn, row_max, numbers, facts)
        row_sum = _scaled(row_sum, alpha) + new_sum
        # Here and not where it is needed: 64 registers less, and no spills with three consumers.
        p_mn = gl.convert_layout(p_mn.to(dtype), p_layout)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_empty.index(stage))
        acc = _rescaled(acc, alpha, facts)
        step += 1
    return State(p_mn, row_sum, row_max, acc, n_start, num_left, step, turns)


@jit
def _consume(c: gl.constexpr, out_desc, lse, flags, shared, numbers, tensors, facts: gl.constexpr):
    """A warpgroup of consumers: the rows of its share of each tile."""
    dtype: gl.constexpr = out_desc.dtype
    rows: gl.constexpr = facts.rows
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_n, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, facts.block_dv, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile = gl.to_tensor(0)
    unit = gl.program_id(0)
    half = 0
    place, num_steps = _locate(unit, half, numbers, tensors, facts)
    ranges, num_skipped = _own(place, num_steps, c, facts)
    n_start = place.hi - facts.block_n
    n_start, step, turns = _skip(num_skipped, n_start, gl.to_tensor(0), gl.to_tensor(0), c, shared, facts)
    s_mn = warpgroup_mma_wait(0, deps=[_first_scores(tile, step, turns, True, c, shared, facts)])
    exists = True
    while exists:
        turns += 1
        i = place.m_start + c * rows + gl.arange(0, rows, layout=row_layout)
        # Not before the tile is known to exist: beyond the last one heads are any numbers.
        slope = head_slope(place.head, place.sequence, tensors, numbers, facts)
        zeros = gl.full([rows, facts.block_n], 0.0, gl.float32, s_layout)
        acc = gl.full([rows, facts.block_dv], 0.0, gl.float32, acc_layout)
        row_max = gl.full([rows], float("-inf"), gl.float32, row_layout)
        q_m = shared.q.index(c).reshape([rows, facts.block_d])
        stage = step % facts.config.num_stages
        is_odd = (step // facts.config.num_stages) & 1
        num_left = num_steps - num_skipped - 1
        # Now, because between two tiles nothing would hide the divisions.
        unit, half = _next(unit, half, place, numbers, facts)
        next_place, num_steps = _locate(unit, half, numbers, tensors, facts)
        next_ranges, num_skipped = _own(next_place, num_steps, c, facts)
        exists = unit < numbers.num_units
        mbarrier.arrive(shared.k_empty.index(stage))
        if not facts.shares_q:
            mbarrier.arrive(shared.q_empty.index(c), pred=num_left == 0)
        s_mn = scores(s_mn, i, n_start, place.head, slope, place.sequence, tensors, numbers, facts)
        if is_partial(n_start, ranges):
            s_mn = masked(s_mn, i, n_start, place.sequence, facts)
        p_mn, row_sum, row_max, alpha = _softmax(s_mn, row_max, numbers, facts)
        p_mn = gl.convert_layout(p_mn.to(dtype), p_layout)
        state = State(p_mn, row_sum, row_max, acc, n_start, num_left, step, turns)
        # Each kind of tile in a loop of its own: with a branch for the mask in one loop all are slower.
        if facts.has_right:
            num_right = gl.maximum((n_start - ranges.full_hi) // facts.block_n, 0)
            state = _attend(state, num_right, i, slope, place, True, c, shared, numbers, tensors, facts)
        num_full = num_left
        if facts.has_left:
            num_full = gl.maximum((state.n_start - ranges.full_lo) // facts.block_n, 0)
        state = _attend(state, num_full, i, slope, place, False, c, shared, numbers, tensors, facts)
        if facts.has_left:
            state = _attend(state, num_left, i, slope, place, True, c, shared, numbers, tensors, facts)
        p_mn, row_sum, row_max, acc, n_start, num_left, step, turns = state
        stage = step % facts.config.num_stages
        is_odd = (step // facts.config.num_stages) & 1
        mbarrier.wait(shared.v_full.index(stage), is_odd)
        v_n = shared.v.index(stage).reshape([facts.block_n, facts.block_dv])
        acc = warpgroup_mma(p_mn, v_n, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(shared.v_empty.index(stage))
        step += 1

        tile += 1
        if facts.shares_q:
            _finish(acc, row_sum, row_max, place, c, out_desc, lse, flags, shared, numbers, tensors, facts)
        n_start = next_place.hi - facts.block_n
        n_start, step, turns = _skip(gl.where(exists, num_skipped, 0), n_start, step, turns, c, shared, facts)
        s_mn = _first_scores(tile, step, turns, exists, c, shared, facts)
        if not facts.shares_q:
            _finish(acc, row_sum, row_max, place, c, out_desc, lse, flags, shared, numbers, tensors, facts)
        s_mn = warpgroup_mma_wait(0, deps=[s_mn])
        place = next_place
        ranges = next_ranges
    store_wait(0)


@jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(index), count=COUNT)
    return barriers


@jit
def _tiles(NUMBER: gl.constexpr, desc):
    shape: gl.constexpr = [NUMBER] + desc.block_shape  # noqa: RUF005  # Triton knows no starred lists
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@jit
def forward_kernel(q_desc, k_desc, v_desc, out_desc, lse, flags, numbers, tensors, facts: gl.constexpr):
    """out and lse of a call."""
    n: gl.constexpr = facts.config.num_consumers
    stages: gl.constexpr = facts.config.num_stages
    q = _tiles(n, q_desc)
    k = _tiles(stages, k_desc)
    v = _tiles(stages, v_desc)
    out = q
    if not facts.shares_q:
        out = _tiles(n, out_desc)
    shared = Shared(
        q, k, v, out, _barriers(n, 1), _barriers(n, 1), _barriers(stages, 1), _barriers(stages, n),
        _barriers(stages, 1), _barriers(stages, n), _barriers(n, 1),
    )  # fmt: skip
    mbarrier.arrive(shared.turn.index(0))
    if n == 2:
        gl.warp_specialize(
            [
                (_consume, (0, out_desc, lse, flags, shared, numbers, tensors, facts)),
                (_consume, (1, out_desc, lse, flags, shared, numbers, tensors, facts)),
                (_produce, (q_desc, k_desc, v_desc, shared, numbers, tensors, facts)),
            ],
            [4, 1],
            [facts.config.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, out_desc, lse, flags, shared, numbers, tensors, facts)),
                (_consume, (1, out_desc, lse, flags, shared, numbers, tensors, facts)),
                (_consume, (2, out_desc, lse, flags, shared, numbers, tensors, facts)),
                (_produce, (q_desc, k_desc, v_desc, shared, numbers, tensors, facts)),
            ],
            [4, 4, 1],
            [facts.config.registers, facts.config.registers, 24],
        )
