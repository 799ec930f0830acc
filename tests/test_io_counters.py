"""Replays over a two-level memory: counted is what is modelled, exactly, and computed is what the oracle says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilestream import reference
from tilestream.errors import ArgumentError, UnsupportedError
from tilestream.io.cost import Cost
from tilestream.io.counters import Counted, count_published, count_schedule, count_standard
from tilestream.io.memory import FastMemoryError, TwoLevelMemory
from tilestream.io.published import BlockMatrix, PublishedBlocks, published_blocks, published_cost
from tilestream.io.schedule import TileShape, compulsory_cost, once_per_pass, schedule_cost
from tilestream.io.sizes import dense_parts, total_cost
from tilestream.io.standard import standard_cost
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import AttentionSpec, Band

BANDS = (Band(), Band(None, 0), Band(3, 0), Band(2, 5), Band(0, None), Band(-3, 1))
LENGTHS = ((7, 7), (5, 12), (12, 5), (0, 4), (4, 0))
# Heads, batch, and tiles as (queries, keys).
HEADS_AND_TILES = (((1, 1), 2, (3, 4)), ((4, 2), 1, (4, 3)), ((2, 1), 1, (64, 64)))


class Call(NamedTuple):
    """A real call: its tensors, what it computes, and the dense problems that it is."""

    inputs: AttentionInputs
    spec: AttentionSpec
    dout: Tensor
    parts: list[Problem]


def make_call(
    band: Band,
    lengths: tuple[tuple[int, int], ...],
    heads: tuple[int, int] = (4, 2),
    batch: int | None = 1,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Call:
    """A dense call of `batch`, or with None packed sequences of `lengths` (queries, keys)."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    spec = AttentionSpec(band=band, scale=0.4, dropout_p=dropout_p)
    head_dim, head_dim_v = 5, 3
    tokens_q, tokens_k = (sum(length[side] for length in lengths) for side in (0, 1))
    leading = () if batch is None else (batch,)
    starts = [
        torch.tensor([0, *itertools.accumulate(length[side] for length in lengths)], dtype=torch.int32)
        for side in (0, 1)
    ]
    inputs = AttentionInputs(
        query=randn(*leading, tokens_q, heads[0], head_dim),
        key=randn(*leading, tokens_k, heads[1], head_dim),
        value=randn(*leading, tokens_k, heads[1], head_dim_v),
        seed=torch.tensor([7]) if dropout_p else None,
        cu_seqlens_q=starts[0] if batch is None else None,
        cu_seqlens_k=starts[1] if batch is None else None,
    )
    problem = Problem.from_inputs(inputs, spec)
    parts = [problem] if batch is not None else dense_parts(problem, *zip(*lengths, strict=True))
    return Call(inputs, spec, randn(*leading, tokens_q, heads[0], head_dim_v), parts)


def oracle(call: Call, bias: Tensor | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """out, lse, and dq, dk, dv of materialised attention, computed in `dtype`."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in call.inputs[:3]]
    band = call.spec.band
    features = {
        "window": (band.left, band.right), "scale": call.spec.scale, "dropout_p": call.spec.dropout_p,
        "seed": call.inputs.seed, "bias": bias, "dtype": dtype,
    }  # fmt: skip
    if call.inputs.cu_seqlens_q is None:
        out, lse = reference.attention(*leaves, **features)
    else:
        out, lse = reference.attention_varlen(*leaves, call.inputs.cu_seqlens_q, call.inputs.cu_seqlens_k, **features)
    gradients = torch.autograd.grad(out, leaves, call.dout.to(dtype), allow_unused=True, materialize_grads=True)
    found = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return {name: tensor.detach().double() for name, tensor in found.items()}


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check_close(got: Tensor, exact: Tensor, plain: Tensor) -> None:
    """At most twice what materialised attention of the same precision loses, and some units in the last place.

    `plain` is that; for float64 it is the oracle, which cannot see its own error.
    """
    is_finite = exact.isfinite()
    assert torch.equal(got[~is_finite].double(), exact[~is_finite])
    got, exact, plain = (torch.where(is_finite, tensor.double(), 0.0) for tensor in (got, exact, plain))
    unit = torch.finfo(torch.float64 if torch.equal(exact, plain) else torch.float32).eps
    assert largest(got - exact) <= 2 * largest(plain - exact) + 32 * unit * max(1.0, largest(exact))


def check(
    call: Call,
    model: Callable[[Problem, bool], Cost],
    count: Callable[..., Counted],
    bias: Tensor | None = None,
) -> None:
    """Both directions: cost equal in every pass and tensor, memory within what the model says, results right."""
    exact = plain = oracle(call, bias)
    if call.inputs.query.dtype != torch.float64:
        plain = oracle(call, bias, torch.float32)
    for backward in (False, True):
        counted = count(call.inputs, call.spec, dout=call.dout if backward else None)
        modelled = total_cost(functools.partial(model, backward=backward), call.parts)
        assert counted.cost.passes == modelled.passes
        assert counted.cost.extra_memory_bytes == modelled.extra_memory_bytes
        assert counted.cost.fast_memory_bytes <= modelled.fast_memory_bytes
        results = {"out": counted.out, "lse": counted.lse}
        if backward:
            assert counted.gradients is not None
            results = dict(zip(("dq", "dk", "dv"), counted.gradients[:3], strict=True))
        assert backward or counted.out is not None
        for name, found in results.items():
            if found is not None:
                check_close(found, exact[name], plain[name])


def check_schedule(call: Call, shape: TileShape, blocks: BlockMatrix | None = None, bias: Tensor | None = None) -> None:
    check(
        call,
        lambda problem, backward: schedule_cost(problem, shape, backward, blocks),
        lambda *args, **keywords: count_schedule(*args, shape, blocks=blocks, **keywords),
        bias,
    )


def check_published(
    call: Call, tiles: PublishedBlocks, blocks: BlockMatrix | None = None, bias: Tensor | None = None
) -> None:
    check(
        call,
        lambda problem, backward: published_cost(problem, tiles, backward, blocks),
        lambda *args, **keywords: count_published(*args, tiles, blocks=blocks, **keywords),
        bias,
    )


def check_standard(call: Call, block_m: int) -> None:
    check(
        call,
        lambda problem, backward: standard_cost(problem, backward, block_m=block_m),
        lambda *args, **keywords: count_standard(*args, block_m=block_m, **keywords),
    )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_dense_calls(band: Band, lengths: tuple[int, int]) -> None:
    for heads, batch, (block_m, block_n) in HEADS_AND_TILES:
        call = make_call(band, (lengths,), heads, batch)
        check_schedule(call, TileShape(block_m, block_n, packs_group=True))
        check_schedule(call, TileShape(block_m, block_n, packs_group=False, key_pass=(2, 5)))
        check_schedule(call, TileShape(block_m, block_n, packs_group=True, sums_in_memory=True))
        check_schedule(call, TileShape(block_m, block_n, packs_group=False, dq_in_memory=True))
        check_published(call, PublishedBlocks(block_m, block_n))
        check_standard(call, block_m)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_packed_sequences(band: Band, dropout_p: float) -> None:
    call = make_call(band, ((3, 5), (0, 2), (7, 7), (2, 0)), batch=None, dropout_p=dropout_p)
    check_schedule(call, TileShape(4, 3))
    check_schedule(call, TileShape(4, 3, sums_in_memory=True))
    check_schedule(call, TileShape(4, 3, key_pass=(2, 5), dq_in_memory=True))
    check_published(call, PublishedBlocks(3, 4))
    check_standard(call, 2)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_dropout(band: Band) -> None:
    call = make_call(band, ((6, 7),), dropout_p=0.4)
    check_schedule(call, TileShape(4, 3))
    check_schedule(call, TileShape(4, 3, packs_group=False))
    check_schedule(call, TileShape(4, 3, packs_group=False, sums_in_memory=True))
    check_schedule(call, TileShape(4, 3, dq_in_memory=True))
    check_published(call, PublishedBlocks(3, 4))
    check_standard(call, 4)


def kept_blocks(rows: int, columns: int, seed: int = 0) -> list[list[bool]]:
    return (torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.5).tolist()


def bias_of(blocks: BlockMatrix, block_m: int, block_n: int, lengths: tuple[int, int]) -> Tensor:
    """-inf where a block is not kept."""
    kept = torch.tensor(blocks).repeat_interleave(block_m, 0).repeat_interleave(block_n, 1)
    return torch.zeros(kept.shape).masked_fill(~kept, float("-inf"))[None, None, : lengths[0], : lengths[1]]


@pytest.mark.parametrize("lengths", [(9, 10), (5, 12), (12, 5), (8, 8)])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_block_sparse(band: Band, lengths: tuple[int, int]) -> None:
    call = make_call(band, (lengths,))
    for block_m, block_n in ((4, 3), (3, 4)):
        blocks = kept_blocks(-(-lengths[0] // block_m), -(-lengths[1] // block_n))
        bias = bias_of(blocks, block_m, block_n, lengths)
        check_schedule(call, TileShape(block_m, block_n), blocks, bias)
        check_schedule(call, TileShape(block_m, block_n, sums_in_memory=True), blocks, bias)
        check_schedule(call, TileShape(block_m, block_n, dq_in_memory=True), blocks, bias)
        check_published(call, PublishedBlocks(block_m, block_n), blocks, bias)


lengths_drawn = st.integers(0, 14)
limits_drawn = st.one_of(st.none(), st.integers(-4, 20))


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_tiles_of_one_pair(band: Band) -> None:
    call = make_call(band, ((4, 5),), heads=(2, 1))
    check_schedule(call, TileShape(1, 1))
    check_published(call, PublishedBlocks(1, 1))
    check_standard(call, 1)


@settings(max_examples=30, deadline=None)
@given(
    seqlens=st.lists(st.tuples(lengths_drawn, lengths_drawn), min_size=1, max_size=3),
    limits=st.tuples(limits_drawn, limits_drawn),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    tile=st.tuples(st.integers(2, 24), st.integers(2, 24)),
    batch=st.sampled_from([None, 0, 1, 2]),
    dropout_p=st.sampled_from([0.0, 0.5]),
    packs_group=st.booleans(),
    in_memory=st.sampled_from([{}, {"sums_in_memory": True}, {"dq_in_memory": True}]),
)
def test_any_shape(
    seqlens: list[tuple[int, int]],
    limits: tuple[int | None, int | None],
    heads: tuple[int, int],
    tile: tuple[int, int],
    batch: int | None,
    dropout_p: float,
    packs_group: bool,
    in_memory: dict[str, bool],
) -> None:
    lengths = tuple(seqlens) if batch is None else (seqlens[0],)
    call = make_call(Band(*limits), lengths, heads, batch, dropout_p)
    check_schedule(call, TileShape(*tile, packs_group, **in_memory))
    check_published(call, PublishedBlocks(*tile))
    check_standard(call, tile[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_are_those_of_the_dtype_and_numbers_are_not_rounded_to_it(dtype: torch.dtype) -> None:
    call = make_call(Band(None, 0), ((40, 40),), dtype=dtype)
    shape, tiles = TileShape(16, 8), PublishedBlocks(8, 16)
    check(
        call,
        lambda problem, backward: schedule_cost(problem, shape, backward),
        lambda *args, **keywords: count_schedule(*args, shape, **keywords),
    )
    check(
        call,
        lambda problem, backward: published_cost(problem, tiles, backward),
        lambda *args, **keywords: count_published(*args, tiles, **keywords),
    )
    check(
        call,
        lambda problem, backward: standard_cost(problem, backward, block_m=8),
        lambda *args, **keywords: count_standard(*args, block_m=8, **keywords),
    )


def counted_peak(count: Callable[..., Counted], call: Call, backward: bool, **keywords: int) -> int:
    dout = call.dout if backward else None
    return count(call.inputs, call.spec, dout=dout, **keywords).cost.fast_memory_bytes


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_whole_tiles_need_what_the_model_says_and_not_a_byte_less(backward: bool, dropout_p: float) -> None:
    call = make_call(Band(), ((12, 12),), (2, 1), dropout_p=dropout_p)
    [problem] = call.parts
    shape, tiles = TileShape(4, 3), PublishedBlocks(4, 3)
    walk, key_walk = TileShape(4, 3, sums_in_memory=True), TileShape(4, 3, dq_in_memory=True)

    def schedule(*args: object, **keywords: object) -> Counted:
        return count_schedule(*args, shape, **keywords)  # type: ignore[arg-type]

    def one_walk(*args: object, **keywords: object) -> Counted:
        return count_schedule(*args, walk, **keywords)  # type: ignore[arg-type]

    def one_key_walk(*args: object, **keywords: object) -> Counted:
        return count_schedule(*args, key_walk, **keywords)  # type: ignore[arg-type]

    def published(*args: object, **keywords: object) -> Counted:
        return count_published(*args, tiles, **keywords)  # type: ignore[arg-type]

    for count, cost in (
        (schedule, schedule_cost(problem, shape, backward)),
        (one_walk, schedule_cost(problem, walk, backward)),
        (one_key_walk, schedule_cost(problem, key_walk, backward)),
        (published, published_cost(problem, tiles, backward)),
        (count_standard, standard_cost(problem, backward, block_m=12)),
    ):
        keywords = {"block_m": 12} if count is count_standard else {}
        assert counted_peak(count, call, backward, **keywords) == cost.fast_memory_bytes
        with pytest.raises(FastMemoryError, match="fast memory is exceeded"):
            counted_peak(count, call, backward, **keywords, fast_memory_bytes=cost.fast_memory_bytes - 1)


def test_a_plan_that_forgets_a_tile_comes_to_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes equal results mean something: a lost tile, store or load is seen."""
    call, shape = make_call(Band(), ((12, 12),)), TileShape(4, 3)
    out = oracle(call)["out"]
    first_tile_lost = [[c > 0 for c in range(4)] for _ in range(3)]
    lost = count_schedule(call.inputs, call.spec, shape, blocks=first_tile_lost).out
    assert lost is not None
    assert not torch.allclose(lost, out)
    store = TwoLevelMemory.store
    stores: list[str] = []

    def forgetful(self: TwoLevelMemory, name: str, index: object, tile: object) -> None:
        stores.append(name)
        if len(stores) != 3:  # the second row tile's out
            store(self, name, index, tile)  # type: ignore[arg-type]

    monkeypatch.setattr(TwoLevelMemory, "store", forgetful)
    unstored = count_schedule(call.inputs, call.spec, shape).out
    assert unstored is not None
    assert unstored.isnan().any()


def test_what_was_evicted_is_gone() -> None:
    memory = TwoLevelMemory(100)
    memory.bind("q", torch.ones(4, 4), 4)
    memory.begin("pass")
    tile = memory.load("q", (slice(0, 2),))
    data = tile.data
    tile.evict()
    assert data.isnan().all()
    with pytest.raises(AssertionError, match="was evicted"):
        tile.data.sum()
    assert memory.used_bytes == 0
    assert memory.peak_bytes == 32


def test_kept_tiles_alone_are_paid_for() -> None:
    """Proposition 4: what is streamed is the kept fraction of what a dense call streams."""
    call = make_call(Band(), ((12, 12),))
    [problem] = call.parts
    blocks = [[(r + c) % 3 == 0 for c in range(3)] for r in range(3)]
    shape, tiles = TileShape(4, 4), PublishedBlocks(4, 4)
    dense, sparse = (schedule_cost(problem, shape, blocks=kept).tensors for kept in (None, blocks))
    assert sparse["k"].read_bytes * 3 == dense["k"].read_bytes
    dense, sparse = (published_cost(problem, tiles, blocks=kept).tensors for kept in (None, blocks))
    assert sparse["q"].read_bytes * 3 == dense["q"].read_bytes
    for cost in (schedule_cost(problem, shape), published_cost(problem, tiles)):
        assert cost.traffic.total_bytes >= compulsory_cost(problem).traffic.total_bytes


@pytest.mark.parametrize("in_memory", [{}, {"sums_in_memory": True}, {"dq_in_memory": True}])
@pytest.mark.parametrize("lengths", [(40, 40), (0, 4)])
def test_behind_a_cache_each_pass_moves_each_tensor_once(lengths: tuple[int, int], in_memory: dict[str, bool]) -> None:
    """One tile is as large a fast memory as there can be, so it moves what a cache lets through."""
    call = make_call(Band(None, 0), (lengths,))
    [problem] = call.parts
    for backward in (False, True):
        small, large = (schedule_cost(problem, TileShape(block, block, **in_memory), backward) for block in (4, 40))
        found = [once_per_pass(problem, cost) for cost in (small, large)]
        assert [[one.tensors for one in cost.passes] for cost in found] == [[one.tensors for one in large.passes]] * 2
        assert [cost.flops for cost in found] == [small.flops, large.flops]


def test_what_is_not_counted_is_refused() -> None:
    call = make_call(Band(), ((4, 4),))
    shape = TileShape(2, 2)
    for feature in ({"softcap": 1.0}, {"has_bias": True}, {"has_alibi": True}, {"has_sinks": True}):
        with pytest.raises(UnsupportedError, match="is not counted"):
            count_schedule(call.inputs, dataclasses.replace(call.spec, **feature), shape)
    with pytest.raises(ArgumentError, match="blocks must be 2 x 2, the tiles of the call, got 1 x 3"):
        count_schedule(call.inputs, call.spec, shape, blocks=[[True] * 3])
    with pytest.raises(ArgumentError, match="blocks must be 2 x 2"):
        count_published(call.inputs, call.spec, PublishedBlocks(2, 2), blocks=[])
    with pytest.raises(ArgumentError, match="block_n must be at least 1, got 0"):
        TileShape(1, 0)
    with pytest.raises(ArgumentError, match="block_m of key_pass must be at least 1, got 0"):
        TileShape(1, 1, key_pass=(0, 2))
    with pytest.raises(ArgumentError, match="one shape of tiles; leave key_pass out"):
        count_schedule(call.inputs, call.spec, TileShape(2, 2, key_pass=(1, 2)), blocks=[[True] * 2] * 2)
    with pytest.raises(ArgumentError, match="with sums_in_memory there is no pass over key tiles"):
        TileShape(1, 1, key_pass=(1, 2), sums_in_memory=True)
    with pytest.raises(ArgumentError, match="give one of them"):
        TileShape(1, 1, sums_in_memory=True, dq_in_memory=True)
    with pytest.raises(ArgumentError, match="smaller than a row of 64"):
        published_blocks(63, 64)
