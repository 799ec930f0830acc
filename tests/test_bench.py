"""The harness: cases, providers, the gate, the memory meter, the lines and what is made of them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tilestream.backends.cpu import layout
from tilestream.backends.cpu.native.call import dtype_number
from tilestream.backends.cpu.native.library import library
from tilestream.backends.triton.configs import config_for
from tilestream.bench import gate
from tilestream.bench.cases import CASES, Case, case_named, growing_lengths
from tilestream.bench.machine import busy_warning, code_version, cpu_name
from tilestream.bench.measure import Settings, measure, num_steps
from tilestream.bench.memory import MemoryProbe, PeakMeter
from tilestream.bench.providers import Provider, kernel_cost, provider_named, provider_names
from tilestream.bench.report import (
    Table,
    format_bytes,
    format_count,
    markdown_table,
    measurement_table,
    read_lines,
    write_lines,
)
from tilestream.bench.runs import MODES, make_run
from tilestream.dispatch import backend
from tilestream.errors import ArgumentError
from tilestream.io.cost import Traffic
from tilestream.io.model import tiled_bytes
from tilestream.io.schedule import schedule_cost
from tilestream.problem import Problem

CPU = torch.device("cpu")
FAST = Settings(min_samples=2, max_samples=2, budget_s=60.0, with_memory=False)
LINE_KEYS = {
    "case", "provider", "mode", "ms_p50", "ms_p20", "ms_p80", "num_samples", "flops", "tflops", "bytes_model",
    "extra_memory_bytes", "extra_memory_reason", "error_vs_float64", "is_wrong", "reason", "seqlen_q", "seqlen_k",
    "config", "device", "device_type", "load_average", "num_threads", "commit", "torch", "platform", "date",
}  # fmt: skip
needs_resettable_peak = pytest.mark.skipif(sys.platform != "linux", reason="the peak can only be reset on Linux")


def small(case: Case) -> Case:
    """The same features on at most 80 tokens."""
    window = None if case.window is None else (17, 0)
    return dataclasses.replace(
        case, seqlen_q=min(case.seqlen_q, 65), seqlen_k=min(case.seqlen_k, 80), window=window, batch=min(case.batch, 2)
    )


def with_forward(change: float) -> Provider:
    """A provider whose result is `change` away from the materialised one."""
    right = provider_named("materialised")

    def prepare(case: Case, inputs: object) -> object:
        forward = right.prepare(case, inputs)  # type: ignore[arg-type]

        def changed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return forward(query, key, value) + change

        return changed

    return dataclasses.replace(right, name="changed", prepare=prepare)


def test_cases_survive_json() -> None:
    for case in CASES.values():
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
        assert CASES[case.name] is case


def test_growing_lengths_differ_in_nothing_else() -> None:
    short, long = growing_lengths([128, 256], num_heads_q=2, num_heads_kv=1)
    assert (short.name, short.seqlen_q, short.seqlen_k, short.causal) == ("causal_128", 128, 128, True)
    assert dataclasses.replace(long, name=short.name, seqlen_q=128, seqlen_k=128) == short


def test_another_dtype_shows_in_the_name() -> None:
    case = case_named("causal_1k")
    assert case.with_dtype("float32") is case
    assert case.with_dtype("bfloat16").name == "causal_1k_bfloat16"


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="'nope' does not exist; choose from full_1k"):
        case_named("nope")
    with pytest.raises(ArgumentError, match=r"choose from tilestream, tilestream/.*, sdpa, .*, flex, materialised"):
        provider_named("tilestream/nope")


@pytest.mark.parametrize("name", ["tilestream", *provider_names()])
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_providers_agree_with_the_oracle_or_refuse(case: Case, name: str) -> None:
    case, provider = small(case), provider_named(name)
    reason = provider.refuse(case, CPU)
    if name in ("tilestream", "tilestream/native", "tilestream/cpu"):
        assert reason is None
    if reason is None:
        assert gate.check(case, provider, CPU, with_gradients=True) == gate.Gate(pytest.approx(0, abs=0.05))


@pytest.mark.parametrize("name", ["tilestream/native", "tilestream/cpu", "sdpa", "materialised"])
def test_long_cases_are_checked_on_a_sample_of_rows(name: str) -> None:
    case = Case("long", seqlen_q=700, seqlen_k=750, num_heads_q=2, num_heads_kv=1, causal=True)
    assert gate.check(case, provider_named(name), CPU, with_gradients=True).is_green


@pytest.mark.parametrize("change", [1e-3, float("nan")])
def test_a_red_gate_gives_no_number(change: float) -> None:
    (line,) = measure([Case("c", seqlen_q=32, seqlen_k=32)], [with_forward(change)], ["forward"], CPU, FAST)
    assert line["is_wrong"]
    assert line["ms_p50"] is None
    assert "wrong result: out is off by" in line["reason"]


def test_peers_refuse_queries_without_keys() -> None:
    case = Case("void", seqlen_q=9, seqlen_k=5, causal=True)
    assert "query 0 sees no key" in str(provider_named("sdpa").refuse(case, CPU))
    assert "query 0 sees no key" in str(provider_named("materialised").refuse(case, CPU))


def test_what_cannot_fit_is_not_tried() -> None:
    huge = Case("huge", seqlen_q=1 << 22, seqlen_k=1 << 22, num_heads_q=1, num_heads_kv=1)
    (line,) = measure([huge], [provider_named("materialised")], ["forward"], CPU, FAST)
    assert line["ms_p50"] is None
    assert "GiB are free" in line["reason"]


def test_measure_yields_a_line_per_case_mode_and_provider(tmp_path: Path) -> None:
    cases = growing_lengths([32, 64], num_heads_q=2, num_heads_kv=1)
    providers = [provider_named(name) for name in ("tilestream", "sdpa", "materialised")]
    steps: list[str] = []
    lines = list(measure(cases, providers, MODES, CPU, FAST, steps.append))
    assert len(steps) == num_steps(2, 3, 3, FAST)
    expected = [(case.name, mode, provider.name) for case in cases for mode in MODES for provider in providers]
    assert [(line["case"], line["mode"], line["provider"]) for line in lines] == expected
    for line in lines:
        assert set(line) == LINE_KEYS
        assert line["ms_p20"] <= line["ms_p50"] <= line["ms_p80"]
        assert line["num_samples"] == 2
        assert line["tflops"] == pytest.approx(line["flops"] / line["ms_p50"] / 1e9)
        assert (line["bytes_model"] is None) == (line["provider"] == "sdpa")
    write_lines(tmp_path / "lines.jsonl", lines)
    assert read_lines(tmp_path / "lines.jsonl") == lines


@pytest.mark.parametrize("mode", MODES)
def test_runs_return_what_their_mode_makes(mode: str) -> None:
    case = Case("c", seqlen_q=8, seqlen_k=8, num_heads_q=2, num_heads_kv=1, head_dim=4, head_dim_v=6)
    run = make_run(case, provider_named("tilestream"), mode, CPU)  # type: ignore[arg-type]
    run.setup()
    out, gradients = (1, 8, 2, 6), [(1, 8, 2, 4), (1, 8, 1, 4), (1, 8, 1, 6)]
    expected = {"forward": [out], "backward": gradients, "both": [out, *gradients]}
    assert [tuple(tensor.shape) for tensor in run.call()] == expected[mode]


@needs_resettable_peak
@pytest.mark.no_poison
def test_the_meter_sees_the_peak_and_not_what_is_left() -> None:
    meter = PeakMeter()
    torch.ones(64 << 20, dtype=torch.uint8)
    meter.start()
    torch.ones(32 << 20, dtype=torch.uint8)
    rise = meter.rise_bytes()
    assert rise.reason is None
    assert rise.extra_bytes == pytest.approx(32 << 20, abs=4 << 20)
    meter.start()
    assert meter.rise_bytes().extra_bytes < 4 << 20


def test_where_the_peak_is_unknown_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilestream.bench.memory._reset_peak", lambda: False)
    monkeypatch.setattr("tilestream.bench.memory._psutil_process", lambda: None)
    meter = PeakMeter()
    meter.start()
    assert meter.rise_bytes() == (None, f"not measured: {sys.platform} needs the package psutil for it")


@needs_resettable_peak
def test_stored_scores_take_memory_and_tiles_do_not() -> None:
    case = Case("c", seqlen_q=2048, seqlen_k=2048, num_heads_q=2, num_heads_kv=2, causal=True)
    scores_bytes = 2 * 2048 * 2048 * 4
    with MemoryProbe(CPU) as probe:
        stored = probe.measure(case, "materialised", "forward").extra_bytes
        tiled = probe.measure(case, "tilestream", "forward").extra_bytes
        again = probe.measure(case, "materialised", "forward").extra_bytes
    assert stored is not None
    assert tiled is not None
    assert 2 * scores_bytes <= stored <= 3 * scores_bytes
    assert again == pytest.approx(stored, rel=0.1)
    assert tiled < scores_bytes / 2


def test_a_failing_child_is_a_reason_and_not_the_end() -> None:
    case = Case("c", seqlen_q=8, seqlen_k=8)
    with MemoryProbe(CPU) as probe:
        memory = probe.measure(case, "nobody", "forward")
        assert memory.extra_bytes is None
        assert "ended with code 1: " in str(memory.reason)
        assert "provider 'nobody' does not exist" in str(memory.reason)


def traffic_of(problem: Problem, backend: str, backward: bool) -> Traffic | None:
    cost = kernel_cost(problem, backend, backward)
    return None if cost is None else cost.traffic


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("seqlen", [1, 100, 5000])
def test_the_model_uses_the_tiles_that_the_backend_uses(group: int, seqlen: int) -> None:
    problem = Case("c", seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=2 * group, num_heads_kv=2).problem("cpu")
    block_m, _ = layout.tile_shape(problem, seqlen, seqlen)
    for backward in (False, True):
        assert traffic_of(problem, "cpu", backward) == tiled_bytes(problem, block_m, backward, packs_group=True)


@pytest.mark.parametrize("group", [1, 8])
def test_the_model_packs_rows_as_the_native_kernels_do(group: int) -> None:
    native = library()
    if native is None:
        pytest.skip("needs the native kernels")
    problem = Case("c", seqlen_q=640, seqlen_k=640, num_heads_q=8, num_heads_kv=8 // group).problem("cpu")
    for backward in (False, True):
        asked = dataclasses.replace(problem, is_backward=backward)
        rows, _ = native.tile_shape(dtype_number(torch.float32), backward)
        # As many rows of a tile, whatever the heads they are of.
        assert backend("native").tile_shape(asked).block_m * group == rows
        wanted = tiled_bytes(problem, rows // group, backward, packs_group=True)
        assert traffic_of(problem, "native", backward) == wanted


def test_the_model_of_a_gpus_backward_has_its_kernels() -> None:
    problem = Case("c", batch=64, num_heads_q=16, num_heads_kv=16, dtype="float16", causal=True).problem("cuda")
    asked = dataclasses.replace(problem, is_backward=True)
    shape, query, key = backend("triton").tile_shape(asked), config_for("query", asked), config_for("key", asked)
    assert (shape.block_m, shape.block_n) == (query.block_m, query.block_n)
    assert shape.key_pass == (key.block_m, key.block_n)
    cost = schedule_cost(asked, shape, backward=True)
    assert [one.name for one in cost.passes] == ["delta", "dk, dv", "dq"]
    # The accumulators of a single walk would be more by far.
    assert cost.traffic.total_bytes < 0.7 * tiled_bytes(problem, shape.block_m, backward=True).total_bytes
    # Hopper's adds up dq in memory, where it has kernels of its own, and is Triton's elsewhere.
    cost = schedule_cost(asked, backend("hopper").tile_shape(asked), backward=True)
    assert [one.name for one in cost.passes] == ["delta", "zero", "dk, dv, dq", "round"]
    dropped = dataclasses.replace(asked, spec=dataclasses.replace(asked.spec, dropout_p=0.1))
    assert backend("hopper").tile_shape(dropped) == backend("triton").tile_shape(dropped)


def test_a_backward_is_asked_for_its_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without its device here, whose backward has other tiles than its forward."""
    problem = Case("c", num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128, dtype="bfloat16").problem("cuda")
    asked: list[Problem] = []

    def explain(question: Problem, name: str | None) -> SimpleNamespace:
        asked.append(question)
        return SimpleNamespace(chosen="hopper")

    monkeypatch.setattr("tilestream.dispatch.explain", explain)
    for backward in (False, True):
        shape = backend("hopper").tile_shape(dataclasses.replace(problem, is_backward=backward))
        assert kernel_cost(problem, None, backward) == schedule_cost(problem, shape, backward)
        assert shape.dq_in_memory == backward
    assert [question.is_backward for question in asked] == [False, True]


def test_tables_show_the_lines() -> None:
    case = growing_lengths([32])[0]
    lines = list(measure([case], [provider_named("tilestream"), with_forward(1.0)], ["forward"], CPU, FAST))
    table = measurement_table(lines)
    assert [row[:3] for row in table.rows] == [("causal_32", "forward", who) for who in ("tilestream", "changed")]
    assert table.rows[1][3].startswith("no number: wrong result")
    assert all(len(row) == len(table.headers) for row in table.rows)
    text = markdown_table(Table(("a", "b"), [("1", "x|y")]))
    assert text.splitlines() == ["| a | b |", "| --- | --- |", "| 1 | x\\|y |"]


def test_numbers_are_short() -> None:
    sizes = {None: "-", 0: "0 B", 999: "999 B", 1000: "0.977 KiB", 1 << 20: "1 MiB", 5 << 30: "5 GiB"}
    assert {count: format_bytes(count) for count in sizes} == sizes
    assert [format_count(count) for count in (0, 999, 1_000_000, 34_400_000_000)] == ["0 ", "999 ", "1 M", "34.4 G"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tilestream.bench.plot import draw

    providers = [provider_named(name) for name in ("tilestream", "sdpa", "materialised")]
    lines = list(measure(growing_lengths([32, 64]), providers, ["forward"], CPU, FAST))
    lines[0]["extra_memory_bytes"] = 0
    draw(lines, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_and_the_code_have_names() -> None:
    assert cpu_name()
    assert code_version()


def test_a_busy_machine_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("tilestream.bench.machine.load_average", lambda: 1.5)
    assert busy_warning() is None
    monkeypatch.setattr("tilestream.bench.machine.load_average", lambda: 8.0)
    assert str(busy_warning()).startswith("This machine is busy (load 8.0 on 2 cores)")
