"""The kernels that a call is, in order. Imports Triton, hence is imported when the backend first runs a call."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.backends.triton import backward as backward_kernels
from tilestream.backends.triton import bias_gradient
from tilestream.backends.triton import forward as forward_kernels
from tilestream.backends.triton.call import (
    NUM_SIZES,
    Numbers,
    Tensors,
    facts_of,
    layout_of,
    num_key_tiles,
    num_row_tiles,
    precision_of,
    sizes_of,
)
from tilestream.backends.triton.configs import Config, config_for, num_splits
from tilestream.backends.triton.launch import Step, launch
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.spec import Band
from tilestream.state import AttentionOutput, finite_or_zero, sink_gradient

__all__ = ["How", "backward", "forward"]


def forward(problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
    """See `Backend.forward`."""
    ready = _readable(inputs)
    query = ready.query
    out = query.new_empty((*query.shape[:-1], ready.value.shape[-1]))
    lse = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3]), dtype=torch.float32)
    if lse.numel() > 0:
        _Call(problem, ready, {"out": out, "lse": lse}).forward()
    return AttentionOutput(out, lse)


def backward(
    problem: Problem,
    inputs: AttentionInputs,
    output: AttentionOutput,
    dout: Tensor,
    dlse: Tensor | None,
    needs_dbias: bool,
    needs_dsinks: bool,
) -> Gradients:
    """See `Backend.backward`."""
    ready = _readable(inputs)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:3])
    lse = output.lse.contiguous()
    delta = torch.empty_like(lse)
    call = _Call(
        problem,
        ready,
        {
            "out": _rows_in_place(output.out),
            "lse": lse,
            "dout": _rows_in_place(dout),
            "dlse": None if dlse is None else dlse.float().contiguous(),
            "delta": delta,
            "dq": dq,
            "dk": dk,
            "dv": dv,
        },
    )
    call.backward()
    dbias = dsinks = None
    if needs_dbias and inputs.bias is not None:
        dbias = call.bias_gradient(inputs.bias).sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
    if needs_dsinks and inputs.sinks is not None and ready.sinks is not None:
        # A token after the last sequence has no sink.
        delta = delta.masked_fill_(lse == -math.inf, 0.0)
        dsinks = sink_gradient(ready.sinks, finite_or_zero(lse), delta).to(inputs.sinks.dtype)
    return Gradients(dq, dk, dv, dbias, dsinks)


class How(NamedTuple):
    """What the plan of a call depends on besides the problem."""

    unit: int  # `call.layout_of`
    precision: str  # `call.precision_of`
    device: torch.device


class _Call:
    """One call: its tensors as the kernels take them, and the kernels in order."""

    def __init__(self, problem: Problem, inputs: AttentionInputs, outputs: dict[str, Tensor | None]) -> None:
        self.problem = problem = _without_idle_limits(problem)
        query, key, value, bias, slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k = inputs
        self.tensors = Tensors(query, key, value, bias, slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, **outputs)
        rows = [outputs[name] for name in ("out", "dout", "dq", "dk", "dv") if name in outputs]
        unit, self.strides = layout_of(bias, slopes, (query, key, value, *rows))  # type: ignore[arg-type]
        self.how = How(unit, precision_of(problem), query.device)

    def forward(self) -> None:
        """out and lse."""
        steps, others = _forward_plan(self.problem, self.how)
        self._run(steps)
        if not all(step.compiled for step in others):
            self._run(others)

    def backward(self) -> None:
        """delta, dq, dk and dv."""
        if self.problem.total_q == 0:
            for gradient in (self.tensors.dk, self.tensors.dv):
                if gradient is not None:
                    gradient.zero_()
            return
        self._run(_backward_plan(self.problem, self.how, self.tensors.dlse is not None))

    def bias_gradient(self, bias: Tensor) -> Tensor:
        """Sums in float32 that `bias` broadcasts to."""
        shape, step = _bias_plan(self.problem, self.how, bias.shape)
        dbias = torch.empty(shape, dtype=torch.float32, device=bias.device)
        if dbias.numel() > 0:
            launch(step, self.tensors._replace(dbias=dbias), self.strides)
        return dbias

    def _run(self, plan: tuple[Step, ...]) -> None:
        tensors = self.tensors
        for step in plan:
            if step.facts.has_splits and tensors.out_parts is None:
                assert tensors.lse is not None
                splits = step.sizes[_NUM_SPLITS] if step.num_programs > 0 else 0
                parts = splits, tensors.lse.numel()
                tensors = tensors._replace(
                    out_parts=tensors.lse.new_empty(*parts, self.problem.head_dim_v),
                    lse_parts=tensors.lse.new_empty(parts),
                )
            if step.kernel is forward_kernels.exact_forward_kernel:
                # One kernel, whether keys are split or not.
                tensors = tensors._replace(out_parts=None, lse_parts=None)
            if step.kernel is backward_kernels.delta_kernel:
                rows = step.num_programs * step.config.block_m
                assert tensors.lse is not None
                tensors = tensors._replace(row_lse=tensors.lse.new_empty(rows), row_delta=tensors.lse.new_empty(rows))
            if step.facts.flags:
                # Read by the exact kernel that follows, whose programs have the same tiles.
                tensors = tensors._replace(flags=tensors.q.new_empty(step.num_programs, dtype=torch.int32))
            launch(step, tensors, self.strides)


# Those that kernels load; narrower ones are widened first.
_BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Rows that the tiles of every key kernel are made of: what lse and delta are padded to.
_ROW_BLOCK = 128
# Beyond the distance of any two positions (`_MOST_ROWS` of the backend).
_FARTHEST = 2**29
_HOPPER_SHARED_BYTES = 227 << 10
_NUM_SPLITS = Numbers._fields.index("num_splits")


@functools.lru_cache(maxsize=1024)
def _without_idle_limits(problem: Problem) -> Problem:
    """The same call without limits that no pair of positions reaches, so that it has the kernels, and bits, of one."""
    band, shift = problem.spec.band, problem.shift or 0
    left = None if band.left is None or band.left - shift > _FARTHEST else band.left
    right = None if band.right is None or band.right + shift > _FARTHEST else band.right
    if (left, right) == (band.left, band.right):
        return problem
    return dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, band=Band(left, right)))


@functools.lru_cache(maxsize=1024)
def _forward_plan(problem: Problem, how: How) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The kernels of a call; and those that other lengths would need instead, to be compiled along with them."""
    hides = _can_hide(problem)
    config = _config("forward", problem, how)
    splits, split_keys = num_splits(problem, config, _num_processors(how.device))
    sizes = {"num_splits": splits, "split_keys": split_keys}
    whole = [_row_step(forward_kernels.forward_kernel, config, problem, how, {"flags": hides})]
    split = [
        _row_step(forward_kernels.forward_kernel, config, problem, how, {"has_splits": True}, sizes),
        _row_step(forward_kernels.combine_kernel, config, problem, how, {"flags": hides}, sizes),
    ]
    # Two kernels, because one for both is up to 7 % slower (docs/measured-facts.md). Packed calls never split.
    steps, others = (split, whole) if splits > 1 else (whole, split if problem.layout == "dense" else [])
    if hides:
        steps.append(
            _row_step(forward_kernels.exact_forward_kernel, _config("exact_forward", problem, how), problem, how)
        )
    return tuple(steps), tuple(dataclasses.replace(step, num_programs=0) for step in others)


@functools.lru_cache(maxsize=1024)
def _backward_plan(problem: Problem, how: How, has_dlse: bool) -> tuple[Step, ...]:
    hides = _can_hide(problem)
    config, key_config = _config("query", problem, how), _config("key", problem, how)
    # key_kernel reads lse and delta tile by tile of its own rows.
    padded = {"row_block": _ROW_BLOCK}
    sizes = {"row_tiles": num_row_tiles(problem, _ROW_BLOCK)}
    delta_config = Config(_ROW_BLOCK, 16, 4, 1)
    delta_facts = {"has_dlse": has_dlse, **padded}
    steps = [
        _row_step(backward_kernels.delta_kernel, delta_config, problem, how, delta_facts, sizes),
        _row_step(backward_kernels.query_kernel, config, problem, how, {"flags": hides}),
    ]
    if hides:
        exact = _config("exact_query", problem, how)
        steps.append(_row_step(backward_kernels.exact_query_kernel, exact, problem, how))
    if problem.total_k > 0:
        facts = {"flags": hides, **padded}
        steps.append(_key_step(backward_kernels.key_kernel, key_config, problem, how, facts, sizes))
        if hides:
            exact = _config("exact_key", problem, how)
            steps.append(_key_step(backward_kernels.exact_key_kernel, exact, problem, how, padded, sizes))
    return tuple(steps)


@functools.lru_cache(maxsize=1024)
def _bias_plan(problem: Problem, how: How, shape: torch.Size) -> tuple[tuple[int, ...], Step]:
    """The shape of the sums: with entries of their own where a sum would leave little to do side by side."""
    batch, heads, rows, keys = shape
    sums_rows, sums_keys = rows == 1, keys == 1 and rows > 1
    if rows == 1 and keys == 1:
        keys = problem.seqlen_k
    if sums_rows or sums_keys:
        batch, heads = problem.batch, problem.num_heads_q
    config = _config("bias", problem, how)
    programs = batch * heads
    programs *= 1 if sums_rows else -(-rows // config.block_m)
    programs *= 1 if sums_keys else -(-keys // config.block_n)
    facts = facts_of(problem, config, how.unit, how.precision, sums_rows=sums_rows, sums_keys=sums_keys)
    sizes = sizes_of(problem)._replace(dbias_shape=(batch, heads, rows, keys))
    return (batch, heads, rows, keys), Step(
        bias_gradient.bias_kernel, config, facts, programs, tuple(sizes)[:NUM_SIZES]
    )


def _row_step(
    kernel: Any,
    config: Config,
    problem: Problem,
    how: How,
    facts: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
) -> Step:
    """A kernel with a program per tile of packed rows, longest first."""
    facts = {"starts_last": problem.spec.band.right is not None, **(facts or {})}
    return _step(kernel, config, problem, how, num_row_tiles(problem, config.block_m), facts, sizes or {})


def _key_step(
    kernel: Any,
    config: Config,
    problem: Problem,
    how: How,
    facts: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
) -> Step:
    """A kernel with a program per tile of keys."""
    facts = {"starts_last": problem.spec.band.left is not None, **(facts or {})}
    return _step(kernel, config, problem, how, num_key_tiles(problem, config.block_n), facts, sizes or {})


def _step(
    kernel: Any,
    config: Config,
    problem: Problem,
    how: How,
    tiles: int,
    facts: dict[str, Any],
    sizes: dict[str, Any],
) -> Step:
    programs = tiles * problem.num_heads_kv * (1 if problem.layout == "varlen" else problem.batch)
    numbers = sizes_of(problem)._replace(num_tiles=tiles, num_programs=programs, **sizes)
    made = facts_of(problem, config, how.unit, how.precision, **facts)
    total = programs * numbers.num_splits if made.has_splits else programs
    return Step(kernel, config, made, total, tuple(numbers)[:NUM_SIZES])


def _can_hide(problem: Problem) -> bool:
    """Where nothing can be hidden, nothing hidden can get in."""
    return not problem.spec.band.is_unlimited or problem.spec.has_bias


def _config(kernel: str, problem: Problem, how: How) -> Config:
    return config_for(kernel, problem, _is_small(how.device))


@functools.cache
def _is_small(device: torch.device) -> bool:
    """Whether a program has less shared memory than Hopper's 227 KiB."""
    if device.type == "cpu":
        return False
    properties = torch.get_device_module(device).get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) < _HOPPER_SHARED_BYTES


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Programs that run at once, about; what splitting the keys aims at."""
    if device.type == "cpu":
        return 4
    return int(torch.get_device_module(device).get_device_properties(device).multi_processor_count)


def _rows_in_place(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _readable(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs as the kernels read them: contiguous last dimensions, slopes and sinks in float32."""
    query, key, value, bias, alibi, sinks, seed, cu_seqlens_q, cu_seqlens_k = inputs
    return AttentionInputs(
        _rows_in_place(query),
        _rows_in_place(key),
        _rows_in_place(value),
        bias if bias is None or bias.dtype in _BIAS_DTYPES else bias.float(),
        None if alibi is None else alibi.float().contiguous(),
        None if sinks is None else sinks.float().contiguous(),
        seed,
        None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
    )
