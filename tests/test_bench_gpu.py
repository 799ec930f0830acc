"""``tilestream bench gpu``: its cells, its bars from lines alone, its measuring (on a CPU instead), the command."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilestream.bench import gate, gpu_suite, providers
from tilestream.bench.bars import Verdict
from tilestream.bench.cases import Case
from tilestream.bench.gpu_bars import bars_table, judge, markdown_report, part_tables, suite_lines
from tilestream.bench.gpu_cells import CHANGED_LENGTHS, PEERS, Cell, plan
from tilestream.bench.gpu_suite import PROVIDER, measure_cells, suite_settings
from tilestream.bench.measure import Line, Settings
from tilestream.bench.providers import Provider, provider_named
from tilestream.bench.report import read_lines, write_lines
from tilestream.cli import main
from tilestream.errors import ArgumentError

CPU = torch.device("cpu")
FAST = Settings(min_samples=3, max_samples=3, budget_s=1.0, patience=75)
TINY = Case("tiny", seqlen_q=16, seqlen_k=16, num_heads_q=2, num_heads_kv=2, head_dim=8, head_dim_v=8, causal=True)
STAND_IN = "tilestream/cpu"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def peer_of(**changes: object) -> Line:
    """What a synthetic line says of a peer."""
    return {"ms_p50": 0.02, "tflops": 321.0, "ratio_p50": 2.0, "gate_reason": None, "reason": None, **changes}


def line_of(cell: Cell, **changes: object) -> Line:
    """A synthetic line that clears every bar."""
    is_compile = cell.part == "compile"
    return {
        "suite": "gpu", "part": cell.part, "mode": cell.mode, "needs_grad": cell.needs_grad,
        "config": json.loads(json.dumps(cell.case.to_dict())), "ms_p50": None if is_compile else 0.01,
        "tflops": 642.0, "peers": {name: peer_of() for name in PEERS[cell.part]}, "is_wrong": False, "reason": None,
        "first_use_s": 5.0 if is_compile else None, "num_files": 30 if is_compile else None,
        "new_files": dict.fromkeys(map(str, CHANGED_LENGTHS), 0) if is_compile else None,
        "device": "a GPU", "torch": "2", "cuda": "13", "cudnn": 9, "triton": "3", "commit": "abc", "date": "today",
        "provider": PROVIDER, **changes,
    }  # fmt: skip


def full_lines(change: Callable[[Cell], dict[str, object]] = lambda cell: {}) -> list[Line]:
    return [line_of(cell, **change(cell)) for cell in plan()]


def verdicts(lines: list[Line], name: str) -> list[Verdict[Cell]]:
    found = [verdict for verdict in judge(lines) if name in verdict.bar.name]
    assert found
    return found


def test_the_cells_cover_the_matrix() -> None:
    cells = plan()
    assert len({cell.key for cell in cells}) == len(cells)
    found = {
        (c.part, c.case.dtype, c.case.head_dim, c.case.seqlen_q, c.case.causal, c.mode)
        for c in cells if c.part in ("speed", "fp32")
    }  # fmt: skip
    assert found == {
        (part, dtype, head_dim, tokens, causal, mode)
        for part, dtype, lengths in (("speed", "bfloat16", (1024, 4096, 16384)), ("fp32", "float32", (1024, 4096)))
        for head_dim in (64, 128) for tokens in lengths for causal in (False, True) for mode in ("forward", "backward")
    }  # fmt: skip
    for cell in cells:
        case = cell.case
        assert (case.seqlen_q, case.num_heads_q, case.head_dim) == (case.seqlen_k, case.num_heads_kv, case.head_dim_v)
        if cell.part in ("speed", "fp32"):
            assert (case.batch * case.seqlen_q, case.num_heads_q * case.head_dim) == (16384, 2048)
    calls = [(c.case.batch, c.case.num_heads_q, c.case.seqlen_q, c.needs_grad) for c in cells if c.part == "call"]
    assert calls == [(1, 4, 128, False), (1, 4, 128, True)]
    assert [cell.mode for cell in cells if cell.part == "compile"] == ["forward", "both"]


def test_cells_of_one_case_stand_together() -> None:
    """So that its inputs, its oracle and what was compiled for it are made once."""
    changes = [cell.case for cell, previous in zip(plan()[1:], plan(), strict=False) if cell.case != previous.case]
    assert len(changes) + 1 == len({cell.case.name for cell in plan()})


def test_the_quick_cells_are_some_of_them() -> None:
    quick, full = plan(quick=True), plan()
    assert {cell.key for cell in quick} < {cell.key for cell in full}
    assert {cell.part for cell in quick} == {cell.part for cell in full}
    assert len(quick) <= 8


def test_full_lines_meet_every_bar() -> None:
    found = judge(full_lines())
    assert [verdict.met for verdict in found] == ["yes"] * len(found)
    assert sorted(verdict.bar.limit for verdict in found) == [0.0, 0.95, 1.0, 1.1, 1.1, 1.2, 10.0, 25.0, 25.0]
    assert [verdict.num_cells for verdict in found] == [12, 12, 24, 12, 16, 1, 1, 2, 2]


def change_peer(part: str, name: str, mode: str | None = None, **changes: object) -> list[Line]:
    """Full lines, of which those of `part` (and `mode`) say something else of a peer."""
    lines = full_lines()
    for line in lines:
        if line["part"] == part and mode in (None, line["mode"]):
            line["peers"][name].update(changes)
    return lines


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_mean_of_one_direction_is_missed_alone(mode: str) -> None:
    lines = change_peer("speed", "flex", mode, ratio_p50=1.09)
    found = {verdict.bar.name: verdict.met for verdict in verdicts(lines, "geometric mean")}
    missed = f"speed against flex_attention, geometric mean, {mode}"
    assert found == {name: "no" if name == missed else "yes" for name in found}
    assert missed in found
    assert [verdict.met for verdict in verdicts(lines, "flex_attention, each cell")] == ["yes"]


def test_one_slow_cell_misses_the_bar_of_each_and_not_the_mean() -> None:
    lines = full_lines()
    lines[3]["peers"]["flex"]["ratio_p50"] = 0.94
    (each,) = verdicts(lines, "flex_attention, each cell")
    assert (each.met, each.value) == ("no", 0.94)
    assert each.worst == "bfloat16 causal backward, 4x4096 tokens, head_dim 64, 32 heads: 0.94x"
    assert {verdict.met for verdict in verdicts(lines, "geometric mean")} == {"yes"}


def test_flash_is_a_bar_of_forwards_only() -> None:
    (slow,) = verdicts(change_peer("speed", "sdpa/flash", "forward", ratio_p50=1.19), "FlashAttention")
    (fine,) = verdicts(change_peer("speed", "sdpa/flash", "backward", ratio_p50=0.5), "FlashAttention")
    assert (slow.met, fine.met) == ("no", "yes")


def test_as_fast_in_float32_is_not_faster() -> None:
    (even,) = verdicts(change_peer("fp32", "sdpa/efficient", ratio_p50=1.0), "float32")
    (more,) = verdicts(change_peer("fp32", "sdpa/efficient", ratio_p50=1.001), "float32")
    assert (even.met, more.met) == ("no", "yes")


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("host's time of one call, no gradients", "call", {"ms_p50": 0.0251}),
        ("host's time of one call, inputs need", "call", {"ms_p50": math.nan}),
        ("first call", "compile", {"first_use_s": 10.1}),
        ("other lengths", "compile", {"new_files": {"2048": 0, "1000": 7}}),
    ],
)
def test_other_bars_can_be_missed(name: str, part: str, change: dict[str, object]) -> None:
    lines = full_lines(lambda cell: change if cell.part == part else {})
    assert {verdict.met for verdict in verdicts(lines, name)} == {"no"}


def test_a_cell_without_an_honest_number_is_the_worst() -> None:
    lines = full_lines()
    lines[7]["peers"]["flex"]["ratio_p50"] = math.nan
    assert [verdict.met for verdict in verdicts(lines, "flex_attention, each cell")] == ["no"]
    assert "no" in [verdict.met for verdict in verdicts(lines, "flex_attention, geometric mean")]


def test_missing_cells_never_meet_a_bar() -> None:
    quick = judge([line_of(cell) for cell in plan(quick=True)])
    assert [verdict.is_met for verdict in quick] == [None] * 5 + [True] * 2 + [None] * 2
    without_flex = verdicts(change_peer("speed", "flex", ratio_p50=None), "flex_attention")
    assert {verdict.met for verdict in without_flex} == {"not measured"}
    lines = full_lines()
    lines[0]["peers"] = {}
    (each,) = verdicts(lines, "flex_attention, each cell")
    assert each.met == "not measured in full: 23 of 24 cells"
    lines[1]["peers"]["flex"]["ratio_p50"] = 0.5
    assert [verdict.met for verdict in verdicts(lines, "flex_attention, each cell")] == ["no"]
    assert verdicts(lines, "flex_attention, geometric mean, forward")[0].is_met is None


def test_a_cache_that_stays_empty_says_nothing_of_other_lengths() -> None:
    (added,) = verdicts(full_lines(lambda cell: {"num_files": 0} if cell.part == "compile" else {}), "other lengths")
    assert added.met == "not measured"


def test_a_wrong_result_misses_its_bars() -> None:
    lines = full_lines()
    lines[0].update(is_wrong=True, peers={})
    assert [verdict.met for verdict in verdicts(lines, "flex_attention")] == ["no", "yes", "no"]
    assert str(verdicts(lines, "each cell")[0].worst).endswith(": wrong result")


def test_tables_come_from_lines() -> None:
    lines = change_peer("speed", "sdpa/cudnn", gate_reason="out is off by 3")
    lines[2]["peers"]["sdpa"].update(ms_p50=None, tflops=None, ratio_p50=None, reason="it rained")
    tables = dict(part_tables(lines))
    assert [(len(table.rows), table.headers[1]) for table in tables.values()] == [
        (12, PROVIDER), (12, PROVIDER), (8, PROVIDER), (8, PROVIDER), (2, PROVIDER), (2, "seconds"),
    ]  # fmt: skip
    forward = tables["bfloat16 forward, TFLOP/s, and our speed over each peer's"]
    assert forward.headers[2:] == (*PEERS["speed"], *(f"over {name}" for name in PEERS["speed"]))
    assert forward.rows[1] == (
        "head_dim 64, causal, 4096 tokens", "642", "321", "321", "321*", "-", "2.00", "2.00", "2.00*", "-",
    )  # fmt: skip
    assert tables["The host's time of one call, microseconds"].rows[0][1:] == ("10.0", "20.0")
    first = tables["The first call with an empty Triton cache"].rows[0]
    assert first[1:] == ("5.0", "30", "0 by 2048 tokens, 0 by 1000 tokens")
    for table in (bars_table(lines), *tables.values()):
        assert all(len(row) == len(table.headers) for row in table.rows)
    report = markdown_report(lines)
    assert report.startswith("Measured on a GPU, torch 2, CUDA 13, cuDNN 9, Triton 3, commit abc, today; ")
    assert report.index("| bar | wanted |") < report.index("| head_dim 64, causal, 1024 tokens |")
    assert "- sdpa/cudnn, bfloat16 causal forward, 16x1024 tokens, head_dim 64, 32 heads and 23 more: out is" in report
    assert "- sdpa, bfloat16 causal forward, 4x4096 tokens, head_dim 64, 32 heads: it rained" in report
    assert "Without a number" not in markdown_report(full_lines())


def test_other_lines_are_left_out() -> None:
    with pytest.raises(ArgumentError, match="without lines of `tilestream bench gpu`"):
        suite_lines([{"suite": "cpu"}, {"case": "causal_1k"}])


@pytest.mark.no_poison
def test_tiny_cells_from_end_to_end(tmp_path: Path) -> None:
    cells = [Cell("speed", TINY, mode) for mode in ("forward", "backward")]  # type: ignore[arg-type]
    cells += [Cell("call", TINY, "forward", needs_grad) for needs_grad in (False, True)]
    steps: list[str] = []
    lines = list(measure_cells(cells, STAND_IN, FAST, steps.append, CPU))
    assert steps[3] == "call: float32 causal forward that keeps a graph, 1x16 tokens, head_dim 8, 2 heads"
    assert [Cell.of_line(line).key for line in lines] == [cell.key for cell in cells]
    for line in lines:
        assert (line["reason"], line["is_wrong"], line["provider"]) == (None, False, STAND_IN)
        assert (line["num_samples"], line["error_vs_float64"] < 1e-6) == (3, True)
        assert line["peers"].keys() == set(PEERS[line["part"]])
        peer = line["peers"]["sdpa"]
        assert peer["reason"] is None
        assert peer["ratio_p20"] <= peer["ratio_p50"] <= peer["ratio_p80"]
        assert {"device", "torch", "commit", "triton", "cuda", "cudnn", "date"} <= line.keys()
    for line in lines[:2]:
        assert line["peers"]["sdpa"]["tflops"] == pytest.approx(line["flops"] / line["peers"]["sdpa"]["ms_p50"] / 1e9)
        refused = [line["peers"][name] for name in ("flex", "sdpa/flash", "sdpa/cudnn")]
        assert {(peer["reason"], peer["ms_p50"]) for peer in refused} == {("runs on CUDA, not on cpu", None)}
    assert lines[1]["flops"] == 2.5 * lines[0]["flops"]
    assert [line["tflops"] for line in lines[2:]] == [None, None]
    write_lines(tmp_path / "lines.jsonl", lines)
    assert suite_lines(read_lines(tmp_path / "lines.jsonl")) == json.loads(json.dumps(lines))


def test_the_first_use_is_timed_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sitecustomize stands in for Triton: a file in the cache per number of tokens that `attention` meets."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parent.parent}")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'TRITON_CACHE_DIR' in os.environ:\n"
        "    import tilestream.api as api\n"
        "    plain = api.attention\n"
        "    def attention(query, *rest, **options):\n"
        "        open(os.path.join(os.environ['TRITON_CACHE_DIR'], str(query.shape[1])), 'w').close()\n"
        "        return plain(query, *rest, **options)\n"
        "    api.attention = attention\n"
    )
    (line,) = measure_cells([Cell("compile", TINY, "both")], STAND_IN, FAST, device=CPU)
    assert line["reason"] is None
    assert 0 < line["first_use_s"] < 60
    assert (line["num_files"], line["new_files"]) == (1, {"2048": 1, "1000": 1})


def test_a_first_use_that_fails_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.exit('the machine is tired')")
    (line,) = measure_cells([Cell("compile", TINY, "forward")], STAND_IN, FAST, device=CPU)
    assert line["first_use_s"] is None
    assert "the process ended with code 1" in line["reason"]
    assert "the machine is tired" in line["reason"]


def spoil(monkeypatch: pytest.MonkeyPatch, bad: str, change: Callable[[Tensor], Tensor]) -> None:
    """Give the provider called `bad` another result."""

    def named(name: str) -> Provider:
        right = provider_named(name)

        def prepare(case: Case, inputs: object) -> Callable[..., Tensor]:
            forward = right.prepare(case, inputs)  # type: ignore[arg-type]
            return lambda query, key, value: change(forward(query, key, value))

        return dataclasses.replace(right, prepare=prepare) if name == bad else right

    monkeypatch.setattr(gpu_suite, "provider_named", named)


def raising(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        raise LookupError("no kernel\nfor this")
    return tensor


@pytest.mark.parametrize("bad", [STAND_IN, "sdpa"])
def test_who_raises_is_a_line_and_not_the_end(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, bad, raising)
    cells = [Cell("speed", TINY, "forward"), Cell("speed", TINY, "backward")]
    forward, backward = measure_cells(cells, STAND_IN, FAST, device=CPU)
    # It can run without a graph.
    assert (forward["reason"], forward["is_wrong"], forward["peers"]["sdpa"]["reason"]) == (None, False, None)
    assert backward["is_wrong"] == (bad == STAND_IN)
    loser = backward if bad == STAND_IN else backward["peers"]["sdpa"]
    assert (loser["reason"], loser["ms_p50"]) == ("failed: LookupError: no kernel", None)
    assert (backward["peers"] == {}) == (bad == STAND_IN)


def test_our_miss_of_the_gate_stands_instead_of_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, STAND_IN, lambda out: out + 0.01)
    (line,) = measure_cells([Cell("speed", TINY, "forward")], STAND_IN, FAST, device=CPU)
    assert line["reason"].startswith("wrong result: out is off by")
    assert (line["is_wrong"], line["ms_p50"]) == (True, None)


def test_a_peers_miss_of_the_gate_stands_beside_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "sdpa", lambda out: out + 0.01)
    (line,) = measure_cells([Cell("speed", TINY, "forward")], STAND_IN, FAST, device=CPU)
    assert line["peers"]["sdpa"]["gate_reason"].startswith("out is off by")
    assert (line["is_wrong"], line["peers"]["sdpa"]["ratio_p50"] > 0) == (False, True)


def test_what_takes_too_long_has_a_reason() -> None:
    impatient = dataclasses.replace(FAST, budget_s=1e-9)
    (line,) = measure_cells([Cell("speed", TINY, "forward")], STAND_IN, impatient, device=CPU)
    assert line["ms_p50"] is None
    assert line["reason"].startswith("3 turns would take more than")
    assert line["peers"]["sdpa"]["ratio_p50"] is None


def test_inputs_drawn_on_a_device_are_the_same_there_each_time() -> None:
    once, again, other = (TINY.make_inputs(CPU, seed, drawn_on=CPU).query for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


@pytest.mark.parametrize("name", ["flex", "sdpa/flash", "sdpa/cudnn", "sdpa/efficient"])
def test_peers_of_the_gpu_refuse_with_reasons(name: str) -> None:
    provider = provider_named(name)
    assert provider.refuse(TINY, CPU) == "runs on CUDA, not on cpu"
    for changes in ({"softcap": 3.0}, {"has_alibi": True}, {"has_sinks": True}, {"dropout_p": 0.5}):
        reason = str(provider.refuse(dataclasses.replace(TINY, **changes), CPU))  # type: ignore[arg-type]
        (feature,) = changes
        assert feature.removeprefix("has_").removesuffix("_p") in reason


def test_a_kernels_reasons_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def can_use(parameters: torch.backends.cuda.SDPAParams, debug: bool) -> bool:
        assert debug
        assert tuple(parameters.query.shape) == (1, 4, 32, 64)
        assert tuple(parameters.key.shape) == (1, 2, 48, 64)
        assert parameters.query.stride(-1) == 1
        assert (parameters.attn_mask is None, parameters.is_causal, parameters.enable_gqa) == (False, False, True)
        warnings.warn("it has a mask. (Triggered internally at some.h:1)", stacklevel=1)
        warnings.warn("it has groups.", stacklevel=1)
        return False

    case = Case("c", batch=3, seqlen_q=32, seqlen_k=48, num_heads_kv=2, causal=True)
    assert providers._kernel_reason(case, CPU, can_use) == "it has a mask. it has groups."
    assert providers._kernel_reason(case, CPU, lambda parameters, debug: True) is None
    assert "without a reason" in str(providers._kernel_reason(case, CPU, lambda parameters, debug: False))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_forced_kernel_is_the_one_that_runs() -> None:
    """PyTorch has FlashAttention on a CPU too, and no memory-efficient attention."""
    assert gate.check(TINY, provider_named("sdpa/flash"), CPU, with_gradients=True).is_green
    with pytest.raises(RuntimeError, match=r"No (viable backend|available kernel)"):
        gate.check(TINY, provider_named("sdpa/efficient"), CPU, with_gradients=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"causal": True, "num_heads_kv": 1},
        {"causal": True, "seqlen_q": 100},
        {"window": (30, 20)},
        {"window": (None, 5)},
        {"window": (40, None), "seqlen_q": 130, "batch": 2},
    ],
)
def test_flex_attention_gets_the_mask_of_the_case(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled here, which only makes it slow."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(providers, "_compiled_flex", lambda: flex_attention)
    sizes = {"seqlen_q": 256, "seqlen_k": 256, "num_heads_q": 2, "num_heads_kv": 2, "head_dim": 16, "head_dim_v": 16}
    case = Case("flex", **{**sizes, **changes})  # type: ignore[arg-type]
    assert gate.check(case, provider_named("flex"), CPU, with_gradients=False).is_green


def test_one_mask_object_per_mask() -> None:
    """Another one might be compiled again."""
    spec = dataclasses.replace(TINY, causal=True).spec
    assert providers._flex_mask(spec.band, 128, 256, CPU) is providers._flex_mask(spec.band, 128, 256, CPU)
    assert providers._flex_mask(spec.band, 128, 256, CPU) is not providers._flex_mask(spec.band, 256, 256, CPU)


def test_a_copy_without_git_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestream.bench.machine import code_version

    monkeypatch.setenv("TILESTREAM_COMMIT", "abc123")
    assert code_version.__wrapped__() == "abc123"
    monkeypatch.delenv("TILESTREAM_COMMIT")
    assert code_version.__wrapped__() != "abc123"


def test_the_command_lists_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--list", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "bfloat16 causal backward, 4x4096 tokens, head_dim 128, 16 heads" in out
    assert len(out.splitlines()) == 2 + len(plan(quick=True))


def test_the_command_reads_lines_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    write_lines(path, full_lines())
    assert main(["bench", "gpu", "--from", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("yes") == len(judge(full_lines()))
    assert "bfloat16 backward, TFLOP/s, and our speed over each peer's" in out
    assert main(["bench", "gpu", "--from", str(path), "--markdown"]) == 0
    assert capsys.readouterr().out == markdown_report(full_lines()) + "\n"
    write_lines(path, full_lines(lambda cell: {"is_wrong": cell.part == "call"}))
    assert main(["bench", "gpu", "--from", str(path)]) == 1


@without_cuda
def test_without_cuda_there_is_one_line_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "lines.jsonl"
    assert main(["bench", "gpu", "--quick", "--output", str(output)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "bench gpu needs a CUDA device, and torch sees none" in captured.err
    assert not output.exists()


def test_the_command_writes_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("tilestream.cli.bench_gpu.plan", lambda quick: [Cell("speed", TINY, "forward")])
    monkeypatch.setattr(
        "tilestream.cli.bench_gpu.measure_cells",
        lambda cells, name, settings, step: measure_cells(cells, name, settings, step, CPU),
    )
    output = tmp_path / "lines.jsonl"
    words = ["bench", "gpu", "--provider", STAND_IN, "--seconds", "0.01", "--output", str(output)]
    assert main(words) == 0
    measured = capsys.readouterr()
    assert "1 lines in" in measured.err
    assert main(["bench", "gpu", "--from", str(output)]) == 0
    assert capsys.readouterr().out == measured.out


@pytest.mark.parametrize(
    ("words", "complaint"),
    {
        "bench gpu --threads 2": "--threads does not go with the suite 'gpu'",
        "bench gpu --device cpu": "--device does not go with the suite 'gpu'",
        "bench gpu --seconds 0": "--seconds must be more than 0",
        "bench gpu --from nowhere.jsonl": "cannot read --from 'nowhere.jsonl'",
        "bench gpu --from nowhere.jsonl --quick": "--from measures nothing, so --quick would do nothing",
        "bench --quick": "--quick needs a suite: tilestream bench cpu or tilestream bench gpu",
    }.items(),
)
def test_bad_words_are_refused(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert complaint in capsys.readouterr().err


def test_settings_follow_the_seconds() -> None:
    assert suite_settings(0.5).budget_s == 0.5
    assert suite_settings().min_samples == 10


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.filterwarnings("ignore")
def test_the_quick_part_on_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    assert main(["bench", "gpu", "--quick", "--seconds", "0.02", "--output", str(output)]) == 0
    lines = suite_lines(read_lines(output))
    assert [Cell.of_line(line).key for line in lines] == [cell.key for cell in plan(quick=True)]
    for line in lines:
        assert line["reason"] is None
        assert line["device_type"] == "cuda"
        for peer in line["peers"].values():
            assert (peer["reason"], peer["ratio_p50"] > 0) == (None, True)
        if line["part"] == "compile":
            assert line["num_files"] > 0
        elif line["part"] != "call":
            assert 0 < line["tflops"] < 2000
    assert all(verdict.num_measured > 0 for verdict in judge(lines))
