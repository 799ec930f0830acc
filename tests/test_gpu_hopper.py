"""What only a Hopper GPU can show of its own kernels: the same bits every time, no deadlock, no copies of inputs.

A warp-specialised kernel is a conversation of warps: what is wrong with it may show once in a thousand calls, or never
end. `_wait` ends the whole session then, because every later test would wait for ever.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from targets import HAS_HOPPER
from torch import Tensor

import tilestream
from tilestream.state import AttentionOutput

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="needs sm_90")]

_LIMIT_S = 60.0


def _numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: object) -> AttentionOutput:
    return tilestream.attention_with_lse(query, key, value, **{"backend": "hopper", **options})  # type: ignore[arg-type]


def _wait(call: str) -> None:
    """Wait for the device, which is to be done soon."""
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + _LIMIT_S
    while not event.query():
        if time.monotonic() > deadline:
            pytest.exit(f"the kernel hangs: {call}", returncode=3)
        time.sleep(1e-4)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [65, 129, 257, 384])
def test_a_thousand_repeats_are_bit_equal(head_dim: int, seqlen: int) -> None:
    # More units of work than processors, so that a program has several, and few enough keys that none are split.
    tensors = [_numbers(4, seqlen, 40, head_dim) for _ in range(3)]
    first = _attend(*tensors, causal=True)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        again = _attend(*tensors, causal=True)
        differs |= (again.out != first.out).any() | (again.lse != first.lse).any()
    _wait(f"4x{seqlen} tokens, 40 heads of {head_dim}, causal")
    assert bool(first.out.isfinite().all())
    assert not bool(differs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_soak_of_odd_lengths(head_dim: int, dtype: torch.dtype) -> None:
    """Random calls of few kernels, so that the time goes into calls; each twice, and against Triton's."""
    draw = random.Random(head_dim)
    served = 0
    for _ in range(300):
        heads_kv, group, batch = draw.choice([1, 2, 4]), draw.choice([1, 1, 2, 5, 8]), draw.choice([1, 2, 3, 16])
        seqlen_q = draw.choice([1, 2, 63, 64, 65, 127, 129, 191, 193, 500, 1000, 1537, 2048, draw.randint(1, 2048)])
        seqlen_k = draw.choice([1, 7, 64, 127, 128, 129, 777, 1000, 2049, draw.randint(1, 2049)])
        options = draw.choice([
            {}, {"causal": True}, {"causal": True, "shift": draw.choice([-3000, -50, 0, 13, 3000])},
            {"window": (draw.choice([0, 5, 100, 700]), draw.choice([0, 3, 64, 700]))},
        ])  # fmt: skip
        call = f"batch {batch}, {seqlen_q}x{seqlen_k}, {heads_kv}x{group} heads of {head_dim}, {dtype}, {options}"
        query = _numbers(batch, seqlen_q, heads_kv * group, head_dim, dtype=dtype)
        key, value = (_numbers(batch, seqlen_k, heads_kv, head_dim, dtype=dtype) for _ in range(2))
        try:
            got = _attend(query, key, value, **options)
        except tilestream.UnsupportedError:  # a few rows over many keys are Triton's
            continue
        again = _attend(query, key, value, **options)
        _wait(call)
        served += 1
        wanted = _attend(query, key, value, **options, backend="triton")
        assert torch.equal(got.out, again.out), call
        assert torch.equal(got.lse, again.lse), call
        # Invisible rows are -inf in both; 0.02 is two units in the last place of bfloat16 at 1 to 2.
        torch.testing.assert_close(
            got.lse, wanted.lse, rtol=0, atol=1e-3, msg=lambda text, call=call: f"{call}: {text}"
        )
        torch.testing.assert_close(
            got.out.float(), wanted.out.float(), rtol=0.01, atol=0.02, msg=lambda text, call=call: f"{call}: {text}"
        )
    assert served > 100


def _packed() -> tuple[Tensor, ...]:
    return _numbers(2, 2048, 3, 16, 64).unbind(2)


def _heads_first() -> tuple[Tensor, ...]:
    return tuple(_numbers(2, 16, 2048, 64).transpose(1, 2) for _ in range(3))


def _tokens_first() -> tuple[Tensor, ...]:
    return tuple(_numbers(2048, 2, 16, 64).transpose(0, 1) for _ in range(3))


def _cut_off() -> tuple[Tensor, ...]:
    """Rows of a larger tensor, every other batch entry, and a part of the heads' numbers."""
    return tuple(_numbers(4, 3000, 16, 96)[::2, 100:2148, :, 16:80] for _ in range(3))


def _grouped() -> tuple[Tensor, ...]:
    """One projection to 48 query heads and twice 8 KV heads."""
    return _numbers(2, 2048, 64, 64).split([48, 8, 8], dim=2)


@pytest.mark.no_poison
@pytest.mark.parametrize("options", [{}, {"causal": True}])
@pytest.mark.parametrize("make", [_packed, _heads_first, _tokens_first, _cut_off, _grouped])
def test_strided_inputs_are_read_in_place(make: Callable[[], tuple[Tensor, ...]], options: dict[str, object]) -> None:
    query, key, value = make()
    wanted = _attend(*(x.contiguous() for x in (query, key, value)), **options)
    _attend(query, key, value, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = _attend(query, key, value, **options)
    torch.cuda.synchronize()
    rise = torch.cuda.max_memory_allocated() - before
    # out, lse and as many flags; a block may be larger than asked by less than a copy of the smallest input is.
    assert rise < got.out.nbytes + 2 * got.lse.nbytes + key.numel() * key.element_size() // 2
    assert torch.equal(got.out, wanted.out)
    assert torch.equal(got.lse, wanted.lse)


def _expanded() -> tuple[Tensor, ...]:
    """One KV head that is read as 16, which TMA does not."""
    return (_numbers(2, 600, 16, 64), *(_numbers(2, 600, 1, 64).expand(2, 600, 16, 64) for _ in range(2)))


def _odd_strides() -> tuple[Tensor, ...]:
    """Heads 136 bytes apart, where TMA counts in 16."""
    return tuple(_numbers(2, 600, 16, 68)[..., :64] for _ in range(3))


def _odd_starts() -> tuple[Tensor, ...]:
    return tuple(_numbers(2 * 600 * 16 * 64 + 1)[1:].view(2, 600, 16, 64) for _ in range(3))


def _columns() -> tuple[Tensor, ...]:
    """The last dimension is not contiguous."""
    return tuple(_numbers(2, 600, 64, 16).transpose(2, 3) for _ in range(3))


@pytest.mark.parametrize("make", [_expanded, _odd_strides, _odd_starts, _columns])
def test_what_tma_cannot_take_is_copied(make: Callable[[], tuple[Tensor, ...]]) -> None:
    """Twice, because a call whose signature is known takes another way."""
    tensors = make()
    wanted = _attend(*(x.clone(memory_format=torch.contiguous_format) for x in tensors), causal=True)
    for _ in range(2):
        got = _attend(*tensors, causal=True)
        assert torch.equal(got.out, wanted.out)
        assert torch.equal(got.lse, wanted.lse)


def test_a_call_does_not_wait_for_the_device() -> None:
    tensors = [_numbers(4, 384, 40, 64) for _ in range(3)]
    _attend(*tensors, causal=True)
    torch.cuda.synchronize()
    # A tenth of a second at 2 GHz.
    torch.cuda._sleep(200_000_000)
    began = time.monotonic()
    _attend(*tensors, causal=True)
    spent_s = time.monotonic() - began
    torch.cuda.synchronize()
    assert spent_s < 0.05


# torch captures one, to keep the graphs' memory.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_reduce_overhead(options: dict[str, object]) -> None:
    """Its warm-up is no capture, but wants all memory back that was taken in it."""
    compiled = torch.compile(lambda *x: _attend(*x, **options).out * 2, mode="reduce-overhead", fullgraph=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(4):
            tensors = [_numbers(4, 384, 40, 64) for _ in range(3)]
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(*tensors).clone()
            assert torch.equal(got, _attend(*tensors, **options).out * 2)


def test_a_pool_of_memory_that_is_given_back() -> None:
    tensors = [_numbers(4, 384, 40, 64) for _ in range(3)]
    wanted = _attend(*tensors, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            first = _attend(*tensors, causal=True).out.sum().item()
        del pool
        junk = [torch.full((2**20,), 2**30, dtype=torch.int32, device="cuda") for _ in range(8)]
        again = _attend(*tensors, causal=True)
        stream.synchronize()
    assert first == wanted.out.sum().item()
    assert torch.equal(again.out, wanted.out)
    assert len(junk) == 8


def test_two_threads_and_two_streams() -> None:
    tensors = [_numbers(4, 512, 40, 128) for _ in range(3)]
    wanted = _attend(*tensors, causal=True)
    torch.cuda.synchronize()

    def call_often(stream: torch.cuda.Stream) -> bool:
        with torch.cuda.stream(stream):
            results = [_attend(*tensors, causal=True) for _ in range(50)]
            same = torch.stack([(x.out == wanted.out).all() & (x.lse == wanted.lse).all() for x in results]).all()
            return bool(same)

    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.current_stream()]
    with ThreadPoolExecutor(len(streams)) as pool:
        assert all(pool.map(call_often, streams))
