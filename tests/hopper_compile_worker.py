"""Run by test_hopper_compile.py: compiles variants of the Hopper forward for sm_90 and says what their binaries use.

Usage: python hopper_compile_worker.py FILE, with a JSON list of rows, each answered by a line of JSON.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
import triton
from compile_rows import answer
from sass import nvidia_code
from triton.backends.compiler import GPUTarget
from triton_compile_worker import nvidia_uses

from tilestream import BlockMask
from tilestream.backends.hopper.call import SHARED_BYTES, configs_for, facts_of
from tilestream.backends.hopper.plan import OPTIONS, source
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

TARGET = GPUTarget("cuda", 90, 32)
_BANDS = {"full": Band(None, None), "causal": Band(None, 0), "window": Band(300, 20), "left": Band(300, None)}


def problem_of(band: str, features: str, dtype: str, head_dim: int, head_dim_v: int) -> Problem:
    """A call; `features` are names with a plus between them."""
    names = features.split("+")
    dense = Problem.dense(
        batch=2,
        seqlen_q=8192,
        num_heads_q=8,
        num_heads_kv=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=getattr(torch, dtype),
        device_type="cuda",
        spec=AttentionSpec(
            band=_BANDS[band],
            scale=0.1,
            softcap=20.0 if "softcap" in names else 0.0,
            has_alibi="alibi" in names,
            has_bias="bias" in names,
            has_sinks="sinks" in names,
        ),
    )
    if "blocks" in names:
        return replace(dense, block_mask=BlockMask.butterfly(8192))
    return dense.packed([8192, 100], [8192, 100]) if "packed" in names else dense


def compiled(**row: Any) -> list[dict[str, Any]]:
    """What the kernels of a call use, one for each of its tiles; bytes of spills are of a thread."""
    problem = problem_of(**row)
    uses = []
    for config in configs_for(problem):
        facts = facts_of(problem, config)
        binary = triton.compile(source(facts, problem.dtype, problem.dtype), target=TARGET, options=OPTIONS)
        cubin = binary.asm["cubin"]
        use = {"shared": binary.metadata.shared, "shared_limit": SHARED_BYTES, **nvidia_uses(cubin)}
        uses.append({**use, "spills_in_loops": spills_in_loops(nvidia_code(cubin))})
    return uses


def spills_in_loops(code: str) -> int:
    """How many instructions read or write local memory in innermost loops that have products."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", code)]
    jumps = [(at, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)) for at, text in lines]
    loops = [(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) < at]
    innermost = [(lo, hi) for lo, hi in loops if not any(lo <= a and b <= hi and (a, b) != (lo, hi) for a, b in loops)]
    bodies = [[text for at, text in lines if lo <= at <= hi] for lo, hi in innermost]
    with_products = [body for body in bodies if any("HGMMA" in text for text in body)]
    assert with_products, "no loop with products was found"
    return sum(bool(re.search(r"\b(LDL|STL)\b", text)) for body in with_products for text in body)


if __name__ == "__main__":
    answer(compiled, failed=lambda error: [error])
