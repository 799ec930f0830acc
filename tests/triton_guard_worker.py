"""Run by test_triton.py in a process of its own, which a stray read or write of an interpreted kernel ends.

The tensors lie as in guard_worker.py: against an unmapped page. Results must have the bits of ordinary tensors; where
cu_seqlens lie, nothing is said about results, but still nothing outside of the tensors is touched.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from guard_worker import guard, problems, results_guarded, run
from interpreter import import_interpreted, interpreting

import tilestream.backends.triton as backend
from tilestream.backends.triton import block_lists
from tilestream.block_mask import BlockMask
from tilestream.problem import AttentionInputs, Problem
from tilestream.spec import Band

_FARTHEST = 2**31 - 1
# For 71 queries and 90 keys in three sequences.
LIES = (
    ([0, 60, 20, 71], [0, 80, 7, 90]),  # decrease
    ([0, 37, 37, 500], [0, 53, 60, 9000]),  # end beyond the tensor
    ([-40, 0, 30, 71], [-1, -5, 60, 90]),  # start before it
    ([30, 40, 50, 71], [33, 50, 60, 90]),  # start after it
    ([_FARTHEST, -_FARTHEST, _FARTHEST, -_FARTHEST], [-_FARTHEST, _FARTHEST, -_FARTHEST, _FARTHEST]),
)


def check_truths() -> None:
    """Every tensor in guarded memory, at either end of it."""
    for problem, inputs in problems(torch.bfloat16, (7, 40)):
        wanted = run(problem, inputs, lambda x, strided=False: x, backend.BACKEND)
        for at_end in (True, False):
            for one, other in zip(_guarded(problem, inputs, at_end), wanted, strict=True):
                assert torch.equal(one, other)


def check_lies() -> None:
    """cu_seqlens of any values; with a bias that is large enough for every sequence that fits into the tensors."""
    for problem, inputs in problems(torch.float32, (7, 7)):
        for index, (starts_q, starts_k) in enumerate(LIES if problem.layout == "varlen" else ()):
            print(starts_q, starts_k)
            lying = _lying(inputs, starts_q, starts_k)
            # One end for the plain call, the other for the one with every feature.
            at_end = (index % 2 == 0) == problem.spec.has_bias
            _guarded(Problem.from_inputs(lying, problem.spec, shift=None), lying, at_end)


def check_blocks() -> None:
    """With a block mask, whose lists lie in guarded memory too; and cu_seqlens of any values."""
    for problem, inputs in problems(torch.bfloat16, (7, 16)):
        lengths, is_dense = (problem.seqlen_q, problem.seqlen_k), problem.layout == "dense"
        heads = 6 if problem.spec.has_bias else 1
        shown = torch.rand(1, heads, *lengths, generator=torch.Generator().manual_seed(1)) < 0.3
        mask = BlockMask.from_dense(shown, block_size=32)
        masked = dataclasses.replace(problem, block_mask=mask)
        wanted = run(masked, inputs, lambda x, strided=False: x, backend.BACKEND)
        for at_end in (True,) if problem.spec.has_bias else (True, False):
            made = block_lists._MADE[mask]
            made.update({key: _guarded_lists(lists, at_end) for key, lists in made.items()})
            for one, other in zip(_guarded(masked, inputs, at_end), wanted, strict=True):
                assert torch.equal(one, other)
        for starts_q, starts_k in () if is_dense or problem.spec.has_bias else LIES:
            print(starts_q, starts_k)
            _guarded(masked, _lying(inputs, starts_q, starts_k), True)


def _guarded_lists(lists: block_lists.Lists, at_end: bool) -> block_lists.Lists:
    tensors = {name: getattr(lists, name) for name in ("spans", "spans_in_order", "tiles", "bits")}
    return dataclasses.replace(lists, **{name: guard(x, at_end) for name, x in tensors.items()})


def check_parts() -> None:
    """float32 operands in parts, with the tiles of Hopper, also where the band shows nothing."""
    from tilestream.backends.triton import backward_parts, plan

    plan._takes_parts = lambda problem, how: plan.takes_parts(problem)
    # Its assembly is for the placing of loads, and nothing else.
    backward_parts.delayed = lambda parts: parts
    for problem, inputs in problems(torch.float32, (128, 128)):
        for band, shift in ((Band(None, 0), -500), (Band(None, 0), 9), (Band(5, None), 10**6)):
            if problem.spec.has_bias:
                continue
            spec = dataclasses.replace(problem.spec, band=band)
            is_dense = problem.layout == "dense"
            bent = dataclasses.replace(problem, spec=spec, shift=shift if is_dense else None)
            for at_end in (True, False):
                _guarded(bent, inputs, at_end)


def _guarded(problem: Problem, inputs: AttentionInputs, at_end: bool) -> list[torch.Tensor]:
    # Flushed, so that the last words of a process that dies say what it was doing.
    print(f"{problem.layout}, bias={problem.spec.has_bias}, {at_end=}", flush=True)
    with results_guarded(at_end):
        return run(problem, inputs, lambda x, strided=False: guard(x, at_end, strided), backend.BACKEND)


def _lying(inputs: AttentionInputs, starts_q: list[int], starts_k: list[int]) -> AttentionInputs:
    bias = inputs.bias
    if bias is not None:
        bias = torch.randn(*bias.shape[:2], inputs.query.shape[0], inputs.key.shape[0])
    starts = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    return AttentionInputs(*inputs[:3], bias, *inputs[4:7], *starts)


if __name__ == "__main__":
    import_interpreted()
    checks = {"truths": check_truths, "lies": check_lies, "parts": check_parts, "blocks": check_blocks}
    with interpreting({"parts": None, "blocks": (32, 64)}.get(sys.argv[1], (64, 64))):
        checks[sys.argv[1]]()
    print("all in bounds")
