"""The native kernels on shapes, features and numbers that are easy to get wrong; every instruction set, no fallback."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import Case, is_possible
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import LARGE, CaseInputs, make_inputs
from masks import MASKS
from targets import ISAS, Target, assert_right, each_isa, needs_native
from torch import Tensor

import tilestream
from tilestream import BlockMask
from tilestream.backends.cpu import native
from tilestream.backends.cpu.native import lists
from tilestream.dropout import keep_mask
from tilestream.io.schedule import TileShape, schedule_cost
from tilestream.problem import Problem

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Tests may set their number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _bits(inputs: CaseInputs, isa: str) -> list[Tensor]:
    with Target("native", isa).in_use():
        result, gradients = inputs.run("native")
    return [result.out.detach(), result.lse.detach(), *gradients.values()]


# ---- right, whatever the call


def _maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values)


_WIDTH = st.integers(1, 100)
_LENGTH = st.one_of(st.integers(0, 20), st.integers(0, 200))
_CASES = st.builds(
    Case,
    id=st.integers(0, 999).map("random{}".format),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("dense", "varlen")),
    lengths=st.tuples(_LENGTH, _LENGTH),
    batch=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    widths=st.tuples(_WIDTH, _WIDTH),
    causal=st.booleans(),
    window=_maybe(st.tuples(_maybe(st.integers(0, 150)), _maybe(st.integers(0, 150)))),
    scale=_maybe(st.sampled_from((-0.3, 0.0, 0.25))),
    softcap=st.sampled_from((0.0, 5.0)),
    bias=_maybe(st.tuples(*(st.sampled_from(("1", axis)) for axis in "bhmn")).map("".join)),
    bias_dtype=st.sampled_from(("same", "float32")),
    alibi=_maybe(st.sampled_from(("heads", "batch_heads"))),
    sinks=_maybe(st.sampled_from(("random", "extreme"))),
    dropout_p=st.sampled_from((0.0, 0.3)),
    shift=_maybe(st.integers(-60, 60)),
    memory=st.sampled_from(("head_major", "packed_qkv", "odd_offset", "padded_tokens")),
    dout=st.sampled_from(("strided", "expanded")),
    with_dlse=st.booleans(),
    mask=_maybe(st.sampled_from(MASKS)),
).filter(lambda case: is_possible(dataclasses.asdict(case)))


@pytest.mark.slow
@needs_native
@given(case=_CASES)
@settings(max_examples=60, deadline=None)
def test_random_calls(case: Case) -> None:
    for isa in ISAS:
        assert_right(case, isa)


@each_isa
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("axes", ["".join(x) for x in itertools.product("1b", "1h", "1m", "1n")])
def test_gradient_of_every_bias(axes: str, layout: str, isa: str) -> None:
    assert_right(Case(f"bias_{axes}", layout=layout, batch=3, heads=(2, 2), bias=axes, sinks="random"), isa)


@each_isa
@pytest.mark.parametrize(
    "fields",
    [
        {"widths": (512, 512), "lengths": (70, 90)},
        {"widths": (512, 1), "dtype": torch.bfloat16},
        {"widths": (1, 512), "dtype": torch.float16},
        {"widths": (3, 5), "heads": (1, 1), "lengths": (1, 1), "batch": 1},
        {"batch": 0},
        {"lengths": (0, 0)},
        {"lengths": (0, 70)},
        {"lengths": (70, 0), "sinks": "random"},
        {"layout": "varlen", "batch": 0},
        {"layout": "varlen", "lengths": (0, 300), "dtype": torch.bfloat16},
        {"lengths": (300, 30), "causal": True, "sinks": "extreme"},
        {"lengths": (130, 130), "shift": -(2**40), "causal": True},
        {"lengths": (130, 130), "shift": 2**40, "window": (None, 2**62)},
        {"batch": 70, "heads": (1, 1), "lengths": (3, 5), "widths": (8, 8)},
        {"heads": (1, 37), "lengths": (9, 70), "dtype": torch.bfloat16, "causal": True},
        # More query heads than a task has rows: they share a mask, and are not packed.
        {"heads": (1, 300), "lengths": (9, 40), "widths": (8, 8), "batch": 1, "mask": "bigbird", "bias": "11mn"},
        {"heads": (2, 37), "lengths": (9, 70), "layout": "varlen", "mask": "strided", "causal": True},
        {"lengths": (130, 130), "shift": 2**40, "window": (None, 2**62), "mask": "documents"},
    ],
    ids=str,
)
def test_edges(fields: dict[str, Any], isa: str) -> None:
    assert_right(Case("edge", **fields), isa)


@each_isa
@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_few_queries_over_many_keys(rows: int, dtype: torch.dtype, isa: str) -> None:
    """The keys are split over tasks, and the parts merged."""
    case = Case("decode", dtype=dtype, lengths=(rows, 5000), batch=2, heads=(2, 4), causal=True, sinks="random")
    assert_right(case, isa)
    inputs = make_inputs(case, CPU, unseen=LARGE)
    alone = _bits(inputs, isa)
    for threads in (1, 3, 8):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, _bits(inputs, isa), alone)), threads


@needs_native
@pytest.mark.parametrize("factor", [1 - 1e-3, 1 + 1e-3])
def test_a_small_fault_is_noticed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the tests above are worth: a scale that is slightly wrong fails them."""
    pack = native.pack

    def wrong(problem: Any, *rest: Any) -> bytes:
        spec = dataclasses.replace(problem.spec, scale=problem.spec.scale * factor)
        return pack(dataclasses.replace(problem, spec=spec), *rest)

    monkeypatch.setattr(native, "pack", wrong)
    with pytest.raises(AssertionError, match=r"(?s)out: error.*lse: error.*dquery: error.*dkey: error"):
        assert_right(Case("fault"), ISAS[0])


# ---- block masks


@pytest.mark.parametrize(
    ("block", "group", "num_heads", "expected"),
    [
        ((128, 128), 1, 1, ((128, 128), 1)),
        ((128, 128), 8, 1, ((32, 128), 8)),
        ((128, 128), 8, 8, ((128, 128), 1)),  # heads with planes of their own
        ((128, 128), 300, 1, ((128, 128), 1)),  # more heads than rows
        ((16, 256), 1, 1, ((32, 256), 1)),
        ((16, 16), 4, 1, ((16, 32), 4)),
        ((8, 24), 1, 1, ((32, 48), 1)),
        ((700, 700), 1, 1, ((175, 140), 1)),
        ((257, 514), 1, 1, ((256, 32), 1)),  # nothing divides them
        ((1, 1), 2, 1, ((16, 32), 2)),
        ((2**20, 2**20), 2, 1, ((128, 256), 2)),
    ],
    ids=str,
)
def test_tiles_of_masks_are_blocks_where_they_can(
    block: tuple[int, int], group: int, num_heads: int, expected: tuple[tuple[int, int], int]
) -> None:
    mask = BlockMask.from_blocks(torch.ones(1, num_heads, 1, 1, dtype=torch.bool), *block, block_size=block)
    assert lists.tiles_of(mask, group, 256) == expected


@each_isa
@each_dtype
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_empty_tiles_are_never_read(layout: str, dtype: torch.dtype, isa: str) -> None:
    """A number that is not finite would send the call to the loop, which is an error here."""
    kept = torch.tensor([[1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
    mask = BlockMask.from_blocks(kept, 250, block_size=64)
    query, key, value = (torch.randn(1, 250, 4, 24).to(dtype) for _ in range(3))
    key[:, 64:128], value[:, 64:128] = float("nan"), float("inf")
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with Target("native", isa).in_use():
        if layout == "dense":
            out = tilestream.block_sparse_attention(*leaves, mask, backend="native")
        else:
            starts = torch.tensor([0, 250], dtype=torch.int32)
            packed = [x[0] for x in leaves]
            out = tilestream.block_sparse_attention_varlen(*packed, starts, starts, mask, backend="native")[None]
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))
    assert not out[:, 128:192].any()
    assert not gradients[1][:, 64:128].any()
    assert out[:, 64:128].any()


@needs_native
@pytest.mark.parametrize("is_backward", [False, True])
def test_modelled_tiles_are_those_of_the_lists(is_backward: bool) -> None:
    mask = BlockMask.butterfly(512, block_size=64)
    problem = Problem.dense(seqlen_q=512, num_heads_q=4, num_heads_kv=2, head_dim=64, is_backward=is_backward)
    shape = native.BACKEND.tile_shape(dataclasses.replace(problem, block_mask=mask))
    assert shape == TileShape(64, 64, sums_in_memory=True)
    masked, dense = (
        schedule_cost(dataclasses.replace(problem, block_mask=x), shape, is_backward).tensors["k"] for x in (mask, None)
    )
    assert masked.read_bytes == mask.density * dense.read_bytes
    planes = BlockMask.from_blocks(torch.ones(1, 4, 8, 8, dtype=torch.bool), 512, block_size=64)
    assert not native.BACKEND.tile_shape(dataclasses.replace(problem, block_mask=planes)).packs_group


def test_lists_go_with_their_mask() -> None:
    mask = BlockMask.from_band(64, causal=True, block_size=16)
    case = dataclasses.replace(Case("lists").problem("cpu", False), seqlen_q=64, seqlen_k=64, block_mask=mask)
    found = lists.lists_of(case, 256)
    assert found is lists.lists_of(case, 256)
    known = len(lists._PACKED)
    del mask, case, found
    gc.collect()
    assert len(lists._PACKED) == known - 1


# ---- the same bits


_SUMS = (
    Case("sums_dense", lengths=(300, 280), heads=(2, 3), causal=True, bias="11mn", sinks="random"),
    Case("sums_wide_group", lengths=(60, 70), batch=1, heads=(2, 37), bias="11mn"),
    Case("sums_rows", lengths=(200, 150), batch=3, bias="bh1n", alibi="heads", dropout_p=0.2),
    Case("sums_one", lengths=(200, 150), batch=3, bias="1111", window=(70, 3)),
    Case("sums_packed", layout="varlen", lengths=(300, 200), heads=(2, 2), bias="1hmn", sinks="random"),
    Case("sums_packed_keys", layout="varlen", lengths=(150, 300), bias="11m1", causal=True),
    # Rows of tiles that many threads cut; planes of heads that share a bias; a column's tiles of several heads.
    Case("sums_blocks", lengths=(300, 280), heads=(2, 4), causal=True, bias="11mn", sinks="random", mask="everything"),
    Case("sums_planes", lengths=(200, 150), heads=(2, 2), bias="11mn", mask="planes"),
    Case("sums_batch", lengths=(200, 150), heads=(2, 2), bias="1hmn", mask="planes"),
    Case("sums_packed_planes", layout="varlen", lengths=(200, 150), heads=(2, 3), bias="bh1n", mask="combined"),
)


@each_isa
@each_dtype
@pytest.mark.parametrize("case", _SUMS, ids=lambda case: case.id)
def test_no_bit_depends_on_the_threads(case: Case, dtype: torch.dtype, isa: str) -> None:
    inputs = make_inputs(dataclasses.replace(case, dtype=dtype), CPU, unseen=LARGE)
    torch.set_num_threads(1)
    alone = _bits(inputs, isa)
    for threads in (1, 2, 3, 8, 8, 8):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, _bits(inputs, isa), alone)), threads


@each_isa
@each_dtype
@pytest.mark.parametrize("lengths", [(1, 1300), (90, 130), (300, 70)])
def test_permuting_the_batch_permutes_every_bit(lengths: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    case = Case("order", dtype=dtype, lengths=lengths, batch=5, bias="bhmn", alibi="batch_heads", causal=True)
    inputs = make_inputs(case, CPU, unseen=LARGE)
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = dataclasses.replace(
        inputs,
        leaves={name: leaf[order] for name, leaf in inputs.leaves.items()},
        rest={name: tensor[order] for name, tensor in inputs.rest.items()},
        dout=inputs.dout[order],
        dlse=inputs.dlse[order],
    )
    for got, wanted in zip(_bits(permuted, isa), _bits(inputs, isa), strict=True):
        assert torch.equal(got, wanted[order])


@each_isa
@each_dtype
def test_the_dropout_mask_is_the_one_mask(dtype: torch.dtype, isa: str) -> None:
    """With value = identity, out is the dropped-out P itself."""
    lengths, seed, dropout_p = (130, 150), 2**63 - 12345, 0.4
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, lengths[0], 6, 24, generator=generator).to(dtype)
    key = torch.randn(2, lengths[1], 2, 24, generator=generator).to(dtype)
    value = torch.eye(lengths[1], dtype=dtype)[None, :, None].expand(2, -1, 2, -1)
    with Target("native", isa).in_use():
        out = tilestream.attention(query, key, value, scale=0.1, dropout_p=dropout_p, seed=seed, backend="native")
    heads = torch.arange(6)
    kept = keep_mask(torch.tensor([seed]), dropout_p, torch.arange(2), heads, range(lengths[0]), range(lengths[1]))
    assert torch.equal(out != 0, kept.transpose(1, 2))


@each_isa
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_a_gradient_of_lse_alone(layout: str, isa: str) -> None:
    inputs = make_inputs(Case("lse", layout=layout, causal=True, bias="1hmn", sinks="random"), CPU, unseen=LARGE)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    seen = make_inputs(inputs.case, CPU)
    dlse = inputs.dlse.contiguous()
    with Target("native", isa).in_use():
        lse = inputs._call(
            tilestream.attention_with_lse if layout == "dense" else tilestream.attention_varlen_with_lse,
            leaves,
            backend="native",
        ).lse
        got = torch.autograd.grad(lse, list(leaves.values()), dlse, allow_unused=True, materialize_grads=True)
    _, wanted = seen.oracle(torch.float64, (torch.zeros_like(inputs.dout), dlse))
    for name, gradient in zip(leaves, got, strict=True):
        exact = wanted[name]
        torch.testing.assert_close(gradient.double(), exact, rtol=0.0, atol=1e-5 * float(exact.abs().max() + 1))
