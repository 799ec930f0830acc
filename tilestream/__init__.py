"""Exact softmax attention that never stores the score matrix."""

from tilestream.api import attention, attention_varlen, attention_varlen_with_lse, attention_with_lse
from tilestream.block_mask import BlockMask
from tilestream.block_sparse import (
    block_sparse_attention,
    block_sparse_attention_varlen,
    block_sparse_attention_varlen_with_lse,
    block_sparse_attention_with_lse,
)
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
    "BlockMask",
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
    "block_sparse_attention",
    "block_sparse_attention_varlen",
    "block_sparse_attention_varlen_with_lse",
    "block_sparse_attention_with_lse",
    "explain",
    "merge",
]
