"""What numerics are tested on: every backend, and the native one once per instruction set that this machine can run.

On a CPU the backend triton is interpreted. What hidden keys hold decides which of its kernels are tested: after NaN or
infinity in a tile others compute it again, so there is a target of either kind.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from cases import Case
from inputs import LARGE, CaseInputs, make_inputs
from interpreter import LARGE_TILES, SMALL_TILES, Tiles, interpreting, is_ready
from tolerance import faults, same_bits

from tilestream import dispatch
from tilestream.backends import hopper
from tilestream.backends.cpu import native
from tilestream.backends.cpu.native import library

__all__ = [
    "FINITE",
    "HAS_HOPPER",
    "ISAS",
    "TARGETS",
    "Target",
    "assert_hopper_forward",
    "assert_hopper_gradients",
    "assert_right",
    "each_isa",
    "needs_native",
    "targets_of",
]


@dataclass(frozen=True)
class Target:
    """A backend; with `isa`, the native kernels for that instruction set and nothing else."""

    backend: str
    isa: str | None = None
    is_finite: bool = False  # whether all inputs are; else what no query sees is NaN
    tiles: Tiles = LARGE_TILES  # of interpreted kernels

    @property
    def id(self) -> str:
        detail = self.isa or ("finite" if self.is_finite else "")
        return f"{self.backend}[{detail}]" if detail else self.backend

    @property
    def is_interpreted(self) -> bool:
        return self.backend == "triton" and is_ready()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Calls of `backend` run on this target inside, and a call that the kernels leave to the loop is an error."""
        if self.backend == "hopper":
            with pytest.MonkeyPatch.context() as patch:
                # Nothing is left to the Triton backend because it is faster.
                patch.setattr(hopper, "_slower_reason", lambda *_: None)
                yield
            return
        if self.isa is None:
            with interpreting(self.tiles) if self.is_interpreted else contextlib.nullcontext():
                yield
            return
        with library.use(self.isa), pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "varlen", _NoLoop)
            yield

    def inputs(self, case: Case, device: torch.device) -> CaseInputs:
        """The inputs of `case`. Interpreted, every other case is finite: there is no time to run each both ways."""
        is_turn = self.is_interpreted and zlib.crc32(case.id.encode()) % 2 == 0
        return make_inputs(case, device, **({"unseen": LARGE} if self.is_finite or is_turn else {}))


class _NoLoop:
    """Stands where the native backend finds the PyTorch loop."""

    @staticmethod
    def forward(*_: object) -> None:
        raise AssertionError("the native kernels left a call of finite numbers to the PyTorch loop")

    backward = forward


# TILESTREAM_NATIVE_ISA narrows them down, as it does for calls.
_WANTED = os.environ.get(library.VARIABLE) or None
ISAS = tuple(isa for isa in library.runnable() if _WANTED in (None, isa))
# Hopper kernels have no interpreter and no other GPU.
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
_BACKENDS = [name for name in dispatch.BACKENDS if name != "hopper" or HAS_HOPPER]
TARGETS = (*map(Target, _BACKENDS), *(Target("native", isa, is_finite=True) for isa in ISAS))

# Interpreted with small tiles a case has several of every kind, and takes its time: these are for `cases.FEW` alone.
FINITE = Target("triton", is_finite=True, tiles=SMALL_TILES)

each_isa = pytest.mark.parametrize("isa", ISAS)
needs_native = pytest.mark.skipif(not ISAS, reason="needs the native kernels")


def targets_of(case: Case, is_covering: bool) -> tuple[Target, ...]:
    """What a case is run on; one of the few covering ones also on `FINITE`, as all are on a GPU."""
    return (*TARGETS, FINITE) if is_covering or not is_ready() else TARGETS


def assert_right(case: Case, isa: str) -> None:
    """The native kernels for `isa` do the case by themselves, and do it right."""
    inputs = make_inputs(case, torch.device("cpu"), unseen=LARGE)
    with Target("native", isa).in_use():
        result, gradients = inputs.run("native")
    found = faults(inputs, result, gradients)
    assert not found, "\n".join([*found, isa, str(case)])


def assert_hopper_forward(case: Case, is_finite: bool, device: torch.device) -> None:
    """The Hopper kernels do the forward right, and again the same bits; what no query sees is finite or NaN."""
    inputs = make_inputs(case, device, **({"unseen": LARGE} if is_finite else {}))
    before = inputs.fingerprint()
    with Target("hopper").in_use():
        result, again = inputs.forward("hopper"), inputs.forward("hopper")
    for tensor, fingerprint in zip(inputs.fingerprint(), before, strict=True):
        assert torch.equal(tensor, fingerprint), f"an input was written to: {case}"
    assert all(map(same_bits, result, again)), f"two runs differ: {case}"
    found = faults(inputs, result, {})
    assert not found, "\n".join([*found, str(case)])


def assert_hopper_gradients(case: Case, is_finite: bool, device: torch.device) -> None:
    """The Hopper kernels do forward and backward right; their sums of dq have no fixed order."""
    inputs = make_inputs(case, device, **({"unseen": LARGE} if is_finite else {}))
    before = inputs.fingerprint()
    with Target("hopper").in_use():
        result, gradients = inputs.run("hopper")
    for tensor, fingerprint in zip(inputs.fingerprint(), before, strict=True):
        assert torch.equal(tensor, fingerprint), f"an input was written to: {case}"
    found = faults(inputs, result, gradients)
    assert not found, "\n".join([*found, str(case)])
