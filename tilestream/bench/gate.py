"""The correctness gate: no number without agreement with the float64 oracle.

Long cases are checked on blocks of query rows at the beginning, in the middle and at the end, so that the oracle stays
cheap: the output on those rows, and the gradients that a loss over those rows alone sends to query, key and value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilestream import reference
from tilestream.bench.cases import DTYPES, Case, normal_numbers
from tilestream.bench.providers import Provider
from tilestream.problem import AttentionInputs

__all__ = [
    "Gate",
    "Oracle",
    "allowed_error",
    "check",
    "checked_case",
    "compare",
    "consult",
    "largest_error",
    "row_blocks",
]

_ROWS_PER_BLOCK = 16
# With a block mask each block of rows sees other keys.
_NUM_BLOCKS, _NUM_MASKED_BLOCKS = 3, 9
_MAX_UNSAMPLED_ROWS = 512
# Twice the error of the same rows materialised at the input precision, plus the rounding of the result.
_ERROR_FACTOR = 2.0
_ROUNDING_ULPS = 4.0
# A gradient is a sum over all queries or keys in float32 (float64 for float64), in another order than the oracle's:
# as in the conformance test, units in the last place of its largest entry. The rounding of out and lse between forward
# and backward, which materialised attention does not have, is of this size too.
_SUMMATION_ULPS = 32.0


@dataclass(frozen=True)
class Gate:
    """Whether a provider agrees; `error` is its largest absolute error against float64 in out, on the checked rows."""

    error: float
    # What is wrong, by result: out, dq, dk, dv.
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def is_green(self) -> bool:
        return not self.reasons

    @property
    def reason(self) -> str | None:
        return "; ".join(self.reasons.values()) or None

    @property
    def of_forward(self) -> Gate:
        return Gate(self.error, {name: reason for name, reason in self.reasons.items() if name == "out"})


@dataclass(frozen=True)
class Oracle:
    """Inputs of a case, and the right results of its checked rows: in float64, and at the input precision."""

    case: Case
    inputs: AttentionInputs
    blocks: list[slice]
    dout: Tensor
    exact: dict[str, Tensor]
    plain: dict[str, Tensor]

    @property
    def of_forward(self) -> Oracle:
        exact, plain = ({"out": results["out"]} for results in (self.exact, self.plain))
        return replace(self, exact=exact, plain=plain)


def check(case: Case, provider: Provider, device: torch.device, with_gradients: bool) -> Gate:
    """Run `provider` on `case` once and compare; without dropout, where its mask is not ours."""
    return compare(consult(checked_case(case, provider), device, with_gradients), provider)


def checked_case(case: Case, provider: Provider) -> Case:
    """`case`, without the dropout of a provider whose mask nobody else can make."""
    return replace(case, dropout_p=0.0) if provider.draws_own_dropout else case


def consult(case: Case, device: torch.device, with_gradients: bool, inputs: AttentionInputs | None = None) -> Oracle:
    """What every provider of `case` is compared with, on `inputs` or on new ones."""
    inputs = case.make_inputs(device) if inputs is None else inputs
    blocks = row_blocks(case.seqlen_q, is_masked=bool(case.mask))
    dout = _sampled_dout(case, blocks, device)
    exact, plain = (
        _right_results(case, inputs, blocks, dout, dtype, with_gradients)
        for dtype in (torch.float64, DTYPES[case.dtype])
    )
    return Oracle(case, inputs, blocks, dout, exact, plain)


def compare(oracle: Oracle, provider: Provider) -> Gate:
    """Run `provider` once on what the oracle was asked; in inference mode, as it is timed, where that is out alone."""
    case, inputs, blocks, exact, plain = oracle.case, oracle.inputs, oracle.blocks, oracle.exact, oracle.plain
    with_gradients = "dq" in exact
    leaves = tuple(tensor.requires_grad_(with_gradients) for tensor in (inputs.query, inputs.key, inputs.value))
    with torch.inference_mode(not with_gradients):
        out = provider.prepare(case, inputs)(*leaves)
    found = {"out": torch.cat([out.detach()[:, rows] for rows in blocks], dim=1)}
    if with_gradients:
        found |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, oracle.dout), strict=True))
        found["dq"] = torch.cat([found["dq"][:, rows] for rows in blocks], dim=1)
    reasons = {}
    for name, tensor in found.items():
        error = largest_error(tensor, exact[name])
        allowed = allowed_error(name, plain[name], exact[name], DTYPES[case.dtype])
        # Written so that a NaN is red.
        if not error <= allowed:
            reasons[name] = f"{name} is off by {error:.3g}, allowed {allowed:.3g}"
    return Gate(largest_error(found["out"], exact["out"]), reasons)


def row_blocks(seqlen_q: int, is_masked: bool = False) -> list[slice]:
    """All rows of a short case, some blocks of a long one from the first rows to the last."""
    count = _NUM_MASKED_BLOCKS if is_masked else _NUM_BLOCKS
    if seqlen_q <= _MAX_UNSAMPLED_ROWS:
        return [slice(0, seqlen_q)]
    starts = ((seqlen_q - _ROWS_PER_BLOCK) * k // (count - 1) for k in range(count))
    return [slice(start, start + _ROWS_PER_BLOCK) for start in starts]


def _shown(case: Case, rows: slice, device: torch.device) -> Tensor | None:
    """bool (B | 1, H | 1, rows, N): what the block mask shows, pair by pair, whatever its blocks."""
    if (mask := case.block_mask) is None:
        return None
    b, h, i, j = (
        torch.arange(start, stop, device=device)
        for start, stop in ((0, mask.batch), (0, mask.num_heads), (rows.start, rows.stop), (0, case.seqlen_k))
    )
    shown = mask.rule(b[:, None, None, None], h[:, None, None], i[:, None], j)
    return shown.expand(len(b), len(h), len(i), len(j))


def _sampled_dout(case: Case, blocks: list[slice], device: torch.device) -> Tensor:
    """A random gradient of out that is 0 outside `blocks`."""
    dtype = DTYPES[case.dtype]
    randn = normal_numbers(device, dtype, seed=1)
    dout = torch.zeros(case.batch, case.seqlen_q, case.num_heads_q, case.head_dim_v, device=device, dtype=dtype)
    for rows in blocks:
        dout[:, rows] = randn(*dout[:, rows].shape)
    return dout


def _right_results(
    case: Case, inputs: AttentionInputs, blocks: list[slice], dout: Tensor, dtype: torch.dtype, with_gradients: bool
) -> dict[str, Tensor]:
    """out on the rows of `blocks`, and dq there, and dk, dv of those rows together."""
    key, value = (tensor.detach().to(dtype).requires_grad_(with_gradients) for tensor in (inputs.key, inputs.value))
    outs, dqs, dk, dv = [], [], torch.zeros_like(key), torch.zeros_like(value)
    for rows in blocks:
        query = inputs.query.detach()[:, rows].to(dtype).requires_grad_(with_gradients)
        out = reference.attention_rows(
            query,
            key,
            value,
            case.spec,
            shift=case.seqlen_k - case.seqlen_q,
            bias=None if inputs.bias is None else inputs.bias[:, :, rows],
            alibi_slopes=inputs.alibi_slopes,
            sinks=inputs.sinks,
            seed=inputs.seed,
            first_row=rows.start,
            shown=_shown(case, rows, inputs.query.device),
            dtype=dtype,
        ).out
        outs.append(out.detach())
        if with_gradients:
            gradients = torch.autograd.grad(out, (query, key, value), dout[:, rows].to(dtype))
            dqs.append(gradients[0])
            dk, dv = dk + gradients[1], dv + gradients[2]
    exact = {"out": torch.cat(outs, dim=1)}
    return exact | {"dq": torch.cat(dqs, dim=1), "dk": dk.detach(), "dv": dv.detach()} if with_gradients else exact


def largest_error(found: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; 0.0 of nothing."""
    return float((found.double() - exact.double()).abs().max()) if exact.numel() else 0.0


def allowed_error(name: str, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """How far the result called `name` may be off in `dtype`, where `plain` is materialised in it."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    in_sums = 0.0 if name == "out" else _SUMMATION_ULPS * torch.finfo(accumulation).eps * largest
    return _ERROR_FACTOR * largest_error(plain, exact) + _ROUNDING_ULPS * torch.finfo(dtype).eps * largest + in_sums
