"""Exact softmax attention that never stores the score matrix."""

from tilestream.api import attention, attention_varlen, attention_varlen_with_lse, attention_with_lse
from tilestream.dispatch import explain
from tilestream.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    TilestreamError,
    UnsupportedError,
)
from tilestream.state import AttentionOutput, merge

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AttentionOutput",
    "DeviceError",
    "DtypeError",
    "ShapeError",
    "TilestreamError",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_varlen_with_lse",
    "attention_with_lse",
    "explain",
    "merge",
]
