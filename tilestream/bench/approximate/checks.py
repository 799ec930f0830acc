"""What a result is worth: the correctness gate of exact methods, and errors against exact attention on real states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilestream import api, block_sparse, reference
from tilestream.bench import gate
from tilestream.bench.approximate.methods import Method, Prepared, Target
from tilestream.bench.approximate.setting import Setting
from tilestream.bench.approximate.states import LayerStates
from tilestream.bench.cases import DTYPES
from tilestream.spec import AttentionSpec, default_scale

__all__ = ["LayerErrors", "Truth", "check", "errors_on", "exact_attention", "shared_qk_attention"]

# Of a batch the first two sequences, whose lengths differ: the oracle is slow.
_CHECKED_SEQUENCES = 2
# Rows of the oracle at a time.
_ROWS = 256
# What Reformer gives a token as its score for itself.
_SELF_SCORE = -5e4

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def check(method: Method, setting: Setting, device: torch.device, tensors: _Tensors) -> gate.Gate:
    """Compare an exact method, or one that is exact over kept blocks, with the float64 oracle: out, dq, dk, dv.

    Its first sequences alone, in the directions that are timed, on rows at the beginning, in the middle and at the end.
    Dropout that nobody else can draw is left out.
    """
    asked = dataclasses.replace(setting, batch=min(_CHECKED_SEQUENCES, setting.batch))
    prepared = method.prepare(asked, device)
    if not prepared.has_known_dropout:
        asked = dataclasses.replace(asked, dropout_p=0.0)
        prepared = method.prepare(asked, device)
    query, key, value, dout = (tensor.detach()[: asked.batch] for tensor in tensors)
    spans = _spans(asked, prepared)
    dout = _sampled(dout, spans)
    leaves = [prepared.layout.pack(asked, tensor).requires_grad_() for tensor in (query, key, value)]
    out = prepared.forward(*leaves)
    gradients = torch.autograd.grad(out, leaves, prepared.layout.pack(asked, dout))
    found = [prepared.layout.unpack(asked, tensor.detach()) for tensor in (out, *gradients)]
    exact, plain = (
        _oracle(asked, prepared, (query, key, value, dout), spans, dtype)
        for dtype in (torch.float64, DTYPES[setting.dtype])
    )
    reasons = {}
    for name, result in zip(("out", "dq", "dk", "dv"), found, strict=True):
        if name in ("out", "dq"):
            result = _at(result, spans)
        error = gate.largest_error(result, exact[name])
        allowed = gate.allowed_error(name, plain[name], exact[name], DTYPES[setting.dtype])
        # Written so that a NaN is red.
        if not error <= allowed:
            reasons[name] = f"{name} is off by {error:.3g}, allowed {allowed:.3g}"
    return gate.Gate(gate.largest_error(_at(found[0], spans), exact["out"]), reasons)


@dataclass(frozen=True)
class _Span:
    """Checked rows of a sequence that has so many tokens."""

    entry: int
    rows: slice
    num_tokens: int


def _spans(setting: Setting, prepared: Prepared) -> list[_Span]:
    lengths = (setting.seqlen,) * setting.batch if prepared.padding == "no" else setting.lengths
    return [_Span(entry, rows, length) for entry, length in enumerate(lengths) for rows in gate.row_blocks(length)]


def _sampled(dout: Tensor, spans: Sequence[_Span]) -> Tensor:
    """0 but at the checked rows."""
    sampled = torch.zeros_like(dout)
    for span in spans:
        sampled[span.entry, span.rows] = dout[span.entry, span.rows]
    return sampled


def _at(x: Tensor, spans: Sequence[_Span]) -> Tensor:
    return torch.cat([x[span.entry, span.rows] for span in spans])


def _oracle(
    setting: Setting, prepared: Prepared, tensors: _Tensors, spans: Sequence[_Span], dtype: torch.dtype
) -> dict[str, Tensor]:
    """out and dq at the checked rows, dk and dv everywhere."""
    query, key, value, dout = tensors
    has_dropout = prepared.dropout == "yes" and setting.dropout_p > 0
    spec = AttentionSpec(scale=default_scale(setting.head_dim), dropout_p=setting.dropout_p if has_dropout else 0.0)
    outs, dqs = [], []
    dk, dv = (torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) for tensor in (key, value))
    for span in spans:
        entry, rows, keys = slice(span.entry, span.entry + 1), span.rows, slice(0, span.num_tokens)
        q, k, v = (
            tensor[entry, part].to(dtype).requires_grad_()
            for tensor, part in ((query, rows), (key, keys), (value, keys))
        )
        shown = None
        if prepared.kept is not None:
            reach = range(rows.start, rows.stop), range(span.num_tokens)
            # Made on the CPU, where the lists of a mask are.
            shown = prepared.kept.visible(0, 0, *reach, torch.device("cpu"))[None, None].to(query.device)
        out = reference.attention_rows(
            q,
            k,
            v,
            spec,
            shift=0,
            seed=torch.tensor([prepared.seed], device=query.device) if has_dropout else None,
            first_row=rows.start,
            batch_index=torch.tensor([span.entry], device=query.device),
            shown=shown,
            dtype=dtype,
        ).out
        gradients = torch.autograd.grad(out, (q, k, v), dout[entry, rows].to(dtype))
        outs.append(out.detach()[0])
        dqs.append(gradients[0][0])
        dk[entry, keys] += gradients[1]
        dv[entry, keys] += gradients[2]
    return {"out": torch.cat(outs), "dq": torch.cat(dqs), "dk": dk, "dv": dv}


# ---- on real states


@dataclass(frozen=True)
class LayerErrors:
    """Of one layer: the relative error of out, in Frobenius norm over all heads, and of the head where it is worst.

    `hidden_mass` is how much of the attention that exact softmax gives lies outside of what a method looks at, on
    average over queries and heads: the total variation distance. None where a method looks at everything.
    """

    layer: int
    error: float
    worst_head: float
    hidden_mass: float | None


class Truth:
    """The first `num_tokens` of a layer, and the right answers about them, each made when it is first asked for."""

    def __init__(self, layer: LayerStates, num_tokens: int, device: torch.device) -> None:
        self.layer, self.device = layer.layer, device
        self.inputs = layer.heads(num_tokens, torch.float32, device)
        self._outs: dict[Target, Tensor] = {}
        self._lse: Tensor | None = None

    def out(self, target: Target) -> Tensor:
        """(1, N, H, D), float64."""
        if target not in self._outs:
            attend = shared_qk_attention if target == "shared-qk" else exact_attention
            self._outs[target] = attend(*self.inputs)
        return self._outs[target]

    @property
    def lse(self) -> Tensor:
        """(1, H, N), of exact attention."""
        if self._lse is None:
            self._lse = api.attention_with_lse(*self.inputs).lse
        return self._lse


def errors_on(method: Method, truth: Truth) -> LayerErrors:
    """What `method` gives up on a layer, computed in float32, without dropout and padding."""
    query, key, value = truth.inputs
    _, seqlen, num_heads, head_dim = query.shape
    setting = Setting(1, seqlen, num_heads, head_dim, dropout_p=0.0, is_padded=False)
    prepared = method.prepare(setting, truth.device)
    with torch.inference_mode():
        out = prepared.forward(*(prepared.layout.pack(setting, tensor) for tensor in (query, key, value)))
        found = prepared.layout.unpack(setting, out).double()
        wanted = truth.out(method.target)
        # (1, N, H, D): norms over tokens and head_dim.
        missed, size = ((found - wanted).square().sum((0, 1, 3)), wanted.square().sum((0, 1, 3)))
        hidden_mass = None
        if prepared.kept is not None:
            kept = block_sparse.block_sparse_attention_with_lse(query, key, value, prepared.kept).lse
            hidden_mass = max(0.0, float((1 - (kept.double() - truth.lse.double()).exp()).mean()))
        return LayerErrors(
            truth.layer, float((missed.sum() / size.sum()).sqrt()), float((missed / size).sqrt().max()), hidden_mass
        )


def exact_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention in float64 by the oracle, some rows at a time: (B, N, H, D)."""
    spec = AttentionSpec(scale=default_scale(query.shape[-1]))
    return torch.cat(
        [reference.attention_rows(rows, key, value, spec, shift=0).out for rows in query.split(_ROWS, dim=1)], dim=1
    )


def shared_qk_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What Reformer approximates, in float64: queries are the keys, of length 1, and a token sees itself last.

    `key` is not read. arXiv:2001.04451, section 2.
    """
    q, v = query.double().transpose(1, 2), value.double().transpose(1, 2)
    s = q @ torch.nn.functional.normalize(q, dim=-1).transpose(-1, -2) * default_scale(query.shape[-1])
    s.diagonal(dim1=-2, dim2=-1).fill_(_SELF_SCORE)
    return (torch.softmax(s, dim=-1) @ v).transpose(1, 2)
