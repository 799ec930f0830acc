"""Triton kernels: every feature of the contract, forward and backward, on every GPU that Triton reaches.

Importing this package does not import Triton; running a call does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilestream.backends.triton.configs import config_for
from tilestream.io.schedule import TileShape
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.state import AttentionOutput

__all__ = ["BACKEND", "TritonBackend"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD_DIM = 512
# Positions, edges and rows are 32-bit numbers in the kernels; addresses are not.
_MOST_ROWS = 2**28
# A program has a row at least, and their number is a 32-bit one.
_MOST_PROGRAMS = 2**30


class TritonBackend:
    """Every feature in float16, bfloat16 and float32, forward and backward, with the same bits from run to run."""

    name = "triton"

    def supports(self, problem: Problem) -> str | None:
        """None, or why the call cannot run here."""
        # Asked at every call: a process may interpret some and leave the others to the CPU's own kernels.
        interprets = problem.device_type == "cpu" and is_interpreted()
        reason = _missing_reason() if interprets else _device_reason(problem.device_type)
        if reason is not None:
            return reason
        if problem.dtype not in _DTYPES:
            return f"dtype {problem.dtype} is served by the PyTorch loop"
        if max(problem.head_dim, problem.head_dim_v) > _LARGEST_HEAD_DIM:
            return f"head_dim {max(problem.head_dim, problem.head_dim_v)} is above {_LARGEST_HEAD_DIM}"
        if max(problem.total_q, problem.total_k) * problem.group > _MOST_ROWS:
            return "it has more than 2**28 rows of queries or keys"
        if max(problem.total_q, problem.total_k) * problem.num_heads_q > _MOST_PROGRAMS:
            return "it has more than 2**30 rows of queries or keys over all heads"
        return None

    def tile_shape(self, problem: Problem) -> TileShape:
        """See `Backend.tile_shape`; of a GPU with the shared memory of Hopper's, without operands in parts."""
        has_blocks = problem.block_mask is not None
        if has_blocks:
            # Rows of a group are not packed.
            problem = replace(problem, num_heads_kv=problem.num_heads_q, block_mask=None)
        config = config_for("query" if problem.is_backward else "forward", problem, has_blocks=has_blocks)
        block_m, key_pass = max(1, config.block_m // problem.group), None
        if problem.is_backward:
            key = config_for("key", problem, has_blocks=has_blocks)
            key_pass = (key.block_m, key.block_n)
        return TileShape(block_m, config.block_n, key_pass=key_pass)

    def forward(self, problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
        """See `Backend.forward`."""
        result: AttentionOutput = _plan().forward(problem, inputs)
        return result

    def prepare(self, problem: Problem, inputs: AttentionInputs) -> Callable[[AttentionInputs], AttentionOutput] | None:
        """See `Backend.prepare`."""
        result: Callable[[AttentionInputs], AttentionOutput] | None = _plan().prepare(problem, inputs)
        return result

    def backward(
        self,
        problem: Problem,
        inputs: AttentionInputs,
        output: AttentionOutput,
        dout: Tensor,
        dlse: Tensor | None,
        needs_dbias: bool,
        needs_dsinks: bool,
    ) -> Gradients:
        """See `Backend.backward`."""
        result: Gradients = _plan().backward(problem, inputs, output, dout, dlse, needs_dbias, needs_dsinks)
        return result


@functools.cache
def _plan() -> Any:
    return importlib.import_module("tilestream.backends.triton.plan")


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device. Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _missing_reason() -> str | None:
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


@functools.cache
def _device_reason(device_type: str) -> str | None:
    if _missing_reason() is not None:
        return _missing_reason()
    if device_type == "cuda":
        # A call can be described on a machine without a GPU: then no capability speaks against it.
        has_nvidia = torch.version.cuda is not None and torch.cuda.is_available()
        if has_nvidia and torch.cuda.get_device_capability() < (8, 0):
            return f"{torch.cuda.get_device_name()} is older than sm_80"
        return None
    if device_type == "xpu":
        return None
    if device_type == "cpu":
        return "it runs on GPUs (on a CPU under TRITON_INTERPRET=1)"
    return f"it runs on GPUs, not on {device_type}"


BACKEND = TritonBackend()
