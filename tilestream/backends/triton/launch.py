"""Compiling and launching: one compiled kernel per set of facts, whatever the lengths.

`triton.jit`'s own launcher would compile anew for a length that is 1 or that 16 divides, also inside of tuples (Triton
3.6), and takes longer to find out. Here the types of all numbers are fixed, so a kernel follows from its facts, its
tiles and the dtypes. All of Triton's names that are not for kernels are used in this file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from tilestream.backends.triton.call import Facts, Numbers, Tensors
from tilestream.backends.triton.configs import Config

__all__ = ["Step", "launch", "num_compiled", "options", "source"]

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Tensors whose rows `Facts.unit` promises to be aligned.
_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_ALIGNED = [["tt.divisibility", 16]]
_PADDED = ("row_lse", "row_delta")
_WIDE = ("shift", "keep_threshold", "num_rows")
_FLOATS = ("scale", "scale_log2", "softcap_in", "softcap_out", "keep_scale")


@dataclass(frozen=True, eq=False)
class Step:
    """One kernel of a call: everything about it that does not change with the tensors."""

    kernel: Any
    config: Config
    facts: Facts
    num_programs: int  # 0: compiled and not run
    sizes: tuple[Any, ...]  # the first numbers; strides follow
    # By what the tensors still decide.
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)


_COMPILED: dict[tuple[Any, ...], Any] = {}


def num_compiled() -> int:
    """How many kernels this process has compiled or read from Triton's cache."""
    return len(_COMPILED)


def launch(step: Step, tensors: Tensors, strides: tuple[Any, ...]) -> None:
    """Launch on the device of the tensors and its current stream; nothing waits for it."""
    numbers = Numbers._make(step.sizes + strides)
    if isinstance(step.kernel, InterpretedFunction):
        if step.num_programs > 0:
            step.kernel[(step.num_programs,)](tensors, numbers, step.facts)
        return
    device = tensors.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_here(step, tensors, numbers)
    else:
        _launch_here(step, tensors, numbers)


def _launch_here(step: Step, tensors: Tensors, numbers: Numbers) -> None:
    query, bias = tensors.q, tensors.bias
    key = (query.device, query.dtype, None if bias is None else bias.dtype, tensors.dlse is None)
    compiled = step.compiled.get(key)
    if compiled is None:
        compiled = step.compiled[key] = _compiled(step, tensors)
    # Loads the kernel and builds its launcher, which is part of what a first call waits for.
    run = compiled[(step.num_programs, 1, 1)]
    if step.num_programs > 0:
        run(tensors, numbers, step.facts)


def _compiled(step: Step, tensors: Tensors) -> Any:
    """The kernel of `step`, which steps of other lengths may have compiled before."""
    dtypes = tuple([None if x is None else x.dtype for x in tensors])
    key = (step.kernel, step.config, step.facts, dtypes, tensors.q.device)
    if key not in _COMPILED:
        _COMPILED[key] = _compile(step, dtypes, triton.runtime.driver.active.get_current_target())
    return _COMPILED[key]


def _compile(step: Step, dtypes: Sequence[torch.dtype | None], target: Any) -> Any:
    return triton.compile(
        source(step.kernel, step.facts, dtypes), target=target, options=options(step.config, target.backend)
    )


def options(config: Config, backend: str) -> dict[str, Any]:
    """What `triton.compile` takes besides the source."""
    found = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None and backend == "cuda":
        found["maxnreg"] = config.max_registers
    return found


def source(kernel: Any, facts: Facts, dtypes: Sequence[torch.dtype | None]) -> ASTSource:
    """What `triton.compile` takes; `dtypes` of the `Tensors`, None where one is missing."""
    tensors = Tensors._make("constexpr" if dtype is None else _POINTERS[dtype] for dtype in dtypes)
    numbers: dict[str, Any] = {}
    for name, value in Numbers._field_defaults.items():
        if isinstance(value, tuple):
            numbers[name] = ("i64" if name.endswith("strides") else "i32",) * len(value)
        else:
            numbers[name] = "fp32" if name in _FLOATS else "i64" if name in _WIDE else "i32"
    constants: dict[tuple[int, ...], Any] = {(0, n): None for n, dtype in enumerate(dtypes) if dtype is None}
    constants[(2,)] = facts
    names = (*_PADDED, *(_ROWS if facts.unit > 1 else ()))
    aligned = {(0, n): _ALIGNED for n, name in enumerate(Tensors._fields) if name in names}
    aligned = {place: hint for place, hint in aligned.items() if dtypes[place[1]] is not None}
    signature = {"tensors": tensors, "numbers": Numbers(**numbers), "facts": "constexpr"}
    return ASTSource(kernel, signature, constants, aligned)
