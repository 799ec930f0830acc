"""PyTorch's ``torch.nn.functional.scaled_dot_product_attention``, served by tilestream in two ways.

`tilestream_sdpa` is a scope: calls made inside it come here, whatever their shapes and masks. `register_sdpa` offers
the kernels to PyTorch's own registry of flash attention implementations, so that PyTorch keeps deciding which calls go
to them.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tilestream.api import attention
from tilestream.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError, describe_shapes
from tilestream.integrations._sdpa_kernels import KernelHandle, install_sdpa_kernels

__all__ = ["KernelHandle", "install_sdpa_kernels", "register_sdpa", "scaled_dot_product_attention", "tilestream_sdpa"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class tilestream_sdpa(TorchFunctionMode):
    """Inside ``with tilestream_sdpa():`` every call of PyTorch's scaled_dot_product_attention is served by tilestream.

    That includes the calls of ``torch.nn.MultiheadAttention`` and the transformer layers built on it. The scope belongs
    to the thread, nests, ends with the block, and holds inside functions compiled by torch.compile.

    Args:
        strict: by default a call that tilestream cannot take (nested tensors, integers, float8) raises
            UnsupportedError; False hands such calls to PyTorch instead.
        backend: name of a tilestream backend; None chooses.

    Example:
        >>> import torch
        >>> from tilestream.integrations.sdpa import tilestream_sdpa
        >>> query = torch.randn(2, 4, 128, 32)
        >>> with tilestream_sdpa():
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        >>> out.shape
        torch.Size([2, 4, 128, 32])
    """

    def __init__(self, *, strict: bool = True, backend: str | None = None) -> None:
        super().__init__()
        self.strict = strict
        self.backend = backend

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            # PyTorch suspends the mode while a Python function such as this one runs, so a copy of it calls us by name.
            func = _with_globals(func, {"scaled_dot_product_attention": self._attention})
        return func(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return scaled_dot_product_attention(*args, **kwargs, backend=self.backend)
        except UnsupportedError:
            if self.strict:
                raise
            return functional.scaled_dot_product_attention(*args, **kwargs)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """PyTorch's function of this name: same arguments, same layout, same meaning.

    Args:
        query: (..., heads, seqlen_q, head_dim) with any number of leading dimensions, (seqlen_q, head_dim) included.
        key, value: (..., heads, seqlen_k, head_dim), (..., heads, seqlen_k, head_dim_v); leading dimensions of 1
            broadcast. With `enable_gqa` the heads need only divide query's.
        attn_mask: broadcastable to (..., heads, seqlen_q, seqlen_k); bool (True = attend), or float32 or query's
            dtype (added to the scores; differentiable).
        dropout_p: always applied, as in PyTorch: pass 0.0 in evaluation.
        is_causal: query i sees the keys 0..i, also where the lengths differ (aligned at the beginning).
        scale: 1 / sqrt(head_dim) by default.
        backend: name of a tilestream backend; None chooses.

    Returns:
        (..., heads, seqlen_q, head_dim_v). A query that sees no key gives 0, never NaN.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: where PyTorch raises RuntimeError; all are ValueErrors.
        UnsupportedError: nested tensors, and dtypes that are not float16, bfloat16, float32 or float64.
    """
    _check(query, key, value, attn_mask, is_causal)
    given = {"query": query, "key": key, "value": value}
    is_matrix = query.dim() == 2 == key.dim() == value.dim()
    query, key, value = (tensor.unsqueeze(0) if tensor.dim() == 2 else tensor for tensor in (query, key, value))
    heads_q, heads_k, heads_v = query.shape[-3], key.shape[-3], value.shape[-3]
    heads = max(heads_q, heads_k, heads_v)
    divides = heads_k > 0 and heads_v > 0 and heads_q % heads_k == 0 and heads_q % heads_v == 0
    if not (divides if enable_gqa else {heads_q, heads_k, heads_v} <= {1, heads}):
        rule = "divide query's with enable_gqa" if enable_gqa else "equal query's; pass enable_gqa=True for fewer"
        raise ShapeError(f"the heads of key and value must {rule}.{_shapes(given)}")
    try:
        leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        raise ShapeError(f"the leading dimensions do not broadcast.{_shapes(given)}") from None
    if heads_q < heads:
        query = query.expand(*query.shape[:-3], heads, -1, -1)
    if heads_k != heads_v:
        heads_kv = max(heads_k, heads_v)
        key, value = (tensor.repeat_interleave(heads_kv // tensor.shape[-3], -3) for tensor in (key, value))
    bias = None
    if attn_mask is not None:
        wanted = (*leading, heads, query.shape[-2], key.shape[-2])
        bias = _bias(attn_mask, query.dtype, wanted)
    out = attention(
        _to_layout(query, leading),
        _to_layout(key, leading),
        _to_layout(value, leading),
        bias=bias,
        causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        shift=0,
        backend=backend,
    )
    out = out.transpose(1, 2).unflatten(0, leading) if leading else out.transpose(1, 2).squeeze(0)
    return out.squeeze(0) if is_matrix else out


def register_sdpa(name: str = "tilestream") -> str:
    """Offer tilestream to ``torch.nn.attention.activate_flash_attention_impl(name)``. Activates nothing.

    Once activated, PyTorch runs tilestream wherever it would have run its own flash attention, forward and backward;
    ``torch.nn.attention.restore_flash_attention_impl()`` ends that. Calls that PyTorch sends to other kernels are not
    touched: on a GPU choose with ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)``.

    Args:
        name: the name in PyTorch's registry; registering it again is harmless.

    Returns:
        `name`.

    Raises:
        ImportError: this torch has no such registry; `install_sdpa_kernels` works without one.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            f"torch {torch.__version__} has no register_flash_attention_impl; install_sdpa_kernels() works without."
        ) from error
    register_flash_attention_impl(name, register_fn=install_sdpa_kernels)
    return name


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
    tensors = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        tensors["attn_mask"] = attn_mask
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise UnsupportedError(f"{name} is nested or sparse; tilestream takes attention_varlen's packed tensors.")
    if query.dtype not in _FLOATS:
        raise UnsupportedError(f"query must be float16, bfloat16, float32 or float64, got {query.dtype}.")
    if min(tensor.dim() for tensor in tensors.values()) < 2:
        raise ShapeError(f"query, key, value and attn_mask must have at least two dimensions.{_shapes(tensors)}")
    if attn_mask is None:
        return
    if is_causal:
        raise ArgumentError("attn_mask and is_causal exclude each other; put the causal part into the mask.")
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise DtypeError(f"attn_mask must be bool, float32 or {query.dtype}, got {attn_mask.dtype}.{_shapes(tensors)}")


def _bias(attn_mask: Tensor, dtype: torch.dtype, wanted: tuple[int, ...]) -> Tensor:
    """Additive (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1), with no more than the batch expanded."""
    shape = (1,) * (len(wanted) - attn_mask.dim()) + tuple(attn_mask.shape)
    fits = len(shape) == len(wanted) and all(size in (1, want) for size, want in zip(shape, wanted, strict=True))
    if not fits:
        raise ShapeError(f"attn_mask {tuple(attn_mask.shape)} does not broadcast to {wanted}.")
    if attn_mask.dtype == torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=dtype, device=attn_mask.device)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    attn_mask = attn_mask.reshape(shape)
    if any(size != 1 for size in shape[:-3]):
        attn_mask = attn_mask.expand(*wanted[:-3], *shape[-3:])
    return attn_mask.reshape(-1, *shape[-3:]) if len(shape) > 3 else attn_mask.unsqueeze(0)


def _shapes(tensors: dict[str, Tensor]) -> str:
    """For messages; made only once there is something to say, because the compiler does not follow it."""
    return describe_shapes({name: tensor.shape for name, tensor in tensors.items()}, "..., heads, seqlen, head_dim")


def _to_layout(tensor: Tensor, leading: torch.Size) -> Tensor:
    """(..., heads, seqlen, width) to (batch, seqlen, heads, width), as a view where the strides allow it."""
    tensor = tensor.expand(*leading, -1, -1, -1)
    tensor = tensor.flatten(0, -4) if leading else tensor.unsqueeze(0)
    return tensor.transpose(1, 2)


def _with_globals(function: Any, changes: dict[str, Any]) -> Any:
    """A copy of a Python function that sees other global names; the original stays as it is."""
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **changes}, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
