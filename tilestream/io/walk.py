"""A small call, replayed and written down tile by tile: what an interactive drawing shows, as plain data.

Every number comes from the replays that `counters.py` counts with, over the same memory, and is checked against the
model before it is handed out: a drawing needs no arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream.io.cost import Cost
from tilestream.io.memory import FastTile, Index, TwoLevelMemory
from tilestream.io.published import BlockMatrix
from tilestream.io.replay import DenseCall
from tilestream.io.replay_schedule import schedule_backward, schedule_forward
from tilestream.io.replay_standard import standard_backward, standard_forward
from tilestream.io.schedule import TileShape, schedule_cost
from tilestream.io.standard import standard_cost
from tilestream.problem import Problem
from tilestream.tiles import classify

__all__ = ["NOT_KEPT", "Step", "Walk", "tile_kinds", "walk"]

# Of a tile that block-sparse attention leaves out.
NOT_KEPT = "NOT KEPT"
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Step:
    """After the work on one tile, or after a store, where `rows` or `keys` is None.

    `on_chip` is (name, shape, bytes) of what fast memory holds; bytes moved are those since the start, also by standard
    attention at the same share of its own work. `row_max` and `row_sum` are of query `row`, where they are on chip.
    """

    pass_name: str
    rows: tuple[int, int] | None
    keys: tuple[int, int] | None
    kind: str | None
    on_chip: tuple[tuple[str, tuple[int, ...], int], ...]
    read_bytes: int
    written_bytes: int
    standard_read_bytes: int
    standard_written_bytes: int
    row: int | None
    row_max: float | None
    row_sum: float | None


@dataclass(frozen=True)
class Walk:
    """All steps of one direction, and the models that the counters end at."""

    steps: tuple[Step, ...]
    ours: Cost
    standard: Cost

    @property
    def fast_memory_bytes(self) -> int:
        """What the tiles need at their peak."""
        return self.ours.fast_memory_bytes


@dataclass(frozen=True)
class _Note:
    """Where a replay was; `state` holds row_max and row_sum (rows, 1) where they run."""

    pass_name: str
    rows: tuple[int, int] | None
    keys: tuple[int, int] | None
    on_chip: tuple[tuple[str, tuple[int, ...], int], ...]
    state: Mapping[str, Tensor]
    moved: tuple[int, int]


class _Watched(TwoLevelMemory):
    """Notes every tile, or with `at_transfers` what has been moved at each load and store."""

    def __init__(self, at_transfers: bool = False) -> None:
        super().__init__(_UNLIMITED)
        self.at_transfers = at_transfers
        self.notes: list[_Note] = []
        self.transfers: list[tuple[int, int]] = []

    def at_tile(self, rows: slice | None, keys: slice | None, on_chip: Mapping[str, FastTile]) -> None:
        held = tuple((name, tuple(tile.data.shape), tile.num_bytes) for name, tile in on_chip.items())
        state = {name: on_chip[name].data.clone() for name in ("row_max", "row_sum") if name in on_chip and keys}
        name = self.passes()[-1].name
        self.notes.append(_Note(name, _pair(rows), _pair(keys), held, state, self._moved()))

    def load(self, name: str, index: Index) -> FastTile:
        tile = super().load(name, index)
        if self.at_transfers:
            self.transfers.append(self._moved())
        return tile

    def store(self, name: str, index: Index, tile: FastTile) -> None:
        super().store(name, index, tile)
        if self.at_transfers:
            self.transfers.append(self._moved())

    def _moved(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        moved = Cost(self.passes()).traffic
        return moved.read_bytes, moved.written_bytes


def walk(
    problem: Problem, shape: TileShape, backward: bool = False, blocks: BlockMatrix | None = None, seed: int = 0
) -> Walk:
    """Replay a call of one sequence and one head on random numbers, and note every step.

    Args:
        problem: a dense call of one head and batch 1, without dropout.
        shape: one shape of tiles for all passes.
        blocks: (row tiles, key tiles), those that are kept; standard attention computes all.

    Returns:
        Walk; its last step has moved what the models say, to the byte.

    Cost: some 0.5 ms per tile, and the score matrix.
    """
    assert problem.batch == problem.num_heads_q == 1
    assert problem.spec.dropout_p == 0
    call = _random_call(problem, seed, backward)
    ours, standard = _Watched(), _Watched(at_transfers=True)
    _replay_ours(call, ours, shape, backward, blocks)
    _replay_standard(call, standard, shape.block_m, backward)
    found = Walk(
        tuple(_steps(problem, ours.notes, standard.transfers)),
        schedule_cost(problem, shape, backward, blocks),
        standard_cost(problem, backward),
    )
    assert ours.passes() == found.ours.passes
    assert standard.passes() == found.standard.passes
    return found


def tile_kinds(problem: Problem, shape: TileShape, blocks: BlockMatrix | None = None) -> list[list[str]]:
    """The kind of every tile, a list per row of tiles: EMPTY, PARTIAL, FULL or `NOT_KEPT`."""
    assert problem.shift is not None
    band, rows = problem.spec.band, []
    for m, m_start in enumerate(range(0, problem.seqlen_q, shape.block_m)):
        m_end = min(m_start + shape.block_m, problem.seqlen_q)
        row = []
        for n, n_start in enumerate(range(0, problem.seqlen_k, shape.block_n)):
            n_end = min(n_start + shape.block_n, problem.seqlen_k)
            is_kept = blocks is None or blocks[m][n]
            kind = classify(band, problem.shift, m_start, m_end, n_start, n_end).name
            row.append(kind if is_kept else NOT_KEPT)
        rows.append(row)
    return rows


def _steps(problem: Problem, notes: Sequence[_Note], transfers: Sequence[tuple[int, int]]) -> Iterator[Step]:
    assert problem.shift is not None
    for place, note in enumerate(notes):
        kind = row = None
        if note.rows is not None and note.keys is not None:
            kind = classify(problem.spec.band, problem.shift, *note.rows, *note.keys).name
        if note.rows is not None:
            row = note.rows[1] - 1
        state = {name: float(column[-1, 0]) for name, column in note.state.items()}
        # Standard attention at the same share of its own loads and stores.
        standard = transfers[(place + 1) * len(transfers) // len(notes) - 1] if transfers else (0, 0)
        yield Step(
            note.pass_name, note.rows, note.keys, kind, note.on_chip, *note.moved, *standard,
            row, state.get("row_max"), state.get("row_sum"),
        )  # fmt: skip


def _replay_ours(
    call: DenseCall, memory: TwoLevelMemory, shape: TileShape, backward: bool, blocks: BlockMatrix | None
) -> None:
    if not backward:
        schedule_forward(call, memory, shape, blocks)
        return
    forward = schedule_forward(call, TwoLevelMemory(_UNLIMITED), shape, blocks)
    schedule_backward(call, memory, shape, forward, blocks)


def _replay_standard(call: DenseCall, memory: TwoLevelMemory, block_m: int, backward: bool) -> None:
    if not backward:
        standard_forward(call, memory, block_m)
        return
    kept = TwoLevelMemory(_UNLIMITED)
    standard_forward(call, kept, block_m)
    standard_backward(call, memory, block_m, kept)


def _random_call(problem: Problem, seed: int, backward: bool) -> DenseCall:
    """Standard normal numbers in float32."""
    generator = torch.Generator().manual_seed(seed)

    def randn(length: int, width: int) -> Tensor:
        return torch.randn(1, 1, length, width, generator=generator)

    q, k = randn(problem.seqlen_q, problem.head_dim), randn(problem.seqlen_k, problem.head_dim)
    v, dout = randn(problem.seqlen_k, problem.head_dim_v), randn(problem.seqlen_q, problem.head_dim_v)
    return DenseCall(problem, q, k, v, torch.arange(1), None, dout if backward else None)


def _pair(span: slice | None) -> tuple[int, int] | None:
    return None if span is None else (span.start, span.stop)
