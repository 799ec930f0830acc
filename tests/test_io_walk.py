"""Walks over tiles: every tile that is visited is a step, counters never fall, and the last step is the model."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tilestream import reference
from tilestream.io.published import BlockMatrix
from tilestream.io.schedule import TileShape, schedule_cost
from tilestream.io.standard import standard_cost
from tilestream.io.walk import NOT_KEPT, _random_call, tile_kinds, walk
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

BANDS = (Band(), Band(None, 0), Band(9, 2))
SHAPES = (TileShape(8, 8), TileShape(16, 8), TileShape(5, 32))
CHECKERED = [[(m + n) % 2 == 0 for n in range(4)] for m in range(3)]


def call(band: Band = BANDS[1], seqlen_q: int = 24, seqlen_k: int = 32) -> Problem:
    spec = AttentionSpec(band=band, scale=0.5)
    return Problem.dense(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=1, head_dim=4, head_dim_v=6, spec=spec)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_last_step_is_the_model(band: Band, shape: TileShape, backward: bool) -> None:
    found = walk(call(band), shape, backward)
    assert found.ours == schedule_cost(call(band), shape, backward)
    assert found.standard == standard_cost(call(band), backward)
    last = found.steps[-1]
    assert (last.read_bytes, last.written_bytes) == tuple(vars(found.ours.traffic).values())
    assert (last.standard_read_bytes, last.standard_written_bytes) == tuple(vars(found.standard.traffic).values())
    for before, after in itertools.pairwise(found.steps):
        assert before.read_bytes <= after.read_bytes
        assert before.written_bytes <= after.written_bytes
        assert before.standard_read_bytes <= after.standard_read_bytes
        assert before.standard_written_bytes <= after.standard_written_bytes
    assert all(sum(held[2] for held in step.on_chip) <= found.fast_memory_bytes for step in found.steps)
    assert max(sum(held[2] for held in step.on_chip) for step in found.steps) > found.fast_memory_bytes / 2


@pytest.mark.parametrize("blocks", [None, CHECKERED])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_tile_that_counts_is_visited_once(band: Band, blocks: BlockMatrix | None) -> None:
    shape = TileShape(8, 8)
    kinds = tile_kinds(call(band), shape, blocks)
    wanted = {
        (m, n): kind
        for m, row in enumerate(kinds) for n, kind in enumerate(row) if kind not in ("EMPTY", NOT_KEPT)
    }  # fmt: skip
    assert {kind for row in kinds for kind in row} <= {"EMPTY", "PARTIAL", "FULL", NOT_KEPT}
    for backward, passes in ((False, ["forward"]), (True, ["dk, dv", "dq"])):
        steps = walk(call(band), shape, backward, blocks).steps
        for name in passes:
            tiles = [step for step in steps if step.pass_name == name and step.rows and step.keys]
            places = [(step.rows[0] // 8, step.keys[0] // 8) for step in tiles if step.rows and step.keys]
            assert sorted(places) == sorted(wanted)
            # A tile at the edge is cut to what is visible, and may be FULL then.
            assert all(step.kind in ("PARTIAL", "FULL") for step in tiles)
            # Whatever streams, a store ends it.
            assert steps[-1].rows is None or steps[-1].keys is None


def test_the_running_state_is_that_of_the_row() -> None:
    problem = call(seqlen_q=16, seqlen_k=16)
    steps = [step for step in walk(problem, TileShape(8, 4)).steps if step.keys]
    inputs = _random_call(problem, 0, backward=False)
    scores = 0.5 * inputs.q[0, 0] @ inputs.k[0, 0].T
    for step in steps:
        assert step.row is not None
        assert step.keys is not None
        # Seen so far, and by this row.
        seen = scores[step.row, : min(step.keys[1], step.row + 1)]
        assert step.row_max == pytest.approx(float(seen.max()), rel=1e-5)
        assert step.row_sum == pytest.approx(float(torch.exp(seen - seen.max()).sum()), rel=1e-5)
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    lse = reference.attention(q, k, v, scale=0.5, window=(None, 0)).lse
    last = steps[-1]
    assert last.row_max is not None
    assert last.row_sum is not None
    assert last.row_max + math.log(last.row_sum) == pytest.approx(float(lse[0, 0, -1]), rel=1e-5)


def test_a_backward_has_no_running_state() -> None:
    steps = walk(call(), TileShape(8, 8), backward=True).steps
    assert {step.row_max for step in steps} == {None}
    assert {step.pass_name for step in steps} == {"delta", "dk, dv", "dq"}
    assert "delta" in {name for name, _, _ in steps[-1].on_chip}
