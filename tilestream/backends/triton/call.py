"""What travels to a kernel: its compile-time facts as one hashable object, its tensors as one, its numbers as one.

A changed length changes numbers only, and numbers are not specialised on, so it compiles nothing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.backends.triton.configs import Config, padded
from tilestream.dropout import keep_threshold
from tilestream.problem import Problem

__all__ = [
    "BYTES_AT_ONCE",
    "Facts",
    "Numbers",
    "Tensors",
    "broadcast_strides",
    "contiguous_strides",
    "facts_of",
    "is_in_place",
    "num_key_tiles",
    "num_row_tiles",
    "precision_of",
    "rows_in_place",
    "shapes_of",
    "sizes_of",
    "strides_of",
    "whole_width",
]

_LOG2E = math.log2(math.e)
# What float32 knows as more than 0: a masked score of -inf times 0 would be NaN.
_SMALLEST_SCALE = 2.0**-126
# What a thread reads.
BYTES_AT_ONCE = 16


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
    row_lse: Tensor | None = None
    row_delta: Tensor | None = None
    q_parts: Tensor | None = None
    k_parts: Tensor | None = None
    v_parts: Tensor | None = None
    dout_parts: Tensor | None = None
    # Of a block mask, for the exact kernels of the backend hopper (`hopper.block_lists.Lists`).
    list_rows: Tensor | None = None
    list_starts: Tensor | None = None
    list_patterns: Tensor | None = None
    list_bits: Tensor | None = None
    # Of a block mask (`block_lists.Lists`), by rows and by keys; the last ones.
    row_spans: Tensor | None = None
    row_tiles: Tensor | None = None
    row_bits: Tensor | None = None
    key_spans: Tensor | None = None
    key_tiles: Tensor | None = None
    key_bits: Tensor | None = None


class Numbers(NamedTuple):
    """Sizes and factors, which follow from the problem; then strides of (batch, token, head), in `Facts.unit` units."""

    num_tiles: int = 0
    num_programs: int = 0
    num_flaggers: int = 0
    num_splits: int = 1
    split_keys: int = 0
    num_rows: int = 0
    row_tiles: int = 0
    key_tiles: int = 0
    num_heads_kv: int = 0
    batch: int = 0
    num_steps: int = 0
    seqlen_q: int = 0
    seqlen_k: int = 0
    total_q: int = 0
    total_k: int = 0
    left: int = 0
    right: int = 0
    left_edge: int = 0
    right_edge: int = 0
    shift: int = 0
    list_rows: int = 0
    list_strides: tuple[int, ...] = (0, 0)
    list_repeats: int = 1
    num_long: int = 0
    scale: float = 0.0
    scale_log2: float = 0.0
    softcap_in: float = 0.0
    softcap_out: float = 0.0
    keep_threshold: int = 0
    keep_scale: float = 0.0
    dbias_shape: tuple[int, ...] = (0, 0, 0, 0)
    slopes_stride: int = 0
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    q_strides: tuple[int, ...] = (0, 0, 0)
    k_strides: tuple[int, ...] = (0, 0, 0)
    v_strides: tuple[int, ...] = (0, 0, 0)
    out_strides: tuple[int, ...] = (0, 0, 0)
    dout_strides: tuple[int, ...] = (0, 0, 0)
    dq_strides: tuple[int, ...] = (0, 0, 0)
    dk_strides: tuple[int, ...] = (0, 0, 0)
    dv_strides: tuple[int, ...] = (0, 0, 0)


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
    # Rows of a tile of `tiles.padded_rows`, and keys of one of `tiles.padded_keys`.
    row_block: int = 1
    # Tiles of keys, one after the other, of a program of the exact key kernel.
    num_slices: int = 1
    writes_parts: bool = False
    takes_turns: bool = False
    # Tiles come from the list of a block mask, by rows or by keys, whose own tiles are these.
    has_blocks: bool = False
    by_keys: bool = False
    list_m: int = 1
    list_n: int = 1
    # Query heads of a KV head, where each has row tiles of its own.
    kv_share: int = 1

    @property
    def unit(self) -> int:
        """Elements that strides count in (`unit_of`)."""
        return unit_of(torch.float32 if self.is_float32 else torch.float16)

    @property
    def is_band(self) -> bool:
        """Whether any pair can be out of sight."""
        return self.has_left or self.has_right


def facts_of(problem: Problem, config: Config, precision: str, **more: Any) -> Facts:
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
        is_varlen=problem.layout == "varlen",
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        has_softcap=spec.softcap > 0,
        has_alibi=spec.has_alibi,
        has_bias=spec.has_bias,
        has_sinks=spec.has_sinks,
        has_dropout=keep_threshold(spec.dropout_p) < 2**32,
        folds_scale=spec.scale >= _SMALLEST_SCALE and spec.softcap == 0 and not spec.has_alibi and not spec.has_bias,
        is_float32=problem.dtype == torch.float32,
        precision=precision,
        takes_turns=config.takes_turns,
        num_slices=config.num_slices,
        **more,
    )


def precision_of(problem: Problem) -> str:
    """How the matrix units take float32: exactly, as PyTorch's own products, unless the user allows them less.

    Six products of bfloat16 parts hold all 24 bits of both operands and run on the matrix units, where products that
    round as IEEE says do not.
    """
    if problem.dtype != torch.float32 or problem.device_type != "cuda" or torch.version.hip is not None:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "bf16x6"


@functools.lru_cache(maxsize=1024)
def sizes_of(problem: Problem) -> Numbers:
    """The numbers that follow from the problem."""
    spec, shift = problem.spec, problem.shift or 0
    # An edge beyond every position is as good as one further away, and its product with the group fits 32 bits.
    farthest = problem.total_q + problem.total_k

    def edge(position: int) -> int:
        return max(-problem.seqlen_q, min(position, problem.seqlen_k))

    return Numbers(
        num_rows=problem.total_q * problem.num_heads_q,
        num_heads_kv=problem.num_heads_kv,
        batch=problem.batch,
        num_steps=problem.batch.bit_length(),
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        total_k=problem.total_k,
        left=min(spec.band.left or 0, farthest),
        right=min(spec.band.right or 0, farthest),
        left_edge=edge(shift - (spec.band.left or 0)),
        right_edge=edge(shift + (spec.band.right or 0)),
        shift=shift,
        scale=spec.scale,
        scale_log2=spec.scale * _LOG2E,
        softcap_in=spec.scale / spec.softcap if spec.softcap > 0 else 0.0,
        softcap_out=spec.softcap * _LOG2E,
        keep_threshold=min(keep_threshold(spec.dropout_p), 2**32 - 1),
        keep_scale=1.0 / (1.0 - spec.dropout_p),
    )


def shapes_of(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors with rows, which are contiguous where a call makes them."""
    is_varlen = problem.layout == "varlen"
    tokens_q = (problem.total_q,) if is_varlen else (problem.batch, problem.seqlen_q)
    tokens_k = (problem.total_k,) if is_varlen else (problem.batch, problem.seqlen_k)
    q, out = ((*tokens_q, problem.num_heads_q, width) for width in (problem.head_dim, problem.head_dim_v))
    k, v = ((*tokens_k, problem.num_heads_kv, width) for width in (problem.head_dim, problem.head_dim_v))
    return {"q": q, "k": k, "v": v, "out": out, "dout": out, "dq": q, "dk": k, "dv": v}


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new tensor, in elements."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def unit_of(dtype: torch.dtype) -> int:
    """Elements that a thread reads at once, and that whole rows are multiples of."""
    return BYTES_AT_ONCE // dtype.itemsize


def whole_width(width: int, dtype: torch.dtype) -> int:
    """A head dimension as kernels read and write it."""
    unit = unit_of(dtype)
    return -(-width // unit) * unit


def is_in_place(x: Tensor) -> bool:
    """Whether rows that are whole ones are read 16 bytes at a time where they lie."""
    unit, (*steps, last) = unit_of(x.dtype), x.stride()
    askew = [step % unit for size, step in zip(x.shape, steps, strict=False) if size > 1]
    return last == 1 and x.data_ptr() % BYTES_AT_ONCE == 0 and not any(askew)


def rows_in_place(x: Tensor) -> Tensor:
    """A tensor whose rows are read 16 bytes at a time: `x`, or a copy; with columns of zeros if they are no whole ones.

    Copied once, not read element by element by every tile that needs them: the code for that is slow, and what ptxas
    of CUDA 12.8 makes of it can be wrong (docs/measured-facts.md).
    """
    width = x.shape[-1]
    if width % unit_of(x.dtype):
        whole = x.new_zeros((*x.shape[:-1], whole_width(width, x.dtype)))
        whole[..., :width] = x
        return whole
    return x if is_in_place(x) else x.clone(memory_format=torch.contiguous_format)


def strides_of(problem: Problem, given: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Those `Numbers` that are strides of rows, in steps of 16 bytes.

    Args:
        given: strides in elements of q, k, v and, in a backward, out and dout; the others are contiguous.
    """
    shapes = shapes_of(problem)
    elements = dict(zip(("q", "k", "v", "out", "dout"), given, strict=False))
    for name in ("dq", "dk", "dv") if "dout" in elements else ("out",):
        elements[name] = contiguous_strides(shapes[name])
    unit = unit_of(problem.dtype)
    # A packed tensor has no batch; a step that no row is away from another may be anything.
    rows = {name: (0, *steps) if len(steps) == 3 else steps for name, steps in elements.items()}
    return {f"{name}_strides": tuple(step // unit for step in steps[:-1]) for name, steps in rows.items()}


def broadcast_strides(bias: Tensor | None) -> tuple[int, ...]:
    """Strides of the bias in elements, 0 where it is broadcast."""
    if bias is None:
        return 0, 0, 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))


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
