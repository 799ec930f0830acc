"""``tilestream bench hopper`` (forward) and ``bench traffic``: cells, peers, bars from lines, a played profiler."""

from __future__ import annotations

import json
import stat
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from targets import HAS_HOPPER
from test_bench_gpu import CPU, FAST, TINY, line_of, peer_of, without_cuda

from tilestream import dispatch
from tilestream.bench import gpu_suite, hopper_bars, providers, traffic, traffic_bars
from tilestream.bench.bars import Verdict
from tilestream.bench.cases import Case, square_case
from tilestream.bench.eager import eager_cost
from tilestream.bench.gpu_cells import PEERS, TRAINED, Cell, HopperDirection, hopper_plan, plan, traffic_plan
from tilestream.bench.gpu_suite import HOPPER_PROVIDER, measure_cells
from tilestream.bench.measure import Line
from tilestream.bench.providers import Provider, provider_named
from tilestream.bench.report import read_lines, write_lines
from tilestream.bench.traffic import checked_run, find_ncu, measure_traffic, traffic_models
from tilestream.cli import main
from tilestream.errors import ArgumentError, UnsupportedError
from tilestream.io.cost import Traffic
from tilestream.io.model import compulsory_bytes
from tilestream.io.ncu import KernelBytes, kernels_of
from tilestream.io.standard import standard_cost

Directions = Sequence[HopperDirection]
BFLOAT = Case("bf", head_dim=64, dtype="bfloat16", causal=True)


def hopper_line(cell: Cell, **ratios: float | None) -> Line:
    """A synthetic line; each ratio is our speed over that peer's, with None for a peer that has no number."""
    peers = {name: peer_of(ratio_p50=1.1) for name in PEERS[cell.part]}
    for name, ratio in ratios.items():
        peers[name.replace("_", "/")].update(ratio_p50=ratio, tflops=None if ratio is None else 600.0)
    facts = {"suite": "hopper", "case": cell.case.name, "seqlen_q": cell.case.seqlen_q, "provider": HOPPER_PROVIDER}
    return line_of(cell, **facts, peers=peers, **{"fa3-fwd": "0.0.3", "flash-attn-4": None})


def hopper_lines(
    change: Callable[[Cell], dict[str, float | None]] = lambda cell: {}, directions: Directions = ("forward",)
) -> list[Line]:
    return [hopper_line(cell, **change(cell)) for cell in hopper_plan(directions=directions)]


def traffic_line(cell: Cell, **changes: object) -> Line:
    moved = {"read_bytes": 3 << 20, "written_bytes": 1 << 20, "moved_bytes": 4 << 20, "bytes_least": 4 << 20}
    moved |= {"bytes_cached_model": 5 << 20, "over_cached_model": 1.0}
    more = {"bytes_model": 9 << 20, "over_least": 1.0, "kernels": [{"name": "f", "read_bytes": 1, "written_bytes": 1}]}
    provider = cell.provider or HOPPER_PROVIDER
    return line_of(cell, suite="traffic", provider=provider, peers={}, **{**moved, **more, **changes})


def met(verdicts: list[Verdict[Cell]]) -> list[str]:
    return [verdict.met for verdict in verdicts]


def test_the_cells_are_those_of_the_table_and_of_the_paper() -> None:
    cells = hopper_plan(directions=["forward"])
    layers = [cell.case for cell in cells if cell.is_layer]
    assert {(case.head_dim, case.causal, case.seqlen_q) for case in layers} == {
        (head_dim, causal, length)
        for head_dim in (64, 128, 256) for causal in (False, True) for length in (1024, 4096, 16384)
    }  # fmt: skip
    assert len(layers) == 18
    assert {(case.dtype, case.batch * case.seqlen_q, case.num_heads_q * case.head_dim) for case in layers} == {
        ("bfloat16", 16384, 2048)
    }
    gpt2 = [cell.case for cell in cells if not cell.is_layer]
    found = [(case.batch, case.num_heads_q, case.seqlen_q, case.head_dim, case.dtype, case.causal) for case in gpt2]
    assert found == [(64, 16, 1024, 64, "float16", False), (64, 16, 1024, 64, "float16", True)]
    assert {(cell.part, cell.mode, cell.suite) for cell in cells} == {("hopper", "forward", "hopper")}
    assert {cell.suite for cell in plan()} == {"gpu"}


def test_quick_cells_are_some_of_them() -> None:
    for cells_of in (hopper_plan, traffic_plan):
        quick, full = cells_of(quick=True), cells_of()
        assert {cell.key for cell in quick} < {cell.key for cell in full}
        assert len({cell.key for cell in full}) == len(full)
    forwards = [cell for cell in traffic_plan() if cell.part == "traffic"]
    assert [cell.is_layer for cell in forwards] == [False] * 2 + [True] * 6


def test_training_is_the_papers_setting_and_its_like() -> None:
    cells = [cell for cell in traffic_plan() if cell.part == "training"]
    assert {(cell.mode, cell.suite, cell.case.batch, cell.case.num_heads_q) for cell in cells} == {
        ("both", "traffic", 64, 16)
    }
    found = {(cell.provider, cell.case.causal, cell.case.dropout_p) for cell in cells}
    plain = {(name, causal, 0.0) for name in TRAINED for causal in (False, True)}
    assert found == plain | {("eager", True, 0.1), ("tilestream/triton", True, 0.1)}
    eager, case = provider_named("eager"), Case.from_dict(cells[-1].case.to_dict())
    problem = case.problem("cpu")
    standard = standard_cost(problem).traffic + standard_cost(problem, backward=True).traffic
    assert traffic_models(case, "both", eager, "cpu").model == standard
    # On a GPU dp * p is stored, and dq and dk are read and written once more.
    square, rows = 64 * 16 * 1024 * 1024 * 2, 64 * 16 * 1024 * 64 * 2
    assert traffic_models(case, "both", eager, "cuda").model == standard + Traffic(
        2 * square + 2 * rows, square + 2 * rows
    )


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_flash_attentions_refuse_with_reasons(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device: torch.device = CPU, **changes: object) -> str:
        case = Case(**{**BFLOAT.to_dict(), **changes})  # type: ignore[arg-type]
        return str(provider_named(name).refuse(case, device))

    assert reason() == "runs on CUDA, not on cpu"
    assert "float32" in reason(dtype="float32")
    assert "bias" in reason(has_bias=True)
    assert "alibi" in reason(has_alibi=True)
    assert "sinks" in reason(has_sinks=True)
    assert "dropout" in reason(dropout_p=0.5)
    assert "head_dim 40 and" in reason(head_dim=320, head_dim_v=320).replace("320", "40")
    assert "head_dim 60" in reason(head_dim=60, head_dim_v=60)
    assert ("float16" in reason(dtype="float16")) == (name == "fa3")
    assert ("windows" in reason(window=(5, 0))) == (name == "fa3")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a small GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    assert reason(torch.device("cuda")) == "is measured on sm_90, which a small GPU is not"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(providers, "_version", lambda package: None)
    assert "is not installed (docs/benchmarks.md says how)" in reason(torch.device("cuda"))
    monkeypatch.setattr(providers, "_version", lambda package: "1")
    assert reason(torch.device("cuda")) == "None"


@pytest.mark.parametrize(("name", "module"), [("fa3", "fa3_fwd_interface"), ("fa4", "flash_attn.cute")])
def test_flash_attentions_are_called_as_their_packages_want(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        asked.update(options)
        return q + v if name == "fa3" else (q + v, None)

    if "." in module:
        monkeypatch.setitem(sys.modules, module.split(".")[0], types.ModuleType(module.split(".")[0]))
    package = types.ModuleType(module)
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, package)
    inputs = BFLOAT.make_inputs(CPU)
    forward = provider_named(name).prepare(BFLOAT, inputs)
    assert torch.equal(forward(*inputs[:3]), inputs.query + inputs.value)
    assert asked == {"causal": True, "softcap": 0.0, **({"window_size": (None, None)} if name == "fa4" else {})}
    if name == "fa3":
        with pytest.raises(UnsupportedError, match="no backward"):
            forward(inputs.query.requires_grad_(), inputs.key, inputs.value)


def test_nobody_imports_a_peer_before_it_is_measured() -> None:
    assert not {"fa3_fwd_interface", "flash_attn", "flash_attn.cute"} & sys.modules.keys()
    assert providers.peer_versions().keys() == {"fa3-fwd", "flash-attn-4"}


def test_full_lines_meet_every_bar() -> None:
    found = hopper_bars.judge(hopper_lines())
    assert [(verdict.met, verdict.bar.limit, verdict.num_cells) for verdict in found] == [
        ("yes", 1.03, 18), ("yes", 0.95, 18), ("yes", 1.0, 2),
    ]  # fmt: skip


def test_the_best_peer_counts() -> None:
    mean, each, gpt2 = hopper_bars.judge(hopper_lines(lambda cell: {"fa4": 1.02, "sdpa_cudnn": 1.05}))
    assert (mean.met, each.met, gpt2.met) == ("no", "yes", "yes")
    assert mean.value == pytest.approx(1.02)


def test_one_slow_cell_misses_the_bar_of_each() -> None:
    lines = hopper_lines(lambda cell: {"fa3": 0.94} if cell.case.name.startswith("causal_4096_d128") else {})
    mean, each, gpt2 = hopper_bars.judge(lines)
    assert (mean.met, each.met, gpt2.met) == ("yes", "no", "yes")
    assert each.worst == "bfloat16 causal forward, 4x4096 tokens, head_dim 128, 16 heads: 0.94x"


def test_in_the_papers_setting_cudnn_alone_counts() -> None:
    slow = hopper_lines(lambda cell: {} if cell.is_layer else {"sdpa_cudnn": 0.99, "fa3": None})
    fine = hopper_lines(lambda cell: {} if cell.is_layer else {"fa4": 0.5, "fa3": None})
    assert met(hopper_bars.judge(slow)) == ["yes", "yes", "no"]
    assert met(hopper_bars.judge(fine)) == ["yes", "yes", "yes"]


def test_a_peer_without_a_number_meets_no_bar() -> None:
    found = hopper_bars.judge(hopper_lines(lambda cell: {"fa4": None} if cell.case.head_dim == 256 else {}))
    assert met(found) == ["not measured in full: 12 of 18 cells"] * 2 + ["yes"]
    assert met(hopper_bars.judge(hopper_lines()[:1])) == ["not measured in full: 1 of 18 cells"] * 2 + ["not measured"]


def test_the_table_has_the_form_of_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, slowest = "full_16384_d64_h1x32_bfloat16", "causal_1024_d256_h16x8_bfloat16"
    ratios: dict[str, dict[str, float | None]] = {
        slow: {"fa3": 0.98}, slowest: {"sdpa_cudnn": 0.961, "fa4": None},
    }  # fmt: skip
    lines = hopper_lines(lambda cell: ratios.get(cell.case.name, {}))
    lines[0]["peers"]["fa4"]["gate_reason"] = "out is off by 3"
    (_, layers), (_, gpt2) = hopper_bars.part_tables(lines)
    assert layers.headers == ("", HOPPER_PROVIDER, *PEERS["hopper"], "over the best peer")
    assert [row[0] for row in layers.rows] == [f"d={d} {mask}" for d in (64, 128, 256) for mask in ("full", "causal")]
    assert layers.rows[0][1:4] == ("642 / 642 / 642", "321 / 321 / 600", "321* / 321 / 321")
    assert layers.rows[0][-1] == "1.10 / 1.10 / 0.98"
    assert layers.rows[5][3] == "- / 321 / 321"
    assert [row[0] for row in gpt2.rows] == ["d=64 full", "d=64 causal"]
    monkeypatch.setattr(hopper_bars, "CAUSES", {slow: "it rained"})
    assert hopper_bars.slower_cells(lines) == [
        "bfloat16 causal forward, 16x1024 tokens, head_dim 256, 8 heads: 0.96 of sdpa/cudnn; no cause is named yet",
        "bfloat16 full forward, 1x16384 tokens, head_dim 64, 32 heads: 0.98 of fa3; it rained",
    ]
    report = hopper_bars.markdown_report(lines)
    assert "fa3-fwd 0.0.3, flash-attn-4 None" in report
    assert report.index("| bar | wanted |") < report.index("| d=64 full |") < report.index("Under their best peer")
    assert "Under" not in hopper_bars.markdown_report(hopper_lines())
    (table,) = (table for _, table in hopper_bars.part_tables(lines[:2]))
    assert table.rows[0][1] == "642 / 642 / -"


def test_causes_are_of_cells_that_there_are() -> None:
    assert hopper_bars.CAUSES.keys() <= {cell.case.name for cell in hopper_plan(directions=["forward"])}


@pytest.mark.no_poison
def test_what_is_not_chosen_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dispatch.explain(TINY.problem("cpu")).chosen
    cell, stand_in = Cell("hopper", TINY, "forward"), f"tilestream/{chosen}"
    monkeypatch.setattr(gpu_suite, "HOPPER_PROVIDER", stand_in)
    (line,) = measure_cells([cell], stand_in, FAST, device=CPU)
    assert (line["reason"], line["is_wrong"], line["chosen"], line["suite"]) == (None, False, chosen, "hopper")
    assert line["peers"].keys() == set(PEERS["hopper"])
    assert {peer["ms_p50"] for peer in line["peers"].values()} == {None}
    assert {"fa3-fwd", "flash-attn-4", "triton", "cuda", "cudnn"} <= line.keys()
    monkeypatch.setattr(gpu_suite, "_chosen", lambda stage, cell: "somebody")
    (line,) = measure_cells([cell], stand_in, FAST, device=CPU)
    assert (line["is_wrong"], line["ms_p50"], line["peers"]) == (True, None, {})
    assert line["reason"] == "a call that names no backend runs on tilestream/somebody"
    monkeypatch.undo()
    (line,) = measure_cells([cell], stand_in, FAST, device=CPU)
    assert line["reason"] is None


NCU = [
    "==PROF== Connected to process 7",
    '"ID","Process ID","Process Name","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"',
    '"0","7","python","forward_kernel","Command line profiler metrics","dram__bytes_read.sum","byte","4,096"',
    '"0","7","python","forward_kernel","Command line profiler metrics","dram__bytes_write.sum","byte","1,024"',
    '"1","7","python","exact, rows","Command line profiler metrics","dram__bytes_read.sum","byte","64.00"',
    '"1","7","python","exact, rows","Command line profiler metrics","dram__bytes_write.sum","byte","0"',
]


def test_the_profilers_table_is_read() -> None:
    assert kernels_of(NCU) == [KernelBytes("forward_kernel", 4096, 1024), KernelBytes("exact, rows", 64, 0)]
    assert kernels_of(NCU[:1]) == []
    with pytest.raises(ValueError, match="not in bytes"):
        kernels_of([text.replace('"byte"', '"Mbyte"') for text in NCU])
    with pytest.raises(KeyError):
        kernels_of(NCU[:-1])


def play(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    body: str,
    provided: Callable[[str], Provider] = lambda name: provider_named("sdpa"),
) -> None:
    """A program called ncu that does `body` with the path of its log as `log`, and a device that is there."""
    program = folder / "ncu"
    program.write_text(f"#!{sys.executable}\nimport sys\nlog = sys.argv[sys.argv.index('--log-file') + 1]\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(traffic, "facts", lambda device: {"device": "a GPU"})
    monkeypatch.setattr(traffic, "provider_named", provided)


def test_bytes_of_all_kernels_are_added_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, tmp_path, f"open(log, 'w').write({chr(10).join(NCU)!r})\nprint(sys.argv)")
    (line,) = measure_traffic([Cell("traffic", TINY, "forward")], "nobody")
    least = compulsory_bytes(TINY.problem("cuda"))
    assert (line["reason"], line["suite"], line["read_bytes"], line["written_bytes"]) == (None, "traffic", 4160, 1024)
    # The rest of what must be written was in the cache still.
    assert line["moved_bytes"] == 4160 + least.written_bytes > 4160 + 1024
    assert line["over_least"] == pytest.approx(line["moved_bytes"] / least.total_bytes)
    assert (line["bytes_least"], line["bytes_model"]) == (least.total_bytes, None)
    assert [kernel["name"] for kernel in line["kernels"]] == ["forward_kernel", "exact, rows"]
    assert Cell.of_line(json.loads(json.dumps(line))).key == Cell("traffic", TINY, "forward").key


def test_forward_and_backward_are_compared_with_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = f"open(log, 'w').write({chr(10).join(NCU)!r})\nopen({str(tmp_path / 'request')!r}, 'w').write(sys.argv[-1])"
    play(monkeypatch, tmp_path, body, provided=lambda name: provider_named(name))
    cell = Cell("training", replace(TINY, dropout_p=0.5), "both", provider="eager")
    (line,) = measure_traffic([cell], "sdpa")
    assert (line["reason"], line["provider"], line["mode"], line["suite"]) == (None, "eager", "both", "traffic")
    assert json.loads((tmp_path / "request").read_text()) == {
        "case": cell.case.to_dict(), "provider": "eager", "mode": "both",
    }  # fmt: skip
    problem = cell.case.problem("cuda")
    least = compulsory_bytes(problem) + compulsory_bytes(problem, backward=True)
    model = eager_cost(problem).traffic + eager_cost(problem, backward=True).traffic
    assert (line["bytes_least"], line["bytes_model"]) == (least.total_bytes, model.total_bytes)
    # Nothing that stores its scores moves a tensor twice in one pass.
    assert line["bytes_cached_model"] == line["bytes_model"]
    assert line["over_cached_model"] == pytest.approx((4160 + least.written_bytes) / model.total_bytes)
    assert Cell.of_line(json.loads(json.dumps(line))).key == cell.key
    assert Cell.of_line(line).key != Cell("training", cell.case, "both", provider="sdpa/flash").key


@pytest.mark.parametrize("mode", ["forward", "backward", "both"])
@pytest.mark.parametrize("name", ["tilestream/cpu", "eager", "materialised", "sdpa"])
def test_what_is_profiled_is_right_before(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("c", seqlen_q=24, seqlen_k=24, num_heads_q=2, num_heads_kv=2, head_dim=8, head_dim_v=8, causal=True)
    if name == "eager":
        # A mask that nobody else can draw: checked without.
        case = replace(case, dropout_p=0.5)
    request = {"case": case.to_dict(), "provider": name, "mode": mode}
    run, complaint = checked_run(request, CPU)
    assert complaint is None
    assert run is not None
    run.setup()
    assert len(run.call()) == {"forward": 1, "backward": 3, "both": 4}[mode]
    provider = provider_named(name)
    halved = replace(provider, prepare=lambda case, inputs: lambda *qkv: 0.5 * provider.prepare(case, inputs)(*qkv))
    monkeypatch.setattr(traffic, "provider_named", lambda name: halved)
    run, complaint = checked_run(request, CPU)
    assert run is None
    assert str(complaint).startswith("wrong result: out is off by")


def test_eager_operators_copy_nothing_and_refuse_what_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    eager = providers.eager_attention
    monkeypatch.setattr(providers, "eager_attention", lambda *given: seen.extend(given[:3]) or eager(*given))
    run, _ = checked_run(
        {
            "case": replace(TINY, batch=2, num_heads_q=2, num_heads_kv=2).to_dict(),
            "provider": "eager",
            "mode": "forward",
        },
        CPU,
    )
    assert run is not None
    seen.clear()
    run.call()
    pointers = {tensor.data_ptr() for tensor in seen}
    seen.clear()
    run.call()
    # Copies would lie elsewhere each time, or at least not be views of the inputs.
    assert {tensor.data_ptr() for tensor in seen} == pointers
    assert all(tensor._is_view() for tensor in seen)
    refuse = provider_named("eager").refuse
    assert refuse(replace(TINY, num_heads_q=2, num_heads_kv=1), CPU) == (
        "the eager operators have as many KV heads as query heads"
    )
    assert "leave out softcap" in str(refuse(replace(TINY, softcap=1.0), CPU))
    assert "query 0 sees no key" in str(refuse(replace(TINY, seqlen_q=40, seqlen_k=10, causal=True), CPU))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission')", "may not read the GPU's counters"),
        ("print('==ERROR== no such metric'); sys.exit(3)", "the profiled process failed: code 3, no such metric"),
        ("print('wrong result: out is off'); sys.exit(1)", "wrong result: out is off"),
        ("print('==WARNING== No kernels were profiled.')", "the profiler saw no kernel: ==WARNING== No kernels"),
        ('open(log, \'w\').write(\'"ID","Name"\\n"0","f"\')', "the profiler's table is not understood: KeyError"),
    ],
)
def test_what_the_profiler_cannot_count_has_a_reason(
    body: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play(monkeypatch, tmp_path, body)
    (line,) = measure_traffic([Cell("traffic", TINY, "forward")], "sdpa")
    assert reason in line["reason"]
    assert (line["moved_bytes"], line["over_least"], line["kernels"]) == (None, None, [])
    assert line["is_wrong"] == reason.startswith(("wrong", "the profiled process"))


def test_without_the_profiler_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(traffic, "_USUAL_PLACE", tmp_path / "ncu")
    with pytest.raises(ArgumentError, match="there is no ncu on the search path"):
        find_ncu()
    (tmp_path / "ncu").touch()
    assert find_ncu() == str(tmp_path / "ncu")


def test_the_bar_of_traffic_is_of_the_papers_setting() -> None:
    lines = [traffic_line(cell) for cell in traffic_plan()]
    lines[2]["over_least"] = 3.0
    assert met(traffic_bars.judge(lines)) == ["yes"] * 3
    lines[1]["over_least"] = 1.151
    assert met(traffic_bars.judge(lines)) == ["no", "yes", "yes"]
    assert met(traffic_bars.judge(lines[:1])) == ["not measured in full: 1 of 2 cells", "not measured", "not measured"]
    lines[0].update(reason="it rained", **dict.fromkeys(("read_bytes", "moved_bytes", "over_least"), None))
    report = traffic_bars.markdown_report(lines)
    assert "| - | 1 MiB | - | 4 MiB | - | 9 MiB | 1 |" in report
    assert "| 1.071 GB |" not in report
    assert "- tilestream/hopper, float16 full forward, 64x1024 tokens, head_dim 64, 16 heads: it rained" in report


@pytest.mark.parametrize(("over", "wanted"), [(1.031, ["no", "yes"]), (0.86, ["no", "yes"]), (1.16, ["no", "no"])])
def test_the_bars_of_the_model_hold_either_way(over: float, wanted: list[str]) -> None:
    lines = [traffic_line(cell) for cell in traffic_plan()]
    for line in lines:
        if line["part"] == "training" and line["provider"] != "sdpa/flash":
            line["over_cached_model"] = over
    assert met(traffic_bars.judge(lines)) == ["yes", *wanted]
    # FlashAttention-2 of PyTorch is shown beside them and has no bar: its passes are not modelled.
    for line in lines:
        line["over_cached_model"] = 9.0 if line["provider"] == "sdpa/flash" else 1.0
    assert met(traffic_bars.judge(lines)) == ["yes"] * 3
    report = traffic_bars.markdown_report(lines)
    assert (
        "| float16 causal forward and backward, 64x1024 tokens, head_dim 64, 16 heads, dropout 0.1 | eager | 3.15 MB |"
        in report
    )
    assert "| 9.000 |" in report


@pytest.mark.parametrize(("suite", "cells_of"), [("hopper", hopper_plan), ("traffic", traffic_plan)])
def test_the_commands_list_and_read(
    suite: str, cells_of: Callable[[bool], list[Cell]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", suite, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(cells_of(False))
    path = tmp_path / "lines.jsonl"
    lines = hopper_lines() if suite == "hopper" else [traffic_line(cell) for cell in traffic_plan()]
    write_lines(path, lines)
    report = {"hopper": hopper_bars, "traffic": traffic_bars}[suite].markdown_report
    assert main(["bench", suite, "--from", str(path), "--markdown"]) == 0
    assert capsys.readouterr().out == report(read_lines(path)) + "\n"
    assert main(["bench", suite, "--from", str(path)]) == 0
    assert main(["bench", "gpu", "--from", str(path)]) == 2
    lines[0]["is_wrong"] = True
    write_lines(path, lines)
    assert main(["bench", suite, "--from", str(path)]) == 1


@without_cuda
@pytest.mark.parametrize("suite", ["hopper", "traffic"])
def test_without_cuda_there_is_one_line(suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "lines.jsonl"
    assert main(["bench", suite, "--quick", "--output", str(output)]) == 2
    assert f"bench {suite} needs a CUDA device, and torch sees none" in capsys.readouterr().err
    assert not output.exists()


def test_traffic_takes_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "traffic", "--seconds", "1"]) == 2
    assert "--seconds does not go with the suite 'traffic'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not HAS_HOPPER, reason="needs sm_90")
def test_the_quick_part_on_a_hopper_gpu(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    assert main(["bench", "hopper", "--quick", "--seconds", "0.02", "--output", str(output)]) == 0
    lines = read_lines(output)
    assert [Cell.of_line(line).key for line in lines] == [cell.key for cell in hopper_plan(quick=True)]
    for line in lines:
        assert (line["reason"], line["chosen"]) == (None, "hopper")
        assert 0 < line["tflops"] < 2000
        # Those that PyTorch brings.
        assert {line["peers"][name]["reason"] for name in ("sdpa/cudnn", "sdpa/flash")} == {None}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.skipif(not HAS_HOPPER, reason="needs sm_90")
def test_traffic_on_a_hopper_gpu() -> None:
    try:
        find_ncu()
    except ArgumentError as error:
        pytest.skip(str(error))
    small = Cell("traffic", square_case(1024, "bfloat16", 64, causal=True, batch=16, num_heads=16), "forward")
    (line,) = measure_traffic([small], HOPPER_PROVIDER)
    if "ERR_NVGPUCTRPERM" in str(line["reason"]):
        pytest.skip(line["reason"])
    assert line["reason"] is None
    # The caches are empty when a kernel begins, so nothing can be read less than once.
    assert line["read_bytes"] > 0.99 * compulsory_bytes(small.case.problem("cuda")).read_bytes
    assert 0.99 < line["over_least"] < 2
