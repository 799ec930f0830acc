"""``tilestream bench``: chosen cases, providers and modes into JSON lines and a table; or a suite with bars."""

from __future__ import annotations

import argparse

import torch

from tilestream.bench import cpu_suite, gpu_suite, sparse_suite
from tilestream.bench.approximate import suite as approximate_suite
from tilestream.bench.cases import CASES, case_named
from tilestream.bench.gpu_cells import HOPPER_DIRECTIONS
from tilestream.bench.machine import busy_warning
from tilestream.bench.measure import Line, Settings, measure, num_steps
from tilestream.bench.providers import provider_named, provider_names
from tilestream.bench.report import markdown_table, measurement_table, write_lines
from tilestream.bench.runs import MODES, Mode
from tilestream.bench.sparse_cells import SPARSE_PARTS
from tilestream.cli import arguments as types
from tilestream.cli import bench_approximate, bench_cpu, bench_gpu, bench_sparse
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError

__all__ = ["add_parser", "run"]

_DEFAULT_CASES = ("causal_1k", "causal_4k")
_DEFAULT_PROVIDERS = ("tilestream", "sdpa", "materialised")
_DEFAULT_SECONDS = 2.0
# Options that only one of the two commands knows: destination in the parsed arguments, and its name.
_OF_CASES = {
    "cases": "--cases",
    "providers": "--providers",
    "modes": "--modes",
    "device": "--device",
    "dtype": "--dtype",
    "no_memory": "--no-memory",
}
_SUITES = {
    "cpu": bench_cpu.run,
    "gpu": bench_gpu.run,
    "hopper": bench_gpu.run_hopper,
    "traffic": bench_gpu.run_traffic,
    "block-sparse": bench_sparse.run,
    "approximate": bench_approximate.run,
}
# What --part names, by suite.
_PARTS: dict[str, tuple[str, ...]] = {"hopper": HOPPER_DIRECTIONS, "block-sparse": SPARSE_PARTS}
_SECONDS = f"cpu {cpu_suite.SECONDS}, approximate {approximate_suite.SECONDS}, others {gpu_suite.SECONDS}"
_PROVIDERS = (
    f"cpu {cpu_suite.PROVIDER}, gpu {gpu_suite.PROVIDER}, block-sparse {sparse_suite.PROVIDER},"
    f" others {gpu_suite.HOPPER_PROVIDER}"
)
_USES = " or ".join(f"tilestream bench {suite}" for suite in _SUITES)
_OF_HOPPER = {"part": "--part"}
_OF_APPROXIMATE = {"lengths": "--lengths", "states": "--states", "capture": "--capture", "plot": "--plot"}
_OF_SUITE = {**_OF_HOPPER, **_OF_APPROXIMATE, "quick": "--quick", "provider": "--provider", "from_file": "--from"}
_OF_OTHERS = {**_OF_CASES, **_OF_APPROXIMATE}
# Options that somebody else knows, by suite.
_IDLE = {
    None: _OF_SUITE,
    "cpu": {**_OF_OTHERS, **_OF_HOPPER},
    "gpu": {**_OF_OTHERS, **_OF_HOPPER, "threads": "--threads"},
    "hopper": {**_OF_OTHERS, "threads": "--threads"},
    "traffic": {**_OF_OTHERS, **_OF_HOPPER, "threads": "--threads", "seconds": "--seconds"},
    "block-sparse": _OF_OTHERS,
    "approximate": {
        **{name: option for name, option in _OF_CASES.items() if name != "device"},
        **_OF_HOPPER,
        "provider": "--provider",
    },
}


def add_parser(commands: argparse._SubParsersAction[types.Parser]) -> None:
    """The command's arguments; what is None or False when not given has its default in `run`."""
    parser = commands.add_parser(
        "bench",
        help="measure attention on this machine",
        description="Each number passes a correctness gate against a float64 oracle first.",
    )
    parser.add_argument(
        "suite",
        nargs="?",
        choices=tuple(_SUITES),
        help="measure this suite instead of chosen cases; cpu: the native CPU kernels against their bars, 12 minutes;"
        " gpu: the GPU kernels against theirs, 4 minutes; hopper: forward and backward on sm_90 against every public"
        " kernel, 3 minutes each; traffic: bytes that calls move through HBM, counted by NVIDIA's ncu, 4 minutes;"
        " block-sparse: calls with a block mask against dense ones and FlexAttention, 3 minutes;"
        " approximate: approximate and block-sparse attention against exact, with their errors, 4 minutes",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and providers, or the suite, and stop")
    parser.add_argument("--threads", type=types.count, help="CPU threads; default: torch's choice; cpu: 1 and that")
    parser.add_argument("--seconds", type=types.number, help=f"per number, about; default 2; suite: {_SECONDS}")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--output", default="tilestream-bench.jsonl", metavar="FILE", help="JSON lines; default %(default)s"
    )
    chosen = parser.add_argument_group("without a suite")
    chosen.add_argument("--cases", nargs="+", metavar="CASE", help=f"or 'all'; default {' '.join(_DEFAULT_CASES)}")
    chosen.add_argument("--providers", nargs="+", metavar="PROVIDER", help=f"default {' '.join(_DEFAULT_PROVIDERS)}")
    chosen.add_argument(
        "--modes", nargs="+", metavar="MODE", choices=MODES, help=f"{', '.join(MODES)}; default forward"
    )
    chosen.add_argument(
        "--device", type=types.available_device, help="default cpu; approximate: cuda where there is one"
    )
    chosen.add_argument("--dtype", choices=("float16", "bfloat16", "float32", "float64"), help="instead of each case's")
    chosen.add_argument("--no-memory", action="store_true", help="times only")
    suite = parser.add_argument_group("with a suite")
    suite.add_argument(
        "--part",
        choices=tuple(part for parts in _PARTS.values() for part in parts),
        help="hopper: forward or backward alone; block-sparse: another alone, default all but cpu",
    )
    suite.add_argument("--quick", action="store_true", help="a part of the suite, about a minute")
    suite.add_argument("--provider", help=f"what is measured; default {_PROVIDERS}")
    suite.add_argument(
        "--from", dest="from_file", metavar="FILE", help="measure nothing, show the lines of an earlier --output"
    )
    approximate = parser.add_argument_group("with the suite approximate")
    approximate.add_argument("--lengths", type=types.count, nargs="+", metavar="N", help="instead of the suite's")
    approximate.add_argument(
        "--states", metavar="FILE", help="real queries, keys and values; default: captured now, where the models are"
    )
    approximate.add_argument(
        "--capture", metavar="FILE", help="measure nothing, write such a file (31 MB) for a machine without the models"
    )
    approximate.add_argument("--plot", metavar="FILE", help="write a PNG of time and memory against length")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, write and print; exit code 1 where a result was wrong."""
    for destination, option in _IDLE[args.suite].items():
        if getattr(args, destination):
            without = f"does not go with the suite {args.suite!r}" if args.suite else f"needs a suite: {_USES}"
            raise ArgumentError(f"{option} {without}.")
    if args.part is not None and args.part not in (parts := _PARTS.get(args.suite, ())):
        raise ArgumentError(f"--part {args.part} is of another suite; {args.suite} has {', '.join(parts)}.")
    if args.seconds is not None and not args.seconds > 0:
        raise ArgumentError(f"--seconds must be more than 0, got {args.seconds}.")
    return _SUITES[args.suite](args, console) if args.suite else _run_cases(args, console)


def _run_cases(args: argparse.Namespace, console: Console) -> int:
    if args.list:
        _list(console)
        return 0
    names = args.cases or _DEFAULT_CASES
    cases = [case_named(name) for name in (CASES if "all" in names else names)]
    providers = [provider_named(name) for name in args.providers or _DEFAULT_PROVIDERS]
    modes: list[Mode] = args.modes or ["forward"]
    if args.dtype is not None:
        cases = [case.with_dtype(args.dtype) for case in cases]
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    output = types.output_file(args.output)
    if (warning := busy_warning()) is not None:
        console.hint(warning)
    settings = Settings(budget_s=args.seconds or _DEFAULT_SECONDS, with_memory=not args.no_memory)
    device = args.device or torch.device("cpu")
    lines: list[Line] = []
    with console.progress("bench", num_steps(len(cases), len(providers), len(modes), settings)) as step:
        for line in measure(cases, providers, modes, device, settings, step):
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
