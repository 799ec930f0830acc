"""The Hopper forward is compiled for a GPU that is not here: nothing spills, and no product waits for another.

Gluon has no interpreter: what the kernels compute is checked on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compile_rows import ask

from tilestream import BlockMask
from tilestream.backends import hopper
from tilestream.backends.hopper.call import block_of, packed_layout, readable, readable_bias, tma_strides
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

_WORKER = Path(__file__).with_name("hopper_compile_worker.py")
_NUM_WORKERS = 2
_NEWEST_TRITON = Path(sys.prefix) / "newest-triton"


class Row(NamedTuple):
    """The kernel of one kind of call."""

    band: str
    features: str  # with a plus between them
    dtype: str
    head_dim: int
    head_dim_v: int

    @property
    def id(self) -> str:
        return "-".join(map(str, self))


_WIDTHS = (64, 128, 256)
_EVERYTHING = "softcap+alibi+bias+sinks+packed"
# Kinds of calls, of which each has other code in the loop; the window has most of a mask.
_KINDS = (
    *((band, "") for band in ("full", "causal", "window", "left")),
    ("full", "blocks"),
    ("full", "packed"),
    ("causal", "packed"),
    ("causal", "softcap"),
    ("causal", "bias"),
    ("window", "softcap"),
    ("window", "alibi"),
    ("window", "softcap+alibi+sinks+packed"),
    ("causal", _EVERYTHING),
    ("window", _EVERYTHING),
)
# A kernel takes 3 to 8 seconds. Widths are all that dispatch can choose; float16 differs in nothing but names.
ROWS = [
    *(Row(*kind, "bfloat16", d, d) for d, kind in itertools.product(_WIDTHS, _KINDS)),
    *(Row("causal", "", "bfloat16", d, e) for d, e in itertools.permutations(_WIDTHS, 2)),
    *(Row("causal", "alibi", "bfloat16", d, d) for d in (64, 128)),
    *(Row("window", _EVERYTHING, "bfloat16", d, e) for d, e in ((64, 128), (256, 64))),
    Row("full", "blocks+sinks", "bfloat16", 128, 64),
    Row("causal", "", "float16", 128, 128),
]
# For the newest Triton, which takes longer.
FEW_ROWS = [
    *(Row("causal", "", "bfloat16", d, d) for d in _WIDTHS),
    Row("full", "", "bfloat16", 128, 128),
    Row("window", "", "bfloat16", 128, 128),
    Row("window", _EVERYTHING, "bfloat16", 128, 128),
]
_Uses = dict[Row, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> _Uses:
    """What every row uses."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    return _all_uses(ROWS, tmp_path_factory.mktemp("rows"), [])


@pytest.fixture(scope="module")
def newest_uses(tmp_path_factory: pytest.TempPathFactory) -> _Uses:
    """What some rows use where the newest Triton compiles them."""
    if not (_NEWEST_TRITON / "triton").exists():
        pytest.skip("`make test` installs the newest Triton")
    return _all_uses(FEW_ROWS, tmp_path_factory.mktemp("rows"), [str(_NEWEST_TRITON)])


def _all_uses(rows: list[Row], folder: Path, packages: list[str]) -> _Uses:
    """What rows use, from `_NUM_WORKERS` processes side by side; `packages` are folders of packages to prefer."""
    shares = [rows[start::_NUM_WORKERS] for start in range(_NUM_WORKERS)]
    paths = [folder / f"{index}.json" for index in range(_NUM_WORKERS)]
    with ThreadPoolExecutor(_NUM_WORKERS) as workers:
        found = list(workers.map(ask, [_WORKER] * _NUM_WORKERS, shares, paths, [packages] * _NUM_WORKERS))
    return {row: use for share in found for row, use in share.items()}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_compiles_without_waste(row: Row, uses: _Uses) -> None:
    # With a block mask and a head_dim of 64 programs have two teams, and a consumer few registers.
    has_few = row.features == "blocks" and row.head_dim == 64
    is_plain = row.features in ("", "blocks") and row.band != "window" and not has_few
    _assert_no_waste(uses[row], most_spilled=0 if is_plain else 40)


@pytest.mark.slow
@pytest.mark.parametrize("row", FEW_ROWS, ids=lambda row: row.id)
def test_the_newest_triton_compiles_it_too(row: Row, newest_uses: _Uses) -> None:
    _assert_no_waste(newest_uses[row], most_spilled=40)


def _assert_no_waste(uses: list[dict[str, Any]], most_spilled: int) -> None:
    assert uses
    for use in uses:
        assert "error" not in use, use["error"]
        assert use["shared"] <= use["shared_limit"], use
        assert not use["unwritten"], use
        # A few numbers of a program wait in local memory from one row tile to the next; nothing does in a loop.
        assert use["spills_in_loops"] == 0, use
        assert use["spilled"] <= most_spilled, use
        assert use["mma"] == 0, use
        # A few waits a consumer; ptxas would wait for every single product if it could not tell them apart (C7515).
        assert 0 < 3 * use["waits"] < use["wgmma"] * 2, use


def test_rows_are_all_widths() -> None:
    widths = {(block_of(d), block_of(e)) for d, e in itertools.product(range(8, 257, 8), repeat=2)}
    assert widths == {(row.head_dim, row.head_dim_v) for row in ROWS}


def _problem(**changes: Any) -> Problem:
    names = {field.name for field in dataclasses.fields(AttentionSpec)} & changes.keys()
    spec = {name: changes.pop(name) for name in names}
    sizes = {"batch": 2, "seqlen_q": 1024, "num_heads_q": 16, "head_dim": 128, "dtype": torch.bfloat16, **changes}
    return Problem.dense(device_type="cuda", spec=AttentionSpec(**{"scale": 0.1, **spec}), **sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"band": Band(None, 0), "num_heads_kv": 4, "seqlen_k": 1, "head_dim": 8, "head_dim_v": 256}, None),
        ({"band": Band(10, -3), "seqlen_q": 65, "batch": 64, "dtype": torch.float16}, None),
        ({"seqlen_q": 16, "num_heads_kv": 4, "batch": 64}, "few rows, 64"),
        ({"dtype": torch.float32}, "float32"),
        ({"softcap": 3.0, "has_bias": True, "has_alibi": True, "has_sinks": True, "deterministic": True}, None),
        ({"dropout_p": 0.1}, "dropout"),
        ({"head_dim": 264}, "above 256"),
        ({"head_dim_v": 60}, "multiple of 8"),
        ({"scale": 0.0}, "not positive"),
        ({"scale": -1.0}, "not positive"),
        ({"seqlen_k": 0}, "no keys"),
        ({"batch": 0}, "no queries"),
        ({"seqlen_q": 100, "seqlen_k": 100_000, "batch": 1, "num_heads_q": 1}, "split"),
    ],
)
def test_refuses_what_it_cannot_run(changes: dict[str, Any], words: str | None) -> None:
    reason = hopper.problem_reason(_problem(**changes), 132)
    assert reason is None if words is None else words in (reason or "")


def test_takes_few_rows_with_a_block_mask_whose_lists_nobody_splits() -> None:
    problem = _problem(seqlen_q=1024, batch=1, num_heads_q=2)
    assert "split" in (hopper.problem_reason(problem, 132) or "")
    assert hopper.problem_reason(dataclasses.replace(problem, block_mask=BlockMask.butterfly(1024)), 132) is None


def test_refuses_packed_calls_without_tokens() -> None:
    assert hopper.problem_reason(_problem().packed([5, 0, 700], [5, 3, 0]), 132) is None
    for lengths in (([], []), ([0], [5]), ([5], [0])):
        assert "no queries or no keys" in (hopper.problem_reason(_problem().packed(*lengths), 132) or "")


def test_refuses_other_devices() -> None:
    cpu = Problem.dense(seqlen_q=8, num_heads_q=1, head_dim=64, dtype=torch.bfloat16)
    assert "not on cpu" in (hopper.BACKEND.supports(cpu) or "")


def test_reads_in_place_what_tma_takes_and_copies_the_rest() -> None:
    heads_first = torch.randn(2, 3, 40, 64).to(torch.bfloat16)
    packed = torch.randn(2, 40, 3, 3, 64).to(torch.bfloat16)
    one = heads_first[:, :, :, :8].transpose(1, 2)[:1, :, :1]
    for x in (heads_first.transpose(1, 2), *packed.unbind(2), one, one.expand(1, 40, 1, 8)):
        assert readable(x) is x
    odd = torch.randn(2 * 40 * 3 * 64 + 1).to(torch.bfloat16)[1:].view(2, 40, 3, 64)
    last = heads_first.permute(0, 2, 1, 3).movedim(3, 1).contiguous().movedim(1, 3)
    narrow = torch.randn(2, 40, 3, 68).to(torch.bfloat16)[..., :64]
    for x in (odd, last, narrow, one.expand(1, 40, 5, 8), one.expand(4, 40, 1, 8)):
        copy = readable(x)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, x)
    assert tma_strides((1, 40, 1, 8), (0, 64, 3, 1)) == (320, 64, 8, 1)


@pytest.mark.parametrize(("start", "length", "token"), [(0, 700, 0), (300, 77, 64), (999, 1, 0), (500, 0, 192)])
def test_places_in_packed_tensors_are_where_tokens_are(start: int, length: int, token: int) -> None:
    """The arithmetic of `places.py`: what TMA makes of a place, and which tokens it takes for ones."""
    total, step = 1000, 3 * 64
    shape, strides = packed_layout((total, 3, 64), (step, 64, 1))
    place = (2**30, start + length, 2**30 - length + token)
    address = sum(index * stride * 2 for index, stride in zip(place, strides, strict=False)) % 2**64
    assert address == (start + token) * step * 2
    assert (place[2] < shape[2]) == (token < length)
    assert all(index < size < 2**31 for index, size in zip(place[:2], shape, strict=False))
    assert all(0 < stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in strides[:-1])


def test_bias_is_read_in_place_where_its_keys_are_side_by_side() -> None:
    bias = torch.randn(2, 3, 5, 7)
    for x in (bias, bias[:1, :, :, 2:6], bias[..., :1], bias[:, :, :1].expand(2, 3, 9, 7), bias.transpose(1, 2)):
        assert readable_bias(x) is x
    keys_first = bias.transpose(2, 3)
    assert readable_bias(keys_first).is_contiguous()
    assert torch.equal(readable_bias(keys_first), keys_first)
