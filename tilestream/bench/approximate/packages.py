"""Approximate attention from public packages (the extra `bench`), each on query, key and value that it is given.

Only the attention of a package is used, not its layers: what projects and adds residuals is replaced by nothing, so
that all contestants compute from the same numbers. A package that is missing, or that today's PyTorch breaks, gives a
reason and no numbers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilestream import BlockMask
from tilestream.bench.approximate.methods import Method, Prepared, Target
from tilestream.bench.approximate.setting import LAYOUTS, Setting
from tilestream.bench.cases import DTYPES

__all__ = ["APPROXIMATE", "linformer", "local", "nystrom", "performer", "reformer"]

LINFORMER_KEYS = 256
NYSTROM_LANDMARKS = 64
LOCAL_WINDOW = 128
REFORMER_BUCKET, REFORMER_ROUNDS = 64, 4
_SEED = 0


class _Given(NamedTuple):
    """Stands for the hidden states that a package would project: the projections' results, as they are."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.query.shape

    def chunk(self, count: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """What cutting a joint projection would give."""
        assert (count, dim) == (3, -1)
        return self.query, self.key, self.value


class _Part(nn.Module):
    """In the place of a projection: one of the three tensors of a `_Given`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, given: _Given) -> Tensor:
        """The tensor."""
        found: Tensor = getattr(given, self.name)
        return found


def linformer(setting: Setting, device: torch.device, num_keys: int | None = None) -> Prepared:
    """Keys and values projected to `num_keys` along the sequence (arXiv:2006.04768), by matrices as the package draws
    them: nobody has trained them for these states."""
    num_keys = min(LINFORMER_KEYS, setting.seqlen) if num_keys is None else num_keys
    width = setting.num_heads * setting.head_dim
    layer = _import("linformer").LinformerSelfAttention(
        width, setting.seqlen, k=num_keys, heads=setting.num_heads, dropout=setting.dropout_p
    )
    layer.to_q, layer.to_k, layer.to_v = (_Part(name) for name in _Given._fields)
    layer.to_out = nn.Identity()
    layer = layer.to(device, DTYPES[setting.dtype])

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer(_Given(query, key, value))
        return out

    details = {"num_keys": num_keys, "note": "projections as initialised, not trained"}
    parameters = (layer.proj_k, layer.proj_v)
    return Prepared(forward, LAYOUTS["heads in width"], "yes", "no", parameters, details=details)


def performer(setting: Setting, device: torch.device, num_features: int | None = None) -> Prepared:
    """Positive orthogonal random features (arXiv:2009.14794), as many as the package's default: d log d."""
    layer = _import("performer_pytorch").FastAttention(setting.head_dim, num_features).to(device)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer(query, key, value)
        return out

    return Prepared(forward, LAYOUTS["heads first"], "no", "no", details={"num_features": int(layer.nb_features)})


def reformer(
    setting: Setting, device: torch.device, bucket_size: int = REFORMER_BUCKET, num_rounds: int = REFORMER_ROUNDS
) -> Prepared:
    """Hashed buckets (arXiv:2001.04451) of the queries, which are the keys too: the given key is not read."""
    layer = (
        _import("reformer_pytorch")
        .LSHAttention(dropout=setting.dropout_p, bucket_size=bucket_size, n_hashes=num_rounds)
        .to(device)
    )
    mask = setting.is_token(device).repeat_interleave(setting.num_heads, 0) if setting.is_padded else None

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # No graph beyond the call may keep its buckets.
        layer._cache.clear()
        out: Tensor = layer(query, value, input_mask=mask)[0]
        return out

    details = {
        "bucket_size": bucket_size,
        "num_rounds": num_rounds,
        "note": "queries are the keys too, of length 1: compared with exact attention of those",
    }
    return Prepared(forward, LAYOUTS["heads in batch"], "yes", "boolean mask", details=details)


def local(setting: Setting, device: torch.device, window: int | None = None) -> Prepared:
    """A block of queries sees its own block of keys and one on each side."""
    window = LOCAL_WINDOW if window is None else window
    layer = _import("local_attention.local_attention").LocalAttention(
        window, dropout=setting.dropout_p, use_rotary_pos_emb=False
    )
    mask = setting.is_token(device) if setting.is_padded else None

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer(query, key, value, mask=mask)
        return out

    place = torch.arange(math.ceil(setting.seqlen / window))
    blocks = (place - place[:, None]).abs() <= 1
    return Prepared(
        forward,
        LAYOUTS["heads first"],
        "yes",
        "boolean mask",
        kept=BlockMask.from_blocks(blocks, setting.seqlen, setting.seqlen, block_size=window),
        details={"window": window},
    )


def nystrom(setting: Setting, device: torch.device, num_landmarks: int | None = None) -> Prepared:
    """Nystroem's method with means as landmarks (arXiv:2102.03902), without the layer's convolution of the values."""
    num_landmarks = min(NYSTROM_LANDMARKS, setting.seqlen) if num_landmarks is None else num_landmarks
    layer = _import("nystrom_attention").NystromAttention(
        setting.num_heads * setting.head_dim, setting.head_dim, setting.num_heads, num_landmarks, residual=False
    )
    layer.to_qkv, layer.to_out = nn.Identity(), nn.Identity()
    mask = setting.is_token(device) if setting.is_padded else None
    # Its iteration adds a float32 identity, which PyTorch multiplies with other types under autocast alone.
    dtype = DTYPES[setting.dtype]
    is_mixed = dtype in (torch.float16, torch.bfloat16)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=is_mixed):
            out: Tensor = layer(_Given(query, key, value), mask=mask)
        return out.to(dtype)

    details: dict[str, object] = {"num_landmarks": num_landmarks}
    if is_mixed:
        details["note"] = "under autocast, without which the package takes no 16-bit types"
    return Prepared(forward, LAYOUTS["heads in width"], "no", "boolean mask", details=details)


def _import(module: str) -> Any:
    """The module; its parameters are drawn from a seed of ours, so that every run has the same."""
    torch.manual_seed(_SEED)
    with warnings.catch_warnings():
        # performer-pytorch asks distutils for versions, which only an installed setuptools still has.
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(module)


def _package(
    name: str,
    label: str,
    package: str,
    module: str,
    prepare: Callable[[Setting, torch.device], Prepared],
    multiple: int,
    target: Target = "softmax",
) -> Method:
    def refuse(setting: Setting, device: torch.device) -> str | None:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f'the package {package} is not installed: pip install "tilestream[bench]"'
        try:
            _import(module)
        except Exception as error:  # Of somebody else's package: anything.
            return f"the package {package} does not load: {type(error).__name__}: {error}"
        if setting.seqlen % multiple:
            return f"takes multiples of {multiple} tokens, not {setting.seqlen}"
        return None

    def source() -> str:
        return f"{package} {importlib.metadata.version(package)}"

    return Method(name, label, "approximate", source, prepare, refuse, target=target)


APPROXIMATE = (
    _package("linformer", "Linformer", "linformer", "linformer", linformer, 1),
    _package("performer", "Performer", "performer-pytorch", "performer_pytorch", performer, 1),
    _package(
        "reformer", "Reformer", "reformer-pytorch", "reformer_pytorch", reformer, 2 * REFORMER_BUCKET, "shared-qk"
    ),
    _package("local", "local attention", "local-attention", "local_attention", local, LOCAL_WINDOW),
    _package("nystrom", "Nystromformer", "nystrom-attention", "nystrom_attention", nystrom, NYSTROM_LANDMARKS),
)
