"""Flagged rows and keys of Hopper calls with a block mask, computed again on the interpreter."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter import is_ready
from masks import mask_of
from torch import Tensor

import tilestream
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

pytestmark = [
    # Of the interpreter, where a branch depends on a sum, and of NumPy below it.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning", "ignore::RuntimeWarning"),
    pytest.mark.parametrize("name", ["bits", "planes", "window"]),
]
_UNTOUCHED = 7.0
_SEQLEN_Q, _SEQLEN_K, _HEADS, _GROUP, _HEAD_DIM = 200, 300, 4, 2, 40
# (batch, query head, query), and of keys (batch, KV head, which 64).
_ROWS, _KEYS = ((0, 1, 5), (1, 3, 199), (1, 0, 130)), ((0, 0, 1), (1, 1, 2))
_CPU = torch.device("cpu")
_MODULES = ("tilestream.backends.hopper.exact", "tilestream.backends.hopper.exact_lists")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, interpreted, which its decorators decide, and without a launch that ends early to wait for."""
    if not is_ready():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in _MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(_MODULES[1])
    monkeypatch.setattr(module, "gdc_wait", lambda: None)
    yield module
    # Not interpreted for whoever imports them next.
    for name in _MODULES:
        sys.modules.pop(name, None)


class _Call:
    """A call in which keys are NaN and values infinite that nothing sees, and its results on another backend."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.mask = mask_of(name, _SEQLEN_Q, _SEQLEN_K, 2, _HEADS)
        self.leaves = [
            torch.randn(2, n, heads, _HEAD_DIM, generator=generator).half()
            for n, heads in ((_SEQLEN_Q, _HEADS), (_SEQLEN_K, _HEADS // _GROUP), (_SEQLEN_K, _HEADS // _GROUP))
        ]
        self.leaves[1][:, 290:], self.leaves[2][:, 290:] = torch.nan, torch.inf
        self.sinks = torch.randn(_HEADS, generator=generator)
        self.dout = torch.randn(self.leaves[0].shape, generator=generator).half()
        leaves = [leaf.clone().requires_grad_() for leaf in self.leaves]
        out, lse = tilestream.block_sparse_attention_with_lse(
            *leaves, self.mask, window=(None, 89), shift=0, scale=0.25, sinks=self.sinks, backend="cpu"
        )
        self.gradients = torch.autograd.grad(out, leaves, self.dout)
        self.out, self.lse = out.detach(), lse.detach()
        self.problem = Problem.dense(
            batch=2, seqlen_q=_SEQLEN_Q, seqlen_k=_SEQLEN_K, num_heads_q=_HEADS, num_heads_kv=_HEADS // _GROUP,
            head_dim=_HEAD_DIM, dtype=torch.float16, shift=0,
            spec=AttentionSpec(scale=0.25, band=Band(None, 89), has_sinks=True),
        )  # fmt: skip

    def builder(self, problem: Problem) -> Any:
        """Of steps of a problem whose band the lists know."""
        from tilestream.backends.triton import plan
        from tilestream.backends.triton.call import contiguous_strides

        problem = replace(problem, spec=replace(problem.spec, band=Band(None, None)))
        strides = tuple(contiguous_strides(tuple(x.shape)) for x in (*self.leaves, self.out, self.dout))
        return plan.Builder(problem, plan.How(_CPU, "ieee", strides))

    def run(self, step: Any, lists: Any, flags: Tensor, **made: Tensor) -> None:
        from tilestream.backends.triton.call import Tensors

        delta = (self.dout.float() * self.out.float()).sum(-1).transpose(1, 2).contiguous()
        given = {"out": self.out, "lse": self.lse, "dout": self.dout, "delta": delta, "flags": flags, **made}
        step.kernel[(3,)](
            Tensors(*self.leaves, sinks=self.sinks, **given, **lists.for_exact()), step.numbers, step.facts
        )


@pytest.mark.parametrize(("kernel", "tile"), [("rows", (128, 64)), ("dq", (128, 128))])
def test_flagged_rows(exact: Any, name: str, kernel: str, tile: tuple[int, int]) -> None:
    from tilestream.backends.hopper.block_lists import lists_of
    from tilestream.backends.hopper.exact import EXACT_CONFIG

    call = _Call(name)
    lists = lists_of(call.problem, call.mask, tile, 132, _CPU)
    config = replace(EXACT_CONFIG, num_slices=tile[1] // EXACT_CONFIG.block_n)
    build = call.builder(replace(call.problem, num_heads_kv=_HEADS))
    step = build.row_step(getattr(exact, f"exact_listed_{kernel}_kernel"), config, sizes={"num_flaggers": 3})
    right = call.out if kernel == "rows" else call.gradients[0]
    flags = torch.zeros(3 + 2 * _HEADS * _SEQLEN_Q, dtype=torch.int32)
    found, wanted = (torch.full_like(right, _UNTOUCHED) for _ in range(2))
    for batch, head, row in _ROWS:
        flags[3 + (batch * _HEADS + head) * _SEQLEN_Q + row] = flags[1] = 1
        tile_rows = slice(row // 32 * 32, row // 32 * 32 + 32)
        wanted[batch, tile_rows, head] = right[batch, tile_rows, head]
    call.run(step, lists, flags, **{"out" if kernel == "rows" else "dq": found})
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, atol=6e-3, rtol=6e-3)


def test_flagged_keys(exact: Any, name: str) -> None:
    from tilestream.backends.hopper.block_lists import key_lists_of
    from tilestream.backends.triton.configs import Config

    call = _Call(name)
    lists = key_lists_of(call.problem, call.mask, (64, 128), 132, _CPU)
    step = call.builder(call.problem).key_step(exact.exact_listed_key_kernel, Config(16, 32, 8, 1, num_slices=2))
    _dq, dk, dv = call.gradients
    found_dk, found_dv, wanted_dk, wanted_dv = (torch.full_like(dk, _UNTOUCHED) for _ in range(4))
    flags = torch.zeros(2, _HEADS // _GROUP, -(-_SEQLEN_K // 64), dtype=torch.int32)
    for batch, head, number in _KEYS:
        flags[batch, head, number] = 1
        keys = slice(number * 64, number * 64 + 64)
        wanted_dk[batch, keys, head], wanted_dv[batch, keys, head] = dk[batch, keys, head], dv[batch, keys, head]
    call.run(step, lists, flags.flatten(), dk=found_dk, dv=found_dv)
    torch.testing.assert_close(found_dk, wanted_dk, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found_dv, wanted_dv, atol=1e-2, rtol=1e-2)
