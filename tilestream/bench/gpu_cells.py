"""What ``tilestream bench gpu``, ``bench hopper`` and ``bench traffic`` measure: their cells.

Sizes are those of a model's layer, however long its sequences: every call of the parts speed, fp32, hopper and
hopper-backward has `TOKENS` tokens (so batch is `TOKENS` / length) of `HIDDEN` numbers (so heads are `HIDDEN` /
head_dim). The part hopper also has GPT-2 medium as FlashAttention's paper measured it (arXiv:2205.14135), the part
hopper-training has nothing else, and the part traffic starts there. The cells of the suite block-sparse are those of
`sparse_cells`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from tilestream.bench.cases import Case, square_case
from tilestream.bench.measure import Line
from tilestream.bench.runs import Mode

__all__ = [
    "CHANGED_LENGTHS",
    "DENSE",
    "FP32_LENGTHS",
    "HEAD_DIMS",
    "HIDDEN",
    "HOPPER_DIRECTIONS",
    "HOPPER_HEAD_DIMS",
    "LENGTHS",
    "PAPER_DROPOUT",
    "PEERS",
    "TOKENS",
    "TRAINED",
    "TRAINED_WITH_DROPOUT",
    "Cell",
    "HopperDirection",
    "Key",
    "Part",
    "Suite",
    "hopper_plan",
    "plan",
    "traffic_plan",
]

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 4096, 16384)
FP32_LENGTHS = (1024, 4096)
HEAD_DIMS = (64, 128)
HOPPER_HEAD_DIMS = (64, 128, 256)
# After the first call of the part compile: half as many tokens, and a number that no power of two above 8 divides.
CHANGED_LENGTHS = (2048, 1000)
_CALL_TOKENS, _COMPILE_TOKENS = 128, 4096
_FEW_HEADS = 4

# speed, fp32, hopper and its kin: times on the device; call: the host's time of a small call; compile: the first call,
# and another length; traffic: bytes that a forward moves through HBM; training: those of forward and backward, of
# several. Of the suite hopper the part of that name is the forward, hopper-training forward and backward in one.
Part = Literal[
    "speed", "fp32", "call", "compile", "hopper", "hopper-backward", "hopper-training", "traffic", "training",
    "sparse-density", "sparse-butterfly", "sparse-patterns", "sparse-traffic", "sparse-cpu",
]  # fmt: skip
Suite = Literal["gpu", "hopper", "traffic", "block-sparse"]
# The peer that is ourselves without the block mask.
DENSE = "dense"
# What of the suite hopper can be measured alone.
HopperDirection = Literal["forward", "backward"]
HOPPER_DIRECTIONS: tuple[HopperDirection, ...] = get_args(HopperDirection)
_WITH_BACKWARD = ("fa4", "sdpa/cudnn", "sdpa/flash")
_OF_MASKS = (DENSE, "tilestream/hopper", "tilestream/triton", "flex")
PEERS: dict[Part, tuple[str, ...]] = {
    "speed": ("flex", "sdpa/flash", "sdpa/cudnn", "sdpa"),
    "fp32": ("sdpa/efficient",),
    "call": ("sdpa",),
    "compile": (),
    "hopper": ("fa3", *_WITH_BACKWARD),
    "hopper-backward": _WITH_BACKWARD,
    "hopper-training": (*_WITH_BACKWARD, "materialised"),
    "traffic": (),
    "training": (),
    "sparse-density": _OF_MASKS,
    "sparse-butterfly": _OF_MASKS,
    "sparse-patterns": (DENSE, "flex"),
    "sparse-traffic": (),
    "sparse-cpu": (DENSE,),
}
# Whose forward and backward the part training measures. Dropout of sdpa cannot be checked; Hopper's kernels have none.
TRAINED = ("tilestream/hopper", "tilestream/triton", "eager", "sdpa/flash")
TRAINED_WITH_DROPOUT = ("tilestream/triton", "eager")
PAPER_DROPOUT = 0.1
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
    provider: str | None = None


@dataclass(frozen=True)
class Cell:
    """One comparison: `case` in `mode`; `needs_grad` is whether the inputs of a mere forward need gradients.

    `provider` is whom the cell is about, where that is not the suite's choice.
    """

    part: Part
    case: Case
    mode: Mode
    needs_grad: bool = False
    provider: str | None = None

    @classmethod
    def of_line(cls, line: Line) -> Cell:
        """The cell that `line` measured."""
        provider = line["provider"] if line["part"] == "training" else None
        return cls(line["part"], Case.from_dict(line["config"]), line["mode"], line["needs_grad"], provider)

    @property
    def key(self) -> Key:
        return Key(self.part, self.case.name, self.mode, self.needs_grad, self.provider)

    @property
    def suite(self) -> Suite:
        if self.part in ("traffic", "training"):
            return "traffic"
        if self.part.startswith("sparse"):
            return "block-sparse"
        return "hopper" if self.part.startswith("hopper") else "gpu"

    @property
    def is_layer(self) -> bool:
        """Whether it has the sizes that the parts share, and is not GPT-2 medium."""
        return (self.case.batch * self.case.seqlen_q, self.case.num_heads_q * self.case.head_dim) == (TOKENS, HIDDEN)

    def __str__(self) -> str:
        case = self.case
        mask = case.mask or ("causal" if case.causal else "full")
        mode = "forward and backward" if self.mode == "both" else f"{self.mode}"
        if self.needs_grad:
            mode += " that keeps a graph"
        dropout = f", dropout {case.dropout_p}" if case.dropout_p else ""
        return (
            f"{case.dtype} {mask} {mode}, {case.batch}x{case.seqlen_q} tokens, head_dim {case.head_dim},"
            f" {case.num_heads_q} heads{dropout}"
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


def hopper_plan(quick: bool = False, directions: Sequence[HopperDirection] = HOPPER_DIRECTIONS) -> list[Cell]:
    """Against every public kernel: forwards, then backwards alone and training steps of GPT-2.

    A quick look has one cell of each head dimension, and one of GPT-2, in each direction.
    """
    layers = [
        _layer(length, "bfloat16", head_dim, causal)
        for head_dim, causal, length in itertools.product(HOPPER_HEAD_DIMS, (False, True), LENGTHS)
        if not quick or (causal and length == 4096)
    ]
    cells = []
    if "forward" in directions:
        cells += [Cell("hopper", case, "forward") for case in (*layers, *_gpt2_medium(quick))]
    if "backward" in directions:
        cells += [Cell("hopper-backward", case, "backward") for case in layers]
        cells += [Cell("hopper-training", case, "both") for case in _gpt2_medium(quick)]
    return cells


def traffic_plan(quick: bool = False) -> list[Cell]:
    """Forwards of GPT-2 medium, then long ones, whose keys and values are read again and again, from whatever cache."""
    cases = _gpt2_medium(quick)
    if not quick:
        cases += [
            _layer(LENGTHS[-1], "bfloat16", head_dim, causal)
            for head_dim, causal in itertools.product(HOPPER_HEAD_DIMS, (False, True))
        ]
    return [*(Cell("traffic", case, "forward") for case in cases), *_training_plan(quick)]


def _training_plan(quick: bool) -> list[Cell]:
    """Forward and backward of GPT-2 medium: as the paper measured it, with dropout, and kernels without."""
    [dropped] = [replace(case, name=f"{case.name}_dropout", dropout_p=PAPER_DROPOUT) for case in _gpt2_medium(True)]
    pairs = [(case, name) for case in _gpt2_medium(quick) for name in TRAINED]
    pairs += [(dropped, name) for name in TRAINED_WITH_DROPOUT]
    return [Cell("training", case, "both", provider=name) for case, name in pairs]


def _gpt2_medium(quick: bool) -> list[Case]:
    masks = (True,) if quick else (False, True)
    return [square_case(1024, "float16", 64, causal, batch=64, num_heads=16) for causal in masks]


def _layer(length: int, dtype: str, head_dim: int, causal: bool) -> Case:
    return square_case(length, dtype, head_dim, causal, batch=TOKENS // length, num_heads=HIDDEN // head_dim)
