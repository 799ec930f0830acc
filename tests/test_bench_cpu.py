"""``tilestream bench cpu``: its cells, its turns, its bars from lines alone, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tilestream.bench import cpu_suite
from tilestream.bench.bars import Verdict
from tilestream.bench.cases import Case
from tilestream.bench.cpu_bars import bars_table, judge, markdown_report, ratio_tables, suite_lines
from tilestream.bench.cpu_cells import HEADS, LENGTHS, MAX_SCORES, Cell, plan, thread_counts
from tilestream.bench.cpu_suite import measure_cells, suite_settings
from tilestream.bench.measure import Line, Settings
from tilestream.bench.providers import Provider, provider_named
from tilestream.bench.report import read_lines, write_lines
from tilestream.bench.turns import take_turns
from tilestream.cli import main
from tilestream.errors import ArgumentError

FAST = Settings(min_samples=3, max_samples=3, budget_s=1.0, patience=75)
TINY = Case("tiny", seqlen_q=16, seqlen_k=16, num_heads_q=2, num_heads_kv=2, head_dim=8, head_dim_v=8, causal=True)
STAND_IN = "tilestream/cpu"


def line_of(cell: Cell, **changes: object) -> Line:
    """A synthetic line that clears every bar."""
    ratios = {"ratio": 9.0, "call": 2.0, "mask": 0.55, "decode": 0.9, "memory": 0.5}
    return {
        "suite": "cpu", "part": cell.part, "mode": cell.mode, "num_threads": cell.num_threads, "all_threads": 2,
        "config": json.loads(json.dumps(cell.case.to_dict())), "ratio_p50": ratios[cell.part], "ms_p50": 0.01,
        "fma_share": 0.8 if cell.uses_fma_peak else None, "visible_share": 0.5, "is_wrong": False, "reason": None,
        "device": "a processor", "isa": "some", "torch": "2", "commit": "abc", "date": "today", "load_average": 0.1,
        "provider": "tilestream/native", **changes,
    }  # fmt: skip


def full_lines(change: Callable[[Cell], dict[str, object]] = lambda cell: {}) -> list[Line]:
    return [line_of(cell, **change(cell)) for cell in plan((1, 2))]


def verdicts(lines: list[Line], name: str) -> list[Verdict[Cell]]:
    found = [verdict for verdict in judge(lines) if name in verdict.bar.name]
    assert found
    return found


def test_the_cells_cover_the_matrix() -> None:
    cells = plan((1, 2))
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.case.name: cell.case for cell in cells}.keys() == {cell.case.name for cell in cells}
    found = {
        (c.case.seqlen_q, c.case.batch * c.case.num_heads_q, c.case.head_dim, c.case.dtype, c.case.causal, c.mode,
         c.num_threads)
        for c in cells if c.part == "ratio"
    }  # fmt: skip
    wanted = {
        (tokens, batch * heads, head_dim, dtype, causal, mode, threads)
        for tokens in LENGTHS for batch, heads in HEADS for head_dim in (64, 128)
        for dtype in ("float32", "bfloat16", "float16") for causal in (False, True)
        for mode in ("forward", "backward") for threads in (1, 2)
        if batch * heads * tokens**2 <= MAX_SCORES
    }  # fmt: skip
    assert found == wanted
    assert {tokens for tokens, *_ in found} == {128, 512, 1024, 2048, 4096, 8192}
    assert max(tokens for tokens, heads, *_ in found if heads == 64) == 1024


def test_the_quick_cells_are_some_of_them() -> None:
    quick, full = plan((1, 2), quick=True), plan((1, 2))
    assert {cell.key for cell in quick} < {cell.key for cell in full}
    assert {cell.part for cell in quick} == {cell.part for cell in full}


def test_decoding_reads_more_than_any_cache_holds() -> None:
    for cell in plan((1,)):
        if cell.part == "decode":
            case = cell.case
            width = (case.head_dim + case.head_dim_v) * getattr(torch, case.dtype).itemsize
            assert case.batch * case.seqlen_k * case.num_heads_kv * width >= 1 << 30
            assert cell.checked_case.batch == 1


def test_thread_counts() -> None:
    assert thread_counts(3) == (3,)
    assert thread_counts(None)[0] == 1
    assert thread_counts(None)[-1] == torch.get_num_threads()


def test_turns_alternate_and_stop() -> None:
    calls: list[str] = []

    def take(name: str, value: float) -> Callable[[], float]:
        return lambda: calls.append(name) or value  # type: ignore[func-returns-value]

    turns = take_turns([take("a", 1.0), take("b", 2.0)], FAST)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert turns == [(1.0, 2.0)] * 3
    impatient = dataclasses.replace(FAST, budget_s=1e-9, patience=1)
    assert take_turns([take("a", 1.0)], impatient) == []


def test_full_lines_meet_every_bar() -> None:
    found = judge(full_lines())
    assert [verdict.met for verdict in found] == ["yes"] * len(found)
    assert {verdict.bar.limit for verdict in found} == {1.0, 1.35, 1.5, 8.0, 2.0, 0.75, 0.58, 1.25, 0.85, 25.0}


def test_one_slow_cell_misses_the_bar_of_each_and_not_the_mean() -> None:
    lines = full_lines()
    slow = next(
        line
        for line in lines
        if line["part"] == "ratio" and line["config"]["dtype"] == "float32" and line["num_threads"] == 2
    )
    slow["ratio_p50"] = 0.93
    one, all_threads = verdicts(lines, "each cell")
    assert (one.met, all_threads.met, all_threads.value) == ("yes", "no", 0.93)
    assert str(all_threads.worst).startswith(
        "float32 full forward, 128 tokens, head_dim 64, 1x1 heads, 2 threads: 0.93"
    )
    assert [verdict.met for verdict in verdicts(lines, "geometric mean")] == ["yes"] * 10


def test_means_are_geometric() -> None:
    halves = full_lines(lambda cell: {"ratio_p50": 1.0 if cell.case.causal else 4.0} if cell.part == "ratio" else {})
    one, _ = verdicts(halves, "float32 forward, ")[:2]
    assert one.value == pytest.approx(2.0)
    assert one.met == "yes"
    assert [verdict.met for verdict in verdicts(halves, "bfloat16 backward")] == ["no", "no"]


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("FMA peak", "ratio", {"fma_share": 0.74}),
        ("time of causal", "mask", {"ratio_p50": 0.59}),
        ("time of a window", "mask", {"ratio_p50": 0.63}),
        ("decode", "decode", {"ratio_p50": 0.84}),
        ("one call", "call", {"ms_p50": 0.026}),
        ("extra memory", "memory", {"ratio_p50": 1.51}),
        ("extra memory", "memory", {"ratio_p50": math.nan}),
    ],
)
def test_other_bars_can_be_missed(name: str, part: str, change: dict[str, object]) -> None:
    lines = full_lines(lambda cell: change if cell.part == part else {})
    assert {verdict.met for verdict in verdicts(lines, name)} == {"no"}


def test_a_cell_without_an_honest_number_is_the_worst() -> None:
    lines = full_lines()
    next(line for line in lines[5:] if line["part"] == "ratio" and line["num_threads"] == 2)["ratio_p50"] = math.nan
    one, all_threads = verdicts(lines, "each cell")
    assert (one.met, all_threads.met) == ("yes", "no")


def test_missing_cells_never_meet_a_bar() -> None:
    lines = full_lines()
    for verdict in judge([lines[0]]):
        assert verdict.is_met is None
    unmeasured = full_lines(lambda cell: {"ratio_p50": None, "ms_p50": None, "fma_share": None})
    assert {verdict.met for verdict in judge(unmeasured)} == {"not measured"}
    # All but one cell of each bar.
    for verdict in judge([line for line in lines if line["config"]["dtype"] != "bfloat16" or line["part"] != "ratio"]):
        if "each cell" in verdict.bar.name:
            assert verdict.met == f"not measured in full: {verdict.num_measured} of {verdict.num_cells} cells"
    # Lines of one thread say nothing of all threads.
    one_thread = [line for line in lines if line["num_threads"] == 1]
    assert [verdict.met for verdict in verdicts(one_thread, "each cell")] == ["yes", "not measured"]


def test_a_miss_among_missing_cells_is_a_miss_for_each_and_open_for_a_mean() -> None:
    slow = [line_of(cell, ratio_p50=0.5) for cell in plan((1, 2), quick=True)]
    assert {verdict.met for verdict in verdicts(slow, "each cell")} == {"no"}
    assert all(verdict.is_met is None for verdict in verdicts(slow, "geometric mean"))


def test_a_wrong_result_misses_its_bars() -> None:
    lines = full_lines()
    lines[0].update(is_wrong=True, ratio_p50=None)
    one, all_threads = verdicts(lines, "each cell")
    assert (one.met, all_threads.met) == ("no", "yes")
    assert str(one.worst).endswith(": wrong result")


def test_tables_come_from_lines() -> None:
    def change(cell: Cell) -> dict[str, object]:
        heads = cell.case.batch * cell.case.num_heads_q
        return {"ratio_p50": {1: 1.25, 8: 3.5, 64: 2.5}[heads]} if cell.part == "ratio" else {}

    lines = full_lines(change)
    tables = dict(ratio_tables(lines))
    assert list(tables) == [
        "1 thread, 8 heads", "1 thread, the least of 1, 8, 64 heads",
        "2 threads, 8 heads", "2 threads, the least of 1, 8, 64 heads",
    ]  # fmt: skip
    eight, least = (tables[f"1 thread, {name}"] for name in ("8 heads", "the least of 1, 8, 64 heads"))
    assert eight.rows[0] == ("float32 forward, full, head_dim 64", "3.50", "3.50", "3.50", "3.50", "-", "-")
    assert least.rows[0][1:] == ("1.25",) * 6
    assert len(eight.rows) == 24
    report = markdown_report(lines)
    assert report.index("| bar | wanted |") < report.index("| float32 forward, full, head_dim 64 |")
    assert "Measured on a processor, 2 threads, instruction set some, torch 2, commit abc" in report
    assert all(len(row) == len(bars_table(lines).headers) for row in bars_table(lines).rows)


def test_other_lines_are_left_out() -> None:
    with pytest.raises(ArgumentError, match="without lines of `tilestream bench cpu`"):
        suite_lines([{"case": "causal_1k"}])


@pytest.mark.no_poison
def test_a_tiny_cell_from_end_to_end(tmp_path: Path) -> None:
    cells = [Cell("ratio", TINY, mode, 1) for mode in ("forward", "backward")]  # type: ignore[arg-type]
    cells += [
        Cell("mask", dataclasses.replace(TINY, window=(3, 0)), "forward", 1, TINY),
        Cell("memory", TINY, "both", 1),
    ]
    before = torch.get_num_threads()
    steps: list[str] = []
    lines = list(measure_cells(cells, STAND_IN, FAST, steps.append))
    assert torch.get_num_threads() == before
    assert steps[0] == "ratio: float32 causal forward, 16 tokens, head_dim 8, 1x2 heads, 1 thread"
    assert [Cell.of_line(line).key for line in lines] == [cell.key for cell in cells]
    for line in lines:
        assert line["reason"] is None
        assert not line["is_wrong"]
        assert line["provider"] == STAND_IN
        assert line["ratio_p50"] >= 0
        assert {"device", "torch", "commit", "num_threads", "load_average", "isa", "date"} <= line.keys()
    forward, _, mask, memory = lines
    assert (forward["peer"], forward["num_samples"], forward["peer_reason"]) == ("sdpa", 3, None)
    assert forward["ratio_p20"] <= forward["ratio_p50"] <= forward["ratio_p80"]
    assert 0 < mask["visible_share"] < 1
    assert memory["tensor_bytes"] == 2 * 3 * 2 * 16 * 8 * 4
    write_lines(tmp_path / "lines.jsonl", lines)
    assert suite_lines(read_lines(tmp_path / "lines.jsonl")) == json.loads(json.dumps(lines))


class _FixedPeaks:
    """A machine of 1 GFLOP/s and 1 GB/s."""

    def fma_gflops(self, seconds: float) -> float:
        return 1.0

    def read_gbps(self, buffer: Tensor, num_threads: int) -> float:
        return 1.0


def test_peaks_share_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_suite, "load_peaks", _FixedPeaks)
    monkeypatch.setattr(Cell, "uses_fma_peak", property(lambda cell: cell.part == "ratio"))
    decode = dataclasses.replace(TINY, name="decode", seqlen_q=1, batch=3, causal=False)
    peak, read = measure_cells(
        [Cell("ratio", TINY, "forward", 1), Cell("decode", decode, "forward", 1)], STAND_IN, FAST
    )
    assert peak["fma_gflops"] == 1.0
    assert peak["fma_share"] == pytest.approx(peak["flops"] / peak["ms_p50"] / 1e6)
    assert read["kv_bytes"] == 2 * 3 * 16 * 2 * 8 * 4
    assert read["ratio_p50"] == pytest.approx(read["kv_bytes"] / read["ms_p50"] / 1e6)


def test_without_the_native_library_there_is_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_suite, "load_peaks", lambda: None)
    (line,) = measure_cells([Cell("decode", TINY, "forward", 1)], STAND_IN, FAST)
    assert line["ratio_p50"] is None
    assert "measured by the native library" in line["reason"]


def test_what_takes_too_long_has_a_reason() -> None:
    (line,) = measure_cells([Cell("ratio", TINY, "forward", 1)], STAND_IN, dataclasses.replace(FAST, budget_s=1e-9))
    assert line["ratio_p50"] is None
    assert line["reason"].startswith("3 turns would take more than")


def wrong_provider(name: str) -> Provider:
    """The provider of that name; tilestream's with a result that is off."""
    right = provider_named(name)
    if name == "sdpa":
        return right

    def prepare(case: Case, inputs: object) -> Callable[..., Tensor]:
        forward = right.prepare(case, inputs)  # type: ignore[arg-type]
        return lambda query, key, value: forward(query, key, value) + 0.01

    return dataclasses.replace(right, prepare=prepare)


def one_tiny_cell(*_: object) -> list[Cell]:
    return [Cell("ratio", TINY, "forward", 1)]


def test_the_command_measures_and_reads_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tilestream.cli.bench_cpu.plan", one_tiny_cell)
    output = tmp_path / "lines.jsonl"
    assert main(["bench", "cpu", "--provider", STAND_IN, "--seconds", "0.01", "--output", str(output)]) == 0
    measured = capsys.readouterr()
    assert "not measured" in measured.out
    assert "1 lines in" in measured.err
    assert main(["bench", "cpu", "--from", str(output)]) == 0
    assert capsys.readouterr().out == measured.out
    assert main(["bench", "cpu", "--from", str(output), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("Measured on ")


def test_a_wrong_result_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tilestream.cli.bench_cpu.plan", one_tiny_cell)
    monkeypatch.setattr(cpu_suite, "provider_named", wrong_provider)
    output = tmp_path / "lines.jsonl"
    assert main(["bench", "cpu", "--provider", STAND_IN, "--output", str(output)]) == 1
    (line,) = read_lines(output)
    assert (line["is_wrong"], line["ratio_p50"]) == (True, None)
    assert line["reason"].startswith("wrong result: out is off by")
    assert main(["bench", "cpu", "--from", str(output)]) == 1


def test_the_command_lists_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", "--list", "--quick", "--threads", "1"]) == 0
    assert "float32 full forward, 128 tokens, head_dim 64, 1x8 heads, 1 thread" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    {
        "bench tpu": "invalid choice: 'tpu'",
        "bench cpu --cases full_1k": "--cases does not go with the suite 'cpu'",
        "bench --quick": "--quick needs a suite: tilestream bench cpu",
        "bench cpu --provider nope": "provider 'nope' does not exist; choose from",
        "bench cpu --seconds -1": "--seconds must be more than 0",
        "bench cpu --from nowhere.jsonl": "cannot read --from 'nowhere.jsonl'",
        "bench cpu --from nowhere.jsonl --quick": "--from measures nothing, so --quick would do nothing",
        "bench cpu --output .": "cannot write --output '.'",
    }.items(),
)
def test_bad_words_are_refused(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_no_lines_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_text("no lines")
    assert main(["bench", "cpu", "--from", str(path)]) == 2
    assert "is not a file of JSON lines" in capsys.readouterr().err


def test_settings_follow_the_seconds() -> None:
    assert suite_settings(0.5).budget_s == 0.5
    assert suite_settings().min_samples == 3
