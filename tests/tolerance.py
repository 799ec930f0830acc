"""The one tolerance: what a call may lose against the float64 oracle.

The bound is twice what a yardstick loses at the same precision, plus a few units in the last place. For out and lse the
yardstick is plain materialised attention; for gradients it is the worse of that and the exact gradients of a backward
that starts from out and lse rounded to their dtypes, as every backward without the score matrix must.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from cases import Case
from inputs import CaseInputs, make_inputs
from torch import Tensor

from tilestream.state import AttentionOutput

__all__ = ["faults", "same_bits"]

# A gradient entry is a sum of up to a thousand terms (every query of a key, every entry that a bias is broadcast to).
# In another order such a sum differs by about the root of that many units in the last place of its largest term, in
# the dtype of the accumulators.
_SUMMATION_ULPS = 32
# The matrix units of a GPU truncate sums: products of float32 parts lose 3 units even where there is one term.
_MATRIX_UNIT_ULPS = 4
# Gradients that are sums over rows: one sum of roundings may be small by luck, so that what such a sum usually comes to
# counts, the root of the mean square over draws of their signs. They are those of materialised attention's out, which
# has P in the dtype of the inputs, as every kernel for 16 bits has.
_SUMS_OVER_ROWS = ("bias", "sinks")
_NUM_DRAWS = 16


class _Yardstick(NamedTuple):
    """What a case's results should be, and what a good implementation loses."""

    exact: AttentionOutput
    exact_gradients: dict[str, Tensor]
    plain: AttentionOutput
    plain_gradients: dict[str, Tensor]
    saved_state_gradients: dict[str, Tensor]
    largest_terms: dict[str, float]


# The targets of a case are tested one after the other.
@functools.lru_cache(maxsize=1)
def _yardstick(case: Case, device: torch.device) -> _Yardstick:
    inputs = make_inputs(case, device)
    return _Yardstick(
        *inputs.oracle(torch.float64),
        *inputs.oracle(_plain_dtype(case)),
        inputs.saved_state_gradients(),
        inputs.largest_terms(),
    )


def _plain_dtype(case: Case) -> torch.dtype:
    """The oracle cannot see its own error: for float64, that of float32 is scaled down (inputs are float32 numbers)."""
    return torch.float32 if case.dtype == torch.float64 else case.dtype


def faults(inputs: CaseInputs, result: AttentionOutput, gradients: dict[str, Tensor]) -> list[str]:
    """What is wrong with the results of one case: how they look, and how far they are from the oracle."""
    case = inputs.case
    _check_form(inputs, {"out": result.out, "lse": result.lse}, gradients)
    exact, exact_gradients, plain, plain_gradients, saved_state, terms = _yardstick(case, inputs.dout.device)
    unit = torch.finfo(case.dtype).eps / torch.finfo(_plain_dtype(case)).eps
    accumulation_eps = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    found = [
        _excess("out", result.out, exact.out, _error(plain.out, exact.out) * unit, accumulation_eps * terms["out"]),
        _excess("lse", result.lse, exact.lse, _error(plain.lse, exact.lse) * unit),
    ]
    for name, gradient in gradients.items():
        wanted = exact_gradients[name]
        lost = max(_error(plain_gradients[name], wanted) * unit, _error(saved_state[name], wanted))
        in_sums = _SUMMATION_ULPS * accumulation_eps * max(_largest(wanted), terms[name])
        fault = _excess(f"d{name}", gradient, wanted, lost, in_sums)
        if fault and name in _SUMS_OVER_ROWS:
            lost = max(lost, _usual_loss(case, name, wanted))
            fault = _excess(f"d{name}", gradient, wanted, lost, in_sums)
        found.append(fault)
    return [fault for fault in found if fault]


def _usual_loss(case: Case, name: str, wanted: Tensor) -> float:
    inputs = make_inputs(case, wanted.device)
    errors = [_error(inputs.saved_state_gradients(draw)[name], wanted) for draw in range(_NUM_DRAWS)]
    return math.sqrt(sum(error * error for error in errors) / _NUM_DRAWS)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality in which a NaN equals itself, so that a NaN is reported as an error and not as a difference."""
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _check_form(inputs: CaseInputs, outputs: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """Shapes, dtypes, devices and contiguity of what came back."""
    case, query = inputs.case, inputs.leaves["query"]
    rows = tuple(query.shape[:-1])
    lse_shape = (rows[0], rows[2], rows[1]) if case.layout == "dense" else (rows[1], rows[0])
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    for name, shape, dtype in (("out", (*rows, case.widths[1]), case.dtype), ("lse", lse_shape, lse_dtype)):
        tensor = outputs[name]
        assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (shape, dtype, query.device), name
        assert tensor.is_contiguous(), name
    for name, gradient in gradients.items():
        leaf = inputs.leaves[name]
        assert (gradient.shape, gradient.dtype, gradient.device) == (leaf.shape, leaf.dtype, leaf.device), name


def _error(got: Tensor, exact: Tensor) -> float:
    """The largest absolute difference, over the entries where `exact` is finite."""
    got, exact = got.detach().to(torch.float64), exact.detach()
    difference = torch.where(torch.isinf(exact), torch.zeros_like(exact), got - exact)
    return float(difference.abs().max()) if difference.numel() else 0.0


def _largest(exact: Tensor) -> float:
    return _error(torch.zeros_like(exact), exact)


def _excess(name: str, got: Tensor, exact: Tensor, lost: float, in_sums: float = 0.0) -> str | None:
    """None, or how far `got` is from `exact` beyond twice what the yardstick has `lost`, and what sums may lose.

    The floor is one unit in the last place of the largest entry, at the dtype of `got`. Rounding even the exact result
    to that dtype costs half a unit, and so does rounding the float32 (for float32: blockwise) sum before; the yardstick
    can be exact by luck, for instance where a row sees one key.
    """
    got64, exact64 = got.detach().to(torch.float64), exact.detach()
    infinite = torch.isinf(exact64)
    if not torch.equal(got64[infinite], exact64[infinite]) or not bool(torch.isfinite(got64[~infinite]).all()):
        bad = (~torch.isfinite(got64) & ~infinite) | (infinite & (got64 != exact64))
        return f"{name}: {int(bad.sum())} of {bad.numel()} entries differ from the oracle's in being finite"
    is_on_matrix_units = got.dtype == torch.float32 and got.device.type == "cuda"
    units = _MATRIX_UNIT_ULPS if is_on_matrix_units and name != "lse" else 1
    floor = units * torch.finfo(got.dtype).eps * _largest(exact64) + in_sums
    error = _error(got, exact)
    if error <= 2.0 * lost + floor:
        return None
    return f"{name}: error {error:.3e} exceeds 2 x {lost:.3e} (yardstick) + {floor:.3e} (rounding of result and sums)"
