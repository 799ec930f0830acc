"""Run by test_compile.py in a fresh process: torch.compile meets tilestream before any eager call has.

Usage: python compile_worker.py SCENARIO BACKEND DEVICE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import tilestream

# Long enough that inductor does not compile a serial loop for small tensors (up to 4096 elements) and another later.
_LENGTHS = (133, 147, 164, 230)


def _tensors(seqlen: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen)
    shapes = ((2, seqlen, 4, 16), (2, seqlen + 5, 2, 16), (2, seqlen + 5, 2, 8))
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out, lse = tilestream.attention_with_lse(query, key, value, causal=True, softcap=5.0)
    return out.square().sum() + lse.sum()


def _bias_and_sinks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias = query.mean(dim=-1).transpose(1, 2).unsqueeze(-1)
    return tilestream.attention(query, key, value, bias=bias, sinks=query[0, 0, :, 0], window=(20, 3)).square().sum()


def _seeded_dropout(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return tilestream.attention(query, key, value, dropout_p=0.5, seed=5).square().sum()


def _packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    starts = torch.arange(3, dtype=torch.int32, device=query.device)
    packed = [x.flatten(0, 1) for x in (query, key, value)]
    return tilestream.attention_varlen(*packed, starts * seqlen_q, starts * seqlen_k, causal=True).square().sum()


SCENARIOS: dict[str, Callable[..., Tensor]] = {
    "dense": _dense,
    "bias_and_sinks": _bias_and_sinks,
    "dropout": _seeded_dropout,
    "packed": _packed,
}


def check_dynamic_lengths(scenario: str, backend: str, device: str) -> None:
    """Loss and gradients for several lengths, from graphs that are compiled once and not per length."""
    function = SCENARIOS[scenario]
    for is_dynamic in (True, None):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(function, fullgraph=True, dynamic=is_dynamic, backend=backend)
        results = [_gradients(compiled, _tensors(seqlen, device)) for seqlen in _LENGTHS]
        num_graphs = counters["stats"]["unique_graphs"]
        # Left to itself, torch.compile first specialises, then makes the lengths dynamic: two graphs.
        assert num_graphs <= (1 if is_dynamic else 2), f"{num_graphs} graphs for {_LENGTHS}, {is_dynamic=}"
        for seqlen, got in zip(_LENGTHS, results, strict=True):
            for one, other in zip(got, _gradients(function, _tensors(seqlen, device)), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _gradients(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def check_module(backend: str, device: str) -> None:
    """A module under autocast and checkpointing, with drawn dropout in training and without gradients in evaluation."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(32, 3 * 32)

        def attend(self, x: Tensor) -> Tensor:
            query, key, value = self.project(x).unflatten(-1, (3, 4, 8)).unbind(-3)
            dropout_p = 0.5 if self.training else 0.0
            return tilestream.attention(query, key, value, causal=True, dropout_p=dropout_p).flatten(2)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                result: Any = torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False)
                return x + result
            return x + self.attend(x)

    block = Block().to(device)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    x = torch.randn(2, 40, 32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        compiled(x).float().square().sum().backward()
        assert block.project.weight.grad is not None
        assert bool(torch.isfinite(block.project.weight.grad).all())
        assert not torch.equal(compiled(x), compiled(x)), "every call draws another mask"
    block.eval()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    name, compile_backend, on_device = sys.argv[1:]
    if name == "module":
        check_module(compile_backend, on_device)
    else:
        check_dynamic_lengths(name, compile_backend, on_device)
    print("compiled and right")
