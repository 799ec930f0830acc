"""The public functions of block-sparse attention: exact over what a `BlockMask` keeps, and nothing beyond it."""

from __future__ import annotations

from torch import Tensor

from tilestream.api import Options, Window, attend, check_dense, check_varlen
from tilestream.block_mask import BlockMask
from tilestream.block_mask.checks import fits
from tilestream.errors import DtypeError
from tilestream.problem import AttentionInputs
from tilestream.state import AttentionOutput

__all__ = [
    "block_sparse_attention",
    "block_sparse_attention_varlen",
    "block_sparse_attention_varlen_with_lse",
    "block_sparse_attention_with_lse",
]


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    shift: int | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention over the pairs that a block mask shows: exact over those, an approximation of dense attention.

    The scores are those of `attention`, with one more reason to be hidden: query i sees key j if ``block_mask`` shows
    the pair *and* causal and window do. EMPTY blocks are never loaded, PARTIAL ones are masked pair by pair, and FULL
    ones have no mask at all, so that time and traffic follow what is kept. No argument of `attention` leads here.

    Args:
        query: (batch, seqlen_q, num_heads_q, head_dim), as `attention`.
        key: (batch, seqlen_k, num_heads_kv, head_dim), as `attention`.
        value: (batch, seqlen_k, num_heads_kv, head_dim_v), as `attention`.
        block_mask: for exactly seqlen_q and seqlen_k, and for 1 or all batch entries and query heads. It has positions
            of its own: ``shift`` below is that of causal, window and ALiBi alone.
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed, shift, deterministic: as
            `attention`.
        backend: as `attention`; ``"cpu"`` (tiled PyTorch operations, on any device) takes every call with a block mask,
            the others those that the README lists.

    Returns:
        (batch, seqlen_q, num_heads_q, head_dim_v), contiguous, dtype of `query`. A query that sees no key gives 0 and
        sends no gradient. With ``deterministic`` gradients are the same bits from run to run.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: an argument does not fit; the message names it and shows
            all shapes. All are ValueErrors.
        UnsupportedError: the named backend cannot run this call; the message says which can.

    Cost: of a dense call the kept fraction of blocks, in time and in reads of key and value; O(seqlen) memory, and what
        the mask's lists take. Those are made on the CPU by the first forward and the first backward with a mask, causal
        and window, and kept with the mask: a CUDA graph can capture later calls alone.
    Source: arXiv:2205.14135, section 3.3 and algorithm 5.

    Example:
        >>> import torch, tilestream
        >>> query, key, value = (torch.randn(1, 256, 4, 32) for _ in range(3))
        >>> mask = tilestream.BlockMask.butterfly(256, block_size=32)
        >>> tilestream.block_sparse_attention(query, key, value, mask, causal=True).shape
        torch.Size([1, 256, 4, 32])
    """
    options = Options(
        causal, window, scale, softcap, dropout_p, seed, deterministic, backend, shift, block_mask=block_mask
    )
    return attend(AttentionInputs(query, key, value, bias, alibi_slopes, sinks), options, _check_dense).out


def block_sparse_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    shift: int | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> AttentionOutput:
    """`block_sparse_attention`, and the log-sum-exp of each row's visible scores; both are differentiable.

    Args:
        query, key, value, block_mask, ...: as `block_sparse_attention`.

    Returns:
        AttentionOutput(out, lse): ``lse`` as of `attention_with_lse`; -inf for a query that sees no key. Over disjoint
        masks such pairs `merge` into attention over what both show.

    Raises: as `block_sparse_attention`.
    Cost: as `block_sparse_attention`. Source: arXiv:2205.14135.

    Example:
        >>> import torch, tilestream
        >>> query, key, value = (torch.randn(1, 64, 4, 32) for _ in range(3))
        >>> mask = tilestream.BlockMask.from_document_ids(torch.arange(64) // 20, block_size=16)
        >>> tilestream.block_sparse_attention_with_lse(query, key, value, mask).lse.shape
        torch.Size([1, 4, 64])
    """
    options = Options(
        causal, window, scale, softcap, dropout_p, seed, deterministic, backend, shift, block_mask=block_mask
    )
    return attend(AttentionInputs(query, key, value, bias, alibi_slopes, sinks), options, _check_dense)


def block_sparse_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_mask: BlockMask,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """`block_sparse_attention` over sequences of different lengths, packed one after the other without padding.

    Args:
        query: (total_q, num_heads_q, head_dim), as `attention_varlen`.
        key: (total_k, num_heads_kv, head_dim), as `attention_varlen`.
        value: (total_k, num_heads_kv, head_dim_v), as `attention_varlen`.
        cu_seqlens_q, cu_seqlens_k: (num_sequences + 1,) int32, as `attention_varlen`.
        block_mask: for at least the longest sequence, and for 1 or all sequences and query heads. As with a bias, each
            sequence reads the top left corner: its queries and keys are the mask's first ones.
        max_seqlen_q, max_seqlen_k, causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, seed,
            deterministic: as `attention_varlen`.
        backend: as `block_sparse_attention`.

    Returns:
        (total_q, num_heads_q, head_dim_v), contiguous, dtype of `query`.

    Raises: as `block_sparse_attention`.
    Cost: as one `block_sparse_attention` call per sequence. Source: arXiv:2205.14135, arXiv:2307.08691.

    Example:
        >>> import torch, tilestream
        >>> packed = torch.randn(70, 2, 16)  # sequences of 30 and 40 tokens
        >>> cu_seqlens = torch.tensor([0, 30, 70], dtype=torch.int32)
        >>> mask = tilestream.BlockMask.strided(40, stride=8, block_size=16)
        >>> tilestream.block_sparse_attention_varlen(packed, packed, packed, cu_seqlens, cu_seqlens, mask).shape
        torch.Size([70, 2, 16])
    """
    options = Options(
        causal, window, scale, softcap, dropout_p, seed, deterministic, backend, None, max_seqlen_q, max_seqlen_k,
        block_mask,
    )  # fmt: skip
    inputs = AttentionInputs(query, key, value, bias, alibi_slopes, sinks, None, cu_seqlens_q, cu_seqlens_k)
    return attend(inputs, options, _check_varlen).out


def block_sparse_attention_varlen_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_mask: BlockMask,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> AttentionOutput:
    """`block_sparse_attention_varlen`, and the log-sum-exp of each row's visible scores; both are differentiable.

    Args:
        query, key, value, cu_seqlens_q, cu_seqlens_k, block_mask, ...: as `block_sparse_attention_varlen`.

    Returns:
        AttentionOutput(out, lse): ``lse`` (num_heads_q, total_q), otherwise as `block_sparse_attention_with_lse`.

    Raises: as `block_sparse_attention`.
    Cost: as `block_sparse_attention_varlen`. Source: arXiv:2205.14135, arXiv:2307.08691.

    Example:
        >>> import torch, tilestream
        >>> packed = torch.randn(70, 2, 16)
        >>> cu = torch.tensor([0, 30, 70], dtype=torch.int32)
        >>> mask = tilestream.BlockMask.from_band(40, causal=True, block_size=16)
        >>> tilestream.block_sparse_attention_varlen_with_lse(packed, packed, packed, cu, cu, mask).lse.shape
        torch.Size([2, 70])
    """
    options = Options(
        causal, window, scale, softcap, dropout_p, seed, deterministic, backend, None, max_seqlen_q, max_seqlen_k,
        block_mask,
    )  # fmt: skip
    inputs = AttentionInputs(query, key, value, bias, alibi_slopes, sinks, None, cu_seqlens_q, cu_seqlens_k)
    return attend(inputs, options, _check_varlen)


def _check_dense(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    _check_kind(options.block_mask)
    return _check_fit(check_dense(inputs, options), options)


def _check_varlen(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    _check_kind(options.block_mask)
    return _check_fit(check_varlen(inputs, options), options)


def _check_kind(block_mask: object) -> None:
    if not isinstance(block_mask, BlockMask):
        raise DtypeError(
            f"block_mask must be a tilestream.BlockMask, got {type(block_mask).__name__}; make one with"
            " BlockMask.from_blocks (of blocks), from_dense (of pairs) or from_flex_attention."
        )


def _check_fit(inputs: AttentionInputs, options: Options) -> AttentionInputs:
    assert options.block_mask is not None
    query, key, cu_seqlens = inputs.query, inputs.key, inputs.cu_seqlens_q
    batch = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = {"query": tuple(query.shape), "key": tuple(key.shape)}
    mask, call = options.block_mask, (batch, query.shape[-2])
    fits((mask.seqlen_q, mask.seqlen_k), mask.planes, shapes, call, cu_seqlens is not None)
    return inputs
