"""What all contestants of one sequence length share, and the layouts in which each of them gets its tensors.

Everybody gets what suits it best, ahead of all timing: heads before tokens where a package works so, heads and head_dim
as one where it takes what a projection gives, sequences packed without padding for tilestream.

Shapes: B batch, N tokens, H heads, D head_dim, T tokens of all sequences without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tilestream.bench.cases import DTYPES, normal_numbers
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, default_scale

__all__ = ["LAYOUTS", "Layout", "Setting"]

# The longest difference between two sequences of a batch: so few that nobody gains by leaving padding out.
_MAX_PADDING = 20


@dataclass(frozen=True)
class Setting:
    """Bidirectional self-attention of `batch` sequences of at most `seqlen` tokens, with dropout and padding."""

    batch: int
    seqlen: int
    num_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    dropout_p: float = 0.1
    is_padded: bool = True

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Setting:
        """The setting that `to_dict` described."""
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Every field, JSON-able."""
        return asdict(self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each sequence has; the rest up to `seqlen` is padding. Of a batch of 2 those of entries 0, 1.

        Between 1 and 20 are missing, at most a quarter, and never as many in one sequence as in the next.
        """
        if not self.is_padded:
            return (self.seqlen,) * self.batch
        most = min(_MAX_PADDING, self.seqlen // 4)
        return tuple(self.seqlen - 1 - 7 * b % most if most else self.seqlen for b in range(self.batch))

    @property
    def tensor_bytes(self) -> int:
        """Of one of query, key, value, out and their gradients, padding included."""
        return self.batch * self.seqlen * self.num_heads * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def score_bytes(self) -> int:
        """Of one score matrix per head."""
        return self.batch * self.num_heads * self.seqlen**2 * DTYPES[self.dtype].itemsize

    def problem(self, device_type: str, is_packed: bool) -> Problem:
        """The exact call."""
        problem = Problem.dense(
            batch=self.batch, seqlen_q=self.seqlen, num_heads_q=self.num_heads, head_dim=self.head_dim,
            dtype=DTYPES[self.dtype], device_type=device_type,
            spec=AttentionSpec(scale=default_scale(self.head_dim), dropout_p=self.dropout_p),
        )  # fmt: skip
        return problem.packed(self.lengths, self.lengths) if is_packed else problem

    def make_inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Standard normal query, key, value and gradient of out (B, N, H, D), drawn on `device`."""
        randn = normal_numbers(device, DTYPES[self.dtype], seed=0, drawn_on=device)
        query, key, value, dout = (randn(self.batch, self.seqlen, self.num_heads, self.head_dim) for _ in range(4))
        return query, key, value, dout

    def is_token(self, device: torch.device) -> Tensor:
        """bool (B, N): False at padding."""
        return torch.arange(self.seqlen, device=device) < torch.tensor(self.lengths, device=device)[:, None]


@dataclass(frozen=True)
class Layout:
    """`pack` makes of (B, N, H, D) what a contestant wants, contiguous; `unpack` the other way round."""

    pack: Callable[[Setting, Tensor], Tensor]
    unpack: Callable[[Setting, Tensor], Tensor]


def _unpack_flat(setting: Setting, x: Tensor) -> Tensor:
    return x.view(setting.batch, setting.num_heads, *x.shape[1:]).transpose(1, 2)


def _pack_tokens(setting: Setting, x: Tensor) -> Tensor:
    return x[setting.is_token(x.device)]


def _unpack_tokens(setting: Setting, x: Tensor) -> Tensor:
    out = x.new_zeros(setting.batch, setting.seqlen, *x.shape[1:])
    out[setting.is_token(x.device)] = x
    return out


LAYOUTS = {
    "tokens first": Layout(lambda setting, x: x.contiguous(), lambda setting, x: x),
    "heads first": Layout(lambda setting, x: x.transpose(1, 2).contiguous(), lambda setting, x: x.transpose(1, 2)),
    # (B * H, N, D).
    "heads in batch": Layout(lambda setting, x: x.transpose(1, 2).flatten(0, 1).contiguous(), _unpack_flat),
    # (B, N, H * D), as a linear layer gives it.
    "heads in width": Layout(
        lambda setting, x: x.flatten(2).contiguous(),
        lambda setting, x: x.unflatten(2, (setting.num_heads, setting.head_dim)),
    ),
    # (T, H, D).
    "packed": Layout(_pack_tokens, _unpack_tokens),
}
