"""Run by test_hopper_compile.py: compiles variants of the Hopper forward for sm_90 and says what their binaries use.

Usage: python hopper_compile_worker.py FILE, with a JSON list of rows, each answered by a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton_compile_worker import _nvidia_uses

from tilestream.backends.hopper.call import SHARED_BYTES, config_for, facts_of
from tilestream.backends.hopper.plan import OPTIONS, source
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

_TARGET = GPUTarget("cuda", 90, 32)
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
    return dense.packed([8192, 100], [8192, 100]) if "packed" in names else dense


def compiled(**row: Any) -> dict[str, Any]:
    """What the kernel of a call uses; bytes of spills are of a thread."""
    problem = problem_of(**row)
    facts = facts_of(problem, config_for(problem))
    binary = triton.compile(source(facts, problem.dtype, problem.dtype), target=_TARGET, options=OPTIONS)
    return {"shared": binary.metadata.shared, "shared_limit": SHARED_BYTES, **_nvidia_uses(binary.asm["cubin"])}


if __name__ == "__main__":
    for row in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            answer = compiled(**row)
        except Exception as error:  # of the compiler: the failure of this row, and of no other
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
