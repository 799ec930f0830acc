"""``tilestream bench gpu``: the GPU kernels against their bars, measured now or read again from a file."""

from __future__ import annotations

import argparse

import torch

from tilestream.bench.gpu_bars import bars_table, machine_text, markdown_report, part_tables, suite_lines
from tilestream.bench.gpu_cells import Cell, plan
from tilestream.bench.gpu_suite import PROVIDER, SECONDS, measure_cells, suite_settings
from tilestream.bench.measure import Line
from tilestream.bench.providers import provider_named
from tilestream.cli import suites
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError

__all__ = ["run"]


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure or read, and print; exit code 1 where a result was wrong."""
    if args.from_file is not None:
        lines = suite_lines(suites.read(args))
    else:
        cells = plan(args.quick)
        if args.list:
            console.table(("part", "cell"), [(cell.part, str(cell)) for cell in cells])
            return 0
        lines = _measure(args, cells, console)
    if args.markdown:
        console.say(markdown_report(lines))
    else:
        suites.show(machine_text(lines), bars_table(lines), part_tables(lines), console)
    return 1 if any(line["is_wrong"] for line in lines) else 0


def _measure(args: argparse.Namespace, cells: list[Cell], console: Console) -> list[Line]:
    if not torch.cuda.is_available():
        raise ArgumentError("bench gpu needs a CUDA device, and torch sees none; --list and --from work without.")
    provider = provider_named(args.provider or PROVIDER)
    settings = suite_settings(SECONDS if args.seconds is None else args.seconds)
    return suites.measure(args, len(cells), lambda step: measure_cells(cells, provider.name, settings, step), console)
