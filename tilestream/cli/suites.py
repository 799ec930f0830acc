"""What the suites of ``tilestream bench`` have in common: lines written as they come, read again, and shown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tilestream.bench.machine import busy_warning
from tilestream.bench.measure import Line
from tilestream.bench.report import Table, json_line, read_lines
from tilestream.cli import arguments as types
from tilestream.cli.console import Console, Step
from tilestream.errors import ArgumentError

__all__ = ["measure", "read", "show"]


def read(args: argparse.Namespace) -> list[Line]:
    """The lines of the file that ``--from`` names.

    Raises:
        ArgumentError: it is no such file, or there are options that only measuring has.
    """
    measuring = {"--list": args.list, "--quick": args.quick, "--provider": args.provider}
    measuring |= {"--threads": args.threads, "--seconds": args.seconds, "--part": args.part}
    measuring |= {"--device": args.device, "--lengths": args.lengths, "--states": args.states}
    if idle := [option for option, value in measuring.items() if value]:
        raise ArgumentError(f"--from measures nothing, so {', '.join(idle)} would do nothing; leave it out.")
    path: str = args.from_file
    try:
        return read_lines(Path(path))
    except OSError as error:
        raise ArgumentError(f"cannot read --from {path!r}: {error.strerror}.") from None
    except ValueError:
        raise ArgumentError(f"--from {path!r} is not a file of JSON lines; pass one that --output wrote.") from None


def measure(
    args: argparse.Namespace, num_cells: int, measure_all: Callable[[Step], Iterator[Line]], console: Console
) -> list[Line]:
    """The lines of `measure_all`, which gets what is called at each cell's begin; each is written when it is there."""
    output = types.output_file(args.output)
    if (warning := busy_warning()) is not None:
        console.hint(warning)
    lines: list[Line] = []
    with console.progress(f"bench {args.suite}", num_cells) as step, output.open("w", encoding="utf-8") as file:
        for line in measure_all(step):
            lines.append(line)
            # Line by line, so that an interrupted run keeps what it has.
            file.write(json_line(line))
            file.flush()
    console.hint(f"{len(lines)} lines in {output}")
    return lines


def show(machine: str, bars: Table, tables: Sequence[tuple[str, Table]], console: Console) -> None:
    """Tables of text under their titles."""
    for title, table in ((machine, bars), *tables):
        console.heading(title)
        console.table(*table)
