"""Block masks of benchmarks: what they keep, who takes them, and that each is checked by the gate."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tilestream.bench import gate, providers
from tilestream.bench.block_masks import DENSITIES, MASKS, kept_name, mask_named
from tilestream.bench.cases import Case, square_case
from tilestream.bench.providers import Provider, provider_named
from tilestream.errors import ArgumentError

CPU = torch.device("cpu")
TINY = dataclasses.replace(square_case(64, "float32", 8, causal=False, num_heads=2), mask="kept_1/4", mask_block=8)


@pytest.mark.parametrize("one_in", DENSITIES)
@pytest.mark.parametrize(("tokens", "block"), [(16384, 128), (8192, 128), (64, 4)])
def test_random_masks_have_the_promised_density_in_every_row_and_column(one_in: int, tokens: int, block: int) -> None:
    mask = mask_named(kept_name(one_in), tokens, tokens, block)
    blocks = mask.to_blocks()[0, 0]
    side = tokens // block
    assert blocks.shape == (side, side)
    assert blocks.sum(0).tolist() == blocks.sum(1).tolist() == [side // one_in] * side
    assert mask.density == mask.pair_density() == 1 / one_in
    assert mask_named(kept_name(one_in), tokens, tokens, block) is mask
    if side == 128:
        # At random places: no diagonal holds much more than its share.
        diagonals = [int(blocks.roll(-shift, 1).diagonal().sum()) for shift in range(side)]
        assert max(diagonals) < side * min(0.9, 4 / one_in)


def test_masks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'kept_1/3' does not exist; choose from kept_1/2, .*, butterfly"):
        mask_named("kept_1/3", 64, 64, 8)
    with pytest.raises(ArgumentError, match="64 queries and 32 keys"):
        mask_named("causal", 64, 32, 8)
    with pytest.raises(ArgumentError, match="3 blocks in a row cannot be kept one in 2"):
        mask_named("kept_1/2", 24, 24, 8)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_checked_and_its_dense_call_is_known(name: str) -> None:
    """On blocks of rows of a case too long to be checked whole, by who serves it here."""
    case = dataclasses.replace(TINY, mask=name, seqlen_q=640, seqlen_k=640, mask_block=20)
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
    mask, dense = case.block_mask, case.dense
    assert mask is not None
    assert case.problem("cpu").block_mask is mask
    assert gate.check(case, provider_named("tilestream/cpu"), CPU, with_gradients=True).is_green
    assert dense.mask is None
    assert gate.check(case, _of(dense), CPU, with_gradients=False).is_green == (name in ("causal", "window"))


def _of(case: Case) -> Provider:
    """Who runs another case than asked for."""
    right = provider_named("tilestream/cpu")
    return dataclasses.replace(right, prepare=lambda _, inputs: right.prepare(case, inputs))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["kept_1/4", "documents", "window"])
def test_flex_attention_gets_the_same_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled here, which only makes it slow. The mask is made outside of inference mode, and kept."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(providers, "_compiled_flex", lambda: flex_attention)
    sizes = {"seqlen_q": 512, "seqlen_k": 512, "head_dim": 16, "head_dim_v": 16}
    case = dataclasses.replace(TINY, mask=name, mask_block=128, **sizes)  # type: ignore[arg-type]
    with torch.inference_mode():
        made = providers._flex_block_mask(case, CPU)
    assert not made.kv_indices.is_inference()
    assert providers._flex_block_mask(case, CPU) is made
    assert gate.check(case, provider_named("flex"), CPU, with_gradients=False).is_green
    assert "not both" in str(provider_named("flex").refuse(dataclasses.replace(case, causal=True), CPU))


@pytest.mark.parametrize("name", ["sdpa", "sdpa/flash", "materialised", "eager", "fa3", "fa4"])
def test_others_take_no_mask(name: str) -> None:
    assert "not asked for block masks" in str(
        provider_named(name).refuse(dataclasses.replace(TINY, dtype="bfloat16"), CPU)
    )
