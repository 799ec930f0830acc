"""The one numerics test: every target x every case against the float64 oracle, forward, lse and all gradients.

What a backend may lose is in tolerance.py.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable

import pytest
import torch
from cases import CASES, FEW, Case
from interpreter import is_ready
from targets import ISAS, Target, targets_of
from tolerance import faults, same_bits

from tilestream import dispatch
from tilestream.backends.cpu.native import library
from tilestream.backends.cpu.native.isa import COMPILERS, cpu_features, isas_for, machine_name


def _hopper_refuses(case: Case, device_type: str) -> bool:
    if device_type != "cuda" or case.dtype not in (torch.float16, torch.bfloat16):
        return True
    has_no_pairs = case.batch == 0 or (case.layout == "dense" and 0 in case.lengths)
    is_odd = any(width % 8 or width > 256 for width in case.widths) or (case.scale is not None and case.scale <= 0)
    is_rich = case.layout == "varlen" or case.softcap > 0 or case.alibi is not None or case.bias is not None
    return has_no_pairs or is_odd or case.dropout_p > 0 or (case.mask is not None and is_rich)


# Which cases a backend may refuse, per backend, given the case and the device type. A refusal that is not expected
# here, and an expected one that no longer happens, are both failures: support is neither lost nor gained silently.
EXPECTED_SKIPS: dict[str, Callable[[Case, str], bool]] = {
    "cpu": lambda case, device_type: False,
    "native": lambda case, device_type: case.dtype == torch.float64 or device_type != "cpu" or not ISAS,
    "hopper": _hopper_refuses,
    "triton": lambda case, device_type: case.dtype == torch.float64 or (device_type == "cpu" and not is_ready()),
}
# The targets of a case follow each other, because they share its yardstick.
_ROWS = [(case, target) for case in CASES for target in targets_of(case, case in FEW)]


@pytest.mark.parametrize(("case", "target"), _ROWS, ids=lambda value: value.id)
def test_conformance(case: Case, target: Target, device: torch.device) -> None:
    assert_conforms(case, target, device)


def assert_conforms(case: Case, target: Target, device: torch.device) -> None:
    """The case is refused as expected, or right, and again the same bits where that is promised."""
    with target.in_use():
        skip_if_refused(target.backend, case, device)
        inputs = target.inputs(case, device)
        before = inputs.fingerprint()
        result, gradients = inputs.run(target.backend)
        # The interpreter runs one program after the other: nothing can differ, and there is no time to see that.
        again, gradients_again = (result, gradients) if target.is_interpreted else inputs.run(target.backend)
    for tensor, fingerprint in zip(inputs.fingerprint(), before, strict=True):
        assert torch.equal(tensor, fingerprint), f"an input was written to: {case}"
    assert all(map(same_bits, result, again)), f"two runs differ: {case}"
    if case.deterministic or (case.mask is not None and target.backend != "hopper"):
        for name, gradient in gradients.items():
            assert same_bits(gradient, gradients_again[name]), f"two runs of d{name} differ: {case}"
    found = faults(inputs, result, gradients)
    assert not found, "\n".join([*found, str(case)])


def skip_if_refused(backend: str, case: Case, device: torch.device) -> None:
    """Of a case that the backend refuses, which has to be one that it is expected to refuse."""
    supports = dispatch.backend(backend).supports
    reason = supports(case.problem(device.type, is_backward=False)) or supports(
        case.problem(device.type, is_backward=True)
    )
    assert backend in EXPECTED_SKIPS, f"say in EXPECTED_SKIPS which cases backend {backend!r} may refuse"
    is_expected = EXPECTED_SKIPS[backend](case, device.type)
    assert (reason is not None) == is_expected, f"expected to be refused: {is_expected}, but supports says {reason!r}"
    if reason is not None:
        pytest.skip(reason)


def test_linux_means_interpreted_kernels() -> None:
    """Without this, a Triton that is gone would look like a machine that has none: all of its tests are skipped."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("Triton has no wheel for this machine")
    assert importlib.util.find_spec("triton") is not None, "`make install` installs it"


def test_a_compiler_means_native_kernels() -> None:
    """Without this, a build that fails would look like a machine without a compiler: every native target is skipped."""
    could_run = [isa.name for isa in isas_for(machine_name()) if isa.features <= cpu_features()]
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if not could_run or compiler is None:
        pytest.skip("this machine has no compiler, or no instruction set that the native kernels are for")
    advice = f"{compiler} is here, but no library runs; `make native` builds them.\n{library.report()}"
    assert library.runnable(), advice
