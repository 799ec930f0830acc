"""What is measured: one attention call per `Case`, and the named cases of ``tilestream bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tilestream.bench.block_masks import band_of, mask_named
from tilestream.block_mask import BlockMask
from tilestream.errors import ArgumentError
from tilestream.problem import SUPPORTED_DTYPES, AttentionInputs, Problem
from tilestream.spec import AttentionSpec, Band, default_scale

__all__ = ["CASES", "DTYPES", "Case", "case_named", "growing_lengths", "normal_numbers", "square_case"]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SUPPORTED_DTYPES}


@dataclass(frozen=True)
class Case:
    """One dense call with random inputs; the last query meets the last key."""

    name: str
    batch: int = 1
    seqlen_q: int = 1024
    seqlen_k: int = 1024
    num_heads_q: int = 4
    num_heads_kv: int = 4
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    has_bias: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    # The name of a block mask in `block_masks.MASKS`, and the side of its blocks.
    mask: str | None = None
    mask_block: int = 128

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Case:
        """The case that `to_dict` described."""
        window = fields.get("window")
        return cls(**{**fields, "window": None if window is None else tuple(window)})

    def to_dict(self) -> dict[str, Any]:
        """Every field, JSON-able."""
        return asdict(self)

    def with_dtype(self, dtype: str) -> Case:
        """The same sizes in another dtype, which the name then says."""
        return self if dtype == self.dtype else replace(self, name=f"{self.name}_{dtype}", dtype=dtype)

    @property
    def spec(self) -> AttentionSpec:
        """What the case computes."""
        return AttentionSpec(
            band=Band.from_arguments(self.causal, self.window),
            scale=default_scale(self.head_dim),
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            has_bias=self.has_bias,
            has_alibi=self.has_alibi,
            has_sinks=self.has_sinks,
        )

    @property
    def block_mask(self) -> BlockMask | None:
        """The mask of a block-sparse call; the same one each time."""
        return None if self.mask is None else mask_named(self.mask, self.seqlen_q, self.seqlen_k, self.mask_block)

    @property
    def dense(self) -> Case:
        """The call without block mask that this one is compared with: of the same pairs if a band shows them."""
        if self.mask is None:
            return self
        causal, window = band_of(self.mask, self.mask_block)
        name = self.name.replace(self.mask, f"{self.mask}_band" if causal else "full", 1)
        return replace(self, name=name, mask=None, causal=causal, window=window)

    def problem(self, device_type: str) -> Problem:
        """The case as a `Problem`, without tensors."""
        dense = Problem.dense(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            num_heads_q=self.num_heads_q,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=DTYPES[self.dtype],
            device_type=device_type,
            spec=self.spec,
        )
        return dense if self.mask is None else replace(dense, block_mask=self.block_mask)

    def make_inputs(self, device: torch.device, seed: int = 0, drawn_on: torch.device | None = None) -> AttentionInputs:
        """Standard normal inputs; the same numbers on every device, unless `drawn_on` names who draws them."""
        randn = normal_numbers(device, DTYPES[self.dtype], seed, drawn_on)

        return AttentionInputs(
            query=randn(self.batch, self.seqlen_q, self.num_heads_q, self.head_dim),
            key=randn(self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim),
            value=randn(self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim_v),
            bias=randn(1, self.num_heads_q, self.seqlen_q, self.seqlen_k) if self.has_bias else None,
            alibi_slopes=randn(self.num_heads_q).abs() if self.has_alibi else None,
            sinks=randn(self.num_heads_q) if self.has_sinks else None,
            seed=torch.tensor([seed], dtype=torch.int64, device=device) if self.dropout_p > 0 else None,
        )


def normal_numbers(
    device: torch.device, dtype: torch.dtype, seed: int, drawn_on: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """What makes standard normal tensors of a shape, one after the other, as `Case.make_inputs`."""
    generator = torch.Generator(drawn_on or "cpu").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(device=device, dtype=dtype)

    return randn


def square_case(tokens: int, dtype: str, head_dim: int, causal: bool, batch: int = 1, num_heads: int = 1) -> Case:
    """As many keys as queries, and a name that says all of it."""
    return Case(
        f"{'causal' if causal else 'full'}_{tokens}_d{head_dim}_h{batch}x{num_heads}_{dtype}",
        batch=batch,
        seqlen_q=tokens,
        seqlen_k=tokens,
        num_heads_q=num_heads,
        num_heads_kv=num_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        causal=causal,
    )


def growing_lengths(lengths: Sequence[int], **fields: Any) -> list[Case]:
    """One causal case per length, named ``causal_<length>``; `fields` are other fields of `Case`."""
    return [
        Case(**{"name": f"causal_{length}", "seqlen_q": length, "seqlen_k": length, "causal": True, **fields})
        for length in lengths
    ]


_NAMED = (
    Case("full_1k"),
    Case("causal_1k", causal=True),
    Case("causal_4k", seqlen_q=4096, seqlen_k=4096, causal=True),
    Case("full_8k", seqlen_q=8192, seqlen_k=8192),
    Case("causal_8k", seqlen_q=8192, seqlen_k=8192, causal=True),
    Case("gqa_4k", seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_kv=2, causal=True),
    Case("window_8k", seqlen_q=8192, seqlen_k=8192, causal=True, window=(511, 0)),
    Case("softcap_2k", seqlen_q=2048, seqlen_k=2048, causal=True, softcap=30.0),
    Case("bias_2k", seqlen_q=2048, seqlen_k=2048, has_bias=True),
    Case("alibi_2k", seqlen_q=2048, seqlen_k=2048, causal=True, has_alibi=True),
    Case("sinks_2k", seqlen_q=2048, seqlen_k=2048, causal=True, has_sinks=True),
    Case("bf16_2k", seqlen_q=2048, seqlen_k=2048, causal=True, dtype="bfloat16"),
    Case("wide_2k", seqlen_q=2048, seqlen_k=2048, head_dim=192, head_dim_v=128, causal=True),
    Case("chunk_8k", seqlen_q=512, seqlen_k=8192, causal=True),
    Case("decode_8k", batch=4, seqlen_q=1, seqlen_k=8192, num_heads_q=8, num_heads_kv=2),
)
CASES = {case.name: case for case in (*_NAMED, *growing_lengths((512, 1024, 2048, 4096, 8192)))}


def case_named(name: str) -> Case:
    """The case called `name`.

    Raises:
        ArgumentError: there is none; the message lists those there are.
    """
    if name not in CASES:
        raise ArgumentError(f"case {name!r} does not exist; choose from {', '.join(CASES)}.")
    return CASES[name]
