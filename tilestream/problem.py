"""One concrete call: its tensors, its sizes, and the only validation in the library."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.errors import ArgumentError, DeviceError, DtypeError, ShapeError, describe_shapes
from tilestream.spec import AttentionSpec, default_scale

__all__ = [
    "IS_DEBUGGING",
    "AttentionInputs",
    "DoubleGradients",
    "Gradients",
    "Problem",
    "assert_cu_seqlens_values",
    "check_arguments",
    "check_cu_seqlens_values",
    "check_tensors",
    "check_types",
    "crop_bias",
]

# Read once, at import, so that no call pays for it and no graph of torch.compile depends on the environment.
IS_DEBUGGING = os.environ.get("TILESTREAM_DEBUG") == "1"
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST_NUMBER = 3.4e38
_LARGEST_INT = 2**62
_DENSE_AXES = "batch, seqlen, heads, head_dim"
_VARLEN_AXES = "total_tokens, heads, head_dim"


class AttentionInputs(NamedTuple):
    """Every tensor of one call. Dense tensors have rank 4; with ``cu_seqlens_*`` they are packed and have rank 3."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def is_varlen(self) -> bool:
        return self.cu_seqlens_q is not None


class Gradients(NamedTuple):
    """Gradients of the differentiable inputs; ``dbias`` and ``dsinks`` are None unless they were asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


class DoubleGradients(NamedTuple):
    """Gradients with respect to everything that the backward reads; None where the call has no such tensor."""

    dout: Tensor
    dlse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True)
class Problem:
    """The sizes and facts of one validated call; it can also be made without tensors, to ask what a call would cost.

    For packed sequences ``seqlen_q`` and ``seqlen_k`` are the longest sequence, ``total_q`` and ``total_k`` the
    packed lengths, and ``shift`` is None: each sequence aligns its own last query with its own last key.
    """

    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device_type: str
    spec: AttentionSpec
    shift: int | None
    layout: str = "dense"
    total_q: int = 0
    total_k: int = 0
    is_backward: bool = False
    block_mask: BlockMask | None = None  # of block-sparse attention alone

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Made once: plans of calls are looked up by it, and its fields take longer to hash than a kernel to launch."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @functools.cached_property
    def without_mask(self) -> Problem:
        """The call without its mask: what may be remembered, because a mask may be large."""
        return dataclasses.replace(self, block_mask=None)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads_q // self.num_heads_kv

    @classmethod
    def dense(
        cls,
        *,
        batch: int = 1,
        seqlen_q: int,
        seqlen_k: int | None = None,
        num_heads_q: int,
        num_heads_kv: int | None = None,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.float32,
        device_type: str = "cpu",
        spec: AttentionSpec | None = None,
        shift: int | None = None,
        is_backward: bool = False,
    ) -> Problem:
        """A dense call described by its sizes; keys, KV heads and head_dim_v default to their query counterparts."""
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        return cls(
            batch=batch,
            num_heads_q=num_heads_q,
            num_heads_kv=num_heads_q if num_heads_kv is None else num_heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            dtype=dtype,
            device_type=device_type,
            spec=AttentionSpec(scale=default_scale(head_dim)) if spec is None else spec,
            shift=seqlen_k - seqlen_q if shift is None else shift,
            total_q=batch * seqlen_q,
            total_k=batch * seqlen_k,
            is_backward=is_backward,
        )

    def packed(self, seqlens_q: Sequence[int], seqlens_k: Sequence[int]) -> Problem:
        """The same call over packed sequences of these lengths."""
        return dataclasses.replace(
            self,
            batch=len(seqlens_q),
            seqlen_q=max(seqlens_q, default=0),
            seqlen_k=max(seqlens_k, default=0),
            shift=None,
            layout="varlen",
            total_q=sum(seqlens_q),
            total_k=sum(seqlens_k),
        )

    @classmethod
    def from_inputs(
        cls,
        inputs: AttentionInputs,
        spec: AttentionSpec,
        *,
        shift: int | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        is_backward: bool = False,
    ) -> Problem:
        """The problem of already validated tensors."""
        query, key, value = inputs.query, inputs.key, inputs.value
        total_q, total_k = query.shape[0], key.shape[0]
        problem = cls.dense(
            batch=query.shape[0],
            seqlen_q=query.shape[-3],
            seqlen_k=key.shape[-3],
            num_heads_q=query.shape[-2],
            num_heads_kv=key.shape[-2],
            head_dim=query.shape[-1],
            head_dim_v=value.shape[-1],
            dtype=query.dtype,
            device_type=query.device.type,
            spec=spec,
            shift=shift,
            is_backward=is_backward,
        )
        if inputs.cu_seqlens_q is None:
            return problem
        return dataclasses.replace(
            problem,
            batch=inputs.cu_seqlens_q.shape[0] - 1,
            seqlen_q=total_q if max_seqlen_q is None else min(max_seqlen_q, total_q),
            seqlen_k=total_k if max_seqlen_k is None else min(max_seqlen_k, total_k),
            shift=None,
            layout="varlen",
            total_q=total_q,
            total_k=total_k,
        )


def check_arguments(
    *,
    causal: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    shift: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> None:
    """Validate the plain keyword arguments of one call."""
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise DtypeError(f"{name} must be True or False, got {type(flag).__name__}.")
    if backend is not None and not isinstance(backend, str):
        raise DtypeError(f"backend must be a name or None, got {backend!r}.")
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ArgumentError(f"window must be (left, right), two ints or None each; got {window!r}.")
        for name, limit in zip(("left", "right"), window, strict=True):
            if limit is not None and not _is_int(limit):
                raise DtypeError(f"window {name} must be an int or None, got {type(limit).__name__}.")
            if limit is not None and limit < 0:
                raise ArgumentError(f"window {name} is {limit}, but must be at least 0; None means no limit.")
            if limit is not None and limit >= 2**63:
                raise ArgumentError(f"window {name} is {limit}, which is no 64-bit int; None means no limit.")
    if scale is not None:
        _check_number("scale", scale)
    _check_number("softcap", softcap)
    _check_number("dropout_p", dropout_p)
    if softcap < 0:
        raise ArgumentError(f"softcap is {softcap}, but must be at least 0; 0 turns it off.")
    if not 0 <= dropout_p < 1:
        raise ArgumentError(f"dropout_p is {dropout_p}, but must lie in [0, 1).")
    for name, number in (("shift", shift), ("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if number is not None and not _is_int(number):
            raise DtypeError(f"{name} must be an int, got {type(number).__name__}; pass int({name}).")
        if number is not None and number < 0 and name != "shift":
            raise ArgumentError(f"{name} is {number}, but must be at least 0.")
    if shift is not None and not -_LARGEST_INT <= shift <= _LARGEST_INT:
        raise ArgumentError(f"shift is {shift}, but must lie within 2**62 of 0.")


def check_types(inputs: AttentionInputs, *, is_varlen: bool) -> None:
    """Everything given is a tensor, and nothing that is needed is missing. Comes first: the rest reads attributes."""
    needed = ("query", "key", "value", *(("cu_seqlens_q", "cu_seqlens_k") if is_varlen else ()))
    for name, tensor in zip(AttentionInputs._fields, inputs, strict=True):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in needed):
            raise DtypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor is not None and tensor.is_nested:
            raise ShapeError(
                f"{name} must not be a nested tensor; pass torch.cat({name}.unbind()) to attention_varlen."
            )


def check_tensors(inputs: AttentionInputs, *, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None) -> None:
    """Validate the tensors of one call against each other. Reads no tensor's values."""
    is_varlen = inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None
    _check_kinds(inputs, is_varlen)
    query, key, value = inputs.query, inputs.key, inputs.value
    if not is_varlen and not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ShapeError(f"query, key and value have different batch sizes.{_shapes(inputs)}")
    if key.shape[-3] != value.shape[-3]:
        raise ShapeError(f"value has {value.shape[-3]} tokens but key has {key.shape[-3]}.{_shapes(inputs)}")
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(f"value has {value.shape[-2]} heads but key has {key.shape[-2]}.{_shapes(inputs)}")
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"key has head_dim {key.shape[-1]} but query has head_dim {query.shape[-1]}.{_shapes(inputs)}")
    if min(query.shape[-1], value.shape[-1], query.shape[-2], key.shape[-2]) < 1:
        raise ShapeError(f"heads and head_dim must be at least 1.{_shapes(inputs)}")
    if query.shape[-2] % key.shape[-2] != 0:
        raise ShapeError(
            f"query has {query.shape[-2]} heads, which is not a multiple of key's {key.shape[-2]}.{_shapes(inputs)}"
            "\n  Each key head serves a whole group of query heads; if these are (batch, heads, seqlen, head_dim),"
            " pass x.transpose(1, 2)."
        )
    batch = query.shape[0]
    if is_varlen:
        batch = _check_cu_seqlens(inputs)
    seqlen_q = max_seqlen_q if is_varlen else query.shape[1]
    seqlen_k = max_seqlen_k if is_varlen else key.shape[1]
    _check_bias(inputs, (batch, query.shape[-2], seqlen_q, seqlen_k))
    _check_per_head(inputs, batch)


def check_cu_seqlens_values(inputs: AttentionInputs, max_seqlen_q: int | None, max_seqlen_k: int | None) -> None:
    """Validate the *values* of cu_seqlens; only for tensors whose values cost no synchronisation (CPU)."""
    for side in _packed_sides(inputs, max_seqlen_q, max_seqlen_k):
        name, starts, limit = side.name, side.cu_seqlens.tolist(), side.limit
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        longest = max(lengths, default=0)
        if starts[0] != 0 or min(lengths, default=0) < 0:
            raise ArgumentError(f"cu_seqlens_{name} must start at 0 and never decrease, got {_shorten(starts)}.")
        if starts[-1] > side.total:
            raise ArgumentError(
                f"cu_seqlens_{name} ends at {starts[-1]}, beyond the {side.total} tokens of the tensor."
            )
        if limit is not None and longest > limit:
            raise ArgumentError(f"max_seqlen_{name} is {limit}, but the longest sequence has {longest} tokens.")
        if side.bias_size is not None and side.bias_size < longest:
            assert inputs.bias is not None
            raise ShapeError(
                f"bias is too small for sequences of {longest} tokens in seqlen_{name}:"
                f" bias {tuple(inputs.bias.shape)}."
            )


def assert_cu_seqlens_values(inputs: AttentionInputs, max_seqlen_q: int | None, max_seqlen_k: int | None) -> None:
    """The same conditions where the values are, without a synchronisation. For debugging: it takes a few launches, and
    a condition that does not hold ends the device's context.

    The messages hold no numbers, because torch.compile keeps them as they are when it traces.
    """
    for side in _packed_sides(inputs, max_seqlen_q, max_seqlen_k):
        name, starts, stops = side.name, side.cu_seqlens[:-1], side.cu_seqlens[1:]
        conditions = [
            (side.cu_seqlens[0] == 0, f"cu_seqlens_{name} must start at 0"),
            # No difference: it could overflow.
            ((stops >= starts).all(), f"cu_seqlens_{name} must never decrease"),
            (side.cu_seqlens[-1] <= side.total, f"cu_seqlens_{name} ends beyond the tokens of the tensor"),
        ]
        if side.limit is not None:
            is_short = (stops - starts <= side.limit).all()
            conditions.append((is_short, f"max_seqlen_{name} is less than the longest sequence of cu_seqlens_{name}"))
        if side.bias_size is not None:
            fits = (stops - starts <= side.bias_size).all()
            conditions.append((fits, f"bias is too small for the longest sequence of cu_seqlens_{name}"))
        for condition, message in conditions:
            torch._assert_async(condition, f"tilestream: {message}.")


class _PackedSide(NamedTuple):
    """The queries or the keys of a packed call, as the checks of cu_seqlens see them."""

    name: str
    cu_seqlens: Tensor
    total: int
    limit: int | None
    bias_size: int | None  # None: there is no bias, or it is broadcast


def _packed_sides(
    inputs: AttentionInputs, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[_PackedSide, ...]:
    query, key, bias = inputs.query, inputs.key, inputs.bias
    assert inputs.cu_seqlens_q is not None
    assert inputs.cu_seqlens_k is not None
    size_q, size_k = (None if bias is None or bias.shape[axis] == 1 else bias.shape[axis] for axis in (2, 3))
    return (
        _PackedSide("q", inputs.cu_seqlens_q, query.shape[0], max_seqlen_q, size_q),
        _PackedSide("k", inputs.cu_seqlens_k, key.shape[0], max_seqlen_k, size_k),
    )


def crop_bias(bias: Tensor, sequences: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """What packed `sequences` (L,) of one pair of lengths read of a bias: (L | 1, heads | 1, M | 1, N | 1).

    Each sequence reads the top left corner of its own; broadcast dimensions stay 1. A view if nothing is picked.
    """
    bias = bias[sequences] if bias.shape[0] > 1 else bias
    bias = bias[:, :, :seqlen_q] if bias.shape[2] > 1 else bias
    return bias[..., :seqlen_k] if bias.shape[3] > 1 else bias


def _is_int(value: object) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int | float | torch.SymFloat | torch.SymInt) or isinstance(value, bool):
        raise DtypeError(f"{name} must be a Python number, got {type(value).__name__}; pass float({name}).")
    # A comparison, because torch.compile with symbolic numbers traces that and not math.isfinite.
    if not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        raise ArgumentError(f"{name} must be finite in float32, got {value}.")


def _check_kinds(inputs: AttentionInputs, is_varlen: bool) -> None:
    """Every tensor has an accepted rank, layout, dtype and device."""
    names = AttentionInputs._fields
    query, key, value = inputs.query, inputs.key, inputs.value
    rank = 3 if is_varlen else 4
    for name, tensor in zip(names, inputs, strict=True):
        if tensor is not None and tensor.layout != torch.strided:
            raise ShapeError(f"{name} must be a dense tensor, got layout {tensor.layout}; pass {name}.to_dense().")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != rank:
            raise ShapeError(f"{name} must have rank {rank}, got rank {tensor.dim()}.{_shapes(inputs)}")
    if query.dtype not in SUPPORTED_DTYPES:
        raise DtypeError(f"query must be float16, bfloat16, float32 or float64.{_dtypes(inputs)}")
    if not query.dtype == key.dtype == value.dtype:
        raise DtypeError(
            f"query, key and value must share one dtype.{_dtypes(inputs)}\n  Cast them, or use torch.autocast."
        )
    for name, tensor in zip(names, inputs, strict=True):
        if tensor is not None and tensor.device != query.device:
            raise DeviceError(f"{name} is on {tensor.device} but query is on {query.device}.{_shapes(inputs)}")


def _check_cu_seqlens(inputs: AttentionInputs) -> int:
    """Shapes and dtypes of cu_seqlens; returns the number of sequences."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise ArgumentError(f"cu_seqlens_q and cu_seqlens_k must be given together.{_shapes(inputs)}")
    for name, cu_seqlens in (("cu_seqlens_q", inputs.cu_seqlens_q), ("cu_seqlens_k", inputs.cu_seqlens_k)):
        if cu_seqlens.dtype != torch.int32:
            raise DtypeError(f"{name} must be int32, got {cu_seqlens.dtype}; pass {name}.to(torch.int32).")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ShapeError(
                f"{name} must be one-dimensional (batch + 1,), got {tuple(cu_seqlens.shape)}.{_shapes(inputs)}"
            )
    if inputs.cu_seqlens_q.shape != inputs.cu_seqlens_k.shape:
        raise ShapeError(
            f"cu_seqlens_q {tuple(inputs.cu_seqlens_q.shape)} and cu_seqlens_k {tuple(inputs.cu_seqlens_k.shape)}"
            f" describe different numbers of sequences.{_shapes(inputs)}"
        )
    return inputs.cu_seqlens_q.shape[0] - 1


def _check_bias(inputs: AttentionInputs, wanted: tuple[int | None, ...]) -> None:
    """The bias broadcasts to `wanted`, (batch, heads, seqlen_q, seqlen_k); None is a length that is not known."""
    bias = inputs.bias
    if bias is None:
        return
    if not bias.is_floating_point():
        raise DtypeError(
            f"bias must be floating point, got {bias.dtype}; it is added to the scores. From a boolean mask"
            " (True = attend) make torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)."
        )
    if bias.dim() != 4:
        raise ShapeError(f"bias must have rank 4 and broadcast to {wanted}, got {tuple(bias.shape)}.{_shapes(inputs)}")
    for axis, size in enumerate(wanted):
        given = bias.shape[axis]
        # A packed call reads the top left corner of each sequence's bias, so a larger bias is fine there.
        fits = size is None or given in (1, size) or (inputs.is_varlen and axis >= 2 and given >= size)
        if not fits:
            raise ShapeError(
                f"bias {tuple(bias.shape)} does not broadcast to (batch, heads, seqlen_q, seqlen_k) = {wanted}."
                f"{_shapes(inputs)}"
            )


def _check_per_head(inputs: AttentionInputs, batch: int) -> None:
    """alibi_slopes (heads,) or (batch, heads); sinks (heads,); seed of one element."""
    num_heads = inputs.query.shape[-2]
    slopes, sinks, seed = inputs.alibi_slopes, inputs.sinks, inputs.seed
    if slopes is not None:
        if tuple(slopes.shape) not in ((num_heads,), (batch, num_heads)):
            raise ShapeError(
                f"alibi_slopes must be ({num_heads},) or ({batch}, {num_heads}), got {tuple(slopes.shape)}."
                f"{_shapes(inputs)}"
            )
        if not slopes.is_floating_point():
            raise DtypeError(f"alibi_slopes must be floating point, got {slopes.dtype}.")
        if slopes.requires_grad and torch.is_grad_enabled():
            raise ArgumentError("alibi_slopes has no gradient; pass alibi_slopes.detach(), or learn a bias instead.")
    if sinks is not None:
        if tuple(sinks.shape) != (num_heads,):
            raise ShapeError(
                f"sinks must be ({num_heads},), one per query head, got {tuple(sinks.shape)}.{_shapes(inputs)}"
            )
        if not sinks.is_floating_point():
            raise DtypeError(f"sinks must be floating point, got {sinks.dtype}.")
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise DtypeError(f"seed must be an int or one int64 element, got {seed.dtype} {tuple(seed.shape)}.")


def _shapes(inputs: AttentionInputs) -> str:
    """The line that every shape error ends with. Made only when an error is: torch.compile cannot trace it."""
    tensors = {
        name: x.shape for name, x in zip(inputs._fields, inputs, strict=True) if x is not None and name != "seed"
    }
    is_varlen = inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None
    return describe_shapes(tensors, _VARLEN_AXES if is_varlen else _DENSE_AXES)


def _dtypes(inputs: AttentionInputs) -> str:
    return f" Got query {inputs.query.dtype}, key {inputs.key.dtype}, value {inputs.value.dtype}."


def _shorten(values: list[int], most: int = 8) -> str:
    listed = ", ".join(str(value) for value in values[:most])
    return f"[{listed}{', ...' if len(values) > most else ''}]"
