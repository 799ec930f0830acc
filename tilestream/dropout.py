"""The dropout mask: Philox4x32-10 as a function of (seed, batch, head, i, j), so that no tiling can change it.

Counter words are (j // 4, i, head, batch) and the key is the 64-bit seed; key j takes output word j % 4. An entry is
kept when its word is below ``keep_threshold(dropout_p)``, so the keep probability is exact to 2**-32.
Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["keep_mask", "keep_threshold", "philox4x32"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on broadcastable int64 tensors that hold 32-bit words; four int64 words out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 multiplication wraps modulo 2**64, so both halves of the unsigned product are right in its bits.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK32) ^ c1 ^ k0,
            product1 & _MASK32,
            ((product0 >> 32) & _MASK32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def keep_threshold(dropout_p: float) -> int:
    """Words below this 32-bit threshold are kept."""
    return min(round((1.0 - dropout_p) * 2.0**32), 2**32)


def keep_mask(seed: Tensor, dropout_p: float, batch: Tensor, head: Tensor, i: range, j: range) -> Tensor:
    """Which entries survive dropout.

    Args:
        seed: int64, one element.
        batch: int64 (B,), the batch or sequence indices.
        head: int64 (H,), the query head indices.
        i: the query positions.
        j: the key positions.

    Returns:
        bool (B, H, len(i), len(j)) on the device of `seed`.
    """
    device = seed.device
    seed = seed.reshape(())
    first_group = j.start // 4
    num_groups = -(-j.stop // 4) - first_group
    words = philox4x32(
        (
            torch.arange(first_group, first_group + num_groups, device=device),
            torch.arange(i.start, i.stop, device=device)[:, None],
            head.to(device)[:, None, None],
            batch.to(device)[:, None, None, None],
        ),
        (seed & _MASK32, (seed >> 32) & _MASK32),
    )
    kept = torch.stack(words, dim=-1) < keep_threshold(dropout_p)
    kept = kept.reshape(*kept.shape[:-2], 4 * num_groups)
    offset = j.start - 4 * first_group
    return kept[..., offset : offset + len(j)]
