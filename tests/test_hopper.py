"""The Hopper forward against the oracle, on calls that it serves: every pair of features, and many tiles of keys.

Of the cases of the conformance test it serves few, because most differ from what it takes in one thing or another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FEATURES, Case, pairwise
from targets import HAS_HOPPER, Target, assert_hopper_forward

from tilestream.backends import hopper

_FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "layout": ("dense", "varlen"),
    # The last two have several tiles of keys and of rows, which a sequence cuts short, and tiles that see everything.
    "lengths": ((64, 64), (65, 127), (1, 1000), (257, 64), (1000, 700), (520, 1000)),
    "heads": ((2, 1), (1, 4)),
    "widths": ((64, 64), (128, 128), (256, 256), (40, 64), (96, 96), (128, 32)),
    "causal": (False, True),
    "window": (None, (17, 5), (None, 3), (300, None), (0, 64)),
    "scale": (None, 0.25),
    "softcap": (0.0, 3.0, 30.0),
    "bias": (None, "bhmn", "1h1n", "b1m1", "11mn"),
    "bias_dtype": ("same", "float32"),
    "alibi": (None, "heads", "batch_heads"),
    "sinks": (None, "random", "extreme"),
    "shift": (None, 0, -9, 400),
    "memory": FEATURES["memory"],
}
CASES = [Case(f"hopper{number:03d}", **row) for number, row in enumerate(pairwise(_FEATURES))]


def test_cases_are_served() -> None:
    with Target("hopper").in_use():
        refused = [case for case in CASES if hopper.problem_reason(case.problem("cuda", is_backward=False), 132)]
    assert refused == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "nan"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_forward(case: Case, is_finite: bool, device: torch.device) -> None:
    assert_hopper_forward(case, is_finite, device)
