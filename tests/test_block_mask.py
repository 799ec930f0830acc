"""Block masks: every maker against its plain definition, kinds told exactly, the algebra, and what making one costs."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import MASKS, PATTERNS, mask_of, plain
from torch import Tensor

from tilestream import ArgumentError, BlockMask, DtypeError, ShapeError
from tilestream.bench.memory import PeakMeter
from tilestream.block_mask.lists import EMPTY, FULL, PARTIAL, BlockLists

BLOCK_SIZES = (4, (4, 8), (3, 5), (2, 16), 1, (16, 256))
LENGTHS = ((20, 20), (13, 29), (29, 13), (33, 64), (7, 0), (0, 7), (1, 1))


def kinds_of(mask: BlockMask) -> Tensor:
    """int8 (batch, num_heads, rows, columns)."""
    kinds = mask.lists.to_kinds(slice(0, mask.lists.num_rows))
    return kinds.view(*mask.planes, mask.grid.num_rows, mask.grid.num_columns)


def kinds_of_pairs(dense: Tensor, block_size: tuple[int, int]) -> Tensor:
    """The kinds of the blocks of `dense`, bool (batch, heads, M, N): looked at one by one."""
    (height, width), (*planes, seqlen_q, seqlen_k) = block_size, dense.shape
    kinds = torch.zeros(*planes, -(-seqlen_q // height), -(-seqlen_k // width), dtype=torch.int8)
    for m in range(kinds.shape[2]):
        for n in range(kinds.shape[3]):
            block = dense[..., m * height : (m + 1) * height, n * width : (n + 1) * width].flatten(2)
            kinds[..., m, n] = torch.where(block.all(2), FULL, torch.where(block.any(2), PARTIAL, EMPTY))
    return kinds


def check(mask: BlockMask, wanted: Tensor) -> None:
    """The mask shows exactly `wanted`, which broadcasts to (batch, heads, M, N), and says of each block what it is."""
    dense = mask.to_dense()
    assert torch.equal(dense, wanted.expand(dense.shape))
    kinds = kinds_of(mask)
    assert torch.equal(kinds, kinds_of_pairs(dense, mask.block_size))
    assert mask.num_pairs() == int(dense.sum())
    assert mask.density == pytest.approx(float((kinds > 0).double().mean()) if kinds.numel() else 1.0)
    for r in range(mask.lists.num_rows):
        runs = mask.lists.row(r)
        assert all(start < stop and kind in (PARTIAL, FULL) for start, stop, kind in runs)
        assert all(one[1] < two[0] or (one[1] == two[0] and one[2] != two[2]) for one, two in itertools.pairwise(runs))


@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str, block_size: int | tuple[int, int]) -> None:
    for lengths in LENGTHS:
        for shift in (None, 0, -5, 6):
            mask = PATTERNS[name].make(*lengths, shift=shift, block_size=block_size)
            check(mask, plain(name, *lengths, shift))


@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    block_size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    shift=st.integers(-20, 20),
    stride=st.integers(1, 20),
    summary=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_strides_of_any_size(
    lengths: tuple[int, int], block_size: tuple[int, int], shift: int, stride: int, summary: int
) -> None:
    summary = min(summary, stride)
    p, j = torch.arange(lengths[0])[:, None] + shift, torch.arange(lengths[1])
    strided = BlockMask.strided(*lengths, stride=stride, shift=shift, block_size=block_size)
    check(strided, (j <= p) & ((p - j <= stride) | ((p - j) % stride == 0)))
    fixed = BlockMask.fixed(*lengths, stride=stride, num_summary=summary, shift=shift, block_size=block_size)
    own = p.div(stride, rounding_mode="floor") == j // stride
    check(fixed, (j <= p) & (own | (j % stride >= stride - summary)))


@given(
    ids=st.tuples(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 4), max_size=40)),
    is_sorted=st.booleans(),
    block_size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
@settings(max_examples=60, deadline=None)
def test_documents(ids: tuple[list[int], list[int]], is_sorted: bool, block_size: tuple[int, int]) -> None:
    ids_q, ids_k = (torch.tensor(sorted(x) if is_sorted else x, dtype=torch.int64) for x in ids)
    check(BlockMask.from_document_ids(ids_q, ids_k, block_size=block_size), ids_q[:, None] == ids_k)


def test_documents_of_every_entry() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    check(BlockMask.from_document_ids(ids, block_size=2), (ids[:, :, None] == ids[:, None])[:, None])
    one = ids[:1]
    check(BlockMask.from_document_ids(ids, one, block_size=2), (ids[:, :, None] == one[:, None])[:, None])


def test_prefixes_of_every_entry() -> None:
    mask = BlockMask.prefix_lm(9, 14, prefix_lengths=[0, 3, 50], block_size=4)
    p, j = torch.arange(9)[:, None] + 5, torch.arange(14)
    check(mask, torch.stack([(j <= p) | (j < length) for length in (0, 3, 50)])[:, None])


def test_chosen_global_tokens() -> None:
    chosen = torch.zeros(30, dtype=torch.bool)
    chosen[[4, 5, 6, 7, 29]] = True
    mask = BlockMask.local_global(30, window=(1, 1), global_tokens=chosen, block_size=4)
    near = (torch.arange(30)[:, None] - torch.arange(30)).abs() <= 1
    check(mask, near | chosen | chosen[:, None])


@pytest.mark.parametrize("seqlens", [(40, 40), (17, 40)])
def test_bigbird(seqlens: tuple[int, int]) -> None:
    """Window, first rows and columns, and so many more in every other row, drawn anew with another seed."""
    make = lambda seed: BlockMask.bigbird(*seqlens, num_random=2, seed=seed, block_size=4)  # noqa: E731
    mask = make(0)
    kinds = kinds_of(mask)[0, 0]
    check(mask, (kinds == FULL).repeat_interleave(4, 0).repeat_interleave(4, 1)[: seqlens[0], : seqlens[1]])
    shift = seqlens[1] - seqlens[0]
    for m, row in enumerate(kinds.tolist()):
        lo, hi = (4 * m + shift) // 4 - 1, (min(4 * m + 4, seqlens[0]) - 1 + shift) // 4 + 2
        needed = {0, *range(max(0, lo), min(hi, len(row)))} if m else {*range(len(row))}
        kept = {n for n, kind in enumerate(row) if kind == FULL}
        assert needed <= kept
        assert len(kept) == min(len(row), len(needed) + (2 if m else 0))
    assert torch.equal(kinds, kinds_of(make(0))[0, 0])
    assert not torch.equal(kinds, kinds_of(make(1))[0, 0])


@pytest.mark.parametrize("block_size", [4, (4, 16), (16, 4)])
def test_butterfly(block_size: int | tuple[int, int]) -> None:
    """Squares whose numbers differ in one binary digit or none."""
    side = block_size if isinstance(block_size, int) else max(block_size)
    mask = BlockMask.butterfly(90, block_size=block_size)
    square = torch.arange(90) // side
    differing = square[:, None] ^ square
    check(mask, (differing & (differing - 1)) == 0)


def test_blocks_of_flash_attention_1() -> None:
    """Per batch and head, shared, or for heads alone; integers or booleans; any lengths."""
    for planes in ((), (3,), (2, 3), (2, 1)):
        kept = torch.randint(0, 2, (*planes, 63, 4))
        mask = BlockMask.from_blocks(kept, 1000, block_size=(16, 256))
        assert mask.planes == ((1, 1, *planes)[-2:] if planes else (1, 1))
        pairs = kept.bool().repeat_interleave(16, -2).repeat_interleave(256, -1)[..., :1000, :1000]
        assert torch.equal(mask.to_dense(), pairs.reshape(*mask.planes, 1000, 1000))
        assert torch.equal(mask.to_blocks(), kept.bool().reshape(*mask.planes, 63, 4))


dense_drawn = st.tuples(
    st.integers(0, 2**32), st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3)]), st.sampled_from([0.02, 0.5, 0.98])
)


def _random(drawn: tuple[int, tuple[int, int], float], lengths: tuple[int, int]) -> Tensor:
    seed, planes, fraction = drawn
    return torch.rand(*planes, *lengths, generator=torch.Generator().manual_seed(seed)) < fraction


@given(
    one=dense_drawn,
    other=dense_drawn,
    lengths=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    block_size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
@settings(max_examples=60, deadline=None)
def test_algebra(one: Any, other: Any, lengths: tuple[int, int], block_size: tuple[int, int]) -> None:
    a, b = (_random(drawn, lengths) for drawn in (one, other))
    mask_a, mask_b = (BlockMask.from_dense(dense, block_size=block_size) for dense in (a, b))
    check(mask_a, a)
    check(mask_a & mask_b, a & b)
    check(mask_a | mask_b, a | b)
    check(mask_a.transpose(), a.transpose(2, 3))
    check((mask_a & mask_b).transpose() | mask_a.transpose(), a.transpose(2, 3))
    causal = BlockMask.from_band(*lengths, causal=True, block_size=block_size)
    check(mask_a & causal | mask_b, a & plain("causal", *lengths) | b)


@pytest.mark.parametrize("name", MASKS)
def test_transposed_lists(name: str) -> None:
    mask = mask_of(name, 65, 127, 2, 3)
    transposed = mask.transpose()
    assert (transposed.seqlen_q, transposed.seqlen_k) == (127, 65)
    check(transposed, mask.to_dense().transpose(2, 3))
    assert torch.equal(transposed.transpose().to_dense(), mask.to_dense())
    check(mask, mask.to_dense())


@pytest.mark.parametrize("name", MASKS)
def test_visible_is_the_mask(name: str) -> None:
    """What kernels ask of PARTIAL blocks; right in any rectangle."""
    mask = mask_of(name, 65, 127, 2, 3)
    dense = mask.to_dense()
    for b, h in ((0, 0), (1, 2)):
        got = mask.visible(b, h, range(10, 50), range(3, 120), torch.device("cpu"))
        assert torch.equal(got, dense[b % mask.batch, h % mask.num_heads, 10:50, 3:120])


def test_predicates_are_asked_in_pieces() -> None:
    sizes = []

    def predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = (i * j + b - h) % 7 < 3
        sizes.append(found.numel())
        return found

    mask = BlockMask.from_predicate(predicate, 3000, 2000, batch=2, num_heads=2, block_size=64)
    assert max(sizes) <= 1 << 21
    dense = mask.to_dense()
    b, h, i, j = (torch.arange(size) for size in dense.shape)
    assert torch.equal(dense, predicate(b[:, None, None, None], h[:, None, None], i[:, None], j))
    assert mask.planes == (2, 2)


@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_round_trip(name: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = mask_of(name, 65, 127, 2, 3)
    theirs = mask.to_flex_attention()
    assert isinstance(theirs, flex.BlockMask)
    assert torch.equal(theirs.to_dense().bool(), mask.to_blocks())
    back = BlockMask.from_flex_attention(theirs)
    check(back, mask.to_dense())
    assert torch.equal(kinds_of(back), kinds_of(mask))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    import tilestream

    query, key, value = (torch.randn(2, length, 3, 16) for length in (65, 127, 127))
    for name in ("documents", "planes", "bits", "predicate"):
        mask = mask_of(name, 65, 127, 2, 3)
        ours = tilestream.block_sparse_attention(query, key, value, mask)
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]
        theirs = flex.flex_attention(*heads_first, block_mask=mask.to_flex_attention()).transpose(1, 2)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_mask_of_flex_attention() -> None:
    """Its mask_mod counts in PARTIAL blocks alone, and its blocks may be cut short by the end."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < 50), None, 2, 300, 260, device="cpu", BLOCK_SIZE=(128, 64)
    )
    p, j = torch.arange(300)[:, None], torch.arange(260)
    check(BlockMask.from_flex_attention(theirs), (p >= j) & (p - j < 50))
    counts, indices = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    listed = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(32, 32))
    wanted = torch.zeros(32, 32, dtype=torch.bool)
    wanted[:16, 16:] = True
    check(BlockMask.from_flex_attention(listed), wanted)


def test_pictures() -> None:
    mask = BlockMask.from_band(20, causal=True, window=(7, 0), block_size=4)
    assert mask.show() == "+....\n#+...\n+#+..\n.+#+.\n..+#+"
    assert mask.show(max_columns=3) == "+..\n++.\n.++"
    kept = torch.zeros(2, 2, 1, 2, dtype=torch.bool)
    kept[1, 0, 0, 1] = True
    assert BlockMask.from_blocks(kept, 4, 8, block_size=4).show(plane=(1, 0)) == ".#"
    assert BlockMask.from_band(0, 9).show() == ""
    assert repr(mask).startswith(
        "BlockMask(seqlen_q=20, seqlen_k=20, block_size=(4, 4), batch=1, num_heads=1, density="
    )


def test_masks_do_not_change() -> None:
    mask = BlockMask.from_band(20)
    with pytest.raises(AttributeError):
        mask.planes = (2, 2)  # type: ignore[misc]
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert other.handle != mask.handle
        assert BlockMask.from_handle(other.handle) is other
        assert torch.equal(other.to_dense(), mask.to_dense())


def test_runs_by_hand() -> None:
    lists = BlockLists.from_kinds(
        torch.tensor([[0, 1, 1, 2], [2, 2, 2, 2], [0, 0, 0, 0], [2, 0, 1, 2]], dtype=torch.int8)
    )
    assert [lists.row(r) for r in range(4)] == [
        [(1, 3, PARTIAL), (3, 4, FULL)], [(0, 4, FULL)], [], [(0, 1, FULL), (2, 3, PARTIAL), (3, 4, FULL)],
    ]  # fmt: skip
    assert (lists.num_blocks(PARTIAL), lists.num_blocks(FULL)) == (3, 7)
    assert lists.transposed(1).row(3) == [(0, 2, FULL), (3, 4, FULL)]
    assert lists.transposed(2).row(4 + 2) == [(1, 2, PARTIAL)]


# Every maker at 1M tokens, where there are 67 million blocks and 10**12 pairs.
_MANY = 1 << 20
LARGE: dict[str, Callable[[], BlockMask]] = {
    "causal": lambda: BlockMask.from_band(_MANY, causal=True),
    "window": lambda: BlockMask.from_band(_MANY, causal=True, window=(4095, 0)),
    "documents": lambda: BlockMask.from_document_ids(torch.arange(_MANY) // 3000),
    "documents_causal": lambda: (
        BlockMask.from_document_ids(torch.arange(_MANY) // 3000) & BlockMask.from_band(_MANY, causal=True)
    ),
    "local_global": lambda: BlockMask.local_global(_MANY, window=(256, 256), global_tokens=100),
    "bigbird": lambda: BlockMask.bigbird(_MANY),
    "butterfly": lambda: BlockMask.butterfly(_MANY),
    "prefix_lm": lambda: BlockMask.prefix_lm(_MANY, prefix_lengths=70_000),
    "dilated": lambda: BlockMask.dilated(_MANY, window=(512, 512), dilation=4),
    "strided": lambda: BlockMask.strided(_MANY, stride=2048, block_size=256),
    "fixed": lambda: BlockMask.fixed(_MANY, stride=2048, num_summary=64, block_size=256),
}


@pytest.mark.no_poison
@pytest.mark.parametrize("name", LARGE)
def test_a_million_tokens(name: str) -> None:
    """Under a second of one core's time and under 100 MB."""
    meter, seconds = PeakMeter(), []
    if not meter.is_resettable:
        pytest.skip("the peak of memory cannot be reset here")
    PATTERNS["causal"].make(512)
    # What else runs on the machine can make one of two slow.
    for _ in range(2):
        gc.collect()
        meter.start()
        start = time.thread_time()
        mask = LARGE[name]()
        seconds.append(time.thread_time() - start)
        rise_bytes = meter.rise_bytes().extra_bytes
        assert rise_bytes is not None
        assert rise_bytes < 100e6
        assert mask.seqlen_q == _MANY
        del mask
    assert min(seconds) < 1.0


_FLAT = torch.zeros(4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: BlockMask.from_band(-1), ArgumentError, ["seqlen_q", "-1"]),
        (lambda: BlockMask.from_band(8.0), DtypeError, ["seqlen_q", "float"]),
        (lambda: BlockMask.from_band(8, 2**41), ArgumentError, ["seqlen_k", "2**40"]),
        (lambda: BlockMask.from_band(8, block_size=0), ArgumentError, ["block_size", "0"]),
        (lambda: BlockMask.from_band(8, block_size=(1, 2, 3)), ArgumentError, ["block_size", "(1, 2, 3)"]),
        (lambda: BlockMask.from_band(2**40, block_size=1), ArgumentError, ["block_size", "2**30"]),
        (lambda: BlockMask.from_band(8, window=5), ArgumentError, ["window", "5"]),
        (lambda: BlockMask.from_band(8, window=(-1, 0)), ArgumentError, ["window left", "-1"]),
        (lambda: BlockMask.from_band(8, causal=1), DtypeError, ["causal", "int"]),
        (lambda: BlockMask.from_band(8, shift=1.5), DtypeError, ["shift", "float"]),
        (lambda: BlockMask.from_band(8, shift=2**41), ArgumentError, ["shift", str(2**41), "2**40"]),
        (lambda: BlockMask.dilated(8, window=(1, 1), dilation=0), ArgumentError, ["dilation", "0"]),
        (lambda: BlockMask.strided(8, stride=0), ArgumentError, ["stride", "0"]),
        (lambda: BlockMask.fixed(8, stride=2, num_summary=3), ArgumentError, ["num_summary", "3", "stride = 2"]),
        (lambda: BlockMask.local_global(8, window=None, global_tokens=-1), ArgumentError, ["global_tokens", "-1"]),
        (lambda: BlockMask.local_global(8, window=None, global_tokens=_FLAT), ShapeError, ["global_tokens", "(4, 4)"]),
        (lambda: BlockMask.bigbird(8, num_random=-2), ArgumentError, ["num_random", "-2"]),
        (lambda: BlockMask.butterfly(8, block_size=(4, 6)), ArgumentError, ["block_size", "(4, 6)", "divide"]),
        (lambda: BlockMask.butterfly(8, 12, block_size=8), ArgumentError, ["shift", "4", "8"]),
        (lambda: BlockMask.prefix_lm(8, prefix_lengths=[1, -1]), ArgumentError, ["prefix_lengths", "[1, -1]"]),
        (lambda: BlockMask.prefix_lm(8, prefix_lengths=[]), ArgumentError, ["prefix_lengths", "empty"]),
        (lambda: BlockMask.from_document_ids(torch.ones(3)), DtypeError, ["ids_q", "float32"]),
        (lambda: BlockMask.from_document_ids(_FLAT.long()[None]), ShapeError, ["ids_q", "(1, 4, 4)"]),
        (lambda: BlockMask.from_document_ids(_FLAT.long(), _FLAT.long()[:3]), ShapeError, ["(4, 4)", "(3, 4)"]),
        (lambda: BlockMask.from_blocks(_FLAT, 8, block_size=4), ShapeError, ["blocks", "(2, 2)", "(4, 4)"]),
        (lambda: BlockMask.from_blocks(_FLAT.float(), 16, block_size=4), DtypeError, ["blocks", "float32"]),
        (lambda: BlockMask.from_blocks([[True]], 8), DtypeError, ["blocks", "list", "torch.as_tensor"]),
        (lambda: BlockMask.from_dense(_FLAT[0]), ShapeError, ["mask", "4"]),
        (lambda: BlockMask.from_predicate(None, 8), DtypeError, ["predicate", "NoneType"]),
        (lambda: BlockMask.from_predicate(print, 8, batch=0), ArgumentError, ["batch", "0"]),
        (lambda: BlockMask.from_flex_attention(_FLAT), DtypeError, ["block_mask", "Tensor"]),
        (lambda: BlockMask.from_band(8) & BlockMask.from_band(8, block_size=4), ShapeError, ["128", "4", "block_size"]),
        (lambda: BlockMask.from_band(8) | BlockMask.from_band(9), ShapeError, ["8", "9"]),
        (lambda: mask_of("planes", 8, 8, 2, 3) & mask_of("planes", 8, 8, 2, 4), ShapeError, ["(2, 3)", "(2, 4)"]),
        (lambda: BlockMask.from_band(8) & True, TypeError, ["&"]),
        (lambda: BlockMask.from_band(8).show(max_columns=0), ArgumentError, ["max_columns", "0"]),
    ],
)  # fmt: skip
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        make()
    assert [word for word in words if word not in str(raised.value)] == []
