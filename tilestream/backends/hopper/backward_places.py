"""Which tiles of keys a program of the Hopper backward works on, and which rows see any of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.gluon_names import gl, jit
from tilestream.backends.triton.tiles import query_ranges, sequence_of

__all__ = ["KeyPlace", "OwnRows", "key_place_of", "own_rows", "phase"]


class KeyPlace(NamedTuple):
    """A tile of keys: its first key, whose it is, and the row tiles of each query head that see any of it."""

    n_start: Any
    sequence: Any  # `triton.tiles.Sequence`
    lo: Any
    hi: Any


class OwnRows(NamedTuple):
    """The row tiles of a tile of keys as a consumer sees them: PARTIAL from lo on, FULL from full_lo to full_hi, then
    PARTIAL again until hi; EMPTY before and behind. And its first key."""

    n_first: Any
    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


@jit
def phase(count, NUMBER: gl.constexpr):
    """(index, phase) of use number `count` of a ring of so many."""
    return count % NUMBER, (count // NUMBER) & 1


@jit
def key_place_of(unit, tensors, numbers, facts: gl.constexpr):
    """A tile of keys. Some KV heads at a time, so that Q, dout and dq stay in the L2 cache; longest tiles first."""
    first = unit // (numbers.num_key_tiles * numbers.num_together) * numbers.num_together
    num_together = gl.minimum(numbers.num_sides - first, numbers.num_together)
    rest = unit - first * numbers.num_key_tiles
    tile = rest // num_together
    side = first + rest - tile * num_together
    if facts.has_left and not facts.has_right:
        tile = numbers.num_key_tiles - 1 - tile
    batch = side // numbers.num_heads_kv
    head_kv = side - batch * numbers.num_heads_kv
    sequence = sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS=True)
    n_start = tile * facts.block_n
    ranges = query_ranges(n_start, sequence, facts)
    return KeyPlace(n_start, sequence, ranges.lo, ranges.hi)


@jit
def own_rows(place, c: gl.constexpr, facts: gl.constexpr):
    """`OwnRows` of consumer c."""
    of_consumer: gl.constexpr = facts.of_consumer
    n_first = place.n_start + c * 64
    ranges = query_ranges(n_first, place.sequence, of_consumer)
    lo = gl.minimum(gl.maximum(ranges.lo, place.lo), place.hi)
    hi = gl.minimum(gl.maximum(ranges.hi, lo), place.hi)
    if n_first >= place.sequence.seqlen_k:
        hi = lo
    full_lo = gl.minimum(gl.maximum(ranges.full_lo, lo), hi)
    # Keys beyond the last one would add to dq what weights of any size are times 0.
    if n_first + 64 > place.sequence.seqlen_k:
        full_lo = hi
    full_hi = gl.minimum(gl.maximum(ranges.full_hi, full_lo), hi)
    return OwnRows(n_first, lo, full_lo, full_hi, hi)
