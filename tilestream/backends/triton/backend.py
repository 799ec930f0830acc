"""The backend object: what it takes, and the launches that a call is."""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from tilestream.backends.cpu.backward import sink_gradient
from tilestream.backends.triton import backward, bias_gradient, forward
from tilestream.backends.triton.call import (
    Tensors,
    common_unit,
    facts_of,
    num_key_tiles,
    num_row_tiles,
    numbers_of,
    padded,
    strides_of,
)
from tilestream.backends.triton.configs import Config, config_for, num_splits
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.state import AttentionOutput, finite_or_zero

__all__ = ["BACKEND", "TritonBackend"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD_DIM = 512
# Positions, edges and rows are 32-bit numbers in the kernels; addresses are not.
_MOST_ROWS = 2**28


class TritonBackend:
    """Every feature in float16, bfloat16 and float32, forward and backward, with the same bits from run to run."""

    name = "triton"

    def supports(self, problem: Problem) -> str | None:
        """None, or why the call cannot run here."""
        reason = _device_reason(problem.device_type)
        if reason is not None:
            return reason
        if problem.dtype not in _DTYPES:
            return f"dtype {problem.dtype} is served by the PyTorch loop"
        if max(problem.head_dim, problem.head_dim_v) > _LARGEST_HEAD_DIM:
            return f"head_dim {max(problem.head_dim, problem.head_dim_v)} is above {_LARGEST_HEAD_DIM}"
        if max(problem.total_q, problem.total_k) * problem.group > _MOST_ROWS:
            return "it has more than 2**28 rows of queries or keys"
        return None

    def tile_shape(self, problem: Problem) -> tuple[int, int]:
        """See `Backend.tile_shape`."""
        config = config_for("query" if problem.is_backward else "forward", problem, _width(problem))
        return max(1, config.block_m // problem.group), config.block_n

    def forward(self, problem: Problem, inputs: AttentionInputs) -> AttentionOutput:
        """See `Backend.forward`."""
        ready = _readable(inputs)
        query = ready.query
        out = query.new_empty((*query.shape[:-1], ready.value.shape[-1]))
        lse = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3]), dtype=torch.float32)
        if lse.numel() > 0:
            _Launcher(problem, ready, out=out, lse=lse).forward()
        return AttentionOutput(out, lse)

    def backward(
        self,
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
        launcher = _Launcher(
            problem,
            ready,
            out=_rows_in_place(output.out),
            lse=lse,
            dout=_rows_in_place(dout),
            dlse=None if dlse is None else dlse.float().contiguous(),
            delta=delta,
            dq=dq,
            dk=dk,
            dv=dv,
        )
        launcher.backward()
        dbias = dsinks = None
        if needs_dbias and inputs.bias is not None:
            dbias = launcher.bias_gradient(inputs.bias).sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
        if needs_dsinks and inputs.sinks is not None and ready.sinks is not None:
            # A token after the last sequence has no sink.
            delta = delta.masked_fill_(lse == -math.inf, 0.0)
            dsinks = sink_gradient(ready.sinks, finite_or_zero(lse), delta).to(inputs.sinks.dtype)
        return Gradients(dq, dk, dv, dbias, dsinks)


class _Launcher:
    """One call: its tensors as the kernels take them, and the kernels in order."""

    def __init__(self, problem: Problem, inputs: AttentionInputs, **more: Tensor | None) -> None:
        self.problem = problem
        self.inputs = inputs
        query, key, value, bias, slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k = inputs
        self.tensors = Tensors(query, key, value, bias, slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, **more)
        rows = {name: x for name, x in more.items() if x is not None and name not in ("lse", "delta", "dlse")}
        self.unit = common_unit(query, key, value, *rows.values())
        strides = {f"{name}_strides": strides_of(x, self.unit) for name, x in rows.items()}
        self.numbers = numbers_of(problem, inputs, self.unit, **strides)
        # Where nothing can be hidden, nothing hidden can get in.
        self.hides = not problem.spec.band.is_unlimited or problem.spec.has_bias

    def forward(self) -> None:
        """out and lse."""
        config = self._config("forward")
        splits, split_keys = num_splits(self.problem, config, _num_processors(self.inputs.query.device))
        if splits > 1:
            self._forward_in_splits(config, splits, split_keys)
        else:
            self._run_rows(forward.forward_kernel, config, flags=self.hides)
        if self.hides:
            self._run_rows(forward.exact_forward_kernel, self._config("exact_forward"))

    def _forward_in_splits(self, config: Config, splits: int, split_keys: int) -> None:
        lse, width = self.tensors.lse, self.problem.head_dim_v
        assert lse is not None
        tensors = self.tensors._replace(
            out_parts=lse.new_empty(splits, lse.numel(), width), lse_parts=lse.new_empty(splits, lse.numel())
        )
        numbers = self.numbers._replace(num_splits=splits, split_keys=split_keys)
        self._run_rows(forward.forward_kernel, config, tensors, numbers, has_splits=True)
        self._run_rows(forward.combine_kernel, config, tensors, numbers, flags=self.hides)

    def backward(self) -> None:
        """delta, dk and dv, dq."""
        query_config, key_config = self._config("query"), self._config("key")
        if self.tensors.lse is not None and self.tensors.lse.numel() > 0:
            self._run_rows(backward.delta_kernel, query_config, has_dlse=self.tensors.dlse is not None)
            self._run_rows(backward.query_kernel, query_config, flags=self.hides)
            if self.hides:
                self._run_rows(backward.exact_query_kernel, self._config("exact_query"))
        if self.inputs.key.numel() > 0:
            self._run_keys(backward.key_kernel, key_config, flags=self.hides)
            if self.hides:
                self._run_keys(backward.exact_key_kernel, self._config("exact_key"))

    def bias_gradient(self, bias: Tensor) -> Tensor:
        """Sums in float32 that `bias` broadcasts to; entries of their own where a sum would leave no parallel work."""
        batch, heads, rows, keys = bias.shape
        sums_rows, sums_keys = rows == 1, keys == 1 and rows > 1
        if keys == 1 and rows == 1:
            keys = self.problem.seqlen_k
        if sums_rows or sums_keys:
            batch, heads = self.problem.batch, self.problem.num_heads_q
        dbias = torch.empty(batch, heads, rows, keys, dtype=torch.float32, device=bias.device)
        if dbias.numel() == 0:
            return dbias
        config = self._config("bias")
        programs = batch * heads
        programs *= 1 if sums_rows else -(-rows // config.block_m)
        programs *= 1 if sums_keys else -(-keys // config.block_n)
        facts = facts_of(self.problem, config, self.unit, sums_rows=sums_rows, sums_keys=sums_keys)
        numbers = self.numbers._replace(dbias_shape=tuple(dbias.shape))
        _launch(bias_gradient.bias_kernel, self.tensors._replace(dbias=dbias), numbers, facts, config, programs)
        return dbias

    def _config(self, kernel: str) -> Config:
        return config_for(kernel, self.problem, _width(self.problem))

    def _run_rows(self, kernel: Any, config: Config, tensors: Any = None, numbers: Any = None, **facts: bool) -> None:
        """A kernel with a program per tile of packed rows."""
        tiles = num_row_tiles(self.problem, config.block_m)
        starts_last = self.problem.spec.band.right is not None
        self._run(kernel, config, tiles, tensors or self.tensors, numbers or self.numbers, starts_last, **facts)

    def _run_keys(self, kernel: Any, config: Config, **facts: bool) -> None:
        """A kernel with a program per tile of keys."""
        tiles = num_key_tiles(self.problem, config.block_n)
        starts_last = self.problem.spec.band.left is not None
        self._run(kernel, config, tiles, self.tensors, self.numbers, starts_last, **facts)

    def _run(
        self, kernel: Any, config: Config, tiles: int, tensors: Any, numbers: Any, starts_last: bool, **facts: bool
    ) -> None:
        is_packed = self.problem.layout == "varlen"
        programs = tiles * self.problem.num_heads_kv * (1 if is_packed else self.problem.batch)
        if facts.get("flags"):
            # Read by the exact kernel that follows, whose programs have the same tiles.
            self.tensors = self.tensors._replace(flags=tensors.q.new_empty(programs, dtype=torch.int32))
            tensors = tensors._replace(flags=self.tensors.flags)
        numbers = numbers._replace(num_tiles=tiles, num_programs=programs)
        made = facts_of(self.problem, config, self.unit, starts_last=starts_last, **facts)
        _launch(kernel, tensors, numbers, made, config, programs * (numbers.num_splits if made.has_splits else 1))


def _launch(kernel: Any, tensors: Any, numbers: Any, facts: Any, config: Config, num_programs: int) -> None:
    """Launch on the device of the tensors and its current stream; nothing waits for it."""
    device = tensors.q.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_here(kernel, tensors, numbers, facts, config, num_programs)
    else:
        _launch_here(kernel, tensors, numbers, facts, config, num_programs)


def _launch_here(kernel: Any, tensors: Any, numbers: Any, facts: Any, config: Config, num_programs: int) -> None:
    kernel[(num_programs,)](tensors, numbers, facts, num_warps=config.num_warps, num_stages=config.num_stages)


def _width(problem: Problem) -> int:
    """The larger head dimension, as it is on chip."""
    return padded(max(problem.head_dim, problem.head_dim_v))


@functools.cache
def _device_reason(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cuda":
        if torch.version.cuda is not None and torch.cuda.get_device_capability() < (8, 0):
            return f"{torch.cuda.get_device_name()} is older than sm_80"
        return None
    if device_type == "xpu":
        return None
    if device_type == "cpu":
        import triton

        return None if triton.knobs.runtime.interpret else "it runs on GPUs (on a CPU under TRITON_INTERPRET=1)"
    return f"it runs on GPUs, not on {device_type}"


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
        bias,
        None if alibi is None else alibi.float().contiguous(),
        None if sinks is None else sinks.float().contiguous(),
        seed,
        None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
    )


BACKEND = TritonBackend()
