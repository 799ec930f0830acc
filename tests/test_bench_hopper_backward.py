"""``tilestream bench hopper``, its backward: cells, bars and tables from lines, measuring (on a CPU), the page."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_bench_gpu import CPU, FAST, TINY, spoil
from test_bench_hopper import hopper_lines, met

from tilestream import dispatch
from tilestream.bench import gpu_suite, hopper_bars
from tilestream.bench.gpu_cells import HOPPER_DIRECTIONS, PEERS, Cell, hopper_plan
from tilestream.bench.gpu_suite import HOPPER_PROVIDER, measure_cells
from tilestream.bench.measure import Line
from tilestream.bench.report import read_lines, write_lines
from tilestream.cli import main
from tilestream.dispatch import Explanation
from tilestream.problem import Problem

ROOT = Path(__file__).parent.parent
LAYER, TRAINING = Cell("hopper-backward", TINY, "backward"), Cell("hopper-training", TINY, "both")
Change = Callable[[Cell], dict[str, float | None]]


def backward_lines(change: Change = lambda cell: {}, milliseconds: float = 2.2) -> list[Line]:
    """Synthetic lines that clear every bar but for `change`, and so long for each training step."""
    lines = hopper_lines(change, ["backward"])
    for line in lines:
        if line["part"] == "hopper-training":
            line["ms_p50"] = milliseconds
    return lines


def test_the_cells_are_the_forwards_in_the_other_direction() -> None:
    forward, backward = (hopper_plan(directions=[direction]) for direction in HOPPER_DIRECTIONS)
    assert [cell.case for cell in backward] == [cell.case for cell in forward]
    found = [(cell.part, cell.mode, cell.suite, cell.is_layer) for cell in backward]
    assert (
        found
        == [("hopper-backward", "backward", "hopper", True)] * 18 + [("hopper-training", "both", "hopper", False)] * 2
    )
    assert hopper_plan() == forward + backward
    assert len({cell.key for cell in hopper_plan()}) == 40
    # The fa3 wheel has no backward.
    assert PEERS["hopper-backward"] == ("fa4", "sdpa/cudnn", "sdpa/flash")
    assert set(PEERS["hopper-training"]) == {*PEERS["hopper-backward"], "materialised"}
    quick = hopper_plan(quick=True, directions=["backward"])
    assert [cell.case.head_dim for cell in quick] == [64, 128, 256, 64]
    assert {cell.key for cell in quick} < {cell.key for cell in backward}


def test_full_lines_meet_every_bar() -> None:
    found = hopper_bars.judge(backward_lines())
    assert [(verdict.met, verdict.bar.limit, verdict.num_cells) for verdict in found] == [
        ("yes", 1.03, 18), ("yes", 0.93, 18), ("yes", 2.3, 1),
    ]  # fmt: skip


def test_the_best_peer_counts() -> None:
    mean, each, training = hopper_bars.judge(backward_lines(lambda cell: {"fa4": 1.02, "sdpa_cudnn": 1.05}))
    assert (mean.met, each.met, training.met) == ("no", "yes", "yes")
    assert mean.value == pytest.approx(1.02)


@pytest.mark.parametrize(("ratio", "verdict"), [(0.93, "yes"), (0.929, "no")])
def test_one_slow_cell_misses_the_bar_of_each(ratio: float, verdict: str) -> None:
    slow = "causal_4096_d128_h4x16_bfloat16"
    lines = backward_lines(lambda cell: {"sdpa_flash": ratio} if cell.case.name == slow else {})
    mean, each, training = hopper_bars.judge(lines)
    assert (mean.met, each.met, training.met) == ("yes", verdict, "yes")
    assert each.worst == f"bfloat16 causal backward, 4x4096 tokens, head_dim 128, 16 heads: {ratio}x"


@pytest.mark.parametrize(("milliseconds", "verdict"), [(2.3, "yes"), (2.31, "no"), (math.nan, "no")])
def test_a_training_step_without_a_mask_has_so_long(milliseconds: float, verdict: str) -> None:
    lines = backward_lines(milliseconds=milliseconds)
    # With a mask there is no bar.
    lines[-1]["ms_p50"] = 9.0
    assert met(hopper_bars.judge(lines)) == ["yes", "yes", verdict]


def test_a_wrong_gradient_meets_no_bar() -> None:
    lines = backward_lines()
    lines[0]["is_wrong"] = True
    assert met(hopper_bars.judge(lines)) == ["no", "no", "yes"]


def test_a_peer_without_a_number_meets_no_bar() -> None:
    lines = backward_lines(lambda cell: {"fa4": None} if cell.case.head_dim == 256 else {})
    assert met(hopper_bars.judge(lines)) == ["not measured in full: 12 of 18 cells"] * 2 + ["yes"]
    assert met(hopper_bars.judge(lines[:1])) == ["not measured in full: 1 of 18 cells"] * 2 + ["not measured"]


def test_directions_are_judged_apart() -> None:
    """Those that lines are of, so that a file of one of them says nothing about the other."""
    forward, backward = hopper_lines(lambda cell: {"fa3": 0.9}), backward_lines(lambda cell: {"fa4": 1.01})
    alone = met(hopper_bars.judge(forward)), met(hopper_bars.judge(backward))
    assert alone == (["no", "no", "yes"], ["no", "yes", "yes"])
    assert met(hopper_bars.judge(forward + backward)) == alone[0] + alone[1]
    names = [verdict.bar.name for verdict in hopper_bars.judge(forward + backward)]
    assert len(set(names)) == len(names)
    titles = [title for title, _ in hopper_bars.part_tables(forward + backward)]
    assert titles == [title for lines in (forward, backward) for title, _ in hopper_bars.part_tables(lines)]


def test_the_committed_lines_of_the_forward_are_shown_as_they_were() -> None:
    lines = read_lines(ROOT / "benchmarks" / "results" / "hopper-suite.jsonl")
    assert {line["part"] for line in lines} == {"hopper"}
    report = hopper_bars.markdown_report(lines)
    assert report in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert "backward" not in report


def test_the_tables_have_the_form_of_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, slowest = "full_16384_d64_h1x32_bfloat16", "causal_1024_d256_h16x8_bfloat16"
    ratios: dict[str, dict[str, float | None]] = {slow: {"fa4": 0.98}, slowest: {"sdpa_cudnn": 0.961, "fa4": None}}
    lines = backward_lines(lambda cell: ratios.get(cell.case.name, {}), 2.25)
    lines[-1]["peers"]["materialised"].update(ms_p50=22.5, ratio_p50=10.0)
    (layers_title, layers), (training_title, training) = hopper_bars.part_tables(lines)
    assert layers_title == "bfloat16 backward, TFLOP/s at 1k / 4k / 16k tokens a sequence"
    assert layers.headers == ("", HOPPER_PROVIDER, "fa4", "sdpa/cudnn", "sdpa/flash", "over the best peer")
    assert [row[0] for row in layers.rows] == [f"d={d} {mask}" for d in (64, 128, 256) for mask in ("full", "causal")]
    assert layers.rows[0][1:] == ("642 / 642 / 642", "321 / 321 / 600", *["321 / 321 / 321"] * 2, "1.10 / 1.10 / 0.98")
    assert layers.rows[5][2] == "- / 321 / 321"
    assert training_title.endswith("milliseconds")
    assert training.headers[-2:] == ("materialised", "over the best peer")
    assert training.rows == [
        ("d=64 full", "2.25", *["0.02"] * 4, "1.10"), ("d=64 causal", "2.25", *["0.02"] * 3, "22.50", "1.10"),
    ]  # fmt: skip
    # The forward's causes are not the backward's.
    monkeypatch.setattr(hopper_bars, "CAUSES", dict.fromkeys((slow, slowest), "it snowed"))
    monkeypatch.setattr(hopper_bars, "BACKWARD_CAUSES", {slow: "it rained"})
    assert hopper_bars.slower_cells(lines) == [
        "bfloat16 causal backward, 16x1024 tokens, head_dim 256, 8 heads: 0.96 of sdpa/cudnn; no cause is named yet",
        "bfloat16 full backward, 1x16384 tokens, head_dim 64, 32 heads: 0.98 of fa4; it rained",
    ]
    report = hopper_bars.markdown_report(lines)
    assert "; flash-attn-4 None." in report
    assert "fa3" not in report
    assert "2.5 times the operations" in report


def test_causes_are_of_cells_that_there_are() -> None:
    assert hopper_bars.BACKWARD_CAUSES.keys() <= {cell.case.name for cell in hopper_plan(directions=["backward"])}


@pytest.mark.no_poison
def test_tiny_cells_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = f"tilestream/{dispatch.explain(TINY.problem('cpu')).chosen}"
    monkeypatch.setattr(gpu_suite, "HOPPER_PROVIDER", stand_in)
    cells = [Cell("hopper", TINY, "forward"), LAYER, TRAINING]
    forward, layer, training = lines = list(measure_cells(cells, stand_in, FAST, device=CPU))
    for line, cell in zip(lines, cells, strict=True):
        assert (line["reason"], line["is_wrong"], line["num_samples"], line["suite"]) == (None, False, 3, "hopper")
        assert Cell.of_line(line).key == cell.key
        assert line["peers"].keys() == set(PEERS[cell.part])
        assert f"tilestream/{line['chosen']}" == stand_in
    assert layer["flops"] == 2.5 * forward["flops"]
    assert training["flops"] == 3.5 * forward["flops"]
    stored = training["peers"]["materialised"]
    assert (stored["reason"], stored["gate_reason"]) == (None, None)
    assert stored["ms_p50"] > 0
    # Both were measured in part, on the peers that run here.
    assert met(hopper_bars.judge(lines)) == ["not measured"] * 6


def test_what_is_not_chosen_for_the_backward_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(problem: Problem, backend: str | None = None) -> Explanation:
        return Explanation("triton" if problem.is_backward else "cpu", ())

    monkeypatch.setattr(gpu_suite, "HOPPER_PROVIDER", "tilestream/cpu")
    monkeypatch.setattr(dispatch, "explain", explain)
    layer, training = measure_cells([LAYER, TRAINING], "tilestream/cpu", FAST, device=CPU)
    for line, chosen in ((layer, "triton"), (training, "cpu and triton")):
        assert (line["is_wrong"], line["ms_p50"], line["chosen"]) == (True, None, chosen)
        assert line["reason"] == f"a call that names no backend runs on tilestream/{chosen}"


@pytest.mark.parametrize("cell", [LAYER, TRAINING], ids=lambda cell: cell.part)
def test_wrong_gradients_of_a_right_result_stand_instead_of_a_number(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "tilestream/cpu", lambda out: out + (out - out.detach()))
    (line,) = measure_cells([cell], "tilestream/cpu", FAST, device=CPU)
    assert (line["is_wrong"], line["ms_p50"], line["peers"]) == (True, None, {})
    assert line["reason"].startswith("wrong result: dq is off by")
    assert all(f"; {name} is off by" in line["reason"] for name in ("dk", "dv"))


def test_the_command_measures_a_part_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for direction in HOPPER_DIRECTIONS:
        assert main(["bench", "hopper", "--list", "--part", direction]) == 0
        listed = capsys.readouterr().out
        assert len(listed.splitlines()) == 2 + 20
        assert ("hopper-training" in listed) == (direction == "backward")
    assert main(["bench", "hopper", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 40


@pytest.mark.parametrize(
    ("words", "complaint"),
    {
        "bench --part backward": "--part needs a suite",
        "bench gpu --part backward": "--part does not go with the suite 'gpu'",
        "bench cpu --part backward": "--part does not go with the suite 'cpu'",
        "bench traffic --part forward": "--part does not go with the suite 'traffic'",
        "bench hopper --from lines.jsonl --part forward": "--from measures nothing, so --part would do nothing",
    }.items(),
)
def test_bad_words_are_refused(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert complaint in capsys.readouterr().err


def test_the_command_reads_lines_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, lines = tmp_path / "lines.jsonl", hopper_lines() + backward_lines()
    write_lines(path, lines)
    assert main(["bench", "hopper", "--from", str(path)]) == 0
    assert capsys.readouterr().out.count("yes") == 6
    lines[-1]["is_wrong"] = True
    write_lines(path, lines)
    assert main(["bench", "hopper", "--from", str(path)]) == 1


def test_the_page_shows_the_backward_when_its_lines_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "readme.py"))["main"].__globals__
    page, results = tmp_path / "benchmarks.md", tmp_path / "results"
    results.mkdir()
    for name in ("hopper", "traffic"):
        (results / f"{name}-suite.jsonl").write_bytes((ROOT / f"benchmarks/results/{name}-suite.jsonl").read_bytes())
    page.write_bytes((ROOT / "docs" / "benchmarks.md").read_bytes())
    parts = tool["PAGES"][tool["BENCHMARKS"]]
    for name, value in {"ROOT": tmp_path, "RESULTS": results, "PAGES": {page: parts}}.items():
        monkeypatch.setitem(tool, name, value)

    def section() -> str:
        text = page.read_text(encoding="utf-8")
        return text.partition("<!-- generated:hopper-backward -->\n")[2].partition("\n<!-- /generated -->")[0]

    assert tool["main"]([]) == 0
    before = page.read_text(encoding="utf-8")
    assert section() == (
        "No results are committed yet; `tilestream bench hopper --part backward` prints them for your machine."
    )
    lines = backward_lines(lambda cell: {"fa4": 0.97} if cell.case.head_dim == 256 else {})
    write_lines(results / "hopper-backward-suite.jsonl", lines)
    assert tool["main"](["--check"]) == 1
    assert "benchmarks.md is out of date" in capsys.readouterr().err
    assert tool["main"]([]) == 0
    assert section() == hopper_bars.markdown_report(lines)
    assert section().count("no cause is named yet") == 6
    # Nothing else of the page changes.
    text = page.read_text(encoding="utf-8").replace(section(), "")
    assert text == before.replace(before.partition("generated:hopper-backward -->\n")[2].partition("\n<!--")[0], "")
    assert tool["main"](["--check"]) == 0
