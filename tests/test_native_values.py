"""Numbers that are not finite, and finite ones at the ends of the range, go where the PyTorch loop sends them.

The kernels may leave such a call to the loop; what they do themselves has to be as good.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Case
from inputs import LARGE, CaseInputs, make_inputs
from targets import each_isa, needs_native
from torch import Tensor

import tilestream
from tilestream.backends.cpu.native import library
from tilestream.state import AttentionOutput

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def _inputs(dtype: torch.dtype, layout: str = "dense") -> CaseInputs:
    """Causal with a bias, so that keys are visible to some rows and hidden from others."""
    case = Case(
        "values", dtype=dtype, layout=layout, lengths=(70, 90), heads=(2, 2), widths=(24, 16), causal=True,
        bias="1hmn", memory="packed_qkv", with_dlse=True,
    )  # fmt: skip
    return make_inputs(case, CPU, unseen=LARGE)


def _compare(inputs: CaseInputs, isa: str) -> dict[str, Tensor]:
    """Holds the native results to the loop's: alike in what is not finite, and not much farther from the oracle.

    Returns:
        The native results by name.
    """
    of_loop, of_oracle = _named(*inputs.run("cpu")), _named(*inputs.oracle(torch.float64))
    with library.use(isa):
        got = _named(*inputs.run("native"))
    for name, tensor in got.items():
        loop = of_loop[name].double()
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(tensor), kind(loop)), f"{name}: {kind.__name__}"
        finite = loop.isfinite() & of_oracle[name].isfinite()
        if not finite.any():
            continue
        exact = of_oracle[name][finite]
        error, lost = (float((x[finite] - exact).abs().max()) for x in (tensor.double(), loop))
        rounding = 64 * torch.finfo(torch.float32).eps + 2 * torch.finfo(tensor.dtype).eps
        bound = 16 * lost + rounding * float(exact.abs().max()) + 4 * torch.finfo(torch.float32).tiny * 2**-23
        assert error <= bound, (
            f"{name}: error {error:.3g}, the loop's {lost:.3g}, largest {float(exact.abs().max()):.3g}"
        )
    return got


def _named(result: AttentionOutput, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in {"out": result.out, "lse": result.lse, **gradients}.items()}


def _is_like_the_oracle(inputs: CaseInputs, got: dict[str, Tensor]) -> None:
    """Finite, infinite and NaN in the places where the oracle has them."""
    for name, exact in _named(*inputs.oracle(torch.float64)).items():
        assert torch.equal(got[name].isnan(), exact.isnan()), name
        assert torch.equal(got[name].isposinf(), exact.isposinf()), name
        assert torch.equal(got[name].isneginf(), exact.isneginf()), name


@each_isa
@each_dtype
@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["query", "key", "value", "bias", "dout"])
def test_garbage_that_some_rows_see(where: str, garbage: float, layout: str, dtype: torch.dtype, isa: str) -> None:
    inputs = _inputs(dtype, layout)
    tensor = inputs.dout if where == "dout" else inputs.leaves[where]
    place = (0, 1, 30, 33) if where == "bias" else (40, 1, 5) if layout == "varlen" else (0, 40, 1, 5)
    tensor[place] = garbage
    _compare(inputs, isa)


@each_isa
@each_dtype
@pytest.mark.parametrize("where", ["key", "value"])
def test_garbage_that_no_row_sees(where: str, dtype: torch.dtype, isa: str) -> None:
    inputs = _inputs(dtype)
    inputs.leaves["bias"][..., 50] = -INF
    inputs.leaves[where][:, 50] = NAN
    got = _compare(inputs, isa)
    _is_like_the_oracle(inputs, got)
    assert all(tensor[tensor != -INF].isfinite().all() for tensor in got.values())


@each_isa
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e12, 1e16, 1e19, 1e30, 1e38])
@pytest.mark.parametrize("where", ["query", "key", "value", "dout"])
def test_large_numbers(where: str, size: float, isa: str) -> None:
    """Scores of that size, up to where they overflow; and results and gradients of that size."""
    inputs = _inputs(torch.float32)
    (inputs.dout if where == "dout" else inputs.leaves[where]).mul_(size)
    _compare(inputs, isa)


@each_isa
@pytest.mark.parametrize("size", [1e4, 1e10, 1e30, 3e38, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_biases(sign: float, size: float, isa: str) -> None:
    """Of whole rows too, which are no hidden rows."""
    inputs = _inputs(torch.float32)
    inputs.leaves["bias"][0, 1, 20:40] = sign * size
    inputs.leaves["bias"][0, 2, :, 10:20] = sign * size
    _compare(inputs, isa)


@each_isa
@pytest.mark.parametrize("size", [1e-4, 1e-20, 1e-30, 1e-38, 1e-44])
@pytest.mark.parametrize("names", [("query",), ("value",), ("query", "key"), ("dout",), ("value", "dout")])
def test_small_numbers(names: tuple[str, ...], size: float, isa: str) -> None:
    """Down to what only a subnormal can hold."""
    inputs = _inputs(torch.float32)
    for name in names:
        (inputs.dout if name == "dout" else inputs.leaves[name]).mul_(size)
    got = _compare(inputs, isa)
    _is_like_the_oracle(inputs, got)


@each_isa
@each_dtype
@pytest.mark.parametrize("change", ["all_minus_infinity", "sink_infinite", "smallest"])
def test_rows_that_are_nearly_empty(change: str, dtype: torch.dtype, isa: str) -> None:
    inputs = _inputs(dtype)
    changes: dict[str, Callable[[], object]] = {
        "all_minus_infinity": lambda: inputs.leaves["bias"].fill_(-INF),
        "sink_infinite": lambda: inputs.leaves.update(sinks=torch.tensor([INF, -INF, 3e38, -3e38])),
        "smallest": lambda: inputs.leaves["bias"].fill_(torch.finfo(dtype).min),
    }
    changes[change]()
    _compare(inputs, isa)


@needs_native
def test_split_keys_whose_sum_overflows_are_computed_again() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, 1, 16, generator=generator) for n in (40, 2048, 2048))
    value[:, :512] = 3e36
    key[:, 600:] = query[:, :1] * 40
    native, loop = (tilestream.attention(query, key, value, backend=name) for name in ("native", "cpu"))
    assert torch.equal(native.isnan(), loop.isnan())


@needs_native
def test_a_large_sink_is_its_own_lse() -> None:
    query, key, value = (torch.randn(1, 20, 1, 96, generator=torch.Generator().manual_seed(0)) for _ in range(3))
    sinks = torch.tensor([1e6])
    assert torch.equal(
        tilestream.attention_with_lse(query, key, value, sinks=sinks, backend="native").lse, torch.full((1, 1, 20), 1e6)
    )


@needs_native
def test_lazily_negated_tensors_are_read_with_their_sign() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 20, 2, 16, generator=generator) for _ in range(3))
    bias = torch.randn(1, 1, 20, 20, dtype=torch.complex64, generator=generator).conj().imag
    assert bias.is_neg()
    lazy = tilestream.attention(torch._neg_view(query), key, value, bias=bias, backend="native")
    assert torch.equal(lazy, tilestream.attention(-query, key, value, bias=bias.resolve_neg(), backend="native"))
