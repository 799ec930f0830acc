"""What the plans of the Triton backend take besides a problem, for tensors that nobody made."""

from __future__ import annotations

import torch

from tilestream.backends.triton.call import Tensors, contiguous_strides, precision_of, shapes_of
from tilestream.backends.triton.plan import How
from tilestream.problem import Problem


def hows(problem: Problem, device: str = "cpu") -> tuple[How, How]:
    """Of the forward and of the backward, with a gradient of lse; everything contiguous and in the problem's dtype."""
    spec, is_varlen = problem.spec, problem.layout == "varlen"
    dtypes: dict[str, torch.dtype | None] = dict.fromkeys(Tensors._fields)
    dtypes |= dict.fromkeys(("q", "k", "v"), problem.dtype)
    dtypes |= {
        "bias": problem.dtype if spec.has_bias else None,
        "slopes": torch.float32 if spec.has_alibi else None,
        "sinks": torch.float32 if spec.has_sinks else None,
        "seed": torch.int64 if spec.dropout_p > 0 else None,
        "cu_seqlens_q": torch.int32 if is_varlen else None,
        "cu_seqlens_k": torch.int32 if is_varlen else None,
    }
    results = {"out": problem.dtype, "dout": problem.dtype, "lse": torch.float32, "dlse": torch.float32}
    shapes = shapes_of(problem)

    def how(dtypes: dict[str, torch.dtype | None], rows: tuple[str, ...]) -> How:
        strides = tuple(contiguous_strides(shapes[name]) for name in rows)
        return How(torch.device(device), precision_of(problem), tuple(dtypes.values()), True, strides)

    return how(dtypes, ("q", "k", "v")), how(dtypes | results, ("q", "k", "v", "out", "dout"))
