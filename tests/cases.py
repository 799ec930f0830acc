"""The rows of the conformance test: features with their values, and a small set of cases that covers every pair.

A `Case` is a set of facts; `tests/inputs.py` turns it into tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from masks import MASKS, mask_of

from tilestream.block_mask import BlockMask
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band, default_scale

__all__ = [
    "CASES",
    "FEATURES",
    "FEW",
    "SPARSE_CASES",
    "SPARSE_FEATURES",
    "SPARSE_FEW",
    "Case",
    "covering",
    "is_possible",
    "pairwise",
]


@dataclass(frozen=True)
class Case:
    """One conformance case. Every field is a feature; `id` names the row in reports."""

    id: str
    dtype: torch.dtype = torch.float32
    layout: str = "dense"  # or "varlen"
    lengths: tuple[int, int] = (65, 127)  # (seqlen_q, seqlen_k); of the first sequence when varlen
    batch: int = 2  # when varlen, only 0 matters: no sequences at all
    heads: tuple[int, int] = (2, 1)  # (num_heads_kv, group)
    widths: tuple[int, int] = (64, 64)  # (head_dim, head_dim_v)
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    bias: str | None = None  # which of the axes b, h, m, n are full, such as "1h1n"; with some -inf entries
    bias_dtype: str = "same"  # or "float32"
    alibi: str | None = None  # "heads" or "batch_heads"
    sinks: str | None = None  # "random" or "extreme" (-inf and very large)
    dropout_p: float = 0.0
    shift: int | None = None  # None aligns the ends
    deterministic: bool = False
    memory: str = "head_major"  # how the inputs lie in memory; see inputs.py
    dout: str = "strided"  # or "expanded": a gradient of stride 0, as sum().backward() sends
    with_dlse: bool = True
    mask: str | None = None  # of masks.py; makes it block-sparse attention

    @property
    def num_heads_q(self) -> int:
        return self.heads[0] * self.heads[1]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(seqlen_q, seqlen_k) of every sequence; varlen cases hold empty ones on either side and on both."""
        seqlen_q, seqlen_k = self.lengths
        if self.layout == "dense" or self.batch == 0:
            return [self.lengths] * self.batch
        return [self.lengths, (0, 5), (seqlen_q // 2, seqlen_k // 3 + 1), (0, 0), (3, 0), (seqlen_k // 4, seqlen_k)]

    @property
    def num_pairs(self) -> int:
        """Pairs of query and key over all heads, visible or not."""
        return self.num_heads_q * sum(seqlen_q * seqlen_k for seqlen_q, seqlen_k in self.sequences)

    @property
    def band(self) -> Band:
        return Band.from_arguments(self.causal, self.window)

    @property
    def block_mask(self) -> BlockMask | None:
        """For all of the tokens, or for the longest sequence."""
        if self.mask is None:
            return None
        longest = (max((lengths[side] for lengths in self.sequences), default=self.lengths[side]) for side in (0, 1))
        return mask_of(self.mask, *longest, max(1, len(self.sequences)), self.num_heads_q)

    def problem(self, device_type: str, is_backward: bool) -> Problem:
        """What `Backend.supports` is asked."""
        spec = AttentionSpec(
            band=self.band,
            scale=default_scale(self.widths[0]) if self.scale is None else self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            has_bias=self.bias is not None,
            has_alibi=self.alibi is not None,
            has_sinks=self.sinks is not None,
            deterministic=self.deterministic,
        )
        dense = Problem.dense(
            batch=self.batch,
            seqlen_q=self.lengths[0],
            seqlen_k=self.lengths[1],
            num_heads_q=self.num_heads_q,
            num_heads_kv=self.heads[0],
            head_dim=self.widths[0],
            head_dim_v=self.widths[1],
            dtype=self.dtype,
            device_type=device_type,
            spec=spec,
            shift=self.shift,
            is_backward=is_backward,
        )
        dense = dataclasses.replace(dense, block_mask=self.block_mask)
        if self.layout == "dense":
            return dense
        return dense.packed([m for m, _ in self.sequences], [n for _, n in self.sequences])


# One row per feature. A new feature is a new row here (and a field of Case), never a new test.
FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "layout": ("dense", "varlen"),
    "lengths": ((64, 64), (65, 127), (127, 63), (1, 1000), (1000, 1), (63, 0), (0, 65), (1, 1), (257, 64)),
    "batch": (1, 3),
    "heads": ((2, 1), (2, 3), (1, 4)),
    "widths": (
        (64, 64), (128, 128), (32, 32), (40, 40), (96, 96), (192, 128), (256, 256), (512, 512), (1, 7), (7, 1),
        (40, 64), (128, 32),
    ),
    "causal": (False, True),
    "window": (None, (0, 0), (17, 5), (None, 3), (70, None), (0, 64)),
    "scale": (None, -0.3, 0.25, 0.0),
    "softcap": (0.0, 3.0, 30.0),
    "bias": (None, "bhmn", "1hmn", "b1mn", "11mn", "bh1n", "1h1n", "b11n", "111n", "bhm1", "11m1", "1h11", "1111"),
    "bias_dtype": ("same", "float32"),
    "alibi": (None, "heads", "batch_heads"),
    "sinks": (None, "random", "extreme"),
    "dropout_p": (0.0, 0.3),
    "shift": (None, 0, -9, 21),
    "deterministic": (False, True),
    "memory": ("head_major", "packed_qkv", "odd_offset", "strided_last", "padded_tokens"),
    "dout": ("strided", "expanded"),
    "with_dlse": (True, False),
}  # fmt: skip


def is_possible(row: Mapping[str, Any]) -> bool:
    """Whether the values of a (possibly partial) row can stand together."""
    return not (row.get("layout") == "varlen" and row.get("shift") is not None)


def pairwise(features: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every possible pair of values of two features occurs; greedy and deterministic.

    Each row starts from the first uncovered pair and takes, feature by feature, the value that covers most uncovered
    pairs with the values already chosen.
    """
    names = list(features)
    uncovered = {
        (first, a, second, b): None
        for first, second in itertools.combinations(names, 2)
        for a, b in itertools.product(range(len(features[first])), range(len(features[second])))
        if is_possible({first: features[first][a], second: features[second][b]})
    }

    def values(chosen: Mapping[str, int]) -> dict[str, Any]:
        return {name: features[name][index] for name, index in chosen.items()}

    def gain(chosen: Mapping[str, int], name: str, index: int) -> int:
        pairs = (
            (other, at, name, index) if names.index(other) < names.index(name) else (name, index, other, at)
            for other, at in chosen.items()
        )
        return sum(pair in uncovered for pair in pairs)

    rows: list[dict[str, Any]] = []
    while uncovered:
        first, a, second, b = next(iter(uncovered))
        chosen = {first: a, second: b}
        # The layout first, because it limits what may follow; then the features that are hardest to cover.
        for name in sorted(set(names) - set(chosen), key=lambda name: (name != "layout", -len(features[name]), name)):
            candidates = [i for i in range(len(features[name])) if is_possible(values({**chosen, name: i}))]
            # Ties turn with the row number, so that no value is favoured where pairs are already covered.
            turn = len(rows) % len(candidates)
            candidates = candidates[turn:] + candidates[:turn]
            chosen[name] = max(candidates, key=lambda index, name=name: gain(chosen, name, index))  # type: ignore[misc]
        for one, two in itertools.combinations(names, 2):
            uncovered.pop((one, chosen[one], two, chosen[two]), None)
        rows.append({name: values(chosen)[name] for name in names})
    return rows


# Shapes that no pair of features would make: nothing at all, and long enough for many tiles of every kind.
_SHAPES = (
    Case("no_batch", batch=0),
    Case("no_tokens", lengths=(0, 0)),
    Case("no_sequences", layout="varlen", batch=0, bias="1hmn"),
    Case("long_causal", dtype=torch.bfloat16, lengths=(1000, 1000), batch=1, heads=(1, 2), causal=True),
    Case("long_window", dtype=torch.float16, lengths=(1000, 1000), batch=1, heads=(1, 2), window=(130, 0)),
    Case("long_void_rows", lengths=(1000, 127), batch=1, heads=(2, 1), causal=True, bias="11mn"),
    Case("long_beyond_keys", lengths=(127, 1000), batch=1, heads=(1, 1), window=(60, 60), shift=900),
    Case("long_varlen", dtype=torch.bfloat16, layout="varlen", lengths=(1000, 1000), heads=(1, 2), causal=True),
    Case("prime_lengths", lengths=(257, 509), batch=1, heads=(1, 3), widths=(64, 40), softcap=8.0, causal=True),
)  # fmt: skip

# Block-sparse attention: the masks against everything, with fewer values of what has no part in masks.
SPARSE_FEATURES: dict[str, tuple[Any, ...]] = {
    **FEATURES,
    "mask": MASKS,
    "lengths": ((65, 127), (127, 63), (1, 100), (100, 1), (63, 0), (0, 65), (257, 64), (130, 300)),
    "widths": ((64, 64), (40, 24), (1, 7)),
    "window": (None, (17, 5), (0, 64)),
    "scale": (None, -0.3),
    "softcap": (0.0, 3.0),
    "bias": (None, "bhmn", "1h1n", "b1m1"),
    "memory": ("head_major", "strided_last", "padded_tokens"),
}

CASES = [Case(f"pair{number:03d}", **row) for number, row in enumerate(pairwise(FEATURES))] + list(_SHAPES)


SPARSE_CASES = [Case(f"sparse{number:03d}", **row) for number, row in enumerate(pairwise(SPARSE_FEATURES))] + [
    Case("sparse_no_batch", batch=0, mask="butterfly"),
    Case("sparse_no_sequences", layout="varlen", batch=0, mask="window"),
    Case("sparse_long", dtype=torch.bfloat16, lengths=(1000, 1000), batch=1, heads=(1, 2), mask="bigbird", causal=True),
    Case("sparse_long_v1", dtype=torch.float16, lengths=(1000, 1000), batch=2, heads=(2, 1), mask="v1"),
    Case("sparse_large_blocks", lengths=(1000, 600), batch=1, heads=(1, 2), mask="large_blocks", causal=True),
]


def covering(cases: Sequence[Case], features: Mapping[str, Sequence[Any]], num_pairs: int) -> list[Case]:
    """Few of `cases` in which every value of every feature occurs that does in any.

    Greedy; where two tie, the one whose size is nearer to `num_pairs`.
    """
    found = {case: {(name, getattr(case, name)) for name in features} for case in cases}
    missing = set().union(*found.values())
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: (len(found[case] & missing), -abs(case.num_pairs - num_pairs))))
        missing -= found[chosen[-1]]
    return chosen


# For a target that has no time for all, and no float64.
FEW = covering([case for case in CASES if case.dtype != torch.float64 and case.num_pairs < 10**5], FEATURES, 30_000)
SPARSE_FEW = covering(
    [case for case in SPARSE_CASES if case.dtype != torch.float64 and case.num_pairs < 10**5], SPARSE_FEATURES, 20_000
)
