"""Which backend runs a call, and why not the others."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tilestream.backends.base import Backend
from tilestream.errors import ArgumentError, UnsupportedError
from tilestream.problem import AttentionInputs, DoubleGradients, Problem

__all__ = [
    "BACKENDS",
    "Explanation",
    "backend",
    "choose",
    "double_backward",
    "explain",
    "native_library",
    "native_report",
]

# In order of preference; each names a module with a `BACKEND` object, imported when it is first asked.
_MODULES = {
    "native": "tilestream.backends.cpu.native",
    "hopper": "tilestream.backends.hopper",
    "triton": "tilestream.backends.triton",
    "cpu": "tilestream.backends.cpu",
}
BACKENDS = tuple(_MODULES)


@dataclass(frozen=True)
class Explanation:
    """The chosen backend (None if none can run the call), and per backend None or the reason it cannot."""

    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        lines = [f"{name}: {'can run this call' if reason is None else reason}" for name, reason in self.reasons]
        return "\n".join([f"chosen: {self.chosen or 'none'}", *lines])


@functools.cache
def backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        ArgumentError: there is none; the message lists those there are.
    """
    if name not in _MODULES:
        raise ArgumentError(f"backend {name!r} does not exist; choose from {', '.join(map(repr, BACKENDS))} or None.")
    found: Backend = importlib.import_module(_MODULES[name]).BACKEND
    return found


def explain(problem: Problem, backend: str | None = None) -> Explanation:
    """Which backend would run `problem`, and every backend's reason if it cannot.

    Args:
        problem: the call; `Problem` can be made without tensors.
        backend: as `tilestream.attention`: a name never falls back.

    Returns:
        Explanation(chosen, reasons).

    Raises:
        ArgumentError: no backend has that name.

    Cost: no kernel runs and no tensor is made.

    Example:
        >>> import torch
        >>> from tilestream.problem import AttentionInputs, DoubleGradients, Problem
        >>> problem = Problem.dense(seqlen_q=4096, num_heads_q=8, num_heads_kv=2, head_dim=64, dtype=torch.bfloat16)
        >>> explain(problem, backend="cpu").chosen
        'cpu'
    """
    names = BACKENDS if backend is None else (backend,)
    reasons = tuple((name, _load(name).supports(problem)) for name in names)
    chosen = next((name for name, reason in reasons if reason is None), None)
    return Explanation(chosen, reasons)


def choose(problem: Problem, name: str | None) -> Backend:
    """The backend that runs `problem`.

    Raises:
        UnsupportedError: the named backend cannot, or none can; with every reason.
    """
    if name is None:
        for candidate in BACKENDS:
            if _load(candidate).supports(problem) is None:
                return _load(candidate)
    else:
        reason = _load(name).supports(problem)
        if reason is None:
            return _load(name)
    everyone = explain(problem)
    able = [other for other, reason in everyone.reasons if reason is None]
    hint = f"{', '.join(able)} can; pass backend=None to let tilestream choose." if able else "No backend can."
    named = f"backend {name!r}" if name else "tilestream"
    raise UnsupportedError(f"{named} cannot run this call. {hint}\n{everyone}")


def double_backward(
    problem: Problem, inputs: AttentionInputs, dout: Tensor, dlse: Tensor, cotangents: tuple[Tensor | None, ...]
) -> DoubleGradients:
    """The derivative of the backward, for every backend: one implementation, on any device, in O(seqlen) memory."""
    from tilestream.backends.cpu.double_backward import Cotangents
    from tilestream.backends.cpu.varlen import double_backward as implementation

    return implementation(problem, inputs, dout, dlse, Cotangents(*cotangents))


def native_library() -> tuple[str, Path] | None:
    """Instruction set and file of the native CPU kernels in use on this machine, or None where there are none."""
    from tilestream.backends.cpu.native.library import library

    found = library()
    return None if found is None else (found.isa, found.path)


def native_report() -> list[tuple[str, str]]:
    """(fact, value) lines about the native CPU kernels on this machine, for ``tilestream doctor``."""
    from tilestream.backends.cpu.native.library import report

    return report()


# `backend` is also the public name of an argument above, so the loader needs another name inside those functions.
_load = backend
