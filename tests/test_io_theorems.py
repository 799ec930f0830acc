"""The paper's theorems against the models, PyTorch's own operators against the passes, and the choice of tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilestream.bench.eager import eager_attention
from tilestream.errors import ArgumentError
from tilestream.io import fast_memory
from tilestream.io.compare import OURS, PUBLISHED, STANDARD, Settings, algorithms, sweep
from tilestream.io.cost import Cost
from tilestream.io.published import published_blocks, published_cost
from tilestream.io.schedule import TileShape, compulsory_cost, fitting_shape, schedule_cost
from tilestream.io.sizes import dense_parts
from tilestream.io.standard import standard_cost
from tilestream.io.theorems import (
    lower_bound_elements,
    optimal_range,
    proposition_4_block_sparse,
    theorem_2_standard,
    theorem_2_tiled,
    theorem_5_standard,
    theorem_5_tiled,
)
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band

ELEMENT_BYTES = 4


def one_head(seqlen: int, head_dim: int) -> Problem:
    """A head of float32, in which every number counts four bytes, statistics too."""
    return Problem.dense(seqlen_q=seqlen, num_heads_q=1, head_dim=head_dim, dtype=torch.float32)


def gpt2_medium() -> Problem:
    spec = AttentionSpec(band=Band(None, 0), scale=0.125, dropout_p=0.1)
    return Problem.dense(batch=64, seqlen_q=1024, num_heads_q=16, head_dim=64, dtype=torch.float16, spec=spec)


def elements(cost: Cost) -> int:
    return cost.traffic.total_bytes // ELEMENT_BYTES


@pytest.mark.parametrize(("seqlen", "head_dim"), [(1, 1), (7, 3), (128, 64), (1000, 16)])
def test_theorems_of_standard_attention_are_exact_here(seqlen: int, head_dim: int) -> None:
    problem = one_head(seqlen, head_dim)
    forward, backward = elements(standard_cost(problem)), elements(standard_cost(problem, backward=True))
    assert forward == 4 * (seqlen * head_dim + seqlen**2)
    assert backward == 8 * seqlen * head_dim + 7 * seqlen**2
    assert theorem_2_standard(seqlen, head_dim).holds(forward)
    assert theorem_5_standard(seqlen, head_dim).holds(backward)


@pytest.mark.parametrize(("n", "d"), [(100, 16), (37, 8)])
@pytest.mark.parametrize("size", [200, 500])
def test_formulas_of_the_page(n: int, d: int, size: int) -> None:
    """docs/memory-traffic.md, section Formulas."""
    problem, tiles, shape = one_head(n, d), published_blocks(size, d), TileShape(12, 7)
    num_key_blocks, rows, keys = -(-n // -(-size // (4 * d))), -(-n // 12), -(-n // 7)
    both = (False, True)
    assert [elements(compulsory_cost(problem, backward)) for backward in both] == [4 * n * d + n, 8 * n * d + n]
    assert [elements(published_cost(problem, tiles, backward)) for backward in both] == [
        3 * n * d + 2 * n + num_key_blocks * (3 * n * d + 4 * n),
        7 * n * d + num_key_blocks * (5 * n * d + 2 * n),
    ]
    assert [elements(schedule_cost(problem, shape, backward)) for backward in both] == [
        2 * n * d + n + 2 * rows * n * d,
        9 * n * d + 3 * n + 2 * rows * n * d + keys * (2 * n * d + 2 * n),
    ]
    adds = {"has_mask": [3 * n * n * ELEMENT_BYTES, 0], "has_dropout": [n * n * (2 * ELEMENT_BYTES + 1)] * 2}
    for name, more in adds.items():
        for backward in both:
            plain, added = (standard_cost(problem, backward, **{name: is_on}) for is_on in both)
            assert added.traffic.total_bytes - plain.traffic.total_bytes == more[backward]


@settings(max_examples=300, deadline=None)
@given(seqlen=st.integers(1, 5000), head_dim=st.integers(1, 256), part=st.floats(0, 1), kept=st.integers(0, 2**32))
def test_theorems_of_the_tiled_algorithms_hold_over_their_whole_range(
    seqlen: int, head_dim: int, part: float, kept: int
) -> None:
    problem = one_head(seqlen, head_dim)
    size = round(head_dim * seqlen**part)
    tiles = published_blocks(size, head_dim)
    forward = elements(published_cost(problem, tiles))
    assert theorem_2_tiled(seqlen, head_dim, size).holds(forward)
    assert theorem_5_tiled(seqlen, head_dim, size).holds(elements(published_cost(problem, tiles, backward=True)))
    assert forward >= lower_bound_elements(seqlen, head_dim)
    # Proposition 4 is about blocks of one size.
    rows, columns = seqlen // tiles.block_m, seqlen // tiles.block_n
    if 0 < rows * columns < 10_000 and seqlen % tiles.block_m == 0 == seqlen % tiles.block_n:
        blocks = [[(kept >> ((r * columns + c) % 32)) & 1 == 1 for c in range(columns)] for r in range(rows)]
        fraction = sum(map(sum, blocks)) / (rows * columns)
        sparse = elements(published_cost(problem, tiles, blocks=blocks))
        assert proposition_4_block_sparse(seqlen, head_dim, size, fraction).holds(sparse)


def test_the_tiled_algorithms_reach_the_lower_bound_and_leave_it_as_m_falls() -> None:
    """Proposition 3's argument: a constant times the compulsory bytes at M = N d, and about 1 / M below."""
    seqlen, head_dim = 4096, 64
    problem, (least, each_from, most) = one_head(seqlen, head_dim), optimal_range(seqlen, head_dim)
    assert (least, each_from, most) == (64, 4096, 262144)
    sizes = [most * ELEMENT_BYTES >> step for step in range(5)]
    points = sweep([problem], "forward", sizes)
    compulsory = compulsory_cost(problem).traffic.total_bytes
    assert points[0].published_bytes is not None
    assert points[0].published_bytes < 5 * compulsory
    for name in ("published_bytes", "ours_bytes"):
        moved = [getattr(point, name) for point in points]
        assert moved == sorted(moved)
        assert 8 < moved[-1] / moved[0] < 32
    assert sweep([problem], "both", [ELEMENT_BYTES * head_dim])[0].ours_bytes is None


def test_what_the_theorems_are_not_about_is_refused() -> None:
    for size in (63, 64 * 100 + 1):
        with pytest.raises(ArgumentError, match="64 to 6400 elements"):
            theorem_2_tiled(100, 64, size)
    with pytest.raises(ArgumentError, match=r"must lie in \[0, 1\]"):
        proposition_4_block_sparse(100, 64, 64, 1.1)
    with pytest.raises(ArgumentError, match="at least 1"):
        optimal_range(0, 64)
    assert optimal_range(4, 64).each_from == optimal_range(4, 64).most == 256


class _Operators(TorchDispatchMode):
    """Which N x N tensors each of PyTorch's operators reads and writes, views left out."""

    def __init__(self, seqlen: int) -> None:
        super().__init__()
        self.seqlen = seqlen
        self.moved: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # The first argument of baddbmm with beta = 0 is not read.
        read = args[1:] if func is torch.ops.aten.baddbmm.default else args
        moved = (self._square_bytes(read), self._square_bytes(result))
        if any(moved) and not func.is_view:
            self.moved.append((str(func).split(".")[1], *moved))
        return result

    def _square_bytes(self, tree: Any) -> int:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors if tuple(tensor.shape[-2:]) == (self.seqlen, self.seqlen))


def test_pytorch_makes_these_passes_over_the_score_matrix() -> None:
    """Eager attention as the paper timed it, on tensors without memory: operator by operator the bytes of the model."""
    problem = gpt2_medium()
    heads, seqlen, head_dim = problem.batch * problem.num_heads_q, problem.seqlen_q, problem.head_dim

    def empty(*shape: int, needs_grad: bool = False) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float16, device="meta", requires_grad=needs_grad)

    q, k, v = (empty(heads, seqlen, head_dim, needs_grad=True) for _ in range(3))
    mask, dout = empty(seqlen, seqlen), empty(heads, seqlen, head_dim)
    with _Operators(seqlen) as operators:
        eager_attention(q, k, v, mask, 0.125, 0.1).backward(dout)
    passes = [one for backward in (False, True) for one in standard_cost(problem, backward).passes]
    small = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}
    modelled = [
        tuple(
            sum(getattr(moved, side) for name, moved in one.tensors.items() if name not in small)
            for side in ("read_bytes", "written_bytes")
        )
        for one in passes
    ]
    # matmul makes a view that counts as no view.
    found = [(name, *moved) for name, *moved in operators.moved if name != "_unsafe_view"]
    assert [name for name, *_ in found] == [
        "baddbmm", "add", "_softmax", "native_dropout", "bmm", "bmm", "bmm", "native_dropout_backward",
        "_softmax_backward_data", "bmm", "bmm",
    ]  # fmt: skip
    assert [tuple(moved) for _, *moved in found] == modelled


def test_gpt2_medium_moves_what_was_measured() -> None:
    """40.1 GB on an H200 without the inputs' generation (arXiv:2205.14135 prints 40.3 GB), and 1.6 GB at least."""
    costs = {one.name: one.cost for one in algorithms([gpt2_medium()], Settings(fast_memory.HOPPER_BYTES, "both"))}
    assert costs[STANDARD].traffic.total_bytes == pytest.approx(40.1e9, rel=0.03)
    assert costs["compulsory"].traffic.total_bytes == pytest.approx(1.6e9, rel=0.02)
    # The paper measured 4.4 GB on an A100, whose fast memory is smaller.
    assert costs[PUBLISHED].traffic.total_bytes == pytest.approx(4.4e9, rel=0.1)
    assert costs[OURS].traffic.total_bytes < costs[STANDARD].traffic.total_bytes / 8


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    heads=st.sampled_from([(1, 1), (8, 2)]),
    size=st.integers(20_000, 3_000_000),
    backward=st.booleans(),
)
def test_chosen_tiles_fit_and_larger_ones_do_not(
    lengths: tuple[int, int], heads: tuple[int, int], size: int, backward: bool
) -> None:
    problem = Problem.dense(
        seqlen_q=lengths[0], seqlen_k=lengths[1], num_heads_q=heads[0], num_heads_kv=heads[1], head_dim=64
    )
    shape = fitting_shape(problem, size, backward)
    assert schedule_cost(problem, shape, backward).fast_memory_bytes <= size
    if shape.block_m < problem.seqlen_q:
        larger = TileShape(shape.block_m + 16, shape.block_n, key_pass=shape.key_pass)
        assert schedule_cost(problem, larger, backward).fast_memory_bytes > size


def test_tiles_of_packed_sequences_fit_all_of_them() -> None:
    """The longest queries and the longest keys need not be one sequence's."""
    packed = Problem.dense(seqlen_q=1, num_heads_q=2, head_dim=64)
    parts = dense_parts(packed, [900, 10, 0], [3, 800, 7])
    for size in (20_000, 100_000):
        for one in algorithms(parts, Settings(size, "both")):
            assert one.name in (STANDARD, PUBLISHED) or one.cost.fast_memory_bytes <= size


def test_given_tiles_stay_and_must_fit() -> None:
    problem = one_head(256, 64)
    assert fitting_shape(problem, 200_000, block_m=16) == TileShape(16, 64)
    assert fitting_shape(problem, 200_000, backward=True, block_n=32).block_n == 32
    with pytest.raises(ArgumentError, match=r"200 bytes is smaller than a row: tiles of 1 x 1 .* need 1036 bytes"):
        fitting_shape(problem, 200)
    with pytest.raises(ArgumentError, match=r"is too small: tiles of 128 x 64"):
        fitting_shape(problem, 20_000, block_m=128, block_n=64)


def test_the_machine_says_what_fast_memory_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    unknown = fast_memory.machine_fast_memory(tmp_path)
    assert unknown.num_bytes == 227 * 1024
    assert "does not say" in unknown.source
    for level, size in ((1, "48K"), (2, "2048K"), (3, "64M")):
        cache = tmp_path / f"index{level}"
        cache.mkdir()
        (cache / "level").write_text(f"{level}\n")
        (cache / "size").write_text(f"{size}\n")
    assert fast_memory.machine_fast_memory(tmp_path) == (2 << 20, "level-2 cache of a core of this machine")
    (tmp_path / "index2" / "size").write_text("much\n")
    assert fast_memory.machine_fast_memory(tmp_path) == unknown
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert fast_memory.machine_fast_memory(tmp_path) == (
        232_448,
        "shared memory of a processor of NVIDIA H200",
    )
