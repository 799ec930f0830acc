"""A call as launches: the Gluon kernel and, where something can be hidden, Triton's exact kernel for flagged rows.

One compiled kernel per set of facts, whatever the lengths, as in `backends/triton/launch.py`. Imports Triton, hence is
imported when the backend first runs a call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tilestream.backends.hopper.call import (
    ALIGNMENT,
    Config,
    Facts,
    Numbers,
    config_for,
    facts_of,
    numbers_of,
    readable,
    tma_strides,
)
from tilestream.backends.hopper.forward import forward_kernel
from tilestream.backends.hopper.gluon_names import GluonASTSource, gl
from tilestream.backends.triton.call import Tensors, contiguous_strides, shapes_of
from tilestream.backends.triton.launch import allocator, launch
from tilestream.backends.triton.plan import exact_rows_step, how_of, without_idle_limits
from tilestream.problem import AttentionInputs, Problem
from tilestream.state import AttentionOutput

__all__ = ["OPTIONS", "Plan", "forward", "prepare", "source"]

# Of the first consumer; the others and the producer have their own.
OPTIONS = {"num_warps": 4}
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_SHORT_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def forward(problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
    """See `Backend.forward`."""
    problem = without_idle_limits(problem)
    query, key, value = map(readable, inputs[:3])
    return _plan(problem, query.device, (query.stride(), key.stride(), value.stride())).forward(query, key, value)


def prepare(problem: Problem, inputs: AttentionInputs) -> Callable[[AttentionInputs], AttentionOutput] | None:
    """See `Backend.prepare`."""
    problem = without_idle_limits(problem)
    query, key, value = inputs[:3]
    if any(x is not readable(x) for x in (query, key, value)):
        return None
    plan = _plan(problem, query.device, (query.stride(), key.stride(), value.stride()))

    def again(inputs: AttentionInputs) -> AttentionOutput:
        query, key, value = inputs[:3]
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT:
            return forward(problem, inputs)
        return plan.forward(query, key, value)

    return again


class _Descriptor(NamedTuple):
    """What Triton's launcher looks for in a `TensorDescriptor`, which would check it all again in every call."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"


class Plan:
    """Everything about a call but its tensors."""

    def __init__(
        self, problem: Problem, device: torch.device, strides: tuple[tuple[int, ...], ...], config: Config | None = None
    ) -> None:
        self.problem, self.config = problem, config or config_for(problem)
        self.facts = facts_of(problem, self.config)
        self.numbers: Numbers = numbers_of(problem, self.config.block_m)
        self._device, self._empty = device, allocator(device)
        shapes = shapes_of(problem)
        self._layouts = [
            (shapes[name], tma_strides(shapes[name], given)) for name, given in zip("qkv", strides, strict=True)
        ]
        out = shapes["out"]
        self._layouts.append((out, contiguous_strides(out)))
        lse = (problem.batch, problem.num_heads_q, problem.seqlen_q)
        self._lse = lse, contiguous_strides(lse)
        self._num_programs = min(self.numbers.num_units, _num_processors(device))
        self._num_flaggers = self._num_programs * self.config.num_consumers
        self._flags = (self._num_flaggers + math.prod(lse),), (1,)
        # Found at the first launch.
        self._compiled: Any = None
        self._exact: Any = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        """Allocate and launch on the current stream; nothing waits for it."""
        if self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self._forward(query, key, value)
        return self._forward(query, key, value)

    def _forward(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionOutput:
        out = self._empty(*self._layouts[3], self.problem.dtype)
        lse = self._empty(*self._lse, torch.float32)
        flags = self._empty(*self._flags, torch.int32) if self.facts.flags else None
        if self._compiled is None:
            self._compiled = _compiled(self.facts, self.problem.dtype, self._device)
        descriptors = [_Descriptor(x, *y) for x, y in zip((query, key, value, out), self._layouts, strict=True)]
        kernel, stream = self._compiled, triton.runtime.driver.active.get_current_stream(self._device.index)
        counter = _counter(self._device, stream) if self.facts.is_dynamic else None
        hooks = triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            kernel[(self._num_programs, 1, 1)](*descriptors, lse, flags, counter, self.numbers, self.facts)
        else:
            # What `kernel[grid](...)` does where nobody listens.
            kernel.run(
                self._num_programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
                *descriptors, lse.data_ptr(), None if flags is None else flags.data_ptr(),
                None if counter is None else counter.data_ptr(), self.numbers, self.facts,
            )  # fmt: skip
        if flags is not None:
            self._launch_exact(Tensors(query, key, value, out=out, lse=lse, flags=flags))
        return AttentionOutput(out, lse)

    def _launch_exact(self, tensors: Tensors) -> None:
        if self._exact is None:
            how = how_of(self.problem, tensors._replace(out=None))
            self._exact = [exact_rows_step(self.problem, how, self._num_flaggers)]
        launch(self._exact, (), tensors, self._device)


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, device: torch.device, strides: tuple[tuple[int, ...], ...]) -> Plan:
    return Plan(problem, device, strides)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device, stream: int) -> Tensor:
    """A zero that a launch leaves as a zero: one for each stream, whose launches follow each other."""
    if torch.cuda.is_current_stream_capturing():
        # Of a graph's own, which may run beside calls of the stream.
        return torch.zeros((1,), dtype=torch.int32, device=device)
    found = _COUNTERS.get((device, stream))
    if found is None:
        found = _COUNTERS[device, stream] = torch.zeros((1,), dtype=torch.int32, device=device)
    return found


@functools.cache
def _compiled(facts: Facts, dtype: torch.dtype, device: torch.device) -> Any:
    target = triton.runtime.driver.active.get_current_target()
    kernel = triton.compile(source(facts, dtype), target=target, options=OPTIONS)
    # Loads the kernel and its launcher.
    _ = kernel.run
    return kernel


def source(facts: Facts, dtype: torch.dtype) -> GluonASTSource:
    """What `triton.compile` takes: types of numbers are fixed, so that no value of one compiles anything."""

    def descriptor(rows: int, width: int) -> str:
        block = [1, rows, 1, width]
        layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[dtype])
        return f"tensordesc<{_SHORT_NAMES[dtype]}{block},{layout!r}>"

    types: list[Any] = ["fp32" if name == "scale_log2" else "i32" for name in Numbers._fields]
    numbers = Numbers._make(types)
    signature = {
        "q_desc": descriptor(facts.rows, facts.block_d),
        "k_desc": descriptor(facts.block_n, facts.block_d),
        "v_desc": descriptor(facts.block_n, facts.block_dv),
        "out_desc": descriptor(facts.rows, facts.block_dv),
        "lse": "*fp32",
        "flags": "*i32",
        "counter": "*i32",
        "numbers": numbers,
        "facts": "constexpr",
    }
    return GluonASTSource(forward_kernel, signature, {(list(signature).index("facts"),): facts})
