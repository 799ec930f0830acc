"""What an algorithm costs: bytes per tensor and FLOPs of each of its passes, and the memory it needs, fast and slow."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Cost", "Pass", "Traffic", "pass_of"]


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to slow memory."""

    read_bytes: int
    written_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Traffic) -> Traffic:
        """The traffic of one call after the other."""
        return Traffic(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes)


@dataclass(frozen=True)
class Pass:
    """One walk over slow memory, which is one kernel of a GPU: `tensors` holds the names of those it touches."""

    name: str
    tensors: Mapping[str, Traffic]
    flops: int = 0

    @property
    def traffic(self) -> Traffic:
        return _total(self.tensors.values())

    def __add__(self, other: Pass) -> Pass:
        """The same pass over more data."""
        return Pass(self.name, _merge([self.tensors, other.tensors]), self.flops + other.flops)


@dataclass(frozen=True)
class Cost:
    """Passes in their order; bytes of slow memory beyond inputs and results, and of fast memory, at their peaks."""

    passes: tuple[Pass, ...] = ()
    extra_memory_bytes: int = 0
    fast_memory_bytes: int = 0

    @property
    def tensors(self) -> dict[str, Traffic]:
        """Traffic of each tensor that is touched, by name."""
        return _merge(one.tensors for one in self.passes)

    @property
    def traffic(self) -> Traffic:
        return _total(one.traffic for one in self.passes)

    @property
    def flops(self) -> int:
        return sum(one.flops for one in self.passes)

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved; None where nothing moves."""
        moved = self.traffic.total_bytes
        return self.flops / moved if moved else None

    def to_dict(self) -> dict[str, Any]:
        """Every number, JSON-able: totals, then per tensor, then per pass."""
        return {
            **_bytes(self.traffic),
            "total_bytes": self.traffic.total_bytes,
            "flops": self.flops,
            "flops_per_byte": self.intensity,
            "extra_memory_bytes": self.extra_memory_bytes,
            "fast_memory_bytes": self.fast_memory_bytes,
            "tensors": {name: _bytes(traffic) for name, traffic in self.tensors.items()},
            "passes": [
                {
                    "name": one.name,
                    "flops": one.flops,
                    "tensors": {name: _bytes(traffic) for name, traffic in one.tensors.items()},
                }
                for one in self.passes
            ],
        }

    def together(self, other: Cost) -> Cost:
        """Both in the same passes, as sequences of one packed call: traffic, FLOPs and extra memory add up."""
        passes = {one.name: one for one in self.passes}
        for one in other.passes:
            passes[one.name] = passes[one.name] + one if one.name in passes else one
        return Cost(
            tuple(passes.values()),
            self.extra_memory_bytes + other.extra_memory_bytes,
            max(self.fast_memory_bytes, other.fast_memory_bytes),
        )

    def then(self, other: Cost) -> Cost:
        """This and then `other`, as a backward after a forward: traffic and FLOPs add up, peaks of memory do not."""
        return Cost(
            self.passes + other.passes,
            max(self.extra_memory_bytes, other.extra_memory_bytes),
            max(self.fast_memory_bytes, other.fast_memory_bytes),
        )


def pass_of(name: str, reads: Mapping[str, int], writes: Mapping[str, int], flops: int = 0) -> Pass:
    """A pass from the bytes that it reads and writes of each tensor; tensors of which it moves nothing are left out."""
    moved = {
        tensor: Traffic(reads.get(tensor, 0), writes.get(tensor, 0)) for tensor in dict.fromkeys([*reads, *writes])
    }
    return Pass(name, {tensor: traffic for tensor, traffic in moved.items() if traffic.total_bytes}, flops)


def _bytes(traffic: Traffic) -> dict[str, int]:
    return {"read_bytes": traffic.read_bytes, "written_bytes": traffic.written_bytes}


def _merge(parts: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    merged: dict[str, Traffic] = {}
    for part in parts:
        for name, traffic in part.items():
            merged[name] = merged[name] + traffic if name in merged else traffic
    return merged


def _total(parts: Iterable[Traffic]) -> Traffic:
    return functools.reduce(Traffic.__add__, parts, Traffic(0, 0))
