"""Block masks on Hopper: what the kernels read of them, on any machine, and on a Hopper GPU the oracle's answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import FEATURES, Case, pairwise
from masks import MASKS, mask_of
from targets import HAS_HOPPER, Target, assert_hopper_forward, assert_hopper_gradients

import tilestream
from tilestream import BlockMask
from tilestream.backends import hopper
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

_BATCH, _HEADS_KV, _GROUP = 2, 2, 2
_BANDS = (Band(None, None), Band(None, 0), Band(70, 5))
_FEATURES: dict[str, tuple[Any, ...]] = {
    "mask": (*MASKS, "large_blocks"),
    "dtype": (torch.bfloat16, torch.float16),
    "lengths": ((64, 64), (65, 127), (257, 64), (1000, 700), (520, 1000)),
    "batch": (1, 3),
    "heads": ((2, 1), (1, 4), (2, 3)),
    "widths": ((64, 64), (128, 128), (40, 64), (96, 96), (128, 32), (256, 256)),
    "causal": (False, True),
    "window": (None, (17, 5), (0, 64)),
    "scale": (None, 0.25),
    "sinks": (None, "random", "extreme"),
    "shift": (None, -9, 400),
    "memory": FEATURES["memory"],
}
CASES = [Case(f"hopper_blocks{number:03d}", **row) for number, row in enumerate(pairwise(_FEATURES))]
_needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")


def _problem(seqlen_q: int, seqlen_k: int, band: Band, **changes: Any) -> Problem:
    return dataclasses.replace(
        Problem.dense(
            batch=_BATCH, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_q=_HEADS_KV * _GROUP, num_heads_kv=_HEADS_KV,
            head_dim=64, dtype=torch.bfloat16, device_type="cuda", spec=AttentionSpec(scale=0.1, band=band),
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("tile", [(128, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("name", [*MASKS, "large_blocks"])
def test_lists_are_the_mask(name: str, tile: tuple[int, int]) -> None:
    """Every row tile of every head once; and its tiles show, by bits alone, the pairs of mask and band."""
    from tilestream.backends.hopper.block_lists import RECORD, lists_of

    seqlen_q, seqlen_k = 300, 461
    mask = mask_of(name, seqlen_q, seqlen_k, _BATCH, _HEADS_KV * _GROUP)
    for band in _BANDS:
        problem = _problem(seqlen_q, seqlen_k, band)
        lists = lists_of(problem, mask, tile, 132, torch.device("cpu"))
        i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
        seen = mask.to_dense().expand(_BATCH, _HEADS_KV * _GROUP, -1, -1) & band_shows(band, i, j)
        shown = torch.zeros(_BATCH, _HEADS_KV * _GROUP, 512, 1024, dtype=torch.int32)
        records = lists.units.view(-1, RECORD).tolist()
        assert len({tuple(record[:4]) for record in records}) == len(records) == _BATCH * 4 * 3
        for batch, head, head_kv, m_start, first, num_partial, num_tiles, _ in records:
            assert head_kv == head // _GROUP
            assert 0 <= num_partial <= num_tiles > 0
            assert lists.rows[batch * 4 + head, m_start // tile[0], :3].tolist() == [first, num_tiles, head_kv]
            for place in range(first, first + num_tiles):
                pattern, start = int(lists.patterns[place]), int(lists.key_starts[place])
                assert (pattern >= 0) == (place - first < num_partial)
                words = lists.bits[max(pattern, 0)].long()[:, torch.arange(tile[1]) // 32]
                pairs = words >> (torch.arange(tile[1]) % 32) & 1
                part = slice(m_start, m_start + tile[0]), slice(start, start + tile[1])
                shown[batch, head][part] += pairs.int() if pattern >= 0 else 1
        assert torch.equal(shown[:, :, :seqlen_q, :seqlen_k], seen.int()), (name, band)
        assert not shown[..., seqlen_k:].any()


@pytest.mark.parametrize("name", [*MASKS, "large_blocks"])
def test_lists_by_keys_are_the_mask(name: str) -> None:
    """Every tile of keys of every KV head once; and what the row tiles of its query heads show is mask and band."""
    from tilestream.backends.hopper.block_lists import KEY_RECORD, key_lists_of

    seqlen_q, seqlen_k, tile = 461, 300, (64, 128)
    mask = mask_of(name, seqlen_q, seqlen_k, _BATCH, _HEADS_KV * _GROUP)
    for band in _BANDS:
        problem = _problem(seqlen_q, seqlen_k, band)
        lists = key_lists_of(problem, mask, tile, 132, torch.device("cpu"))
        i, j = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
        seen = mask.to_dense().expand(_BATCH, _HEADS_KV * _GROUP, -1, -1) & band_shows(band, i, j)
        shown = torch.zeros(_BATCH, _HEADS_KV * _GROUP, 512, 512, dtype=torch.int32)
        records = lists.units.view(-1, KEY_RECORD).tolist()
        assert len({tuple(record) for record in records}) == len(records) == _BATCH * _HEADS_KV * 3
        for batch, head_kv, n_start, _ in records:
            for head in range(head_kv * _GROUP, (head_kv + 1) * _GROUP):
                first, num_partial, num_tiles, _ = lists.lists[batch * 4 + head, n_start // tile[1]].tolist()
                for place in range(first, first + num_tiles):
                    pattern, start = int(lists.patterns[place]), int(lists.row_tiles[place]) * tile[0]
                    assert (pattern >= 0) == (place - first < num_partial)
                    words = lists.bits[max(pattern, 0)].long()[:, torch.arange(tile[0]) // 32]
                    pairs = (words >> (torch.arange(tile[0]) % 32) & 1).int().t()
                    part = slice(start, start + tile[0]), slice(n_start, n_start + tile[1])
                    shown[batch, head][part] += pairs if pattern >= 0 else 1
        assert torch.equal(shown[:, :, :seqlen_q, :seqlen_k], seen.int()), (name, band)
        assert not shown[..., seqlen_k:].any()


def band_shows(band: Band, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """bool (queries, keys)."""
    left = torch.ones_like(i - j, dtype=torch.bool) if band.left is None else i - j <= band.left
    return left if band.right is None else left & (j - i <= band.right)


def test_long_rows_come_first_and_heads_in_turn() -> None:
    from tilestream.backends.hopper.block_lists import RECORD, lists_of

    def order(mask: BlockMask) -> list[tuple[int, int]]:
        problem = dataclasses.replace(_problem(16384, 16384, Band(None, None)), batch=1)
        units = lists_of(problem, mask, (128, 128), 132, torch.device("cpu")).units.view(-1, RECORD)
        return [(head, number) for head, number in units[:, [1, 6]].tolist()]

    # Rows of one length: a head after the other, so that its keys are in the cache.
    assert [head for head, _ in order(BlockMask.butterfly(16384))] == [head for head in range(4) for _ in range(128)]
    # A row of all keys takes as long as a head's others do together: all heads together, such rows first.
    lengths = [number for _, number in order(BlockMask.local_global(16384, window=(128, 128), global_tokens=128))]
    assert lengths[:4] == [128] * 4
    assert lengths == sorted(lengths, reverse=True)


def test_the_last_heads_are_as_many_as_any_that_are_worked_on_together() -> None:
    """Of 26 heads the cache holds 12: 8, 9 and 9, so that there are many short rows to end with."""
    from tilestream.backends.hopper.block_lists import RECORD, lists_of

    kept = torch.arange(128) < 30 + torch.arange(128)[:, None] % 5
    sizes = {"batch": 1, "num_heads_q": 26, "num_heads_kv": 13}
    problem = dataclasses.replace(_problem(16384, 16384, Band(None, None)), **sizes)
    mask = BlockMask.from_blocks(kept, 16384, block_size=128)
    units = lists_of(problem, mask, (128, 128), 132, torch.device("cpu")).units.view(-1, RECORD)
    heads, lengths = units[:, 1], units[:, 6]
    (rises,) = (lengths.diff() > 0).nonzero(as_tuple=True)
    assert (rises + 1).tolist() == [8 * 128, 17 * 128]
    parts = [set(part.tolist()) for part in heads.tensor_split((rises + 1).tolist())]
    assert parts == [set(range(8)), set(range(8, 17)), set(range(17, 26))]


def test_whole_blocks_hide_nothing_in_tiles_that_are_loaded() -> None:
    from tilestream.backends.hopper.block_lists import key_lists_of, lists_of

    for seqlen, block_size, hides in ((1000, 128, False), (1000, 64, True), (1024, (256, 128), False)):
        problem = _problem(seqlen, seqlen, Band(None, None))
        mask = BlockMask.butterfly(seqlen, block_size=block_size)
        for make, tile in ((lists_of, (128, 128)), (key_lists_of, (128, 128))):
            assert make(problem, mask, tile, 132, torch.device("cpu")).hides == hides


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"spec": AttentionSpec(scale=0.1, has_sinks=True, band=Band(5, 0))}, None),
        ({"spec": AttentionSpec(scale=0.1, softcap=2.0)}, "softcap"),
        ({"spec": AttentionSpec(scale=0.1, has_alibi=True)}, "ALiBi"),
        ({"spec": AttentionSpec(scale=0.1, has_bias=True)}, "bias"),
        ({"spec": AttentionSpec(scale=0.1, dropout_p=0.1)}, "dropout"),
        ({"dtype": torch.float32}, "float32"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str | None) -> None:
    masked = dataclasses.replace(
        _problem(2048, 2048, Band(None, None), **changes), block_mask=BlockMask.butterfly(2048)
    )
    reason = hopper.problem_reason(masked, 132)
    assert reason is None if words is None else words in (reason or "")


def test_refuses_packed_sequences() -> None:
    problem = _problem(2048, 2048, Band(None, None)).packed([2048, 700], [2048, 700])
    masked = dataclasses.replace(problem, block_mask=BlockMask.butterfly(2048))
    assert "packed" in (hopper.problem_reason(masked, 132) or "")


def test_cases_are_served() -> None:
    with Target("hopper").in_use():
        refused = [case for case in CASES if hopper.problem_reason(case.problem("cuda", is_backward=False), 132)]
    assert refused == []


@pytest.mark.gpu
@_needs_hopper
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "nan"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_forward(case: Case, is_finite: bool, device: torch.device) -> None:
    assert_hopper_forward(case, is_finite, device)


_BACKWARD_FEATURES = {
    **_FEATURES,
    "widths": ((64, 64), (128, 128), (40, 64), (96, 96), (128, 32), (32, 104)),
}
BACKWARD_CASES = [
    Case(f"hopper_blocks_backward{number:03d}", **row) for number, row in enumerate(pairwise(_BACKWARD_FEATURES))
]


def test_backward_cases_are_served() -> None:
    refused = [case for case in BACKWARD_CASES if hopper.backward_reason(case.problem("cuda", is_backward=True))]
    assert refused == []


@pytest.mark.gpu
@_needs_hopper
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "nan"])
@pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda case: case.id)
def test_backward(case: Case, is_finite: bool, device: torch.device) -> None:
    assert_hopper_gradients(case, is_finite, device)


@pytest.mark.gpu
@_needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_reaches_what_sees_it_and_nothing_else(head_dim: int, device: torch.device) -> None:
    """A key that some queries of a tile see and others do not, and a query that sees some keys."""
    mask = mask_of("bits", 300, 300, 2, 4)
    generator = torch.Generator().manual_seed(head_dim)
    leaves = [torch.randn(2, 300, heads, head_dim, generator=generator).bfloat16() for heads in (4, 2, 2)]
    dout = torch.randn(2, 300, 4, head_dim, generator=generator).bfloat16()
    leaves[1][0, 77, 1], leaves[2][1, 200, 0], leaves[0][1, 5, 3] = torch.nan, torch.inf, torch.nan
    found = {}
    for backend, where in (("hopper", device), ("cpu", torch.device("cpu"))):
        given = [leaf.to(where).requires_grad_() for leaf in leaves]
        out, lse = tilestream.block_sparse_attention_with_lse(*given, mask, backend=backend)
        gradients = torch.autograd.grad(out, given, dout.to(where))
        found[backend] = [x.detach().isfinite().cpu() for x in (out, lse, *gradients)]
    for name, mine, other in zip(("out", "lse", "dq", "dk", "dv"), *found.values(), strict=True):
        assert 0 < int(other.sum()) < other.numel(), name
        assert torch.equal(mine, other), name


@pytest.mark.gpu
@_needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_hundred_repeats_are_bit_equal(head_dim: int, device: torch.device) -> None:
    """More row tiles than processors, of all lengths and none at all, so that programs meet everything in any order."""
    generator = torch.Generator().manual_seed(head_dim)
    kept = torch.rand(1, 1, 24, 24, generator=generator) < torch.rand(24, 1, generator=generator) ** 2
    mask = BlockMask.from_blocks(kept, 3000, 3000, block_size=128)
    tensors = [torch.randn(2, 3000, 12, head_dim, device=device, dtype=torch.bfloat16) for _ in range(3)]
    first = tilestream.block_sparse_attention_with_lse(*tensors, mask, backend="hopper")
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(100):
        again = tilestream.block_sparse_attention_with_lse(*tensors, mask, backend="hopper")
        differs |= (again.out != first.out).any() | (again.lse != first.lse).any()
    assert not bool(differs)


@pytest.mark.gpu
@_needs_hopper
def test_another_length_compiles_nothing(device: torch.device) -> None:
    from tilestream.backends.hopper.plan import num_compiled

    def call(seqlen: int) -> None:
        query, key, value = (torch.randn(1, seqlen, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        tilestream.block_sparse_attention(query, key, value, BlockMask.butterfly(seqlen), backend="hopper")

    call(1024)
    compiled = num_compiled()
    for seqlen in (512, 1000, 2047):
        call(seqlen)
    assert num_compiled() == compiled
