"""What the plans of the Triton backend take besides a problem, for tensors that nobody made."""

from __future__ import annotations

import torch

from tilestream.backends.triton import plan
from tilestream.backends.triton.call import contiguous_strides, precision_of, shapes_of
from tilestream.backends.triton.plan import How
from tilestream.block_mask import BlockMask
from tilestream.problem import Problem


def hows(problem: Problem, mask: BlockMask | None = None) -> tuple[How, How]:
    """Of the forward and of the backward, with a gradient of lse; everything contiguous and in the problem's dtype."""
    shapes = shapes_of(problem)
    strides = tuple(contiguous_strides(shapes[name]) for name in ("q", "k", "v", "out", "dout"))
    bias_dtype = problem.dtype if problem.spec.has_bias else None
    forward = How(torch.device("cpu"), precision_of(problem), strides[:3], bias_dtype=bias_dtype)
    backward = forward._replace(strides=strides, has_dlse=True)
    if mask is None:
        return forward, backward
    sizes = [plan._lists(mask, problem, forward, kernel).sizes for kernel in ("forward", "query", "key")]
    return forward._replace(row_lists=sizes[0]), backward._replace(row_lists=sizes[1], key_lists=sizes[2])
