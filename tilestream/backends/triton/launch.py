"""Compiling and launching: one compiled kernel per set of facts, whatever the lengths.

`triton.jit`'s own launcher would compile anew for a length that is 1 or that 16 divides, also inside of tuples (Triton
3.6), and takes longer to find out. Here the types of all numbers are fixed, so a kernel follows from its facts, its
tiles and the dtypes. All of Triton's names that are not for kernels are used in this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from tilestream.backends.triton.call import Facts, Numbers, Tensors
from tilestream.backends.triton.configs import Config

__all__ = ["Step", "allocator", "launch", "num_compiled", "options", "source"]

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


@dataclass(eq=False)
class Step:
    """One kernel of a call: everything about it but the tensors."""

    kernel: Any
    config: Config
    facts: Facts
    num_programs: int
    numbers: Numbers
    dtypes: tuple[torch.dtype | None, ...]  # of the `Tensors`; None: the kernel does not touch it
    # Found at the first launch.
    compiled: Any = None


_COMPILED: dict[tuple[Any, ...], Any] = {}


def num_compiled() -> int:
    """How many kernels this process has compiled or read from Triton's cache."""
    return len(_COMPILED)


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function of (shape, strides, dtype) that makes a tensor on `device`, which is current if it is a CUDA one."""
    # What torch.compile's own code calls: 0.8 us where torch.empty takes 3, and a call makes three tensors.
    found = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if device.type == "cuda" else None
    if found is not None:
        return found  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty(shape, dtype=dtype, device=device)


def launch(steps: Sequence[Step], others: Sequence[Step], tensors: Sequence[Tensor | None]) -> None:
    """Launch on the current device, which the tensors are on, and its current stream; nothing waits for it.

    Args:
        others: steps that are compiled with these, and not launched.
        tensors: the values of `Tensors`.
    """
    if isinstance(steps[0].kernel, InterpretedFunction):
        for step in steps:
            step.kernel[(step.num_programs,)](Tensors._make(tensors), step.numbers, step.facts)
        return
    if steps[-1].compiled is None:
        for step in (*others, *steps):
            step.compiled = _compiled(step, tensors)
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        for step in steps:
            step.compiled[(step.num_programs, 1, 1)](Tensors._make(tensors), step.numbers, step.facts)
        return
    driver = triton.runtime.driver.active
    stream = driver.get_current_stream(driver.get_current_device())
    # A launcher would ask every tensor for it, and the driver about it.
    pointers = tuple([None if x is None else x.data_ptr() for x in tensors])
    for step in steps:
        # What `compiled[grid](...)` does where nobody listens.
        kernel = step.compiled
        kernel.run(
            step.num_programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, pointers,
            step.numbers, step.facts,
        )  # fmt: skip


def _compiled(step: Step, tensors: Sequence[Tensor | None]) -> Any:
    """The kernel of `step`, which steps of other lengths may have compiled before, loaded and with its launcher."""
    assert tensors[0] is not None
    key = (step.kernel, step.config, step.facts, step.dtypes, tensors[0].device)
    if key not in _COMPILED:
        _COMPILED[key] = _compile(step, triton.runtime.driver.active.get_current_target())
        # Builds the launcher, which is part of what a first call waits for.
        _ = _COMPILED[key].run
    return _COMPILED[key]


def _compile(step: Step, target: Any) -> Any:
    return triton.compile(
        source(step.kernel, step.facts, step.dtypes), target=target, options=options(step.config, target.backend)
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
