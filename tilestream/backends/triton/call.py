"""What travels to a kernel: its compile-time facts as one hashable object, its tensors as one, its numbers as one.

A changed length changes numbers only, and numbers are not specialised on, so it compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.backends.triton.configs import Config
from tilestream.dropout import keep_threshold
from tilestream.problem import AttentionInputs, Problem

__all__ = ["Facts", "Numbers", "Tensors", "facts_of", "numbers_of", "num_key_tiles", "num_row_tiles"]

# Positions and edges stay within 32 bits: an edge beyond every position is as good as one further away.
_FARTHEST = 2**29
_LOG2E = math.log2(math.e)
_BYTES_AT_ONCE = 16


class Tensors(NamedTuple):
    """Every tensor that a kernel may read or write; None where the call has none."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    delta: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    out_parts: Tensor | None = None
    lse_parts: Tensor | None = None
    flags: Tensor | None = None


class Numbers(NamedTuple):
    """Sizes, strides and factors. Strides are of (batch, token, head), in units of `Facts.unit` elements."""

    num_tiles: int
    num_programs: int
    num_splits: int
    split_keys: int
    num_rows: int
    num_heads_kv: int
    batch: int
    num_steps: int
    seqlen_q: int
    seqlen_k: int
    total_q: int
    total_k: int
    left: int
    right: int
    left_edge: int
    right_edge: int
    shift: int
    scale: float
    scale_log2: float
    softcap_in: float
    softcap_out: float
    keep_threshold: int
    keep_scale: float
    slopes_stride: int
    bias_strides: tuple[int, ...]
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    out_strides: tuple[int, ...] = (0, 0, 0)
    dout_strides: tuple[int, ...] = (0, 0, 0)
    dq_strides: tuple[int, ...] = (0, 0, 0)
    dk_strides: tuple[int, ...] = (0, 0, 0)
    dv_strides: tuple[int, ...] = (0, 0, 0)
    dbias_shape: tuple[int, ...] = (1, 1, 1, 1)


@dataclass(frozen=True)
class Facts:
    """What a kernel is compiled for. Plain values only: a function here would be missing from Triton's cache key."""

    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    head_dim: int
    head_dim_v: int
    group: int
    unit: int
    is_varlen: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_alibi: bool
    has_bias: bool
    has_sinks: bool
    has_dropout: bool
    folds_scale: bool
    is_float32: bool
    precision: str
    has_dlse: bool = False
    starts_last: bool = False
    has_splits: bool = False
    flags: bool = False
    sums_rows: bool = False
    sums_keys: bool = False


def facts_of(problem: Problem, config: Config, unit: int, **more: bool) -> Facts:
    """The facts of one kernel of a call; `more` are its own."""
    spec = problem.spec
    return Facts(
        block_m=config.block_m,
        block_n=config.block_n,
        block_d=padded(problem.head_dim),
        block_dv=padded(problem.head_dim_v),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        group=problem.group,
        unit=unit,
        is_varlen=problem.layout == "varlen",
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        has_softcap=spec.softcap > 0,
        has_alibi=spec.has_alibi,
        has_bias=spec.has_bias,
        has_sinks=spec.has_sinks,
        has_dropout=keep_threshold(spec.dropout_p) < 2**32,
        folds_scale=spec.scale > 0 and spec.softcap == 0 and not spec.has_alibi and not spec.has_bias,
        is_float32=problem.dtype == torch.float32,
        precision=_precision(problem),
        **more,
    )


def _precision(problem: Problem) -> str:
    """How the matrix units take float32: as PyTorch's own products, exactly unless the user allows less."""
    allows_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if problem.dtype == torch.float32 and allows_tf32 else "ieee"


def padded(width: int) -> int:
    """A head dimension as it is on chip: a power of two that the matrix units take."""
    return max(16, 1 << (width - 1).bit_length())


def common_unit(*tensors: Tensor) -> int:
    """Elements in 16 bytes where every row of every tensor starts at a multiple of that, else 1."""
    unit = _BYTES_AT_ONCE // tensors[0].element_size()
    for x in tensors:
        if x.data_ptr() % _BYTES_AT_ONCE or any(stride % unit for stride in x.stride()[:-1]):
            return 1
    return unit


def numbers_of(problem: Problem, inputs: AttentionInputs, unit: int, **more: Any) -> Numbers:
    """The numbers of one kernel of a call; `more` are its own strides and tiles."""
    return _numbers(problem)._replace(
        slopes_stride=inputs.alibi_slopes.stride(0)
        if inputs.alibi_slopes is not None and inputs.alibi_slopes.dim() == 2
        else 0,
        bias_strides=_broadcast_strides(inputs.bias),
        q_strides=strides_of(inputs.query, unit),
        k_strides=strides_of(inputs.key, unit),
        v_strides=strides_of(inputs.value, unit),
        **more,
    )


@functools.lru_cache(maxsize=1024)
def _numbers(problem: Problem) -> Numbers:
    spec = problem.spec
    left = min(spec.band.left or 0, _FARTHEST)
    right = min(spec.band.right or 0, _FARTHEST)
    shift = problem.shift or 0
    nearby = max(-_FARTHEST, min(shift, _FARTHEST))
    return Numbers(
        num_tiles=0,
        num_programs=0,
        num_splits=1,
        split_keys=0,
        num_rows=problem.total_q * problem.num_heads_q,
        num_heads_kv=problem.num_heads_kv,
        batch=problem.batch,
        num_steps=problem.batch.bit_length(),
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        total_k=problem.total_k,
        left=left,
        right=right,
        left_edge=max(-_FARTHEST, min(shift - (spec.band.left or 0), _FARTHEST)),
        right_edge=max(-_FARTHEST, min(shift + (spec.band.right or 0), _FARTHEST)),
        shift=shift if spec.has_alibi else nearby,
        scale=spec.scale,
        scale_log2=spec.scale * _LOG2E,
        softcap_in=spec.scale / spec.softcap if spec.softcap > 0 else 0.0,
        softcap_out=spec.softcap * _LOG2E,
        keep_threshold=keep_threshold(spec.dropout_p),
        keep_scale=1.0 / (1.0 - spec.dropout_p),
        slopes_stride=0,
        bias_strides=(0, 0, 0, 0),
        q_strides=(0, 0, 0),
        k_strides=(0, 0, 0),
        v_strides=(0, 0, 0),
    )


def strides_of(x: Tensor, unit: int) -> tuple[int, int, int]:
    """Strides of batch, token and head in units; a packed tensor has no batch."""
    batch, token, head = (0, *x.stride()[:-1]) if x.dim() == 3 else x.stride()[:-1]
    return batch // unit, token // unit, head // unit


def _broadcast_strides(bias: Tensor | None) -> tuple[int, int, int, int]:
    if bias is None:
        return 0, 0, 0, 0
    batch, head, row, key = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
    return batch, head, row, key


def num_row_tiles(problem: Problem, block_m: int) -> int:
    """Row tiles of one KV head and batch entry; of a packed call all of them (see `tiles._search`)."""
    if problem.layout == "varlen":
        return problem.total_q * problem.group // block_m + problem.batch + 1
    return -(-problem.seqlen_q * problem.group // block_m)


def num_key_tiles(problem: Problem, block_n: int) -> int:
    """Key tiles, likewise."""
    if problem.layout == "varlen":
        return problem.total_k // block_n + problem.batch + 1
    return -(-problem.seqlen_k // block_n)
