"""How much fast memory this machine has: shared memory of a GPU's processor, or the level-2 cache of a CPU's core."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["HOPPER_BYTES", "FastMemory", "machine_fast_memory"]

# What one program may use on sm_90 (H100, H200): 227 of 228 KiB.
HOPPER_BYTES = 227 * 1024
_HOPPER = (9, 0)
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1024, "M": 1024**2}


class FastMemory(NamedTuple):
    """A size, and what it is the size of."""

    num_bytes: int
    source: str


def machine_fast_memory(caches: Path = _CACHES) -> FastMemory:
    """The shared memory of a Hopper GPU, else the level-2 cache of a core, else that of Hopper as an example.

    Args:
        caches: where Linux describes the caches of a core.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == _HOPPER:
        return FastMemory(HOPPER_BYTES, f"shared memory of a processor of {torch.cuda.get_device_name()}")
    if (found := _level_2(caches)) is not None:
        return FastMemory(found, "level-2 cache of a core of this machine")
    return FastMemory(HOPPER_BYTES, "shared memory of a processor of an H200; this machine does not say what it has")


def _level_2(caches: Path) -> int | None:
    try:
        for cache in sorted(caches.glob("index*")):
            if (cache / "level").read_text().strip() == "2":
                size = (cache / "size").read_text().strip()
                return int(size[:-1]) * _UNITS[size[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return None
