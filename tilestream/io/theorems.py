"""What arXiv:2205.14135 proves about memory traffic, as functions that a test can check a count against.

Everything here counts numbers (elements), not bytes, of one head with head_dim_v = head_dim, as the paper does: N rows
and keys, d head_dim, M numbers of fast memory with d <= M <= N d. The paper says Theta; the constants are ours, proved
in docs/memory-traffic.md for the algorithms as `standard.py` and `published.py` count them.
"""

from __future__ import annotations

from typing import NamedTuple

from tilestream.errors import ArgumentError

__all__ = [
    "OptimalRange",
    "Theta",
    "lower_bound_elements",
    "optimal_range",
    "proposition_4_block_sparse",
    "theorem_2_standard",
    "theorem_2_tiled",
    "theorem_5_standard",
    "theorem_5_tiled",
]


class Theta(NamedTuple):
    """A term, and between which multiples of it the elements that an algorithm moves lie."""

    elements: float
    at_least: float
    at_most: float

    def holds(self, moved_elements: int) -> bool:
        """Whether `moved_elements` lies between those multiples."""
        return self.at_least * self.elements <= moved_elements <= self.at_most * self.elements


class OptimalRange(NamedTuple):
    """Sizes of fast memory, in elements.

    From `least` to `most` no exact algorithm can beat the tiled one everywhere by more than a constant (Proposition 3).
    From `each_from` on none can at any single M (arXiv:2402.07443; below it another one is better). At `most` the
    tiled one moves what is compulsory, times a constant, and beyond nothing is to be gained.
    """

    least: int
    each_from: int
    most: int


def theorem_2_standard(seqlen: int, head_dim: int) -> Theta:
    """Forward of standard attention: Theta(N d + N^2). Exactly 4 (N d + N^2) without mask and dropout."""
    return Theta(seqlen * head_dim + seqlen**2, 4, 4)


def theorem_2_tiled(seqlen: int, head_dim: int, fast_memory_elements: int) -> Theta:
    """Forward of algorithm 1: Theta(N^2 d^2 / M).

    Raises:
        ArgumentError: M is not in [d, N d].
    """
    return Theta(_tiled_term(seqlen, head_dim, fast_memory_elements), 2.4, 40)


def theorem_5_standard(seqlen: int, head_dim: int) -> Theta:
    """Backward of standard attention: Theta(N d + N^2). Exactly 8 N d + 7 N^2 without dropout."""
    return Theta(seqlen * head_dim + seqlen**2, 7, 8)


def theorem_5_tiled(seqlen: int, head_dim: int, fast_memory_elements: int) -> Theta:
    """Backward of algorithm 4: Theta(N^2 d^2 / M). Raises as `theorem_2_tiled`."""
    return Theta(_tiled_term(seqlen, head_dim, fast_memory_elements), 4, 42)


def proposition_4_block_sparse(seqlen: int, head_dim: int, fast_memory_elements: int, kept_fraction: float) -> Theta:
    """Forward of algorithm 5: Theta(N d + N^2 d^2 / M s), s the kept fraction of equal blocks.

    Raises:
        ArgumentError: as `theorem_2_tiled`, or s is not in [0, 1].
    """
    if not 0 <= kept_fraction <= 1:
        raise ArgumentError(f"kept_fraction must lie in [0, 1], got {kept_fraction}.")
    tiled = _tiled_term(seqlen, head_dim, fast_memory_elements)
    return Theta(seqlen * head_dim + tiled * kept_fraction, 2.4, 28)


def lower_bound_elements(seqlen: int, head_dim: int) -> int:
    """What every exact algorithm moves with any M: q, k, v read and out written, 4 N d.

    Proposition 3 follows: at M = N d the term N^2 d^2 / M is N d, so o(N^2 d^2 / M) for all M would be less than this.
    """
    return 4 * seqlen * head_dim


def optimal_range(seqlen: int, head_dim: int) -> OptimalRange:
    """Over which M the tiled algorithm is optimal, up to a constant; see `OptimalRange`.

    Raises:
        ArgumentError: there is no row.
    """
    if seqlen < 1 or head_dim < 1:
        raise ArgumentError(f"seqlen and head_dim must be at least 1, got {seqlen} and {head_dim}.")
    most = seqlen * head_dim
    return OptimalRange(head_dim, min(head_dim**2, most), most)


def _tiled_term(seqlen: int, head_dim: int, fast_memory_elements: int) -> float:
    if not head_dim <= fast_memory_elements <= seqlen * head_dim:
        raise ArgumentError(
            f"the theorems are about head_dim <= M <= seqlen * head_dim, {head_dim} to {seqlen * head_dim} elements,"
            f" got {fast_memory_elements}."
        )
    return (seqlen * head_dim) ** 2 / fast_memory_elements
