"""The errors a caller can get, and the one format of their messages."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ArgumentError",
    "DeviceError",
    "DtypeError",
    "ShapeError",
    "TilestreamError",
    "UnsupportedError",
    "describe_shapes",
]


class TilestreamError(ValueError):
    """Base of every error that a caller's input can cause."""


class ShapeError(TilestreamError):
    """A tensor's rank or sizes do not fit; the message shows all shapes."""


class DtypeError(TilestreamError, TypeError):
    """A tensor's or argument's type is not accepted; the message shows all dtypes."""


class DeviceError(TilestreamError):
    """Tensors of one call lie on different devices."""


class ArgumentError(TilestreamError):
    """A keyword argument is outside its range."""


class UnsupportedError(TilestreamError, NotImplementedError):
    """The named backend cannot run this call, or no backend can; the message says which can."""


def describe_shapes(shapes: Mapping[str, tuple[object, ...]], axes: str) -> str:
    """One indented line with every tensor's name and shape, and what the axes mean."""
    listed = "   ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return f"\n  {listed}   as ({axes})"
