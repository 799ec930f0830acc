"""What only a GPU can show: graphs, streams, sizes beyond 32 bits, and that a changed length compiles nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilestream

pytestmark = pytest.mark.gpu


def _tensors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]


def _attend(tensors: list[Tensor], **options: object) -> tuple[Tensor, ...]:
    out = tilestream.attention(*tensors, backend="triton", **options)  # type: ignore[arg-type]
    return (out, *torch.autograd.grad(out.float().square().sum(), tensors))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 0), "softcap": 5.0}])
def test_cuda_graphs(options: dict[str, object]) -> None:
    tensors = _tensors(2, 300, 4, 64)
    _attend(tensors, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _attend(tensors, **options)
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for ours, wanted in zip(captured, _attend(tensors, **options), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 0)}, {"bias": True}])
def test_nothing_finite_is_computed_twice(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exact kernels do shows in no value, only in the time."""
    from tilestream.backends.triton import plan

    flags = []
    launch = plan.launch

    def launch_and_look(
        steps: list[plan.Step], others: object, tensors: list[torch.Tensor], device: torch.device
    ) -> None:
        for step in steps:
            launch([step], [], tensors, device)
            if step.facts.flags:
                flags.append(plan.Tensors._make(tensors).flags[: step.num_programs].clone())

    monkeypatch.setattr(plan, "launch", launch_and_look)
    if "bias" in options:
        options = {"bias": torch.randn(1, 4, 512, 512, device="cuda", dtype=torch.bfloat16)}
    _attend(_tensors(2, 512, 4, 64), **options)
    assert len(flags) == (3 if options else 0)
    assert not any(bool(x.any()) for x in flags)


def test_another_stream() -> None:
    tensors = _tensors(1, 4096, 8, 64)
    wanted = _attend(tensors, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Long enough that a kernel on another stream would read the values from before.
        torch.cuda._sleep(20_000_000)
        doubled = [(x.detach() * 2).requires_grad_() for x in tensors]
        halved = [(x.detach() / 2).requires_grad_() for x in doubled]
        got = _attend(halved, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_the_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first = _tensors(1, 100, 2, 64)
    second = [x.detach().to("cuda:1").requires_grad_() for x in first]
    assert torch.cuda.current_device() == 0
    for ours, theirs in zip(_attend(second, causal=True), _attend(first, causal=True), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


def test_a_changed_length_compiles_nothing() -> None:
    from tilestream.backends.triton.launch import num_compiled

    for seqlen in (1024, 512):
        _attend(_tensors(2, seqlen, 4, 64), causal=True)
    before = num_compiled()
    for seqlen in (1000, 33, 4096, 48, 513):
        _attend(_tensors(1, seqlen, 4, 64), causal=True)
    assert num_compiled() == before


def test_compiled_with_changing_lengths() -> None:
    from tilestream.backends.triton.launch import num_compiled

    compiled = torch.compile(lambda q, k, v: tilestream.attention(q, k, v, causal=True), fullgraph=True, dynamic=True)
    counts = []
    for seqlen in (128, 200, 333):
        tensors = _tensors(2, seqlen, 4, 64)
        got = compiled(*tensors)
        assert torch.equal(got, tilestream.attention(*tensors, causal=True))
        torch.autograd.grad(got.sum(), tensors)
        counts.append((num_compiled(), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert counts[1] == counts[2]


def test_more_than_two_to_the_31_elements() -> None:
    # Whole tiles are cut off, so that the rest is the same tiles and the same bits.
    seqlen, last = 140_032, 384
    tensors = _tensors(1, seqlen, 128, 128)
    assert tensors[0].numel() > 2**31
    got = _attend(tensors, window=(63, 0))
    tail = [x.detach()[:, -last:].clone().requires_grad_() for x in tensors]
    wanted = _attend(tail, window=(63, 0))
    # Rows that see none of the keys that were cut off, and keys that all their rows see.
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours[:, -last + 200 :], theirs[:, 200:])


def test_more_batch_entries_and_heads_than_a_grid_dimension() -> None:
    tensors = _tensors(70_000, 16, 1, 32)
    got = _attend(tensors)
    wanted = _attend([x.detach()[-3:].clone().requires_grad_() for x in tensors])
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours[-3:], theirs)


def test_the_choice_on_a_gpu() -> None:
    tensors = _tensors(1, 64, 2, 64)
    assert tilestream.explain(tilestream.problem.Problem.dense(
        seqlen_q=64, num_heads_q=2, head_dim=64, dtype=torch.bfloat16, device_type="cuda"
    )).chosen == "triton"  # fmt: skip
    assert torch.equal(tilestream.attention(*tensors), tilestream.attention(*tensors, backend="triton"))
