"""Run by test_native_process.py: forks after the native kernels have had threads, and uses them in the children.

Usage: python fork_worker.py ISA
"""

from __future__ import annotations

import multiprocessing
import sys

import torch
from torch import Tensor

import tilestream
from tilestream.backends.cpu.native import library

_NUM_CHILDREN, _NUM_CALLS, _PATIENCE_S = 4, 50, 60
# More than there may be cores: late threads are what goes wrong.
_NUM_THREADS = 4


def call(seqlen: int) -> list[Tensor]:
    """Forward and backward, in tensors so small that torch itself starts no threads, which would not outlive a fork."""
    generator = torch.Generator().manual_seed(seqlen)
    leaves = [torch.randn(1, seqlen, 2, 16, generator=generator, requires_grad=True) for _ in range(3)]
    out = tilestream.attention(*leaves, causal=True, backend="native")
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def child(wanted: list[list[Tensor]]) -> None:
    """Ends with code 0 if every call has the parent's bits."""
    for index in range(_NUM_CALLS):
        expected = wanted[index % len(wanted)]
        assert all(map(torch.equal, call(100 + 37 * (index % len(wanted))), expected)), index


def main(isa: str) -> None:
    """Raises if a child computes wrongly or hangs."""
    torch.set_num_threads(_NUM_THREADS)
    with library.use(isa):
        wanted = [call(100 + 37 * index) for index in range(5)]
        for _ in range(_NUM_CHILDREN):
            process = multiprocessing.get_context("fork").Process(target=child, args=(wanted,))
            process.start()
            process.join(_PATIENCE_S)
            is_hanging = process.is_alive()
            process.kill()
            assert not is_hanging, "the child hangs"
            assert process.exitcode == 0, process.exitcode
            child(wanted)


if __name__ == "__main__":
    main(sys.argv[1])
    print("parent and children agree")
