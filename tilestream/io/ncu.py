"""What NVIDIA's profiler ``ncu`` says of bytes that kernels move through HBM: its table, read."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["METRICS", "KernelBytes", "kernels_of"]

# Bytes read and bytes written.
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


class KernelBytes(NamedTuple):
    """What one kernel moved."""

    name: str
    read_bytes: int
    written_bytes: int


def kernels_of(texts: Iterable[str]) -> list[KernelBytes]:
    """The kernels of ncu's table, in the order of their launches.

    The table has a row per kernel and metric; lines before it are the profiler's talk.

    Raises:
        ValueError: a value is in other units than bytes, or none at all.
        KeyError: a column or a metric is missing.
    """
    read, written = METRICS
    rows = [text for text in texts if text.startswith('"')]
    found: dict[str, dict[str, int]] = {}
    names: dict[str, str] = {}
    for row in csv.DictReader(rows):
        if row["Metric Unit"] != "byte":
            raise ValueError(f"{row['Metric Name']} in {row['Metric Unit']!r}, not in bytes")
        names[row["ID"]] = row["Kernel Name"]
        # Digits come in groups of three, and a counter may have a fraction.
        found.setdefault(row["ID"], {})[row["Metric Name"]] = round(float(row["Metric Value"].replace(",", "")))
    return [KernelBytes(names[launch], values[read], values[written]) for launch, values in found.items()]
