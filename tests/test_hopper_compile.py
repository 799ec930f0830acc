"""The Hopper forward is compiled for a GPU that is not here: nothing spills, and no product waits for another.

Gluon has no interpreter: what the kernels compute is checked on a GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tilestream.backends import hopper
from tilestream.backends.hopper.call import block_of, readable, tma_strides
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

_WORKER = Path(__file__).with_name("hopper_compile_worker.py")
_NUM_WORKERS = 2


class Row(NamedTuple):
    """The kernel of one kind of call."""

    band: str
    dtype: str
    head_dim: int
    head_dim_v: int

    @property
    def id(self) -> str:
        return "-".join(map(str, self))


# A kernel takes 3 to 8 seconds. Widths are all that dispatch can choose; float16 differs in nothing but names.
ROWS = [
    *(
        Row(band, "bfloat16", d, d)
        for d, band in itertools.product((64, 128, 256), ("full", "causal", "window", "left"))
    ),
    *(Row("causal", "bfloat16", d, e) for d, e in itertools.permutations((64, 128, 256), 2)),
    *(Row("causal", "float16", d, d) for d in (64, 128, 256)),
]


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> dict[Row, dict[str, Any]]:
    """What every row uses, from `_NUM_WORKERS` processes side by side."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    folder = tmp_path_factory.mktemp("rows")
    shares = [ROWS[start::_NUM_WORKERS] for start in range(_NUM_WORKERS)]
    with ThreadPoolExecutor(_NUM_WORKERS) as workers:
        found = list(workers.map(_compile, shares, [folder / f"{index}.json" for index in range(_NUM_WORKERS)]))
    return {row: use for share in found for row, use in share.items()}


def _compile(rows: list[Row], path: Path) -> dict[Row, dict[str, Any]]:
    path.write_text(json.dumps([row._asdict() for row in rows]), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(_WORKER.parent.parent), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, _WORKER, path], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(zip(rows, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_compiles_without_waste(row: Row, uses: dict[Row, dict[str, Any]]) -> None:
    use = uses[row]
    assert "error" not in use, use["error"]
    assert use["shared"] <= use["shared_limit"], use
    assert use["spilled"] == 0, use
    assert use["mma"] == 0, use
    # Four waits a consumer; ptxas would wait for every single product if it could not tell them apart (C7515).
    assert 0 < 3 * use["waits"] < use["wgmma"] * 2, use


def test_rows_are_all_widths() -> None:
    widths = {(block_of(d), block_of(e)) for d, e in itertools.product(range(8, 257, 8), repeat=2)}
    assert widths == {(row.head_dim, row.head_dim_v) for row in ROWS}


def _problem(**changes: Any) -> Problem:
    spec = {
        name: changes.pop(name) for name in ("band", "scale", "softcap", "has_bias", "has_sinks") if name in changes
    }
    sizes = {"batch": 2, "seqlen_q": 1024, "num_heads_q": 16, "head_dim": 128, "dtype": torch.bfloat16, **changes}
    return Problem.dense(device_type="cuda", spec=AttentionSpec(**{"scale": 0.1, **spec}), **sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"band": Band(None, 0), "num_heads_kv": 4, "seqlen_k": 1, "head_dim": 8, "head_dim_v": 256}, None),
        ({"band": Band(10, -3), "seqlen_q": 1, "batch": 64, "dtype": torch.float16}, None),
        ({"dtype": torch.float32}, "float32"),
        ({"softcap": 3.0, "has_bias": True}, "softcap, bias not served yet"),
        ({"has_sinks": True}, "sinks"),
        ({"head_dim": 264}, "above 256"),
        ({"head_dim_v": 60}, "multiple of 8"),
        ({"scale": 0.0}, "not positive"),
        ({"scale": -1.0}, "not positive"),
        ({"seqlen_k": 0}, "no keys"),
        ({"batch": 0}, "no queries"),
        ({"seqlen_q": 1, "seqlen_k": 100_000, "batch": 1}, "split"),
    ],
)
def test_refuses_what_it_cannot_run(changes: dict[str, Any], words: str | None) -> None:
    reason = hopper._problem_reason(_problem(**changes), 132)
    assert reason is None if words is None else words in (reason or "")


def test_refuses_packed_calls_and_other_devices() -> None:
    assert "packed" in (hopper._problem_reason(_problem().packed([5, 7], [5, 7]), 132) or "")
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
