"""Turns a `Case` into tensors that attack: strided, in larger buffers, NaN in all that must not be read."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Case
from torch import Tensor

import tilestream
from tilestream import reference
from tilestream.spec import default_scale
from tilestream.state import AttentionOutput

__all__ = ["LARGE", "CaseInputs", "embed", "make_inputs", "visible_mask"]

_NAN = float("nan")
# For what no query sees: the native kernels pass a NaN on to the PyTorch loop, and a large number not.
LARGE = 3e4
# Tokens after the last cu_seqlens entry, which belong to no sequence.
_TAIL_TOKENS = 3


@dataclass
class CaseInputs:
    """The tensors of one case. `leaves` are differentiable; `rest` are the other arguments, by name."""

    case: Case
    leaves: dict[str, Tensor]
    rest: dict[str, Any]
    cu_seqlens: tuple[Tensor, Tensor] | None
    dout: Tensor
    dlse: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: str) -> tuple[AttentionOutput, dict[str, Tensor]]:
        """The library's result and gradients."""
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in self.leaves.items()}
        result = self._result(leaves, backend)
        return result, self._backward(result, leaves)

    def forward(self, backend: str) -> AttentionOutput:
        """The library's result, of leaves that need no gradients."""
        return self._result(self.leaves, backend)

    def _result(self, leaves: dict[str, Tensor], backend: str) -> AttentionOutput:
        name = "attention_with_lse" if self.cu_seqlens is None else "attention_varlen_with_lse"
        call = getattr(tilestream, name if self.case.mask is None else f"block_sparse_{name}")
        deterministic = {"deterministic": True} if self.case.deterministic else {}
        return self._call(call, leaves, backend=backend, **deterministic)

    def oracle(
        self, dtype: torch.dtype, cotangents: tuple[Tensor, Tensor] | None = None
    ) -> tuple[AttentionOutput, dict[str, Tensor]]:
        """The materialised result and gradients, every operation in `dtype`; of (dout, dlse) or of `cotangents`."""
        leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in self.leaves.items()}
        result = self._reference(leaves, dtype)
        if not result.out.requires_grad:  # no sequence at all: nothing was computed from the leaves
            return result, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        return result, self._backward(result, leaves, cotangents)

    def _reference(self, leaves: dict[str, Tensor], dtype: torch.dtype) -> AttentionOutput:
        call = reference.attention if self.cu_seqlens is None else reference.attention_varlen
        return self._call(call, leaves, dtype=dtype)

    def _call(self, call: Callable[..., AttentionOutput], leaves: dict[str, Tensor], **more: Any) -> AttentionOutput:
        positional = [leaves[name] for name in ("query", "key", "value")]
        keywords = {name: leaf for name, leaf in leaves.items() if name in ("bias", "sinks")}
        return call(*positional, *(self.cu_seqlens or ()), **keywords, **self.rest, **self.arguments, **more)

    def largest_terms(self) -> dict[str, float]:
        """Size of what cancels in out, P * V, and in a gradient, P * (dP - delta): its rounding stays when it is 0."""
        tensors = {name: leaf.detach().to(torch.float64).nan_to_num(nan=0.0) for name, leaf in self.leaves.items()}
        dout, value = self.dout.to(torch.float64).flatten(0, -3), tensors["value"].flatten(0, -3)
        value = value.repeat_interleave(dout.shape[1] // value.shape[1], dim=1)
        products = torch.einsum("ihe,jhe->hij", dout, value)
        dp = float(products.abs().max()) / (1.0 - self.case.dropout_p) if products.numel() else 0.0
        scale = default_scale(self.case.widths[0]) if self.case.scale is None else abs(self.case.scale)
        sizes = {name: float(x.abs().max()) if x.numel() else 0.0 for name, x in tensors.items()}
        return {
            "out": self._largest_weighted_values(),
            "query": scale * dp * sizes["key"],
            "key": scale * dp * sizes["query"],
            "value": 0.0,
            "bias": dp,
            "sinks": dp,
        }

    def _largest_weighted_values(self) -> float:
        """The largest sum of P times the size of V."""
        leaves = {name: leaf.detach().to(torch.float64) for name, leaf in self.leaves.items()}
        out = self._reference({**leaves, "value": leaves["value"].abs()}, torch.float64).out
        finite = out[out.isfinite()]
        return float(finite.max()) if finite.numel() else 0.0

    def saved_state_gradients(self, draw: int | None = None) -> dict[str, Tensor]:
        """The exact gradients of a backward that reads `out` and `lse` rounded to their dtypes, in float64.

        With `draw` out is off by what materialised attention loses at its dtype, which rounds P as kernels do, and each
        loss has a sign of its own, drawn with that seed: as likely a loss as the real one.

        That is what no backward without the score matrix can be better than. Rounding lse by e scales row i of P by
        exp(-e); rounding out changes delta by rowsum((rounded - out) * dout). Both together are the oracle's gradients
        for other cotangents: ``exp(-e) * dout`` and ``exp(-e) * (dlse - change of delta)``.
        """
        with torch.no_grad():
            exact, _ = self.oracle(torch.float64)
            lse_dtype = torch.float64 if self.case.dtype == torch.float64 else torch.float32
            rounding = (exact.lse.to(lse_dtype) - exact.lse).nan_to_num(nan=0.0)
            dout = self.dout.to(torch.float64)
            left = exact.out.to(self.case.dtype) if draw is None else self.oracle(self.case.dtype)[0].out
            delta_change = ((left - exact.out) * dout).sum(dim=-1).transpose(-1, -2)
            dlse = self.dlse.to(torch.float64) if self.case.with_dlse else torch.zeros_like(exact.lse)
            if draw is not None:
                generator = torch.Generator().manual_seed(draw)
                signs = torch.randint(0, 2, rounding.shape, generator=generator).to(rounding) * 2 - 1
                rounding, delta_change = rounding * signs, delta_change * signs
            factor = torch.exp(-rounding)
            cotangents = (factor.transpose(-1, -2).unsqueeze(-1) * dout, factor * (dlse - delta_change))
        return self.oracle(torch.float64, cotangents)[1]

    def _backward(
        self, result: AttentionOutput, leaves: dict[str, Tensor], cotangents: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Tensor]:
        dout, dlse = cotangents or (self.dout, self.dlse if self.case.with_dlse else None)
        outputs = [(result.out, dout.to(result.out.dtype))]
        if dlse is not None:
            outputs.append((result.lse, dlse.to(result.lse.dtype)))
        gradients = torch.autograd.grad(
            [tensor for tensor, _ in outputs],
            list(leaves.values()),
            [gradient for _, gradient in outputs],
            # Without dlse, an empty product may not depend on the sinks at all.
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(leaves, gradients, strict=True))

    def fingerprint(self) -> list[Tensor]:
        """The bytes of every input's whole storage, surroundings included."""
        tensors = [*self.leaves.values(), *(self.cu_seqlens or ()), self.dout, self.dlse]
        tensors += [value for value in self.rest.values() if isinstance(value, Tensor)]
        return [torch.tensor([], dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).clone() for t in tensors]


def make_inputs(case: Case, device: torch.device, unseen: float = _NAN) -> CaseInputs:
    """The inputs of `case`, the same values on every device; what no query sees holds `unseen`."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths_q, lengths_k = [m for m, _ in case.sequences], [n for _, n in case.sequences]
    num_heads, num_heads_kv = case.num_heads_q, case.heads[0]
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    lse_shape: tuple[int, ...]
    if case.layout == "dense":
        rows, keys = (case.batch, case.lengths[0]), (case.batch, case.lengths[1])
        cu_seqlens, lse_shape = None, (case.batch, num_heads, case.lengths[0])
    else:
        rows, keys = (sum(lengths_q) + _TAIL_TOKENS,), (sum(lengths_k) + _TAIL_TOKENS,)
        cu_seqlens, lse_shape = (_cumulative(lengths_q, device), _cumulative(lengths_k, device)), (num_heads, *rows)
    query = randn(*rows, num_heads, case.widths[0])
    key = randn(*keys, num_heads_kv, case.widths[0])
    value = randn(*keys, num_heads_kv, case.widths[1])
    bias = None if case.bias is None else _bias(case, randn)
    _poison_unseen(case, (query, key, value), bias, unseen)

    leaves = {
        name: embed(tensor.to(case.dtype), case.memory)
        for name, tensor in (("query", query), ("key", key), ("value", value))
    }
    if bias is not None:
        leaves["bias"] = embed(bias.to(torch.float32 if case.bias_dtype == "float32" else case.dtype), case.memory)
    if case.sinks is not None:
        leaves["sinks"] = randn(num_heads)
        if case.sinks == "extreme":
            leaves["sinks"][0::2], leaves["sinks"][1::2] = 40.0, -float("inf")
    rest: dict[str, Any] = {}
    if case.alibi is not None:
        batch = () if case.alibi == "heads" else (len(case.sequences),)
        rest["alibi_slopes"] = 0.2 * torch.rand(*batch, num_heads, generator=generator)
    if case.dropout_p > 0:
        rest["seed"] = torch.tensor([0x1234_5678_9ABC_DEF0 + case.lengths[0]])
    dout = randn(*query.shape[:-1], case.widths[1]).to(case.dtype)
    dout = embed(dout, "strided_last") if case.dout == "strided" else dout.flatten()[:1].sum().expand(dout.shape)
    return CaseInputs(
        case=case,
        leaves={name: _move(leaf, device) for name, leaf in leaves.items()},
        rest={name: _move(tensor, device) for name, tensor in rest.items()},
        cu_seqlens=cu_seqlens,
        dout=_move(dout, device),
        dlse=_move(embed(randn(*lse_shape)[None], "strided_last")[0], device),
        arguments=_arguments(case),
    )


def _arguments(case: Case) -> dict[str, Any]:
    """The plain keyword arguments that differ from their defaults."""
    names = ("causal", "window", "scale", "softcap", "dropout_p", "shift")
    given = {name: getattr(case, name) for name in names if getattr(case, name) != getattr(Case, name)}
    return given if case.mask is None else {**given, "block_mask": case.block_mask}


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` with its whole storage on `device`; Tensor.to would pack a view."""
    if tensor.device == device:
        return tensor
    storage = torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def embed(tensor: Tensor, memory: str) -> Tensor:
    """A view of the same values in a larger, NaN-filled buffer; the axes are (..., tokens, heads, width)."""
    *lead, tokens, heads, width = tensor.shape

    def buffer(*shape: int) -> Tensor:
        return torch.full((*lead, *shape), _NAN, dtype=tensor.dtype)

    if memory == "head_major":
        view = buffer(heads, tokens, width).transpose(-2, -3)
    elif memory == "packed_qkv":
        view = buffer(tokens, heads, 3, width)[..., 1, :]
    elif memory == "odd_offset":
        view = torch.full((tensor.numel() + 3,), _NAN, dtype=tensor.dtype)[3:].view(tensor.shape)
    elif memory == "strided_last":
        view = buffer(heads, width, tokens).movedim(-1, -3)
    else:
        assert memory == "padded_tokens"
        view = buffer(heads, tokens + 7, width + 5)[..., 2 : tokens + 2, 1 : width + 1].transpose(-2, -3)
    return view.copy_(tensor)


def _bias(case: Case, randn: Callable[..., Tensor]) -> Tensor:
    assert case.bias is not None
    longest = [max((lengths[side] for lengths in case.sequences), default=case.lengths[side]) for side in (0, 1)]
    sizes = (len(case.sequences), case.num_heads_q, *longest)
    shape = [1 if axis == "1" else size for axis, size in zip(case.bias, sizes, strict=True)]
    bias = randn(*shape)
    # Every fifth entry hides its pairs; a bias of a single entry would hide everything.
    if bias.numel() > 1:
        bias.view(-1)[::5] = -float("inf")
    return bias


def visible_mask(case: Case, seqlen_q: int, seqlen_k: int) -> Tensor:
    """bool (seqlen_q, seqlen_k), pair by pair from the definition of the band."""
    shift = seqlen_k - seqlen_q if case.shift is None else case.shift
    distance = torch.arange(seqlen_k)[None, :] - (torch.arange(seqlen_q)[:, None] + shift)
    left, right = (float("inf") if limit is None else limit for limit in (case.band.left, case.band.right))
    return (distance >= -left) & (distance <= right)


def _poison_unseen(case: Case, operands: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, unseen: float) -> None:
    """`unseen` into keys and values that no query sees and into bias that no pair reads, NaN into stray tokens."""
    is_read = None if bias is None else torch.zeros(bias.shape, dtype=torch.bool)
    shown = None if case.block_mask is None else case.block_mask.to_dense()
    start_k = 0
    for b, (seqlen_q, seqlen_k) in enumerate(case.sequences):
        pairs = visible_mask(case, seqlen_q, seqlen_k).expand(case.num_heads_q, -1, -1)
        if shown is not None:
            pairs = pairs & shown[b if shown.shape[0] > 1 else 0, :, :seqlen_q, :seqlen_k]
        if bias is not None and is_read is not None:
            corner = _corner(bias, b, seqlen_q, seqlen_k)
            _corner(is_read, b, seqlen_q, seqlen_k).logical_or_(_reduce_to(pairs, corner.shape))
            pairs = pairs & (corner != -float("inf"))
        is_seen = pairs.any(dim=-2).reshape(*case.heads, seqlen_k).any(dim=1).T
        for tensor in operands[1:]:
            tokens = tensor[b] if case.layout == "dense" else tensor[start_k : start_k + seqlen_k]
            tokens[~is_seen] = unseen
        start_k += seqlen_k
    if case.layout == "varlen":
        for tensor in operands:
            tensor[tensor.shape[0] - _TAIL_TOKENS :] = _NAN
    if bias is not None and is_read is not None:
        bias[~is_read & (bias != -float("inf"))] = unseen


def _corner(bias: Tensor, b: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The part (heads or 1, seqlen_q or 1, seqlen_k or 1) of the bias that sequence b reads."""
    rows = seqlen_q if bias.shape[2] > 1 else 1
    keys = seqlen_k if bias.shape[3] > 1 else 1
    return bias[b if bias.shape[0] > 1 else 0, :, :rows, :keys]


def _reduce_to(pairs: Tensor, shape: torch.Size) -> Tensor:
    """Which entries of a tensor of `shape` are read, when it broadcasts against the visible `pairs`."""
    for axis, size in enumerate(shape):
        if size == 1:
            pairs = pairs.any(dim=axis, keepdim=True)
    return pairs
