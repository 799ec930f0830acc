"""The one-screen algorithm against the oracle: what the README shows is right."""

from __future__ import annotations

import pytest
import torch

from tilestream import reference, teaching
from tilestream.spec import Band

BANDS = [Band(), Band(None, 0), Band(17, 0), Band(3, 5), Band(None, 2), Band(0, None)]
LENGTHS = [(1, 1), (64, 64), (63, 65), (130, 70), (70, 130), (5, 0), (0, 5), (200, 3)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("blocks", [(64, 64), (16, 48)], ids=str)
def test_teaching_equals_the_oracle(band: Band, lengths: tuple[int, int], blocks: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    q, k, v = torch.randn(seqlen_q, 16), torch.randn(seqlen_k, 16), torch.randn(seqlen_k, 8)
    dout = torch.randn(seqlen_q, 8)
    block_m, block_n = blocks
    out, lse = teaching.forward(q, k, v, 0.3, band, block_m=block_m, block_n=block_n)
    gradients = teaching.backward(q, k, v, out, lse, dout, 0.3, band, block_m=block_m, block_n=block_n)

    leaves = [x.double()[None, :, None].requires_grad_() for x in (q, k, v)]
    exact = reference.attention(*leaves, window=(band.left, band.right), scale=0.3)
    wanted = torch.autograd.grad(exact.out, leaves, dout.double()[None, :, None])
    # Sums of at most 200 products of order 1 in float32.
    pairs = [(out, exact.out[0, :, 0]), (lse, exact.lse[0, 0])]
    pairs += [(got, gradient[0, :, 0]) for got, gradient in zip(gradients, wanted, strict=True)]
    for got, reference_value in pairs:
        torch.testing.assert_close(got.double(), reference_value.detach(), rtol=1e-4, atol=1e-5)


def test_rows_without_keys_are_zero_and_never_nan() -> None:
    """Causal with more queries than keys: the first queries meet no key."""
    q, k, v = torch.randn(9, 4), torch.randn(3, 4), torch.randn(3, 4)
    out, lse = teaching.forward(q, k, v, 0.5, Band(None, 0), block_m=4, block_n=2)
    dq, dk, dv = teaching.backward(q, k, v, out, lse, torch.ones(9, 4), 0.5, Band(None, 0), block_m=4, block_n=2)
    assert torch.equal(out[:6], torch.zeros(6, 4))
    assert torch.equal(dq[:6], torch.zeros(6, 4))
    assert bool((lse[:6] == -float("inf")).all())
    assert all(bool(torch.isfinite(x).all()) for x in (out, dq, dk, dv))
