"""Who is measured: tilestream's backends, PyTorch's own attention, and attention that stores its scores.

Shapes: B batch, H query heads, K KV heads, G = H // K, M queries, N keys, D head_dim, E head_dim_v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestream import api, dispatch
from tilestream.bench.cases import DTYPES, Case
from tilestream.errors import ArgumentError
from tilestream.io.model import Traffic, materialised_bytes, tiled_bytes
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import Band
from tilestream.tiles import key_span

__all__ = ["Forward", "Provider", "provider_named", "provider_names", "tiled_traffic"]

# query, key, value of a case -> out (B, M, H, E); everything else is prepared ahead and not timed.
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """One implementation: `refuse` gives the reason why it cannot run a case, `prepare` its forward."""

    name: str
    refuse: Callable[[Case, torch.device], str | None]
    prepare: Callable[[Case, AttentionInputs], Forward]
    # Slow-memory bytes that its algorithm must move, of the forward or of the backward; None where unknown.
    traffic: Callable[[Case, bool], Traffic | None]
    # Rough peak of what it allocates beside inputs and outputs, to skip runs that this machine cannot hold.
    score_matrices: int = 0

    def expected_extra_bytes(self, case: Case) -> int:
        """What the score matrices of one call will take."""
        scores = case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_k
        return self.score_matrices * scores * DTYPES[case.dtype].itemsize


def provider_names() -> tuple[str, ...]:
    """The names of every provider of this machine, tilestream's backends first."""
    return (*(f"tilestream/{backend}" for backend in dispatch.BACKENDS), "sdpa", "materialised")


def provider_named(name: str) -> Provider:
    """The provider called `name`; plain ``tilestream`` is whatever backend tilestream chooses.

    Raises:
        ArgumentError: there is none; the message lists those there are.
    """
    if name == "sdpa":
        return Provider(name, _sdpa_refuse, _sdpa_prepare, lambda case, backward: None)
    if name == "materialised":
        return Provider(name, _materialised_refuse, _materialised_prepare, _materialised_traffic, score_matrices=3)
    if name == "tilestream":
        return _tilestream(name, None)
    if name in provider_names():
        return _tilestream(name, name.removeprefix("tilestream/"))
    raise ArgumentError(f"provider {name!r} does not exist; choose from tilestream, {', '.join(provider_names())}.")


def tiled_traffic(problem: Problem, backend: str | None, backward: bool) -> Traffic | None:
    """What tilestream moves for a dense `problem` with the tiles of `backend`, or of the one it would choose.

    Returns:
        None where no backend can run it.
    """
    chosen = backend or dispatch.explain(problem).chosen
    if chosen is None:
        return None
    block_m, _ = dispatch.backend(chosen).tile_shape(problem)
    return tiled_bytes(problem, block_m, backward, packs_group=True)


def _tilestream(name: str, backend: str | None) -> Provider:
    def refuse(case: Case, device: torch.device) -> str | None:
        explanation = dispatch.explain(case.problem(device.type), backend)
        return None if explanation.chosen else "; ".join(f"{who}: {reason}" for who, reason in explanation.reasons)

    def prepare(case: Case, inputs: AttentionInputs) -> Forward:
        def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return api.attention(
                query, key, value,
                causal=case.causal, window=case.window, softcap=case.softcap, bias=inputs.bias,
                alibi_slopes=inputs.alibi_slopes, sinks=inputs.sinks, dropout_p=case.dropout_p, seed=inputs.seed,
                backend=backend,
            )  # fmt: skip

        return forward

    def traffic(case: Case, backward: bool) -> Traffic | None:
        return tiled_traffic(case.problem("cpu"), backend, backward)

    return Provider(name, refuse, prepare, traffic)


def _sdpa_refuse(case: Case, device: torch.device) -> str | None:
    for feature in ("softcap", "has_alibi", "has_sinks"):
        if getattr(case, feature):
            return f"scaled_dot_product_attention has no {feature.removeprefix('has_')}"
    if case.dropout_p > 0:
        return "its dropout mask cannot be reproduced, so its result cannot be checked"
    return _void_rows_reason(case)


def _sdpa_prepare(case: Case, inputs: AttentionInputs) -> Forward:
    # Its is_causal aligns the first query with the first key, so only square calls may use it.
    is_causal = case.spec.band == Band(None, 0) and case.seqlen_q == case.seqlen_k and inputs.bias is None
    mask = None if is_causal else _additive_mask(case, inputs)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            attn_mask=mask, is_causal=is_causal, enable_gqa=case.num_heads_q != case.num_heads_kv,
        ).transpose(1, 2)  # fmt: skip

    return forward


def _materialised_refuse(case: Case, device: torch.device) -> str | None:
    for feature in ("softcap", "has_alibi", "has_sinks", "dropout_p"):
        if getattr(case, feature):
            return f"the materialised baseline leaves out {feature.removeprefix('has_').removesuffix('_p')}"
    return _void_rows_reason(case)


def _materialised_prepare(case: Case, inputs: AttentionInputs) -> Forward:
    """matmul, add the mask, softmax, matmul: two score matrices at once, three in a backward."""
    mask = _additive_mask(case, inputs)
    group = case.num_heads_q // case.num_heads_kv

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Scaling the queries is cheaper than scaling the scores.
        q_BHMD = (query * case.spec.scale).transpose(1, 2)
        k_BHND, v_BHNE = key.transpose(1, 2), value.transpose(1, 2)
        if group > 1:
            k_BHND, v_BHNE = k_BHND.repeat_interleave(group, dim=1), v_BHNE.repeat_interleave(group, dim=1)
        s_BHMN = q_BHMD @ k_BHND.transpose(-1, -2)
        if mask is not None:
            s_BHMN = s_BHMN.add_(mask)
        return (torch.softmax(s_BHMN, dim=-1) @ v_BHNE).transpose(1, 2)

    return forward


def _materialised_traffic(case: Case, backward: bool) -> Traffic:
    return materialised_bytes(case.problem("cpu"), backward)


def _void_rows_reason(case: Case) -> str | None:
    """Queries that see no key are at the ends, if anywhere; they are 0 here and NaN in the peers."""
    shift = case.seqlen_k - case.seqlen_q
    for i in (0, case.seqlen_q - 1):
        lo, hi = key_span(case.spec.band, shift, i, i + 1, case.seqlen_k)
        if lo == hi:
            return f"query {i} sees no key, which gives NaN there"
    return None


def _additive_mask(case: Case, inputs: AttentionInputs) -> Tensor | None:
    """0 or -inf (M, N), plus the bias, or None where nothing is hidden or added; made once, ahead of all timing."""
    band, device = case.spec.band, inputs.query.device
    if band.is_unlimited:
        return inputs.bias
    distance = torch.arange(case.seqlen_k, device=device) - torch.arange(case.seqlen_q, device=device)[:, None]
    distance -= case.seqlen_k - case.seqlen_q
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if band.left is not None:
        hidden |= distance < -band.left
    if band.right is not None:
        hidden |= distance > band.right
    mask = torch.zeros(hidden.shape, dtype=inputs.query.dtype, device=device).masked_fill_(hidden, float("-inf"))
    return mask if inputs.bias is None else mask + inputs.bias
