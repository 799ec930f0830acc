"""``tilestream report``: lines of a quick run, the figures and the page made of them, and bad input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from tilestream import teaching
from tilestream.bench import viewer
from tilestream.bench.cases import Case
from tilestream.bench.figures import draw_all
from tilestream.bench.gate import check
from tilestream.bench.measure import Line
from tilestream.bench.page_suite import make_lines, num_plan_steps, plan_for, teaching_provider
from tilestream.bench.providers import provider_named
from tilestream.bench.report import read_lines, write_lines
from tilestream.cli import main
from tilestream.cli.page import page
from tilestream.io.schedule import TileShape, schedule_cost

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.no_poison
CPU = torch.device("cpu")
VOID = {"meta", "link", "input", "br"}


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    """Those of a quick run."""
    steps: list[str] = []
    plan = plan_for(CPU, quick=True)
    found = list(make_lines(plan, steps.append))
    assert len(steps) == num_plan_steps(plan)
    return found


class Reader(HTMLParser):
    """Elements that are opened and closed, identifiers, and what is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.labels: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.fetched += [str(found[name]) for name in ("src", "href", "xlink:href") if found.get(name)]
        self.labels += [str(found["for"])] if "for" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_run_has_a_line_of_everything(lines: list[Line]) -> None:
    plan = plan_for(CPU, quick=True)
    parts = [line["part"] for line in lines]
    assert parts.count("lengths") == len(plan.lengths) * len(plan.providers)
    assert parts.count("setting") == len(plan.providers)
    assert parts.count("blocks") == len(plan.block_sizes)
    assert parts.count("kept") == len(plan.kept_fractions)
    assert {"roofs", "setting_model"} < set(parts)
    for line in lines:
        assert line["suite"] == "report"
        assert line["reason"] is None
        assert line["source"] == ("model" if line["part"] in ("kept", "setting_model") else "measured")
        assert {"device", "torch", "commit", "date", "platform"} <= line.keys()
        # Of a model there are no times, and nothing was measured twice.
        assert (line["source"] == "measured") == ("ms_p50" in line or line["part"] == "roofs")
    json.dumps(lines)


def test_kept_blocks_are_the_models(lines: list[Line]) -> None:
    kept = [line for line in lines if line["part"] == "kept"]
    problem = Case.from_dict(kept[-1]["config"]).problem("cpu")
    dense = sum(schedule_cost(problem, TileShape(64, 64), backward).traffic.total_bytes for backward in (False, True))
    assert (kept[-1]["kept_fraction"], kept[-1]["bytes_model"]) == (1.0, dense)
    assert [line["bytes_model"] for line in kept] == sorted(line["bytes_model"] for line in kept)
    assert kept[0]["bytes_model"] < kept[0]["bytes_standard"] / 2


def test_the_loop_whose_tiles_can_be_chosen_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("c", batch=2, seqlen_q=40, seqlen_k=56, num_heads_q=2, num_heads_kv=2, causal=True)
    provider = teaching_provider(16)
    assert provider.refuse(case, CPU) is None
    assert provider.refuse(case, torch.device("cuda")) == "teaching.py runs on the CPU, not on cuda"
    assert check(case, provider, CPU, with_gradients=True).is_green
    for changed in ({"dtype": "bfloat16"}, {"softcap": 1.0}, {"num_heads_kv": 1}):
        assert "teaching.py knows float32" in str(provider.refuse(Case(**{**case.to_dict(), **changed}), CPU))
    used = []
    forward = teaching.forward
    monkeypatch.setattr(teaching, "forward", lambda *given, **tiles: used.append(tiles) or forward(*given, **tiles))
    inputs = case.make_inputs(CPU)
    provider.prepare(case, inputs)(*inputs[:3])
    assert used == [{"block_m": 16, "block_n": 16}] * 4
    # One row tile of all rows reads every key once.
    once, often = (teaching_provider(block).traffic(case.problem("cpu"), False) for block in (64, 8))
    assert once is not None
    assert often is not None
    assert once.total_bytes < often.total_bytes


def test_every_figure_is_drawn_and_takes_the_pages_colour(lines: list[Line]) -> None:
    drawings = {drawing.name: drawing for drawing in draw_all(lines)}
    assert set(drawings) == {"blocks", "kept", "lengths", "roofline"}
    for drawing in drawings.values():
        assert drawing.svg.startswith("<svg")
        assert drawing.svg.endswith("</svg>")
        assert "currentColor" in drawing.svg
        # Neither black text, which a dark page would swallow, nor a ground of its own.
        assert "#000000" not in drawing.svg
        assert "#010203" not in drawing.svg
        assert not re.search(r"fill: #fff", drawing.svg)
    assert "no block-sparse kernels to measure yet" in drawings["kept"].description
    assert [drawing.svg for drawing in draw_all(lines)] == [drawing.svg for drawing in drawings.values()]


def test_figures_without_numbers_are_left_out(lines: list[Line]) -> None:
    assert draw_all([]) == []
    assert [drawing.name for drawing in draw_all([line for line in lines if line["part"] != "roofs"])] == [
        "blocks", "kept", "lengths",
    ]  # fmt: skip
    without = [{**line, "ms_p50": None, "reason": "it rained"} if "ms_p50" in line else line for line in lines]
    assert [drawing.name for drawing in draw_all(without)] == ["kept"]
    timed = [{**line, "ms_p50": 3.0} if line["part"] == "kept" else line for line in lines]
    [kept] = [drawing for drawing in draw_all(timed) if drawing.name == "kept"]
    assert "Time is not shown" not in kept.description


def test_the_page_is_whole_and_fetches_nothing(lines: list[Line]) -> None:
    text = page(lines, draw_all(lines))
    reader = Reader(text)
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert set(reader.labels) <= set(reader.ids)
    assert all(found.startswith(("#", "data:,")) for found in reader.fetched)
    # The only addresses are names of XML.
    assert set(re.findall(r"https?://[^\"' <)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "{{" not in text
    for line in lines:
        assert line["device"] in text
    assert f"torch {torch.__version__}" in text
    for words in ("moved (model)", "time (measured)", "prefers-color-scheme: dark", 'aria-live="polite"'):
        assert words in text


def test_what_a_line_says_cannot_break_the_page(lines: list[Line]) -> None:
    hostile = [{**line, "device": "</script><b>&GPU"} for line in lines]
    text = page(hostile, draw_all(hostile))
    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;&amp;GPU" in text


def test_the_viewers_data_is_every_choice() -> None:
    data = viewer.viewer_data()
    assert len(data["walks"]) == len(viewer.DIRECTIONS) * len(viewer.MASKS) * len(viewer.BLOCK_SIZES) ** 2
    json.dumps(data, allow_nan=False)
    walk = data["walks"]["forward/window/8/8"]
    kinds = {kind for row in walk["tile_kinds"] for kind in row}
    assert kinds == {"EMPTY", "PARTIAL", "FULL"}
    assert "NOT KEPT" in {kind for row in data["walks"]["backward/sparse/16/8"]["tile_kinds"] for kind in row}


def moved_line(**changes: Any) -> Line:
    case = Case("c", causal=True)
    facts = {
        "device": "a GPU",
        "device_type": "cuda",
        "num_threads": 2,
        "torch": "2.11",
        "platform": "L",
        "commit": "c",
    }
    moved = {"read_bytes": 7 * 10**9, "written_bytes": 10**9, "moved_bytes": 8 * 10**9, "bytes_model": 9 * 10**9}
    base = {"suite": "traffic", "part": "training", "mode": "both", "provider": "eager", "needs_grad": False}
    more = {"bytes_least": 10**9, "config": case.to_dict(), "date": "2026-01-01", "reason": None, "is_wrong": False}
    return {**base, **facts, **moved, **more, **changes}


def test_the_command_measures_and_shows_again(
    lines: list[Line], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilestream.cli.report.make_lines", lambda plan, step: iter(lines))
    out, kept = tmp_path / "new" / "page.html", tmp_path / "lines.jsonl"
    assert main(["report", "--quick", "--out", str(out), "--json", str(kept)]) == 0
    assert f"Written to {out}, its {len(lines)} lines to {kept}" in capsys.readouterr().out
    assert read_lines(kept) == lines
    first = out.read_text()
    assert main(["report", "--from", str(kept), "--out", str(out)]) == 0
    assert out.read_text() == first
    assert "Measured traffic" not in first
    measured = tmp_path / "traffic.jsonl"
    write_lines(measured, [moved_line(), moved_line(suite="misses", cache_bytes=2 << 20, measured_by="valgrind")])
    assert main(["report", "--from", str(kept), "--measured", str(measured), "--out", str(out)]) == 0
    text = out.read_text()
    assert "float32 causal forward and backward, 1x1024 tokens" in text
    assert "<td>8 GB</td>" in text
    assert "measured by valgrind of 2.1 MB on a GPU" in text
    assert "measured by ncu on a GPU" in text
    # A page of measurements alone, and a result that was wrong.
    write_lines(measured, [moved_line(is_wrong=True, reason="wrong result", moved_bytes=None)])
    assert main(["report", "--from", str(measured), "--out", str(out)]) == 1
    assert "tile viewer" in out.read_text().lower()


def test_an_interrupted_run_keeps_its_lines(
    lines: list[Line], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def some(plan: object, step: object) -> Iterator[Line]:
        yield from lines[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr("tilestream.cli.report.make_lines", some)
    kept = tmp_path / "lines.jsonl"
    assert main(["report", "--quick", "--out", str(tmp_path / "page.html"), "--json", str(kept)]) == 130
    assert read_lines(kept) == lines[:3]
    assert "interrupted" in capsys.readouterr().err


BAD_INPUTS = {
    "--from {file}/missing": "cannot read --from",
    "--from {missing}": "No such file",
    "--from {file}": "has no lines of a report",
    "--from {other}": "has no lines of a report",
    "--measured {broken} --quick": "--measured",
    "--from {file} --quick": "--from measures nothing, so --quick would do nothing",
    "--from {file} --threads 1": "--from measures nothing, so --threads would do nothing",
    "--threads 0": "--threads: must be at least 1, got 0",
    "--device nonsense": "must be a torch device",
    "--from {good} --out {folder}": "cannot write --out",
    "--from {good} --json {folder}": "cannot write --json",
    "--from": "expected at least one argument",
}


@pytest.mark.parametrize("line", BAD_INPUTS)
def test_bad_input_is_one_line_and_code_2(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"file": "hello", "other": '{"suite": "cpu"}\n[1]\n', "broken": '{"suite": "traffic"}\n'}
    texts["good"] = json.dumps(moved_line())
    paths = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    given = line.format(**paths, missing=tmp_path / "missing", folder=tmp_path)
    if "--out" not in given:
        given += f" --out {tmp_path / 'page.html'}"
    try:
        code: object = main(["report", *given.split()])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert BAD_INPUTS[line] in captured.err
    assert not (tmp_path / "page.html").exists()


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", "--quick", "--out", str(tmp_path / "page.html")]) == 2
    assert 'pip install "tilestream[cli]"' in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_gpus_plan_is_of_providers_that_there_are() -> None:
    plan = plan_for(torch.device("cuda"))
    assert {provider_named(name).name for name in plan.providers} == set(plan.providers)
    assert (plan.setting.batch, plan.setting.seqlen_q, plan.setting.dtype) == (64, 1024, "float16")
    assert max(case.seqlen_q for case in plan.lengths) == 16384
