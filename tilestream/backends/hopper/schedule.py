"""Which row tiles a program of the Hopper forward works on, one after the other, and what of them a consumer does.

Where all tiles take as long a program takes every so-manyth of them; else the producer takes the next one that nobody
has, longest first, and tells the consumers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.gluon_names import gl, jit, mbarrier
from tilestream.backends.triton.tiles import Ranges, key_ranges, locate, sequence_of

__all__ = [
    "Place",
    "fetch",
    "fetch_step",
    "first_unit",
    "following",
    "key_start",
    "next_keys",
    "num_first_partial",
    "own_keys",
    "place_of",
    "publish",
]


class Place(NamedTuple):
    """A tile: its first row, whose it is, and where its last key tile ends."""

    m_start: Any
    head: Any
    sequence: Any  # `triton.tiles.Sequence`
    hi: Any
    # With a block mask: the first of its key tiles in the lists, and how many of them, first ones, are PARTIAL.
    first: Any
    num_partial: Any


@jit
def place_of(unit, tensors, numbers, facts: gl.constexpr):
    """A row tile, and its number of steps: one at least, so that rows which see no key need no path of their own."""
    if facts.has_blocks:
        return _listed_place(unit, tensors, numbers, facts)
    else:
        return _banded_place(unit, tensors, numbers, facts)


@jit
def _listed_place(unit, tensors, numbers, facts: gl.constexpr):
    """Of a call with a block mask: what the host says (`block_lists.Lists.units`), without a division."""
    # A program asks for a tile after its last one too.
    record = tensors.units + 8 * gl.minimum(unit, numbers.num_units - 1)
    batch = gl.load(record)
    head = gl.load(record + 1)
    head_kv = gl.load(record + 2)
    m_start = gl.load(record + 3)
    first = gl.load(record + 4)
    num_partial = gl.load(record + 5)
    num_steps = gl.load(record + 6)
    sequence = sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS=False)
    return Place(m_start, head, sequence, 0, first, num_partial), num_steps


@jit
def _banded_place(unit, tensors, numbers, facts: gl.constexpr):
    """Some heads at a time, so that their K and V stay in the L2 cache; the longest tiles of these first."""
    first = unit // (numbers.num_row_tiles * numbers.num_together) * numbers.num_together
    # One at least, for what a program asks for after its last tile.
    num_together = gl.maximum(gl.minimum(numbers.num_sides - first, numbers.num_together), 1)
    rest = unit - first * numbers.num_row_tiles
    m_block = rest // num_together
    side = first + rest - m_block * num_together
    if facts.has_right:
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
    return Place(m_start, head, sequence, ranges.lo + num_steps * facts.block_n, 0, 0), num_steps


@jit
def own_keys(place, num_steps, c: gl.constexpr, facts: gl.constexpr):
    """(ranges of consumer c's rows, how many of the tile's first steps show it nothing: never all)."""
    if facts.has_blocks:
        # Of places in the lists.
        full_lo = place.first + place.num_partial
        return Ranges(place.first, full_lo, 2**30, 2**30), 0
    else:
        of_consumer: gl.constexpr = facts.of_consumer
        m_first = place.m_start + c * facts.rows
        ranges = key_ranges(m_first, place.sequence, of_consumer)
        hi = ranges.hi
        # Nobody stores the results of rows that are none.
        if m_first >= place.sequence.seqlen_q:
            hi = 0
        return ranges, gl.minimum(gl.maximum(place.hi - hi, 0) // facts.block_n, num_steps - 1)


@jit
def key_start(n_start, index, place, tensors, facts: gl.constexpr):
    """The first key of a row tile's key tile number `index`, which is at `n_start` where no lists say it."""
    if facts.has_blocks:
        return gl.load(tensors.key_starts + place.first + index)
    else:
        return n_start


@jit
def next_keys(n_start, facts: gl.constexpr):
    """The key tile after this one, as its first key or as its place in the lists."""
    if facts.has_blocks:
        return n_start + 1
    else:
        return n_start - facts.block_n


@jit
def num_first_partial(steps, ranges, facts: gl.constexpr):
    """How many key tiles, from that of `steps` on, are PARTIAL and not the last one."""
    if facts.has_blocks:
        return gl.minimum(ranges.full_lo - steps.n_start, steps.num_left)
    else:
        return gl.minimum(gl.maximum(steps.n_start - ranges.full_hi, 0) // facts.block_n, steps.num_left)


@jit
def fetch_step(num_steps, facts: gl.constexpr):
    """At which step of a row tile the producer asks for the next one."""
    if facts.has_blocks:
        # Rows may be short: not before all stages are being filled.
        return gl.minimum(facts.config.num_stages, num_steps) - 1
    else:
        return 0


@jit
def first_unit(team: gl.constexpr):
    """The first unit of a team, which is its number among all teams."""
    if team == 0:
        return gl.program_id(0)
    else:
        return gl.program_id(0) + team * gl.num_programs(0)


@jit
def fetch(unit, tensors, numbers, facts: gl.constexpr):
    """The unit that a program turns to after this one: the next that nobody has, or every so-manyth."""
    if facts.is_dynamic:
        fetched = gl.atomic_add(tensors.counter, 1, sem="relaxed")
        # Every program fetches until there are no more, so this is the last of all: ready for the next launch.
        if fetched == numbers.num_units - 1:
            gl.store(tensors.counter, 0)
        if facts.config.num_teams > 1:
            fetched += (facts.config.num_teams - 1) * gl.num_programs(0)
        return gl.num_programs(0) + fetched
    else:
        return unit + gl.num_programs(0)


@jit
def publish(unit, tile, shared, facts: gl.constexpr):
    """Tell the consumers what follows tile number `tile`."""
    if facts.is_dynamic:
        slot = tile & 1
        mbarrier.wait(shared.unit_empty.index(slot), ((tile >> 1) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        shared.unit.index(slot).store(gl.full([1], 0, gl.int32, layout) + unit)
        mbarrier.arrive(shared.unit_full.index(slot))


@jit
def following(unit, tile, shared, facts: gl.constexpr):
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
