"""An explicit two-level memory that counts: tensors lie in slow memory, and only loaded tiles can be computed with.

What is on chip never exceeds the capacity, what was evicted cannot be used again, and slow tensors are NaN until they
are stored to: a plan that forgets a load, a store or a tile cannot come to the right result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tilestream.errors import ArgumentError
from tilestream.io.cost import Pass, Traffic

__all__ = ["FastMemoryError", "FastTile", "TwoLevelMemory"]

# Index of a tile in a tensor: integers and slices.
Index = tuple[int | slice, ...]


class FastMemoryError(ArgumentError):
    """A tile does not fit into what is free of fast memory."""


class FastTile:
    """A tile on chip. Its numbers are those that were loaded or computed, in the precision of the replay."""

    def __init__(self, memory: TwoLevelMemory, data: Tensor, num_bytes: int) -> None:
        self._memory = memory
        self._data: Tensor | None = data
        self.num_bytes = num_bytes

    @property
    def data(self) -> Tensor:
        """The numbers; writing into them is computing on chip."""
        assert self._data is not None, "the tile was evicted"
        return self._data

    def set(self, numbers: Tensor) -> None:
        """Replace the numbers by as many others."""
        assert numbers.shape == self.data.shape, f"{tuple(numbers.shape)} into {tuple(self.data.shape)}"
        self._data = numbers

    def evict(self) -> None:
        """Give the room back; the numbers are gone."""
        self.data.fill_(float("nan"))
        self._data = None
        self._memory.give_back(self.num_bytes)


class TwoLevelMemory:
    """Slow memory of named tensors, and `capacity_bytes` of fast memory.

    Each tensor has a number of bytes per element that its traffic is counted with, whatever precision it is replayed
    in. Sizes of tiles on chip count likewise.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.extra_bytes = 0
        self.extra_peak_bytes = 0
        self._slow: dict[str, tuple[Tensor, int]] = {}
        self._passes: list[tuple[str, dict[str, list[int]]]] = []
        self._flops: list[int] = []

    # Slow memory.

    def bind(self, name: str, tensor: Tensor, element_bytes: int) -> None:
        """An input lies in slow memory."""
        self._slow[name] = (tensor, element_bytes)

    def allocate(
        self, name: str, shape: Sequence[int], element_bytes: int, dtype: torch.dtype, is_extra: bool = False
    ) -> Tensor:
        """A tensor in slow memory, NaN everywhere; `is_extra` if it is neither input nor result.

        Returns:
            The tensor, for the caller's reading after the replay alone.
        """
        tensor = torch.full(tuple(shape), float("nan"), dtype=dtype)
        self._slow[name] = (tensor, element_bytes)
        if is_extra:
            self._add_extra(name)
        return tensor

    def adopt_extra(self, name: str, other: TwoLevelMemory) -> None:
        """Take over a tensor of `other`'s slow memory as extra memory, as what a forward kept for a backward is."""
        self._slow[name] = other._slow[name]
        self._add_extra(name)

    def _add_extra(self, name: str) -> None:
        tensor, element_bytes = self._slow[name]
        self.extra_bytes += tensor.numel() * element_bytes
        self.extra_peak_bytes = max(self.extra_peak_bytes, self.extra_bytes)

    def release(self, name: str) -> None:
        """Free extra memory."""
        tensor, element_bytes = self._slow.pop(name)
        self.extra_bytes -= tensor.numel() * element_bytes

    # Traffic.

    def begin(self, pass_name: str) -> None:
        """What is loaded, stored and computed from here on belongs to this pass; nothing stays on chip between two."""
        assert self.used_bytes == 0, f"{self.used_bytes} bytes are still on chip"
        self._passes.append((pass_name, {}))
        self._flops.append(0)

    def load(self, name: str, index: Index) -> FastTile:
        """Bring a tile on chip.

        Raises:
            FastMemoryError: it does not fit into what is free.
        """
        tensor, element_bytes = self._slow[name]
        part = tensor[index]
        num_bytes = part.numel() * element_bytes
        self._take(num_bytes, f"load of {name}")
        self._count(name)[0] += num_bytes
        return FastTile(self, part.clone(), num_bytes)

    def reserve(self, shape: Sequence[int], element_bytes: int, dtype: torch.dtype) -> FastTile:
        """Room on chip for numbers that are made there; zeros.

        Raises:
            FastMemoryError: it does not fit into what is free.
        """
        data = torch.zeros(tuple(shape), dtype=dtype)
        num_bytes = data.numel() * element_bytes
        self._take(num_bytes, f"room for {tuple(shape)}")
        return FastTile(self, data, num_bytes)

    def store(self, name: str, index: Index, tile: FastTile) -> None:
        """Write a tile to slow memory; it stays on chip."""
        tensor, element_bytes = self._slow[name]
        tensor[index] = tile.data.reshape(tensor[index].shape).to(tensor.dtype)
        self._count(name)[1] += tile.data.numel() * element_bytes

    def fill(self, name: str, number: float) -> None:
        """Write one number all over a tensor in slow memory."""
        tensor, element_bytes = self._slow[name]
        tensor.fill_(number)
        self._count(name)[1] += tensor.numel() * element_bytes

    def give_back(self, num_bytes: int) -> None:
        """Room of an evicted tile is free again."""
        self.used_bytes -= num_bytes

    def at_tile(self, rows: slice | None, keys: slice | None, on_chip: Mapping[str, FastTile]) -> None:
        """A replay says where it is, after the work on a tile or after a store; a subclass may look (`walk.py`).

        Args:
            rows, keys: the tile of scores; None for all that a store is not about.
            on_chip: what fast memory holds, by name.
        """

    # Computing.

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``, counted."""
        self._flops[-1] += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def passes(self) -> tuple[Pass, ...]:
        """Everything counted since the start."""
        return tuple(
            Pass(name, {tensor: Traffic(*moved) for tensor, moved in tensors.items() if any(moved)}, flops)
            for (name, tensors), flops in zip(self._passes, self._flops, strict=True)
        )

    def _count(self, name: str) -> list[int]:
        return self._passes[-1][1].setdefault(name, [0, 0])

    def _take(self, num_bytes: int, what: str) -> None:
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise FastMemoryError(
                f"fast memory is exceeded: {what} needs {num_bytes} bytes, and {self.used_bytes} of"
                f" {self.capacity_bytes} are in use."
            )
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
