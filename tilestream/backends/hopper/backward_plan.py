"""A backward as launches: delta, the Gluon kernel, dq from its sums, and the exact kernels of flagged tiles.

One compiled kernel per set of facts, whatever the lengths, as in `plan.py`. Imports Triton.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from tilestream.backends.hopper.backward import backward_kernel
from tilestream.backends.hopper.backward_call import (
    BLOCK_M,
    CONSUMER_KEYS,
    ROW_BLOCK,
    BackwardConfig,
    BackwardFacts,
    BackwardNumbers,
    BackwardOthers,
    BlockBackwardOthers,
    backward_config_for,
    backward_facts_of,
    backward_numbers_of,
)
from tilestream.backends.hopper.backward_wide import backward_wide_kernel
from tilestream.backends.hopper.block_lists import key_lists_of, lists_of
from tilestream.backends.hopper.call import readable
from tilestream.backends.hopper.dq_sums import dq_kernel
from tilestream.backends.hopper.exact import EXACT_CONFIG, exact_dq_kernel
from tilestream.backends.hopper.exact_lists import exact_listed_dq_kernel, exact_listed_key_kernel
from tilestream.backends.hopper.gluon_names import GluonASTSource, gl
from tilestream.backends.hopper.plan import (
    DTYPES,
    OPTIONS,
    SHORT_NAMES,
    TARGET,
    Descriptor,
    launch_kernel,
    layout_for,
    load_kernels,
    plan_of_mask,
    unit_counter,
)
from tilestream.backends.triton.backward import exact_key_kernel
from tilestream.backends.triton.call import Tensors, contiguous_strides, rows_in_place, shapes_of
from tilestream.backends.triton.configs import Config
from tilestream.backends.triton.launch import Step, allocator, launch
from tilestream.backends.triton.plan import (
    Builder,
    How,
    how_of,
    kernel_config,
    looks_at_flags,
    lse_shape,
    num_processors,
    readable_features,
    without_idle_limits,
)
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.spec import Band
from tilestream.state import AttentionOutput, finite_or_zero, sink_gradient

__all__ = ["BackwardPlan", "backward", "backward_source"]

# Of the tensors that TMA reads and writes.
_READ, _WRITTEN = ("q", "k", "v", "dout"), ("dk", "dv")
_TYPES = {"shift": "i64", "scale": "fp32", "scale_log2": "fp32"}
# Of the lists that the exact kernel for dq reads: keys of a tile.
_EXACT_KEYS = 128
# Of the kernel that makes dq of its sums: rows of a tile, any keys, warps.
_DQ_CONFIG = Config(BLOCK_M, 16, 4, 1)


def backward(
    problem: Problem,
    inputs: AttentionInputs,
    output: AttentionOutput,
    dout: Tensor,
    dlse: Tensor | None,
    needs_dsinks: bool,
) -> Gradients:
    """See `Backend.backward`; of calls without a bias."""
    query, key, value = map(readable, inputs[:3])
    given = Tensors(
        *readable_features(inputs._replace(query=query, key=key, value=value)),
        out=rows_in_place(output.out),
        lse=output.lse.contiguous(),
        dout=readable(dout),
        dlse=None if dlse is None else dlse.float().contiguous(),
    )
    # None of those that are read below is missing.
    how = how_of(problem, given)
    plan: BackwardPlan
    if problem.block_mask is None:
        plan = _plan(without_idle_limits(problem), how)
    else:
        plan = plan_of_mask(problem, how, BackwardPlan)
    tensors: Any = plan.run(given)
    dsinks = None
    if needs_dsinks and inputs.sinks is not None and given.sinks is not None:
        dsinks = sink_gradient(given.sinks, finite_or_zero(output.lse), tensors.delta).to(inputs.sinks.dtype)
    return Gradients(tensors.dq, tensors.dk, tensors.dv, None, dsinks)


class BackwardPlan:
    """Everything about a call but its tensors; of a block mask its lists and not the mask."""

    def __init__(self, problem: Problem, how: How, config: BackwardConfig | None = None) -> None:
        self.facts = backward_facts_of(problem, config or backward_config_for(problem))
        self._lists: Any = None
        self._row_lists: Any = None
        if (mask := problem.block_mask) is not None:
            problem = replace(problem, block_mask=None)
            where = num_processors(how.device), how.device
            self._lists = key_lists_of(problem, mask, (BLOCK_M, self.facts.block_n), *where)
            if self._lists.hides:
                self._row_lists = lists_of(problem, mask, (ROW_BLOCK, _EXACT_KEYS), *where)
            # Which the lists know of.
            problem = replace(problem, spec=replace(problem.spec, band=Band(None, None)))
        self._all_facts = {self.facts}
        if self._lists is not None:
            self._all_facts.add(replace(self.facts, flags=False))
            self.facts = replace(self.facts, flags=self._lists.hides)
        self.problem = problem
        self.numbers: BackwardNumbers = backward_numbers_of(problem, self.facts.block_n)
        self._device, self._empty = how.device, allocator(how.device)
        shapes = shapes_of(problem)
        self._shapes = {name: shapes[name] for name in ("dq", "dk", "dv")}
        strides = dict(zip(("q", "k", "v", "out", "dout"), how.strides, strict=True))
        strides |= {name: contiguous_strides(shapes[name]) for name in _WRITTEN}
        self._layouts = [layout_for(shapes[name], strides[name]) for name in (*_READ, *_WRITTEN)]
        self._num_programs = min(self.numbers.num_units, num_processors(how.device))
        num_heads = problem.batch * problem.num_heads_q
        self._num_padded = num_heads * self.numbers.num_padded_rows
        # Behind the sums of all row tiles those of none (`dq.first_step`).
        num_tiles = num_heads * self.numbers.num_row_tiles + 1
        self._num_sums = num_tiles * BLOCK_M * self.facts.block_d
        self._num_rows = math.prod(lse_shape(problem)) if self.facts.flags else 0
        self._num_key_flags = self.numbers.num_sides * self.numbers.num_key_flags
        self._before, self._after, self._exact_key = _steps(problem, how, self.facts)
        # What another mask needs.
        self._others = (
            []
            if self._lists is None
            else [
                step
                for flags in (False, True)
                for steps in _steps(problem, how, replace(self.facts, flags=flags))
                for step in steps
            ]
        )
        # Found at the first launch.
        self._compiled: Any = None

    def run(self, given: Tensors) -> Tensors:
        """Allocate and launch on the current stream; nothing waits for it."""
        with torch.cuda.device(self._device):
            return self._run(given)

    def _run(self, given: Tensors) -> Tensors:
        made = {
            name: self._empty(shape, contiguous_strides(shape), self.problem.dtype)
            for name, shape in self._shapes.items()
        }
        shape = lse_shape(self.problem)
        delta = self._empty(shape, contiguous_strides(shape), torch.float32)
        row_lse, row_delta = (self._empty((self._num_padded,), (1,), torch.float32) for _ in range(2))
        # The sums, a flag for all rows, which are zeroed, and one for each row.
        space = self._empty((self._num_sums + 4 + self._num_rows,), (1,), torch.float32)
        space[: self._num_sums + 4].zero_()
        sums, row_flags = space, space[self._num_sums + 3 :].view(torch.int32)
        key_flags = self._empty((self._num_key_flags,), (1,), torch.int32) if self.facts.flags else None
        tensors = given._replace(
            **made, delta=delta, row_lse=row_lse, row_delta=row_delta, out_parts=sums, flags=row_flags
        )
        if self._compiled is None:
            self._load()
        launch(self._before, (), tensors, self._device)
        self._launch(tensors, sums, key_flags)
        by_rows = {} if self._row_lists is None else self._row_lists.for_exact()
        launch(self._after, (), tensors._replace(**by_rows), self._device)
        if self._exact_key:
            by_keys = {} if self._lists is None else self._lists.for_exact()
            launch(self._exact_key, (), tensors._replace(flags=key_flags, **by_keys), self._device)
        return tensors

    def _launch(self, tensors: Tensors, sums: Tensor, key_flags: Tensor | None) -> None:
        stream = triton.runtime.driver.active.get_current_stream(self._device.index)
        rows: list[Any] = [getattr(tensors, name) for name in (*_READ, *_WRITTEN)]
        descriptors = [Descriptor(x, *layout) for x, layout in zip(rows, self._layouts, strict=True)]
        padded: list[Any] = [tensors.row_lse, tensors.row_delta]
        descriptors += [Descriptor(x, (self._num_padded,), (1,)) for x in padded]
        others: Any = BackwardOthers(sums, key_flags, unit_counter(self._device, stream))
        if self._lists is not None:
            others = BlockBackwardOthers(*others, *self._lists[:-1])
        launch_kernel(self._compiled, self._num_programs, stream, descriptors, others, self.numbers, self.facts)

    def _load(self) -> None:
        """Compile all that calls like this one need, side by side."""
        dtype = self.problem.dtype
        jobs = {(of, dtype, self._device): functools.partial(_compile, of, dtype) for of in self._all_facts}
        steps = [*self._before, *self._after, *self._exact_key, *self._others]
        self._compiled = load_kernels(steps, self._device, jobs)[self.facts, dtype, self._device]


def _steps(problem: Problem, how: How, facts: BackwardFacts) -> tuple[list[Step], list[Step], list[Step]]:
    """What is launched before the kernel, after it, and then for flagged tiles of keys."""
    # Rows are not packed here: every query head is like a KV head of its own.
    unpacked = Builder(replace(problem, num_heads_kv=problem.num_heads_q), how)
    before = [unpacked.delta_step()]
    after = [unpacked.row_step(dq_kernel, _DQ_CONFIG, {"flags": facts.flags})]
    if not facts.flags:
        return before, after, []
    build = Builder(problem, how)
    exact_key = kernel_config("exact_key", problem, how)
    # Its programs are those of consumers, which flag their keys.
    exact_key = replace(exact_key, num_slices=CONSUMER_KEYS // exact_key.block_n)
    sizes = {"num_flaggers": 1}
    if facts.has_blocks:
        exact_dq = replace(EXACT_CONFIG, num_slices=_EXACT_KEYS // EXACT_CONFIG.block_n)
        after.append(looks_at_flags(unpacked.row_step(exact_listed_dq_kernel, exact_dq, sizes=sizes), how))
        return before, after, [looks_at_flags(build.key_step(exact_listed_key_kernel, exact_key), how)]
    after.append(looks_at_flags(build.row_step(exact_dq_kernel, EXACT_CONFIG, sizes=sizes), how))
    return before, after, [looks_at_flags(build.key_step(exact_key_kernel, exact_key), how)]


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, how: How) -> BackwardPlan:
    return BackwardPlan(problem, how)


def _compile(facts: BackwardFacts, dtype: torch.dtype) -> Any:
    return triton.compile(backward_source(facts, dtype), target=TARGET, options=OPTIONS)


def backward_source(facts: BackwardFacts, dtype: torch.dtype) -> GluonASTSource:
    """What `triton.compile` takes."""

    def rows(count: int, width: int) -> str:
        block = [1, count, 1, width]
        layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])
        return f"tensordesc<{SHORT_NAMES[dtype]}{block},{layout!r}>"

    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_M], gl.float32)
    numbers = f"tensordesc<fp32{[BLOCK_M]},{layout!r}>"
    types: dict[str, Any] = {name: _TYPES.get(name, "i32") for name in BackwardNumbers._fields}
    others: Any = BackwardOthers("*fp32", "*i32", "*i32")
    if facts.has_blocks:
        others = BlockBackwardOthers("*fp32", *("*i32",) * 7)
    signature = {
        "q_desc": rows(BLOCK_M, facts.block_d),
        "k_desc": rows(CONSUMER_KEYS, facts.block_d),
        "v_desc": rows(CONSUMER_KEYS, facts.block_dv),
        "dout_desc": rows(BLOCK_M, facts.block_dv),
        "dk_desc": rows(CONSUMER_KEYS, facts.block_d),
        "dv_desc": rows(CONSUMER_KEYS, facts.block_dv),
        "lse_desc": numbers,
        "delta_desc": numbers,
        "tensors": others,
        "numbers": BackwardNumbers(**types),
        "facts": "constexpr",
    }
    kernel = backward_wide_kernel if facts.is_wide else backward_kernel
    return GluonASTSource(kernel, signature, {(list(signature).index("facts"),): facts})
