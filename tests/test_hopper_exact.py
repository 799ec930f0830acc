"""Flagged rows of the Hopper kernels, computed again on the interpreter: these, and their tiles, and nothing else."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from interpreter import is_ready
from torch import Tensor

import tilestream
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

_UNTOUCHED = 7.0
_SEQLEN_Q, _SEQLEN_K, _HEAD_DIM, _GROUP = 70, 90, 40, 2
# (batch, query, query head), and the queries and heads of the tiles of 32 packed rows that they are in.
_FLAGGED = [(0, 5, 1), (1, 69, 3)]
_TILES = [(0, slice(0, 16), slice(0, 2)), (1, slice(64, 70), slice(2, 4))]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, interpreted, which its decorators decide, and without a launch that ends early to wait for."""
    if not is_ready():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "tilestream.backends.hopper.exact", raising=False)
    module = importlib.import_module("tilestream.backends.hopper.exact")
    monkeypatch.setattr(module, "gdc_wait", lambda: None)
    yield module
    # Not interpreted for whoever imports it next.
    sys.modules.pop("tilestream.backends.hopper.exact", None)


def _inputs() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    leaves = [
        torch.randn(2, n, heads, _HEAD_DIM, generator=generator).half()
        for n, heads in ((_SEQLEN_Q, 2 * _GROUP), (_SEQLEN_K, 2), (_SEQLEN_K, 2))
    ]
    # What no query sees.
    leaves[1][:, _SEQLEN_Q:], leaves[2][:, _SEQLEN_Q:] = torch.nan, torch.inf
    return leaves, torch.randn(leaves[0].shape, generator=generator).half()


def _run(kernel: Any, config: Any, num_flaggers: int, name: str) -> tuple[Tensor, Tensor]:
    """(what the kernel leaves of out or dq, what is right)."""
    from tilestream.backends.triton import plan
    from tilestream.backends.triton.call import Tensors, contiguous_strides, shapes_of

    leaves, dout = _inputs()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out, lse = tilestream.attention_with_lse(*leaves, causal=True, shift=0, scale=0.25, backend="cpu")
    dq = torch.autograd.grad(out, leaves[0], dout)[0]
    problem = Problem.dense(
        batch=2, seqlen_q=_SEQLEN_Q, seqlen_k=_SEQLEN_K, num_heads_q=2 * _GROUP, num_heads_kv=2, head_dim=_HEAD_DIM,
        dtype=torch.float16, spec=AttentionSpec(scale=0.25, band=Band(None, 0)), shift=0,
    )  # fmt: skip
    strides = tuple(contiguous_strides(shapes_of(problem)[operand]) for operand in ("q", "k", "v", "out", "dout"))
    build = plan.Builder(problem, plan.How(torch.device("cpu"), "ieee", strides))
    step = build.row_step(kernel, config, sizes={"num_flaggers": num_flaggers})
    flags = torch.zeros(2, 2 * _GROUP, _SEQLEN_Q, dtype=torch.int32)
    for batch, query, head in _FLAGGED:
        flags[batch, head, query] = 1
    first = torch.zeros(num_flaggers, dtype=torch.int32)
    first[-1] = 1
    found = torch.full_like(out, _UNTOUCHED).detach()
    tensors = Tensors(
        *(leaf.detach() for leaf in leaves), out=found if name == "out" else out.detach(), lse=lse.detach(), dout=dout,
        delta=(dout.float() * out.detach().float()).sum(-1).transpose(1, 2).contiguous(), dq=found,
        flags=torch.cat([first, flags.flatten()]),
    )  # fmt: skip
    step.kernel[(3,)](tensors, step.numbers, step.facts)
    return found, (out if name == "out" else dq).detach()


# Of the interpreter, where a branch depends on a sum, and of NumPy below it.
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("kernel", "num_flaggers", "name"), [("exact_rows", 5, "out"), ("exact_dq", 1, "dq")])
def test_flagged_rows_are_computed_again(exact: Any, kernel: str, num_flaggers: int, name: str) -> None:
    found, right = _run(getattr(exact, f"{kernel}_kernel"), exact.EXACT_CONFIG, num_flaggers, name)
    wanted = torch.full_like(found, _UNTOUCHED)
    for batch, queries, heads in _TILES:
        wanted[batch, queries, heads] = right[batch, queries, heads]
    assert right.isfinite().all()
    torch.testing.assert_close(found, wanted, atol=4e-3, rtol=4e-3)
    untouched = wanted == _UNTOUCHED
    assert torch.equal(found[untouched], wanted[untouched])
