"""The backend triton: what its kernels meet that the conformance cases do not make them; on a CPU, interpreted."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from inputs import visible_mask
from interpreter import LARGE_TILES, SMALL_TILES, Tiles, interpreting, is_ready
from targets import Target
from tolerance import faults
from torch import Tensor

import tilestream
from tilestream import dispatch
from tilestream.backends.triton.configs import Config

pytest.importorskip("triton")

_WORKER = Path(__file__).with_name("triton_guard_worker.py")
needs_interpreter = pytest.mark.skipif("not is_ready()", reason="needs Triton's interpreter")


def _assert_right(case: Case, device: torch.device, tiles: Tiles = SMALL_TILES, is_finite: bool = True) -> None:
    target = Target("triton", is_finite=is_finite, tiles=tiles)
    inputs = target.inputs(case, device)
    with target.in_use():
        result, gradients = inputs.run("triton")
    found = faults(inputs, result, gradients)
    assert not found, "\n".join([*found, str(case)])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels of all calls, in order."""
    from tilestream.backends.triton import plan

    kernels: list[Any] = []
    launch = plan.launch

    def launch_and_note(steps: Any, *arguments: Any) -> None:
        kernels.extend(step.kernel for step in steps)
        launch(steps, *arguments)

    monkeypatch.setattr(plan, "launch", launch_and_note)
    return kernels


# ---- splits of the keys

_DECODE = Case("decode", dtype=torch.bfloat16, lengths=(1, 1000), batch=1, heads=(2, 4), causal=True)
DECODE = [
    _DECODE,
    dataclasses.replace(_DECODE, id="decode_window", window=(700, 0), sinks="random", lengths=(3, 999)),
    dataclasses.replace(_DECODE, id="decode_rich", bias="b1mn", alibi="heads", softcap=9.0, dropout_p=0.3),
    dataclasses.replace(_DECODE, id="decode_sinks", dtype=torch.float32, sinks="extreme", widths=(40, 96)),
    dataclasses.replace(_DECODE, id="decode_void_rows", lengths=(3, 1000), shift=-2),
]


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.id)
def test_splits(case: Case, is_finite: bool, device: torch.device, launched: list[Any]) -> None:
    """A few rows over many keys; a hidden NaN has the rows computed again from what the splits left."""
    from tilestream.backends.triton.forward import combine_kernel

    _assert_right(case, device, tiles=(16, 64), is_finite=is_finite)
    assert combine_kernel in launched


def test_kernels_for_another_length_take_no_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled along with a call that does not split its keys, and not run."""
    from tilestream.backends.triton import plan

    noted = []

    def note(steps: Any, others: Any, tensors: Any, device: Any) -> None:
        noted.append(([step.facts.has_splits for step in (*steps, *others)], plan.Tensors._make(tensors)))

    monkeypatch.setattr(plan, "launch", note)
    # So many row tiles that no GPU gains by splits.
    query = torch.zeros(3, 6400, 4, 16, device=device)
    with torch.no_grad(), Target("triton").in_use():
        tilestream.attention(query, query, query, backend="triton")
    ((has_splits, tensors),) = noted
    # The kernel of the call; then the one that leaves parts, and the one that combines them.
    assert has_splits == [False, True, False]
    assert tensors.out_parts is tensors.lse_parts is None


# ---- operands in parts

_PARTS = Case("parts", lengths=(150, 170), batch=1, heads=(1, 2), causal=True)
PARTS = [
    _PARTS,
    dataclasses.replace(_PARTS, id="parts_full", causal=False, lengths=(33, 161), widths=(128, 128)),
    dataclasses.replace(_PARTS, id="parts_wide", widths=(128, 100), heads=(2, 1), sinks="random"),
    dataclasses.replace(_PARTS, id="parts_window", widths=(20, 72), window=(40, 3), heads=(1, 3)),
    dataclasses.replace(_PARTS, id="parts_varlen", layout="varlen", widths=(128, 128), window=(60, None)),
    dataclasses.replace(_PARTS, id="parts_void_rows", shift=-30, dout="expanded", with_dlse=False),
]


@needs_interpreter
@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.id)
def test_parts(
    case: Case, is_finite: bool, device: torch.device, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What float32 backwards are on Hopper, with the tiles that they have there."""
    from tilestream.backends.triton import backward_parts, plan

    monkeypatch.setattr(plan, "_takes_parts", lambda problem, how: plan.takes_parts(problem))
    # Its assembly is for the placing of loads, and nothing else.
    monkeypatch.setattr(backward_parts, "delayed", lambda parts: parts)
    _assert_right(case, device, tiles=None, is_finite=is_finite)
    assert {backward_parts.query_parts_kernel, backward_parts.key_parts_kernel} <= set(launched)


# ---- shapes


@pytest.mark.parametrize("shape", ["".join(axes) for axes in itertools.product(*zip("bhmn", "1111", strict=True))])
def test_bias_of_every_shape(shape: str, device: torch.device) -> None:
    case = Case(f"bias_{shape}", lengths=(37, 45), heads=(1, 2), widths=(16, 16), bias=shape, causal=True)
    _assert_right(case, device)


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("group", [3, 5])
def test_groups_that_do_not_divide_a_tile(group: int, layout: str, device: torch.device) -> None:
    """Packed rows of one query lie in two tiles."""
    case = Case(f"group_{group}_{layout}", lengths=(45, 70), heads=(2, group), layout=layout, window=(20, 11))
    _assert_right(case, device)


@pytest.mark.parametrize(
    "case",
    [
        Case("own_tiles", dtype=torch.bfloat16, lengths=(200, 200), batch=1, causal=True),
        Case("own_tiles_rich", lengths=(70, 90), batch=1, causal=True, alibi="heads", dropout_p=0.2, bias="11mn"),
        Case("own_tiles_wide", lengths=(33, 40), batch=1, widths=(300, 512), window=(9, 9)),
    ],
    ids=lambda case: case.id,
)
def test_tiles_of_a_gpu(case: Case, device: torch.device) -> None:
    """Interpreted with the tiles that configs.py has, which is what else runs with `--device cuda`."""
    _assert_right(case, device, tiles=None, is_finite=False)


@needs_interpreter
def test_no_number_overflows(device: torch.device) -> None:
    """32-bit positions, edges and offsets, with limits and a shift as large as they go."""
    window = (2**62, 2**61)
    for case in (
        Case("wide_limits", lengths=(33, 40), batch=1, window=window, shift=7, alibi="heads", widths=(16, 16)),
        Case("far_shift", lengths=(33, 40), batch=1, window=(None, 2**40), shift=2**40, widths=(16, 16)),
        Case("far_back", lengths=(33, 40), batch=1, causal=True, shift=-(2**29), heads=(1, 4), widths=(16, 16)),
        Case("far_forth", lengths=(33, 40), batch=1, window=(0, None), shift=2**29, heads=(1, 6), widths=(16, 16)),
        Case("wide_varlen", lengths=(33, 40), layout="varlen", window=window, widths=(16, 16)),
    ):
        inputs = Target("triton").inputs(case, device)
        with interpreting(LARGE_TILES, checks_overflow=True):
            result, gradients = inputs.run("triton")
        assert not faults(inputs, result, gradients), case.id


# ---- which tiles are visited

_BLOCK_M, _BLOCK_N, _SEQLEN_Q, _SEQLEN_K = 16, 32, 70, 100


@needs_interpreter
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("shift", [-20, 0, 40])
def test_no_empty_tile_is_visited_and_no_full_one_masked(shift: int, group: int) -> None:
    """The ranges of the device against every pair of the band."""
    from interpreter_patches import device_call

    from tilestream.backends.triton import call, tiles

    for left, right in itertools.product((None, 0, 30), repeat=2):
        case = Case("ranges", lengths=(_SEQLEN_Q, _SEQLEN_K), heads=(1, group), window=(left, right), shift=shift)
        facts = call.facts_of(case.problem("cpu", is_backward=True), Config(_BLOCK_M, _BLOCK_N, 4, 1), "ieee")
        edges = shift - (left or 0), shift + (right or 0)
        sequence = tiles.Sequence(0, 0, 0, 0, _SEQLEN_Q, _SEQLEN_K, shift, *edges)
        # Every query once per head of the group, as the rows of a KV head are packed.
        visible = visible_mask(case, _SEQLEN_Q, _SEQLEN_K).repeat_interleave(group, dim=0)
        with interpreting():
            for m_start in range(0, len(visible), _BLOCK_M):
                ranges = device_call(tiles.key_ranges, m_start, sequence, facts)
                _check_ranges(ranges, visible[m_start : m_start + _BLOCK_M], _BLOCK_N, may_be_cut=False)
            for n_start in range(0, _SEQLEN_K, _BLOCK_N):
                ranges = device_call(tiles.query_ranges, n_start, sequence, facts)
                _check_ranges(ranges, visible[:, n_start : n_start + _BLOCK_N].T, _BLOCK_M, may_be_cut=True)


def _check_ranges(ranges: tuple[int, ...], visible: Tensor, block: int, may_be_cut: bool) -> None:
    """`visible` (rows of one tile, everything that they may visit); whether a tile cut short may be FULL."""
    lo, full_lo, full_hi, hi = ranges
    for start in range(0, visible.shape[1], block):
        tile = visible[:, start : start + block]
        assert (lo <= start < hi) == bool(tile.any())
        is_whole, is_full = tile.shape[1] == block, full_lo <= start < full_hi
        if is_full:
            assert tile.all()
            assert is_whole or may_be_cut
        elif lo <= start < hi:
            assert not (tile.all() and is_whole)


# ---- memory


@needs_interpreter
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the guard pages are Linux's")
@pytest.mark.parametrize("what", ["truths", "lies", "parts", "blocks"])
def test_kernels_stay_inside_of_their_tensors(what: str) -> None:
    """Also where cu_seqlens are wrong, which a GPU would not say."""
    environment = {**os.environ, "PYTHONPATH": str(_WORKER.parent.parent)}
    done = subprocess.run(
        [sys.executable, _WORKER, what], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all in bounds" in done.stdout


def test_parts_of_short_sequences_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts lie in tiles of 128 rows, which a token would fill with nothing."""
    from triton_hows import hows

    from tilestream.backends.triton import plan

    monkeypatch.setattr(plan, "_is_small", lambda device: False)
    monkeypatch.setattr(plan, "_is_hopper", lambda device: True)
    short = Case("short", lengths=(1, 1), batch=8300, heads=(16, 1), widths=(128, 128))
    for case, wanted in ((short, False), (dataclasses.replace(short, lengths=(128, 128)), True)):
        for layout in ("dense", "varlen"):
            problem = dataclasses.replace(case, layout="dense").problem("cuda", is_backward=True)
            if layout == "varlen":
                problem = problem.packed([case.lengths[0]] * case.batch, [case.lengths[1]] * case.batch)
            found = plan._backward_plan.__wrapped__(problem, hows(problem)[1])
            fields = [plan.Tensors._fields[place] for place, *_ in found._made]
            assert ("q_parts" in fields) == wanted
            # Either way both are compiled.
            names = {step.kernel.__name__ for step in (*found.steps, *found.others)}
            assert {"key_kernel", "key_parts_kernel"} <= names


# ---- what is not finite, and what is not there


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_nan_reaches_what_it_sees_alone(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 8, 1, 16).to(dtype) for _ in range(3))
    query[0, 2] = float("nan")
    found = []
    for backend in ("triton", "cpu"):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        with Target("triton").in_use():
            out = tilestream.attention(*leaves, causal=True, backend=backend)
            found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())


@needs_interpreter
def test_slopes_of_no_sequence() -> None:
    packed = torch.randn(5, 2, 16).requires_grad_()
    none = torch.zeros(1, dtype=torch.int32)
    with Target("triton").in_use():
        out = tilestream.attention_varlen(
            packed, packed, packed, none, none, alibi_slopes=torch.ones(0, 2), backend="triton"
        )
        (gradient,) = torch.autograd.grad(out.sum(), packed)
    assert not out.any()
    assert not gradient.any()


# ---- calls with a known signature


@needs_interpreter
def test_a_known_call_is_like_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, that plans last: whatever a signature leaves out makes no difference."""
    from tilestream import api
    from tilestream.backends.triton import plan

    monkeypatch.setattr(api, "_KNOWN", {})
    monkeypatch.setattr(plan, "_plan_lasts", lambda problem: True)
    generator = torch.Generator().manual_seed(0)

    def leaf(offset: int = 0) -> Tensor:
        flat = torch.randn(2 * 40 * 2 * 16 + offset, generator=generator).to(torch.bfloat16)
        return flat[offset:].view(2, 40, 2, 16)

    def check(*inputs: Tensor) -> None:
        with Target("triton").in_use():
            known = run(inputs)
            with monkeypatch.context() as patch:
                patch.setattr(api, "_KNOWN", {})
                new = run(inputs)
        assert all(torch.equal(one, other) for one, other in zip(known, new, strict=True))

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        results = [*tilestream.attention_with_lse(*inputs, causal=True, backend="triton")]
        wanted = [x for x in inputs if x.requires_grad]
        return [*results, *(torch.autograd.grad(results[0].sum(), wanted) if wanted else ())]

    check(leaf(), leaf(), leaf())
    ((signature, known),) = api._KNOWN.items()
    calls = []
    api._KNOWN[signature] = known._replace(forward=lambda inputs: calls.append(1) or known.forward(inputs))
    check(leaf(), leaf(), leaf())
    check(leaf(1), leaf(), leaf(3))  # no longer at multiples of 16 bytes
    check(leaf().requires_grad_(), leaf(), leaf())
    assert (len(calls), len(api._KNOWN)) == (3, 1)
    check(leaf().transpose(1, 2).contiguous().transpose(1, 2), leaf(), leaf())
    assert (len(calls), len(api._KNOWN)) == (3, 2)
    with pytest.raises(ValueError, match="causal must be True or False"), Target("triton").in_use():
        tilestream.attention(leaf(), leaf(), leaf(), causal=1, backend="triton")


# ---- plans


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flag_is_read_by_the_program_that_it_is_of(
    dtype: torch.dtype, is_small: bool, is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exact kernel has the programs and tiles of the one before it; and lse is padded to whole tiles of rows."""
    from triton_hows import hows

    from tilestream.backends.triton import plan

    monkeypatch.setattr(plan, "_is_small", lambda device: is_small)
    monkeypatch.setattr(plan, "_is_hopper", lambda device: is_hopper)
    forward_plan, backward_plan = plan._forward_plan.__wrapped__, plan._backward_plan.__wrapped__
    takes_parts = set()
    for width, layout, lengths in itertools.product(
        (16, 64, 128, 200, 512), ("dense", "varlen"), ((1, 1000), (300, 300))
    ):
        case = Case("plan", dtype, layout, lengths, widths=(width, width), causal=True, alibi="heads", bias="11mn")
        for bare in (dataclasses.replace(case, alibi=None, bias=None), case):
            problem = bare.problem("cuda", is_backward=True)
            forward_how, backward_how = hows(problem)
            steps = [*forward_plan(problem, forward_how).steps, *backward_plan(problem, backward_how).steps]
            flagging = None
            for step in steps:
                if step.kernel.__name__.startswith("exact_"):
                    assert flagging is not None
                    assert flagging.num_programs == step.numbers.num_programs
                    assert step.num_programs <= step.numbers.num_programs
                    if step.kernel.__name__ == "exact_key_kernel":
                        assert flagging.config.block_n == step.config.block_n * step.config.num_slices
                    else:
                        assert flagging.config.block_m == step.config.block_m
                assert step.facts.row_block % step.config.block_m == 0
                if step.kernel.__name__.endswith("parts_kernel"):
                    assert step.facts.row_block % step.config.block_n == 0
                    takes_parts.add(problem.head_dim)
                flagging = step if step.facts.flags else None
    assert takes_parts == ({16, 64, 128} if is_hopper and dtype == torch.float32 else set())


# ---- how it compiles


def test_kernels_are_compiled_in_threads_and_loaded_in_this_one() -> None:
    """A thread that is new has device 0 as its current one, whatever this thread's is."""
    from tilestream.backends.triton.launch import compile_together

    compiled_in, loaded_in = list[int](), list[int]()

    class Kernel:
        @property
        def run(self) -> None:
            loaded_in.append(threading.get_ident())

    def compile_one() -> Kernel:
        compiled_in.append(threading.get_ident())
        return Kernel()

    kernels = compile_together({"one": compile_one, "two": compile_one})
    assert list(kernels) == ["one", "two"]
    assert len(compiled_in) == 2
    assert threading.get_ident() not in compiled_in
    assert loaded_in == [threading.get_ident()] * 2
    assert compile_together({}) == {}


# ---- what it refuses


def test_it_takes_a_cpu_only_where_it_is_interpreted() -> None:
    problem = Case("plain").problem("cpu", is_backward=False)
    supports = dispatch.backend("triton").supports
    assert "it runs on GPUs" in str(supports(problem))
    if is_ready():
        with interpreting():
            assert supports(problem) is None


# ---- rows in memory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_that_lie_askew_are_copied_and_others_are_not(dtype: torch.dtype) -> None:
    from tilestream.backends.triton.call import rows_in_place

    buffer = torch.randn(2, 7, 3, 64).to(dtype)
    aligned = (buffer, buffer[..., 16:56], buffer[:, 1:4, ::2], buffer[:, :, :1].expand(2, 7, 5, 64))
    # What a dimension of size 1 steps over is nobody's row.
    for x in (*aligned, torch.randn(3, 1, 48).to(dtype).as_strided((3, 1, 16), (48, 5, 1))):
        assert rows_in_place(x) is x
    askew = (buffer[..., 1:41], buffer.flatten()[1:-63].view(-1, 64), torch.randn(2, 7, 3, 45).to(dtype)[..., :40])
    for x in (*askew, torch.randn(2, 16, 3, 64).to(dtype).transpose(1, 3)):
        _assert_copied(rows_in_place(x), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_that_are_not_whole_get_columns_of_zeros(dtype: torch.dtype) -> None:
    from tilestream.backends.triton.call import rows_in_place

    buffer, unit = torch.randn(2, 7, 3, 64).to(dtype), 16 // dtype.itemsize
    for x in (buffer[..., :5], buffer[..., 1:42], buffer[..., :1].expand(2, 7, 3, 9), buffer.transpose(1, 3)[..., :3]):
        copy, width = rows_in_place(x), x.shape[-1]
        assert copy.shape[-1] - width == -width % unit > 0
        _assert_copied(copy[..., :width], x, copy)
        assert not copy[..., width:].any()


def _assert_copied(got: torch.Tensor, x: torch.Tensor, copy: torch.Tensor | None = None) -> None:
    """`got` is `x`, and what holds it lies as kernels read it."""
    copy = got if copy is None else copy
    assert torch.equal(got, x)
    assert copy.is_contiguous()
    assert copy.data_ptr() % 16 == 0
