"""The public attention functions: normalise the arguments, validate once, call the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream import ops
from tilestream.block_mask import BlockMask
from tilestream.errors import ArgumentError, DtypeError
from tilestream.problem import (
    IS_DEBUGGING,
    AttentionInputs,
    assert_cu_seqlens_values,
    check_arguments,
    check_cu_seqlens_values,
    check_tensors,
    check_types,
)
from tilestream.spec import band_limits, default_scale
from tilestream.state import AttentionOutput

__all__ = ["attention", "attention_varlen", "attention_varlen_with_lse", "attention_with_lse"]

Window = tuple[int | None, int | None] | None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    shift: int | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Exact softmax attention without storing the score matrix.

    ``out[i] = sum_j softmax_j(s[i, j]) value[j]``, with the scores in this order (it is part of the semantics)::

        s = scale * dot(query[i], key[j])
        s = softcap * tanh(s / softcap)                    if softcap > 0
        s = s + bias[i, j] - slope * |j - (i + shift)|     if given
        s = -inf                                           where causal or window hide key j from query i

    Args:
        query: (batch, seqlen_q, num_heads_q, head_dim); float16, bfloat16, float32 or float64, any strides.
        key: (batch, seqlen_k, num_heads_kv, head_dim). Query head h reads KV head ``h // (num_heads_q //
            num_heads_kv)``; num_heads_q must be a multiple of num_heads_kv (GQA, MQA), nothing is expanded.
        value: (batch, seqlen_k, num_heads_kv, head_dim_v); head_dim_v may differ from head_dim.
        causal: hide keys after the query. With seqlen_q != seqlen_k the last query meets the last key.
        window: (left, right) keys visible on each side of the query, inclusive; None = no limit. (0, 0) is the
            diagonal alone.
        scale: factor on the dot product; ``1 / sqrt(head_dim)`` by default.
        softcap: cap on the absolute score; 0 = off.
        bias: added to the scores; any float dtype, broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k);
            may hold -inf. Differentiable.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q), penalty per key of distance. Not differentiable.
        sinks: (num_heads_q,), one more logit per head that takes probability but carries no value; neither scaled
            nor capped. Differentiable.
        dropout_p: probability in [0, 1) of dropping an attention weight; survivors are divided by 1 - dropout_p.
        seed: of the dropout mask: an int, or one int64 element on query's device. By default it is drawn from
            torch's generator. The mask is a function of (seed, batch, head, i, j), the same on every backend.
        shift: key j stands at distance ``j - (i + shift)`` from query i; ``seqlen_k - seqlen_q`` by default, which
            aligns the ends. 0 aligns the beginnings.
        deterministic: gradients equal bit for bit from run to run, with O(seqlen) memory. Implied by
            ``torch.use_deterministic_algorithms(True)``. The forward is always deterministic.
        backend: name of a backend, which then never falls back; None lets `tilestream.explain` decide.

    Returns:
        (batch, seqlen_q, num_heads_q, head_dim_v), contiguous, dtype of `query` (under autocast: the autocast dtype).
        A query that sees no key gives 0 and sends no gradient. Whatever an invisible key holds is never read into
        a result, NaN included.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument does not fit; the message names it and shows
            all shapes. All are ValueErrors.
        UnsupportedError: the named backend cannot run this call; the message says which can.

    Cost: reads query and writes out once, reads key and value once per tile of queries; O(seqlen_q) extra memory.
    Source: arXiv:2205.14135, arXiv:2307.08691.

    Example:
        >>> import torch, tilestream
        >>> query = torch.randn(2, 128, 8, 64)
        >>> key, value = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
        >>> tilestream.attention(query, key, value, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    options = Options(causal, window, scale, softcap, dropout_p, seed, deterministic, backend, shift)
    return attend(AttentionInputs(query, key, value, bias, alibi_slopes, sinks), options, check_dense).out


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    shift: int | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> AttentionOutput:
    """`attention`, and the log-sum-exp of each row's scores; both are differentiable.

    Args:
        query, key, value, ...: as `attention`.

    Returns:
        AttentionOutput(out, lse): ``lse`` (batch, num_heads_q, seqlen_q), natural logarithm, float32 (float64 for
        float64 inputs), sink included, before dropout; -inf for a query that sees no key. `merge` takes such pairs.

    Raises: as `attention`.
    Cost: as `attention`. Source: arXiv:2205.14135.

    Example:
        >>> import torch, tilestream
        >>> query, key, value = (torch.randn(1, 16, 4, 32) for _ in range(3))
        >>> tilestream.attention_with_lse(query, key, value).lse.shape
        torch.Size([1, 4, 16])
    """
    options = Options(causal, window, scale, softcap, dropout_p, seed, deterministic, backend, shift)
    return attend(AttentionInputs(query, key, value, bias, alibi_slopes, sinks), options, check_dense)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """`attention` over sequences of different lengths, packed one after the other without padding.

    Sequence b holds the queries ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and the keys ``cu_seqlens_k[b] :
    cu_seqlens_k[b + 1]``, and sees nothing else. Causal and windows align the ends of each sequence.

    Args:
        query: (total_q, num_heads_q, head_dim).
        key: (total_k, num_heads_kv, head_dim).
        value: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (num_sequences + 1,) int32 on query's device, starting at 0, never decreasing;
            empty sequences are fine. Tokens past the last entry belong to no sequence: they give out 0, lse -inf
            and no gradient. On a CPU the values are checked; elsewhere they are trusted, to avoid a synchronisation,
            unless the variable TILESTREAM_DEBUG is 1 when tilestream is imported: then the device checks them, and
            a wrong one ends the process's use of that device with a message that names the argument.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, which spare GPU backends some empty work.
        bias: broadcastable to (num_sequences, num_heads_q, max_seqlen_q, max_seqlen_k); sequence b reads the top
            left corner of its own.
        alibi_slopes: (num_heads_q,) or (num_sequences, num_heads_q).
        causal, window, scale, softcap, sinks, dropout_p, seed, deterministic, backend: as `attention`.

    Returns:
        (total_q, num_heads_q, head_dim_v), contiguous, dtype of `query`.

    Raises: as `attention`.
    Cost: as one `attention` call per sequence. Source: arXiv:2307.08691.

    Example:
        >>> import torch, tilestream
        >>> packed = torch.randn(7, 2, 16)  # sequences of 3 and 4 tokens
        >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> tilestream.attention_varlen(packed, packed, packed, cu_seqlens, cu_seqlens, causal=True).shape
        torch.Size([7, 2, 16])
    """
    options = Options(
        causal, window, scale, softcap, dropout_p, seed, deterministic, backend, None, max_seqlen_q, max_seqlen_k
    )
    inputs = AttentionInputs(query, key, value, bias, alibi_slopes, sinks, None, cu_seqlens_q, cu_seqlens_k)
    return attend(inputs, options, check_varlen).out


def attention_varlen_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> AttentionOutput:
    """`attention_varlen`, and the log-sum-exp of each row's scores; both are differentiable.

    Args:
        query, key, value, cu_seqlens_q, cu_seqlens_k, ...: as `attention_varlen`.

    Returns:
        AttentionOutput(out, lse): ``lse`` (num_heads_q, total_q), otherwise as `attention_with_lse`.

    Raises: as `attention`.
    Cost: as `attention_varlen`. Source: arXiv:2307.08691.

    Example:
        >>> import torch, tilestream
        >>> packed = torch.randn(7, 2, 16)
        >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> tilestream.attention_varlen_with_lse(packed, packed, packed, cu_seqlens, cu_seqlens).lse.shape
        torch.Size([2, 7])
    """
    options = Options(
        causal, window, scale, softcap, dropout_p, seed, deterministic, backend, None, max_seqlen_q, max_seqlen_k
    )
    inputs = AttentionInputs(query, key, value, bias, alibi_slopes, sinks, None, cu_seqlens_q, cu_seqlens_k)
    return attend(inputs, options, check_varlen)


class Options(NamedTuple):
    """Every argument that is not among the inputs; `block_mask` is no argument of the functions here."""

    causal: bool
    window: Window
    scale: float | None
    softcap: float
    dropout_p: float
    seed: int | Tensor | None
    deterministic: bool
    backend: str | None
    shift: int | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    block_mask: BlockMask | None = None


# Calls that have passed every check: checking one again takes longer than attention over a few tokens.
_KNOWN: dict[tuple[Any, ...], ops.Known] = {}
_MAX_KNOWN = 1024


def attend(
    inputs: AttentionInputs, options: Options, check: Callable[[AttentionInputs, Options], AttentionInputs]
) -> AttentionOutput:
    """Validate a call by `check` and run it; what has passed once is not checked again."""
    try:
        signature = _signature(inputs, options)
        known = None if signature is None else _KNOWN.get((check, signature))
    except (TypeError, RuntimeError):  # a list somewhere, or a nested tensor: the checks will say
        signature = known = None
    if known is not None:
        return ops.apply_known(inputs, known)
    inputs = check(inputs, options)
    numbers = _numbers(inputs, options)
    output = ops.apply(_draw_seed(inputs, options), numbers)
    if signature is not None:
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[check, signature] = ops.know(inputs, numbers)
    return output


def _signature(inputs: AttentionInputs, options: Options) -> tuple[Any, ...] | None:
    """All that the checks and the backends look at; None for a call that must be looked at every time."""
    query, slopes = inputs.query, inputs.alibi_slopes
    # Not `_has_autocast`: the name of a device takes 0.7 us.
    if query is None or not ops.is_eager(inputs) or torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu"):
        return None
    # A seed is a tensor to be made, and the values of cu_seqlens are to be read where that is free or asked for.
    if options.seed is not None or type(options.dropout_p) not in (int, float) or options.dropout_p != 0:
        return None
    if inputs.cu_seqlens_q is not None and (IS_DEBUGGING or not query.is_cuda):
        return None
    # Masks are not kept alive by what is remembered of calls.
    if options.block_mask is not None or (slopes is not None and slopes.requires_grad):
        return None
    window = options.window
    return (
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in inputs],
        torch.are_deterministic_algorithms_enabled(),
        options,
        # Types too, because 1 equals True and 0 equals 0.0, and the checks tell them apart.
        *map(type, options),
        *(map(type, window) if isinstance(window, tuple) else ()),
    )


def check_dense(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    """The inputs of a dense call, ready for the operator."""
    check_types(inputs, is_varlen=False)
    inputs = _prepare(inputs, options)
    check_tensors(inputs)
    return inputs


def check_varlen(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    """The inputs of a packed call, ready for the operator."""
    check_types(inputs, is_varlen=True)
    inputs = _prepare(inputs, options)
    limits = options.max_seqlen_q, options.max_seqlen_k
    check_tensors(inputs, max_seqlen_q=limits[0], max_seqlen_k=limits[1])
    if _values_are_readable(inputs.cu_seqlens_q) and _values_are_readable(inputs.cu_seqlens_k):
        check_cu_seqlens_values(inputs, *limits)
    elif IS_DEBUGGING:
        assert_cu_seqlens_values(inputs, *limits)
    return inputs


def _prepare(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    """Check the plain arguments, apply autocast, and turn a given seed into a tensor."""
    check_arguments(
        causal=options.causal,
        deterministic=options.deterministic,
        backend=options.backend,
        window=options.window,
        scale=options.scale,
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        shift=options.shift,
        max_seqlen_q=options.max_seqlen_q,
        max_seqlen_k=options.max_seqlen_k,
    )
    inputs = _autocast(inputs)
    if options.seed is not None:
        seed = _seed_tensor(options.seed, inputs.query.device)
        if options.dropout_p > 0:
            inputs = inputs._replace(seed=seed)
    return inputs


def _draw_seed(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    """A seed from torch's generator where dropout needs one; last, so that a refused call draws nothing."""
    if options.dropout_p == 0 or inputs.seed is not None:
        return inputs
    return inputs._replace(seed=torch.randint(2**62, (1,), dtype=torch.int64, device=inputs.query.device))


def _autocast(inputs: AttentionInputs) -> AttentionInputs:
    """Inside torch.autocast, query, key and value take the autocast dtype, as in PyTorch's own attention."""
    if not _has_autocast(inputs.query):
        return inputs
    dtype = torch.get_autocast_dtype(inputs.query.device.type)
    query, key, value = (
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in inputs[:3]
    )
    return inputs._replace(query=query, key=key, value=value)


def _has_autocast(query: Tensor) -> bool:
    device_type = query.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor):
        return seed
    if not isinstance(seed, int | torch.SymInt) or isinstance(seed, bool):
        raise DtypeError(f"seed must be an int or one int64 element, got {type(seed).__name__}.")
    if not isinstance(seed, torch.SymInt) and not -(2**63) <= seed < 2**63:
        raise ArgumentError(f"seed must fit 64 bits, got {seed}.")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def _numbers(inputs: AttentionInputs, options: Options) -> ops.Numbers:
    left, right = band_limits(options.causal, options.window)
    shift = options.shift
    if shift is None and not inputs.is_varlen:
        shift = inputs.key.shape[1] - inputs.query.shape[1]
    return ops.Numbers(
        left=left,
        right=right,
        shift=shift,
        max_seqlen_q=options.max_seqlen_q,
        max_seqlen_k=options.max_seqlen_k,
        scale=default_scale(inputs.query.shape[-1]) if options.scale is None else float(options.scale),
        softcap=float(options.softcap),
        dropout_p=float(options.dropout_p),
        deterministic=options.deterministic or torch.are_deterministic_algorithms_enabled(),
        backend=options.backend,
        block_mask=None if options.block_mask is None else options.block_mask.handle,
    )


def _values_are_readable(tensor: Tensor | None) -> bool:
    """Whether reading the values is free: a plain CPU tensor, outside tracing."""
    return (
        tensor is not None
        and type(tensor) in ops.PLAIN_TYPES
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )
