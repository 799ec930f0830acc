"""The validation of masks: of the arguments that make one, and of a mask beside the tensors of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.errors import ArgumentError, DtypeError, ShapeError, describe_shapes
from tilestream.spec import Band, band_limits

__all__ = [
    "band",
    "block_shape",
    "chosen",
    "document_ids",
    "fits",
    "has_two_axes",
    "integer",
    "lengths_of",
    "plane_counts",
    "planes_of",
    "reach",
    "seqlens",
    "shift",
]

_LARGEST_LENGTH = 2**40
# Columns are int32 in the lists, and rows times columns int64.
_MOST_BLOCKS_A_SIDE = 2**30


def integer(name: str, value: object, least: int = 0) -> int:
    """`value`, an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise DtypeError(f"{name} must be an int, got {type(value).__name__}.")
    if value < least:
        raise ArgumentError(f"{name} is {value}, but must be at least {least}.")
    return value


def seqlens(seqlen_q: int, seqlen_k: int | None) -> tuple[int, int]:
    """Both lengths; as many keys as queries where nothing else is said."""
    lengths = integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_q if seqlen_k is None else seqlen_k)
    if max(lengths) > _LARGEST_LENGTH:
        raise ArgumentError(f"seqlen_q and seqlen_k are {lengths}, but may be at most 2**40.")
    return lengths


def shift(value: object) -> int:
    """An int of either sign, no larger than lengths are."""
    found = integer("shift", value, -_LARGEST_LENGTH)
    if found > _LARGEST_LENGTH:
        raise ArgumentError(f"shift is {found}, but must lie within 2**40 of 0.")
    return found


def block_shape(block_size: int | Sequence[int], lengths: tuple[int, int]) -> tuple[int, int]:
    """(block_m, block_n) of an int or a pair."""
    if isinstance(block_size, int):
        block_size = (block_size, block_size)
    if not isinstance(block_size, tuple | list) or len(block_size) != 2:
        raise ArgumentError(f"block_size must be an int or (block_m, block_n), got {block_size!r}.")
    block_m, block_n = (integer(f"block_size[{axis}]", size, 1) for axis, size in enumerate(block_size))
    if max(lengths[0] // block_m, lengths[1] // block_n) > _MOST_BLOCKS_A_SIDE:
        raise ArgumentError(f"block_size {(block_m, block_n)} makes over 2**30 blocks a side of {lengths} tokens.")
    return block_m, block_n


def plane_counts(batch: object, num_heads: object) -> tuple[int, int]:
    """How many batch entries and heads have a mask of their own; 1 is one for all."""
    return integer("batch", 1 if batch is None else batch, 1), integer(
        "num_heads", 1 if num_heads is None else num_heads, 1
    )


def planes_of(name: str, x: Tensor, sizes: tuple[int, int], what: str) -> Tensor:
    """A boolean (or integer) matrix of `sizes` as bool (batch, heads, *sizes); rank 2, 3 (heads first) or 4."""
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; pass torch.as_tensor({name}).")
    if x.is_floating_point() or x.is_complex():
        raise DtypeError(f"{name} must be bool, or integers of which 0 is not kept, got {x.dtype}.")
    if x.dim() not in (2, 3, 4) or tuple(x.shape[-2:]) != sizes or 0 in x.shape[:-2]:
        raise ShapeError(
            f"{name} must be {what} = {sizes}, with (num_heads,) or (batch, num_heads) before, got {tuple(x.shape)}."
        )
    x = x.detach().to("cpu", torch.bool)
    return x[(None,) * (4 - x.dim())]


def lengths_of(name: str, lengths: int | Sequence[int] | Tensor) -> Tensor:
    """int64 (B | 1, 1) of one length or one per batch entry."""
    if isinstance(lengths, int):
        lengths = [integer(name, lengths)]
    found = torch.as_tensor(lengths).detach().cpu()
    if not found.numel():
        raise ArgumentError(f"{name} is empty; give one number for all, or one per batch entry.")
    if found.dim() > 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ArgumentError(f"{name} must be an int or one per batch entry, got {found.dtype} {tuple(found.shape)}.")
    if bool((found < 0).any()):
        raise ArgumentError(f"{name} must be at least 0, got {found.tolist()}.")
    return found.to(torch.int64).reshape(-1, 1)


def band(causal: bool, window: tuple[int | None, int | None] | None) -> Band:
    """The band of both arguments."""
    if not isinstance(causal, bool):
        raise DtypeError(f"causal must be True or False, got {type(causal).__name__}.")
    if window is not None and (not isinstance(window, tuple | list) or len(window) != 2):
        raise ArgumentError(f"window must be (left, right), two ints or None each; got {window!r}.")
    for name, limit in zip(("window left", "window right"), window or (), strict=False):
        if limit is not None:
            integer(name, limit)
    return Band(*band_limits(causal, window))


def chosen(name: str, tokens: int | Tensor, seqlen: int) -> Tensor:
    """bool (seqlen,): the first tokens, as many as said, or those that are marked."""
    if isinstance(tokens, Tensor):
        if tokens.dtype != torch.bool or tuple(tokens.shape) != (seqlen,):
            raise ShapeError(f"{name} must be a number or bool ({seqlen},), got {tokens.dtype} {tuple(tokens.shape)}.")
        return tokens.detach().cpu()
    return torch.arange(seqlen) < integer(name, tokens)


def document_ids(ids_q: Tensor, ids_k: Tensor) -> tuple[Tensor, Tensor]:
    """Both as int64 (B | 1, seqlen)."""
    found = []
    for name, ids in (("ids_q", ids_q), ("ids_k", ids_k)):
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
            raise DtypeError(f"{name} must be a tensor of integers, got {getattr(ids, 'dtype', type(ids).__name__)}.")
        if ids.dim() not in (1, 2) or not (ids.dim() == 1 or len(ids)):
            raise ShapeError(f"{name} must be (seqlen,) or (batch, seqlen), got {tuple(ids.shape)}.")
        found.append(torch.atleast_2d(ids.detach().to("cpu", torch.int64)))
    if len({len(ids) for ids in found} - {1}) > 1:
        raise ShapeError(f"ids_q {tuple(ids_q.shape)} and ids_k {tuple(ids_k.shape)} have different batch sizes.")
    return found[0], found[1]


def has_two_axes(name: str, x: Tensor) -> None:
    """Refuse what is no matrix and holds none."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise ShapeError(f"{name} must be a tensor (..., seqlen_q, seqlen_k), got {getattr(x, 'shape', x)}.")


def fits(
    lengths: tuple[int, int],
    planes: tuple[int, int],
    inputs: dict[str, tuple[int, ...]],
    call: tuple[int, int],
    is_varlen: bool,
) -> None:
    """A mask of these lengths and planes belongs to a call of `call` = (batch, num_heads_q)."""
    for axis, (of_mask, of_call) in enumerate(zip(planes, call, strict=True)):
        if of_mask != 1 and of_mask != of_call:
            what = ("sequences" if is_varlen else "batch entries", "query heads")[axis]
            raise ShapeError(
                f"block_mask is for {of_mask} {what}, but the call has {of_call}; make it for 1 or all."
                f"{_listed(lengths, planes, inputs)}"
            )
    wanted = (inputs["query"][-3], inputs["key"][-3])
    if not is_varlen and lengths != wanted:
        raise ShapeError(
            f"block_mask is for (seqlen_q, seqlen_k) = {lengths}, but the call has {wanted}."
            f"{_listed(lengths, planes, inputs)}"
        )


def _listed(lengths: tuple[int, int], planes: tuple[int, int], inputs: dict[str, tuple[int, ...]]) -> str:
    """The line with all shapes; made only when an error is, because torch.compile cannot trace it."""
    shapes = {**inputs, "block_mask": (*planes, *lengths)}
    return describe_shapes(
        shapes, "query and key: ..., seqlen, heads, head_dim; block_mask: batch, heads, seqlen_q, seqlen_k"
    )


def reach(lengths: tuple[int, int], sequence: tuple[int, int]) -> None:
    """A packed sequence of `sequence` = (seqlen_q, seqlen_k) lies in the mask."""
    if sequence[0] > lengths[0] or sequence[1] > lengths[1]:
        raise ShapeError(
            f"block_mask is for (seqlen_q, seqlen_k) = {lengths}, but a sequence has {sequence};"
            " make one for the longest."
        )
