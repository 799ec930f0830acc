"""The Hopper backward is compiled for a GPU that is not here: nothing spills, and no product waits for another."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compile_rows import ask
from interpreter import is_ready

from tilestream import BlockMask
from tilestream.backends import hopper
from tilestream.backends.hopper.call import block_of
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

_WORKER = Path(__file__).with_name("hopper_backward_compile_worker.py")


class Row(NamedTuple):
    """The kernel of one kind of call."""

    band: str
    features: str
    dtype: str
    head_dim: int
    head_dim_v: int

    @property
    def id(self) -> str:
        return "-".join(map(str, self))


_WIDTHS = (64, 128)
_BANDS = ("full", "causal", "window", "left")
# A kernel takes 3 to 8 seconds. Widths are all that can be chosen; float16 differs in nothing but names.
ROWS = [
    *(Row(band, "", "bfloat16", *widths) for widths in itertools.product(_WIDTHS, repeat=2) for band in _BANDS),
    *(Row("full", "blocks", "bfloat16", *widths) for widths in itertools.product(_WIDTHS, repeat=2)),
    Row("causal", "", "float16", 128, 128),
    *(Row(band, "", "bfloat16", 256, 256) for band in _BANDS),
    *(Row("window", "", "bfloat16", *widths) for widths in ((256, 128), (256, 64), (128, 256), (64, 256))),
    Row("causal", "", "float16", 256, 256),
]


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> dict[Row, dict[str, Any]]:
    """What every row uses."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    return ask(_WORKER, ROWS, tmp_path_factory.mktemp("rows") / "rows.json")


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_compiles_without_waste(row: Row, uses: dict[Row, dict[str, Any]]) -> None:
    use = uses[row]
    assert "error" not in use, use["error"]
    assert use["shared"] <= use["shared_limit"], use
    assert not use["unwritten"], use
    # A few numbers of a program wait in local memory from one tile of keys to the next; nothing does in a loop.
    assert use["spills_in_loops"] == 0, use
    assert use["spilled"] <= 96, use
    assert use["mma"] == 0, use
    # A few waits a consumer; ptxas would wait for every single product if it could not tell them apart (C7515).
    assert 0 < 4 * use["waits"] < use["wgmma"], use
    # Sums of dq are added four by four.
    assert use["wide_sums"] == use["sums"] > 0, use


def _problem(**changes: Any) -> Problem:
    names = {field.name for field in dataclasses.fields(AttentionSpec)} & changes.keys()
    spec = {name: changes.pop(name) for name in names}
    sizes = {"batch": 2, "seqlen_q": 1024, "num_heads_q": 16, "head_dim": 128, "dtype": torch.bfloat16, **changes}
    return Problem.dense(device_type="cuda", spec=AttentionSpec(**{"scale": 0.1, **spec}), is_backward=True, **sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"band": Band(None, 0), "num_heads_kv": 1, "seqlen_k": 1, "head_dim": 8}, None),
        ({"band": Band(10, -3), "seqlen_q": 64, "dtype": torch.float16, "has_sinks": True}, None),
        ({"head_dim": 40, "head_dim_v": 128}, None),
        ({"dtype": torch.float32}, "float32"),
        ({"deterministic": True}, "no fixed order"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"softcap": 3.0}, "softcap"),
        ({"has_alibi": True}, "ALiBi"),
        ({"has_bias": True}, "bias"),
        ({"head_dim": 136, "head_dim_v": 256}, None),
        ({"head_dim": 264}, "above 256"),
        ({"head_dim_v": 60}, "multiple of 8"),
        ({"scale": 0.0}, "not positive"),
        ({"seqlen_k": 0}, "no keys"),
        ({"seqlen_q": 63}, "fewer than 64 queries"),
        ({"batch": 2**14, "seqlen_q": 2**14}, "2\\*\\*28"),
    ],
)
def test_leaves_to_triton_what_it_cannot_run(changes: dict[str, Any], words: str | None) -> None:
    reason = hopper.backward_reason(_problem(**changes))
    assert reason is None if words is None else words.replace("\\", "") in (reason or "")


@pytest.mark.parametrize(("head_dim", "words"), [(64, None), (128, None), (136, "136")])
def test_takes_block_masks_up_to_128(head_dim: int, words: str | None) -> None:
    masked = dataclasses.replace(_problem(head_dim=head_dim), block_mask=BlockMask.butterfly(1024))
    reason = hopper.backward_reason(masked)
    assert reason is None if words is None else words in (reason or "")


def test_leaves_packed_sequences_to_triton() -> None:
    assert "packed" in (hopper.backward_reason(_problem().packed([500, 70], [500, 70])) or "")


@pytest.mark.skipif("not is_ready()", reason="needs Triton's interpreter")
@pytest.mark.parametrize(("seqlen_q", "head_dim"), [(130, 64), (64, 40), (200, 128), (70, 96), (65, 8), (100, 200)])
def test_sums_of_dq_become_rows(seqlen_q: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the order in which threads of a product hold them; with a flag for a row that is not finite."""
    from tilestream.backends.triton import plan
    from tilestream.backends.triton.call import Tensors, contiguous_strides, shapes_of
    from tilestream.backends.triton.configs import Config

    assert is_ready()
    # Interpreted, which its decorator decides.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "tilestream.backends.hopper.dq_sums", raising=False)
    dq_kernel = importlib.import_module("tilestream.backends.hopper.dq_sums").dq_kernel
    heads, width, num_tiles = 3, block_of(head_dim), -(-seqlen_q // 64)
    problem = Problem.dense(
        batch=2,
        seqlen_q=seqlen_q,
        num_heads_q=heads,
        head_dim=head_dim,
        dtype=torch.float16,
        spec=AttentionSpec(scale=0.5, band=Band(None, 0)),
    )
    # Whole numbers, which nothing rounds.
    rows = torch.randint(-50, 50, (2, heads, num_tiles * 64, width)).float()
    rows[0, 1, 5, 3] = torch.inf
    i, j = torch.arange(64)[:, None], torch.arange(64)[None, :]
    warp_row, lane = i // 16, 4 * (i % 8) + j % 8 // 2
    places = (512 * (j // 8) + 128 * warp_row + 4 * lane + 2 * (i // 8 % 2) + j % 2).flatten()
    sums = torch.empty(2, heads, num_tiles, width // 64, 4096)
    for tile, part in itertools.product(range(num_tiles), range(width // 64)):
        piece = rows[:, :, 64 * tile : 64 * tile + 64, 64 * part : 64 * part + 64]
        sums[:, :, tile, part, places] = piece.reshape(2, heads, 4096)
    strides = tuple(contiguous_strides(shapes_of(problem)[name]) for name in ("q", "k", "v", "out", "dout"))
    builder = plan.Builder(problem, plan.How(torch.device("cpu"), "ieee", strides))
    step = builder.row_step(dq_kernel, Config(64, 16, 4, 1), {"flags": True})
    dq = torch.full((2, seqlen_q, heads, head_dim), 7.0, dtype=torch.float16)
    flags = torch.zeros(1 + 2 * heads * seqlen_q, dtype=torch.int32)
    step.kernel[(step.num_programs,)](Tensors(dq, dq, dq, dq=dq, out_parts=sums, flags=flags), step.numbers, step.facts)
    assert torch.equal(dq, (rows[:, :, :seqlen_q, :head_dim] * 0.5).transpose(1, 2).half())
    assert flags.nonzero().flatten().tolist() == [0, 1 + seqlen_q + 5]
