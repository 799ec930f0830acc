"""Where the tests run Triton's kernels without a GPU: in Triton's interpreter, and only in calls `interpreting`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tilestream.backends.triton.configs import Config
from tilestream.problem import Problem

__all__ = [
    "LARGE_TILES",
    "SMALL_TILES",
    "Tiles",
    "import_interpreted",
    "interpreting",
    "is_ready",
    "why_not_interpreted",
]

# (block_m, block_n) of every kernel; None stands for those of configs.py, which are for GPUs. An operation takes the
# interpreter about as long on a large tile as on a small one.
Tiles = tuple[int, int] | None
LARGE_TILES = (128, 256)
SMALL_TILES = (32, 32)

# Tests of every backend that are not interpreted. Of those that draw their inputs in each dtype, one dtype is.
_TOO_LONG = {"test_s16_batch_beyond_a_grid_dimension": "65537 programs take the interpreter minutes"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_VARIABLE = "TRITON_INTERPRET"


def import_interpreted() -> None:
    """Import the kernels for the interpreter, where Triton is installed.

    The variable is read by the decorators of kernels and of Triton's own device functions, once; it is not left set, so
    that neither child processes nor calls without a backend's name meet the interpreter.
    """
    if importlib.util.find_spec("triton") is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(_VARIABLE, "1")
            importlib.import_module("tilestream.backends.triton.plan")
            # Wraps Triton's device functions, which are interpreted ones now: it asks for the variable when it does.
            importlib.import_module("triton.experimental.gluon.language")


def is_ready() -> bool:
    """Whether this process has the kernels for the interpreter."""
    kernels = sys.modules.get("tilestream.backends.triton.forward")
    return kernels is not None and type(kernels.forward_kernel).__name__ == "InterpretedFunction"


def why_not_interpreted(test: str, parameters: Mapping[str, Any]) -> str | None:
    """None, or why a test of every backend leaves the interpreter out."""
    if "draw" in parameters and parameters["draw"] != _DTYPES[zlib.crc32(test.encode()) % len(_DTYPES)]:
        return "interpreted in another dtype"
    return _TOO_LONG.get(test)


@contextlib.contextmanager
def interpreting(tiles: Tiles = LARGE_TILES, checks_overflow: bool = False) -> Iterator[None]:
    """The backend triton takes CPU tensors inside.

    Args:
        checks_overflow: whether an int32 that overflows is an error, which takes twice the time.
    """
    from interpreter_patches import patched

    from tilestream.backends.triton import plan

    def config_for(kernel: str, problem: Problem, is_small: bool = False, has_blocks: bool = False) -> Config:
        assert tiles is not None
        return Config(*tiles, num_warps=4, num_stages=1)

    with pytest.MonkeyPatch.context() as patch, patched(checks_overflow):
        patch.setenv(_VARIABLE, "1")
        if tiles is not None:
            patch.setattr(plan, "config_for", config_for)
            # Plans are remembered by problem: these, with these tiles, only inside.
            for name, made in list(vars(plan).items()):
                if name.endswith("_plan") and hasattr(made, "cache_clear"):
                    patch.setattr(plan, name, functools.lru_cache(made.__wrapped__))
        yield
