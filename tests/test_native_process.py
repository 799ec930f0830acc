"""The native kernels and their process: memory that is not theirs, threads, the global lock, forks, peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from targets import Target, each_isa, needs_native
from torch import Tensor

import tilestream
from tilestream.bench.cases import Case
from tilestream.bench.memory import MemoryProbe
from tilestream.io.model import compulsory_bytes

HERE = Path(__file__).parent
CPU = torch.device("cpu")


def _run(worker: str, argument: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / worker), argument],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@each_isa
def test_nothing_out_of_bounds_is_touched(isa: str) -> None:
    done = _run("guard_worker.py", isa)
    assert done.returncode == 0, f"code {done.returncode}: {done.stdout.splitlines()[-1:]}\n{done.stderr}"
    assert "all in bounds" in done.stdout


@needs_native
@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_a_byte_too_many_ends_the_process() -> None:
    assert _run("guard_worker.py", "astray").returncode < 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@each_isa
def test_a_forked_child_has_threads_of_its_own(isa: str) -> None:
    done = _run("fork_worker.py", isa)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parent and children agree" in done.stdout


def _inputs(seed: int, seqlen: int, heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, seqlen, heads, 64, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def _both(leaves: list[Tensor]) -> list[Tensor]:
    out = tilestream.attention(*leaves, causal=True, backend="native")
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@each_isa
def test_calls_of_several_python_threads_do_not_meet(isa: str, set_threads: Callable[[int], None]) -> None:
    """A call that finds the pool busy runs on its own thread alone; the bits are the same."""
    set_threads(3)
    jobs = [_inputs(n, 100 + 60 * n, 3, (torch.float32, torch.bfloat16)[n % 2]) for n in range(6)]
    faults: list[int] = []
    with Target("native", isa).in_use():
        alone = [_both(leaves) for leaves in jobs]

        def work(index: int) -> None:
            torch.set_num_threads(3)
            for _ in range(8):
                if not all(map(torch.equal, _both(jobs[index]), alone[index])):
                    faults.append(index)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
    assert not faults


@needs_native
@pytest.mark.no_poison
@pytest.mark.parametrize("is_backward", [False, True])
def test_other_python_threads_run_meanwhile(is_backward: bool, set_threads: Callable[[int], None]) -> None:
    """A thread that wakes every few milliseconds does so during one call of at least a tenth of a second."""
    set_threads(1)
    leaves = _inputs(0, 4096, 6)
    out = tilestream.attention(*leaves, backend="native")
    ticks: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.wait(2e-3):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    if is_backward:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    else:
        tilestream.attention(*leaves, backend="native")
    ended = time.perf_counter()
    is_done.set()
    thread.join()
    assert ended - began > 0.05, "the call is too short to tell"
    # Not only at its ends, where Python code runs.
    middle = [at for at in ticks if 0.2 < (at - began) / (ended - began) < 0.8]
    assert len(middle) >= 3


@needs_native
@pytest.mark.no_poison
def test_one_thread_is_one_thread(set_threads: Callable[[int], None]) -> None:
    """Threads that an earlier call has started sleep."""
    leaves = _inputs(0, 1024, 4)
    set_threads(8)
    _both(leaves)
    set_threads(1)
    time.sleep(0.05)
    wall, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < 0.5:
        _both(leaves)
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    assert processor < 1.1 * wall


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can only be reset on Linux")
@needs_native
@pytest.mark.no_poison
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_grows_with_the_length_alone(dtype: str) -> None:
    """Beyond inputs and results: float32 sums of dk and dv, and scratch memory per thread; scores never."""
    seqlen, scratch_bytes = 8192, 4 << 20
    case = Case("c", seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=2, num_heads_kv=2, dtype=dtype, causal=True)
    tensors_bytes = compulsory_bytes(case.with_dtype("float32").problem("cpu")).total_bytes
    with MemoryProbe(CPU) as probe:
        extra = probe.measure(case, "tilestream/native", "both").extra_bytes
    assert extra is not None
    bound = 2 * tensors_bytes + scratch_bytes * torch.get_num_threads()
    assert bound < seqlen * seqlen
    assert extra < bound
