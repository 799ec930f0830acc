"""The backend that runs everywhere: the tile loop in PyTorch operations, batched over heads."""

from __future__ import annotations

from torch import Tensor

from tilestream.backends.cpu import layout, varlen
from tilestream.io.schedule import TileShape
from tilestream.problem import SUPPORTED_DTYPES, AttentionInputs, Gradients, Problem
from tilestream.state import AttentionOutput

__all__ = ["BACKEND", "CpuBackend"]


class CpuBackend:
    """Every feature, every floating-point dtype, any device PyTorch has; the fallback of last resort."""

    name = "cpu"

    def supports(self, problem: Problem) -> str | None:
        """None, or why the call cannot run here."""
        if problem.dtype not in SUPPORTED_DTYPES:
            return f"dtype {problem.dtype} is not floating point of 16, 32 or 64 bits"
        if problem.dtype.itemsize == 8 and problem.device_type == "mps":
            return "float64 does not exist on mps"
        return None

    def tile_shape(self, problem: Problem) -> TileShape:
        """See `Backend.tile_shape`."""
        if problem.block_mask is not None:
            packs_group = problem.block_mask.num_heads == 1
            return TileShape(*layout.block_tile(problem), packs_group, dq_in_memory=problem.is_backward)
        return TileShape(*layout.tile_shape(problem, problem.seqlen_q, problem.seqlen_k), sums_in_memory=True)

    def forward(self, problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
        """See `Backend.forward`."""
        return varlen.forward(problem, inputs)

    def prepare(self, problem: Problem, inputs: AttentionInputs) -> None:
        """See `Backend.prepare`: a call leaves nothing to remember."""

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
        return varlen.backward(problem, inputs, output, dout, dlse, needs_dbias, needs_dsinks)


BACKEND = CpuBackend()
