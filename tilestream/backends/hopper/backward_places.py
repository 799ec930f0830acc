"""Which tiles of keys a program of the Hopper backward works on, which rows see any of them, and which pairs do."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.gluon_names import gl, jit
from tilestream.backends.triton.tiles import query_ranges, sequence_of

__all__ = [
    "KeyPlace",
    "ListedRows",
    "OwnRows",
    "key_place_of",
    "listed_rows",
    "masked",
    "own_rows",
    "phase",
    "row_start",
    "rows_of",
]


class KeyPlace(NamedTuple):
    """A tile of keys: its first key, whose it is, and the row tiles of each query head that see any of it."""

    n_start: Any
    sequence: Any  # `triton.tiles.Sequence`
    lo: Any
    hi: Any


class ListedRows(NamedTuple):
    """With a block mask: places in the lists of the row tiles of one query head, PARTIAL ones first."""

    lo: Any
    full_lo: Any
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
    """A tile of keys."""
    if facts.has_blocks:
        record = tensors.units + 4 * unit
        batch = gl.load(record)
        head_kv = gl.load(record + 1)
        n_start = gl.load(record + 2)
        return KeyPlace(n_start, sequence_of(batch, head_kv, tensors, numbers, facts, BY_KEYS=True), 0, 0)
    else:
        return _banded_place(unit, tensors, numbers, facts)


@jit
def _banded_place(unit, tensors, numbers, facts: gl.constexpr):
    """Some KV heads at a time, so that Q, dout and dq stay in the L2 cache; longest tiles first."""
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
def listed_rows(index, place, tensors, numbers, facts: gl.constexpr):
    """`ListedRows` of the query head `index` of a group."""
    head = (place.sequence.batch * numbers.num_heads_kv + place.sequence.head_kv) * numbers.group + index
    record = tensors.lists + 4 * (head * numbers.num_key_tiles + place.n_start // facts.block_n)
    lo = gl.load(record)
    return ListedRows(lo, lo + gl.load(record + 1), lo + gl.load(record + 2))


@jit
def rows_of(index, place, tensors, numbers, facts: gl.constexpr):
    """(from, until) of the row tiles of a query head: their first rows, or with a block mask their places in lists."""
    if facts.has_blocks:
        rows = listed_rows(index, place, tensors, numbers, facts)
        return rows.lo, rows.hi
    else:
        return place.lo, place.hi


@jit
def row_start(at, tensors, facts: gl.constexpr):
    """The first row of one of `rows_of`."""
    if facts.has_blocks:
        return gl.load(tensors.row_tiles + at) * facts.block_m
    else:
        return at


@jit
def own_rows(place, c: gl.constexpr, facts: gl.constexpr):
    """`OwnRows` of consumer c; with a block mask, whose bits know of them, its first key alone."""
    if facts.has_blocks:
        return OwnRows(place.n_start + c * 64, 0, 0, 0, 0)
    else:
        return _banded_rows(place, c, facts)


@jit
def _banded_rows(place, c: gl.constexpr, facts: gl.constexpr):
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


@jit
def _visible(m_start, n_first, sequence, s_nm, facts: gl.constexpr):
    """Which pairs of a PARTIAL tile are visible: query 8 a + 2 b + c is one of lane b, at a place that follows from a
    and c, which are constants of the instructions (`score.py`)."""
    eighths: gl.constexpr = facts.block_m // 8
    wide = s_nm.reshape([64, eighths, 4, 2])
    layout: gl.constexpr = wide.type.layout
    a = gl.arange(0, eighths, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    b = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    c = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    j = n_first + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    i = 8 * a[None, :, None, None] + c[None, None, None, :]
    start = m_start + 2 * b[None, None, :, None]
    # No query is beyond 2**30.
    first = gl.where(j < sequence.seqlen_k, 0, 2**30)
    if facts.has_right:
        first = gl.maximum(first, j - sequence.right_edge)
    visible = i >= first[:, None, None, None] - start
    if facts.has_left:
        visible = visible & (i <= (j - sequence.left_edge)[:, None, None, None] - start)
    return wide, visible


@jit
def _shown(at, n_first, s_nm, tensors, facts: gl.constexpr):
    """`_visible`, of the bits at a place in the lists: a thread has the words of its keys, and of query
    32 w + 8 a + 2 b + c a bit that is a constant after a shift by 2 b (`score.py`)."""
    num_words: gl.constexpr = facts.block_m // 32
    wide = s_nm.reshape([64, num_words, 4, 4, 2])
    layout: gl.constexpr = wide.type.layout
    words_layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))
    a_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
    b_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout))))
    c_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    w = gl.arange(0, num_words, layout=gl.SliceLayout(0, words_layout))
    n = n_first % facts.block_n + gl.arange(0, 64, layout=gl.SliceLayout(1, words_layout))
    a = gl.arange(0, 4, layout=a_layout)[None, None, :, None, None]
    b = gl.arange(0, 4, layout=b_layout)[None, None, None, :, None]
    c = gl.arange(0, 2, layout=c_layout)[None, None, None, None, :]
    bits = tensors.bits + gl.load(tensors.patterns + at).to(gl.int64) * (facts.block_n * num_words)
    words = gl.load(bits + (n[:, None] * num_words + w[None, :]))
    return wide, ((words[:, :, None, None, None] >> (2 * b)) & (1 << (8 * a + c))) != 0


@jit
def masked(s_nm, m_start, n_first, sequence, tensors, facts: gl.constexpr):
    """Dot products with -inf where a pair is not visible; with a block mask `m_start` is a place in the lists."""
    if facts.has_blocks:
        wide, visible = _shown(m_start, n_first, s_nm, tensors, facts)
    else:
        wide, visible = _visible(m_start, n_first, sequence, s_nm, facts)
    wide = gl.where(visible, wide, float("-inf"))
    return gl.convert_layout(wide.reshape(s_nm.shape), s_nm.type.layout)
