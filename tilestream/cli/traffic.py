"""``tilestream traffic``: what each algorithm moves between slow and fast memory for a described call."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilestream.bench.measure import Line
from tilestream.bench.report import format_count
from tilestream.cli import arguments as types
from tilestream.cli import traffic_measure
from tilestream.cli import traffic_tables as tables
from tilestream.cli.console import Console
from tilestream.cli.explain import add_call_arguments, dense_parts_of, problem_of, title
from tilestream.errors import ArgumentError
from tilestream.io.compare import Algorithm, Settings, algorithms, sweep
from tilestream.io.cost import Cost
from tilestream.io.fast_memory import FastMemory, machine_fast_memory
from tilestream.io.published import BlockMatrix
from tilestream.io.recount import recount
from tilestream.io.theorems import optimal_range
from tilestream.problem import Problem

__all__ = ["add_parser", "run"]

# GPT-2 medium as arXiv:2205.14135 measured it (figure 2, left): half precision, causal, dropout, forward and backward.
_PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-medium": {
        "batch": 64, "seqlen_q": 1024, "heads": 16, "head_dim": 64, "dtype": "float16", "causal": True, "dropout": 0.1,
        "direction": "both",
    }
}  # fmt: skip
# Beyond these lengths the smallest sizes of fast memory are too many tiles to add up.
_LONGEST_SWEPT = 1 << 16
_NOT_COUNTED = ("softcap", "bias", "alibi", "sinks")


class _Preset(argparse.Action):
    """Set the arguments of a preset; those given after it change them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        for name, value in _PRESETS[str(values)].items():
            setattr(namespace, name, value)


def add_parser(commands: argparse._SubParsersAction[types.Parser]) -> None:
    """The command's arguments; those of the call are `tilestream explain`'s."""
    parser = commands.add_parser(
        "traffic",
        help="what standard attention, FlashAttention and tilestream move for a call, tensor by tensor",
        description="Bytes between slow and fast memory, by model; counted in a replay of the call; measured before.",
    )
    parser.add_argument(
        "--preset", choices=list(_PRESETS), action=_Preset, help="a known call; options after it change it"
    )
    add_call_arguments(parser)
    directions = parser.add_mutually_exclusive_group()
    for name in ("forward", "backward", "both"):
        says = "both directions" if name == "both" else f"the {name} alone"
        directions.add_argument(f"--{name}", dest="direction", action="store_const", const=name, help=says)
    memory = parser.add_argument_group("fast memory and tiles")
    memory.add_argument("--fast-memory", type=types.count, metavar="BYTES", help="default: this machine's")
    memory.add_argument("--block-m", type=types.count, help="queries of a tile; default: the most that fit")
    memory.add_argument("--block-n", type=types.count, help="keys of a tile; default 64, or the most that fit")
    memory.add_argument(
        "--blocks", metavar="FILE", help="JSON matrix of 0 and 1: the tiles (queries x keys) that are kept"
    )
    parser.add_argument("--count", action="store_true", help="also replay the call and count (small calls)")
    parser.add_argument(
        "--measured", metavar="FILE", help="also show what `tilestream bench traffic` measured of this call"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measure it, on a child process: under NVIDIA's ncu with --device cuda, else under valgrind with a"
        " simulated cache of the size of fast memory (small calls, some minutes)",
    )
    parser.add_argument("--output", metavar="FILE", help="where --measure writes its JSON lines")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    # The direction is said otherwise here.
    parser.set_defaults(run=run, backward=False, direction="forward")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the tables or the object; exit code 0."""
    problem = problem_of(args)
    parts = dense_parts_of(problem, args.varlen)
    memory = machine_fast_memory() if args.fast_memory is None else FastMemory(args.fast_memory, "given")
    blocks = None if args.blocks is None else _read_blocks(args.blocks)
    settings = Settings(memory.num_bytes, args.direction, args.block_m, args.block_n, blocks)
    found = algorithms(parts, settings)
    if args.output is not None and not args.measure:
        raise ArgumentError("--output is where --measure writes its lines; give both.")
    measured = [] if args.measured is None else traffic_measure.read(args.measured, problem, args.direction)
    if args.measure:
        measured += traffic_measure.measure(args, problem, settings.direction, memory.num_bytes, console)
    counted = recount(parts, args.varlen is not None, found, settings) if args.count else {}
    if args.json:
        console.say(json.dumps(_described(problem, memory, settings, found, counted, measured)))
        return 0
    console.heading(f"{title(problem)}; {tables.DIRECTIONS[settings.direction]}")
    console.say(f"Fast memory M: {format_count(memory.num_bytes)}B ({memory.source}).")
    if left_out := [name for name in problem.spec.features() if name in _NOT_COUNTED]:
        console.hint(f"Not in these numbers: the traffic of {', '.join(left_out)}.")
    columns = tables.columns_of(found, counted)
    console.heading("In all")
    console.table(*tables.summary(columns, measured, memory.num_bytes))
    console.heading("Each tensor, read / written")
    console.table(*tables.by_tensor(columns))
    console.heading("Each pass of standard attention")
    console.table(*tables.passes_of_standard(found))
    _say_optimal(console, parts, settings, found[0].cost.traffic.total_bytes)
    return 0


def _say_optimal(console: Console, parts: list[Problem], settings: Settings, compulsory_bytes: int) -> None:
    """Over which sizes of fast memory the tiled algorithm is optimal, and what it moves there."""
    longest = max(parts, key=lambda part: part.seqlen_k)
    if longest.seqlen_k == 0 or compulsory_bytes == 0:
        return
    console.heading("Size of fast memory")
    for line in tables.optimal_lines(longest, settings.fast_memory_bytes):
        console.say(line)
    if max(longest.seqlen_k, max(part.seqlen_q for part in parts)) <= _LONGEST_SWEPT:
        points = sweep(parts, settings.direction, tables.sizes_to_sweep(longest))
        console.say()
        console.table(*tables.by_size(points, compulsory_bytes))


def _described(
    problem: Problem,
    memory: FastMemory,
    settings: Settings,
    found: Sequence[Algorithm],
    counted: dict[str, Cost],
    measured: Sequence[Line],
) -> dict[str, Any]:
    """Everything, JSON-able; `source` says of each set of numbers where they come from."""
    least = found[0].cost.traffic.total_bytes
    entries = []
    for algorithm in found:
        costs = {"model": algorithm.cost}
        if algorithm.name in counted:
            costs["counted"] = counted[algorithm.name]
        for source, cost in costs.items():
            over = cost.traffic.total_bytes / least if least else None
            tiles = [list(pair) for pair in algorithm.tiles]
            entries.append({
                "algorithm": algorithm.name, "source": source, "tiles": tiles, "over_compulsory": over,
                **cost.to_dict(),
            })  # fmt: skip
    names = (
        "provider",
        "read_bytes",
        "written_bytes",
        "moved_bytes",
        "bytes_model",
        "device",
        "measured_by",
        "cache_bytes",
    )
    longest = max(problem.seqlen_k, 1)
    return {
        "call": title(problem),
        "direction": settings.direction,
        "fast_memory_bytes": memory.num_bytes,
        "fast_memory_source": memory.source,
        "algorithms": entries,
        "measured": [{"source": "measured", **{name: line.get(name) for name in names}} for line in measured],
        "optimal_elements": optimal_range(longest, problem.head_dim)._asdict(),
    }


def _read_blocks(path: str) -> BlockMatrix:
    """A matrix of kept tiles.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read --blocks {path!r}: {error.strerror}.") from None
    except ValueError:
        rows = None
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(kept in (0, 1) for kept in row) for row in rows
    ):
        raise ArgumentError(f"--blocks {path!r} is not a JSON matrix of 0 and 1, such as [[1, 0], [1, 1]].")
    return [[bool(kept) for kept in row] for row in rows]
