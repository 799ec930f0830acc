"""What block-sparse calls move and compute, by the model, whatever the blocks of the mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case

from tilestream.io.model import forward_flops
from tilestream.io.schedule import TileShape, schedule_cost
from tilestream.spec import Band


@pytest.mark.parametrize("tile", [(16, 128), (8, 24), (300, 7)])
def test_traffic_of_tiles_that_are_not_the_masks_blocks(tile: tuple[int, int]) -> None:
    """A tile is loaded if a pair of it is visible; each pass has tiles of its own."""
    problem = Case("tiles", mask="strided").problem("cpu", False)
    mask = problem.block_mask
    assert mask is not None
    shown = mask.to_dense()[0, 0]
    padded = torch.nn.functional.pad(shown, (0, -shown.shape[1] % tile[1], 0, -shown.shape[0] % tile[0]))
    rows, keys = padded.shape[0] // tile[0], padded.shape[1] // tile[1]
    blocks = padded.view(rows, tile[0], keys, tile[1]).any(dim=3).any(dim=1).tolist()
    everything = dataclasses.replace(problem, block_mask=None)
    for backward in (False, True):
        assert schedule_cost(problem, TileShape(*tile), backward) == schedule_cost(
            everything, TileShape(*tile), backward, blocks
        )
    both = schedule_cost(problem, TileShape(32, 16, key_pass=tile), True)
    assert both.passes[1] == schedule_cost(problem, TileShape(*tile), True).passes[1]
    assert both.passes[2] == schedule_cost(problem, TileShape(32, 16), True).passes[2]


@pytest.mark.parametrize("band", [Band(), Band(9, 3)], ids=str)
@pytest.mark.parametrize("mask", ["strided", "planes", "nothing"])
def test_operations_are_those_of_the_visible_pairs(mask: str, band: Band) -> None:
    problem = Case("pairs", mask=mask).problem("cpu", False)
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, band=band))
    assert problem.block_mask is not None
    distance = torch.arange(problem.seqlen_k) - torch.arange(problem.seqlen_q)[:, None] - problem.shift
    shown = problem.block_mask.to_dense().expand(problem.batch, problem.num_heads_q, -1, -1)
    for limit, is_seen in ((band.left, distance >= -(band.left or 0)), (band.right, distance <= (band.right or 0))):
        shown = shown if limit is None else shown & is_seen
    assert forward_flops(problem) == 2 * int(shown.sum()) * (problem.head_dim + problem.head_dim_v)
