"""The one oracle: materialised attention, every feature, float64-able, gradients by autograd.

It stores the whole score matrix on purpose and shares no code with the kernels but the dropout mask. Whatever an
invisible key or value holds, NaN included, contributes nothing.
Shapes: B batch, H query heads, G group (H // kv heads), M queries, N keys, D head_dim, E head_dim_v, T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.block_mask import BlockMask
from tilestream.dropout import keep_mask
from tilestream.problem import crop_bias
from tilestream.spec import AttentionSpec, Band, default_scale
from tilestream.state import AttentionOutput, finite_or_zero

__all__ = ["attention", "attention_rows", "attention_varlen"]

_NEGATIVE_INFINITY = float("-inf")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    shift: int | None = None,
    block_mask: BlockMask | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionOutput:
    """`tilestream.attention_with_lse`, materialised and computed in `dtype`; differentiable by plain autograd.

    Args:
        query, key, value, ...: as `tilestream.attention`; unvalidated.
        block_mask: makes it `tilestream.block_sparse_attention_with_lse`; looked at pair by pair (`to_dense`).
        dtype: every operation runs in this dtype; the result stays in it.

    Returns:
        AttentionOutput(out (B, M, H, E), lse (B, H, M)).

    Cost: O(B * H * M * N) memory.
    """
    spec = AttentionSpec(
        band=Band.from_arguments(causal, window),
        scale=default_scale(query.shape[-1]) if scale is None else scale,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    return attention_rows(
        query,
        key,
        value,
        spec,
        shift=key.shape[1] - query.shape[1] if shift is None else shift,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        seed=seed,
        shown=None if block_mask is None else block_mask.to_dense().to(query.device),
        dtype=dtype,
    )


def attention_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    *,
    shift: int,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    first_row: int = 0,
    first_key: int = 0,
    batch_index: Tensor | None = None,
    shown: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionOutput:
    """The oracle on the query rows ``first_row ...`` and keys ``first_key ...`` of a larger call.

    `query`, `key`, `value`, `bias` and `shown`, bool (B | 1, H | 1, M, N), are already cut to
    those rows and keys; `shift` belongs to the whole call.
    Shapes as `attention`; `batch_index` (B,) names the batch entries for the dropout mask.
    """
    num_batch, seqlen_q, num_heads, _ = query.shape
    seqlen_k, num_heads_kv = key.shape[1], key.shape[2]
    group = num_heads // num_heads_kv
    device = query.device
    positions_i = torch.arange(first_row, first_row + seqlen_q, device=device)[:, None] + shift
    positions_j = torch.arange(first_key, first_key + seqlen_k, device=device)[None, :]
    distance = positions_j - positions_i
    visible = torch.ones_like(distance, dtype=torch.bool)
    if spec.band.left is not None:
        visible = visible & (distance >= -spec.band.left)
    if spec.band.right is not None:
        visible = visible & (distance <= spec.band.right)

    if shown is not None:
        visible = visible & shown
    if bias is not None:
        visible = visible & (bias.detach() != _NEGATIVE_INFINITY)
    is_seen = visible.any(dim=-2).unsqueeze(-1)

    q_BHMD = query.to(dtype).transpose(1, 2)
    k_BHND = _zero_unseen(key.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1), is_seen)
    v_BHNE = _zero_unseen(value.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1), is_seen)
    s = q_BHMD @ k_BHND.transpose(-1, -2) * spec.scale
    if spec.softcap > 0:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if bias is not None:
        s = s + bias.to(dtype)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dtype).reshape(-1, num_heads, 1, 1) * distance.abs().to(dtype)
    s = torch.where(visible, s, _NEGATIVE_INFINITY)

    sink = None if sinks is None else sinks.to(dtype).reshape(1, num_heads, 1, 1)
    p, lse = _softmax_with_sink(s, sink)
    if spec.dropout_p > 0:
        assert seed is not None
        batch_index = torch.arange(num_batch, device=device) if batch_index is None else batch_index
        rows = range(first_row, first_row + seqlen_q)
        keys = range(first_key, first_key + seqlen_k)
        heads = torch.arange(num_heads, device=device)
        p = p * keep_mask(seed, spec.dropout_p, batch_index, heads, rows, keys) / (1.0 - spec.dropout_p)
    return AttentionOutput(_weighted_sum(p, v_BHNE, visible).transpose(1, 2), lse)


def _softmax_with_sink(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension with an optional phantom logit; rows without keys give p = 0, lse = -inf."""
    if sink is not None:
        s = torch.cat([s, sink.expand(*s.shape[:-1], 1)], dim=-1)
    if s.shape[-1] == 0:
        return s, s.sum(dim=-1) + _NEGATIVE_INFINITY
    # The maximum cancels, so it carries no gradient.
    subtrahend = finite_or_zero(s.detach().amax(dim=-1, keepdim=True))
    unnormalised = torch.exp(s - subtrahend)
    row_sum = unnormalised.sum(dim=-1, keepdim=True)
    is_void = row_sum == 0
    row_sum = row_sum.masked_fill(is_void, 1.0)
    lse = (subtrahend + torch.log(row_sum)).masked_fill(is_void, _NEGATIVE_INFINITY).squeeze(-1)
    p = unnormalised / row_sum
    return (p if sink is None else p[..., :-1]), lse


def _zero_unseen(rows: Tensor, is_seen: Tensor) -> Tensor:
    """Zero the keys (or values) that no query sees, so that garbage there sends no 0 * NaN into a gradient."""
    return torch.where(is_seen, rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


def _weighted_sum(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """``p @ v``, where a value that is not finite reaches only the rows that see its key (0 * NaN is NaN)."""
    is_finite = torch.isfinite(v.detach())
    if bool(is_finite.all()):
        return p @ v
    out = p @ torch.where(is_finite, v, torch.zeros_like(v))
    for is_kind, kind in (
        (v == float("inf"), float("inf")),
        (v == -float("inf"), -float("inf")),
        (v.isnan(), float("nan")),
    ):
        reached = visible.to(p.dtype) @ is_kind.to(p.dtype)
        out = torch.where(reached > 0, out + kind, out)
    return out


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    block_mask: BlockMask | None = None,
) -> AttentionOutput:
    """`tilestream.attention_varlen_with_lse`, one materialised sequence after the other.

    Returns:
        AttentionOutput(out (T, H, E), lse (H, T)); rows past ``cu_seqlens_q[-1]`` are 0 and -inf.
    """
    spec = AttentionSpec(
        band=Band.from_arguments(causal, window),
        scale=default_scale(query.shape[-1]) if scale is None else scale,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    shown = None if block_mask is None else block_mask.to_dense().to(query.device)
    tail = query.shape[0] - starts_q[-1]
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        index = torch.tensor([b], device=query.device)
        sequence = attention_rows(
            query[None, rows],
            key[None, keys],
            value[None, keys],
            spec,
            shift=seqlen_k - seqlen_q,
            bias=None if bias is None else crop_bias(bias, index, seqlen_q, seqlen_k),
            alibi_slopes=alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes,
            sinks=sinks,
            seed=seed,
            batch_index=index,
            shown=None if shown is None else crop_bias(shown, index, seqlen_q, seqlen_k),
            dtype=dtype,
        )
        outs.append(sequence.out[0])
        lses.append(sequence.lse[0])
    num_heads, head_dim_v = query.shape[1], value.shape[-1]
    outs.append(query.new_zeros(tail, num_heads, head_dim_v, dtype=dtype))
    lses.append(query.new_full((num_heads, tail), _NEGATIVE_INFINITY, dtype=dtype))
    return AttentionOutput(torch.cat(outs), torch.cat(lses, dim=-1))
