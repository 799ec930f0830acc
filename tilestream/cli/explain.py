"""``tilestream explain``: which backend would run a described call, why not the others, and what the call costs."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch

from tilestream import dispatch
from tilestream.bench.cases import DTYPES
from tilestream.bench.providers import kernel_cost
from tilestream.bench.report import format_bytes, format_count
from tilestream.cli import arguments as types
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError
from tilestream.io.model import (
    Traffic,
    backward_flops,
    compulsory_bytes,
    forward_flops,
    materialised_bytes,
)
from tilestream.io.sizes import dense_parts
from tilestream.problem import Problem, check_arguments
from tilestream.spec import AttentionSpec, Band, default_scale

__all__ = [
    "add_call_arguments",
    "add_parser",
    "dense_parts_of",
    "describe_backends",
    "problem_of",
    "run",
    "title",
    "typical_problem",
]


def add_parser(commands: argparse._SubParsersAction[types.Parser]) -> None:
    """The command's arguments; each is the argument of `tilestream.attention` of the same name."""
    parser = commands.add_parser(
        "explain",
        help="which backend would run a call, why not the others, and what the call costs",
        description="Describe a call by its sizes; nothing is computed.",
    )
    features = add_call_arguments(parser)
    features.add_argument("--backward", action="store_true", help="explain the backward instead of the forward")
    features.add_argument("--backend", help="ask about this backend alone; a named backend never falls back")
    parser.set_defaults(run=run)


def add_call_arguments(parser: types.Parser) -> argparse._ArgumentGroup:
    """The arguments that describe a call, without a direction; returns the group of its features."""
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--batch", type=types.length, help="default 1")
    sizes.add_argument("--seqlen-q", "--seqlen", type=types.length, help="queries; default 1024")
    sizes.add_argument("--seqlen-k", type=types.length, help="keys; default: as queries")
    sizes.add_argument("--heads", type=types.count, default=8, help="query heads; default 8")
    sizes.add_argument("--kv-heads", type=types.count, help="key and value heads; default: as query heads")
    sizes.add_argument("--head-dim", type=types.count, default=64, help="default 64")
    sizes.add_argument("--head-dim-v", type=types.count, help="width of values; default: as head-dim")
    sizes.add_argument(
        "--varlen", type=types.length, nargs="+", metavar="LENGTH", help="packed sequences of these lengths instead"
    )
    sizes.add_argument("--dtype", choices=list(DTYPES), default="float32", help="default float32")
    sizes.add_argument("--device", type=types.device, default="cpu", help="cpu, cuda, ...; need not be present")
    features = parser.add_argument_group("features")
    features.add_argument("--causal", action="store_true", help="hide keys after the query")
    features.add_argument(
        "--window", type=types.limit, nargs=2, metavar=("LEFT", "RIGHT"), help="visible keys on each side, or none"
    )
    features.add_argument("--softcap", type=types.number, default=0.0, metavar="CAP")
    features.add_argument("--dropout", type=types.number, default=0.0, metavar="P")
    features.add_argument("--bias", action="store_true", help="an additive bias")
    features.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    features.add_argument("--sinks", action="store_true", help="attention sinks")
    features.add_argument("--deterministic", action="store_true", help="gradients equal bit for bit")
    return features


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the answer; exit code 1 where no backend can run the call."""
    problem = problem_of(args)
    explanation = dispatch.explain(problem, args.backend)
    console.heading(title(problem))
    describe_backends(console, explanation)
    _describe_costs(console, dense_parts_of(problem, args.varlen), explanation.chosen, args.backward)
    return 0 if explanation.chosen else 1


def problem_of(args: argparse.Namespace) -> Problem:
    """The `Problem` that the command line describes.

    Raises:
        ArgumentError: an option does not fit; the message names it.
    """
    check_arguments(window=args.window, scale=None, softcap=args.softcap, dropout_p=args.dropout)
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    if args.heads % kv_heads:
        raise ArgumentError(f"--heads {args.heads} must be a multiple of --kv-heads {kv_heads}.")
    spec = AttentionSpec(
        band=Band.from_arguments(args.causal, args.window),
        scale=default_scale(args.head_dim),
        softcap=args.softcap,
        dropout_p=args.dropout,
        has_bias=args.bias,
        has_alibi=args.alibi,
        has_sinks=args.sinks,
        deterministic=args.deterministic,
    )
    dense = Problem.dense(
        batch=1 if args.batch is None else args.batch,
        seqlen_q=1024 if args.seqlen_q is None else args.seqlen_q,
        seqlen_k=args.seqlen_k,
        num_heads_q=args.heads,
        num_heads_kv=kv_heads,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim_v,
        dtype=DTYPES[args.dtype],
        device_type=args.device.type,
        spec=spec,
        is_backward=args.backward,
    )
    if args.varlen is None:
        return dense
    for name in ("batch", "seqlen_q", "seqlen_k"):
        if getattr(args, name) is not None:
            raise ArgumentError(f"--{name.replace('_', '-')} and --varlen exclude each other.")
    return dense.packed(args.varlen, args.varlen)


def dense_parts_of(problem: Problem, varlen: list[int] | None) -> list[Problem]:
    """The dense calls whose costs add up to those of `problem`."""
    return [problem] if varlen is None else dense_parts(problem, varlen, varlen)


def describe_backends(console: Console, explanation: dispatch.Explanation) -> None:
    """The table of backends, and the choice."""
    rows = [
        (name, "can" if reason is None else "cannot", "chosen" if name == explanation.chosen else reason or "")
        for name, reason in explanation.reasons
    ]
    console.table(("backend", "run it?", "why"), rows)
    if explanation.chosen is None:
        console.say("No backend can run this call.")


def _describe_costs(console: Console, parts: list[Problem], backend: str | None, is_backward: bool) -> None:
    count_flops = backward_flops if is_backward else forward_flops
    flops = sum(map(count_flops, parts))
    element_bytes = parts[0].dtype.itemsize
    scores_bytes = sum(p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k for p in parts) * element_bytes
    console.heading(f"Cost of the {'backward' if is_backward else 'forward'}: {format_count(flops)}FLOP")

    algorithms: dict[str, Callable[[Problem], Traffic | None]] = {
        "least possible": functools.partial(compulsory_bytes, backward=is_backward),
        f"tilestream, {backend}": functools.partial(_kernel_traffic, backend=backend, backward=is_backward),
        "scores stored": functools.partial(materialised_bytes, backward=is_backward),
    }
    rows = []
    for name, traffic_of in algorithms.items():
        known = [traffic for traffic in map(traffic_of, parts) if traffic is not None]
        if len(known) < len(parts):
            continue
        traffic = functools.reduce(Traffic.__add__, known, Traffic(0, 0))
        intensity = f"{flops / traffic.total_bytes:.3g}" if traffic.total_bytes else "-"
        moved = (traffic.total_bytes, traffic.read_bytes, traffic.written_bytes)
        rows.append((name, *map(format_bytes, moved), intensity))
    console.table(("algorithm", "must move", "read", "written", "FLOP per byte"), rows)
    console.say(f"The score matrix that is never stored: {format_bytes(scores_bytes)}.")


def _kernel_traffic(problem: Problem, backend: str | None, backward: bool) -> Traffic | None:
    cost = kernel_cost(problem, backend, backward)
    return None if cost is None else cost.traffic


def title(problem: Problem) -> str:
    """Sizes and features of a call in one line."""
    features = ", ".join(problem.spec.features()) or "no optional feature"
    heads = f"{problem.num_heads_q} heads"
    if problem.group > 1:
        heads += f" over {problem.num_heads_kv} KV heads"
    width = f"head_dim {problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        width += f" (values {problem.head_dim_v})"
    if problem.layout == "varlen":
        size = f"{problem.batch} packed sequences, {problem.total_q} tokens"
    else:
        size = f"batch {problem.batch}, {problem.seqlen_q} queries, {problem.seqlen_k} keys"
    dtype = str(problem.dtype).removeprefix("torch.")
    return f"{size}, {heads}, {width}, {dtype} on {problem.device_type}; {features}"


def typical_problem(device_type: str, dtype: torch.dtype) -> Problem:
    """A call as a language model makes it: 4096 tokens, 32 heads over 8 KV heads, head_dim 128, causal."""
    return Problem.dense(
        seqlen_q=4096,
        num_heads_q=32,
        num_heads_kv=8,
        head_dim=128,
        dtype=dtype,
        device_type=device_type,
        spec=AttentionSpec(band=Band(None, 0), scale=default_scale(128)),
    )
