"""``tilestream demo``: attention at growing lengths on this machine, then a real model reading a real document."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from tilestream.bench.cases import growing_lengths
from tilestream.bench.machine import busy_warning
from tilestream.bench.measure import Line, Settings, measure, num_steps
from tilestream.bench.providers import provider_named
from tilestream.bench.report import format_bytes, format_threads, measurement_table, write_lines
from tilestream.cli import arguments as types
from tilestream.cli import demo_model
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError
from tilestream.io.model import compulsory_bytes

__all__ = ["add_parser", "run"]

_PROVIDERS = ("tilestream", "sdpa", "materialised")
_LENGTHS = (512, 1024, 2048, 4096, 8192)
_QUICK_LENGTHS = (512, 1024, 2048, 4096)
_NUM_HEADS = 4
# Few samples per number: the demo is to end in a minute. `tilestream bench` takes more.
_SETTINGS = Settings(min_samples=3, max_samples=15, budget_s=0.7, patience=3)


def add_parser(commands: argparse._SubParsersAction[types.Parser]) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "demo",
        help="time, memory and error of attention here, then a real model reading a real text",
        description="About two minutes on two CPU cores; the first time two more, to convert the model.",
    )
    parser.add_argument("--quick", action="store_true", help="attention alone, in half a minute")
    parser.add_argument("--device", type=types.available_device, help="default: cuda where there is one, else cpu")
    parser.add_argument("--threads", type=types.count, help="CPU threads; default: torch's choice")
    parser.add_argument(
        "--lengths", type=types.count, nargs="+", metavar="N", help=f"default {' '.join(map(str, _LENGTHS))}"
    )
    parser.add_argument("--tokens", type=types.count, default=2048, help="of the document to read; default 2048")
    parser.add_argument("--output", default="demo-output", metavar="FOLDER", help="default %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Both halves; exit code 1 where any result was wrong."""
    if args.tokens < 2:
        raise ArgumentError(f"--tokens must be at least 2, got {args.tokens}: the first token has no probability.")
    output = types.output_folder(args.output)
    if not console.has_rich:
        console.hint('For progress bars: pip install "tilestream[cli]"')
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if (warning := busy_warning()) is not None:
        console.hint(warning)
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = sorted(set(args.lengths or (_QUICK_LENGTHS if args.quick else _LENGTHS)))
    lines = _attention(lengths, device, output, console)
    is_wrong = any(line["is_wrong"] for line in lines)
    if not args.quick:
        missing = demo_model.missing_packages()
        if missing:
            console.heading("A real model: skipped")
            for hint in missing:
                console.say(hint)
        else:
            is_wrong |= not demo_model.run(args.tokens, output, console)
    console.say(f"\nWritten to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")
    return 1 if is_wrong else 0


def _attention(lengths: Sequence[int], device: torch.device, output: Path, console: Console) -> list[Line]:
    """The first half: measure, print, draw."""
    cases = growing_lengths(lengths, num_heads_q=_NUM_HEADS, num_heads_kv=_NUM_HEADS)
    providers = [provider_named(name) for name in _PROVIDERS]
    lines: list[Line] = []
    with console.progress("attention", num_steps(len(cases), len(providers), 1, _SETTINGS)) as step:
        lines.extend(measure(cases, providers, ("forward",), device, _SETTINGS, step))
    write_lines(output / "attention.jsonl", lines)
    threads = f", {format_threads(torch.get_num_threads())}" if device.type == "cpu" else ""
    where = f"{lines[0]['device']}{threads}, torch {torch.__version__}"
    console.heading(f"Causal attention, {_NUM_HEADS} heads, head_dim 64, float32: {where}")
    console.table(*measurement_table(lines))
    console.say("\nextra memory: the peak beyond inputs and outputs.  error: largest, against float64.")
    console.say("must move: bytes between slow and fast memory that the algorithm needs (sdpa's tiles are not known).")
    _summary(lines, console)
    if importlib.util.find_spec("matplotlib") is None:
        console.hint('No picture: matplotlib is missing. pip install "tilestream[cli]"')
        return lines
    from tilestream.bench.plot import draw

    draw(lines, output / "attention.png")
    return lines


def _summary(lines: Sequence[Line], console: Console) -> None:
    """Ours against stored scores at the longest length that both have a number for."""
    by_length: dict[int, dict[str, Line]] = {}
    for line in lines:
        if line["ms_p50"] is not None:
            by_length.setdefault(line["seqlen_q"], {})[line["provider"]] = line
    shared = [length for length, found in by_length.items() if {"tilestream", "materialised"} <= set(found)]
    if not shared:
        return
    longest = max(shared)
    ours, stored = by_length[longest]["tilestream"], by_length[longest]["materialised"]
    parts = [f"{stored['ms_p50'] / ours['ms_p50']:.2g}x the speed"]
    if ours["extra_memory_bytes"] and stored["extra_memory_bytes"]:
        parts.append(f"1/{stored['extra_memory_bytes'] / ours['extra_memory_bytes']:.0f} of the extra memory")
    if ours["bytes_model"]:
        parts.append(f"1/{stored['bytes_model'] / ours['bytes_model']:.0f} of the memory traffic")
    case = growing_lengths([longest], num_heads_q=_NUM_HEADS, num_heads_kv=_NUM_HEADS)[0]
    least = compulsory_bytes(case.problem("cpu")).total_bytes
    console.say(f"At {longest} tokens, against storing the scores: {', '.join(parts)}.")
    console.say(f"Reading each input and writing each output once would be {format_bytes(least)}.")
