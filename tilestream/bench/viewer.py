"""The tile viewer's data: walks over the tiles of one small call, for every choice that its reader has."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

from tilestream.io.published import BlockMatrix
from tilestream.io.schedule import TileShape
from tilestream.io.walk import Step, Walk, tile_kinds, walk
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band, default_scale

__all__ = ["BLOCK_SIZES", "DIRECTIONS", "HEAD_DIM", "MASKS", "TOKENS", "Mask", "kept_blocks", "viewer_data"]

TOKENS, HEAD_DIM = 64, 16
BLOCK_SIZES = (8, 16, 32)
DIRECTIONS = ("forward", "backward")


class Mask(NamedTuple):
    """What hides keys: a band, as the options of the command line say it, or blocks."""

    label: str
    band: Band
    options: str
    is_sparse: bool = False


MASKS = {
    "full": Mask("none: every query sees every key", Band(), ""),
    "causal": Mask("causal", Band(None, 0), " --causal"),
    "window": Mask("window of 16 keys, causal", Band(15, 0), " --causal --window 15 0"),
    "sparse": Mask("block-sparse", Band(), " --blocks blocks.json", is_sparse=True),
}


@functools.cache
def viewer_data() -> dict[str, Any]:
    """All walks, JSON-able; made once.

    ``walks`` has an entry per direction, mask and tile size, named as ``direction/mask/block_m/block_n``. A step there
    is a list: pass, first row and the one after the last, keys likewise (-1: a store, of no rows or keys), kind (-1:
    none), what is on chip, bytes read and written, those of standard attention, the row of the running state, its
    row_max and row_sum (null: none run). Passes, kinds and what is on chip are places in the lists beside it.
    """
    walks = {}
    for direction, (name, mask), block_m, block_n in itertools.product(
        DIRECTIONS, MASKS.items(), BLOCK_SIZES, BLOCK_SIZES
    ):
        problem, shape = _problem(mask), TileShape(block_m, block_n)
        blocks = kept_blocks(block_m, block_n) if mask.is_sparse else None
        found = walk(problem, shape, direction == "backward", blocks)
        walks[f"{direction}/{name}/{block_m}/{block_n}"] = {
            **_packed(found),
            "tile_kinds": tile_kinds(problem, shape, blocks),
            "blocks": None if blocks is None else [[int(kept) for kept in row] for row in blocks],
            "command": (
                f"tilestream traffic --seqlen {TOKENS} --heads 1 --head-dim {HEAD_DIM}{mask.options} --{direction}"
                f" --block-m {block_m} --block-n {block_n}"
            ),
        }
    return {
        "tokens": TOKENS,
        "head_dim": HEAD_DIM,
        "directions": list(DIRECTIONS),
        "masks": {name: mask.label for name, mask in MASKS.items()},
        "block_sizes": list(BLOCK_SIZES),
        "walks": walks,
    }


def kept_blocks(block_m: int, block_n: int) -> BlockMatrix:
    """The first keys, the diagonal, and every third block: what sparse patterns are made of."""
    rows, columns = TOKENS // block_m, TOKENS // block_n
    return [
        [
            n == 0 or (m + 2 * n) % 3 == 0 or (n * block_n < (m + 1) * block_m and m * block_m < (n + 1) * block_n)
            for n in range(columns)
        ]
        for m in range(rows)
    ]


def _problem(mask: Mask) -> Problem:
    spec = AttentionSpec(band=mask.band, scale=default_scale(HEAD_DIM))
    return Problem.dense(seqlen_q=TOKENS, num_heads_q=1, head_dim=HEAD_DIM, spec=spec)


def _packed(found: Walk) -> dict[str, Any]:
    """A walk as short lists; names and what is on chip stand once."""
    passes = list(dict.fromkeys(step.pass_name for step in found.steps))
    kinds = list(dict.fromkeys(step.kind for step in found.steps if step.kind is not None))
    on_chip = list(dict.fromkeys(step.on_chip for step in found.steps))
    ours, standard = found.ours.traffic, found.standard.traffic
    return {
        "passes": passes,
        "kinds": kinds,
        "on_chip": on_chip,
        "steps": [_step(step, passes, kinds, on_chip) for step in found.steps],
        "fast_memory_bytes": found.fast_memory_bytes,
        "ours": [ours.read_bytes, ours.written_bytes],
        "standard": [standard.read_bytes, standard.written_bytes],
    }


def _step(step: Step, passes: list[str], kinds: list[str], on_chip: list[Any]) -> list[Any]:
    return [
        passes.index(step.pass_name), *(step.rows or (-1, -1)), *(step.keys or (-1, -1)),
        -1 if step.kind is None else kinds.index(step.kind), on_chip.index(step.on_chip),
        step.read_bytes, step.written_bytes, step.standard_read_bytes, step.standard_written_bytes,
        -1 if step.row is None else step.row, _short(step.row_max), _short(step.row_sum),
    ]  # fmt: skip


def _short(number: float | None) -> float | str | None:
    """Four digits; JSON has no infinities, which are a row's maximum before it has seen a key."""
    if number is None:
        return None
    return float(f"{number:.4g}") if math.isfinite(number) else "-inf"
