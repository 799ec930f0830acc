"""What a backend is: a name, an honest `supports`, a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tilestream.io.schedule import TileShape
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.state import AttentionOutput

__all__ = ["Backend"]


class Backend(Protocol):
    """One implementation of the contract. Inputs are validated before they get here."""

    @property
    def name(self) -> str:
        """The name users pass as ``backend=``."""
        ...

    def supports(self, problem: Problem) -> str | None:
        """None if `forward` and `backward` can run `problem`, else the reason why not."""
        ...

    def tile_shape(self, problem: Problem) -> TileShape:
        """What a dense `problem` is cut into, forward or backward as it says, and how; never changes results."""
        ...

    def forward(self, problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
        """out, contiguous, in the input dtype; lse in float32 (float64 for float64 inputs)."""
        ...

    def prepare(self, problem: Problem, inputs: AttentionInputs) -> Callable[[AttentionInputs], AttentionOutput] | None:
        """The forward of `problem` for tensors of the same shapes, strides, dtypes and devices as these, which are not
        looked at again; None if `forward` is as fast."""
        ...

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
        """Gradients in the dtypes of the inputs; `dlse` is None where nothing depends on lse."""
        ...
