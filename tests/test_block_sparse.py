"""Block-sparse attention: every mask with every feature against the oracle, and which blocks the loops touch."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from cases import SPARSE_CASES, SPARSE_FEW, Case
from inputs import make_inputs
from interpreter import is_ready
from masks import mask_of
from targets import FINITE, TARGETS, Target
from test_conformance import assert_conforms
from tolerance import same_bits

import tilestream
from tilestream import BlockMask, DtypeError, ShapeError, dispatch, ops, reference
from tilestream.backends import hopper
from tilestream.backends.cpu import block_backward, forward
from tilestream.backends.cpu.score import ScoreTile
from tilestream.io.counters import count_schedule
from tilestream.io.schedule import TileShape, schedule_cost
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import AttentionSpec, Band
from tilestream.tiles import TileKind


def _targets(case: Case) -> list[Target]:
    """What a case is run on. Interpreted kernels have no time for all."""
    targets = [target for target in TARGETS if target.backend != "triton"]
    if case in SPARSE_FEW or not is_ready():
        targets += [Target("triton"), FINITE]
    return targets


# The targets of a case follow each other, because they share its yardstick.
_ROWS = [(case, target) for case in SPARSE_CASES for target in _targets(case)]


@pytest.mark.parametrize(("case", "target"), _ROWS, ids=lambda value: value.id)
def test_conformance(case: Case, target: Target, device: torch.device) -> None:
    assert_conforms(case, target, device)


def test_a_refusal_names_the_mask() -> None:
    """A backend that would run the dense call says that it is the mask, which nothing else may hide."""
    case = Case("sparse", mask="butterfly", softcap=3.0)
    on_gpu = dataclasses.replace(case.problem("cuda", False), dtype=torch.bfloat16)
    assert "block mask" in str(hopper._mask_reason(on_gpu))
    assert hopper._mask_reason(dataclasses.replace(on_gpu, block_mask=None)) is None
    assert "block mask" in str(hopper.problem_reason(on_gpu, 132))


def test_automatic_calls_are_served(device: torch.device) -> None:
    inputs = make_inputs(Case("automatic", mask="planes"), device)
    chosen = dispatch.explain(inputs.case.problem(device.type, False)).chosen
    assert device.type != "cpu" or chosen == dispatch.explain(Case("dense").problem("cpu", False)).chosen
    assert all(map(same_bits, inputs.forward(chosen), inputs._result(inputs.leaves, None)))  # type: ignore[arg-type]


class _Watch:
    """Notes the tiles that the loops take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward: list[ScoreTile] = []
        self.backward: list[ScoreTile] = []
        for module, name, noted in (
            (forward, "row_tiles", self.forward),
            (block_backward, "column_tiles", self.backward),
        ):
            monkeypatch.setattr(module, name, self._watched(getattr(module, name), noted))

    @staticmethod
    def _watched(tiles: Any, noted: list[ScoreTile]) -> Any:
        def watched(*arguments: Any) -> Any:
            for score_tile in tiles(*arguments):
                noted.append(score_tile)
                yield score_tile

        return watched


@pytest.mark.parametrize("name", ["local_global", "documents", "planes", "combined", "nothing"])
def test_tiles_are_the_kept_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMPTY blocks are in no tile, PARTIAL ones are masked, FULL ones have no mask; forward and backward alike."""
    mask, watch = mask_of(name, 130, 150, 2, 4), _Watch(monkeypatch)
    query = torch.randn(2, 130, 4, 8, requires_grad=True)
    key = torch.randn(2, 150, 2, 8, requires_grad=True)
    tilestream.block_sparse_attention(query, key, key, mask, backend="cpu").sum().backward()
    kinds = mask.lists.to_kinds(slice(0, mask.lists.num_rows)).view(*mask.planes, mask.grid.num_rows, -1)
    for tiles in (watch.forward, watch.backward):
        visits = torch.zeros(2, 4, 130, 150, dtype=torch.int32)
        for one in tiles:
            tile, chunk = one.tile, one.chunk
            assert tile.kind is TileKind.FULL  # there is no band
            area = (chunk.batch, chunk.heads, slice(tile.m_start, tile.m_end), slice(tile.n_start, tile.n_end))
            visits[area] += 1 if one.hidden is None else 10
        of_pairs = kinds.repeat_interleave(mask.block_size[0], 2).repeat_interleave(mask.block_size[1], 3)
        wanted = torch.tensor([0, 10, 1], dtype=torch.int32)[of_pairs.long()[:, :, :130, :150]]
        assert torch.equal(visits, wanted.expand_as(visits))


def test_rows_without_blocks_give_nothing() -> None:
    kept = torch.tensor([[True, False], [False, False], [False, True]])
    mask = BlockMask.from_blocks(kept, 12, 8, block_size=4)
    tensors = [torch.randn(1, length, 2, 4, requires_grad=True) for length in (12, 8, 8)]
    out, lse = tilestream.block_sparse_attention_with_lse(*tensors, mask)
    (out.sum() + lse[:, :, :4].sum() + lse[:, :, 8:].sum()).backward()
    assert torch.equal(out[:, 4:8], torch.zeros(1, 4, 2, 4))
    assert bool((lse[:, :, 4:8] == -torch.inf).all())
    assert torch.equal(tensors[0].grad[:, 4:8], torch.zeros(1, 4, 2, 4))
    assert all(bool(x.grad.isfinite().all()) for x in tensors)


def test_a_band_as_mask_is_the_band() -> None:
    query, key, value = (torch.randn(2, length, 2, 8, dtype=torch.float64) for length in (70, 90, 90))
    mask = BlockMask.from_band(70, 90, causal=True, window=(30, 0), block_size=16)
    ours = tilestream.block_sparse_attention_with_lse(query, key, value, mask)
    torch.testing.assert_close(ours, tilestream.attention_with_lse(query, key, value, causal=True, window=(30, 0)))


def test_disjoint_masks_merge() -> None:
    query, key, value = (torch.randn(1, 64, 2, 8, dtype=torch.float64) for _ in range(3))
    kept = torch.rand(4, 4) < 0.5
    parts = [BlockMask.from_blocks(blocks, 64, block_size=16) for blocks in (kept, ~kept)]
    merged = tilestream.merge(*(tilestream.block_sparse_attention_with_lse(query, key, value, part) for part in parts))
    torch.testing.assert_close(merged, tilestream.attention_with_lse(query, key, value))


@pytest.mark.parametrize("name", ["strided", "predicate", "planes"])
def test_second_derivatives(name: str) -> None:
    mask = mask_of(name, 9, 12, 1, 2)
    tensors = [torch.randn(1, length, 2, 2, dtype=torch.float64, requires_grad=True) for length in (9, 12, 12)]

    def attend(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = tilestream.block_sparse_attention_with_lse(*operands, mask)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors)


def test_vmap_is_a_loop_over_calls() -> None:
    mask = mask_of("planes", 40, 40, 2, 2)
    query = torch.randn(3, 2, 40, 2, 8)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return tilestream.block_sparse_attention(x, x, x, mask)

    assert torch.equal(torch.vmap(attend)(query), torch.stack([attend(x) for x in query]))


def test_the_backward_keeps_the_mask() -> None:
    query = torch.randn(1, 32, 2, 8, requires_grad=True)
    out = tilestream.block_sparse_attention(query, query, query, BlockMask.strided(32, stride=4, block_size=8))
    gc.collect()
    out.sum().backward()
    assert query.grad is not None


def test_calls_keep_no_mask_alive() -> None:
    mask = BlockMask.from_band(32, causal=True, block_size=8)
    query = torch.randn(1, 32, 2, 8)
    tilestream.block_sparse_attention(query, query, query, mask)
    handle = mask.handle
    del mask
    gc.collect()
    with pytest.raises(tilestream.ArgumentError, match="block_mask no longer exists"):
        BlockMask.from_handle(handle)


def test_no_argument_of_attention_leads_to_a_mask() -> None:
    """The dense functions' calls have no mask, whatever they are given."""
    assert ops.Numbers._field_defaults["block_mask"] is None
    with pytest.raises(TypeError, match="block_mask"):
        tilestream.attention(*[torch.randn(1, 8, 1, 8)] * 3, block_mask=BlockMask.from_band(8))  # type: ignore[call-arg]


_QUERY, _KEY = torch.randn(2, 20, 4, 8), torch.randn(2, 30, 2, 8)
_CU = torch.tensor([0, 20, 40], dtype=torch.int32)


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (None, DtypeError, ["block_mask", "NoneType", "from_blocks"]),
        (torch.ones(20, 30, dtype=torch.bool), DtypeError, ["block_mask", "Tensor", "from_dense"]),
        (BlockMask.from_band(30, 20), ShapeError, ["block_mask", "(30, 20)", "(20, 30)", "query (2, 20, 4, 8)"]),
        (mask_of("planes", 20, 30, 2, 3), ShapeError, ["block_mask", "3 query heads", "4", "key (2, 30, 2, 8)"]),
        (mask_of("documents", 20, 30, 3, 4), ShapeError, ["block_mask", "3 batch entries", "2"]),
    ],
)
def test_masks_that_do_not_fit(mask: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        tilestream.block_sparse_attention(_QUERY, _KEY, _KEY, mask)
    assert [word for word in words if word not in str(raised.value)] == []


def test_packed_sequences_beyond_the_mask() -> None:
    packed = torch.randn(40, 2, 8)
    with pytest.raises(ShapeError, match=r"block_mask is for .*\(16, 32\), but a sequence has \(20, 20\)"):
        tilestream.block_sparse_attention_varlen(packed, packed, packed, _CU, _CU, BlockMask.from_band(16, 32))
    with pytest.raises(ShapeError, match="3 sequences"):
        tilestream.block_sparse_attention_varlen(
            packed, packed, packed, _CU, _CU, BlockMask.prefix_lm(20, prefix_lengths=[1, 2, 3])
        )


def test_compiled_calls_take_masks() -> None:
    query = torch.randn(1, 64, 2, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x, mask: tilestream.block_sparse_attention(x, x, x, mask, causal=True) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    for mask in (mask_of("butterfly", 64, 64, 1, 2), mask_of("planes", 64, 64, 1, 2)):
        (gradient,) = torch.autograd.grad(compiled(query, mask).sum(), query)
        eager = tilestream.block_sparse_attention(query, query, query, mask, causal=True) * 2
        torch.testing.assert_close(compiled(query, mask), eager)
        torch.testing.assert_close(gradient, torch.autograd.grad(eager.sum(), query)[0])


# (tokens, heads) of query, key and value.
_REPLAYED = ((70, 4), (300, 2), (300, 2))


def _whole_mask(name: str) -> BlockMask:
    makers = {
        "butterfly": lambda: BlockMask.butterfly(70, 300, shift=0, block_size=8),
        "bigbird": lambda: BlockMask.bigbird(70, 300, num_random=1, block_size=(8, 16)),
        "v1": lambda: mask_of("v1", 70, 300, 1, 4),
    }
    return makers[name]()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("band", [Band(), Band(None, 0)], ids=["everything", "causal"])
@pytest.mark.parametrize("name", ["butterfly", "bigbird", "v1"])
def test_traffic_is_counted_as_modelled(name: str, band: Band, backward: bool) -> None:
    """Of the backend's own tiles: a model of a problem with a mask, a replay that moves as much, and its result."""
    mask, spec = _whole_mask(name), AttentionSpec(band=band, scale=0.3)
    query, key, value = (torch.randn(1, length, heads, 8, dtype=torch.float64) for length, heads in _REPLAYED)
    inputs = AttentionInputs(*(x.requires_grad_() for x in (query, key, value)))
    problem = dataclasses.replace(Problem.from_inputs(inputs, spec, is_backward=backward), block_mask=mask)
    shape = dispatch.backend("cpu").tile_shape(problem)
    model = schedule_cost(problem, shape, backward)
    dout = torch.randn_like(query)
    blocks = mask.to_blocks()[0, 0].tolist()
    counted = count_schedule(inputs, spec, shape, dout=dout if backward else None, blocks=blocks)
    assert counted.cost.passes == model.passes
    everything = schedule_cost(dataclasses.replace(problem, block_mask=None), shape, backward)
    streamed = "q" if backward else "k"
    assert model.tensors[streamed].read_bytes < everything.tensors[streamed].read_bytes
    exact = reference.attention(query, key, value, window=(band.left, band.right), scale=0.3, block_mask=mask)
    if not backward:
        torch.testing.assert_close(counted.out, exact.out.detach())
        return
    assert counted.gradients is not None
    for got, wanted in zip(counted.gradients[:3], torch.autograd.grad(exact.out, inputs[:3], dout), strict=True):
        torch.testing.assert_close(got, wanted)


def test_traffic_of_masks_of_planes_is_refused() -> None:
    problem = Case("planes", mask="planes").problem("cpu", False)
    with pytest.raises(tilestream.ArgumentError, match=r"to_blocks\(\)\[b, h\]"):
        schedule_cost(problem, TileShape(32, 16))
