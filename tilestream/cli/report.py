"""``tilestream report``: a page about this machine, with figures, tables and a tile viewer, from lines of its runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from tilestream.bench import figures
from tilestream.bench.machine import busy_warning
from tilestream.bench.measure import Line
from tilestream.bench.page_suite import make_lines, num_plan_steps, plan_for
from tilestream.bench.report import json_line, read_lines
from tilestream.cli import arguments as types
from tilestream.cli.console import Console
from tilestream.cli.page import page
from tilestream.errors import ArgumentError

__all__ = ["add_parser", "run"]

_SUITES = ("report", "traffic", "misses")
# What the page reads of every line.
_OF_EVERY_LINE = ("config", "device", "device_type", "num_threads", "torch", "platform", "commit", "date", "reason")


def add_parser(commands: argparse._SubParsersAction[types.Parser]) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "report",
        help="one HTML page about this machine: traffic, time and memory, and a viewer of tiles",
        description="Measures for a minute on two CPU cores, then writes one file that needs no network.",
    )
    parser.add_argument("--out", default="tilestream-report.html", metavar="FILE", help="the page; default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the lines that the page is made of")
    parser.add_argument(
        "--from", dest="from_files", metavar="FILE", nargs="+", help="measure nothing, show lines of earlier runs"
    )
    parser.add_argument(
        "--measured", metavar="FILE", nargs="+", default=[],
        help="show also what `tilestream bench traffic` or `tilestream traffic --measure` wrote",
    )  # fmt: skip
    parser.add_argument("--device", type=types.available_device, help="default: cuda where there is one, else cpu")
    parser.add_argument("--threads", type=types.count, help="CPU threads; default: torch's choice")
    parser.add_argument("--quick", action="store_true", help="short calls and few samples, in some seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure or read, and write the page; exit code 1 where a result was wrong."""
    figures.needs_matplotlib()
    measuring = {"--device": args.device, "--threads": args.threads, "--quick": args.quick}
    if args.from_files and (idle := [option for option, value in measuring.items() if value]):
        raise ArgumentError(f"--from measures nothing, so {', '.join(idle)} would do nothing; leave it out.")
    lines = _read("--from", args.from_files) if args.from_files else []
    lines += _read("--measured", args.measured)
    json_file = None if args.json is None else types.output_file(args.json, "--json")
    out = types.output_file(args.out, "--out")
    if not args.from_files:
        lines = _measure(args, json_file, console) + lines
    if json_file is not None:
        json_file.write_text("".join(map(json_line, lines)), encoding="utf-8")
    with console.progress("page", 1) as step:
        step("drawing")
        out.write_text(page(lines, figures.draw_all(lines)), encoding="utf-8")
    console.say(f"Written to {out}" + ("" if json_file is None else f", its {len(lines)} lines to {json_file}"))
    return 1 if any(line.get("is_wrong") for line in lines) else 0


def _measure(args: argparse.Namespace, json_file: Path | None, console: Console) -> list[Line]:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if (warning := busy_warning()) is not None:
        console.hint(warning)
    plan = plan_for(args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.quick)
    with console.progress("report", num_plan_steps(plan)) as step:
        lines = []
        for line in make_lines(plan, step):
            lines.append(line)
            # As they come, so that an interrupted run keeps what it has.
            if json_file is not None:
                json_file.write_text("".join(map(json_line, lines)), encoding="utf-8")
        return lines


def _read(option: str, paths: Sequence[str]) -> list[Line]:
    """The lines of these files that the page knows.

    Raises:
        ArgumentError: a file cannot be read, or has none.
    """
    found: list[Line] = []
    for path in paths:
        try:
            lines = read_lines(Path(path))
        except OSError as error:
            raise ArgumentError(f"cannot read {option} {path!r}: {error.strerror}.") from None
        except ValueError:
            lines = []
        known = [line for line in lines if isinstance(line, dict) and line.get("suite") in _SUITES]
        if not known or any(name not in line for line in known for name in _OF_EVERY_LINE if name != "config"):
            raise ArgumentError(
                f"{option} {path!r} has no lines of a report; pass what `tilestream report --json`, `bench traffic` or"
                " `traffic --measure` wrote."
            )
        found += known
    return found
