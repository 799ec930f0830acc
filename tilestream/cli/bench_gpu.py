"""``tilestream bench gpu | hopper | traffic``: GPU kernels against their bars, measured now or read from a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tilestream.bench import bars, gpu_bars, hopper_bars, traffic_bars
from tilestream.bench.gpu_cells import HOPPER_DIRECTIONS, Cell, hopper_plan, plan, traffic_plan
from tilestream.bench.gpu_suite import HOPPER_PROVIDER, PROVIDER, SECONDS, measure_cells, suite_settings
from tilestream.bench.measure import Line
from tilestream.bench.providers import provider_named
from tilestream.bench.report import Table
from tilestream.bench.traffic import find_ncu, measure_traffic
from tilestream.cli import suites
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError

__all__ = ["run", "run_hopper", "run_traffic"]


class _Report(NamedTuple):
    """How the lines of a suite are shown."""

    bars_table: Callable[[Sequence[Line]], Table]
    part_tables: Callable[[Sequence[Line]], list[tuple[str, Table]]]
    markdown_report: Callable[[Sequence[Line]], str]


_Measure = Callable[[list[Cell]], list[Line]]


def run(args: argparse.Namespace, console: Console) -> int:
    """The suite gpu: measure or read, and print; exit code 1 where a result was wrong."""
    report = _Report(gpu_bars.bars_table, gpu_bars.part_tables, gpu_bars.markdown_report)
    return _run(args, console, plan(args.quick), lambda cells: _time(args, cells, PROVIDER, console), report)


def run_hopper(args: argparse.Namespace, console: Console) -> int:
    """The suite hopper, as `run`."""
    report = _Report(hopper_bars.bars_table, hopper_bars.part_tables, hopper_bars.markdown_report)
    cells = hopper_plan(args.quick, [args.part] if args.part else HOPPER_DIRECTIONS)
    return _run(args, console, cells, lambda cells: _time(args, cells, HOPPER_PROVIDER, console), report)


def run_traffic(args: argparse.Namespace, console: Console) -> int:
    """The suite traffic, as `run`."""
    report = _Report(traffic_bars.bars_table, traffic_bars.part_tables, traffic_bars.markdown_report)
    return _run(args, console, traffic_plan(args.quick), lambda cells: _count_bytes(args, cells, console), report)


def _run(args: argparse.Namespace, console: Console, cells: list[Cell], measure: _Measure, report: _Report) -> int:
    if args.from_file is not None:
        lines = bars.suite_lines(suites.read(args), args.suite)
    elif args.list:
        rows = [(cell.part, f"{cell}; {cell.provider}" if cell.provider else str(cell)) for cell in cells]
        console.table(("part", "cell"), rows)
        return 0
    elif not torch.cuda.is_available():
        raise ArgumentError(
            f"bench {args.suite} needs a CUDA device, and torch sees none; --list and --from work without."
        )
    else:
        lines = measure(cells)
    if args.markdown:
        console.say(report.markdown_report(lines))
    else:
        suites.show(gpu_bars.machine_text(lines), report.bars_table(lines), report.part_tables(lines), console)
    return 1 if any(line["is_wrong"] for line in lines) else 0


def _time(args: argparse.Namespace, cells: list[Cell], default: str, console: Console) -> list[Line]:
    provider = provider_named(args.provider or default)
    settings = suite_settings(SECONDS if args.seconds is None else args.seconds)
    return suites.measure(args, len(cells), lambda step: measure_cells(cells, provider.name, settings, step), console)


def _count_bytes(args: argparse.Namespace, cells: list[Cell], console: Console) -> list[Line]:
    provider = provider_named(args.provider or HOPPER_PROVIDER)
    # Before the file of lines is emptied.
    find_ncu()
    return suites.measure(args, len(cells), lambda step: measure_traffic(cells, provider.name, step), console)
