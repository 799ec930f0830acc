"""Where tiles of rows and keys lie in memory, for TMA, and numbers of rows in lse and its kin.

A packed tensor is described to TMA so that what it reads beyond a sequence is 0, and what it would write there is not
written: no kernel needs a path for tiles that a sequence cuts short, and nothing of a neighbour gets in. TMA checks
against the end of a dimension, which the end of a sequence is not; but addresses wrap at 2**64. Token t of a sequence
of n tokens up to token e is x = 2**30 - n + t in a dimension of size 2**30, which ends where the sequence does. Two
more dimensions, whose steps are -s and s for the step s of x, take the address back to where it belongs, at 2**30 and
at e: (e - 2**30 + x) s = (e - n + t) s. The step -s is 2**34 - s, which TMA takes, and 2**34 times 2**30 is 0 where
addresses wrap. (`call.packed_layout` makes it so; the idea is that of `triton.tools.ragged_tma`.)
"""

from __future__ import annotations

from tilestream.backends.hopper.gluon_names import gl, jit

__all__ = ["key_place", "numbers_at", "row_place"]


@jit
def _place(token, start, length, head, sequence, facts: gl.constexpr):
    """Coordinates of a tile of tokens of one head, of a sequence that starts at `start`."""
    if facts.is_varlen:
        return [2**30, start + length, 2**30 - length + token, head, 0]
    else:
        return [sequence.batch, token, head, 0]


@jit
def row_place(m_start, head, sequence, facts: gl.constexpr):
    """Coordinates of the queries from `m_start` on."""
    return _place(m_start, sequence.q_start, sequence.seqlen_q, head, sequence, facts)


@jit
def key_place(n_start, sequence, facts: gl.constexpr):
    """Coordinates of the keys from `n_start` on."""
    return _place(n_start, sequence.k_start, sequence.seqlen_k, sequence.head_kv, sequence, facts)


@jit
def numbers_at(i, head, sequence, numbers, facts: gl.constexpr):
    """Offsets of queries in lse and its kin: (batch, heads, seqlen_q), or (heads, total_q)."""
    if facts.is_varlen:
        return head.to(gl.int64) * numbers.total_q + sequence.q_start + i
    else:
        return (sequence.batch * numbers.num_heads + head).to(gl.int64) * numbers.seqlen_q + i
