"""``tilestream bench approximate``: approximate attention against exact attention, measured now or read from a file."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch

from tilestream.bench.approximate.bars import bars_table, machine_text, markdown_report, part_tables, suite_lines
from tilestream.bench.approximate.cells import Cell, plan
from tilestream.bench.approximate.figure import draw
from tilestream.bench.approximate.states import LayerStates, load_states, save_states
from tilestream.bench.approximate.suite import (
    SECONDS,
    approximate_settings,
    error_cells,
    measure_cells,
    measure_errors,
)
from tilestream.bench.figures import needs_matplotlib
from tilestream.bench.measure import Line
from tilestream.cli import arguments as types
from tilestream.cli import demo_model, suites
from tilestream.cli.capture import capture
from tilestream.cli.console import Console, Step
from tilestream.errors import ArgumentError

__all__ = ["run"]

_TOKENS, _QUICK_TOKENS = 2048, 512
_LONGEST = 1 << 20


def run(args: argparse.Namespace, console: Console) -> int:
    """Capture, or measure or read and print; exit code 1 where an exact method was wrong."""
    if args.capture is not None:
        return _capture(args, console)
    if args.plot is not None:
        needs_matplotlib()
    if args.from_file is not None:
        lines = suite_lines(suites.read(args))
    else:
        if any(length > _LONGEST for length in args.lengths or ()):
            raise ArgumentError(f"--lengths must be at most {_LONGEST}, got {max(args.lengths)}.")
        device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        cells = plan(device.type, args.quick, args.lengths)
        if args.list:
            console.table(("part", "cell"), [(cell.part, str(cell)) for cell in cells])
            return 0
        lines = _measure(args, cells, device, console)
    if args.plot is not None:
        draw(lines, types.output_file(args.plot, "--plot"))
    if args.markdown:
        console.say(markdown_report(lines))
    else:
        suites.show(machine_text(lines), bars_table(lines), part_tables(lines), console)
    return 1 if any(line["is_wrong"] for line in lines) else 0


def _capture(args: argparse.Namespace, console: Console) -> int:
    others = {"--quick": args.quick, "--lengths": args.lengths, "--states": args.states, "--plot": args.plot}
    others |= {"--from": args.from_file, "--list": args.list, "--seconds": args.seconds, "--markdown": args.markdown}
    others |= {"--device": args.device}
    if idle := [option for option, value in others.items() if value]:
        raise ArgumentError(f"--capture measures nothing, so {', '.join(idle)} would do nothing; leave it out.")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    path = types.output_file(args.capture, "--capture")
    with console.progress("capture", None) as step:
        layers = capture(_TOKENS, step)
    save_states(path, layers)
    console.hint(f"{len(layers)} layers in {path}, {path.stat().st_size / 1e6:.1f} MB")
    return 0


def _measure(args: argparse.Namespace, cells: list[Cell], device: torch.device, console: Console) -> list[Line]:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    tokens = _QUICK_TOKENS if args.quick else _TOKENS
    layers = _layers(args, tokens, console)
    errors = error_cells(layers, tokens)
    settings = approximate_settings(SECONDS if args.seconds is None else args.seconds)

    def measure_all(step: Step) -> Iterator[Line]:
        # Errors first: they take seconds, and say what the times are worth.
        return itertools.chain(
            measure_errors(errors, layers, device, step), measure_cells(cells, device, settings, step)
        )

    return suites.measure(args, len(cells) + len(errors), measure_all, console)


def _layers(args: argparse.Namespace, num_tokens: int, console: Console) -> list[LayerStates]:
    """From the file, or from the models where they are installed."""
    if args.states is not None:
        return load_states(Path(args.states))
    if missing := demo_model.missing_packages():
        console.hint(
            "No errors on real states: pass a file of them as --states, which --capture writes on a machine with the"
            f" demo's model. Here: {'; '.join(missing)}"
        )
        return []
    with console.progress("capture", None) as step:
        return capture(num_tokens, step)
