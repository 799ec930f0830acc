"""What only a GPU can show: graphs, streams, sizes beyond 32 bits, and that a changed length compiles nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from targets import HAS_HOPPER
from torch import Tensor

import tilestream
from tilestream import BlockMask, dispatch
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

pytestmark = pytest.mark.gpu

_HOPPER = pytest.mark.skipif(not HAS_HOPPER, reason="needs sm_90")
each_backend = pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=_HOPPER)])
# Hopper's backend leaves a few row tiles over many keys to Triton's, which splits the keys: its calls need more heads.
_HEADS = {"triton": 4, "hopper": 20}


def _tensors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]


def _attend(tensors: list[Tensor], backend: str, **options: object) -> tuple[Tensor, ...]:
    out = tilestream.attention(*tensors, backend=backend, **options)  # type: ignore[arg-type]
    return (out, *torch.autograd.grad(out.float().square().sum(), tensors))


def _assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor], backend: str) -> None:
    """out, dq, dk and dv with the same bits; but dq of the Hopper backend, whose sums have no fixed order."""
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if backend == "hopper" and index == 1:
            # Another rounding of the same number, or one that almost cancels.
            floor = float(theirs.abs().max()) * torch.finfo(torch.float32).eps * 2**6
            torch.testing.assert_close(ours, theirs, rtol=torch.finfo(theirs.dtype).eps, atol=floor)
        else:
            assert torch.equal(ours, theirs), index


def _num_compiled() -> int:
    """Kernels of both backends that this process has compiled or read from a cache."""
    from tilestream.backends.triton.launch import num_compiled

    if not HAS_HOPPER:
        return num_compiled()
    from tilestream.backends.hopper import plan

    return num_compiled() + plan.num_compiled()


def _attend_blocks(tensors: list[Tensor], mask: BlockMask, **options: object) -> tuple[Tensor, ...]:
    out = tilestream.block_sparse_attention(*tensors, mask, backend="triton", **options)  # type: ignore[arg-type]
    return (out, *torch.autograd.grad(out.float().square().sum(), tensors))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_block_masks_in_cuda_graphs() -> None:
    """Once the mask's lists are made."""
    tensors, mask = (
        _tensors(2, 300, 4, 64),
        BlockMask.local_global(300, window=(40, 40), global_tokens=3, block_size=64),
    )
    _attend_blocks(tensors, mask, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _attend_blocks(tensors, mask, causal=True)
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for ours, wanted in zip(captured, _attend_blocks(tensors, mask, causal=True), strict=True):
        assert torch.equal(ours, wanted)


def test_another_mask_and_length_compile_nothing() -> None:
    _attend_blocks(_tensors(2, 512, 4, 64), BlockMask.butterfly(512))
    before = _num_compiled()
    for seqlen in (1000, 133, 4096):
        for mask in (
            BlockMask.butterfly(seqlen),
            BlockMask.strided(seqlen, stride=50, block_size=32),
            BlockMask.from_dense(torch.rand(1, 4, seqlen, seqlen) < 0.1),
        ):
            _attend_blocks(_tensors(1, seqlen, 4, 64), mask, causal=seqlen != 133)
    assert _num_compiled() == before


# torch warns of it in a capture that works.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@each_backend
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 0)}, {"window": (30, 0), "softcap": 5.0}])
def test_cuda_graphs(backend: str, options: dict[str, object]) -> None:
    tensors = _tensors(2, 300, 4, 128)
    _attend(tensors, backend, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _attend(tensors, backend, **options)
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    _assert_same(captured, _attend(tensors, backend, **options), backend)


@each_backend
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 0)}, {"bias": True}])
def test_nothing_finite_is_computed_twice(
    backend: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the exact kernels do shows in no value, only in the time."""
    from tilestream.backends.triton import plan

    modules = [plan]
    if backend == "hopper":
        from tilestream.backends.hopper import backward_plan
        from tilestream.backends.hopper import plan as hopper_plan

        modules += [hopper_plan, backward_plan]
    flags = []
    launch = plan.launch

    def look_and_launch(steps: list[plan.Step], others: object, tensors: plan.Tensors, device: torch.device) -> None:
        for step in steps:
            if step.kernel.__name__.startswith("exact"):
                found = plan.Tensors._make(tensors).flags
                # Of the kernel before: of rows, or of programs in memory for the most that one of them has.
                has_rows = step.kernel.__name__ in ("exact_rows_kernel", "exact_dq_kernel")
                flags.append((found if has_rows else found[: step.numbers.num_programs]).clone())
            launch([step], others, tensors, device)

    for module in modules:
        monkeypatch.setattr(module, "launch", look_and_launch)
    heads = _HEADS[backend]
    if "bias" in options:
        options = {"bias": torch.randn(1, heads, 512, 512, device="cuda", dtype=torch.bfloat16)}
    _attend(_tensors(2, 512, heads, 64), backend, **options)
    assert len(flags) == (3 if options else 0)
    assert not any(bool(x.any()) for x in flags)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs sm_90")
def test_what_is_hidden_and_not_finite_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper kernel flags the rows that a hidden NaN got into, and no row of a tile without one."""
    from tilestream.backends.hopper import plan

    flags = []
    launch = plan.launch

    def look_and_launch(steps: object, others: object, tensors: plan.Tensors, device: torch.device) -> None:
        flags.append(tensors.flags.clone())
        launch(steps, others, tensors, device)

    monkeypatch.setattr(plan, "launch", look_and_launch)
    query, key, value = (x.detach() for x in _tensors(1, 1024, 20, 64))
    wanted = tilestream.attention(query, key, value, causal=True, backend="hopper")
    value[:, 1000:] = float("nan")
    got = tilestream.attention(query, key, value, causal=True, backend="hopper")
    assert torch.allclose(got[:, :1000].float(), wanted[:, :1000].float(), rtol=0.02, atol=0.02)
    assert bool(got[:, 1000:].isnan().all())
    assert not bool(flags[0].any())
    rows = flags[1][-20 * 1024 :].view(20, 1024)
    assert bool(rows[:, 1000:].all())
    assert not bool(rows[:, :512].any())


@each_backend
def test_another_stream(backend: str) -> None:
    tensors = _tensors(1, 4096, 8, 64)
    wanted = _attend(tensors, backend, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Long enough that a kernel on another stream would read the values from before.
        torch.cuda._sleep(20_000_000)
        doubled = [(x.detach() * 2).requires_grad_() for x in tensors]
        halved = [(x.detach() / 2).requires_grad_() for x in doubled]
        got = _attend(halved, backend, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    _assert_same(got, wanted, backend)


@each_backend
def test_the_second_device(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first = _tensors(1, 100, 2, 64)
    second = [x.detach().to("cuda:1").requires_grad_() for x in first]
    assert torch.cuda.current_device() == 0
    results = (_attend(tensors, backend, causal=True) for tensors in (second, first))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


@each_backend
def test_a_changed_length_compiles_nothing(backend: str) -> None:
    heads = _HEADS[backend]
    for seqlen in (1024, 512):
        _attend(_tensors(2, seqlen, heads, 64), backend, causal=True)
    before = _num_compiled()
    for seqlen in (1000, 133, 4096, 148, 513):
        _attend(_tensors(1, seqlen, heads, 64), backend, causal=True)
    assert _num_compiled() == before


@each_backend
def test_compiled_with_changing_lengths(backend: str) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return tilestream.attention(query, key, value, causal=True, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    counts = []
    for seqlen in (128, 200, 333):
        tensors = _tensors(2, seqlen, 4, 64)
        got = compiled(*tensors)
        assert torch.equal(got, attend(*tensors))
        torch.autograd.grad(got.sum(), tensors)
        counts.append((_num_compiled(), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert counts[1] == counts[2]


@each_backend
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    spec = AttentionSpec(band=Band(63, 0))
    sizes = {"seqlen_q": 140_032, "num_heads_q": 128, "head_dim": 128}
    problem = Problem.dense(**sizes, dtype=torch.bfloat16, device_type="cuda", spec=spec)  # type: ignore[arg-type]
    # Whole tiles are cut off, also of the backward's, so that the rest is the same tiles and the same bits.
    shape = dispatch.backend(backend).tile_shape(dataclasses.replace(problem, is_backward=True))
    unit, last = math.lcm(128, shape.block_m, shape.block_n), 384
    seqlen = last + -(-139_648 // unit) * unit
    tensors = _tensors(1, seqlen, 128, 128)
    assert tensors[0].numel() > 2**31
    got = _attend(tensors, backend, window=(63, 0))
    tail = [x.detach()[:, -last:].clone().requires_grad_() for x in tensors]
    wanted = _attend(tail, backend, window=(63, 0))
    # Rows that see none of the keys that were cut off, and keys that all their rows see.
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours[:, -last + 200 :], theirs[:, 200:])


@each_backend
def test_more_batch_entries_and_heads_than_a_grid_dimension(backend: str) -> None:
    tensors = _tensors(70_000, 80, 1, 32)
    got = _attend(tensors, backend)
    wanted = _attend([x.detach()[-3:].clone().requires_grad_() for x in tensors], backend)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours[-3:], theirs)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "hopper"),
        ({"spec": AttentionSpec(band=Band(None, 0))}, "hopper"),
        ({"dtype": torch.float16, "head_dim": 256, "num_heads_kv": 1}, "hopper"),
        ({"spec": AttentionSpec(softcap=5.0)}, "triton"),
        ({"dtype": torch.float32}, "triton"),
        ({"head_dim": 512}, "triton"),
        ({"seqlen_q": 1, "seqlen_k": 65536}, "triton"),
    ],
)
def test_the_choice_on_a_gpu(changes: dict[str, object], chosen: str) -> None:
    sizes = {"seqlen_q": 256, "num_heads_q": 2, "head_dim": 64, "dtype": torch.bfloat16, "device_type": "cuda"}
    explanation = tilestream.explain(Problem.dense(**{**sizes, **changes}))  # type: ignore[arg-type]
    assert explanation.chosen == (chosen if HAS_HOPPER else "triton"), str(explanation)


def test_who_is_chosen_runs() -> None:
    tensors = _tensors(1, 256, 2, 64)
    chosen = "hopper" if HAS_HOPPER else "triton"
    assert torch.equal(tilestream.attention(*tensors), tilestream.attention(*tensors, backend=chosen))
