"""Run by test_triton_compile.py, outside of the interpreter: compiles kernels for GPUs that are not here.

Usage: python triton_compile_worker.py FILE, with a JSON list of rows, of which each is answered by a line of JSON: what
the binary of that kernel uses.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import triton
from compile_rows import answer
from sass import nvidia_code, unwritten
from triton.backends.compiler import GPUTarget
from triton_hows import hows

from tilestream.backends.triton import plan
from tilestream.backends.triton.launch import Step, options, source
from tilestream.block_mask import BlockMask
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

# Target, and the shared memory of a program.
_GPUS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
}


def problem_of(gpu: str, kind: str, dtype: torch.dtype, head_dim: int) -> Problem:
    """``plain`` is causal; ``rich`` has everything, packed; ``decode`` is a query per sequence; ``blocks`` has a mask
    besides being causal, ``uneven`` a head_dim_v on chip that differs from head_dim."""
    is_rich = kind == "rich"
    spec = AttentionSpec(
        band=Band(300, 20) if is_rich else Band(None, 0),
        scale=0.1,
        softcap=20.0 if is_rich else 0.0,
        dropout_p=0.1 if is_rich else 0.0,
        has_bias=is_rich,
        has_alibi=is_rich,
        has_sinks=is_rich,
    )
    dense = Problem.dense(
        batch=2,
        seqlen_q=1 if kind == "decode" else 8192,
        seqlen_k=8192,
        num_heads_q=12 if is_rich else 4,
        num_heads_kv=4,
        head_dim=head_dim,
        head_dim_v=head_dim * 3 // 5 if kind == "uneven" else head_dim,
        dtype=dtype,
        # AMD's name in torch is cuda, and what float32 products are made of follows from how torch was built.
        device_type="xpu" if gpu == "gfx942" else "cuda",
        spec=spec,
    )
    if kind == "blocks":
        return dataclasses.replace(dense, block_mask=BlockMask.butterfly(8192))
    return dense.packed([8192, 100], [8192, 100]) if is_rich else dense


def steps_of(problem: Problem) -> dict[str, Step]:
    """Every kernel of a call by its name, with the tiles that configs.py has for it."""
    problem, mask = plan.kernel_problem(problem)
    forward_how, backward_how = hows(problem, mask)
    steps = [*plan._forward_plan(problem, forward_how).steps, *plan._backward_plan(problem, backward_how).steps]
    if problem.spec.has_bias:
        shape = torch.Size((1, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k))
        steps += plan._bias_plan(problem, backward_how, shape).steps
    names = [step.kernel.__name__.removesuffix("_kernel") + "_splits" * step.facts.has_splits for step in steps]
    return dict(zip(names, steps, strict=True))


def compiled(gpu: str, kind: str, dtype: str, head_dim: int, kernel: str) -> dict[str, Any]:
    """What the kernel uses; bytes of spills are of a thread."""
    target, shared_bytes = _GPUS[gpu]
    plan._is_small = lambda device: shared_bytes < plan._HOPPER_SHARED_BYTES
    plan.num_processors = lambda device: 128
    plan._is_hopper = lambda device: gpu == "sm_90"
    for name in ("_forward_plan", "_backward_plan", "_bias_plan", "_list_plan"):
        getattr(plan, name).cache_clear()
    problem = problem_of(gpu, kind, getattr(torch, dtype), head_dim)
    step = steps_of(problem)[kernel]
    binary = triton.compile(
        source(step),
        target=target,
        options=options(step.config, target.backend),
    )
    uses = nvidia_uses(binary.asm["cubin"]) if target.backend == "cuda" else _amd_uses(binary.asm["amdgcn"])
    config = step.config
    tiles = f"{config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stages"
    return {"shared": binary.metadata.shared, "shared_limit": shared_bytes, "tiles": tiles, **uses}


def nvidia_uses(cubin: bytes) -> dict[str, Any]:
    usage, code = nvidia_code(cubin, "-res-usage"), nvidia_code(cubin)
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return {
        "spilled": int(stack),
        "unwritten": unwritten(code),
        "wgmma": len(re.findall(r"\bHGMMA\b", code)),
        "waits": len(re.findall(r"\bWARPGROUP\.DEPBAR\b", code)),
        "mma": len(re.findall(r"\bHMMA\b", code)),
    }


def _amd_uses(code: str) -> dict[str, int]:
    (scratch,) = re.findall(r"\.private_segment_fixed_size:\s*(\d+)", code)
    return {"spilled": int(scratch), "mma": code.count("v_mfma")}


if __name__ == "__main__":
    answer(compiled)
