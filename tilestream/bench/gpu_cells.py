"""What ``tilestream bench gpu`` measures: its cells.

Sizes are those of a model's layer, however long its sequences: every call of the parts speed and fp32 has `TOKENS`
tokens (so batch is `TOKENS` / length) of `HIDDEN` numbers (so heads are `HIDDEN` / head_dim).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilestream.bench.cases import Case, square_case
from tilestream.bench.measure import Line
from tilestream.bench.runs import Mode

__all__ = [
    "CHANGED_LENGTHS",
    "FP32_LENGTHS",
    "HEAD_DIMS",
    "HIDDEN",
    "LENGTHS",
    "PEERS",
    "TOKENS",
    "Cell",
    "Key",
    "Part",
    "plan",
]

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 4096, 16384)
FP32_LENGTHS = (1024, 4096)
HEAD_DIMS = (64, 128)
# After the first call of the part compile: half as many tokens, and a number that no power of two above 8 divides.
CHANGED_LENGTHS = (2048, 1000)
_CALL_TOKENS, _COMPILE_TOKENS = 128, 4096
_FEW_HEADS = 4

# speed, fp32: times on the device; call: the host's time of a small call; compile: the first call, and another length.
Part = Literal["speed", "fp32", "call", "compile"]
PEERS: dict[Part, tuple[str, ...]] = {
    "speed": ("flex", "sdpa/flash", "sdpa/cudnn", "sdpa"),
    "fp32": ("sdpa/efficient",),
    "call": ("sdpa",),
    "compile": (),
}
_LAYERS: tuple[tuple[Part, str, tuple[int, ...]], ...] = (
    ("speed", "bfloat16", LENGTHS),
    ("fp32", "float32", FP32_LENGTHS),
)


class Key(NamedTuple):
    """What names a cell."""

    part: str
    case: str
    mode: str
    needs_grad: bool


@dataclass(frozen=True)
class Cell:
    """One comparison: `case` in `mode`; `needs_grad` is whether the inputs of a mere forward need gradients."""

    part: Part
    case: Case
    mode: Mode
    needs_grad: bool = False

    @classmethod
    def of_line(cls, line: Line) -> Cell:
        """The cell that `line` measured."""
        return cls(line["part"], Case.from_dict(line["config"]), line["mode"], line["needs_grad"])

    @property
    def key(self) -> Key:
        return Key(self.part, self.case.name, self.mode, self.needs_grad)

    def __str__(self) -> str:
        case = self.case
        mask = "causal" if case.causal else "full"
        mode = f"{self.mode} that keeps a graph" if self.needs_grad else self.mode
        return (
            f"{case.dtype} {mask} {mode}, {case.batch}x{case.seqlen_q} tokens, head_dim {case.head_dim},"
            f" {case.num_heads_q} heads"
        )


def plan(quick: bool = False) -> list[Cell]:
    """Every cell, or the few of a quick look; those of one case stand together."""
    cells = []
    for part, dtype, lengths in _LAYERS:
        for head_dim, causal, length in itertools.product(HEAD_DIMS, (True, False), lengths):
            if not quick or (causal and length == 4096 and head_dim == (128 if part == "speed" else 64)):
                case = _layer(length, dtype, head_dim, causal)
                cells += [Cell(part, case, "forward"), Cell(part, case, "backward")]
    call = square_case(_CALL_TOKENS, "bfloat16", 64, causal=True, num_heads=_FEW_HEADS)
    cells += [Cell("call", call, "forward", needs_grad) for needs_grad in (False, True)]
    first = square_case(_COMPILE_TOKENS, "bfloat16", 64, causal=True, num_heads=_FEW_HEADS)
    cells.append(Cell("compile", first, "forward"))
    return cells if quick else [*cells, Cell("compile", first, "both")]


def _layer(length: int, dtype: str, head_dim: int, causal: bool) -> Case:
    return square_case(length, dtype, head_dim, causal, batch=TOKENS // length, num_heads=HIDDEN // head_dim)
