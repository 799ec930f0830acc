"""Hugging Face transformers: ``attn_implementation="tilestream"``.

Two functions are registered, because transformers asks for them separately: the mask function learns what the mask
*means* (causal, window, padding, documents) and hands it on as a `BandMask`; the attention function turns that into
bands, packed sequences or, as a last resort, an additive bias. The mask that a model builds is the truth here, as it is
in eager attention; ``is_causal`` and ``sliding_window`` arguments count only where a model builds no mask at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilestream.api import attention, attention_varlen
from tilestream.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError, describe_shapes
from tilestream.integrations._band_mask import BandMask, BandRule, Packing
from tilestream.integrations._mask_reader import read_mask_function

__all__ = ["attention_forward", "attention_mask", "register"]

# transformers gives these parts of a name a meaning of their own: it would load another kernel, from the network even.
_HIJACKED = ("flash", "sdpa", "flex_attention", "/", "|")
# Arguments of single models that select keys; to ignore them would be a silent change of the result.
_SELECTING = ("indices", "block_indices", "topk_indices", "head_mask", "cache", "block_tables")


def register(name: str = "tilestream") -> str:
    """Make ``attn_implementation=name`` known to transformers, for every model that takes the attention interface.

    Registering twice is harmless. Nothing else in transformers changes, and models loaded before can be switched with
    ``model.set_attn_implementation(name)``.

    Args:
        name: the name to select this implementation by.

    Returns:
        `name`, so that ``from_pretrained(path, attn_implementation=register())`` reads well.

    Raises:
        ImportError: transformers is missing, or older than its mask interface with ``q_offset`` (5.x).
        ArgumentError: transformers gives `name` another meaning, or something else is registered under it.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(f"transformers 5 is needed for this: pip install 'transformers>=5' ({error})") from error
    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("this transformers is too old: its mask functions take no q_offset. Install transformers>=5.")
    taken = [part for part in _HIJACKED if part in name]
    if not name or taken:
        raise ArgumentError(f"transformers gives a name with {taken or 'nothing'} in it another meaning; got {name!r}.")
    for interface, function in ((AttentionInterface, attention_forward), (AttentionMaskInterface, attention_mask)):
        known = interface().get(name)
        if known not in (None, function) or name == "eager":
            raise ArgumentError(f"{name!r} already names another attention implementation; choose another name.")
        interface.register(name, function)
    return name


def attention_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | BandRule:
    """The mask function: describe a mask by its rule where possible, by its entries otherwise.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        q_offset, kv_offset: positions of the first query and of the first key.
        mask_function: what transformers combined for the layer; causal by default.
        attention_mask: (batch, seen tokens), true at real tokens; None = no padding.
        device: where the mask is needed.
        kwargs: passed on to transformers, where the entries are needed.

    Returns:
        A `BandMask` (its bare `BandRule` while compiling), or the bool (batch, 1, q_length, kv_length) tensor itself,
        True = attend, where the rule is more than a band, padding and documents.
    """
    # Not `from transformers import masking_utils`: torch.compile of torch 2.11 cannot trace a lazy module.
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if mask_function is None:
        mask_function = causal_mask_function
    pattern, offset = None, 0
    # A tensor offset (static caches) is worth a synchronisation for a prompt, not for every generated token.
    if not isinstance(q_offset, Tensor) or (q_length > 1 and not torch.compiler.is_compiling()):
        offset = int(q_offset)
        pattern = read_mask_function(mask_function) if _may_read(kwargs) else None
    if pattern is not None and pattern.documents is not None:
        is_grid = offset == 0 and kv_offset == 0 and q_length == kv_length
        if not is_grid or tuple(pattern.documents.shape) != (batch_size, q_length):
            pattern = None
    if pattern is None:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        entries: Tensor = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
        )  # fmt: skip
        return entries
    rule = BandRule(
        (batch_size, 1, q_length, kv_length),
        pattern.left,
        pattern.right,
        offset - kv_offset,
        documents=pattern.documents,
        may_be_packed=attention_mask is None and offset == 0,
    )
    rule.key_mask = _key_mask(attention_mask, kv_offset, rule.reach)
    # The compiler follows plain objects with ease and tensor subclasses with methods not at all.
    return rule if torch.compiler.is_compiling() else BandMask(rule, torch.device(device))


def _may_read(kwargs: dict[str, Any]) -> bool:
    """Whether the mask function can be read here: always, except for table look-ups while compiling."""
    if not torch.compiler.is_compiling():
        return True
    is_plain = kwargs.get("allow_is_causal_skip") or kwargs.get("allow_is_bidirectional_skip")
    is_chunked = getattr(kwargs.get("config"), "attention_chunk_size", None) is not None
    return bool(is_plain) and not is_chunked


def _key_mask(padding: Tensor | None, kv_offset: int, reach: int) -> Tensor | None:
    """(batch, reach), the part of a (batch, seen tokens) padding mask for the keys in reach; None = no padding.

    Keys beyond the padding mask are hidden, as transformers has it.
    """
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + reach].to(torch.bool)
    padding = torch.nn.functional.pad(padding, (0, reach - padding.shape[1]))
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BandRule | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the interface.

    Args:
        module: the attention layer; its ``training`` and ``is_causal`` are read.
        query: (batch, num_heads_q, seqlen_q, head_dim).
        key, value: (batch, num_heads_kv, seqlen_k, head_dim), (batch, num_heads_kv, seqlen_k, head_dim_v); GQA heads
            are not expanded.
        attention_mask: what the mask function returned; or a 4-D mask of the caller, bool (True = attend) or
            floating point (added to the scores); or None.
        dropout: probability, in training only. Drawn from torch's generator.
        scaling, softcap: of the scores. s_aux: (num_heads_q,) sinks.
        is_causal, sliding_window: count only where `attention_mask` is None.
        position_bias: (1 or batch, num_heads_q, seqlen_q, seqlen_k), added to the scores; differentiable.
        position_ids: restarting positions are documents, where the model's mask left that open.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences over the flattened batch.
        kwargs: ignored, unless they are known to select keys.

    Returns:
        ((batch, seqlen_q, num_heads_q, head_dim_v), None). Queries at padding may give 0.

    Raises:
        UnsupportedError, ArgumentError, DtypeError, ShapeError: nothing that shapes the result is ignored.
    """
    _refuse_unknown(kwargs)
    common: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "dropout_p": float(dropout) if module.training else 0.0,
    }
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(attention_mask, BandMask):
        attention_mask = attention_mask.rule
    elif attention_mask is None:
        attention_mask = _implied_rule(query, key, bool(causal), sliding_window)
    _check_mask(attention_mask, query, key)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ArgumentError("cu_seq_lens_q and cu_seq_lens_k must be given together.")
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if isinstance(attention_mask, BandRule) and attention_mask.key_mask is None and position_bias is None:
            packs = (
                Packing(None, cu_seq_lens_q.to(torch.int32), _as_int(max_length_q)),
                Packing(None, cu_seq_lens_k.to(torch.int32), _as_int(max_length_k)),
            )
            return _packed(query, key, value, attention_mask, packs, common), None
        if isinstance(attention_mask, BandRule):
            attention_mask = attention_mask.dense(query.device)
        attention_mask = _intersect(attention_mask, cu_seq_lens_q, cu_seq_lens_k)
    if isinstance(attention_mask, BandRule):
        return _banded(query, key, value, attention_mask, position_bias, position_ids, common), None
    bias = _bias_from_entries(attention_mask, query.dtype)
    if position_bias is not None:
        bias = bias + position_bias
    return attention(query, key, value, bias=bias, **common), None


def _banded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: BandRule,
    position_bias: Tensor | None,
    position_ids: Tensor | None,
    common: dict[str, Any],
) -> Tensor:
    """Attention under a rule; tensors are (batch, seqlen, heads, head_dim) from here on."""
    # Keys beyond the last query's reach (the unfilled part of a static cache) are not even looked at.
    reach = rule.reach
    key, value = key[:, :reach], value[:, :reach]
    bias = None if position_bias is None else position_bias[..., :reach]
    if bias is None and not torch.compiler.is_compiling():
        packing = rule.packing(position_ids)
        if packing is not None:
            return _packed(query, key, value, rule, (packing, packing), common)
    documents = rule.documents_with(position_ids)
    window = (rule.left, rule.right)
    mask_bias = None
    if documents is not None:
        mask_bias = _bias_from_entries(rule.dense(query.device, documents)[..., :reach], query.dtype)
    elif rule.key_mask is not None:
        mask_bias = _bias_from_entries(rule.key_mask[:, None, None, :], query.dtype)
    if mask_bias is not None:
        bias = mask_bias if bias is None else bias + mask_bias
    return attention(query, key, value, bias=bias, window=window, shift=rule.shift, **common)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, rule: BandRule, packs: tuple[Packing, Packing], common: dict[str, Any]
) -> Tensor:
    """Attention over the sequences that `packs` (of queries, of keys) describe; positions outside them give 0."""
    batch, seqlen_q = query.shape[:2]
    pack_q, pack_k = packs
    out = attention_varlen(
        _gather(query, pack_q),
        _gather(key, pack_k),
        _gather(value, pack_k),
        pack_q.cu_seqlens,
        pack_k.cu_seqlens,
        max_seqlen_q=pack_q.max_seqlen,
        max_seqlen_k=pack_k.max_seqlen,
        window=(rule.left, rule.right),
        **common,
    )
    if pack_q.indices is not None:
        grid = out.new_zeros(batch * seqlen_q, *out.shape[1:])
        out = grid.index_copy(0, pack_q.indices, out)
    return out.view(batch, seqlen_q, *out.shape[1:])


def _gather(tensor: Tensor, pack: Packing) -> Tensor:
    """(batch, seqlen, heads, width) to the (total, heads, width) tokens of `pack`."""
    if pack.indices is None:
        return tensor.flatten(0, 1)
    # One gather instead of a flattening copy and a gather: caches and projections have strides of their own.
    rows = torch.div(pack.indices, tensor.shape[1], rounding_mode="floor")
    return tensor[rows, pack.indices - rows * tensor.shape[1]]


def _implied_rule(query: Tensor, key: Tensor, causal: bool, sliding_window: int | None) -> BandRule:
    """The mask of a model that builds none: ``is_causal`` and ``sliding_window`` are all there is to know."""
    batch, _, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    if causal and seqlen_q > 1 and seqlen_k != seqlen_q:
        raise ArgumentError(
            "the layer is causal but gives no mask, and the numbers of queries and keys differ: it is not known which"
            f" keys a query sees.{_shapes(query, key)}\n  Pass an attention_mask, or is_causal=False."
        )
    if sliding_window is not None and not causal and seqlen_k > sliding_window:
        raise UnsupportedError(
            f"a sliding_window without a mask is only defined for causal attention.{_shapes(query, key)}"
        )
    left = sliding_window - 1 if sliding_window is not None and causal else None
    return BandRule((batch, 1, seqlen_q, seqlen_k), left, 0 if causal else None, seqlen_k - seqlen_q)


def _check_mask(mask: Tensor | BandRule, query: Tensor, key: Tensor) -> None:
    batch, heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    if isinstance(mask, BandRule):
        fits = tuple(mask.shape) == (batch, 1, seqlen_q, seqlen_k)
    elif not isinstance(mask, Tensor):
        raise DtypeError(f"attention_mask must be a tensor, got {type(mask).__name__}.")
    elif mask.dtype != torch.bool and not mask.is_floating_point():
        raise DtypeError(
            f"attention_mask must be bool (True = attend) or floating point, got {mask.dtype}."
            f"{_shapes(query, key, mask)}"
        )
    else:
        wanted = (batch, heads, seqlen_q, seqlen_k)
        fits = mask.dim() == 4 and all(size in (1, want) for size, want in zip(mask.shape, wanted, strict=True))
    if not fits:
        raise ShapeError(
            f"attention_mask does not fit (batch, heads, seqlen_q, seqlen_k) of this layer.{_shapes(query, key, mask)}"
        )


def _shapes(query: Tensor, key: Tensor, mask: Tensor | BandRule | None = None) -> str:
    """For messages; made only once there is something to say, because the compiler does not follow it."""
    given = {} if mask is None else {"attention_mask": tuple(mask.shape)}
    return describe_shapes({**given, "query": query.shape, "key": key.shape}, "batch, heads, seqlen, head_dim")


def _intersect(mask: Tensor, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor) -> Tensor:
    """A 4-D mask of entries that also keeps packed sequences apart."""
    seqlen_q, seqlen_k = mask.shape[-2:]
    if mask.shape[0] != 1 or 1 in (seqlen_q, seqlen_k):
        raise UnsupportedError(
            "cu_seq_lens_q together with another mask needs a batch of one row and one entry per query and key, got"
            f" attention_mask {tuple(mask.shape)}."
        )
    i, j = (torch.arange(size, device=mask.device) for size in (seqlen_q, seqlen_k))
    same = (
        torch.searchsorted(cu_seq_lens_q.to(i), i, right=True)[:, None]
        == torch.searchsorted(cu_seq_lens_k.to(j), j, right=True)[None, :]
    )
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, -torch.inf)


def _bias_from_entries(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive form of a mask; floating point masks are additive already."""
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _as_int(length: int | Tensor | None) -> int | None:
    """`max_seqlen` is a mere bound, so a tensor is not worth a graph break."""
    if isinstance(length, Tensor):
        return None if torch.compiler.is_compiling() else int(length)
    return length


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name in _SELECTING:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"this model passes {name!r} to its attention, which tilestream does not take.")
    if kwargs.get("output_attentions"):
        raise UnsupportedError("output_attentions needs the stored score matrix; use attn_implementation='eager'.")
