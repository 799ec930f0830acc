"""Values of the command line; a bad one becomes one line and exit code 2."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NoReturn

import torch

from tilestream.errors import ArgumentError

__all__ = ["Parser", "available_device", "count", "device", "length", "limit", "number", "output_file", "output_folder"]


# Costs are counted tile by tile; beyond this the answer would take minutes.
_MAX_LENGTH = 1 << 24


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        """End the process with code 2 and one line."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def count(text: str) -> int:
    """An int of at least 1."""
    value = _int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def length(text: str) -> int:
    """A number of tokens or sequences: an int of at least 0."""
    value = _int(text)
    if value > _MAX_LENGTH:
        raise argparse.ArgumentTypeError(f"must be at most {_MAX_LENGTH}, got {value}")
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def limit(text: str) -> int | None:
    """One side of a window: an int of at least 0, or ``none``."""
    return None if text.lower() == "none" else length(text)


def number(text: str) -> float:
    """A float."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def device(text: str) -> torch.device:
    """A torch device, present or not."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be a torch device such as cpu or cuda:0, got {text!r}") from None


def available_device(text: str) -> torch.device:
    """A torch device that can be used here."""
    found = device(text)
    try:
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise argparse.ArgumentTypeError(f"{text!r} is not available on this machine") from None
    if found.type == "meta":
        raise argparse.ArgumentTypeError("'meta' computes nothing")
    return found


def output_file(text: str, option: str = "--output") -> Path:
    """A file that can be written, created where it is missing; found out before the long work.

    Args:
        option: what named it, for the message.

    Raises:
        ArgumentError: it cannot be written.
    """
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ArgumentError(f"cannot write {option} {text!r}: {error.strerror}.") from None
    return path


def output_folder(text: str) -> Path:
    """A folder that can be written to, as `output_file`."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ArgumentError(f"cannot write into --output {text!r}: {error.strerror}.") from None
    return path


def _int(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
