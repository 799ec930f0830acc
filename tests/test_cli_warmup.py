"""``tilestream warmup``: what it plans, what it refuses, and one run of it in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tilestream.backends.triton.configs import config_for
from tilestream.cli import main, warmup
from tilestream.cli.warmup import FEATURES, Call, Variant, plan

# Not by importing it here: the suite imports Triton for its interpreter, which it decides when it is imported.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

BAD_INPUTS = {
    "--head-dims 0": "--head-dims: must be at least 1, got 0",
    "--head-dims 64/wide": "--head-dims: must be a whole number, got 'wide'",
    "--head-dims 64 520 --list": "cannot run this: head_dim 520 is above 512",
    "--dtypes float64": "invalid choice: 'float64'",
    "--groups 0": "--groups: must be at least 1, got 0",
    "--features causal+nope": "--features: must be full or some of causal, window",
    "--device toaster": "--device: must be a torch device such as cpu or cuda:0, got 'toaster'",
    "--device meta": "warmup needs a GPU, and 'meta' computes nothing; --list works without",
    "--device cuda:77": "warmup needs a GPU, and 'cuda:77' is not available on this machine; --list works without",
}


@pytest.mark.parametrize("line", BAD_INPUTS)
def test_bad_input_is_one_line_and_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["warmup", *line.split()])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert BAD_INPUTS[line] in err


def test_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--list"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    # 2 widths, 2 dtypes, 2 sets of features, each with 2 forwards and a backward.
    assert len(rows) == 24
    assert len(set(rows)) == 24


def test_a_list_of_chosen_calls(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--list --head-dims 192/128 --dtypes float32 --groups 4 --features sinks+causal varlen --no-backward"
    assert main(["warmup", *line.split()]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:4] for row in rows] == [["192/128", "float32", "4", "causal+sinks"]] * 2 + [
        ["192/128", "float32", "4", "varlen"]
    ]


def _forwards(group: int, head_dim: int, dtype: str) -> list[Call]:
    return plan([Variant(head_dim, head_dim, group, dtype, ("causal",))], with_backward=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_the_forwards_have_all_tiles_that_lengths_make(group: int, head_dim: int, dtype: str) -> None:
    """Few packed rows or many, each once."""
    tiles = {config_for("forward", call.problem("cuda")) for call in _forwards(group, head_dim, dtype)}
    assert len(tiles) == 2


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What kernels were compiled for, on a CPU that only notes it; it takes the calls because it could interpret."""
    from tilestream.backends.triton import plan as kernels

    # Not before the import, which it would decide for the whole process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    noted: set[Any] = set()

    def note(steps: Any, others: Any, *rest: Any) -> None:
        noted.update((step.kernel, step.config, step.facts, step.dtype, step.bias_dtype) for step in (*steps, *others))

    monkeypatch.setattr(kernels, "launch", note)
    return noted


@pytest.mark.parametrize("features", [(), ("causal",), ("window", "sinks"), ("causal", "bias"), FEATURES])
def test_other_calls_need_no_other_kernels(features: tuple[str, ...], launched: set[Any]) -> None:
    variant = Variant(64, 64, 2, "float16", features)
    for call in plan([variant], with_backward=True):
        warmup._compile(call, torch.device("cpu"))
    warm = set(launched)
    assert warm
    lengths = [(1, 1), (1, 300), (1, 3000), (8, 8), (8, 5000), (100, 100), (300, 300), (100, 3000), (40, 3)]
    for seqlen_q, seqlen_k in lengths:
        # One row of bias is one for all rows, whose gradient has a kernel of its own.
        for is_backward in (False, True) if seqlen_q > 1 else (False,):
            warmup._compile(Call(variant, "other", seqlen_q, seqlen_k, is_backward), torch.device("cpu"))
    assert launched == warm


def test_variants_are_made_once() -> None:
    variant = Variant(64, 64, 1, "float16", ())
    assert len(plan([variant, variant], with_backward=True)) == 3


def test_problems_have_the_features() -> None:
    (call,) = plan([Variant(64, 64, 2, "float16", FEATURES)], with_backward=False)
    problem = call.problem("cuda")
    assert problem.layout == "varlen"
    assert problem.group == 2
    assert set(problem.spec.features()) == set(FEATURES) - {"causal", "varlen"}
    assert (problem.spec.band.left, problem.spec.band.right) == (32, 0)


def test_a_run_in_the_interpreter() -> None:
    """Every call is made, with every feature; TRITON_INTERPRET must be there before Triton is imported."""
    features = ["causal", "+".join(FEATURES)]
    line = ["warmup", "--device", "cpu", "--head-dims", "16", "--dtypes", "float32", "--groups", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tilestream", *line, "--features", *features],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [row for row in done.stdout.splitlines() if row.startswith("16 ")]
    calls = ["prefill", "decode", "backward", "prefill", "backward"]
    assert len(rows) == len(calls)
    assert all(f"  {call}  " in row for row, call in zip(rows, calls, strict=True))
    assert "interpreter, which compiles nothing" in done.stdout
    assert done.stderr.count("warmup: 16 float32 2 ") == len(calls)


_COMPILES_TWICE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tilestream.cli.warmup import _listening

@triton.jit
def small_kernel(x):
    tl.store(x, 1.0)

with _listening() as kernels:
    for _ in range(2):
        triton.compile(ASTSource(small_kernel, {"x": "*fp32"}), target=GPUTarget("cuda", 90, 32))
print(kernels, triton.knobs.compilation.listener)
"""


def test_compilations_are_told_from_reads_of_the_cache(tmp_path: Path) -> None:
    """With Triton's compiler, which needs no GPU; in a file, because Triton reads the source of a kernel."""
    program = tmp_path / "compiles_twice.py"
    program.write_text(_COMPILES_TWICE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('small', False), ('small', True)] None"


@pytest.mark.gpu
def test_a_second_run_on_a_gpu_compiles_nothing(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tilestream", "warmup", "--head-dims", "64", "--dtypes", "float16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    outputs = [
        subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert "\n0 kernels compiled" not in outputs[0]
    assert "\n0 kernels compiled" in outputs[1]
    assert str(tmp_path) in outputs[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "tilestream: error: warmup needs a GPU, and 'cuda' is not available on this machine; --list works without.\n"
    )
