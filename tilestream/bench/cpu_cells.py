"""What ``tilestream bench cpu`` measures: its cells, and the rule that leaves some out.

The matrix is every combination of the constants below with at most `MAX_SCORES` scores (batch x heads x queries x
keys, hidden ones too) in one call: 64 heads up to 1024 tokens, 8 up to 2048, 1 up to 8192. So no call takes more than
seconds, and the whole takes minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from tilestream.bench.cases import Case, square_case
from tilestream.bench.measure import Line
from tilestream.bench.report import format_threads
from tilestream.bench.runs import Mode

__all__ = ["DTYPES", "HEADS", "HEAD_DIMS", "LENGTHS", "MAX_SCORES", "Cell", "Key", "Part", "plan", "thread_counts"]

LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
HEAD_DIMS = (64, 128)
# (batch, heads): 1, 8 and 64 independent problems.
HEADS = ((1, 1), (1, 8), (8, 8))
DTYPES = ("float32", "bfloat16", "float16")
MAX_SCORES = 1 << 26
_QUICK_LENGTHS = (128, 512, 2048)
_QUICK_DTYPES = ("float32", "bfloat16")
_DIRECTIONS: tuple[Mode, ...] = ("forward", "backward")

_MASK_TOKENS = 4096
_WINDOW_TOKENS, _WINDOW_KEYS = 8192, 512
# More than any last-level cache, and than the 300 MiB that a virtual machine may see of its host's.
_KV_BYTES = 1 << 30
_KV_TOKENS = 16384
_MEMORY_TOKENS = 32768
# Where a call is too large to be checked as it is, a smaller one stands for it.
_CHECKED_TOKENS = 1024

# ratio: against the peer; mask: against a call that sees more; decode: against the read bandwidth; call: a tiny call;
# memory: peak memory beyond inputs and results.
Part = Literal["ratio", "mask", "decode", "call", "memory"]


class Key(NamedTuple):
    """What names a cell."""

    part: str
    case: str
    mode: str
    num_threads: int


@dataclass(frozen=True)
class Cell:
    """One number: `case` in `mode` with so many threads; `wide` is what a mask is compared with."""

    part: Part
    case: Case
    mode: Mode
    num_threads: int
    wide: Case | None = None

    @classmethod
    def of_line(cls, line: Line) -> Cell:
        """The cell that `line` measured, without `wide`."""
        return cls(line["part"], Case.from_dict(line["config"]), line["mode"], line["num_threads"])

    @property
    def key(self) -> Key:
        return Key(self.part, self.case.name, self.mode, self.num_threads)

    @property
    def checked_case(self) -> Case:
        """The case whose result is compared with the oracle: itself, or a smaller one of the same kind."""
        if self.part == "decode":
            return replace(self.case, batch=1)
        if self.part == "memory":
            return replace(self.case, seqlen_q=_CHECKED_TOKENS, seqlen_k=_CHECKED_TOKENS)
        return self.case

    @property
    def uses_fma_peak(self) -> bool:
        """Whether it is compared with the peak of a core too."""
        return (
            self.part == "ratio"
            and self.num_threads == 1
            and self.case.dtype == "float32"
            and self.case.seqlen_q >= 2048
        )

    def __str__(self) -> str:
        case = self.case
        mask = "causal" if case.causal else "full"
        if case.window is not None:
            mask = f"window {(case.window[0] or 0) + 1}"
        tokens = f"{case.seqlen_k} tokens" if case.seqlen_q == case.seqlen_k else f"{case.seqlen_q} x {case.seqlen_k}"
        groups = "" if case.num_heads_q == case.num_heads_kv else f" over {case.num_heads_kv}"
        heads = f"{case.batch}x{case.num_heads_q}{groups} heads"
        return (
            f"{case.dtype} {mask} {self.mode}, {tokens}, head_dim {case.head_dim}, {heads},"
            f" {format_threads(self.num_threads)}"
        )


def thread_counts(wanted: int | None) -> tuple[int, ...]:
    """The thread counts of a run: `wanted`, or one and all that torch uses."""
    return (wanted,) if wanted is not None else tuple(dict.fromkeys((1, torch.get_num_threads())))


def plan(threads: Sequence[int], quick: bool = False) -> list[Cell]:
    """Every cell for these thread counts, or the subset of about a minute; those of one case stand together."""
    cells = []
    for part, case, modes, wide in (*_ratios(quick), *_masks(quick), *_others(quick)):
        # Memory does not depend on time, so one thread count will do, and a long call is best done by all.
        counts = (max(threads),) if part == "memory" else threads
        cells += [Cell(part, case, mode, count, wide) for count in counts for mode in modes]
    return cells


_Entry = tuple[Part, Case, tuple[Mode, ...], Case | None]


def _ratios(quick: bool) -> list[_Entry]:
    entries: list[_Entry] = []
    lengths, dtypes = (_QUICK_LENGTHS, _QUICK_DTYPES) if quick else (LENGTHS, DTYPES)
    head_dims, heads = (HEAD_DIMS[:1], HEADS[1:2]) if quick else (HEAD_DIMS, HEADS)
    for dtype, head_dim, (batch, num_heads), causal, tokens in itertools.product(
        dtypes, head_dims, heads, (False, True), lengths
    ):
        if batch * num_heads * tokens**2 <= MAX_SCORES:
            case = square_case(tokens, dtype, head_dim, causal, batch=batch, num_heads=num_heads)
            entries.append(("ratio", case, _DIRECTIONS, None))
    return entries


def _masks(quick: bool) -> list[_Entry]:
    """Causal against full, and a window against causal."""
    entries: list[_Entry] = []
    dtypes, head_dims = (DTYPES[:1], HEAD_DIMS[:1]) if quick else (DTYPES[:2], HEAD_DIMS)
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        full, causal = (square_case(_MASK_TOKENS, dtype, head_dim, is_causal) for is_causal in (False, True))
        entries.append(("mask", causal, _DIRECTIONS, full))
    for dtype in dtypes:
        causal = square_case(_WINDOW_TOKENS, dtype, HEAD_DIMS[0], causal=True)
        window = replace(causal, name=f"{causal.name}_window{_WINDOW_KEYS}", window=(_WINDOW_KEYS - 1, 0))
        entries.append(("mask", window, _DIRECTIONS, causal))
    return entries


def _others(quick: bool) -> list[_Entry]:
    entries: list[_Entry] = []
    for dtype, num_heads_kv in itertools.product(DTYPES[:1] if quick else DTYPES[:2], (2,) if quick else (2, 8)):
        entries.append(("decode", _decode(dtype, num_heads_kv), ("forward",), None))
    entries.append(("call", square_case(16, "float32", 64, causal=True, num_heads=4), ("forward",), None))
    for dtype in DTYPES[:1] if quick else DTYPES[:2]:
        entries.append(("memory", square_case(_MEMORY_TOKENS, dtype, 64, causal=True), ("both",), None))
    return entries


def _decode(dtype: str, num_heads_kv: int, head_dim: int = 128) -> Case:
    """One query of 8 heads per sequence, and enough sequences that keys and values exceed every cache."""
    sequence_bytes = 2 * _KV_TOKENS * num_heads_kv * head_dim * getattr(torch, dtype).itemsize
    batch = -(-_KV_BYTES // sequence_bytes)
    return Case(
        f"decode_{_KV_TOKENS}_kv{num_heads_kv}_b{batch}_{dtype}",
        batch=batch,
        seqlen_q=1,
        seqlen_k=_KV_TOKENS,
        num_heads_q=8,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
    )
