"""Who is measured: tilestream's backends, PyTorch's own attention, and attention that stores its scores.

Shapes: B batch, H query heads, K KV heads, G = H // K, M queries, N keys, D head_dim, E head_dim_v.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilestream import api, block_sparse, dispatch
from tilestream.bench.cases import DTYPES, Case
from tilestream.bench.eager import eager_attention, eager_cost
from tilestream.errors import ArgumentError, UnsupportedError
from tilestream.io.cost import Cost, Traffic
from tilestream.io.schedule import schedule_cost
from tilestream.io.standard import standard_cost
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import Band
from tilestream.tiles import key_span

__all__ = ["Forward", "Provider", "kernel_cost", "peer_versions", "provider_named", "provider_names"]

# query, key, value of a case -> out (B, M, H, E); everything else is prepared ahead and not timed.
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
# PyTorch's answer whether a kernel can run a call, with warnings that say why not where the second argument asks.
_CanUse = Callable[[SDPAParams, bool], bool]

# Of flex_attention: sizes, masks and with or without gradients.
_MAX_COMPILED_CASES = 128

# Packages of peers that this one never depends on, and how each is installed: docs/benchmarks.md.
_FA3, _FA4 = "fa3-fwd", "flash-attn-4"
_SM_90 = (9, 0)


@dataclass(frozen=True)
class Provider:
    """One implementation: `refuse` gives the reason why it cannot run a case, `prepare` its forward."""

    name: str
    refuse: Callable[[Case, torch.device], str | None]
    prepare: Callable[[Case, AttentionInputs], Forward]
    # What its algorithm must move, of the forward or of the backward; None where unknown.
    cost: Callable[[Problem, bool], Cost | None] = lambda problem, backward: None
    # Rough peak of what it allocates beside inputs and outputs, to skip runs that this machine cannot hold.
    score_matrices: int = 0
    # Its dropout mask is its own, so that its result can be checked without dropout alone.
    draws_own_dropout: bool = False
    # It copies tensors whose heads do not stand before tokens in memory.
    is_heads_first: bool = False

    def traffic(self, problem: Problem, backward: bool) -> Traffic | None:
        """Slow-memory bytes that its algorithm must move; None where unknown."""
        cost = self.cost(problem, backward)
        return None if cost is None else cost.traffic

    def expected_extra_bytes(self, case: Case) -> int:
        """What the score matrices of one call will take."""
        scores = case.batch * case.num_heads_q * case.seqlen_q * case.seqlen_k
        return self.score_matrices * scores * DTYPES[case.dtype].itemsize


def provider_names() -> tuple[str, ...]:
    """The names of every provider of this machine, tilestream's backends first."""
    return (*(f"tilestream/{backend}" for backend in dispatch.BACKENDS), *_PEERS)


def provider_named(name: str) -> Provider:
    """The provider called `name`; plain ``tilestream`` is whatever backend tilestream chooses.

    Raises:
        ArgumentError: there is none; the message lists those there are.
    """
    if name in _PEERS:
        return _PEERS[name]
    if name == "tilestream":
        return _tilestream(name, None)
    if name in provider_names():
        return _tilestream(name, name.removeprefix("tilestream/"))
    raise ArgumentError(f"provider {name!r} does not exist; choose from tilestream, {', '.join(provider_names())}.")


def peer_versions() -> dict[str, str | None]:
    """The versions of optional peers, by package; None where one is not installed."""
    return {package: _version(package) for package in (_FA3, _FA4)}


def kernel_cost(problem: Problem, backend: str | None, backward: bool) -> Cost | None:
    """What tilestream moves for a dense `problem` with the tiles and the passes of `backend`, or of its choice.

    Returns:
        None where that backend, or any, cannot run it.
    """
    asked = dataclasses.replace(problem, is_backward=backward)
    chosen = dispatch.explain(asked, backend).chosen
    if chosen is None:
        return None
    return schedule_cost(asked, dispatch.backend(chosen).tile_shape(asked), backward)


def _tilestream(name: str, backend: str | None) -> Provider:
    def refuse(case: Case, device: torch.device) -> str | None:
        explanation = dispatch.explain(case.problem(device.type), backend)
        return None if explanation.chosen else "; ".join(f"{who}: {reason}" for who, reason in explanation.reasons)

    def prepare(case: Case, inputs: AttentionInputs) -> Forward:
        mask = case.block_mask
        options: dict[str, Any] = {
            "causal": case.causal, "window": case.window, "softcap": case.softcap, "bias": inputs.bias,
            "alibi_slopes": inputs.alibi_slopes, "sinks": inputs.sinks, "dropout_p": case.dropout_p,
            "seed": inputs.seed, "backend": backend,
        }  # fmt: skip

        def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if mask is None:
                return api.attention(query, key, value, **options)
            return block_sparse.block_sparse_attention(query, key, value, mask, **options)

        return forward

    def cost(problem: Problem, backward: bool) -> Cost | None:
        return kernel_cost(problem, backend, backward)

    return Provider(name, refuse, prepare, cost)


def _mask_reason(case: Case) -> str | None:
    return "it is not asked for block masks here" if case.mask else None


def _sdpa_refuse(case: Case, device: torch.device) -> str | None:
    for feature in ("softcap", "has_alibi", "has_sinks"):
        if getattr(case, feature):
            return f"scaled_dot_product_attention has no {feature.removeprefix('has_')}"
    if case.dropout_p > 0:
        return "its dropout mask cannot be reproduced, so its result cannot be checked"
    return _mask_reason(case) or _void_rows_reason(case)


def _sdpa_prepare(case: Case, inputs: AttentionInputs) -> Forward:
    is_causal = _is_plain_causal(case)
    mask = None if is_causal else _additive_mask(case, inputs)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            attn_mask=mask, is_causal=is_causal, enable_gqa=case.num_heads_q != case.num_heads_kv,
        ).transpose(1, 2)  # fmt: skip

    return forward


def _is_plain_causal(case: Case) -> bool:
    """Its is_causal aligns the first query with the first key, so only square calls may use it."""
    return case.spec.band == Band(None, 0) and case.seqlen_q == case.seqlen_k and not case.has_bias


def _forced_sdpa(name: str, kernel: SDPBackend, can_use: _CanUse) -> Provider:
    """PyTorch's attention with one of its CUDA kernels and no other."""

    def refuse(case: Case, device: torch.device) -> str | None:
        return _sdpa_refuse(case, device) or _not_cuda_reason(device) or _kernel_reason(case, device, can_use)

    def prepare(case: Case, inputs: AttentionInputs) -> Forward:
        forward = _sdpa_prepare(case, inputs)

        def forced(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return forward(query, key, value)

        return forced

    return Provider(name, refuse, prepare)


def _kernel_reason(case: Case, device: torch.device, can_use: _CanUse) -> str | None:
    """Why a CUDA kernel of PyTorch cannot run `case`, in PyTorch's words, or None."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPES[case.dtype], device=device)

    # One batch entry: no kernel asks for how many there are.
    query = empty(1, case.seqlen_q, case.num_heads_q, case.head_dim).transpose(1, 2)
    key = empty(1, case.seqlen_k, case.num_heads_kv, case.head_dim).transpose(1, 2)
    value = empty(1, case.seqlen_k, case.num_heads_kv, case.head_dim_v).transpose(1, 2)
    is_causal = _is_plain_causal(case)
    has_mask = case.has_bias or not (is_causal or case.spec.band.is_unlimited)
    mask = empty(1, 1, case.seqlen_q, case.seqlen_k) if has_mask else None
    is_grouped = case.num_heads_q != case.num_heads_kv
    parameters = SDPAParams(query, key, value, mask, 0.0, is_causal, is_grouped)
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        if can_use(parameters, True):
            return None
    texts = [str(complaint.message).partition(" (Triggered internally")[0] for complaint in complaints]
    return " ".join(texts) or "PyTorch refuses it without a reason"


def _flex_refuse(case: Case, device: torch.device) -> str | None:
    if case.dropout_p > 0:
        return "flex_attention has no dropout"
    for feature in ("softcap", "has_alibi", "has_bias", "has_sinks"):
        if getattr(case, feature):
            return (
                f"flex_attention has no argument for {feature.removeprefix('has_')}; what one could write is not here"
            )
    if case.mask and not case.spec.band.is_unlimited:
        return "flex_attention is given a mask or a band here, not both"
    return _not_cuda_reason(device)


def _flex_prepare(case: Case, inputs: AttentionInputs) -> Forward:
    compiled, device = _compiled_flex(), inputs.query.device
    block_mask = None
    if case.mask is not None:
        block_mask = _flex_block_mask(case, device)
    elif not case.spec.band.is_unlimited:
        block_mask = _flex_mask(case.spec.band, case.seqlen_q, case.seqlen_k, device)
    is_grouped = case.num_heads_q != case.num_heads_kv

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = compiled(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            block_mask=block_mask, enable_gqa=is_grouped,
        )  # fmt: skip
        return out.transpose(1, 2)

    return forward


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """One function for all cases, so that each is compiled once, for its own sizes and no others."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    # Beyond this limit, which is 8, a function is not compiled for yet other sizes.
    config.recompile_limit = max(_MAX_COMPILED_CASES, config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.lru_cache(maxsize=8)
def _flex_mask(band: Band, seqlen_q: int, seqlen_k: int, device: torch.device) -> Any:
    """The block mask of `band`; always the same object, because another one might be compiled again."""
    from torch.nn.attention.flex_attention import create_block_mask

    left, right, shift = band.left, band.right, seqlen_k - seqlen_q

    def is_causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - (i + shift)
        visible = distance >= (-seqlen_k - seqlen_q if left is None else -left)
        return visible if right is None else visible & (distance <= right)

    # What its users write for the plainest mask, so that it is not measured with more arithmetic than they have.
    mask = is_causal if band == Band(None, 0) and shift == 0 else is_visible
    # Kept for calls with gradients too, so not a tensor of the inference mode that a forward is timed in.
    with torch.inference_mode(False):
        return create_block_mask(mask, None, None, seqlen_q, seqlen_k, device=device)


@functools.lru_cache(maxsize=8)
def _flex_block_mask(case: Case, device: torch.device) -> Any:
    """The block mask of `case`, as `_flex_mask`."""
    mask = case.block_mask
    assert mask is not None
    with torch.inference_mode(False):
        return mask.to_flex_attention(device)


def _fa3_refuse(case: Case, device: torch.device) -> str | None:
    # What its wheel leaves out: fa3_fwd_config.py of fa3-fwd 0.0.3.
    if case.dtype != "bfloat16":
        return f"{_FA3} is built without {case.dtype}"
    if case.window is not None:
        return f"{_FA3} is built without windows"
    if case.head_dim_v != case.head_dim:
        return f"{_FA3} takes head_dim_v {case.head_dim_v} beside head_dim {case.head_dim} only in part"
    return _flash_reason(_FA3, case, device)


def _fa3_prepare(case: Case, inputs: AttentionInputs) -> Forward:
    attend = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            raise UnsupportedError(f"{_FA3} has no backward; leave it out, or measure the forward.")
        out: Tensor = attend(query, key, value, causal=case.causal, softcap=case.softcap)
        return out

    return forward


def _fa4_refuse(case: Case, device: torch.device) -> str | None:
    if case.dtype not in ("float16", "bfloat16"):
        return f"{_FA4} has no {case.dtype}"
    return _flash_reason(_FA4, case, device)


def _fa4_prepare(case: Case, inputs: AttentionInputs) -> Forward:
    attend = importlib.import_module("flash_attn.cute").flash_attn_func
    window = (None, None) if case.window is None else case.window

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # With lse, which is None where nobody needs it.
        out: Tensor = attend(query, key, value, causal=case.causal, window_size=window, softcap=case.softcap)[0]
        return out

    return forward


def _flash_reason(package: str, case: Case, device: torch.device) -> str | None:
    """What both FlashAttentions for Hopper refuse; masks of theirs end at the last key too, and empty rows are 0."""
    if reason := _mask_reason(case):
        return reason
    for feature in ("has_bias", "has_alibi", "has_sinks", "dropout_p"):
        if getattr(case, feature):
            return f"{package} is not asked for {feature.removeprefix('has_').removesuffix('_p')}"
    widths = (case.head_dim, case.head_dim_v)
    if max(widths) > 256 or any(width % 8 for width in widths):
        return f"{package} takes multiples of 8 up to 256, not head_dim {widths[0]} and head_dim_v {widths[1]}"
    if (reason := _not_cuda_reason(device)) is not None:
        return reason
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != _SM_90:
        return f"is measured on sm_90, which {torch.cuda.get_device_name(device)} is not"
    return None if _version(package) else f"{package} is not installed (docs/benchmarks.md says how)"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _not_cuda_reason(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"runs on CUDA, not on {device.type}"


def _materialised_refuse(case: Case, device: torch.device) -> str | None:
    for feature in ("softcap", "has_alibi", "has_sinks", "dropout_p"):
        if getattr(case, feature):
            return f"the materialised baseline leaves out {feature.removeprefix('has_').removesuffix('_p')}"
    return _mask_reason(case) or _void_rows_reason(case)


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


def _materialised_cost(problem: Problem, backward: bool) -> Cost:
    """Mask and scale count as part of the softmax, in its favour, as `materialised_bytes`."""
    return standard_cost(problem, backward, has_mask=False, has_dropout=False)


def _eager_refuse(case: Case, device: torch.device) -> str | None:
    for feature in ("softcap", "has_bias", "has_alibi", "has_sinks"):
        if getattr(case, feature):
            return f"the eager operators leave out {feature.removeprefix('has_')}"
    if case.num_heads_q != case.num_heads_kv:
        return "the eager operators have as many KV heads as query heads"
    return _mask_reason(case) or _void_rows_reason(case)


def _eager_prepare(case: Case, inputs: AttentionInputs) -> Forward:
    mask = _additive_mask(case, inputs)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        out = eager_attention(q, k, v, mask, case.spec.scale, case.dropout_p)
        return out.reshape(case.batch, case.num_heads_q, case.seqlen_q, case.head_dim_v).transpose(1, 2)

    return forward


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


_PEERS = {
    provider.name: provider
    for provider in (
        Provider("sdpa", _sdpa_refuse, _sdpa_prepare),
        _forced_sdpa("sdpa/flash", SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention),
        _forced_sdpa("sdpa/cudnn", SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention),
        _forced_sdpa("sdpa/efficient", SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention),
        # FlashAttention-3 without its backward, and FlashAttention-4.
        Provider("fa3", _fa3_refuse, _fa3_prepare),
        Provider("fa4", _fa4_refuse, _fa4_prepare),
        Provider("flex", _flex_refuse, _flex_prepare),
        Provider("materialised", _materialised_refuse, _materialised_prepare, _materialised_cost, score_matrices=3),
        # Operator by operator as the papers time it, dropout included.
        Provider(
            "eager",
            _eager_refuse,
            _eager_prepare,
            eager_cost,
            score_matrices=5,
            draws_own_dropout=True,
            is_heads_first=True,
        ),
    )
}
