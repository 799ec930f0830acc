"""The formulas of io.model against loops that count one pair, one tile and one transfer at a time."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilestream.errors import ArgumentError
from tilestream.io.model import (
    Traffic,
    backward_flops,
    compulsory_bytes,
    forward_flops,
    materialised_bytes,
    tiled_bytes,
)
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band
from tilestream.tiles import tile_row

BANDS = (Band(), Band(None, 0), Band(3, 0), Band(2, 5), Band(0, None))
LENGTHS = ((1, 1), (7, 7), (5, 12), (12, 5), (0, 4), (4, 0), (1, 9))


def make_problem(band: Band, seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(
        batch=2,
        num_heads_q=6,
        num_heads_kv=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=8,
        head_dim_v=4,
        dtype=dtype,
        device_type="cpu",
        spec=AttentionSpec(band=band),
        shift=seqlen_k - seqlen_q,
    )


PROBLEMS = [
    make_problem(band, *lengths, dtype)
    for band, lengths, dtype in itertools.product(BANDS, LENGTHS, (torch.float16, torch.float32, torch.float64))
]


class CountingMemory:
    """Slow memory that notes the bytes of each load and store."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.written_bytes = 0

    def load(self, rows: int, width: int, element_bytes: int) -> None:
        self.read_bytes += rows * width * element_bytes

    def store(self, rows: int, width: int, element_bytes: int) -> None:
        self.written_bytes += rows * width * element_bytes

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.read_bytes, self.written_bytes)


def accumulator_bytes(problem: Problem) -> int:
    return 8 if problem.dtype == torch.float64 else 4


@pytest.mark.parametrize("problem", PROBLEMS)
def test_flops_count_each_visible_pair(problem: Problem) -> None:
    assert problem.shift is not None
    pairs = 0
    for i, j in itertools.product(range(problem.seqlen_q), range(problem.seqlen_k)):
        pairs += problem.spec.band.sees(i, j, problem.shift)
    pairs *= problem.batch * problem.num_heads_q
    score, value = 2 * pairs * problem.head_dim, 2 * pairs * problem.head_dim_v
    assert forward_flops(problem) == score + value
    assert backward_flops(problem) == 3 * score + 2 * value


@pytest.mark.parametrize("problem", PROBLEMS)
def test_compulsory_bytes_are_the_bytes_of_the_tensors(problem: Problem) -> None:
    def tensor_bytes(*shape: int, dtype: torch.dtype = problem.dtype) -> int:
        return torch.empty(shape, dtype=dtype).nbytes

    query = tensor_bytes(problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim)
    key = tensor_bytes(problem.batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim)
    value = tensor_bytes(problem.batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v)
    out = tensor_bytes(problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim_v)
    lse = out // problem.dtype.itemsize // problem.head_dim_v * accumulator_bytes(problem)
    assert compulsory_bytes(problem) == Traffic(query + key + value, out + lse)
    assert compulsory_bytes(problem, backward=True) == Traffic(query + key + value + 2 * out + lse, query + key + value)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("backward", [False, True])
def test_materialised_bytes_follow_the_kernels(problem: Problem, backward: bool) -> None:
    rows, keys = problem.batch * problem.seqlen_q, problem.batch * problem.seqlen_k
    sizes = {
        "q": rows * problem.num_heads_q * problem.head_dim,
        "k": keys * problem.num_heads_kv * problem.head_dim,
        "v": keys * problem.num_heads_kv * problem.head_dim_v,
        "o": rows * problem.num_heads_q * problem.head_dim_v,
        "s": rows * problem.num_heads_q * problem.seqlen_k,
    }
    forward_kernels = (("qk", "s"), ("s", "s"), ("sv", "o"))
    backward_kernels = (("so", "v"), ("ov", "s"), ("ss", "s"), ("sk", "q"), ("sq", "k"))
    memory = CountingMemory()
    for read, written in backward_kernels if backward else forward_kernels:
        for name in read:
            memory.load(sizes[name], 1, problem.dtype.itemsize)
        for name in written:
            memory.store(sizes[name], 1, problem.dtype.itemsize)
    assert materialised_bytes(problem, backward) == memory.traffic


def replay_forward(problem: Problem, block_m: int, block_n: int, packs_group: bool) -> Traffic:
    """The forward loop of teaching.py, per head or per packed group, with its loads and stores only."""
    assert problem.shift is not None
    memory, wide, narrow = CountingMemory(), problem.dtype.itemsize, accumulator_bytes(problem)
    heads_per_loop = problem.group if packs_group else 1
    for _ in range(problem.batch * problem.num_heads_q // heads_per_loop):
        for m_start in range(0, problem.seqlen_q, block_m):
            m_end = min(m_start + block_m, problem.seqlen_q)
            rows = (m_end - m_start) * heads_per_loop
            memory.load(rows, problem.head_dim, wide)
            for tile in tile_row(problem.spec.band, problem.shift, m_start, m_end, problem.seqlen_k, block_n):
                memory.load(tile.n_end - tile.n_start, problem.head_dim, wide)
                memory.load(tile.n_end - tile.n_start, problem.head_dim_v, wide)
            memory.store(rows, problem.head_dim_v, wide)
            memory.store(rows, 1, narrow)
    return memory.traffic


def replay_backward(problem: Problem, block_m: int, block_n: int) -> Traffic:
    """The backward loop of teaching.py over packed groups."""
    assert problem.shift is not None
    memory, wide, narrow = CountingMemory(), problem.dtype.itemsize, accumulator_bytes(problem)
    widths = (problem.head_dim, problem.head_dim_v)
    for _ in range(problem.batch * problem.num_heads_kv):
        for width in widths:
            memory.store(problem.seqlen_k, width, narrow)
        for m_start in range(0, problem.seqlen_q, block_m):
            m_end = min(m_start + block_m, problem.seqlen_q)
            rows = (m_end - m_start) * problem.group
            memory.load(rows, problem.head_dim, wide)
            memory.load(rows, problem.head_dim_v, wide)
            memory.load(rows, problem.head_dim_v, wide)
            memory.load(rows, 1, narrow)
            for tile in tile_row(problem.spec.band, problem.shift, m_start, m_end, problem.seqlen_k, block_n):
                for width in widths:
                    memory.load(tile.n_end - tile.n_start, width, wide)
                    memory.load(tile.n_end - tile.n_start, width, narrow)
                    memory.store(tile.n_end - tile.n_start, width, narrow)
            memory.store(rows, problem.head_dim, wide)
        for width in widths:
            memory.load(problem.seqlen_k, width, narrow)
            memory.store(problem.seqlen_k, width, wide)
    return memory.traffic


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("blocks", [(1, 1), (4, 3), (3, 4), (64, 64)])
def test_tiled_bytes_are_those_of_the_loop(problem: Problem, blocks: tuple[int, int]) -> None:
    block_m, block_n = blocks
    assert tiled_bytes(problem, block_m) == replay_forward(problem, block_m, block_n, packs_group=False)
    assert tiled_bytes(problem, block_m, packs_group=True) == replay_forward(problem, block_m, block_n, True)
    assert tiled_bytes(problem, block_m, backward=True, packs_group=True) == replay_backward(problem, *blocks)


def test_one_tile_reaches_the_compulsory_minimum() -> None:
    problem = make_problem(Band(), 16, 16)
    assert tiled_bytes(problem, 16, packs_group=True) == compulsory_bytes(problem)


def test_long_sequences_are_counted_fast_and_far_below_the_materialised_ones() -> None:
    problem = make_problem(Band(None, 0), 1 << 20, 1 << 20)
    assert tiled_bytes(problem, 128).total_bytes * 10 < materialised_bytes(problem).total_bytes


def test_traffic_adds_up() -> None:
    total = Traffic(1, 2) + Traffic(10, 20)
    assert total == Traffic(11, 22)
    assert total.total_bytes == 33


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ArgumentError, match="block_m must be at least 1"):
        tiled_bytes(PROBLEMS[0], 0)
    packed = Problem(
        batch=2, num_heads_q=1, num_heads_kv=1, seqlen_q=3, seqlen_k=3, head_dim=8, head_dim_v=8,
        dtype=torch.float32, device_type="cpu", spec=AttentionSpec(), shift=None, layout="varlen",
    )  # fmt: skip
    for count in (forward_flops, backward_flops, compulsory_bytes, materialised_bytes):
        with pytest.raises(ArgumentError, match="one dense Problem per sequence"):
            count(packed)
