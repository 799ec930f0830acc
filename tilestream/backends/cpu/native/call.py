"""One call as the C library reads it: a struct of 8-byte fields (src/call.h, same order)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.backends.cpu.native.lists import LISTS_BYTES
from tilestream.dropout import keep_threshold
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import Band

__all__ = ["CALL_BYTES", "LARGEST_SHIFT", "BackwardTensors", "dtype_number", "pack"]

# 17 pointers, 10 numbers, 8 x 3 and 2 x 4 strides, 2 + 2 + 3 strides, 5 numbers, 3 floating-point numbers, a pointer.
_LAYOUT = struct.Struct("=17q10q24q8q7q5q3dq")
# What libraries say they were made for.
CALL_BYTES = _LAYOUT.size + LISTS_BYTES

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_NO_LIMIT = 1 << 61
_KEEP_ALL = 1 << 32
# Distances stay far from 64 bits, so a limit beyond twice this is none.
LARGEST_SHIFT = 1 << 40


class BackwardTensors(NamedTuple):
    """What only the backward reads (dout, dlse) and writes; see src/call.h."""

    dout: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    delta: Tensor | None = None


_NOTHING = BackwardTensors()


# What a forward passes for them: most of its fields, which cost time one by one.
_NO_ADDRESSES = (0,) * len(_NOTHING)
_NO_STRIDES = (0,) * 12


def dtype_number(dtype: torch.dtype) -> int:
    """How src/call.h numbers a dtype."""
    return _DTYPES[dtype]


def pack(
    problem: Problem,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    lists: Tensor | None = None,
    backward: BackwardTensors = _NOTHING,
) -> bytes:
    """The struct as bytes. Every tensor must live until the library has returned; `lists` are those of a block mask."""
    spec = problem.spec
    band = Band() if lists is not None and problem.layout == "dense" else spec.band
    query, key, value, bias, alibi, sinks, seed, cu_seqlens_q, cu_seqlens_k = inputs
    return _LAYOUT.pack(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), _address(bias), _address(alibi), _address(sinks),
        _address(cu_seqlens_q), _address(cu_seqlens_k), out.data_ptr(), lse.data_ptr(),
        *(_NO_ADDRESSES if backward is _NOTHING else map(_address, backward)),
        _DTYPES[query.dtype], 0 if bias is None else _DTYPES[bias.dtype], torch.get_num_threads(),
        problem.batch, problem.num_heads_q, problem.num_heads_kv, problem.seqlen_q, problem.seqlen_k,
        problem.head_dim, problem.head_dim_v,
        *_strides(query), *_strides(key), *_strides(value), *_strides(out),
        *(_NO_STRIDES if backward is _NOTHING else _backward_strides(backward)),
        *_broadcast_strides(bias), *_broadcast_strides(backward.dbias),
        *_slope_strides(alibi), *_head_strides(lse), *_dlse_strides(backward.dlse),
        _limit(band.left), _limit(band.right), problem.shift or 0, 0 if seed is None else int(seed),
        _KEEP_ALL if spec.dropout_p == 0 else keep_threshold(spec.dropout_p),
        spec.scale, spec.softcap, spec.dropout_p, _address(lists),
    )  # fmt: skip


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _limit(limit: int | None) -> int:
    return _NO_LIMIT if limit is None or limit > 2 * LARGEST_SHIFT else limit


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """(batch, token, head) of a dense or packed tensor."""
    if x is None:
        return (0, 0, 0)
    strides = x.stride()
    return strides[:3] if len(strides) == 4 else (0, *strides[:2])


def _backward_strides(backward: BackwardTensors) -> tuple[int, ...]:
    return (
        *_strides(backward.dout),
        *_strides(backward.dq),
        *_strides(backward.dk),
        *_strides(backward.dv),
    )


def _broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _slope_strides(x: Tensor | None) -> tuple[int, ...]:
    """(batch, head) of (heads,) or (batch, heads)."""
    if x is None:
        return (0, 0)
    return (0, x.stride(0)) if x.dim() == 1 else x.stride()


def _head_strides(x: Tensor) -> tuple[int, ...]:
    """(batch, head) of (batch, heads, seqlen_q) or (heads, total_q)."""
    return x.stride()[:2] if x.dim() == 3 else (0, x.stride(0))


def _dlse_strides(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return (0, 0, 0)
    return x.stride() if x.dim() == 3 else (0, *x.stride())
