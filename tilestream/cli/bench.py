"""``tilestream bench``: chosen cases, providers and modes into JSON lines and a table."""

from __future__ import annotations

import argparse

import torch

from tilestream.bench.cases import CASES, case_named
from tilestream.bench.machine import busy_warning
from tilestream.bench.measure import Line, Settings, measure, num_steps
from tilestream.bench.providers import provider_named, provider_names
from tilestream.bench.report import markdown_table, measurement_table, write_lines
from tilestream.bench.runs import MODES
from tilestream.cli import arguments as types
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError

__all__ = ["add_parser", "run"]

_DEFAULT_CASES = ("causal_1k", "causal_4k")


def add_parser(commands: argparse._SubParsersAction[types.Parser]) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure attention on this machine",
        description="Each number passes a correctness gate against a float64 oracle first.",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and providers, and stop")
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=_DEFAULT_CASES, help="or 'all'")
    parser.add_argument("--providers", nargs="+", metavar="PROVIDER", default=["tilestream", "sdpa", "materialised"])
    parser.add_argument("--modes", nargs="+", metavar="MODE", choices=MODES, default=["forward"], help=", ".join(MODES))
    parser.add_argument("--device", type=types.available_device, default="cpu", help="default cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"), help="instead of each case's")
    parser.add_argument("--threads", type=types.count, help="CPU threads; default: torch's choice")
    parser.add_argument("--seconds", type=types.number, default=2.0, help="per number, about; default 2")
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument(
        "--output", default="tilestream-bench.jsonl", metavar="FILE", help="JSON lines; default %(default)s"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, write and print; exit code 1 where a result was wrong."""
    if args.list:
        _list(console)
        return 0
    names = list(CASES) if "all" in args.cases else args.cases
    cases = [case_named(name) for name in names]
    providers = [provider_named(name) for name in args.providers]
    if not args.seconds > 0:
        raise ArgumentError(f"--seconds must be more than 0, got {args.seconds}.")
    if args.dtype is not None:
        cases = [case.with_dtype(args.dtype) for case in cases]
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    output = types.output_file(args.output)
    if (warning := busy_warning()) is not None:
        console.hint(warning)
    settings = Settings(budget_s=args.seconds, with_memory=not args.no_memory)
    lines: list[Line] = []
    with console.progress("bench", num_steps(len(cases), len(providers), len(args.modes), settings)) as step:
        for line in measure(cases, providers, args.modes, args.device, settings, step):
            lines.append(line)
            # After each case, so that an interrupted run keeps what it has.
            write_lines(output, lines)
    table = measurement_table(lines)
    if args.markdown:
        console.say(markdown_table(table))
    else:
        console.table(*table)
    console.hint(f"{len(lines)} lines in {output}")
    return 1 if any(line["is_wrong"] for line in lines) else 0


def _list(console: Console) -> None:
    rows = []
    for case in CASES.values():
        heads = f"{case.num_heads_q}/{case.num_heads_kv}"
        features = ", ".join(case.spec.features()) or "full"
        size = f"{case.batch} x {case.seqlen_q} x {case.seqlen_k}"
        rows.append((case.name, size, heads, f"{case.head_dim}/{case.head_dim_v}", case.dtype, features))
    console.table(("case", "batch x queries x keys", "heads/KV", "widths", "dtype", "features"), rows)
    console.say(f"\nproviders: tilestream, {', '.join(provider_names())}\nmodes: {', '.join(MODES)}")
