"""The command line: ``tilestream`` or ``python -m tilestream``, then demo, doctor, explain, traffic, report, bench or
warmup."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tilestream
from tilestream.cli import bench, demo, doctor, explain, report, traffic, warmup
from tilestream.cli.arguments import Parser
from tilestream.cli.console import Console
from tilestream.errors import TilestreamError

__all__ = ["main"]

_COMMANDS = (demo, doctor, explain, traffic, report, bench, warmup)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``tilestream``; those of the process by default.

    Returns:
        The exit code: 0 when done, 1 when a result is wrong, 2 for bad arguments, 130 when interrupted.
    """
    parser = Parser(prog="tilestream", description=tilestream.__doc__)
    parser.add_argument("--version", action="version", version=f"tilestream {tilestream.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for command in _COMMANDS:
        command.add_parser(commands)
    try:
        arguments = parser.parse_args(argv)
        return int(arguments.run(arguments, Console()))
    except TilestreamError as error:
        print(f"tilestream: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # `tilestream ... | head` closes our output early; that is no error, but Python would report it at exit.
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"tilestream: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tilestream: interrupted", file=sys.stderr)
        return 130
