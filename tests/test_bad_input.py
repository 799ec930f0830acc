"""Bad input gets one clear error before any work; odd but legal input gets the contract's zeros, never NaN."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilestream
from tilestream import ArgumentError, DeviceError, DtypeError, ShapeError, TilestreamError, UnsupportedError, dispatch
from tilestream.problem import Problem

_INFINITY = float("inf")
_NAN = float("nan")


def _dense(**changes: Any) -> Any:
    """A valid dense call with some arguments replaced."""
    arguments: dict[str, Any] = {
        "query": torch.randn(2, 5, 4, 8),
        "key": torch.randn(2, 6, 2, 8),
        "value": torch.randn(2, 6, 2, 3),
    }
    return tilestream.attention_with_lse(**{**arguments, **changes})


def _varlen(**changes: Any) -> Any:
    """A valid packed call (sequences of 2 and 3 queries, 4 and 2 keys) with some arguments replaced."""
    arguments: dict[str, Any] = {
        "query": torch.randn(5, 4, 8),
        "key": torch.randn(6, 2, 8),
        "value": torch.randn(6, 2, 3),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 6], dtype=torch.int32),
    }
    return tilestream.attention_varlen_with_lse(**{**arguments, **changes})


def _cu(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# A row: id, the call, the arguments to replace, the error, and words its message must hold. "SHAPES" stands for the
# names and shapes of query, key and value, all at once.
Row = tuple[str, Callable[..., Any], dict[str, Any], type[Exception], list[str]]
_META = torch.device("meta")
ROWS: list[Row] = [
    # rank and sizes
    ("rank_3_query", _dense, {"query": torch.randn(5, 4, 8)}, ShapeError, ["query", "rank 4", "rank 3", "SHAPES"]),
    ("rank_5_key", _dense, {"key": torch.randn(1, 2, 6, 2, 8)}, ShapeError, ["key", "rank 5", "SHAPES"]),
    ("rank_0_value", _dense, {"value": torch.tensor(1.0)}, ShapeError, ["value", "rank 0", "SHAPES"]),
    ("batch_sizes", _dense, {"key": torch.randn(3, 6, 2, 8)}, ShapeError, ["batch", "SHAPES"]),
    ("batch_is_not_broadcast", _dense, {"query": torch.randn(1, 5, 4, 8)}, ShapeError, ["batch", "SHAPES"]),
    ("seqlen_of_value", _dense, {"value": torch.randn(2, 7, 2, 3)}, ShapeError, ["value", "7", "6", "SHAPES"]),
    ("heads_of_value", _dense, {"value": torch.randn(2, 6, 4, 3)}, ShapeError, ["value", "heads", "SHAPES"]),
    ("head_dim_of_key", _dense, {"key": torch.randn(2, 6, 2, 9)}, ShapeError, ["key", "head_dim", "9", "SHAPES"]),
    ("head_dim_0", _dense, {"query": torch.randn(2, 5, 4, 0), "key": torch.randn(2, 6, 2, 0)}, ShapeError,
     ["head_dim", "at least 1", "SHAPES"]),
    ("head_dim_v_0", _dense, {"value": torch.randn(2, 6, 2, 0)}, ShapeError, ["head_dim", "SHAPES"]),
    ("no_heads", _dense, {"key": torch.randn(2, 6, 0, 8), "value": torch.randn(2, 6, 0, 3)}, ShapeError,
     ["heads", "SHAPES"]),
    ("group_does_not_divide", _dense, {"query": torch.randn(2, 5, 3, 8)}, ShapeError,
     ["query", "3 heads", "multiple", "SHAPES", "transpose"]),
    ("fewer_query_heads", _dense, {"query": torch.randn(2, 5, 1, 8)}, ShapeError, ["query", "1 heads", "SHAPES"]),
    ("rank_4_packed", _varlen, {"query": torch.randn(1, 5, 4, 8)}, ShapeError, ["query", "rank 3", "SHAPES"]),
    ("tokens_of_packed_value", _varlen, {"value": torch.randn(5, 2, 3)}, ShapeError, ["value", "SHAPES"]),
    # dtypes
    ("integer_query", _dense, {"query": torch.ones(2, 5, 4, 8, dtype=torch.int64)}, DtypeError, ["query", "int64"]),
    ("bool_query", _dense, {"query": torch.ones(2, 5, 4, 8, dtype=torch.bool)}, DtypeError, ["query", "bool"]),
    ("complex", _dense, {"query": torch.randn(2, 5, 4, 8, dtype=torch.complex64)}, DtypeError, ["query", "complex64"]),
    ("float8", _dense, {"query": torch.zeros(2, 5, 4, 8).to(torch.float8_e4m3fn)}, DtypeError, ["query", "float8"]),
    ("mixed_key", _dense, {"key": torch.randn(2, 6, 2, 8, dtype=torch.float16)}, DtypeError,
     ["query torch.float32", "key torch.float16", "value torch.float32"]),
    ("mixed_value", _dense, {"value": torch.randn(2, 6, 2, 3, dtype=torch.float64)}, DtypeError,
     ["value torch.float64"]),
    # devices
    *[
        (f"device_of_{name}", _dense, {name: torch.zeros(shape, device=_META)}, DeviceError,
         [name, "meta", "cpu", "SHAPES"])
        for name, shape in (
            ("key", (2, 6, 2, 8)), ("value", (2, 6, 2, 3)), ("bias", (1, 1, 5, 6)), ("alibi_slopes", (4,)),
            ("sinks", (4,)),
        )
    ],
    ("device_of_query", _dense, {"query": torch.zeros(2, 5, 4, 8, device=_META)}, DeviceError,
     ["key", "meta", "SHAPES"]),
    ("device_of_seed", _dense, {"dropout_p": 0.1, "seed": torch.zeros(1, dtype=torch.int64, device=_META)}, DeviceError,
     ["seed", "meta"]),
    ("device_of_cu_seqlens", _varlen, {"cu_seqlens_q": _cu(0, 2, 5).to(_META)}, DeviceError, ["cu_seqlens_q", "meta"]),
    # not tensors
    ("list_query", _dense, {"query": [[1.0]]}, DtypeError, ["query", "list"]),
    ("none_key", _dense, {"key": None}, DtypeError, ["key", "NoneType"]),
    ("numpy_value", _dense, {"value": torch.randn(2, 6, 2, 3).numpy()}, DtypeError, ["value", "ndarray"]),
    ("number_bias", _dense, {"bias": 1.0}, DtypeError, ["bias", "float"]),
    ("list_slopes", _dense, {"alibi_slopes": [0.5] * 4}, DtypeError, ["alibi_slopes", "list"]),
    ("list_sinks", _dense, {"sinks": [0.5] * 4}, DtypeError, ["sinks", "list"]),
    ("list_cu_seqlens", _varlen, {"cu_seqlens_k": [0, 4, 6]}, DtypeError, ["cu_seqlens_k", "list"]),
    ("none_cu_seqlens_q", _varlen, {"cu_seqlens_q": None}, TilestreamError, ["cu_seqlens_q"]),
    ("none_cu_seqlens_k", _varlen, {"cu_seqlens_k": None}, TilestreamError, ["cu_seqlens_k"]),
    ("none_cu_seqlens", _varlen, {"cu_seqlens_q": None, "cu_seqlens_k": None}, TilestreamError, ["cu_seqlens"]),
    # window, causal, scale, softcap, shift
    ("negative_left", _dense, {"window": (-1, 0)}, ArgumentError, ["window", "left", "-1", "None"]),
    ("negative_right", _dense, {"window": (3, -2)}, ArgumentError, ["window", "right", "-2"]),
    ("window_of_three", _dense, {"window": (1, 2, 3)}, ArgumentError, ["window", "(1, 2, 3)"]),
    ("window_number", _dense, {"window": 5}, ArgumentError, ["window", "5"]),
    ("window_of_floats", _dense, {"window": (1.0, 2)}, DtypeError, ["window", "left", "float"]),
    ("window_of_bools", _dense, {"window": (True, 2)}, DtypeError, ["window", "left", "bool"]),
    ("causal_tensor", _dense, {"causal": torch.ones(5, 6)}, DtypeError, ["causal", "Tensor"]),
    ("causal_string", _dense, {"causal": "lower_right"}, DtypeError, ["causal", "str"]),
    ("scale_nan", _dense, {"scale": _NAN}, ArgumentError, ["scale", "nan"]),
    ("scale_inf", _dense, {"scale": _INFINITY}, ArgumentError, ["scale", "inf"]),
    ("scale_minus_inf", _dense, {"scale": -_INFINITY}, ArgumentError, ["scale", "-inf"]),
    ("scale_beyond_float32", _dense, {"scale": 1e39}, ArgumentError, ["scale", "float32", "1e+39"]),
    ("varlen_scale_nan", _varlen, {"scale": _NAN}, ArgumentError, ["scale", "nan"]),
    ("scale_nan_by_name", _dense, {"scale": _NAN, "backend": "triton"}, ArgumentError, ["scale", "nan"]),
    ("scale_tensor", _dense, {"scale": torch.tensor(0.5)}, DtypeError, ["scale", "Tensor", "float(scale)"]),
    ("scale_string", _dense, {"scale": "auto"}, DtypeError, ["scale", "str"]),
    ("softcap_negative", _dense, {"softcap": -1.0}, ArgumentError, ["softcap", "-1.0"]),
    ("softcap_nan", _dense, {"softcap": _NAN}, ArgumentError, ["softcap", "nan"]),
    ("softcap_none", _dense, {"softcap": None}, DtypeError, ["softcap", "NoneType"]),
    ("shift_float", _dense, {"shift": 1.0}, DtypeError, ["shift", "float"]),
    ("shift_tensor", _dense, {"shift": torch.tensor(1)}, DtypeError, ["shift", "Tensor"]),
    ("deterministic_string", _dense, {"deterministic": "yes"}, DtypeError, ["deterministic", "str"]),
    # dropout and seed
    ("dropout_1", _dense, {"dropout_p": 1.0}, ArgumentError, ["dropout_p", "1.0", "[0, 1)"]),
    ("dropout_negative", _dense, {"dropout_p": -0.1}, ArgumentError, ["dropout_p", "-0.1"]),
    ("dropout_nan", _dense, {"dropout_p": _NAN}, ArgumentError, ["dropout_p", "nan"]),
    ("dropout_tensor", _dense, {"dropout_p": torch.tensor(0.1)}, DtypeError, ["dropout_p", "Tensor"]),
    ("seed_float", _dense, {"dropout_p": 0.1, "seed": 1.0}, DtypeError, ["seed", "float"]),
    ("seed_bool", _dense, {"dropout_p": 0.1, "seed": True}, DtypeError, ["seed", "bool"]),
    ("seed_too_large", _dense, {"dropout_p": 0.1, "seed": 2**64}, ArgumentError, ["seed", str(2**64)]),
    ("seed_int32", _dense, {"dropout_p": 0.1, "seed": _cu(3)}, DtypeError, ["seed", "int32"]),
    ("seed_of_two", _dense, {"dropout_p": 0.1, "seed": _cu(3, 4, dtype=torch.int64)}, DtypeError, ["seed", "(2,)"]),
    # bias, slopes, sinks
    ("bias_shape", _dense, {"bias": torch.zeros(1, 1, 5, 7)}, ShapeError,
     ["bias", "(1, 1, 5, 7)", "(2, 4, 5, 6)", "SHAPES"]),
    ("bias_of_kv_heads", _dense, {"bias": torch.zeros(2, 2, 5, 6)}, ShapeError, ["bias", "(2, 2, 5, 6)", "SHAPES"]),
    ("bias_rank_2", _dense, {"bias": torch.zeros(5, 6)}, ShapeError, ["bias", "rank 4", "(5, 6)", "SHAPES"]),
    ("bias_empty", _dense, {"bias": torch.zeros(1, 1, 0, 6)}, ShapeError, ["bias", "(1, 1, 0, 6)", "SHAPES"]),
    ("bias_bool", _dense, {"bias": torch.ones(1, 1, 5, 6, dtype=torch.bool)}, DtypeError,
     ["bias", "bool", "masked_fill"]),
    ("bias_int", _dense, {"bias": torch.zeros(1, 1, 5, 6, dtype=torch.int32)}, DtypeError, ["bias", "int32"]),
    ("bias_complex", _dense, {"bias": torch.zeros(1, 1, 5, 6, dtype=torch.complex64)}, DtypeError,
     ["bias", "complex64"]),
    ("varlen_bias_batch", _varlen, {"bias": torch.zeros(3, 1, 3, 4)}, ShapeError, ["bias", "(3, 1, 3, 4)", "SHAPES"]),
    ("varlen_bias_too_small", _varlen, {"bias": torch.zeros(2, 1, 2, 4)}, ShapeError, ["bias", "(2, 1, 2, 4)", "3"]),
    ("slopes_shape", _dense, {"alibi_slopes": torch.ones(2)}, ShapeError, ["alibi_slopes", "(4,)", "(2,)", "SHAPES"]),
    ("slopes_rank", _dense, {"alibi_slopes": torch.ones(2, 4, 1)}, ShapeError, ["alibi_slopes", "(2, 4, 1)", "SHAPES"]),
    ("slopes_int", _dense, {"alibi_slopes": torch.ones(4, dtype=torch.int64)}, DtypeError, ["alibi_slopes", "int64"]),
    ("slopes_with_gradient", _dense, {"alibi_slopes": torch.ones(4, requires_grad=True)}, ArgumentError,
     ["alibi_slopes", "gradient", "detach"]),
    ("sinks_shape", _dense, {"sinks": torch.ones(2)}, ShapeError, ["sinks", "(4,)", "(2,)", "SHAPES"]),
    ("sinks_per_batch", _dense, {"sinks": torch.ones(2, 4)}, ShapeError, ["sinks", "(2, 4)", "SHAPES"]),
    ("sinks_int", _dense, {"sinks": torch.ones(4, dtype=torch.int64)}, DtypeError, ["sinks", "int64"]),
    # cu_seqlens and max_seqlen
    ("cu_int64", _varlen, {"cu_seqlens_q": _cu(0, 2, 5, dtype=torch.int64)}, DtypeError,
     ["cu_seqlens_q", "int64", "int32"]),
    ("cu_float", _varlen, {"cu_seqlens_k": torch.tensor([0.0, 4.0, 6.0])}, DtypeError, ["cu_seqlens_k", "float32"]),
    ("cu_rank_2", _varlen, {"cu_seqlens_q": _cu(0, 2, 5)[None]}, ShapeError, ["cu_seqlens_q", "(1, 3)", "SHAPES"]),
    ("cu_empty", _varlen, {"cu_seqlens_q": _cu(), "cu_seqlens_k": _cu()}, ShapeError,
     ["cu_seqlens_q", "(0,)", "SHAPES"]),
    ("cu_lengths_differ", _varlen, {"cu_seqlens_q": _cu(0, 5)}, ShapeError,
     ["cu_seqlens_q", "cu_seqlens_k", "(2,)", "SHAPES"]),
    ("cu_starts_late", _varlen, {"cu_seqlens_q": _cu(1, 2, 5)}, ArgumentError,
     ["cu_seqlens_q", "start at 0", "[1, 2, 5]"]),
    ("cu_decreases", _varlen, {"cu_seqlens_k": _cu(0, 4, 3)}, ArgumentError,
     ["cu_seqlens_k", "never decrease", "[0, 4, 3]"]),
    ("cu_negative", _varlen, {"cu_seqlens_k": _cu(0, -4, 6)}, ArgumentError, ["cu_seqlens_k", "[0, -4, 6]"]),
    ("cu_beyond", _varlen, {"cu_seqlens_q": _cu(0, 2, 9)}, ArgumentError, ["cu_seqlens_q", "9", "5"]),
    ("max_seqlen_too_small", _varlen, {"max_seqlen_k": 3}, ArgumentError, ["max_seqlen_k", "3", "4"]),
    ("max_seqlen_negative", _varlen, {"max_seqlen_q": -1}, ArgumentError, ["max_seqlen_q", "-1"]),
    ("max_seqlen_tensor", _varlen, {"max_seqlen_q": torch.tensor(3)}, DtypeError, ["max_seqlen_q", "Tensor"]),
    # backend
    ("unknown_backend", _dense, {"backend": "warp"}, ArgumentError, ["'warp'", *dispatch.BACKENDS]),
    ("backend_is_no_string", _dense, {"backend": 3}, TilestreamError, ["backend", "3"]),
]  # fmt: skip


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("a backend was called")

    for name in dispatch.BACKENDS:
        monkeypatch.setattr(dispatch.backend(name), "forward", run)


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_refused_with_a_clear_message(row: Row) -> None:
    _, call, changes, error, words = row
    with pytest.raises(error) as caught:
        call(**changes)
    message = str(caught.value)
    assert isinstance(caught.value, TilestreamError)
    assert isinstance(caught.value, ValueError)
    for word in words:
        if word == "SHAPES":
            for name, shape in _shapes(call, changes).items():
                assert f"{name} {shape}" in message, message
        else:
            assert word in message, message


def _shapes(call: Callable[..., Any], changes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"query": (2, 5, 4, 8), "key": (2, 6, 2, 8), "value": (2, 6, 2, 3)}
    if call is _varlen:
        shapes = {"query": (5, 4, 8), "key": (6, 2, 8), "value": (6, 2, 3)}
    return {name: tuple(changes[name].shape) if name in changes else shape for name, shape in shapes.items()}


_needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@_needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 520}, "head_dim 520 is above 512"),
        ({"device_type": "meta"}, "not on meta"),
        ({"device_type": "mps"}, "not on mps"),
    ],
    ids=["dtype", "head_dim", "meta", "mps"],
)
def test_triton_by_name_refuses_and_says_what_to_do(changes: dict[str, Any], reason: str) -> None:
    """Described without tensors, so that it is the same with and without a GPU."""
    sizes = {"seqlen_q": 8, "num_heads_q": 2, "head_dim": 16, "dtype": torch.float16, "device_type": "cuda", **changes}
    with pytest.raises(UnsupportedError) as caught:
        dispatch.choose(Problem.dense(**sizes), "triton")
    for words in ("backend 'triton' cannot run this call", "cpu can; pass backend=None", reason):
        assert words in str(caught.value)


_ON_A_CPU = """
import torch, tilestream
query = torch.randn(1, 3, 1, 16)
try:
    tilestream.attention(query, query, query, backend="triton")
except tilestream.UnsupportedError as error:
    print(error)
"""


@_needs_triton
def test_triton_by_name_refuses_a_cpu() -> None:
    """In a process of its own, because this one may run Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_CPU], env=environment, capture_output=True, text=True, check=True
    )
    for words in ("backend 'triton' cannot run this call", "cpu can; pass backend=None", "TRITON_INTERPRET=1"):
        assert words in done.stdout


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(5, 4, 8)], layout=layout)
    with pytest.raises(ShapeError, match="query must not be a nested tensor"):
        _dense(query=nested, key=nested, value=nested)


def test_one_function_does_not_know_the_calls_of_another() -> None:
    """The same tensors, which are right for the one."""
    query = torch.randn(1, 5, 4, 8)
    for _ in range(2):
        tilestream.attention(query, query, query)
        with pytest.raises(DtypeError, match="cu_seqlens_q"):
            tilestream.attention_varlen(query, query, query, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [_dense, _varlen])
def test_the_valid_calls_are_valid(call: Callable[..., Any]) -> None:
    assert all(bool(torch.isfinite(tensor).all()) for tensor in call())


def test_everything_but_tensors_is_keyword_only() -> None:
    query, key, value = (torch.randn(1, 3, 1, 4) for _ in range(3))
    with pytest.raises(TypeError):
        tilestream.attention(query, key, value, True)
    with pytest.raises(TypeError, match="is_causal"):
        tilestream.attention(query, key, value, is_causal=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((0, 5, 2, 8), (0, 6, 2, 8)), {}),
        (((2, 0, 2, 8), (2, 6, 2, 8)), {}),
        (((2, 5, 2, 8), (2, 0, 2, 8)), {}),
        (((0, 0, 2, 8), (0, 0, 2, 8)), {"causal": True}),
        (((1, 9, 2, 8), (1, 4, 2, 8)), {"causal": True}),
        (((1, 9, 2, 8), (1, 4, 2, 8)), {"window": (0, 0), "shift": 100}),
        (((1, 9, 2, 8), (1, 4, 2, 8)), {"window": (0, 0), "shift": -(2**40)}),
        (((1, 9, 2, 8), (1, 4, 2, 8)), {"window": (2**40, 2**40)}),
        (((1, 9, 2, 8), (1, 4, 2, 8)), {"bias": torch.full((1, 1, 1, 1), -_INFINITY)}),
        (((1, 9, 2, 8), (1, 4, 2, 8)), {"bias": torch.full((1, 1, 9, 4), -_INFINITY), "softcap": 5.0}),
        (((1, 9, 2, 8), (1, 4, 2, 8)),
         {"bias": torch.full((1, 1, 1, 1), -_INFINITY), "sinks": torch.full((2,), -_INFINITY)}),
        (((1, 9, 2, 8), (1, 0, 2, 8)), {"sinks": torch.full((2,), -_INFINITY)}),
        (((1, 9, 2, 8), (1, 4, 2, 8)), {"causal": True, "dropout_p": 0.999, "seed": 1}),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else ",".join(value),
)  # fmt: skip
def test_rows_without_keys_give_zero(
    backend: str, device: torch.device, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]
) -> None:
    """out 0, lse -inf, gradients 0 for a row that sees no key; nothing anywhere is NaN."""
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in (shapes[0], shapes[1], shapes[1])]
    learned = {name: options[name].detach().clone().requires_grad_() for name in ("bias", "sinks") if name in options}
    result = tilestream.attention_with_lse(*leaves, backend=backend, **{**options, **learned})
    everything = [*leaves, *learned.values()]
    gradients = torch.autograd.grad(result, everything, [torch.ones_like(result.out), torch.ones_like(result.lse)])
    assert not any(bool(torch.isnan(tensor).any()) for tensor in (*result, *gradients))
    is_void = result.lse == -_INFINITY
    rows = is_void.transpose(1, 2)
    assert not bool(result.out[rows].any())
    assert not bool(gradients[0][rows].any())
    if bool(is_void.all()):
        assert not any(bool(gradient.any()) for gradient in gradients)


def test_a_sink_alone_takes_all_probability(device: torch.device) -> None:
    """Without keys, lse is the sink and out is 0."""
    query = torch.randn(1, 3, 2, 8, device=device)
    nothing = torch.randn(1, 0, 2, 8, device=device)
    sinks = torch.tensor([0.5, -2.0], device=device)
    result = tilestream.attention_with_lse(query, nothing, nothing, sinks=sinks)
    assert not bool(result.out.any())
    torch.testing.assert_close(result.lse, sinks[None, :, None].expand(1, 2, 3))


def test_meta_tensors_give_meta_tensors() -> None:
    query = torch.zeros(2, 5, 4, 8, device=_META)
    out = tilestream.attention(query, query, query)
    assert out.device.type == "meta"
    assert out.shape == (2, 5, 4, 8)


def test_an_error_leaves_no_trace(device: torch.device) -> None:
    """A refused call consumes no random numbers, so a retry equals a run without the mistake."""
    query = torch.randn(1, 3, 1, 4, device=device)
    state = torch.random.get_rng_state()
    with pytest.raises(ShapeError):
        tilestream.attention(query, query, query[:, :2], dropout_p=0.5)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_right_call_does_not_let_a_wrong_one_pass() -> None:
    x = torch.randn(1, 4, 1, 8)
    tilestream.attention(x, x, x, causal=True, window=(1, 0))
    for wrong in ({"window": (1.0, 0)}, {"window": (True, False)}, {"causal": 1}, {"dropout_p": torch.zeros(2)}):
        with pytest.raises(tilestream.errors.DtypeError):
            tilestream.attention(x, x, x, **{"causal": True, "window": (1, 0), **wrong})
