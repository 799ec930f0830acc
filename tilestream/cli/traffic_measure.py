"""``tilestream traffic --measure`` and ``--measured``: what a profiler saw, as lines of the harness, now or before."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from tilestream.bench.cases import Case
from tilestream.bench.gpu_cells import Cell
from tilestream.bench.measure import Line
from tilestream.bench.report import json_line, read_lines
from tilestream.bench.runs import Mode
from tilestream.bench.traffic import find_ncu, measure_traffic
from tilestream.bench.valgrind import find_valgrind, measure_misses
from tilestream.cli import arguments as types
from tilestream.cli.console import Console, Step
from tilestream.cli.explain import title
from tilestream.errors import ArgumentError
from tilestream.problem import Problem

__all__ = ["SUITES", "case_of", "measure", "read"]

# Of the lines that say what was moved: counted by NVIDIA's profiler on a GPU, by valgrind on a CPU.
SUITES = ("traffic", "misses")
_ON_GPU, _ON_CPU = ("tilestream", "eager", "sdpa/flash"), ("tilestream", "eager", "sdpa")


def measure(
    args: argparse.Namespace, problem: Problem, direction: Mode, cache_bytes: int, console: Console
) -> list[Line]:
    """Measure the call on a child process, ours beside the others; the lines that have bytes.

    Args:
        cache_bytes: of the last level that is simulated on a CPU.

    Raises:
        ArgumentError: it cannot be measured here; the message says why, in one line.
    """
    case = case_of(problem)
    if problem.device_type not in ("cpu", "cuda"):
        raise ArgumentError(f"--measure measures on cpu and cuda, not on {problem.device_type}.")
    is_gpu = problem.device_type == "cuda"
    if is_gpu and not torch.cuda.is_available():
        raise ArgumentError("--measure --device cuda needs a CUDA device, and torch sees none.")
    # Found out before a file is written.
    (find_ncu if is_gpu else find_valgrind)()
    output = None if args.output is None else types.output_file(args.output)
    names = _ON_GPU if is_gpu else _ON_CPU

    def lines(step: Step) -> Iterator[Line]:
        if not is_gpu:
            return measure_misses(case, direction, names, cache_bytes, step)
        cells = [Cell("training", case, direction, provider=name) for name in names]
        return measure_traffic(cells, names[0], step)

    found = []
    with console.progress("measure", len(names)) as step:
        for line in lines(step):
            found.append(line)
            if output is not None:
                output.write_text("".join(map(json_line, found)), encoding="utf-8")
            if line["reason"] is not None:
                console.hint(f"{line['provider']} was not measured: {line['reason']}")
    if wrong := [line["provider"] for line in found if line["is_wrong"]]:
        raise ArgumentError(f"{', '.join(wrong)} could not be measured; the reason stands above.")
    return [line for line in found if line["moved_bytes"] is not None]


def case_of(problem: Problem) -> Case:
    """The benchmark's case of a described call.

    Raises:
        ArgumentError: the benchmarks have no such call.
    """
    spec, band = problem.spec, problem.spec.band
    if problem.layout != "dense":
        raise ArgumentError("--measure measures dense calls, not --varlen.")
    case = Case(
        "call", problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads_q, problem.num_heads_kv,
        problem.head_dim, problem.head_dim_v, dtype=str(problem.dtype).removeprefix("torch."),
        window=None if band.is_unlimited else (band.left, band.right), softcap=spec.softcap, dropout_p=spec.dropout_p,
        has_bias=spec.has_bias, has_alibi=spec.has_alibi, has_sinks=spec.has_sinks,
    )  # fmt: skip
    if case.problem(problem.device_type) != problem:
        raise ArgumentError("--measure does not know --deterministic; leave it out.")
    return case


def read(path: str, problem: Problem, direction: str) -> list[Line]:
    """The lines about this call that ``tilestream bench traffic`` or ``--measure --output`` wrote.

    Raises:
        ArgumentError: the file cannot be read, or has none.
    """
    try:
        lines = [line for line in read_lines(Path(path)) if line["suite"] in SUITES]
    except OSError as error:
        raise ArgumentError(f"cannot read --measured {path!r}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArgumentError(
            f"--measured {path!r} is not a file of lines; pass one that `tilestream bench traffic` wrote."
        ) from None
    found = [
        line
        for line in lines
        if line["mode"] == direction
        and line["moved_bytes"] is not None
        and Case.from_dict(line["config"]).problem(problem.device_type) == problem
    ]
    if not found:
        raise ArgumentError(f"--measured {path!r} has no bytes of this call, {direction}: {title(problem)}.")
    return found
