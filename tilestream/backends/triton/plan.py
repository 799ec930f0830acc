"""The kernels that a call is, in order. Imports Triton, hence is imported when the backend first runs a call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.backends.triton import backward as backward_kernels
from tilestream.backends.triton import backward_parts as parts_kernels
from tilestream.backends.triton import bias_gradient
from tilestream.backends.triton import forward as forward_kernels
from tilestream.backends.triton.block_lists import Lists, lists_for, per_query_head
from tilestream.backends.triton.call import (
    BYTES_AT_ONCE,
    Tensors,
    broadcast_strides,
    contiguous_strides,
    num_key_tiles,
    num_row_tiles,
    precision_of,
    rows_in_place,
    shapes_of,
    whole_width,
)
from tilestream.backends.triton.configs import Config, config_for, num_splits, padded, takes_parts
from tilestream.backends.triton.launch import Step, allocator, launch
from tilestream.backends.triton.steps import ROW_BLOCK, Builder, How, list_facts, list_numbers, num_sides
from tilestream.block_mask import BlockMask
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.spec import Band
from tilestream.state import AttentionOutput, finite_or_zero, sink_gradient

__all__ = [
    "Builder",
    "How",
    "Plan",
    "backward",
    "forward",
    "how_of",
    "kernel_config",
    "looks_at_flags",
    "lse_shape",
    "num_processors",
    "prepare",
    "readable_features",
    "without_idle_limits",
]


def forward(problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
    """See `Backend.forward`."""
    width = problem.head_dim_v
    problem, mask = kernel_problem(problem)
    tensors = Tensors(*_readable(inputs))
    how = how_of(problem, tensors)
    if mask is not None:
        lists = _lists(mask, problem, how, "forward")
        tensors = Tensors._make((*tensors[:_ROW_LISTS], *lists.tensors(problem.layout == "varlen"), *_NO_TENSORS[:3]))
        how = how._replace(row_lists=lists.sizes)
    output = _forward_plan(problem, how).forward(tensors)
    return output if width == problem.head_dim_v else output._replace(out=_columns(output.out, width))


def prepare(problem: Problem, inputs: AttentionInputs) -> Callable[[AttentionInputs], AttentionOutput] | None:
    """See `Backend.prepare`."""
    # A mask is not remembered with a call.
    if problem.block_mask is not None or not _plan_lasts(problem):
        return None
    problem, _ = kernel_problem(problem)
    tensors = Tensors(*_readable(inputs))
    if any(x is not y for x, y in zip(tensors, inputs, strict=False)):
        return None
    how = how_of(problem, tensors)
    plan = _forward_plan(problem, how)

    def again(inputs: AttentionInputs) -> AttentionOutput:
        query, key, value = inputs[:3]
        if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % BYTES_AT_ONCE:
            return forward(problem, inputs)
        return plan.forward(inputs)

    return again


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
    width, width_v = problem.head_dim, problem.head_dim_v
    problem, mask = kernel_problem(problem)
    given = Tensors(
        *_readable(inputs),
        out=rows_in_place(output.out),
        lse=output.lse.contiguous(),
        dout=rows_in_place(dout),
        dlse=None if dlse is None else dlse.float().contiguous(),
    )
    how = how_of(problem, given)
    if mask is not None:
        by_rows, by_keys = (_lists(mask, problem, how, kernel) for kernel in ("query", "key"))
        # Packed sequences find their rows by number.
        is_ordered = problem.layout == "varlen"
        given = Tensors._make((*given[:_ROW_LISTS], *by_rows.tensors(is_ordered), *by_keys.tensors(is_ordered)))
        how = how._replace(row_lists=by_rows.sizes, key_lists=by_keys.sizes)
    # None of those that are read below is missing.
    tensors: Any = Tensors._make(_backward_plan(problem, how).run(given))
    if problem.total_q == 0:
        tensors.dk.zero_()
        tensors.dv.zero_()
    dbias = dsinks = None
    if needs_dbias and inputs.bias is not None:
        if mask is not None:
            tensors = tensors._replace(row_spans=by_rows.spans_in_order)
        (dbias,) = _bias_plan(problem, how, inputs.bias.shape).made_of(tensors)
        dbias = dbias.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
    if needs_dsinks and inputs.sinks is not None and tensors.sinks is not None:
        # A token after the last sequence has no sink.
        delta = tensors.delta.masked_fill_(tensors.lse == -math.inf, 0.0)
        dsinks = sink_gradient(tensors.sinks, finite_or_zero(tensors.lse), delta).to(inputs.sinks.dtype)
    dq, dk, dv = _columns(tensors.dq, width), _columns(tensors.dk, width), _columns(tensors.dv, width_v)
    return Gradients(dq, dk, dv, dbias, dsinks)


def _lists(mask: BlockMask, problem: Problem, how: How, kernel: str) -> Lists:
    """What the tiles of a kernel read of a mask."""
    config = _list_plan(kernel, problem, how.device)
    return lists_for(mask, problem, config, how.device, by_keys=kernel == "key")


@functools.lru_cache(maxsize=1024)
def _list_plan(kernel: str, problem: Problem, device: torch.device) -> tuple[int, int]:
    """(queries, keys) of a kernel's tiles with a mask."""
    config = config_for(kernel, per_query_head(problem), _is_small(device), has_blocks=True)
    return config.block_m, config.block_n


def _plan_lasts(problem: Problem) -> bool:
    """Whether nothing outside of a call changes its plan."""
    # What float32 products are made of can change between two calls, and whether a CPU interprets.
    return problem.device_type == "cuda" and problem.dtype != torch.float32


def how_of(problem: Problem, tensors: Tensors) -> How:
    """`How` of a call, from the tensors that it is given."""
    rows = [x for x in (tensors.q, tensors.k, tensors.v, tensors.out, tensors.dout) if x is not None]
    slopes, bias = tensors.slopes, tensors.bias
    return How(
        tensors.q.device,
        precision_of(problem),
        tuple([x.stride() for x in rows]),
        slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        None if bias is None else bias.dtype,
        broadcast_strides(bias),
        tensors.dlse is not None,
    )


class _Made(NamedTuple):
    """A tensor that a call allocates."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Plan:
    """Everything about a call but its tensors: the kernels in order, and what they write to.

    Args:
        others: kernels that calls of other lengths need instead, which are compiled along with these.
    """

    def __init__(
        self, device: torch.device, made: Sequence[_Made], steps: Sequence[Step], others: Sequence[Step] = ()
    ) -> None:
        self.steps, self.others = tuple(steps), tuple(others)
        self._device, self._is_cuda = device, device.type == "cuda"
        self._empty = allocator(device)
        self._made = [(Tensors._fields.index(x.name), x.shape, contiguous_strides(x.shape), x.dtype) for x in made]

    def run(self, given: Sequence[Tensor | None]) -> list[Any]:
        """Allocate and launch; returns all `Tensors`."""
        if self._is_cuda and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self._run(given)
        return self._run(given)

    def forward(self, given: Sequence[Tensor | None]) -> AttentionOutput:
        """`run`, for its output."""
        tensors = self.run(given)
        return AttentionOutput(tensors[_OUT], tensors[_LSE])

    def made_of(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """`run`, for the tensors that it makes."""
        tensors = self.run(given)
        return [tensors[place] for place, *_ in self._made]

    def _run(self, given: Sequence[Tensor | None]) -> list[Any]:
        tensors = [*given, *_NO_TENSORS[len(given) :]]
        for place, shape, strides, dtype in self._made:
            tensors[place] = self._empty(shape, strides, dtype)
        if self.steps:
            launch(self.steps, self.others, tensors, self._device)
        return tensors


_NO_TENSORS = (None,) * len(Tensors._fields)
_ROW_LISTS = Tensors._fields.index("row_spans")
_OUT, _LSE = Tensors._fields.index("out"), Tensors._fields.index("lse")
# Those that kernels load; narrower ones are widened first.
_BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Beyond the distance of any two positions (`_MOST_ROWS` of the backend).
_FARTHEST = 2**29
_HOPPER_SHARED_BYTES = 227 << 10
# Padded rows in parts for one that is; and so few of them that it does not matter, 50 MB at head_dim 128.
_MOST_PADDED = 2.5
_FEW_ROWS = 2**16


def kernel_problem(problem: Problem) -> tuple[Problem, BlockMask | None]:
    """What the kernels compute, which can be remembered, and the mask of a call."""
    mask = problem.block_mask
    return _as_computed(problem if mask is None else problem.without_mask), mask


@functools.lru_cache(maxsize=1024)
def _as_computed(problem: Problem) -> Problem:
    """The same call without idle limits, with the columns that `rows_in_place` adds."""
    problem = without_idle_limits(problem)
    head_dim, head_dim_v = (whole_width(width, problem.dtype) for width in (problem.head_dim, problem.head_dim_v))
    if (head_dim, head_dim_v) == (problem.head_dim, problem.head_dim_v):
        return problem
    return dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)


def _columns(x: Tensor, width: int) -> Tensor:
    """The first columns of rows, contiguous."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


@functools.lru_cache(maxsize=1024)
def without_idle_limits(problem: Problem) -> Problem:
    """The same call without limits that no pair of positions reaches, so that it has the kernels, and bits, of one."""
    band, shift = problem.spec.band, problem.shift or 0
    left = None if band.left is None or band.left - shift > _FARTHEST else band.left
    right = None if band.right is None or band.right + shift > _FARTHEST else band.right
    if (left, right) == (band.left, band.right):
        return problem
    return dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, band=Band(left, right)))


@functools.lru_cache(maxsize=1024)
def _forward_plan(problem: Problem, how: How) -> Plan:
    """The kernels of a call; and those that other lengths would need instead."""
    made = [
        _Made("out", shapes_of(problem)["out"], problem.dtype),
        _Made("lse", lse_shape(problem), torch.float32),
    ]
    if problem.total_q == 0:
        return Plan(how.device, made, ())
    hides = _can_hide(problem, how)
    config = kernel_config("forward", problem, how)
    splits, split_keys = num_splits(problem, config, num_processors(how.device))
    # Lists are not split, and packed calls neither.
    can_split = problem.layout == "dense" and how.row_lists is None
    splits = splits if can_split else 1
    parts = [
        _Made("out_parts", (splits, problem.total_q * problem.num_heads_q, problem.head_dim_v), torch.float32),
        _Made("lse_parts", (splits, problem.total_q * problem.num_heads_q), torch.float32),
    ]
    sizes = {"num_splits": splits, "split_keys": split_keys}
    build = Builder(problem, how)
    whole = [build.row_step(forward_kernels.forward_kernel, config, {"flags": hides})]
    split = [
        build.row_step(forward_kernels.forward_kernel, config, {"has_splits": True}, sizes),
        build.row_step(forward_kernels.combine_kernel, config, {"flags": hides}, sizes),
    ]
    # Two kernels, because one for both is up to 7 % slower (docs/measured-facts.md).
    steps, others = (split, whole) if splits > 1 else (whole, split if can_split else [])
    made += parts if splits > 1 else []
    if hides:
        exact = kernel_config("exact_forward", problem, how)
        steps.append(looks_at_flags(build.row_step(forward_kernels.exact_forward_kernel, exact), how))
    return Plan(how.device, [*made, *_flags_of(steps)], steps, others)


@functools.lru_cache(maxsize=1024)
def _backward_plan(problem: Problem, how: How) -> Plan:
    """delta, dq, dk and dv."""
    shapes = shapes_of(problem)
    made = [_Made(name, shapes[name], problem.dtype) for name in ("dq", "dk", "dv")]
    made.append(_Made("delta", lse_shape(problem), torch.float32))
    if problem.total_q == 0:
        return Plan(how.device, made, ())
    made += [_Made(name, (_padded_rows(how.rows_of(problem)),), torch.float32) for name in ("row_lse", "row_delta")]
    steps, others = _plain_steps(problem, how), list[Step]()
    if _takes_parts(problem, how):
        parts = _parts_steps(problem, how)
        # Which of both is a matter of lengths, so both are compiled.
        steps, others = (parts, steps) if _fills_tiles(problem) else (steps, parts)
        made += _parts_made(problem) if steps is parts else []
    return Plan(how.device, [*made, *_flags_of(steps)], steps, others)


def _plain_steps(problem: Problem, how: How) -> list[Step]:
    hides = _can_hide(problem, how)
    build = Builder(problem, how)
    steps = [
        build.delta_step(),
        build.row_step(backward_kernels.query_kernel, kernel_config("query", problem, how), {"flags": hides}),
    ]
    if hides:
        exact = kernel_config("exact_query", problem, how)
        steps.append(looks_at_flags(build.row_step(backward_kernels.exact_query_kernel, exact), how))
    if problem.total_k > 0:
        steps.append(build.key_step(backward_kernels.key_kernel, kernel_config("key", problem, how), {"flags": hides}))
        if hides:
            exact = kernel_config("exact_key", problem, how)
            steps.append(looks_at_flags(build.key_step(backward_kernels.exact_key_kernel, exact), how))
    return steps


def _parts_steps(problem: Problem, how: How) -> list[Step]:
    """Of float32 operands that are split first."""
    config, key_config = kernel_config("parts_query", problem, how), kernel_config("parts_key", problem, how)
    exact, exact_key = kernel_config("exact_parts_query", problem, how), kernel_config("exact_parts_key", problem, how)
    flags = {"flags": True}
    build = Builder(problem, how)
    return [
        build.delta_step(writes_parts=True),
        build.key_step(parts_kernels.split_kernel, Config(16, ROW_BLOCK, 8, 1)),
        build.row_step(parts_kernels.query_parts_kernel, config, flags),
        looks_at_flags(build.row_step(backward_kernels.exact_query_kernel, exact), how),
        build.key_step(parts_kernels.key_parts_kernel, key_config, flags),
        looks_at_flags(build.key_step(backward_kernels.exact_key_kernel, exact_key), how),
    ]


@functools.lru_cache(maxsize=1024)
def _bias_plan(problem: Problem, how: How, shape: torch.Size) -> Plan:
    """Sums in float32 that the bias broadcasts to: with entries of their own where a sum would leave little to do side
    by side. Its tensors are those of the backward."""
    batch, heads, rows, keys = shape
    sums_rows, sums_keys = rows == 1, keys == 1 and rows > 1
    if rows == 1 and keys == 1:
        keys = problem.seqlen_k
    if sums_rows or sums_keys:
        batch, heads = problem.batch, problem.num_heads_q
    config = kernel_config("bias", problem, how)
    programs = batch * heads
    programs *= 1 if sums_rows else -(-rows // config.block_m)
    programs *= 1 if sums_keys else -(-keys // config.block_n)
    made = [_Made("dbias", (batch, heads, rows, keys), torch.float32)]
    if math.prod(made[0].shape) == 0:
        return Plan(how.device, made, ())
    build = Builder(problem, how)
    facts = {"sums_rows": sums_rows, "sums_keys": sums_keys, **list_facts(how.row_lists)}
    sizes = {"dbias_shape": (batch, heads, rows, keys), **list_numbers(problem, how.row_lists)}
    return Plan(how.device, made, [build.step(bias_gradient.bias_kernel, config, programs, facts, sizes)])


def lse_shape(problem: Problem) -> tuple[int, ...]:
    """Of lse and its kin."""
    if problem.layout == "varlen":
        return problem.num_heads_q, problem.total_q
    return problem.batch, problem.num_heads_q, problem.seqlen_q


def _parts_made(problem: Problem) -> list[_Made]:
    rows, keys = _padded_rows(problem), _padded_keys(problem)
    d, e = padded(problem.head_dim), padded(problem.head_dim_v)
    shapes = {"q_parts": (rows, 3, d), "k_parts": (keys, 3, d), "v_parts": (keys, 3, e), "dout_parts": (rows, 3, e)}
    return [_Made(name, shape, torch.bfloat16) for name, shape in shapes.items()]


def _padded_rows(problem: Problem) -> int:
    """Rows of the arrays of `tiles.padded_rows`."""
    return num_row_tiles(problem, ROW_BLOCK) * ROW_BLOCK * num_sides(problem)


def _padded_keys(problem: Problem) -> int:
    return num_key_tiles(problem, ROW_BLOCK) * ROW_BLOCK * num_sides(problem)


def _flags_of(steps: Sequence[Step]) -> list[_Made]:
    """One flag per program, read by the exact kernel that follows, which numbers tiles in the same way."""
    most = max([step.num_programs for step in steps if step.facts.flags], default=0)
    return [_Made("flags", (most,), torch.int32)] if most > 0 else []


def looks_at_flags(step: Step, how: How) -> Step:
    """An exact step has a program for each processor, which goes through many tiles' flags."""
    return dataclasses.replace(step, num_programs=min(step.num_programs, num_processors(how.device)))


def _can_hide(problem: Problem, how: How) -> bool:
    """Where nothing can be hidden, nothing hidden can get in."""
    return not problem.spec.band.is_unlimited or problem.spec.has_bias or how.row_lists is not None


def _takes_parts(problem: Problem, how: How) -> bool:
    """Whether float32 operands are split into parts before the backward's kernels."""
    # Where there are no keys, no kernel writes parts of them.
    return (
        how.precision == "bf16x6"
        and how.row_lists is None
        and problem.total_k > 0
        and takes_parts(problem)
        and _is_hopper(how.device)
    )


def _fills_tiles(problem: Problem) -> bool:
    """Whether parts take not much more memory than they would without padding, or little."""
    rows, keys = problem.total_q * problem.num_heads_q, problem.total_k * problem.num_heads_kv
    most_rows, most_keys = (max(_MOST_PADDED * number, _FEW_ROWS) for number in (rows, keys))
    return _padded_rows(problem) <= most_rows and _padded_keys(problem) <= most_keys


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def kernel_config(kernel: str, problem: Problem, how: How) -> Config:
    """The tiles of a kernel on the device of a call."""
    return config_for(kernel, how.rows_of(problem), _is_small(how.device), has_blocks=how.row_lists is not None)


@functools.cache
def _is_small(device: torch.device) -> bool:
    """Whether a program has less shared memory than Hopper's 227 KiB."""
    if device.type == "cpu":
        return False
    properties = torch.get_device_module(device).get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) < _HOPPER_SHARED_BYTES


@functools.cache
def num_processors(device: torch.device) -> int:
    """Programs that run at once, about; what splitting the keys aims at."""
    if device.type == "cpu":
        return 4
    return int(torch.get_device_module(device).get_device_properties(device).multi_processor_count)


def _slopes(alibi: Tensor, num_heads: int) -> Tensor:
    """In float32; of no sequence, numbers for the tokens that belong to none."""
    return alibi.float().contiguous() if alibi.numel() > 0 else alibi.new_zeros(num_heads, dtype=torch.float32)


def _readable(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs as the kernels read them."""
    query, key, value = map(rows_in_place, inputs[:3])
    return readable_features(inputs._replace(query=query, key=key, value=value))


def readable_features(inputs: AttentionInputs) -> AttentionInputs:
    """All but query, key and value as kernels read them: contiguous, slopes and sinks in float32."""
    query, key, value, bias, alibi, sinks, seed, cu_seqlens_q, cu_seqlens_k = inputs
    return AttentionInputs(
        query,
        key,
        value,
        bias if bias is None or bias.dtype in _BIAS_DTYPES else bias.float(),
        None if alibi is None else _slopes(alibi, query.shape[-2]),
        None if sinks is None else sinks.float().contiguous(),
        seed,
        None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
    )
