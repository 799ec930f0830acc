"""Warp-specialised kernels for Hopper, written in Gluon: the forward of 16-bit calls with every feature but dropout,
and the backward of plain dense ones.

Every other backward is the Triton backend's: (out, lse) mean the same in both.
Importing this package does not import Triton; running a call does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilestream.backends import triton
from tilestream.backends.hopper.backward_call import BLOCK_M, block_n_of
from tilestream.backends.hopper.call import config_for, usual_seqlen_q
from tilestream.backends.triton.configs import config_for as triton_config_for
from tilestream.backends.triton.configs import num_splits
from tilestream.io.schedule import TileShape
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.state import AttentionOutput

__all__ = ["BACKEND", "HopperBackend", "problem_reason"]

_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD_DIM = 256
_LARGEST_MASKED_BACKWARD = 128
# TMA counts in 16 bytes.
_HEAD_DIM_UNIT = 8
# Of a KV head; half of a tile.
_FEW_ROWS = 64
# Up to which a row's exponentials take longer than its products.
_SMALL_HEAD_DIM = 64
# Positions, edges and rows are 32-bit numbers in the kernel; addresses are not.
_MOST_ROWS = 2**28
_MOST_TILES = 2**30
# Scales whose products with a score float32 can hold, far from its ends.
_SCALES = (2.0**-64, 2.0**64)
_CAPABILITY = (9, 0)


class HopperBackend:
    """float16 and bfloat16 calls without dropout; everything else is the Triton backend's."""

    name = "hopper"

    def supports(self, problem: Problem) -> str | None:
        """None, or why the call cannot run here."""
        reason = _device_reason(problem.device_type)
        if reason is None and triton.is_interpreted():
            return "Gluon has no interpreter"
        if reason is None and problem.is_backward:
            return self._backward_reason(problem)
        return reason if reason is not None else problem_reason(problem, _num_processors())

    @staticmethod
    def _backward_reason(problem: Problem) -> str | None:
        own = backward_reason(problem)
        if own is None:
            return None
        other = triton.BACKEND.supports(problem)
        return other if other is None or problem.block_mask is None else f"{own}; Triton: {other}"

    def tile_shape(self, problem: Problem) -> TileShape:
        """See `Backend.tile_shape`."""
        if problem.is_backward:
            if backward_reason(problem) is None:
                return TileShape(BLOCK_M, block_n_of(problem), packs_group=False, dq_in_memory=True)
            return triton.BACKEND.tile_shape(problem)
        config = config_for(problem)
        return TileShape(config.block_m, config.block_n, packs_group=False)

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
        if backward_reason(problem) is None:
            result: Gradients = _backward_plan().backward(problem, inputs, output, dout, dlse, needs_dsinks)
            return result
        return triton.BACKEND.backward(problem, inputs, output, dout, dlse, needs_dbias, needs_dsinks)


def problem_reason(problem: Problem, num_processors: int) -> str | None:
    """Why the kernel cannot run a call on a Hopper GPU of so many processors, or should not; None if it does."""
    if (reason := _mask_reason(problem)) is not None:
        return reason
    if problem.spec.dropout_p > 0:
        return "dropout is served by the Triton backend"
    if (reason := _operands_reason(problem)) is not None:
        return reason
    if min(problem.batch, problem.total_q, problem.total_k) < 1:
        return "it has no queries or no keys"
    # Of a packed call a sequence has a tile, whatever its length.
    if max(problem.total_k, (problem.total_q + problem.batch) * problem.num_heads_q) > _MOST_ROWS:
        return "it has more than 2**28 rows of queries or keys"
    return _slower_reason(problem, num_processors)


def _mask_reason(problem: Problem) -> str | None:
    """What keeps the forward from a block mask."""
    mask, spec = problem.block_mask, problem.spec
    if mask is None:
        return None
    if any((spec.softcap > 0, spec.has_alibi, spec.has_bias, problem.layout == "varlen")):
        return "block masks with softcap, ALiBi, bias or packed sequences are not served here"
    blocks = mask.planes[0] * mask.planes[1] * (problem.seqlen_q >> 7) * (problem.seqlen_k >> 6)
    return "its tiles are too many to be numbered" if blocks >= _MOST_TILES else None


def _operands_reason(problem: Problem) -> str | None:
    """What keeps forward and backward from a call."""
    scale, widths = problem.spec.scale, (problem.head_dim, problem.head_dim_v)
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} is neither float16 nor bfloat16"
    if max(widths) > _LARGEST_HEAD_DIM:
        return f"head_dim {max(widths)} is above {_LARGEST_HEAD_DIM}"
    if any(width % _HEAD_DIM_UNIT for width in widths):
        return f"head_dim {widths[0]} or head_dim_v {widths[1]} is no multiple of {_HEAD_DIM_UNIT}"
    if not _SCALES[0] <= scale <= _SCALES[1]:
        return f"scale {scale} is not positive, or extreme"
    return None


def _slower_reason(problem: Problem, num_processors: int) -> str | None:
    """Why a call is left to the Triton backend, which packs the rows of a KV head and can split its keys."""
    if problem.spec.softcap > 0 and max(problem.head_dim, problem.head_dim_v) <= _SMALL_HEAD_DIM:
        return f"a softcap is slower here with a head_dim up to {_SMALL_HEAD_DIM}"
    num_rows = usual_seqlen_q(problem) * problem.group
    if num_rows <= _FEW_ROWS:
        return f"a KV head has few rows, {num_rows}, which are faster packed"
    # Lists of a block mask are not split there either.
    is_masked = problem.block_mask is not None
    if not is_masked and num_splits(problem, triton_config_for("forward", problem), num_processors)[0] > 1:
        return "a few rows over many keys are faster with the keys split"
    return None


def backward_reason(problem: Problem) -> str | None:
    """Why a backward is the Triton backend's."""
    spec = problem.spec
    if problem.block_mask is not None:
        if max(problem.head_dim, problem.head_dim_v) > _LARGEST_MASKED_BACKWARD:
            return (
                f"with a block mask head_dim {max(problem.head_dim, problem.head_dim_v)} is served by Triton's backward"
            )
        if (reason := _mask_reason(problem)) is not None:
            return reason
    if any((spec.dropout_p > 0, spec.softcap > 0, spec.has_alibi, spec.has_bias, problem.layout == "varlen")):
        return "dropout, softcap, ALiBi, bias and packed sequences are served by the Triton backend"
    if spec.deterministic:
        return "sums of dq have no fixed order; the Triton backend's have one"
    if (reason := _operands_reason(problem)) is not None:
        return reason
    if problem.batch < 1 or problem.seqlen_k < 1 or problem.seqlen_q < _FEW_ROWS:
        return f"it has fewer than {_FEW_ROWS} queries, or no keys"
    num_rows = problem.batch * (problem.seqlen_q + _FEW_ROWS) * problem.num_heads_q
    if max(num_rows, problem.total_k) > _MOST_ROWS:
        return "it has more than 2**28 rows of queries or keys"
    return None


@functools.cache
def _plan() -> Any:
    return importlib.import_module("tilestream.backends.hopper.plan")


@functools.cache
def _backward_plan() -> Any:
    return importlib.import_module("tilestream.backends.hopper.backward_plan")


@functools.cache
def _device_reason(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"it runs on NVIDIA's sm_90, not on {device_type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not _has_gluon():
        return "this Triton has no Gluon"
    # Unlike Triton kernels these run on one kind of GPU: where there is none, nothing speaks for it.
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "no NVIDIA GPU is here"
    # A problem does not say which GPU it is of.
    others = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) != _CAPABILITY]
    return f"{torch.cuda.get_device_name(others[0])} is not sm_90" if others else None


def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


@functools.cache
def _num_processors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


BACKEND = HopperBackend()
