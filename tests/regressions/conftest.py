"""Fixtures of the regression tests: every backend, every dtype, and inputs that depend only on the test's id."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from regression import Draw

from tilestream.dispatch import BACKENDS
from tilestream.errors import UnsupportedError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The backend under test, named so that it cannot fall back."""
    return str(request.param)


@pytest.fixture(params=_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def draw(request: pytest.FixtureRequest, device: torch.device) -> Draw:
    """Inputs of each dtype."""
    return Draw(_case_id(request), device, request.param)


@pytest.fixture
def fixed_draw(request: pytest.FixtureRequest, device: torch.device) -> Draw:
    """Inputs of a test that names its dtypes itself."""
    return Draw(_case_id(request), device, None)


def _case_id(request: pytest.FixtureRequest) -> str:
    """`M01` of `test_m01_some_title`; it seeds the inputs."""
    return str(request.node.originalname).split("_")[1].upper()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A backend may refuse a call, with its reason; the conformance test keeps the table of what it must accept."""
    try:
        return (yield)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
