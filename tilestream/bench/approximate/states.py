"""Real queries, keys and values: what attention layers of a pretrained model got while it read a text; in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestream.errors import ArgumentError

__all__ = ["LayerStates", "load_states", "save_states"]

# Raised when the fields change.
_FORMAT = 1
_TENSORS = ("query", "key", "value")


@dataclass(frozen=True)
class LayerStates:
    """What one attention layer got, after its projections and rotary embedding.

    `query` (tokens, num_heads_q, head_dim); `key` and `value` (tokens, num_heads_kv, head_dim); float16.
    `is_causal` says whether the model hides the future from this layer.
    """

    model: str
    text: str
    layer: int
    num_layers: int
    is_causal: bool
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def num_tokens(self) -> int:
        return self.query.shape[0]

    def heads(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The first `num_tokens` as query, key, value (1, num_tokens, num_heads_q, head_dim): a KV head per query head.

        No approximate method knows of shared KV heads, so they are repeated.
        """
        group = self.query.shape[1] // self.key.shape[1]
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (self.key, self.value))
        query, key, value = (
            tensor[None, :num_tokens].to(device, dtype).contiguous() for tensor in (self.query, key, value)
        )
        return query, key, value


def save_states(path: Path, layers: Sequence[LayerStates]) -> None:
    """Write `layers` as float16."""
    entries = []
    for layer in layers:
        entry = asdict(layer)
        entries.append({**entry, **{name: entry[name].to(torch.float16).contiguous() for name in _TENSORS}})
    torch.save({"format": _FORMAT, "layers": entries}, path)


def load_states(path: Path) -> list[LayerStates]:
    """The layers that `save_states` wrote.

    Raises:
        ArgumentError: the file cannot be read, or is no such file.
    """
    try:
        # No code: tensors, numbers and text alone.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ArgumentError(f"cannot read --states {str(path)!r}: {error.strerror or error}.") from None
    except Exception:  # Of a broken file: whatever the unpickler meets.
        raise ArgumentError(_not_states(path)) from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not found.get("layers"):
        raise ArgumentError(_not_states(path))
    return [_layer(entry, path) for entry in found["layers"]]


def _layer(entry: Any, path: Path) -> LayerStates:
    names = {field.name for field in fields(LayerStates)}
    if not isinstance(entry, dict) or set(entry) != names:
        raise ArgumentError(_not_states(path))
    query, key, value = (entry[name] for name in _TENSORS)
    if not all(isinstance(tensor, Tensor) and tensor.ndim == 3 for tensor in (query, key, value)):
        raise ArgumentError(_not_states(path))
    is_shaped = key.shape == value.shape and query.shape[::2] == key.shape[::2]
    if not is_shaped or key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ArgumentError(_not_states(path))
    return LayerStates(**entry)


def _not_states(path: Path) -> str:
    return f"--states {str(path)!r} is no file of states; write one with `tilestream bench approximate --capture FILE`."
