"""``tilestream bench block-sparse``: its masks, cells and bars, its measuring (on a CPU), its page, the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from tilestream.bench import gate, gpu_suite, sparse_figure, sparse_suite, traffic
from tilestream.bench.ahead import Request, compile_ahead
from tilestream.bench.bars import Verdict
from tilestream.bench.cases import Case, square_case
from tilestream.bench.gpu_cells import DENSE, PEERS, Cell
from tilestream.bench.measure import Line, Settings
from tilestream.bench.providers import Provider, provider_named
from tilestream.bench.report import read_lines, write_lines
from tilestream.bench.runs import Mode
from tilestream.bench.sparse_bars import judge, markdown_report, over_proportion, part_tables, suite_lines
from tilestream.bench.sparse_cells import GPU_PARTS, SPARSE_PARTS, sparse_plan
from tilestream.bench.sparse_suite import PROVIDER, cpu_settings, measure_sparse, requests
from tilestream.cli import main
from tilestream.errors import ArgumentError

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
FAST = Settings(min_samples=3, max_samples=3, budget_s=1.0, patience=75)
TINY = dataclasses.replace(square_case(64, "float32", 8, causal=False, num_heads=2), mask="kept_1/4", mask_block=8)
MODES: tuple[Mode, ...] = ("forward", "backward")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def tiny(part: str, **changes: Any) -> list[Cell]:
    case = dataclasses.replace(TINY, **changes)
    return [Cell(part, case, mode) for mode in MODES]  # type: ignore[arg-type]


def line_of(cell: Cell, **changes: object) -> Line:
    """A synthetic line that is proportional, and clears every bar."""
    kept = {"kept": 0.0, "butterfly": 10 / 512}.get(str(cell.case.mask).partition("_")[0], 0.3)
    kept = kept or 1 / int(str(cell.case.mask).partition("/")[2])
    peer = {"ms_p50": 3.0, "tflops": 9.0, "ratio_p50": 1.5, "gate_reason": None, "reason": None}
    peers = {name: dict(peer) for name in PEERS[cell.part]}
    if DENSE in peers:
        peers[DENSE] |= {"ms_p50": 2.0 / kept, "ratio_p50": 1 / kept}
    is_traffic = cell.part == "sparse-traffic"
    moved = {"read_bytes": 1 << 20, "written_bytes": 2 << 20, "moved_bytes": 3 << 20, "bytes_least": 4 << 20,
             "bytes_model": 9 << 20, "bytes_cached_model": 3 << 20, "over_least": 0.75, "over_cached_model": 1.1,
             "kernels": []}  # fmt: skip
    return {
        "suite": "block-sparse", "part": cell.part, "mode": cell.mode, "needs_grad": False, "chosen": "nobody",
        "config": json.loads(json.dumps(cell.case.to_dict())), "ms_p50": None if is_traffic else 2.0, "tflops": 9.0,
        "peers": peers, "kept_fraction": kept, "is_wrong": False, "reason": None, "device": "a <device>",
        "num_threads": 2, "torch": "2", "cuda": "13", "cudnn": 9, "triton": "3", "commit": "abc", "date": "today",
        "provider": PROVIDER, **(moved if is_traffic else {}), **changes,
    }  # fmt: skip


def full_lines(
    parts: tuple[Any, ...] = GPU_PARTS, change: Callable[[Cell], dict[str, object]] = lambda cell: {}
) -> list[Line]:
    return [line_of(cell, **change(cell)) for cell in sparse_plan(parts)]


def verdicts(lines: list[Line], name: str) -> list[Verdict[Cell]]:
    found = [verdict for verdict in judge(lines) if name in verdict.bar.name]
    assert found
    return found


def met(lines: list[Line]) -> list[str]:
    return [verdict.met for verdict in judge(lines)]


# ---- cells and bars


def test_the_cells_cover_the_matrix() -> None:
    cells = sparse_plan(SPARSE_PARTS)
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.suite for cell in cells} == {"block-sparse"}
    found = {(c.case.dtype, c.case.head_dim, c.case.mask, c.mode) for c in cells if c.part == "sparse-density"}
    masks = [f"kept_1/{one_in}" for one_in in (2, 4, 8, 16)]
    assert found == set(itertools.product(["bfloat16"], [64, 128], masks, MODES))
    for cell in cells:
        case = cell.case
        assert (case.batch, case.seqlen_q, case.mask_block) == (1, case.seqlen_k, 128)
        assert case.seqlen_q == {"sparse-butterfly": 65536, "sparse-cpu": 8192}.get(cell.part, 16384)
        if cell.part not in ("sparse-butterfly", "sparse-cpu"):
            assert case.num_heads_q * case.head_dim == 2048
    assert {(c.case.dtype, c.case.mask, c.mode) for c in cells if c.part == "sparse-cpu"} == set(
        itertools.product(["float32"], masks, MODES)
    )
    quick = sparse_plan(SPARSE_PARTS, quick=True)
    assert {cell.key for cell in quick} < {cell.key for cell in cells}
    assert {cell.part for cell in quick} == {cell.part for cell in cells}


def test_full_lines_meet_every_bar() -> None:
    assert met(full_lines()) == ["yes"] * 6
    assert [verdict.bar.limit for verdict in judge(full_lines())] == [1.15, 1.15, 1.2, 1.2, 30.0, 0.15]
    assert [verdict.num_cells for verdict in judge(full_lines())] == [8, 8, 8, 8, 1, 3]
    assert met(full_lines(("cpu",))) == ["yes"] * 2
    assert [verdict.bar.limit for verdict in judge(full_lines(("cpu",)))] == [1.25, 1.25]
    assert met(full_lines(SPARSE_PARTS)) == ["yes"] * 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("part", "limit"), [("density", 1.15), ("cpu", 1.25)])
def test_one_cell_out_of_proportion_misses_the_bar_of_its_direction(part: str, limit: float, mode: str) -> None:
    for excess in (limit - 0.001, limit + 0.001):
        lines = full_lines((part,))
        line = next(line for line in lines if line["mode"] == mode and line["config"]["mask"] == "kept_1/8")
        line["peers"][DENSE]["ratio_p50"] = 8 / excess
        assert over_proportion(line) == pytest.approx(excess)
        found = {verdict.bar.name: verdict.met for verdict in verdicts(lines, "kept fraction")}
        assert list(found.values()).count("no") == (excess > limit)
        assert all(mode in name for name, is_met in found.items() if is_met == "no")


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("flex_attention", "sparse-density", {"flex": {"ratio_p50": 1.19}}),
        ("flex_attention", "sparse-density", {"flex": {"ratio_p50": math.nan}}),
        ("butterfly", "sparse-butterfly", {DENSE: {"ratio_p50": 29.9}}),
    ],
)
def test_bars_of_speed_can_be_missed(name: str, part: str, change: dict[str, Line]) -> None:
    lines = full_lines()
    for line in lines:
        if line["part"] == part:
            for peer, values in change.items():
                line["peers"][peer].update(values)
    found = {verdict.bar.name: verdict.met for verdict in judge(lines)}
    assert {name in bar for bar, is_met in found.items() if is_met == "no"} == {True}
    assert {is_met for bar, is_met in found.items() if name in bar} == {"no"}


@pytest.mark.parametrize(("over", "wanted"), [(1.151, "no"), (0.849, "no"), (1.149, "yes"), (0.851, "yes")])
def test_traffic_is_off_either_way(over: float, wanted: str) -> None:
    lines = full_lines()
    lines[-1]["over_cached_model"] = over
    assert [verdict.met for verdict in verdicts(lines, "HBM")] == [wanted]


def test_missing_and_wrong_cells_never_meet_a_bar() -> None:
    lines = full_lines()
    lines[0]["peers"] = {}
    assert met(lines) == [
        "not measured in full: 7 of 8 cells", "yes", "not measured in full: 7 of 8 cells", "yes", "yes", "yes",
    ]  # fmt: skip
    lines = full_lines(change=lambda cell: {"is_wrong": cell.mode == "backward"})
    assert met(lines) == ["yes", "no", "yes", "no", "yes", "yes"]
    missing = {"reason": "there is no ncu", "over_cached_model": None, "moved_bytes": None, "over_least": None}
    without = full_lines(change=lambda cell: missing if cell.part == "sparse-traffic" else {})
    assert met(without) == ["yes"] * 5 + ["not measured"]
    assert "there is no ncu" in markdown_report(without)
    assert met([line_of(cell) for cell in sparse_plan(quick=True)])[4] == "yes"
    assert met([line_of(cell) for cell in sparse_plan(quick=True)]).count("yes") == 1


def test_tables_come_from_lines() -> None:
    lines = full_lines(SPARSE_PARTS)
    lines[0]["peers"]["flex"].update(gate_reason="out is off by 3")
    lines[1]["peers"]["flex"].update(ms_p50=None, ratio_p50=None, reason="it rained")
    tables = dict(part_tables(lines))
    assert [len(table.rows) for table in tables.values()] == [16, 1, 10, 8, 3]
    density = next(iter(tables.values()))
    assert density.headers == (
        "", "kept", "tilestream", "dense", "tilestream/hopper", "tilestream/triton", "flex", "over dense", "over flex",
        "over proportion",
    )  # fmt: skip
    assert density.rows[0] == (
        "kept 1/2, head_dim 64, 32 heads, forward", "0.5", "2", "4", "3", "3", "3*", "2.00", "1.50*", "1.00",
    )  # fmt: skip
    assert density.rows[1][6:9] == ("-", "2.00", "-")
    report = markdown_report(lines)
    assert "- flex, bfloat16 kept_1/2 backward, 1x16384 tokens, head_dim 64, 32 heads: it rained" in report
    with pytest.raises(ArgumentError, match="without lines of `tilestream bench block-sparse`"):
        suite_lines([{"suite": "gpu"}])


# ---- measuring


@pytest.mark.no_poison
def test_tiny_cells_from_end_to_end(tmp_path: Path) -> None:
    """The dense call is another problem, timed in the same turns and checked by an oracle of its own."""
    cells = [
        cell
        for mask in ("kept_1/4", "window")
        for part in ("sparse-density", "sparse-cpu")
        for cell in tiny(part, mask=mask)
    ]
    steps: list[str] = []
    lines = list(measure_sparse(cells, "tilestream/cpu", FAST, steps.append, CPU))
    assert steps[0] == "sparse-density: float32 kept_1/4 forward, 1x64 tokens, head_dim 8, 2 heads"
    assert [Cell.of_line(line).key for line in lines] == [cell.key for cell in cells]
    for line, cell in zip(lines, cells, strict=True):
        mask = cell.case.block_mask
        assert mask is not None
        assert (line["suite"], line["reason"], line["is_wrong"]) == ("block-sparse", None, False)
        assert (line["kept_fraction"], line["kept_pairs"]) == (mask.density, mask.pair_density())
        assert (line["num_samples"], line["error_vs_float64"] < 1e-6) == (3, True)
        dense = line["peers"][DENSE]
        assert (dense["reason"], dense["gate_reason"], dense["error_vs_float64"] < 1e-6) == (None, None, True)
        # Operations of the pairs that each computes.
        flops = dense["tflops"] * dense["ms_p50"] * 1e9 * line["kept_pairs"]
        assert line["flops"] == pytest.approx(flops * (1 if cell.case.mask == "kept_1/4" else 64**2 / mask_pairs(cell)))
        excess = 1 / dense["ratio_p50"] / line["kept_fraction"]
        assert over_proportion(line) == (None if cell.case.mask == "window" else pytest.approx(excess))
        assert line["peers"].keys() == set(PEERS[cell.part])
    write_lines(tmp_path / "lines.jsonl", lines)
    assert suite_lines(read_lines(tmp_path / "lines.jsonl")) == json.loads(json.dumps(lines))


def mask_pairs(cell: Cell) -> int:
    """Pairs of the dense call, which has the band of the mask."""
    mask = cell.case.block_mask
    assert mask is not None
    return mask.num_pairs()


def test_the_dense_call_is_prepared_once_for_all_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    consult = gate.consult
    monkeypatch.setattr(gate, "consult", lambda case, *rest: asked.append(case) or consult(case, *rest))
    cells = [cell for mask in ("kept_1/4", "kept_1/8") for cell in tiny("sparse-cpu", mask=mask)]
    assert len(list(measure_sparse(cells, "tilestream/cpu", FAST, device=CPU))) == 4
    assert [case.mask for case in asked] == ["kept_1/4", None, "kept_1/8"]


@pytest.mark.parametrize("spoils_dense", [False, True])
def test_the_gate_catches_a_wrong_result(spoils_dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is not followed is one: here a block too many is computed."""

    def named(name: str) -> Provider:
        right = provider_named(name)

        def prepare(case: Case, inputs: Any) -> Callable[..., Tensor]:
            if spoils_dense and case.mask is None:
                return lambda *tensors: right.prepare(case, inputs)(*tensors) + 0.01
            wrong = case if spoils_dense else dataclasses.replace(case, mask="kept_1/2")
            return right.prepare(wrong, inputs)

        return dataclasses.replace(right, prepare=prepare)

    monkeypatch.setattr(gpu_suite, "provider_named", named)
    forward, backward = measure_sparse(tiny("sparse-cpu"), "tilestream/cpu", FAST, device=CPU)
    for line in (forward, backward):
        wrong = line["peers"][DENSE] if spoils_dense else line
        assert wrong["reason"].startswith("wrong result: out is off by")
        assert wrong["ms_p50"] is None
        assert line["is_wrong"] == (not spoils_dense)
        assert spoils_dense or line["peers"] == {}
    if not spoils_dense:
        assert "dk is off by" in backward["reason"]


def test_without_the_profiler_lines_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(traffic, "_USUAL_PLACE", tmp_path / "ncu")
    monkeypatch.setattr(traffic, "facts", lambda device: {"device": "a GPU"})
    steps: list[str] = []
    cells = [Cell("sparse-traffic", TINY, "both")]
    (line,) = measure_sparse(cells, "tilestream/cpu", FAST, steps.append, CPU)
    assert "there is no ncu on the search path" in line["reason"]
    assert (line["moved_bytes"], line["over_cached_model"], line["is_wrong"]) == (None, None, False)
    assert line["bytes_model"] > line["bytes_cached_model"] > 0
    assert line["kept_fraction"] == 0.25
    assert Cell.of_line(json.loads(json.dumps(line))).key == cells[0].key


def test_what_is_compiled_ahead_covers_all_that_is_called() -> None:
    found = requests(sparse_plan())
    assert len(found) == len({(request.case.name, request.provider, request.mode) for request in found}) < 32
    flex = [request for request in found if request.provider == "flex"]
    assert {request.case.mask for request in flex} == {
        "kept_1/2", "butterfly", "causal", "window", "documents", "local_global", "strided",
    }  # fmt: skip
    assert {(request.case.head_dim, request.mode) for request in flex if request.case.mask == "kept_1/2"} == set(
        itertools.product((64, 128), ("forward", "both"))
    )
    ours = {(request.provider, request.case.head_dim, request.case.mask is None) for request in found} - {
        (request.provider, request.case.head_dim, False) for request in flex
    }
    names = ("tilestream", "tilestream/hopper", "tilestream/triton")
    assert ours == {*itertools.product(names, (64, 128), [False]), ("tilestream", 64, True), ("tilestream", 128, True)}
    assert {request.mode for request in found if request.provider != "flex"} == {"both"}


@pytest.mark.no_poison
def test_compiling_ahead_survives_who_fails() -> None:
    refused, right = Request(TINY, "sdpa", "forward"), Request(TINY, "tilestream/cpu", "both")
    assert compile_ahead([refused, right], CPU) == 1
    assert compile_ahead([], CPU) == 0
    # One that takes too long is ended.
    assert compile_ahead([right], CPU, limit_s=0.0) == 0


def test_a_gpu_is_compiled_for_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sparse_suite, "compile_ahead", lambda wanted, device: seen.append((len(wanted), device.type)))
    monkeypatch.setattr(
        sparse_suite, "measure_cells", lambda cells, *rest: seen.append((cells[0].part, rest[-1].type)) or iter(())
    )
    cells = [cell for part in ("sparse-density", "sparse-cpu") for cell in tiny(part)]
    assert list(measure_sparse(cells)) == []
    assert seen == [(len(requests(cells[:2])), "cuda"), ("sparse-density", "cuda"), ("sparse-cpu", "cpu")]


# ---- the page and the command


def test_the_figure_has_a_point_for_every_number() -> None:
    svg = sparse_figure.draw(full_lines())
    assert svg is not None
    assert svg == sparse_figure.draw(full_lines())
    root = ElementTree.fromstring(svg)
    names = [child.tag.rpartition("}")[2] for child in root.iter()]
    assert names.count("circle") == 3 * 16
    assert "a <device>" in str(root.findtext("{http://www.w3.org/2000/svg}title"))
    without_flex = [line for line in full_lines(("cpu",))]
    assert str(sparse_figure.draw(without_flex)).count("<circle") == 2 * 8
    assert "flex" not in str(sparse_figure.draw(without_flex))
    assert sparse_figure.draw([line | {"peers": {}} for line in full_lines()]) is None
    assert sparse_figure.draw([]) is None


def test_the_page_shows_what_lines_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "readme.py"))["main"].__globals__
    page, results, images = tmp_path / "block-sparse.md", tmp_path / "results", tmp_path / "images"
    for folder in (results, images):
        folder.mkdir()
    names = ("block-sparse-gpu", "block-sparse-cpu")
    page.write_text("".join(f"<!-- generated:{name} -->\n<!-- /generated -->\n" for name in names))
    parts = {name: tool["PAGES"][tool["BLOCK_SPARSE"]][name] for name in names}
    changes = {"ROOT": tmp_path, "RESULTS": results, "IMAGES": images, "PAGES": {page: parts}}
    for name, value in changes.items():
        monkeypatch.setitem(tool, name, value)
    assert tool["main"]([]) == 0
    text = page.read_text()
    assert text.count("Nothing is measured yet, so nothing is claimed; `tilestream bench block-sparse") == 2
    assert list(images.iterdir()) == []
    write_lines(results / "block-sparse-gpu.jsonl", full_lines())
    assert tool["main"](["--check"]) == 1
    complaints = capsys.readouterr().err
    assert "block-sparse.md is out of date" in complaints
    assert "block-sparse-gpu.svg is out of date" in complaints
    assert tool["main"]([]) == 0
    text = page.read_text()
    assert f"![time and speed against density](images/block-sparse-gpu.svg)\n\n{markdown_report(full_lines())}" in text
    assert text.count("Nothing is measured yet") == 1
    assert (images / "block-sparse-gpu.svg").read_text() == sparse_figure.draw(full_lines())
    assert tool["main"](["--check"]) == 0


def test_the_command_lists_and_reads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "block-sparse", "--list", "--part", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 8
    path = tmp_path / "lines.jsonl"
    write_lines(path, full_lines())
    assert main(["bench", "block-sparse", "--from", str(path)]) == 0
    assert capsys.readouterr().out.count("yes") == 6
    assert main(["bench", "block-sparse", "--from", str(path), "--markdown"]) == 0
    assert capsys.readouterr().out == markdown_report(full_lines()) + "\n"
    write_lines(path, full_lines(change=lambda cell: {"is_wrong": True}))
    assert main(["bench", "block-sparse", "--from", str(path)]) == 1


def test_the_command_writes_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilestream.cli.bench_sparse.sparse_plan", lambda parts, quick: tiny("sparse-cpu"))
    output = tmp_path / "lines.jsonl"
    threads = torch.get_num_threads()
    words = ["bench", "block-sparse", "--part", "cpu", "--seconds", "0.01", "--threads", "1", "--output", str(output)]
    try:
        assert main(words) == 0
    finally:
        torch.set_num_threads(threads)
    measured = capsys.readouterr()
    assert "2 lines in" in measured.err
    assert measured.err.count(" of proportion") == 2
    assert main(["bench", "block-sparse", "--from", str(output)]) == 0
    assert capsys.readouterr().out == measured.out


@without_cuda
def test_without_cuda_there_is_one_line_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "lines.jsonl"
    assert main(["bench", "block-sparse", "--output", str(output)]) == 2
    assert "needs a CUDA device, and torch sees none; --part cpu" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    {
        "bench block-sparse --part forward": "--part forward is of another suite; block-sparse has density, butterfly",
        "bench hopper --part cpu": "--part cpu is of another suite; hopper has forward, backward",
        "bench gpu --part cpu": "--part does not go with the suite 'gpu'",
        "bench block-sparse --threads 2": "--threads of bench block-sparse goes with --part cpu",
        "bench block-sparse --dtype float16": "--dtype does not go with the suite 'block-sparse'",
        "bench block-sparse --from nowhere.jsonl": "cannot read --from 'nowhere.jsonl'",
        "bench block-sparse --from nowhere.jsonl --part cpu": "--from measures nothing, so --part would do nothing",
    }.items(),
)
def test_bad_words_are_refused(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert complaint in capsys.readouterr().err


def test_settings_follow_the_seconds() -> None:
    assert (cpu_settings(0.5).budget_s, cpu_settings().min_samples) == (0.5, 3)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.filterwarnings("ignore")
def test_the_quick_part_on_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    assert main(["bench", "block-sparse", "--quick", "--seconds", "0.02", "--output", str(output)]) == 0
    lines = suite_lines(read_lines(output))
    assert [Cell.of_line(line).key for line in lines] == [cell.key for cell in sparse_plan(quick=True)]
    for line in lines:
        if line["part"] != "sparse-traffic":
            assert line["reason"] is None
            assert all(line["peers"][name]["ratio_p50"] > 0 for name in (DENSE, "flex"))
