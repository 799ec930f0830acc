"""What numerics are tested on: every backend, and the native one once per instruction set that this machine can run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from cases import Case
from inputs import LARGE, make_inputs
from tolerance import faults

from tilestream import dispatch
from tilestream.backends.cpu import native
from tilestream.backends.cpu.native import library

__all__ = ["ISAS", "TARGETS", "Target", "assert_right", "each_isa", "needs_native"]


@dataclass(frozen=True)
class Target:
    """A backend; with `isa`, the native kernels for that instruction set and nothing else."""

    backend: str
    isa: str | None = None

    @property
    def id(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}[{self.isa}]"

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Calls of `backend` run on this target inside, and a call that the kernels leave to the loop is an error."""
        if self.isa is None:
            yield
            return
        with library.use(self.isa), pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "varlen", _NoLoop)
            yield


class _NoLoop:
    """Stands where the native backend finds the PyTorch loop."""

    @staticmethod
    def forward(*_: object) -> None:
        raise AssertionError("the native kernels left a call of finite numbers to the PyTorch loop")

    backward = forward


# TILESTREAM_NATIVE_ISA narrows them down, as it does for calls.
_WANTED = os.environ.get(library.VARIABLE) or None
ISAS = tuple(isa for isa in library.runnable() if _WANTED in (None, isa))
TARGETS = (*map(Target, dispatch.BACKENDS), *(Target("native", isa) for isa in ISAS))

each_isa = pytest.mark.parametrize("isa", ISAS)
needs_native = pytest.mark.skipif(not ISAS, reason="needs the native kernels")


def assert_right(case: Case, isa: str) -> None:
    """The native kernels for `isa` do the case by themselves, and do it right."""
    inputs = make_inputs(case, torch.device("cpu"), unseen=LARGE)
    with Target("native", isa).in_use():
        result, gradients = inputs.run("native")
    found = faults(inputs, result, gradients)
    assert not found, "\n".join([*found, isa, str(case)])
