"""The contestants: exact attention, attention over kept blocks, and (in `packages`) approximate attention.

A method is asked for a setting and says what it does of it: who has no dropout or no padding mask runs without, and its
lines say so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import tilestream
from tilestream import BlockMask, api, block_sparse, dispatch
from tilestream.bench.approximate.setting import LAYOUTS, Layout, Setting
from tilestream.bench.eager import eager_attention
from tilestream.spec import default_scale

__all__ = ["BLOCK_SIZE", "EXACT", "SPARSE", "Kind", "Method", "Prepared", "Target", "block_mask_of", "ours_reason"]

# exact: softmax attention; block-sparse: exact over the kept blocks; approximate: something else.
Kind = Literal["exact", "block-sparse", "approximate"]
# Of what a method is an approximation.
Target = Literal["softmax", "shared-qk"]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

BLOCK_SIZE = 128
# Longformer's window, 256 to each side, and a block of global tokens; BigBird's three of each in its own blocks.
_LONGFORMER_SIDE, _LONGFORMER_GLOBAL = 256, 128
_BIGBIRD = {"num_window": 1, "num_global": 1, "num_random": 3}
_SEED = 0


@dataclass(frozen=True)
class Prepared:
    """A method for one setting: `forward` takes query, key, value in `layout` and gives out in the same.

    `parameters` are learnt tensors of its own, which get gradients in a training step too. `dropout` and `padding` say
    in words what is done about them, `has_known_dropout` whether the oracle can make the same dropout mask from `seed`.
    `kept` is the block mask, of methods that are exact over one.
    """

    forward: Forward
    layout: Layout
    dropout: str
    padding: str
    parameters: Sequence[Tensor] = ()
    has_known_dropout: bool = False
    seed: int = _SEED
    kept: BlockMask | None = None
    details: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """One contestant; `refuse` gives the reason why it has no number, of a package that is missing first of all."""

    name: str
    label: str
    kind: Kind
    source: Callable[[], str]
    prepare: Callable[[Setting, torch.device], Prepared]
    refuse: Callable[[Setting, torch.device], str | None] = lambda setting, device: None
    # Rough peak beside inputs and outputs, in score matrices.
    score_matrices: int = 0
    # Of a wrong result of ours there is no number; a peer's is written beside its number.
    is_ours: bool = False
    # What its output is compared with, where that is not softmax attention of its query, key and value.
    target: Target = "softmax"


# ---- exact


def _materialised(setting: Setting, device: torch.device) -> Prepared:
    """Operator by operator, as the papers time it."""
    mask = None
    if setting.is_padded:
        hidden = ~setting.is_token(device).repeat_interleave(setting.num_heads, 0)[:, None]
        mask = torch.zeros(hidden.shape, dtype=getattr(torch, setting.dtype), device=device)
        mask.masked_fill_(hidden, float("-inf"))
    scale, dropout_p = default_scale(setting.head_dim), setting.dropout_p

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return eager_attention(query, key, value, mask, scale, dropout_p)

    return Prepared(forward, LAYOUTS["heads in batch"], "yes", "additive mask")


def _sdpa(setting: Setting, device: torch.device) -> Prepared:
    mask = setting.is_token(device)[:, None, None] if setting.is_padded else None

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=setting.dropout_p)

    return Prepared(forward, LAYOUTS["heads first"], "yes", "boolean mask")


def _pytorch_version() -> str:
    return f"torch {torch.__version__}"


def _our_version() -> str:
    return f"tilestream {tilestream.__version__}"


# ---- tilestream, dense and over kept blocks


@dataclass(frozen=True)
class _Variant:
    """How tilestream runs a setting."""

    is_packed: bool
    has_dropout: bool


_VARIANTS = tuple(_Variant(is_packed, has_dropout) for has_dropout in (True, False) for is_packed in (True, False))


def ours_reason(setting: Setting, device: torch.device, mask: BlockMask | None, is_packed: bool) -> str | None:
    """Why no kernel of tilestream runs `setting` in both directions; on a GPU, tiled PyTorch operations are none."""
    for is_backward in (False, True):
        problem = dataclasses.replace(setting.problem(device.type, is_packed), block_mask=mask, is_backward=is_backward)
        explanation = dispatch.explain(problem)
        if explanation.chosen is None or (device.type == "cuda" and explanation.chosen == "cpu"):
            reasons = "; ".join(f"{who}: {reason}" for who, reason in explanation.reasons if reason)
            return f"no GPU kernel takes it: {reasons}" if device.type == "cuda" else reasons
    return None


def _chosen(setting: Setting, device: torch.device, mask: BlockMask | None, is_packed: bool) -> str:
    problem = dataclasses.replace(setting.problem(device.type, is_packed), block_mask=mask)
    names = [
        dispatch.explain(dataclasses.replace(problem, is_backward=is_backward)).chosen for is_backward in (False, True)
    ]
    return " and ".join(dict.fromkeys(str(name) for name in names))


def _variant_of(setting: Setting, device: torch.device, mask: BlockMask | None) -> tuple[_Variant, Setting, str | None]:
    """The first variant that a kernel serves, what it runs, and None; or the first, and why none is served."""
    first_reason = None
    for variant in _VARIANTS:
        if (variant.is_packed and not setting.is_padded) or (variant.has_dropout and setting.dropout_p == 0):
            continue
        found = setting if variant.has_dropout else dataclasses.replace(setting, dropout_p=0.0)
        reason = ours_reason(found, device, mask, variant.is_packed)
        if reason is None:
            return variant, found, None
        first_reason = first_reason or reason
    return _Variant(False, False), setting, first_reason


def _ours(setting: Setting, device: torch.device, mask: BlockMask | None = None) -> Prepared:
    """`attention` or `block_sparse_attention`, packed where there is padding and a kernel for it."""
    variant, found, _ = _variant_of(setting, device, mask)
    seed = torch.tensor([_SEED], dtype=torch.int64, device=device) if found.dropout_p > 0 else None
    options: dict[str, Any] = {"dropout_p": found.dropout_p, "seed": seed}
    if variant.is_packed:
        starts = torch.tensor((0, *setting.lengths)).cumsum(0).to(device, torch.int32)
        options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(setting.lengths))

        def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if mask is None:
                return api.attention_varlen(query, key, value, starts, starts, **options)
            return block_sparse.block_sparse_attention_varlen(query, key, value, starts, starts, mask, **options)
    else:

        def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if mask is None:
                return api.attention(query, key, value, **options)
            return block_sparse.block_sparse_attention(query, key, value, mask, **options)

    return Prepared(
        forward,
        LAYOUTS["packed" if variant.is_packed else "tokens first"],
        "yes" if found.dropout_p > 0 else "no",
        "packed" if variant.is_packed else "no",
        has_known_dropout=True,
        kept=mask,
        details={"backend": _chosen(found, device, mask, variant.is_packed)}
        | ({} if mask is None else {"density": mask.density}),
    )


def _plain(setting: Setting, device: torch.device) -> Prepared:
    return _ours(dataclasses.replace(setting, dropout_p=0.0, is_padded=False), device)


@functools.lru_cache(maxsize=8)
def block_mask_of(name: str, seqlen: int) -> BlockMask:
    """The block mask of the block-sparse method `name`; remembered, and with it the lists that kernels read."""
    if name == "butterfly":
        return BlockMask.butterfly(seqlen, block_size=BLOCK_SIZE)
    if name == "longformer":
        window = (_LONGFORMER_SIDE, _LONGFORMER_SIDE)
        return BlockMask.local_global(
            seqlen, window=window, global_tokens=min(_LONGFORMER_GLOBAL, seqlen), block_size=BLOCK_SIZE
        )
    assert name == "bigbird"
    return BlockMask.bigbird(seqlen, **_BIGBIRD, seed=_SEED, block_size=BLOCK_SIZE)


def _sparse(name: str, label: str) -> Method:
    def refuse(setting: Setting, device: torch.device) -> str | None:
        return _variant_of(setting, device, block_mask_of(name, setting.seqlen))[2]

    def prepare(setting: Setting, device: torch.device) -> Prepared:
        return _ours(setting, device, block_mask_of(name, setting.seqlen))

    return Method(name, label, "block-sparse", _our_version, prepare, refuse, is_ours=True)


EXACT = (
    Method("materialised", "PyTorch, scores stored", "exact", _pytorch_version, _materialised, score_matrices=6),
    Method("sdpa", "PyTorch SDPA", "exact", _pytorch_version, _sdpa),
    Method(
        "tilestream",
        "tilestream, exact",
        "exact",
        _our_version,
        _ours,
        lambda setting, device: _variant_of(setting, device, None)[2],
        is_ours=True,
    ),
    Method(
        "tilestream-plain",
        "tilestream, exact, no dropout, no padding",
        "exact",
        _our_version,
        _plain,
        lambda setting, device: ours_reason(
            dataclasses.replace(setting, dropout_p=0.0, is_padded=False), device, None, is_packed=False
        ),
        is_ours=True,
    ),
)
SPARSE = (
    _sparse("butterfly", "block-sparse, butterfly"),
    _sparse("longformer", "block-sparse, Longformer's pattern"),
    _sparse("bigbird", "block-sparse, BigBird's pattern"),
)
