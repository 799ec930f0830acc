"""``tilestream bench block-sparse``: block-sparse attention against its bars, measured now or read from a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from tilestream.bench.gpu_cells import DENSE
from tilestream.bench.gpu_suite import SECONDS, suite_settings
from tilestream.bench.measure import Line
from tilestream.bench.providers import provider_named
from tilestream.bench.sparse_bars import bars_table, machine_text, markdown_report, part_tables, suite_lines
from tilestream.bench.sparse_cells import GPU_PARTS, sparse_plan
from tilestream.bench.sparse_suite import PROVIDER, cpu_settings, measure_sparse
from tilestream.cli import suites
from tilestream.cli.console import Console, Step
from tilestream.errors import ArgumentError

__all__ = ["run"]

_CPU = "cpu"


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure or read, and print; exit code 1 where a result was wrong."""
    if args.from_file is not None:
        lines = suite_lines(suites.read(args))
    else:
        if args.threads is not None and args.part != _CPU:
            raise ArgumentError("--threads of bench block-sparse goes with --part cpu.")
        cells = sparse_plan([args.part] if args.part else GPU_PARTS, args.quick)
        if args.list:
            console.table(("part", "cell"), [(cell.part, str(cell)) for cell in cells])
            return 0
        if args.part != _CPU and not torch.cuda.is_available():
            raise ArgumentError(
                "bench block-sparse needs a CUDA device, and torch sees none; --part cpu, --list and --from work"
                " without."
            )
        provider = provider_named(args.provider or PROVIDER)
        seconds = SECONDS if args.seconds is None else args.seconds
        settings = cpu_settings(seconds) if args.part == _CPU else suite_settings(seconds)
        if args.threads is not None:
            torch.set_num_threads(args.threads)

        def measure(step: Step) -> Iterator[Line]:
            for line in measure_sparse(cells, provider.name, settings, step):
                console.hint(_short(line))
                yield line

        lines = suites.measure(args, len(cells) + (args.part != _CPU), measure, console)
    if args.markdown:
        console.say(markdown_report(lines))
    else:
        suites.show(machine_text(lines), bars_table(lines), part_tables(lines), console)
    return 1 if any(line["is_wrong"] for line in lines) else 0


def _short(line: Line) -> str:
    """What a line says, on one."""
    if line["reason"] is not None:
        return f"no number: {line['reason']}"
    if line["part"] == "sparse-traffic":
        return f"{line['moved_bytes']:,} bytes, {line['over_cached_model']:.3f} of the model"
    contestants = [f"{line['provider']} ({line['chosen']}) {line['ms_p50']:.4g} ms"]
    for name, peer in line["peers"].items():
        contestants.append(f"{name} " + ("-" if peer["ms_p50"] is None else f"{peer['ms_p50']:.4g} ms"))
    speed = line["peers"][DENSE]["ratio_p50"]
    proportion = "" if speed is None else f"; {1 / speed / line['kept_fraction']:.2f} of proportion"
    return ", ".join(contestants) + proportion
