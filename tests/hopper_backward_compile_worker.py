"""Run by test_hopper_backward_compile.py: compiles variants of the Hopper backward for sm_90, says what they use.

Usage: python hopper_backward_compile_worker.py FILE, with a JSON list of rows, each answered by a line of JSON.
"""

from __future__ import annotations

from typing import Any

import triton
from compile_rows import answer
from hopper_compile_worker import TARGET, problem_of, spills_in_loops
from sass import nvidia_code
from triton_compile_worker import nvidia_uses

from tilestream.backends.hopper.backward_call import backward_config_for, backward_facts_of
from tilestream.backends.hopper.backward_plan import backward_source
from tilestream.backends.hopper.call import SHARED_BYTES
from tilestream.backends.hopper.plan import OPTIONS


def compiled(**row: Any) -> dict[str, Any]:
    """What the kernel of a call uses; bytes of spills are of a thread."""
    problem = problem_of(**row)
    facts = backward_facts_of(problem, backward_config_for(problem))
    binary = triton.compile(backward_source(facts, problem.dtype), target=TARGET, options=OPTIONS)
    cubin = binary.asm["cubin"]
    code = nvidia_code(cubin)
    return {
        "shared": binary.metadata.shared,
        "shared_limit": SHARED_BYTES,
        "spills_in_loops": spills_in_loops(code),
        "wide_sums": code.count("REDG.E.ADD.F32x4"),
        "sums": code.count("REDG"),
        **nvidia_uses(cubin),
    }


if __name__ == "__main__":
    answer(compiled)
