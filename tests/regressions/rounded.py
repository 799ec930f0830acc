"""Materialised attention with the roundings that a tiled kernel cannot avoid: the yardstick of the regression tests.

Scores, sums and accumulators are float32; the probabilities and the score gradients are rounded to the input dtype
before they are multiplied, and delta comes from the rounded output.
Shapes: B batch, H query heads, G group, M queries, N keys, D head_dim, E head_dim_v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regression import Call

_NEGATIVE_INFINITY = float("-inf")


def attention(call: Call) -> tuple[Tensor, dict[str, Tensor]]:
    """(out, gradients by name) of one call, in the dtypes of its inputs."""
    tensors = {name: tensor.detach() for name, tensor in call.tensors().items()}
    out = torch.zeros(*call.query.shape[:-1], call.value.shape[-1], dtype=call.query.dtype, device=call.query.device)
    gradients = {name: torch.zeros(tensor.shape, device=tensor.device) for name, tensor in tensors.items()}
    assert call.dout is not None
    options = {name: given for name, given in call.options.items() if name not in tensors}
    if call.cu_seqlens is None:
        out[:], found = _dense(tensors, call.dout, **options)
        for name, gradient in found.items():
            gradients[name] += gradient
    else:
        (starts_q, starts_k) = (cu_seqlens.tolist() for cu_seqlens in call.cu_seqlens)
        for b in range(len(starts_q) - 1):
            rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
            cuts = {"query": rows, "key": keys, "value": keys}
            sequence = {name: tensor[None, cuts[name]] if name in cuts else tensor for name, tensor in tensors.items()}
            out_b, found = _dense(sequence, call.dout[None, rows], **options)
            out[rows] = out_b[0]
            for name, gradient in found.items():
                target = gradients[name][cuts[name]] if name in cuts else gradients[name]
                target += gradient[0] if name in cuts else gradient
    return out, {name: gradients[name].to(tensors[name].dtype) for name in call.grads}


def _dense(
    tensors: dict[str, Tensor],
    dout: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    bias, alibi_slopes, sinks = (tensors.get(name) for name in ("bias", "alibi_slopes", "sinks"))
    dtype, head_dim, num_heads = query.dtype, query.shape[-1], query.shape[2]
    group = num_heads // key.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    distance = _distance(query.shape[1], key.shape[1], query.device)
    visible = _visible(distance, causal, window)
    seen = visible if bias is None else visible & (bias != _NEGATIVE_INFINITY)
    is_unseen = ~seen.any(dim=-2).unsqueeze(-1)

    q = query.float().transpose(1, 2)
    k = key.float().transpose(1, 2).repeat_interleave(group, dim=1).masked_fill(is_unseen, 0.0)
    v = value.float().transpose(1, 2).repeat_interleave(group, dim=1).masked_fill(is_unseen, 0.0)
    do = dout.float().transpose(1, 2)
    s = q @ k.transpose(-1, -2) * scale
    capped = torch.tanh(s / softcap) if softcap else None
    s = s if capped is None else softcap * capped
    if alibi_slopes is not None:
        s = s - alibi_slopes.float().reshape(-1, num_heads, 1, 1) * distance.abs()
    if bias is not None:
        s = s + bias.float()
    s = s.masked_fill(~visible, _NEGATIVE_INFINITY)

    sink = s.new_full((1, num_heads, 1, 1), _NEGATIVE_INFINITY) if sinks is None else sinks.float().reshape(1, -1, 1, 1)
    row_max = torch.cat([s, sink.expand(*s.shape[:-1], 1)], dim=-1).amax(dim=-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == _NEGATIVE_INFINITY, 0.0)
    p, p_sink = torch.exp(s - row_max), torch.exp(sink - row_max)
    row_sum = p.sum(dim=-1, keepdim=True) + p_sink
    row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    out = (p.to(dtype).float() @ v / row_sum).to(dtype)

    p = p / row_sum
    delta = (do * out.float()).sum(dim=-1, keepdim=True)
    ds = p * (do @ v.transpose(-1, -2) - delta)
    gradients = {}
    if sinks is not None:
        gradients["sinks"] = -(p_sink / row_sum * delta).sum(dim=(0, 2, 3))
    if bias is not None:
        gradients["bias"] = ds.sum_to_size(bias.shape)
    if capped is not None:
        ds = ds * (1 - capped * capped)
    ds = ds.to(dtype).float()

    def per_kv_head(gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (-1, group)).sum(dim=2).transpose(1, 2)

    gradients["query"] = (ds @ k * scale).transpose(1, 2)
    gradients["key"] = per_kv_head(ds.transpose(-1, -2) @ q * scale)
    gradients["value"] = per_kv_head(p.to(dtype).float().transpose(-1, -2) @ do)
    return out.transpose(1, 2), gradients


def _distance(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """How far key j stands behind the position of query i, ends aligned; (M, N)."""
    i = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    return torch.arange(seqlen_k, device=device) - i


def _visible(distance: Tensor, causal: bool, window: tuple[int | None, int | None] | None) -> Tensor:
    left, right = window or (None, None)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible & (distance <= 0) if causal else visible
