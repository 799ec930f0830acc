"""What a regression test is made of: a seeded `Draw`, a `Call`, and the comparison of a call with the oracle.

Each test replays an input that broke some attention library; its docstring or decorator carries the address of the
report. The values depend only on the id in the test's name, so they are the same on every device.

The rule: an error against the float64 oracle may be a small multiple of the error of `rounded.attention`, which is
materialised attention with the roundings that a tiled kernel cannot avoid; NaN and infinities must stand in the same
places; and the call must leave its inputs alone.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import rounded
import torch
from torch import Tensor

import tilestream
from tilestream import reference
from tilestream.errors import TilestreamError

FLASH = "https://github.com/Dao-AILab/flash-attention/"
FLASHINFER = "https://github.com/flashinfer-ai/flashinfer/"
PYTORCH = "https://github.com/pytorch/pytorch/"
TRANSFORMERS = "https://github.com/huggingface/transformers/"
TRITON = "https://github.com/triton-lang/triton/"
XFORMERS = "https://github.com/facebookresearch/xformers/"

INF = float("inf")
_QKV = ("query", "key", "value")
_FLOAT32_EPS = torch.finfo(torch.float32).eps


@dataclass
class Call:
    """One call of `tilestream.attention_with_lse`, or of its varlen twin where `cu_seqlens` is given."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    dout: Tensor | None = None
    cu_seqlens: tuple[Tensor, Tensor] | None = None
    max_seqlens: tuple[Any, Any] = (None, None)
    grads: tuple[str, ...] = _QKV  # what to differentiate; may also name bias and sinks

    def tensors(self) -> dict[str, Tensor]:
        """Every input tensor by its argument's name."""
        optional = {name: given for name, given in self.options.items() if isinstance(given, Tensor)}
        return {"query": self.query, "key": self.key, "value": self.value, **optional}


class Draw:
    """Seeded inputs on the device under test; draws come from a CPU generator, so every device sees the same."""

    def __init__(self, case_id: str, device: torch.device, dtype: torch.dtype | None) -> None:
        self.id = case_id
        self.device = device
        self._dtype = dtype
        self.generator = torch.Generator().manual_seed(_seed(case_id))

    @property
    def dtype(self) -> torch.dtype:
        assert self._dtype is not None, "a test over fixed dtypes passes dtype= with every draw"
        return self._dtype

    def randn(self, *shape: int, dtype: torch.dtype | None = None, spread: float = 1.0) -> Tensor:
        """Normal values of standard deviation `spread`."""
        values = torch.randn(*shape, generator=self.generator) * spread
        return values.to(dtype or self.dtype).to(self.device)

    def dense(
        self,
        batch: int,
        seqlens: tuple[int, int],
        heads: tuple[int, int],
        widths: int | tuple[int, int],
        *,
        dtype: torch.dtype | None = None,
        spread: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value for (seqlen_q, seqlen_k), (num_heads_q, num_heads_kv), (head_dim, head_dim_v)."""
        (seqlen_q, seqlen_k), (num_heads_q, num_heads_kv) = seqlens, heads
        head_dim, head_dim_v = (widths, widths) if isinstance(widths, int) else widths
        return (
            self.randn(batch, seqlen_q, num_heads_q, head_dim, dtype=dtype, spread=spread),
            self.randn(batch, seqlen_k, num_heads_kv, head_dim, dtype=dtype, spread=spread),
            self.randn(batch, seqlen_k, num_heads_kv, head_dim_v, dtype=dtype),
        )

    def packed(
        self,
        lengths_q: Sequence[int],
        lengths_k: Sequence[int],
        heads: tuple[int, int],
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        spread: float = 1.0,
        **fields: Any,
    ) -> Call:
        """A varlen call of sequences with these lengths; `fields` are further fields of `Call`."""
        query, key, value = self.dense(1, (sum(lengths_q), sum(lengths_k)), heads, head_dim, dtype=dtype, spread=spread)
        longest = (max(lengths_q, default=0), max(lengths_k, default=0))
        cu_seqlens = (self.int32(starts(lengths_q)), self.int32(starts(lengths_k)))
        given = {"cu_seqlens": cu_seqlens, "max_seqlens": longest, **fields}
        return Call(query[0], key[0], value[0], **given)

    def int32(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)


def starts(lengths: Sequence[int]) -> list[int]:
    """Offsets of packed sequences: [0, l0, l0 + l1, ...]."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def regression(
    source: str,
    *,
    times_out: float = 3.0,
    times_grad: float = 4.0,
    atol_grad: float = 0.0,
    check_lse: bool = True,
    may_refuse: bool = False,
) -> Callable[[Callable[[Draw], Call]], Callable[..., None]]:
    """Turn a function that makes a `Call` into the test that compares it with the oracle.

    Args:
        source: address of the report.
        times_out, times_grad: allowed multiples of the error of rounded materialised attention.
        atol_grad: further absolute error of a gradient, where the report's input makes one unavoidable.
        check_lse: False where lse cannot hold what the row needs (scores near the end of float32).
        may_refuse: a TilestreamError is as good as a right result.
    """

    def make_test(build: Callable[[Draw], Call]) -> Callable[..., None]:
        def check_call(draw: Draw, backend: str) -> None:
            call = build(draw)
            try:
                faults = find_faults(call, draw.id, backend, (times_out, times_grad), atol_grad, check_lse)
            except TilestreamError:
                if not may_refuse:
                    raise
                return
            assert not faults, f"{build.__doc__}\n{source}\n" + "\n".join(faults)

        # The builder's parameter names the fixture it takes: `draw` (every dtype) or `fixed_draw`.
        if "fixed_draw" in inspect.signature(build).parameters:

            def test(fixed_draw: Draw, backend: str) -> None:
                check_call(fixed_draw, backend)

        else:

            def test(draw: Draw, backend: str) -> None:  # type: ignore[misc]
                check_call(draw, backend)

        test.__name__ = test.__qualname__ = build.__name__
        test.__module__ = build.__module__
        test.__doc__ = f"{build.__doc__}\n\nSource: {source}"
        return test

    return make_test


def find_faults(
    call: Call, case_id: str, backend: str, times: tuple[float, float], atol_grad: float, check_lse: bool
) -> list[str]:
    """What is wrong with one call: result, lse, gradients, types, and inputs that changed."""
    before = {name: tensor.detach().clone() for name, tensor in call.tensors().items()}
    leaves, output = _run(call, backend)
    if call.dout is None:
        generator = torch.Generator().manual_seed(_seed(case_id + "dout"))
        shape = (*call.query.shape[:-1], call.value.shape[-1])
        call.dout = torch.randn(*shape, generator=generator).to(call.query.dtype).to(call.query.device)
    dout_before = call.dout.clone()
    gradients = _differentiate(output.out, leaves, call.dout)

    expected, expected_gradients = oracle(call)
    baseline, baseline_gradients = rounded.attention(call)
    dtype = call.query.dtype
    faults = [
        f"out has dtype {output.out.dtype}" if output.out.dtype != dtype else "",
        f"out is on {output.out.device}" if output.out.device != call.query.device else "",
        _compare("out", output.out.detach(), expected.out, baseline, dtype, times[0], 0.0),
    ]
    if check_lse:
        faults.append(_compare_lse(output.lse.detach(), expected.lse, dtype))
    # A backward that makes the scores again from a float32 lse is off by about eps * |lse| (capped, so that a lost row
    # sum still shows), and a row with one key need not give an exact 0.
    lse_size = min(_largest(expected.lse), 4096.0)
    one_key = _FLOAT32_EPS * _largest(call.dout) * _largest(call.value)
    for name, gradient in gradients.items():
        wanted = expected_gradients[name]
        slack = atol_grad + 8 * _FLOAT32_EPS * lse_size * _largest(wanted) + (one_key if one_key < 1e-4 else 0.0)
        leaf_dtype = leaves[name].dtype
        faults.append(f"d{name} has dtype {gradient.dtype}" if gradient.dtype != leaf_dtype else "")
        faults.append(_compare(f"d{name}", gradient, wanted, baseline_gradients[name], leaf_dtype, times[1], slack))
    faults += [
        f"{name} was changed by the call" if not _is_identical(tensor.detach(), before[name]) else ""
        for name, tensor in call.tensors().items()
    ]
    faults.append("dout was changed by the backward" if not _is_identical(call.dout, dout_before) else "")
    return [fault for fault in faults if fault]


def oracle(call: Call) -> tuple[tilestream.AttentionOutput, dict[str, Tensor]]:
    """The float64 output and gradients of one call."""
    given = {name: tensor.detach().to(torch.float64) for name, tensor in call.tensors().items()}
    leaves = {name: given[name].requires_grad_() for name in call.grads}
    options = {**call.options, **{name: given[name] for name in given if name not in _QKV}}
    arguments = [given[name] for name in _QKV]
    if call.cu_seqlens is None:
        expected = reference.attention(*arguments, **options)
    else:
        expected = reference.attention_varlen(*arguments, *call.cu_seqlens, **options)
    gradients = {}
    if leaves:
        assert call.dout is not None
        gradients = _differentiate(expected.out, leaves, call.dout.to(torch.float64))
    return tilestream.AttentionOutput(expected.out.detach(), expected.lse.detach()), gradients


def assert_near(
    name: str, got: Tensor, wanted: Tensor, dtype: torch.dtype, *, rtol: float | None = None, atol: float = 0.0
) -> None:
    """`got` equals `wanted` up to `dtype`'s precision, relative to the largest wanted value."""
    if rtol is None:
        rtol = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    assert got.shape == wanted.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    assert _has_same_nonfinite(got, wanted), f"{name}: NaN or infinity in the wrong places"
    error, allowed = _error(got, wanted), rtol * max(_largest(wanted), 1e-3) + atol
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def _run(call: Call, backend: str) -> tuple[dict[str, Tensor], tilestream.AttentionOutput]:
    given = {name: tensor.detach() for name, tensor in call.tensors().items()}
    leaves = {name: given[name].requires_grad_() for name in call.grads}
    options = {**call.options, **{name: given[name] for name in given if name not in _QKV}, "backend": backend}
    arguments = [given[name] for name in _QKV]
    if call.cu_seqlens is None:
        return leaves, tilestream.attention_with_lse(*arguments, **options)
    limits = {"max_seqlen_q": call.max_seqlens[0], "max_seqlen_k": call.max_seqlens[1]}
    return leaves, tilestream.attention_varlen_with_lse(*arguments, *call.cu_seqlens, **limits, **options)


def _differentiate(out: Tensor, leaves: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    if not leaves:
        return {}
    gradients = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _compare(
    name: str, got: Tensor, wanted: Tensor, baseline: Tensor, dtype: torch.dtype, times: float, slack: float
) -> str:
    if got.shape != wanted.shape:
        return f"{name}: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    if not _has_same_nonfinite(got, wanted):
        return f"{name}: {int((~torch.isfinite(got)).sum())} NaN or infinite values, some in the wrong places"
    ulps = 32.0 if dtype in (torch.float32, torch.float64) else 2.0
    floor = ulps * torch.finfo(dtype).eps * max(_largest(wanted), 1e-30)
    error, unavoidable = _error(got, wanted), _error(baseline, wanted)
    allowed = times * unavoidable + floor + slack
    if error <= allowed:
        return ""
    return f"{name}: error {error:.3g}, allowed {allowed:.3g}, rounded materialised attention {unavoidable:.3g}"


def _compare_lse(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> str:
    if got.dtype != torch.float32:
        return f"lse has dtype {got.dtype}"
    if got.shape != wanted.shape:
        return f"lse: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    if not _has_same_nonfinite(got, wanted):
        return "lse: -inf in the wrong places; it belongs to rows without keys"
    error = _error(got, wanted)
    allowed = (2e-5 if dtype == torch.float32 else 3e-3) * (1.0 + _largest(wanted))
    return "" if error <= allowed else f"lse: error {error:.3g}, allowed {allowed:.3g}; a factor 1.4427 means base 2"


def _seed(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def _largest(values: Tensor) -> float:
    finite = values.detach().double()
    finite = finite[torch.isfinite(finite)]
    return finite.abs().max().item() if finite.numel() else 0.0


def _error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference where both are finite."""
    difference = (got.detach().double() - wanted.detach().double()).abs()
    difference = difference[torch.isfinite(got) & torch.isfinite(wanted)]
    return difference.max().item() if difference.numel() else 0.0


def _has_same_nonfinite(got: Tensor, wanted: Tensor) -> bool:
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    return all(torch.equal(is_kind(got), is_kind(wanted)) for is_kind in kinds)


def _is_identical(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (torch.isnan(one) & torch.isnan(other))).all())
