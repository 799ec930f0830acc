"""The backend triton with block masks: its lists, and what the conformance cases do not make its kernels meet."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import pytest
import torch
from cases import Case
from interpreter import SMALL_TILES, Tiles, is_ready
from masks import MASKS, mask_of
from targets import Target
from tolerance import faults
from torch import Tensor

import tilestream
from tilestream import BlockMask
from tilestream.backends.triton.block_lists import Lists, lists_for
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(not is_ready(), reason="needs Triton's interpreter")


# ---- lists


def _problem(lengths: tuple[int, int], heads: tuple[int, int] = (4, 4), band: Band | None = None) -> Problem:
    return Problem.dense(
        batch=2,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        head_dim=8,
        spec=AttentionSpec(band=band or Band(None, None), scale=1.0),
    )


def _shown(lists: Lists, mask: BlockMask, group: int, by_keys: bool) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k) as the kernels read it: one plane for each that the lists tell apart."""
    (height, width), sizes = lists.sizes.tile, lists.sizes
    heads = mask.num_heads if group == 1 or mask.num_heads == 1 else mask.num_heads // group
    per_kv = group if by_keys and mask.num_heads > 1 else 1
    shown = torch.zeros(mask.batch, heads * per_kv, mask.seqlen_q, mask.seqlen_k, dtype=torch.bool)
    for b, h in itertools.product(range(mask.batch), range(heads)):
        first = b * sizes.strides[0] + h * sizes.strides[1]
        spans = lists.spans[first : first + sizes.rows].tolist()
        assert sorted(spans) == lists.spans_in_order[first : first + sizes.rows].tolist()
        lengths = [hi - lo for _, lo, hi, *_ in spans]
        assert lengths == sorted(lengths, reverse=True)
        for row, lo, hi, num_masked, column_of_first, *_ in spans:
            entries = lists.tiles[lo:hi].tolist()
            assert lo == hi or column_of_first == entries[0][0]
            columns = [column for column, _ in entries]
            assert columns[:num_masked] == sorted(columns[:num_masked])
            assert columns[num_masked:] == sorted(columns[num_masked:])
            for index, (column, pattern) in enumerate(entries):
                m, n = (column // group, row) if by_keys else (row, column)
                part = shown[b, h * per_kv + (column % group if by_keys else 0)]
                part = part[m * height : (m + 1) * height, n * width : (n + 1) * width]
                is_cut = not by_keys and part.shape[1] < width
                assert (index < num_masked) == (pattern >= 0 or is_cut)
                assert not part.any()
                words = torch.full((width if by_keys else height, 8), -1) if pattern < 0 else lists.bits[pattern]
                length = height if by_keys else width
                pairs = ((words.repeat_interleave(32, dim=1)[:, :length] >> (torch.arange(length) % 32)) & 1).bool()
                part[:] = (pairs.T if by_keys else pairs)[: part.shape[0], : part.shape[1]]
    return shown


@pytest.mark.parametrize("name", MASKS)
def test_lists_show_what_the_mask_shows(name: str) -> None:
    """By rows, and by keys also of groups, whose heads are in one list."""
    mask = mask_of(name, 70, 150, 2, 4)
    distance = torch.arange(150) - (torch.arange(70)[:, None] - 3)
    for tile, band in itertools.product(((32, 32), (64, 16)), (Band(None, None), Band(40, 9))):
        wanted = mask.to_dense() & (distance >= -(300 if band.left is None else band.left))
        wanted &= distance <= (300 if band.right is None else band.right)
        for group, by_keys in ((1, False), (1, True), (2, True), (4, True)):
            problem = dataclasses.replace(_problem((70, 150), (4, 4 // group), band), shift=-3)
            lists = lists_for(mask, problem, tile, CPU, by_keys=by_keys)
            assert torch.equal(_shown(lists, mask, group if by_keys else 1, by_keys), wanted)
            assert lists.sizes.repeats == (group if by_keys and mask.num_heads == 1 else 1)
            assert lists is lists_for(mask, problem, tile, CPU, by_keys=by_keys)


def test_rows_that_are_far_longer_than_most_come_first() -> None:
    mask = BlockMask.local_global(4096, window=(64, 64), global_tokens=64, block_size=64)
    lists = lists_for(mask, _problem((4096, 4096)), (64, 64), CPU)
    assert lists.sizes.num_long == 1
    assert lists.spans[0].tolist()[:3] == [0, 0, 64]
    even = BlockMask.from_band(4096, causal=True, block_size=64)
    assert lists_for(even, _problem((4096, 4096)), (64, 64), CPU).sizes.num_long == 0


# ---- calls


def _assert_right(case: Case, device: torch.device, tiles: Tiles = SMALL_TILES, is_finite: bool = True) -> None:
    target = Target("triton", is_finite=is_finite, tiles=tiles)
    inputs = target.inputs(case, device)
    with target.in_use():
        result, gradients = inputs.run("triton")
    found = faults(inputs, result, gradients)
    assert not found, "\n".join([*found, str(case)])


_GROUPS = Case("groups", lengths=(70, 90), batch=2, heads=(2, 3), widths=(16, 16), mask="planes")
CASES = [
    _GROUPS,
    dataclasses.replace(_GROUPS, id="groups_shared", mask="strided", batch=1, heads=(1, 3), sinks="random"),
    dataclasses.replace(_GROUPS, id="groups_varlen", layout="varlen", heads=(1, 2), lengths=(80, 90), causal=True),
    dataclasses.replace(
        _GROUPS, id="shared_varlen", layout="varlen", heads=(1, 2), mask="local_global", window=(30, 9)
    ),
    dataclasses.replace(_GROUPS, id="few_rows", lengths=(3, 500), batch=1, heads=(1, 4), mask="butterfly", causal=True),
    dataclasses.replace(_GROUPS, id="shifted", mask="bits", heads=(1, 2), causal=True, shift=-20, alibi="heads"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_groups(case: Case, device: torch.device) -> None:
    """Every query head by itself; key tiles go over the heads of their group."""
    _assert_right(case, device)


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        Case("own_tiles", dtype=torch.bfloat16, lengths=(150, 200), batch=1, heads=(1, 2), causal=True, mask="bits"),
        Case("own_tiles_rich", lengths=(70, 90), batch=1, heads=(1, 1), alibi="heads", bias="11mn", mask="documents"),
        Case("own_tiles_varlen", dtype=torch.float16, layout="varlen", lengths=(100, 90), heads=(1, 2), mask="combined",
             window=(50, 3)),
    ],
    ids=lambda case: case.id,
)  # fmt: skip
def test_tiles_of_a_gpu(case: Case, is_finite: bool, device: torch.device) -> None:
    """Interpreted with the tiles that configs.py has: those of exact kernels are parts of the lists' tiles."""
    _assert_right(case, device, tiles=None, is_finite=is_finite)


@needs_interpreter
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e36])
@pytest.mark.parametrize("operand", ["query", "key", "value"])
def test_garbage_behind_the_mask(operand: str, garbage: float) -> None:
    """Of a pair that a PARTIAL tile hides, and of tiles that are EMPTY: as if it were not there, bit for bit."""
    shown = torch.ones(64, 96, dtype=torch.bool)
    shown[:, [5, 40]] = False
    shown[:, 64:] = False
    shown[[3, 50]] = False
    mask = BlockMask.from_dense(shown, block_size=32)
    tensors = {name: torch.randn(1, 64 if name == "query" else 96, 1, 16) for name in ("query", "key", "value")}
    results = []
    for value in (0.0, garbage):
        leaves = {name: x.clone() for name, x in tensors.items()}
        leaves[operand][:, [3, 50] if operand == "query" else [5, 40, 70, 95]] = value
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        with Target("triton", tiles=SMALL_TILES).in_use():
            out, lse = tilestream.block_sparse_attention_with_lse(*leaves.values(), mask, backend="triton")
            gradients = torch.autograd.grad(out.sum() + lse.nan_to_num(neginf=0.0).sum(), list(leaves.values()))
        results.append([out, lse, *gradients])
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0.0, atol=1e-6)
    assert not any(x[:, [3, 50]].any() for x in (results[1][0], results[1][2]))


@needs_interpreter
def test_calls_keep_no_mask_alive() -> None:
    mask = BlockMask.from_band(40, causal=True, block_size=8)
    query = torch.randn(1, 40, 2, 16, requires_grad=True)
    with Target("triton").in_use():
        out = tilestream.block_sparse_attention(query, query, query, mask, backend="triton")
        out.sum().backward()
    handle = mask.handle
    del mask, out
    gc.collect()
    with pytest.raises(tilestream.ArgumentError, match="no longer exists"):
        BlockMask.from_handle(handle)


@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_another_mask_and_length_have_the_same_kernels(layout: str) -> None:
    pytest.importorskip("triton")
    from triton_hows import hows

    from tilestream.backends.triton import plan

    facts = []
    for name, lengths in (("butterfly", (512, 512)), ("bits", (333, 480)), ("planes", (2000, 64))):
        case = Case("kernels", torch.bfloat16, layout, lengths, batch=1, heads=(2, 2), causal=True, mask=name)
        problem, mask = plan.kernel_problem(case.problem("cpu", is_backward=True))
        assert mask is not None
        forward, backward = hows(problem, mask)
        steps = plan._forward_plan.__wrapped__(problem, forward).steps
        steps += plan._backward_plan.__wrapped__(problem, backward).steps
        facts.append([(step.kernel, step.config, step.facts) for step in steps])
    assert facts[0] == facts[1] == facts[2]
    assert len(facts[0]) == 7
