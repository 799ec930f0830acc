"""Write the generated parts of README.md and of six pages of docs, and figures of one of them.

    python tools/readme.py                      write them again
    python tools/readme.py --check              exit 1 if they are out of date
    python tools/readme.py --demo demo-output   first take over what `tilestream demo` wrote there

They stand between ``<!-- generated:NAME -->`` and ``<!-- /generated -->``. Numbers come from the JSON lines in
benchmarks/results, the support matrix from every backend's `supports`, the algorithm from teaching.py, memory traffic
from the model. Nothing between the markers is typed.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilestream import BlockMask, dispatch, teaching
from tilestream.backends import hopper
from tilestream.bench import bars, cpu_bars, gpu_bars, hopper_bars, sparse_bars, sparse_figure, traffic_bars
from tilestream.bench.approximate import bars as approximate_bars
from tilestream.bench.approximate import figure as approximate_figure
from tilestream.bench.measure import Line
from tilestream.bench.page_tables import figure_table, moved_tables, setting_table
from tilestream.bench.report import Table, format_bytes, markdown_table, measurement_table, read_lines
from tilestream.cli import traffic_tables
from tilestream.io.compare import Settings, algorithms, sweep
from tilestream.io.fast_memory import HOPPER_BYTES
from tilestream.problem import SUPPORTED_DTYPES, Problem
from tilestream.spec import AttentionSpec, Band

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
BLOCK_SPARSE = ROOT / "docs" / "block-sparse.md"
CPU_PERFORMANCE = ROOT / "docs" / "cpu-performance.md"
GPU_PERFORMANCE = ROOT / "docs" / "gpu-performance.md"
MEMORY_TRAFFIC = ROOT / "docs" / "memory-traffic.md"
RESULTS = ROOT / "benchmarks" / "results"
REPORT, MISSES = RESULTS / "report-cpu.jsonl", RESULTS / "traffic-misses.jsonl"
PICTURE = ROOT / "docs" / "images" / "demo.png"
IMAGES = ROOT / "docs" / "images"
DEMO_FILES = {
    "attention.jsonl": RESULTS / "demo-attention.jsonl",
    "model.jsonl": RESULTS / "demo-model.jsonl",
    "attention.png": PICTURE,
}

_MARKED = re.compile(r"(<!-- generated:(?P<name>[a-z-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
_NO_NUMBERS = "No results are committed yet; `make demo` prints them for your machine."

# What is asked of every backend: how the question differs from plain attention of 8 sequences of 1024 tokens.
_QUESTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"spec": AttentionSpec(band=Band(None, 0))},
    "window": {"spec": AttentionSpec(band=Band(128, 64))},
    "soft cap": {"spec": AttentionSpec(softcap=30.0)},
    "bias, learnable": {"spec": AttentionSpec(has_bias=True)},
    "ALiBi": {"spec": AttentionSpec(has_alibi=True)},
    "sinks, learnable": {"spec": AttentionSpec(has_sinks=True)},
    "dropout": {"spec": AttentionSpec(dropout_p=0.1)},
    "deterministic gradients": {"spec": AttentionSpec(deterministic=True)},
    "GQA, MQA": {"num_heads_kv": 2},
    "seqlen_q != seqlen_k": {"seqlen_k": 100},
    "head_dim_v != head_dim": {"head_dim_v": 64},
    "head_dim 40": {"head_dim": 40},
    "head_dim 256": {"head_dim": 256},
    "head_dim 512": {"head_dim": 512},
}
_PACKED = "packed sequences (varlen)"
_BLOCK_MASK = "block masks (block-sparse)"
_DEVICE_TYPES = ("cpu", "cuda")
_NOTHING = "no"
_H200_PROCESSORS = 132


def support() -> str:
    """Feature by backend and device: the dtypes for which forward and backward both run."""
    columns = [(name, device_type) for name in dispatch.BACKENDS for device_type in _DEVICE_TYPES]
    features = (*_QUESTIONS, _PACKED, _BLOCK_MASK)
    cells = {column: [_dtypes(feature, *column) for feature in features] for column in columns}
    served = {column: found for column, found in cells.items() if set(found) != {_NOTHING}}
    headers = ("feature", *(f"`{name}` on {'sm_90' if name == 'hopper' else kind}" for name, kind in served))
    return markdown_table(Table(headers, list(zip(features, *served.values(), strict=True))))


def _dtypes(feature: str, backend: str, device_type: str) -> str:
    """The dtypes of one cell of the support matrix, such as `f16 bf16`."""
    accepted = []
    for dtype in SUPPORTED_DTYPES:
        sizes = {"batch": 8, "seqlen_q": 1024, "num_heads_q": 8, "head_dim": 128, **_QUESTIONS.get(feature, {})}
        problem = Problem.dense(dtype=dtype, device_type=device_type, **sizes)
        if feature == _PACKED:
            problem = problem.packed([1024, 200] * 4, [1024, 300] * 4)
        if feature == _BLOCK_MASK:
            problem = dataclasses.replace(problem, block_mask=BlockMask.butterfly(1024))
        directions = (problem, dataclasses.replace(problem, is_backward=True))
        if all(_refusal(backend, direction) is None for direction in directions):
            accepted.append(str(dtype).removeprefix("torch.").replace("float", "f"))
    return "all" if len(accepted) == len(SUPPORTED_DTYPES) else " ".join(accepted) or _NOTHING


def _refusal(backend: str, problem: Problem) -> str | None:
    """Why `backend` does not run `problem` on its kind of device, which need not be here."""
    if backend == "hopper" and problem.device_type == "cuda":
        reason = (
            hopper.backward_reason(problem) if problem.is_backward else hopper.problem_reason(problem, _H200_PROCESSORS)
        )
        if reason is None or not problem.is_backward:
            return reason
    # The backwards that it does not have are the Triton backend's.
    return dispatch.backend("triton" if backend == "hopper" else backend).supports(problem)


def teaching_forward() -> str:
    """The forward of teaching.py. The fence is not `python`, so it is shown but not run: imports are not part of it."""
    return f"```py\n{inspect.getsource(teaching.forward)}```"


def demo_attention() -> str:
    """The first half of `tilestream demo`."""
    path = DEMO_FILES["attention.jsonl"]
    if not path.exists():
        return _NO_NUMBERS
    lines = read_lines(path)
    return f"{markdown_table(measurement_table(lines))}\n\nOn {_machine(lines[0])}."


def demo_model() -> str:
    """The second half of `tilestream demo`."""
    path = DEMO_FILES["model.jsonl"]
    if not path.exists():
        return _NO_NUMBERS
    lines = read_lines(path)
    shown: dict[str, Callable[[dict[str, Any]], str]] = {
        "perplexity": lambda line: f"{line['perplexity']:.4f}",
        "reading, tokens/s": lambda line: f"{line['prefill_tokens_per_s']:.1f}",
        "writing, tokens/s": lambda line: f"{line['decode_tokens_per_s']:.1f}",
        "peak memory of reading, beyond the model": lambda line: format_bytes(line["peak_rise_bytes"]),
    }
    rows = [(name, *(show(line) for line in lines)) for name, show in shown.items()]
    same = all(line["new_tokens"] == lines[0]["new_tokens"] for line in lines)
    table = markdown_table(Table(("", *(line["arm"] for line in lines)), rows))
    verdict = f"The {len(lines[0]['new_tokens'])} tokens written next are {'the same' if same else 'NOT the same'}."
    return f"{table}\n\n{lines[0]['num_tokens']} tokens read, on {_machine(lines[0])}. {verdict}"


def _machine(line: dict[str, Any]) -> str:
    threads = f", {line['num_threads']} threads" if line.get("num_threads") else ""
    return f"{line['device']}{threads}, torch {line['torch']}"


def suite_report(suite: str, report: Callable[[Sequence[Line]], str], part: str | None = None) -> str:
    """The bars of a suite of ``tilestream bench``, or of a part of it, and what every contestant did."""
    path = RESULTS / f"{suite}{f'-{part}' if part else ''}-suite.jsonl"
    if not path.exists():
        command = f"tilestream bench {suite}{f' --part {part}' if part else ''}"
        return f"No results are committed yet; `{command}` prints them for your machine."
    return report(bars.suite_lines(read_lines(path), suite))


def approximate(results: Path = RESULTS) -> str:
    """Exact, block-sparse and approximate attention: claims, picture and tables of every committed run."""
    parts = []
    for path in _approximate_runs(results):
        lines = approximate_bars.suite_lines(read_lines(path))
        picture = f"![Time and memory against length](images/{path.stem}.png)"
        parts.append(f"{picture}\n\n{approximate_bars.markdown_report(lines)}")
    return "\n\n".join(parts) or (
        "No results are committed yet; `tilestream bench approximate --markdown` prints them for your machine."
    )


def _approximate_runs(results: Path = RESULTS) -> list[Path]:
    """Those of GPUs first: h200 before cpu, since the paper's claims are about GPUs."""
    return sorted(results.glob("approximate-*.jsonl"), reverse=True)


def _pictures() -> dict[Path, Path]:
    """Where the picture of each run of `approximate` is, and its lines."""
    return {PICTURE.parent / f"{path.stem}.png": path for path in _approximate_runs()}


def _gpt2_medium() -> Problem:
    """The call of FlashAttention's paper, figure 2 left."""
    spec = AttentionSpec(band=Band(None, 0), dropout_p=0.1)
    return Problem.dense(batch=64, seqlen_q=1024, num_heads_q=16, head_dim=64, dtype=torch.float16, spec=spec)


def traffic_model() -> str:
    """What each algorithm moves in all, and of each tensor."""
    columns = traffic_tables.columns_of(algorithms([_gpt2_medium()], Settings(HOPPER_BYTES, "both")), {})
    summary = markdown_table(traffic_tables.summary(columns, [], HOPPER_BYTES))
    return f"{summary}\n\nRead / written:\n\n{markdown_table(traffic_tables.by_tensor(columns))}"


def traffic_passes() -> str:
    """The passes of standard attention."""
    found = algorithms([_gpt2_medium()], Settings(HOPPER_BYTES, "both"))
    return markdown_table(traffic_tables.passes_of_standard(found))


def traffic_sizes() -> str:
    """What the tiled algorithms move as fast memory grows."""
    problem = _gpt2_medium()
    least = algorithms([problem], Settings(HOPPER_BYTES, "both"))[0].cost.traffic.total_bytes
    points = sweep([problem], "both", traffic_tables.sizes_to_sweep(problem))
    return markdown_table(traffic_tables.by_size(points, least))


def report_setting() -> str:
    """One call: modelled, and run by `tilestream report`."""
    lines = _report_lines()
    found = setting_table(lines)
    if found is None:
        return "No results are committed yet; `tilestream report` shows them for your machine."
    title, table = found
    return f"{title} On {_machine(lines[0])}.\n\n{markdown_table(table)}"


def report_lengths() -> str:
    """Time and memory against length, from the same run."""
    lines = _report_lines()
    return markdown_table(figure_table("lengths", lines)) if lines else "No results are committed yet."


def _report_lines() -> list[Line]:
    return read_lines(REPORT) if REPORT.exists() else []


def measured_misses() -> str:
    """What `tilestream traffic --measure` saw on a CPU."""
    tables = moved_tables(read_lines(MISSES) if MISSES.exists() else [])
    if not tables:
        return "No results are committed yet; `tilestream traffic --measure` shows them for your machine."
    return "\n\n".join(f"{title}\n\n{markdown_table(table)}" for title, table in tables)


# Pairs of calls that are shown side by side.
_TOKENS = 1024
_MASKS: tuple[tuple[str, Callable[..., BlockMask]], ...] = (
    ("from_band(1024, causal=True)", lambda **blocks: BlockMask.from_band(_TOKENS, causal=True, **blocks)),
    (
        "from_band(1024, causal=True, window=(192, 0))",
        lambda **blocks: BlockMask.from_band(_TOKENS, causal=True, window=(192, 0), **blocks),
    ),
    (
        "from_document_ids(torch.arange(1024) // 300)",
        lambda **blocks: BlockMask.from_document_ids(torch.arange(_TOKENS) // 300, **blocks),
    ),
    (
        "prefix_lm(1024, prefix_lengths=400)",
        lambda **blocks: BlockMask.prefix_lm(_TOKENS, prefix_lengths=400, **blocks),
    ),
    ("strided(1024, stride=256)", lambda **blocks: BlockMask.strided(_TOKENS, stride=256, **blocks)),
    (
        "fixed(1024, stride=256, num_summary=32)",
        lambda **blocks: BlockMask.fixed(_TOKENS, stride=256, num_summary=32, **blocks),
    ),
    (
        "local_global(1024, window=(64, 64), global_tokens=64)",
        lambda **blocks: BlockMask.local_global(_TOKENS, window=(64, 64), global_tokens=64, **blocks),
    ),
    (
        "dilated(1024, window=(64, 64), dilation=2)",
        lambda **blocks: BlockMask.dilated(_TOKENS, window=(64, 64), dilation=2, **blocks),
    ),
    ("bigbird(1024, num_random=2)", lambda **blocks: BlockMask.bigbird(_TOKENS, num_random=2, **blocks)),
    ("butterfly(1024)", lambda **blocks: BlockMask.butterfly(_TOKENS, **blocks)),
)


def mask_pictures() -> str:
    """Every pattern as `show` draws it, two side by side."""
    drawn = []
    for call, make in _MASKS:
        mask = make(block_size=64)
        facts = f"keeps {mask.density:.0%} of the blocks, {mask.pair_density():.0%} of the pairs"
        drawn.append([call, facts, "", *mask.show().splitlines(), ""])
    rows = [
        f"{one:<58}{other}".rstrip()
        for left, right in zip(drawn[::2], drawn[1::2], strict=True)
        for one, other in zip(left, right, strict=True)
    ]
    return "\n".join(["```text", *rows[:-1], "```"])


def block_sparse_speed(device: str) -> str:
    """What ``tilestream bench block-sparse`` measured on ``gpu`` or ``cpu``, below the figure of it."""
    if not (lines := _block_sparse_lines(device)):
        command = f"tilestream bench block-sparse{' --part cpu' if device == 'cpu' else ''}"
        return f"Nothing is measured yet, so nothing is claimed; `{command}` prints it for your machine."
    drawn = [f"![time and speed against density](images/{path.name})" for path in figures() if device in path.name]
    return "\n\n".join([*drawn, sparse_bars.markdown_report(lines)])


def figures() -> dict[Path, str]:
    """The figures that the page of block-sparse attention shows, with their text."""
    drawn = {device: sparse_figure.draw(_block_sparse_lines(device)) for device in ("gpu", "cpu")}
    return {IMAGES / f"block-sparse-{device}.svg": text for device, text in drawn.items() if text is not None}


def _block_sparse_lines(device: str) -> list[Line]:
    path = RESULTS / f"block-sparse-{device}.jsonl"
    return sparse_bars.suite_lines(read_lines(path)) if path.exists() else []


PARTS: dict[str, Callable[[], str]] = {
    "demo-attention": demo_attention,
    "demo-model": demo_model,
    "support": support,
    "teaching": teaching_forward,
}
PAGES = {
    README: PARTS,
    BENCHMARKS: {
        "hopper-speed": lambda: suite_report("hopper", hopper_bars.markdown_report),
        "hopper-backward": lambda: suite_report("hopper", hopper_bars.markdown_report, "backward"),
        "hopper-traffic": lambda: suite_report("traffic", traffic_bars.markdown_report),
    },
    BLOCK_SPARSE: {
        "mask-pictures": mask_pictures,
        "block-sparse-gpu": lambda: block_sparse_speed("gpu"),
        "approximate": approximate,
        "block-sparse-cpu": lambda: block_sparse_speed("cpu"),
    },
    CPU_PERFORMANCE: {"cpu-performance": lambda: suite_report("cpu", cpu_bars.markdown_report)},
    MEMORY_TRAFFIC: {
        "traffic-model": traffic_model,
        "traffic-passes": traffic_passes,
        "traffic-sizes": traffic_sizes,
        "report-setting": report_setting,
        "report-lengths": report_lengths,
        "measured-misses": measured_misses,
    },
    GPU_PERFORMANCE: {"gpu-performance": lambda: suite_report("gpu", gpu_bars.markdown_report)},
}


def regenerate(text: str, parts: Mapping[str, Callable[[], str]] = PARTS) -> str:
    """`text` with every marked part written again."""
    found = [match["name"] for match in _MARKED.finditer(text)]
    if sorted(found) != sorted(parts):
        raise ValueError(f"the page marks the parts {sorted(found)}, this program writes {sorted(parts)}")
    return _MARKED.sub(lambda match: f"{match[1]}{parts[match['name']]()}\n{match[3]}", text)


def take_over(demo: Path) -> None:
    """Copy what the demo wrote to the places that are committed."""
    for name, target in DEMO_FILES.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(demo / name, target)


def _draw(is_check: bool, is_changed: bool) -> bool:
    """Draw the pictures of changed lines, and those that are missing; whether there were any."""
    found = False
    for picture, lines in _pictures().items():
        if not is_changed and picture.exists():
            continue
        found = True
        if is_check:
            sys.stderr.write(f"{picture.relative_to(ROOT)} is out of date: run `make readme`\n")
        else:
            approximate_figure.draw(approximate_bars.suite_lines(read_lines(lines)), picture)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if something would change")
    parser.add_argument("--demo", type=Path, metavar="DIR", help="output folder of `tilestream demo` to take over")
    options = parser.parse_args(arguments)
    if options.demo is not None:
        take_over(options.demo)
    is_out_of_date = False
    pages = {page: regenerate(page.read_text(encoding="utf-8"), parts) for page, parts in PAGES.items()}
    for page, wanted in {**pages, **figures()}.items():
        text = page.read_text(encoding="utf-8") if page.exists() else None
        if text != wanted and options.check:
            sys.stderr.write(f"{page.relative_to(ROOT)} is out of date: run `make readme`\n")
        elif text != wanted:
            page.write_text(wanted, encoding="utf-8")
        is_out_of_date = is_out_of_date or text != wanted
        if page == BLOCK_SPARSE:
            is_out_of_date |= _draw(options.check, text != wanted)
    return int(is_out_of_date and options.check)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
