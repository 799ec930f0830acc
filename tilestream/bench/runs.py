"""One provider on one case in one mode, ready to be called: what timing, memory and the gate have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tilestream.bench.cases import DTYPES, Case, normal_numbers
from tilestream.bench.providers import Provider
from tilestream.problem import AttentionInputs

__all__ = ["IS_BACKWARD", "MODES", "Mode", "Run", "make_dout", "make_run"]

Mode = Literal["forward", "backward", "both"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Of each direction that a mode times, whether it is the backward.
IS_BACKWARD: dict[Mode, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "both": (False, True)}


@dataclass
class Run:
    """`setup` is not timed, `call` is; `call` returns out, or dq, dk, dv, or all four."""

    setup: Callable[[], None]
    call: Callable[[], tuple[Tensor, ...]]


def make_dout(case: Case, device: torch.device, seed: int = 0, drawn_on: torch.device | None = None) -> Tensor:
    """A standard normal gradient of out, drawn as `Case.make_inputs`."""
    randn = normal_numbers(device, DTYPES[case.dtype], seed + 1, drawn_on)
    return randn(case.batch, case.seqlen_q, case.num_heads_q, case.head_dim_v)


def make_run(
    case: Case,
    provider: Provider,
    mode: Mode,
    device: torch.device,
    seed: int = 0,
    inputs: AttentionInputs | None = None,
    dout: Tensor | None = None,
) -> Run:
    """The timed part of `mode`, forward in inference mode, backward, or both.

    Args:
        inputs, dout: what it runs on; new ones of `seed` by default.
    """
    inputs = case.make_inputs(device, seed) if inputs is None else inputs
    query, key, value = inputs.query, inputs.key, inputs.value
    forward = provider.prepare(case, inputs)
    if mode == "forward":
        # A gate before may have asked for gradients.
        query, key, value = query.detach(), key.detach(), value.detach()

        def infer() -> tuple[Tensor, ...]:
            with torch.inference_mode():
                return (forward(query, key, value),)

        return Run(lambda: None, infer)

    leaves = tuple(tensor.requires_grad_() for tensor in (query, key, value))
    dout = make_dout(case, device, seed) if dout is None else dout
    graph: list[Tensor] = []

    def setup() -> None:
        graph[:] = [forward(*leaves)]

    def backward() -> tuple[Tensor, ...]:
        if not graph:
            setup()
        return torch.autograd.grad(graph.pop(), leaves, dout)

    def both() -> tuple[Tensor, ...]:
        out = forward(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return Run(setup, backward) if mode == "backward" else Run(lambda: None, both)
