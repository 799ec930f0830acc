"""What the tests of ``tilestream bench approximate`` share: a small setting, made-up states, methods that lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilestream.bench.approximate.cells import METHODS
from tilestream.bench.approximate.methods import Method, Prepared
from tilestream.bench.approximate.setting import Setting
from tilestream.bench.approximate.states import LayerStates

CPU = torch.device("cpu")
SMALL = Setting(2, 128, num_heads=2, head_dim=16, dtype="float64", dropout_p=0.0, is_padded=False)


def needs(name: str, setting: Setting = SMALL) -> Method:
    """The method; a package that is not installed skips the test."""
    method = METHODS[name]
    if (reason := method.refuse(setting, CPU)) is not None and "not installed" in reason:
        pytest.skip(reason)
    return method


def changed(name: str, change: Callable[[Prepared], dict[str, Any]]) -> Method:
    """A method that does something else than it says."""
    method = METHODS[name]

    def prepare(setting: Setting, device: torch.device) -> Prepared:
        prepared = method.prepare(setting, device)
        return dataclasses.replace(prepared, **change(prepared))

    return dataclasses.replace(method, prepare=prepare)


def layers_of(num_tokens: int = 256) -> list[LayerStates]:
    """Two layers of one model with shared KV heads, one of another."""
    generator = torch.Generator().manual_seed(0)

    def draw_heads(num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, 16, generator=generator).half()

    return [
        LayerStates(
            model, "a text", layer, 2, model == "one", draw_heads(4), draw_heads(heads_kv), draw_heads(heads_kv)
        )
        for model, layer, heads_kv in (("one", 0, 2), ("one", 1, 2), ("two", 0, 4))
    ]
