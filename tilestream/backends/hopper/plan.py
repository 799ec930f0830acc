"""A call as launches: the Gluon kernel and, where something can be hidden, Triton's exact kernel for flagged rows.

One compiled kernel per set of facts, whatever the lengths, as in `backends/triton/launch.py`. Imports Triton, hence is
imported when the backend first runs a call.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tilestream.backends.hopper.block_lists import lists_of
from tilestream.backends.hopper.call import (
    ALIGNMENT,
    BlockOthers,
    Config,
    Facts,
    Numbers,
    Others,
    config_for,
    configs_for,
    facts_of,
    is_readable,
    numbers_of,
    packed_layout,
    readable,
    readable_bias,
    tma_strides,
)
from tilestream.backends.hopper.exact import EXACT_CONFIG, exact_rows_kernel
from tilestream.backends.hopper.exact_lists import exact_listed_rows_kernel
from tilestream.backends.hopper.forward import forward_kernel
from tilestream.backends.hopper.gluon_names import GluonASTSource, gl
from tilestream.backends.triton.call import Tensors, contiguous_strides, shapes_of
from tilestream.backends.triton.launch import POINTERS, Step, allocator, launch, load
from tilestream.backends.triton.plan import (
    Builder,
    How,
    how_of,
    looks_at_flags,
    lse_shape,
    num_processors,
    readable_features,
    without_idle_limits,
)
from tilestream.block_mask import BlockMask
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import Band
from tilestream.state import AttentionOutput

__all__ = [
    "DTYPES",
    "OPTIONS",
    "SHORT_NAMES",
    "TARGET",
    "Descriptor",
    "Plan",
    "forward",
    "launch_kernel",
    "layout_for",
    "load_kernels",
    "num_compiled",
    "plan_of_mask",
    "prepare",
    "source",
    "unit_counter",
]

TARGET = GPUTarget("cuda", 90, 32)
# Of the first consumer; the others and the producer have their own.
OPTIONS = {"num_warps": 4}
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
_ROWS = ("q", "k", "v", "out")
# Of numbers that are not 32-bit ones without a fraction.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("scale_log2", "softcap_in", "softcap_out"), "fp32"),
    "shift": "i64",
    "bias_strides": ("i64",) * 3,
}
SHORT_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def forward(problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
    """See `Backend.forward`."""
    inputs = _readable(inputs)
    how = how_of(problem, Tensors(*inputs))
    if problem.block_mask is not None:
        plan: Plan = plan_of_mask(problem, how, Plan)
        return plan.forward(inputs)
    return _plan(without_idle_limits(problem), how).forward(inputs)


def prepare(problem: Problem, inputs: AttentionInputs) -> Callable[[AttentionInputs], AttentionOutput] | None:
    """See `Backend.prepare`."""
    if problem.block_mask is not None:
        return None
    problem = without_idle_limits(problem)
    if not all(map(is_readable, inputs[:3])) or any(x is not y for x, y in zip(_readable(inputs), inputs, strict=True)):
        return None
    plan = _plan(problem, how_of(problem, Tensors(*inputs)))

    def again(inputs: AttentionInputs) -> AttentionOutput:
        query, key, value = inputs[:3]
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT:
            return forward(problem, inputs)
        return plan.forward(inputs)

    return again


def _readable(inputs: AttentionInputs) -> AttentionInputs:
    query, key, value = map(readable, inputs[:3])
    bias = None if inputs.bias is None else readable_bias(inputs.bias)
    return readable_features(inputs._replace(query=query, key=key, value=value, bias=bias))


class Descriptor(NamedTuple):
    """What Triton's launcher looks for in a `TensorDescriptor`, which would check it all again in every call."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"


class Plan:
    """Everything about a call but its tensors; of a block mask its lists and not the mask."""

    def __init__(self, problem: Problem, how: How, config: Config | None = None) -> None:
        self.config = config or config_for(problem)
        *bias_strides, bias_step = how.bias_strides
        bias_step = bias_step if problem.spec.has_bias else 1
        self.facts = facts_of(problem, self.config, bias_step)
        all_facts = {self.facts, *(facts_of(problem, config, bias_step) for config in configs_for(problem))}
        tile = self.config.block_m, self.config.block_n
        mask, self._lists = problem.block_mask, None
        if mask is not None:
            problem = replace(problem, block_mask=None)
            self._lists = lists_of(problem, mask, tile, num_processors(how.device), how.device)
            # Which the lists know of.
            problem = replace(problem, spec=replace(problem.spec, band=Band(None, None)))
            # Most masks of whole blocks hide nothing in the tiles that they keep.
            all_facts |= {replace(facts, flags=False) for facts in all_facts}
            self.facts = replace(self.facts, flags=self._lists.hides)
        self._all_facts = all_facts
        self.problem = problem
        self.numbers: Numbers = numbers_of(problem, self.config.block_m)._replace(
            slopes_stride=how.slopes_stride, bias_strides=tuple(bias_strides)
        )
        self._how, self._device, self._empty = how, how.device, allocator(how.device)
        shapes, lse = shapes_of(problem), lse_shape(problem)
        self._out = shapes["out"], contiguous_strides(shapes["out"])
        self._lse = lse, contiguous_strides(lse)
        strides = (*how.strides, self._out[1])
        self._layouts = [layout_for(shapes[name], given) for name, given in zip(_ROWS, strides, strict=True)]
        teams = self.config.num_teams
        self._num_programs = min(-(-self.numbers.num_units // teams), num_processors(how.device))
        num_flaggers = self._num_programs * teams * self.config.num_consumers
        self._flags = (num_flaggers + math.prod(lse),), (1,)
        # Compiled at the first call, whether this one needs it or another one.
        needs_exact = any(facts.flags for facts in all_facts)
        self._exact = [_exact_step(problem, how, num_flaggers, self.facts)] if needs_exact else []
        # Found at the first launch.
        self._compiled: Any = None

    def forward(self, inputs: AttentionInputs) -> AttentionOutput:
        """Allocate and launch on the current stream; nothing waits for it."""
        if self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self._forward(inputs)
        return self._forward(inputs)

    def _forward(self, inputs: AttentionInputs) -> AttentionOutput:
        out = self._empty(*self._out, self.problem.dtype)
        lse = self._empty(*self._lse, torch.float32)
        flags = self._empty(*self._flags, torch.int32) if self.facts.flags else None
        if self._compiled is None:
            self._load()
        stream = triton.runtime.driver.active.get_current_stream(self._device.index)
        counter = unit_counter(self._device, stream) if self.facts.is_dynamic else None
        query, key, value, bias, slopes, sinks, _seed, cu_seqlens_q, cu_seqlens_k = inputs
        descriptors = [Descriptor(x, *y) for x, y in zip((query, key, value, out), self._layouts, strict=True)]
        others: Any = Others(lse, flags, counter, bias, slopes, sinks, cu_seqlens_q, cu_seqlens_k)
        lists, more = self._lists, {}
        if lists is not None:
            others = BlockOthers(lse, flags, counter, sinks, *lists[: len(BlockOthers._fields) - 4])
            more = lists.for_exact()
        launch_kernel(self._compiled, self._num_programs, stream, descriptors, others, self.numbers, self.facts)
        if flags is not None:
            launch(self._exact, (), Tensors(*inputs, out=out, lse=lse, flags=flags, **more), self._device)
        return AttentionOutput(out, lse)

    def _load(self) -> None:
        """Compile all that calls like this one need, at any length, side by side."""
        dtype, bias_dtype = self.problem.dtype, self._how.bias_dtype or self.problem.dtype
        keys = [(of, dtype, bias_dtype, self._device) for of in self._all_facts]
        jobs = {key: functools.partial(_compile, *key[:3]) for key in keys}
        self._compiled = load_kernels(self._exact, self._device, jobs)[self.facts, dtype, bias_dtype, self._device]


def _exact_step(problem: Problem, how: How, num_flaggers: int, facts: Facts) -> Step:
    config, sizes = replace(EXACT_CONFIG, starts_early=True), {"num_flaggers": num_flaggers}
    if facts.has_blocks:
        # Every query head has lists of its own.
        build = Builder(replace(problem, num_heads_kv=problem.num_heads_q), how)
        config = replace(config, num_slices=facts.block_n // config.block_n)
        return looks_at_flags(build.row_step(exact_listed_rows_kernel, config, sizes=sizes), how)
    return looks_at_flags(Builder(problem, how).row_step(exact_rows_kernel, config, sizes=sizes), how)


def layout_for(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor with rows as TMA takes them."""
    strides = tma_strides(shape, strides)
    return (shape, strides) if len(shape) == 4 else packed_layout(shape, strides)


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, how: How) -> Plan:
    return Plan(problem, how)


# Plans live as long as their mask does, and hold none.
_OF_MASKS: weakref.WeakKeyDictionary[BlockMask, dict[tuple[object, ...], Any]] = weakref.WeakKeyDictionary()


def plan_of_mask(problem: Problem, how: How, make: Callable[[Problem, How], Any]) -> Any:
    """The plan of a call with a block mask, which `make` makes."""
    mask = problem.block_mask
    assert mask is not None
    plain = without_idle_limits(replace(problem, block_mask=None))
    plans = _OF_MASKS.setdefault(mask, {})
    if (found := plans.get((plain, how))) is None:
        found = plans[plain, how] = make(replace(plain, block_mask=mask), how)
    return found


_COUNTERS: dict[tuple[torch.device, int, int], Tensor] = {}


def unit_counter(device: torch.device, stream: int) -> Tensor:
    """A zero that a launch leaves as a zero: one for each stream of a thread, whose launches follow each other."""
    if torch.cuda.is_current_stream_capturing():
        # Of a graph's own, which may run beside calls of the stream.
        return torch.zeros((1,), dtype=torch.int32, device=device)
    # Two threads can call different streams by the same number.
    key = device, stream, threading.get_ident()
    found = _COUNTERS.get(key)
    if found is None:
        # In another thread, because this one's memory may be that of a pool whose owner wants all of it back.
        with ThreadPoolExecutor(1, "tilestream-counter") as pool:
            found = _COUNTERS[key] = pool.submit(_new_counter, device).result()
    return found


def _new_counter(device: torch.device) -> Tensor:
    with torch.cuda.device(device):
        counter = torch.zeros((1,), dtype=torch.int32, device=device)
        torch.cuda.current_stream().synchronize()
    return counter


def launch_kernel(
    kernel: Any,
    num_programs: int,
    stream: int,
    descriptors: Sequence[Descriptor],
    others: Sequence[Tensor | None],
    numbers: Any,
    facts: Any,
) -> None:
    """Launch a compiled Gluon kernel with its descriptors, tensors without rows, numbers and facts."""
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        kernel[(num_programs, 1, 1)](*descriptors, others, numbers, facts)
    else:
        # What `kernel[grid](...)` does where nobody listens.
        pointers = tuple([None if x is None else x.data_ptr() for x in others])
        kernel.run(
            num_programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *descriptors, pointers, numbers, facts,
        )  # fmt: skip


_COMPILED: dict[Any, Any] = {}


def load_kernels(steps: Sequence[Step], device: torch.device, jobs: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """All Gluon kernels that are compiled, after those of `jobs` are; and the steps' kernels beside them."""
    missing = {key: job for key, job in jobs.items() if key not in _COMPILED}
    _COMPILED.update(load(steps, device, missing))
    return _COMPILED


def num_compiled() -> int:
    """How many Gluon kernels this process has compiled or read from Triton's cache."""
    return len(_COMPILED)


def _compile(facts: Facts, dtype: torch.dtype, bias_dtype: torch.dtype) -> Any:
    return triton.compile(source(facts, dtype, bias_dtype), target=TARGET, options=OPTIONS)


def source(facts: Facts, dtype: torch.dtype, bias_dtype: torch.dtype) -> GluonASTSource:
    """What `triton.compile` takes: types of numbers are fixed, so that no value of one compiles anything."""

    def descriptor(rows: int, width: int) -> str:
        block = [1, 1, rows, 1, width] if facts.is_varlen else [1, rows, 1, width]
        layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])
        return f"tensordesc<{SHORT_NAMES[dtype]}{block},{layout!r}>"

    numbers = {name: _TYPES.get(name, "i32") for name in Numbers._fields}
    others: Any = Others("*fp32", "*i32", "*i32", POINTERS[bias_dtype], "*fp32", "*fp32", "*i32", "*i32")
    if facts.has_blocks:
        others = BlockOthers("*fp32", "*i32", "*i32", "*fp32", "*i32", "*i32", "*i32", "*i32")
    signature = {
        "q_desc": descriptor(facts.rows, facts.block_d),
        "k_desc": descriptor(facts.block_n, facts.block_d),
        "v_desc": descriptor(facts.block_n, facts.block_dv),
        "out_desc": descriptor(facts.rows, facts.block_dv),
        "tensors": others,
        "numbers": Numbers(**numbers),
        "facts": "constexpr",
    }
    return GluonASTSource(forward_kernel, signature, {(list(signature).index("facts"),): facts})
