"""The Hopper backward against the oracle, on calls that it serves: every pair of features, partial tiles too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FEATURES, Case, pairwise
from targets import HAS_HOPPER, Target, assert_hopper_gradients

import tilestream
from tilestream.backends import hopper

_FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "lengths": ((64, 64), (65, 127), (1000, 1), (257, 64), (1000, 700), (520, 1000)),
    "batch": (1, 3),
    "heads": ((2, 1), (1, 4), (1, 16), (2, 3)),
    "widths": ((64, 64), (128, 128), (40, 64), (96, 96), (128, 32), (32, 104), (256, 256), (192, 128), (72, 200)),
    "causal": (False, True),
    "window": (None, (17, 5), (None, 3), (300, None), (0, 64)),
    "scale": (None, 0.25),
    "sinks": (None, "random", "extreme"),
    "shift": (None, 0, -9, 400),
    "memory": FEATURES["memory"],
}
CASES = [Case(f"hopper_backward{number:03d}", **row) for number, row in enumerate(pairwise(_FEATURES))]


def test_cases_are_served() -> None:
    with Target("hopper").in_use():
        refused = [case for case in CASES if hopper.backward_reason(case.problem("cuda", is_backward=True))]
    assert refused == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "nan"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_backward(case: Case, is_finite: bool, device: torch.device) -> None:
    assert_hopper_gradients(case, is_finite, device)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("seqlen_k", [100, 300])
def test_scores_far_below_zero(seqlen_k: int, device: torch.device) -> None:
    """lse below -88, where the exponential of what is beyond the last key, less lse, overflows."""
    query, key, value = (
        torch.randn(1, n, 2, 64, device=device, dtype=torch.bfloat16) for n in (200, seqlen_k, seqlen_k)
    )
    query[..., 0], key[..., 0] = 20.0, -20.0
    gradients = {}
    for backend in ("hopper", "triton"):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = tilestream.attention(*leaves, scale=0.5, backend=backend)
        gradients[backend] = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for mine, other in zip(*gradients.values(), strict=True):
        assert bool(mine.isfinite().all())
        assert (mine.double() - other.double()).norm() <= 1e-2 * other.double().norm()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_calls_have_the_same_bits(head_dim: int, device: torch.device) -> None:
    leaves = [torch.randn(2, 700, 8, head_dim, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    out = tilestream.attention(*leaves, causal=True, deterministic=True, backend="hopper")
    first, again = (torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
