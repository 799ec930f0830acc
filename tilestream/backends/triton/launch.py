"""Compiling and launching: one compiled kernel per set of facts, whatever the lengths.

`triton.jit`'s own launcher would compile anew for a length that is 1 or that 16 divides, also inside of tuples (Triton
3.6), and takes longer to find out. Here the types of all numbers are fixed, so a kernel follows from its facts, its
tiles and the dtypes. All of Triton's names that are not for kernels are used in this file alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from tilestream.backends.triton.call import Facts, Numbers, Tensors
from tilestream.backends.triton.configs import Config

__all__ = ["POINTERS", "Step", "allocator", "compile_together", "launch", "load", "num_compiled", "options", "source"]

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Tensors whose rows are read and written 16 bytes at a time.
_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_ALIGNED = [["tt.divisibility", 16]]
_PARTS = ("q_parts", "k_parts", "v_parts", "dout_parts")
_PADDED = ("row_lse", "row_delta", *_PARTS)
_LISTS = ("row_spans", "row_tiles", "row_bits", "key_spans", "key_tiles", "key_bits")
# Neither of the inputs' dtype nor float32; the bias has its own.
_DTYPES = {
    "seed": torch.int64,
    "cu_seqlens_q": torch.int32,
    "cu_seqlens_k": torch.int32,
    "flags": torch.int32,
    **dict.fromkeys(_LISTS, torch.int32),
    **dict.fromkeys(("list_rows", "list_starts", "list_patterns", "list_bits"), torch.int32),
    **dict.fromkeys(_PARTS, torch.bfloat16),
}
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
    dtype: torch.dtype
    bias_dtype: torch.dtype
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


def launch(
    steps: Sequence[Step], others: Sequence[Step], tensors: Sequence[Tensor | None], device: torch.device
) -> None:
    """Launch on the current stream of `device`, which is the current one; nothing waits for it.

    Args:
        others: steps that are compiled with these, and not launched.
        tensors: the values of `Tensors`, on `device`.
    """
    if isinstance(steps[0].kernel, InterpretedFunction):
        for step in steps:
            step.kernel[(step.num_programs,)](Tensors._make(tensors), step.numbers, step.facts)
        return
    if steps[-1].compiled is None:
        load((*others, *steps), device)
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        for step in steps:
            step.compiled[(step.num_programs, 1, 1)](Tensors._make(tensors), step.numbers, step.facts)
        return
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    # A launcher would ask every tensor for it, and the driver about it.
    pointers = tuple([None if x is None else x.data_ptr() for x in tensors])
    for step in steps:
        # What `compiled[grid](...)` does where nobody listens.
        kernel = step.compiled
        kernel.run(
            step.num_programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, pointers,
            step.numbers, step.facts,
        )  # fmt: skip


def load(
    steps: Sequence[Step], device: torch.device, others: Mapping[Any, Callable[[], Any]] | None = None
) -> dict[Any, Any]:
    """Give the steps their kernels, which steps of other lengths may have compiled before.

    Args:
        others: what compiles other kernels, by any names.

    Returns:
        The kernels of `others`, by their names.
    """
    target = triton.runtime.driver.active.get_current_target()
    keys = [(step.kernel, step.config, step.facts, step.dtype, step.bias_dtype, device) for step in steps]
    missing = {key: step for key, step in zip(keys, steps, strict=True) if key not in _COMPILED}
    jobs = {key: functools.partial(_compile, step, target) for key, step in missing.items()}
    kernels = compile_together({**jobs, **(others or {})})
    _COMPILED.update({key: kernels[key] for key in jobs})
    for key, step in zip(keys, steps, strict=True):
        step.compiled = _COMPILED[key]
    return {name: kernels[name] for name in others or {}}


def _compile(step: Step, target: Any) -> Any:
    return triton.compile(source(step), target=target, options=options(step.config, target.backend))


def compile_together(jobs: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Kernels by name, loaded on the current device.

    In threads: a first call needs up to nine kernels, and the compiler leaves Python to others most of the time.
    """
    if not jobs:
        return {}
    with ThreadPoolExecutor(len(jobs), "tilestream-compile") as pool:
        kernels = dict(zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True))
    for kernel in kernels.values():
        # Loads the kernel and its launcher: here, because another thread has another current device.
        _ = kernel.run
    return kernels


def options(config: Config, backend: str) -> dict[str, Any]:
    """What `triton.compile` takes besides the source."""
    found = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None and backend == "cuda":
        found["maxnreg"] = config.max_registers
    if config.starts_early:
        found["launch_pdl"] = True
    return found


def source(step: Step) -> ASTSource:
    """What `triton.compile` takes.

    Tensors that a call does not have are pointers too: all kernels then have arguments of the same types, and Triton
    builds one launcher for all (0.6 s each).
    """
    dtypes = {name: step.dtype if name in _ROWS else _DTYPES.get(name, torch.float32) for name in Tensors._fields}
    dtypes["bias"] = step.bias_dtype
    numbers: dict[str, Any] = {}
    for name, value in Numbers._field_defaults.items():
        if isinstance(value, tuple):
            numbers[name] = ("i64" if name.endswith("strides") else "i32",) * len(value)
        else:
            numbers[name] = "fp32" if name in _FLOATS else "i64" if name in _WIDE else "i32"
    signature = {
        "tensors": Tensors._make(POINTERS[dtype] for dtype in dtypes.values()),
        "numbers": Numbers(**numbers),
        "facts": "constexpr",
    }
    hints = {(0, Tensors._fields.index(name)): _ALIGNED for name in (*_PADDED, *_ROWS)}
    return ASTSource(step.kernel, signature, {(2,): step.facts}, hints)
