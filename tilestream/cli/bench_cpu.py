"""``tilestream bench cpu``: the CPU kernels against their bars, measured now or read again from a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from tilestream.bench.cpu_bars import bars_table, machine_text, markdown_report, ratio_tables, suite_lines
from tilestream.bench.cpu_cells import Cell, plan, thread_counts
from tilestream.bench.cpu_suite import PROVIDER, SECONDS, measure_cells, suite_settings
from tilestream.bench.machine import busy_warning
from tilestream.bench.measure import Line
from tilestream.bench.providers import provider_named
from tilestream.bench.report import json_line, read_lines
from tilestream.cli import arguments as types
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError

__all__ = ["run"]


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure or read, and print; exit code 1 where a result was wrong."""
    if args.from_file is not None:
        measuring = {"--list": args.list, "--quick": args.quick, "--provider": args.provider}
        measuring |= {"--threads": args.threads, "--seconds": args.seconds}
        if idle := [option for option, value in measuring.items() if value]:
            raise ArgumentError(f"--from measures nothing, so {', '.join(idle)} would do nothing; leave it out.")
    cells = plan(thread_counts(args.threads), args.quick)
    if args.list:
        console.table(("part", "cell"), [(cell.part, str(cell)) for cell in cells])
        return 0
    lines = suite_lines(_read(args.from_file)) if args.from_file is not None else _measure(args, cells, console)
    _show(lines, args.markdown, console)
    return 1 if any(line["is_wrong"] for line in lines) else 0


def _measure(args: argparse.Namespace, cells: list[Cell], console: Console) -> list[Line]:
    provider = provider_named(args.provider or PROVIDER)
    output = types.output_file(args.output)
    if (warning := busy_warning()) is not None:
        console.hint(warning)
    settings = suite_settings(SECONDS if args.seconds is None else args.seconds)
    lines: list[Line] = []
    with console.progress("bench cpu", len(cells)) as step, output.open("w", encoding="utf-8") as file:
        for line in measure_cells(cells, provider.name, settings, step):
            lines.append(line)
            # Line by line, so that an interrupted run keeps what it has.
            file.write(json_line(line))
            file.flush()
    console.hint(f"{len(lines)} lines in {output}")
    return lines


def _read(path: str) -> list[Line]:
    try:
        return read_lines(Path(path))
    except OSError as error:
        raise ArgumentError(f"cannot read --from {path!r}: {error.strerror}.") from None
    except ValueError:
        raise ArgumentError(f"--from {path!r} is not a file of JSON lines; pass one that --output wrote.") from None


def _show(lines: list[Line], as_markdown: bool, console: Console) -> None:
    if as_markdown:
        console.say(markdown_report(lines))
        return
    console.heading(machine_text(lines))
    console.table(*bars_table(lines))
    for title, table in ratio_tables(lines):
        console.heading(f"Speed against PyTorch by tokens: {title}")
        console.table(*table)
