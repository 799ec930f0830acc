"""Shared by every test: the device option, the seeds, and uninitialised memory that shows.

Memory from torch.empty and its kin is filled with NaN (integers: a wild value), so that a kernel which reads what it
never wrote fails every time instead of once a month. A test that measures memory or time opts out with the marker
``no_poison``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

# Before numpy is loaded. In Triton's interpreter its threads gain nothing, and where something else runs they spin:
# three times the time.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings
from interpreter import import_interpreted, interpreting, is_ready, why_not_interpreted
from targets import HAS_HOPPER
from torch import Tensor

from tilestream import UnsupportedError
from tilestream.backends.cpu.native import library
from tilestream.dispatch import BACKENDS

# The same examples in every run, so that a red test is red again; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")

_EMPTY_FUNCTIONS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="torch device that the suite's tensors live on (cpu, cuda, ...)")


def pytest_configure(config: pytest.Config) -> None:
    # On a GPU its kernels are compiled.
    if config.getoption("--device") == "cpu":
        import_interpreted()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Interpreted kernels would take a GPU's tensors too, in their own time.
    if torch.cuda.is_available() and not is_ready():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and `--device cuda`"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    return torch.device(request.config.getoption("--device"))


# The Hopper backend runs on no machine but one.
@pytest.fixture(scope="session", params=[name for name in BACKENDS if name != "hopper" or HAS_HOPPER])
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Each backend that runs on the device under test; for a test of numerics that calls it by name."""
    if request.param == "native" and (device.type != "cpu" or library.library() is None):
        pytest.skip("needs the native kernels")
    if request.param == "triton" and device.type == "cpu" and not is_ready():
        pytest.skip("needs Triton, for its interpreter")
    if request.param == "hopper" and device.type != "cuda":
        pytest.skip("needs `--device cuda`")
    return str(request.param)


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the backend triton, where that is not compiled."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("backend") != "triton" or not is_ready():
        yield
        return
    reason = why_not_interpreted(request.node.originalname, callspec.params)
    if reason is not None:
        pytest.skip(reason)
    with interpreting():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """The Hopper backend may refuse a call of a test for all; the conformance test has the table of what it may."""
    try:
        return (yield)
    except UnsupportedError as refusal:
        callspec = getattr(item, "callspec", None)
        if callspec is None or callspec.params.get("backend") != "hopper":
            raise
        pytest.skip(str(refusal))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`allocate`, whose memory comes back filled with NaN, or with a wild integer."""

    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        memory = allocate(*args, **kwargs)
        # A compiled graph keeps the plain allocation: it must stay what the user's graph would be.
        if torch.compiler.is_compiling() or memory.device.type == "meta":
            return memory
        if memory.is_floating_point() or memory.is_complex():
            return memory.detach().fill_(float("nan")).requires_grad_(memory.requires_grad)
        if memory.dtype in (torch.int16, torch.int32, torch.int64):
            return memory.fill_(torch.iinfo(memory.dtype).max // 2)
        return memory

    return allocate_poisoned


@pytest.fixture(autouse=True)
def _poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("no_poison") is None:
        for owner, name in _EMPTY_FUNCTIONS:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
