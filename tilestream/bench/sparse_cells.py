"""What ``tilestream bench block-sparse`` measures: its cells, and which of its parts they are of.

density: random blocks, as many in every row and every column, of a layer of 16k tokens. butterfly: the pattern of
FlashAttention's long-range measurements (arXiv:2205.14135), at 64k. patterns: others, beside the dense call that shows
the same pairs if there is one. traffic: bytes that calls move through HBM. cpu: the densities, on a processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from tilestream.bench.block_masks import DENSITIES, kept_name
from tilestream.bench.cases import Case, square_case
from tilestream.bench.gpu_cells import HIDDEN, TOKENS, Cell, Part
from tilestream.bench.runs import Mode

__all__ = ["GPU_PARTS", "SPARSE_PARTS", "SparsePart", "sparse_plan"]

SparsePart = Literal["density", "butterfly", "patterns", "traffic", "cpu"]
SPARSE_PARTS: tuple[SparsePart, ...] = get_args(SparsePart)
GPU_PARTS: tuple[SparsePart, ...] = ("density", "butterfly", "patterns", "traffic")
_CPU_TOKENS = 8192
_HEAD_DIMS = (64, 128)
_DIRECTIONS: tuple[Mode, ...] = ("forward", "backward")
_BUTTERFLY_TOKENS, _BUTTERFLY_HEADS = 65536, 16
_PATTERNS = ("causal", "window", "documents", "local_global", "strided")
# One in so many blocks.
_TRAFFIC: tuple[tuple[int, Mode], ...] = ((8, "forward"), (8, "both"), (2, "both"))
_QUICK_DENSITY = 8


def sparse_plan(parts: Sequence[SparsePart] = GPU_PARTS, quick: bool = False) -> list[Cell]:
    """The cells of these parts; of a quick look fewer. Those of one case stand together."""
    return [cell for part in parts for cell in _of_part(part, quick)]


def _of_part(part: SparsePart, quick: bool) -> list[Cell]:
    densities = (_QUICK_DENSITY,) if quick else DENSITIES
    if part == "density":
        layers = itertools.product((_HEAD_DIMS[-1],) if quick else _HEAD_DIMS, densities)
        cases = [_layer(head_dim, kept_name(one_in)) for head_dim, one_in in layers]
        return _cells("sparse-density", cases, _DIRECTIONS)
    if part == "butterfly":
        long = square_case(_BUTTERFLY_TOKENS, "bfloat16", 64, causal=False, num_heads=_BUTTERFLY_HEADS)
        return _cells("sparse-butterfly", [_masked(long, "butterfly")], ("both",))
    if part == "patterns":
        cases = [_layer(_HEAD_DIMS[-1], name) for name in (_PATTERNS[1:2] if quick else _PATTERNS)]
        return _cells("sparse-patterns", cases, _DIRECTIONS)
    if part == "traffic":
        wanted = _TRAFFIC[:1] if quick else _TRAFFIC
        return [Cell("sparse-traffic", _layer(_HEAD_DIMS[-1], kept_name(one_in)), mode) for one_in, mode in wanted]
    small = square_case(_CPU_TOKENS, "float32", 64, causal=False, num_heads=2)
    return _cells("sparse-cpu", [_masked(small, kept_name(one_in)) for one_in in densities], _DIRECTIONS)


def _layer(head_dim: int, mask: str) -> Case:
    return _masked(square_case(TOKENS, "bfloat16", head_dim, causal=False, num_heads=HIDDEN // head_dim), mask)


def _masked(case: Case, mask: str) -> Case:
    return replace(case, name=case.name.replace("full", mask, 1), mask=mask)


def _cells(part: Part, cases: Sequence[Case], modes: Sequence[Mode]) -> list[Cell]:
    return [Cell(part, case, mode) for case, mode in itertools.product(cases, modes)]
