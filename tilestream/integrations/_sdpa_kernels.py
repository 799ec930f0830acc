"""PyTorch's internal flash attention operators, implemented by tilestream.

PyTorch's own implementations are replaced under one dispatch key at a time. The dense operators take (batch, heads,
seqlen, head_dim) and align causal masks at the beginning; ``_flash_attention_*`` take (batch, seqlen, heads, head_dim)
or packed (tokens, heads, head_dim) and align them at the end. The signatures are those of torch 2.11 to 2.13; arguments
that only one of them has arrive in ``**options``.

Status: the operators named ``_for_cpu`` are tested where they run, on a CPU. The others are tested against their
schemas by running them under the CPU's dispatch key.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.api import attention_varlen_with_lse, attention_with_lse
from tilestream.errors import UnsupportedError
from tilestream.spec import default_scale

__all__ = ["CPU_KERNELS", "CUDA_KERNELS", "KernelHandle", "install_kernels", "install_sdpa_kernels"]


class KernelHandle:
    """Keeps replaced kernels in force; `remove` brings PyTorch's own back."""

    def __init__(self, libraries: list[torch.library.Library]) -> None:
        self._libraries = libraries

    def remove(self) -> None:
        """Restore PyTorch's kernels; doing it twice is harmless."""
        for library in self._libraries:
            library._destroy()
        self._libraries = []


def install_sdpa_kernels(devices: Sequence[str] = ("CPU", "CUDA")) -> KernelHandle:
    """Replace PyTorch's flash attention kernels, without its registry.

    Args:
        devices: dispatch keys, "CPU" and "CUDA".

    Returns:
        The handle that undoes it.

    Raises:
        ValueError: for another dispatch key.
    """
    tables = {"CPU": CPU_KERNELS, "CUDA": CUDA_KERNELS}
    unknown = [device for device in devices if device not in tables]
    if unknown:
        raise ValueError(f"devices must be among {list(tables)}, got {unknown}.")
    return KernelHandle([install_kernels(tables[device], device) for device in devices])


def install_kernels(kernels: dict[str, Callable[..., Any]], dispatch_key: str) -> torch.library.Library:
    """Put aten operators, by name, under one dispatch key; they stay as long as the library lives."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    try:
        with warnings.catch_warnings():
            # Replacing kernels is the point; torch warns of it once in a process.
            warnings.filterwarnings("ignore", message=".*other operators may also be overridden")
            for name, kernel in kernels.items():
                library.impl(name, kernel, dispatch_key)
    except BaseException:
        library._destroy()
        raise
    return library


# ---- dense operators: (batch, heads, seqlen, head_dim), top-left causal


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = _dense_forward(query, key, value, dropout_p, is_causal, scale, _mask_bias(attn_mask, query), None)
    # The operator's fake kernel promises a transposed log-sum-exp.
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(dropout_p, None, scale, _band(is_causal))
    bias = _mask_bias(attn_mask, query)
    dq, dk, dv = _swap(*_backward(_swap(grad_out, query, key, value, out), logsumexp, call, bias=bias, shift=0))
    return dq, dk, dv


def _cuda_dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse(return_debug_mask=return_debug_mask)
    rng_state = _rng_state(dropout_p, query.device)
    out, lse = _dense_forward(query, key, value, dropout_p, is_causal, scale, None, rng_state)
    unused, debug_mask = _fillers(query)
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state, unused, debug_mask


def _cuda_dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k)
    call = _Call(dropout_p, philox_seed, scale, _band(is_causal))
    dq, dk, dv = _swap(*_backward(_swap(grad_out, query, key, value, out), logsumexp, call, shift=0))
    return dq, dk, dv


def _dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    bias: Tensor | None,
    rng_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v = _swap(query, key, value)
    seed = _seed(rng_state) if dropout_p > 0 else None
    out, lse = attention_with_lse(
        q, k, v, causal=is_causal, scale=scale, bias=bias, dropout_p=dropout_p, seed=seed, shift=0
    )
    out = out.transpose(1, 2)
    # The operator's fake kernel promises query's own strides, and compiled code relies on them.
    promised = torch.empty_like(query, device="meta").stride()
    if out.stride() != promised:
        out = torch.empty_like(query).copy_(out)
    return out, lse


# ---- (batch, seqlen, heads, head_dim) or packed, bottom-right causal


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,  # how to cut the work, which is the backend's affair
    **options: Any,
) -> tuple[Any, ...]:
    _refuse(return_debug_mask=return_debug_mask, **options)
    rng_state = _rng_state(dropout_p, query.device)
    common: dict[str, Any] = {
        "window": _band(is_causal, window_size_left, window_size_right),
        "scale": scale,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        "seed": _seed(rng_state) if dropout_p > 0 else None,
    }
    if cum_seq_q is None:
        out, lse = attention_with_lse(query, key, value, **common)
    elif cum_seq_k is None:
        raise UnsupportedError("packed queries need cum_seq_k; paged keys are not taken by these kernels.")
    else:
        out, lse = attention_varlen_with_lse(
            query, key, value, cum_seq_q, cum_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k, **common
        )
    return (out, lse, rng_state, *_fillers(query))


def _flash_forward_inplace(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> Tensor:
    computed, lse, *_ = _flash_forward(query, key, value, *arguments, **options)
    out.copy_(computed)
    return lse  # type: ignore[no-any-return]


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(**options)
    call = _Call(dropout_p, rng_state, scale, _band(is_causal, window_size_left, window_size_right))
    tensors = (grad_out, query, key, value, out)
    if cum_seq_q is None:
        return _backward(tensors, logsumexp, call, shift=key.shape[1] - query.shape[1])
    lengths = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return _backward(tensors, logsumexp, call, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, **lengths)


# ---- shared


class _Call(NamedTuple):
    """What a backward needs to know of its forward."""

    dropout_p: float
    rng_state: Tensor | None
    scale: float | None
    window: tuple[int | None, int | None]


def _backward(tensors: tuple[Tensor, ...], lse: Tensor, call: _Call, **rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from `tensors` (dout, query, key, value, out); all in tilestream's layout."""
    dout, query, key, value, out = tensors
    arguments: dict[str, Any] = dict.fromkeys(
        ("dlse", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "shift", "max_seqlen_q"), None
    )
    arguments |= {"max_seqlen_k": None, "softcap": 0.0, "backend": None, "block_mask": None}
    arguments |= {"needs_dbias": False, "needs_dsinks": False}
    arguments |= {"left": call.window[0], "right": call.window[1], "dropout_p": call.dropout_p}
    arguments["scale"] = default_scale(query.shape[-1]) if call.scale is None else call.scale
    arguments["seed"] = _seed(call.rng_state) if call.dropout_p > 0 else None
    arguments |= {"deterministic": torch.are_deterministic_algorithms_enabled(), **rest}
    dq, dk, dv, *_ = torch.ops.tilestream.attention_backward(
        dout=dout, query=query, key=key, value=value, out=out, lse=lse, **arguments
    )
    return dq, dk, dv


def _swap(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(batch, heads, seqlen, width) to (batch, seqlen, heads, width) or back, as views."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _band(is_causal: bool, left: int | None = None, right: int | None = None) -> tuple[int | None, int | None]:
    """PyTorch writes "no limit" as None or as a negative number."""
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return (left, 0) if is_causal else (left, right)


def _mask_bias(attn_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A bool or additive mask of rank 2 or 4 as an additive one of rank 4."""
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    return attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))


def _rng_state(dropout_p: float, device: torch.device) -> Tensor:
    """(seed, 0) as uint64, the shape in which PyTorch carries random state to the backward."""
    state = torch.zeros(2, dtype=torch.int64, device=device)
    if dropout_p > 0:
        state[:1] = torch.randint(2**62, (1,), dtype=torch.int64, device=device)
    return state.view(torch.uint64)


def _seed(rng_state: Tensor | None) -> Tensor | None:
    return None if rng_state is None else rng_state.view(torch.int64)[:1]


def _fillers(query: Tensor) -> tuple[Tensor, Tensor]:
    """The results `unused` and `debug_attn_mask`."""
    return torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _refuse(**arguments: Any) -> None:
    given = sorted(name for name, value in arguments.items() if value is not None and value is not False)
    if given:
        raise UnsupportedError(f"tilestream's flash attention kernels do not take {', '.join(given)}.")


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
CUDA_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _cuda_dense_forward,
    "_scaled_dot_product_flash_attention_backward": _cuda_dense_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
}
# New in torch 2.13.
if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
    CUDA_KERNELS["_flash_attention_forward_no_dropout_inplace"] = _flash_forward_inplace
