"""The mask function and the attention function by themselves: every rule against its entries, and what is refused."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilestream
from tilestream.integrations import transformers as adapter
from tilestream.integrations._band_mask import BandMask, BandRule
from tilestream.integrations._mask_reader import read_mask_function

pytest.importorskip("transformers", minversion="5.0")
from transformers import masking_utils as masks

BATCH, HEADS, GROUPS, WIDTH = 2, 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 3 + [2] * 4, [0] * 11])

RULES: dict[str, Callable[..., Any]] = {
    "causal": masks.causal_mask_function,
    "bidirectional": masks.bidirectional_mask_function,
    "window_1": masks.sliding_window_causal_mask_function(1),
    "window_4": masks.sliding_window_causal_mask_function(4),
    "window_both_sides": masks.sliding_window_bidirectional_mask_function(3),
    "packed": masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(DOCUMENTS)),
    "packed_window": masks.and_masks(
        masks.sliding_window_causal_mask_function(3), masks.packed_sequence_mask_function(DOCUMENTS)
    ),
    "packed_bidirectional": masks.and_masks(
        masks.bidirectional_mask_function, masks.packed_sequence_mask_function(DOCUMENTS)
    ),
    "scattered_documents": masks.packed_sequence_mask_function(torch.tensor([[0, 1, 0, 1, 2, 2, 0, 1, 1, 0, 2]] * 2)),
    "written_otherwise": lambda b, h, q, k: (k - q < 1) & (q - 2 <= k) & (k + 1 > q - 5) & (q >= 0),
}
ENTRIES: dict[str, Callable[..., Any]] = {
    "chunked": masks.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "image_blocks": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(DOCUMENTS)),
    "every_other_key": lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),
    "some_queries": lambda b, h, q, k: (k <= q) | (q == 3),
    "negated": lambda b, h, q, k: ~(k > q),
    "first_row_only": lambda b, h, q, k: (k <= q) & (b == 0) | (k == q),
    "product": lambda b, h, q, k: (k <= q) * (k > q - 3),
    "padding_inside": masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(DOCUMENTS == 0)),
}
# q_length, kv_length, q_offset, kv_offset: whole sequences, chunks into a cache, a static cache, a sliding cache.
SIZES = [(11, 11, 0, 0), (4, 9, 5, 0), (1, 9, 8, 0), (11, 16, 0, 0), (3, 16, 5, 0), (1, 16, 5, 0), (3, 7, 9, 5)]


def _mask(function: Callable[..., Any], sizes: tuple[int, ...], padding: Tensor | None) -> tuple[Any, Tensor]:
    """What the mask function returns, and transformers' own entries."""
    q_length, kv_length, q_offset, kv_offset = sizes
    call = {
        "batch_size": BATCH, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": function, "attention_mask": padding,
    }  # fmt: skip
    mask = adapter.attention_mask(**call, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
    return mask, masks.sdpa_mask(**call, allow_is_causal_skip=False)


def _paddings(sizes: tuple[int, ...]) -> dict[str, Tensor | None]:
    seen = sizes[0] + sizes[2]
    kinds: dict[str, Tensor | None] = {"none": None}
    for kind in ("full", "left", "right", "both", "holes", "row") if sizes == SIZES[0] else ("full", "left", "holes"):
        kinds[kind] = padding = torch.ones(BATCH, seen, dtype=torch.bool)
        if kind in ("left", "both"):
            padding[0, :3] = False
        if kind in ("right", "both"):
            padding[0, -2:] = False
        if kind == "holes":
            padding[0, 1::3] = False
        if kind == "row":
            padding[0] = False
    return kinds


def _cases(functions: dict[str, Callable[..., Any]]) -> list[Any]:
    return [
        pytest.param(function, sizes, id=f"{name}-{'-'.join(map(str, sizes))}")
        for (name, function), sizes in itertools.product(functions.items(), SIZES)
        # The tables of documents above cover the first eleven positions only.
        if sizes == SIZES[0] or function not in TABLES
    ]


TABLES = [
    *(RULES[name] for name in RULES if "packed" in name or "documents" in name),
    ENTRIES["image_blocks"],
    ENTRIES["padding_inside"],
]


@pytest.mark.parametrize(("function", "sizes"), _cases({**RULES, **ENTRIES}))
def test_mask_and_attention_under_it_equal_the_entries(function: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q_length, kv_length = sizes[:2]
    query = torch.randn(BATCH, HEADS, q_length, WIDTH, requires_grad=True)
    key, value = (torch.randn(BATCH, GROUPS, kv_length, WIDTH, requires_grad=True) for _ in range(2))
    module = torch.nn.Module()
    for kind, padding in _paddings(sizes).items():
        mask, entries = _mask(function, sizes, padding)
        assert torch.equal(mask & True, entries), kind
        got = adapter.attention_forward(module, query, key, value, mask)[0]
        want = adapter.attention_forward(module, query, key, value, entries.clone())[0]
        # Packing leaves queries at padding at 0; nothing may be read there.
        real = torch.ones(BATCH, q_length, dtype=torch.bool) if padding is None else padding[:, -q_length:]
        torch.testing.assert_close(got[real], want[real], rtol=1e-5, atol=1e-6, msg=lambda text, kind=kind: kind + text)
        if kind not in ("none", "left", "holes") or sizes not in (SIZES[0], SIZES[4]):
            continue
        dout = torch.randn_like(got) * real[:, :, None, None]
        for one, other in zip(
            torch.autograd.grad(want, (query, key, value), dout),
            torch.autograd.grad(got, (query, key, value), dout),
            strict=True,
        ):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_rules_are_recognised(name: str) -> None:
    assert isinstance(_mask(RULES[name], SIZES[0], None)[0], BandMask)


@pytest.mark.parametrize("name", ENTRIES)
def test_everything_else_becomes_entries(name: str) -> None:
    assert read_mask_function(ENTRIES[name]) is None
    assert type(_mask(ENTRIES[name], SIZES[0], None)[0]) is Tensor


def test_window_bounds() -> None:
    pattern = read_mask_function(RULES["window_4"])
    assert pattern is not None
    assert (pattern.left, pattern.right) == (3, 0)
    pattern = read_mask_function(RULES["written_otherwise"])
    assert pattern is not None
    assert (pattern.left, pattern.right) == (2, 0)


def test_wrong_mask_functions_raise_their_own_errors() -> None:
    with pytest.raises(TypeError, match="argument"):
        _mask(lambda b, h, q: q > 0, SIZES[0], None)


def test_band_mask_is_a_boolean_tensor_to_everybody_else() -> None:
    mask, entries = _mask(RULES["window_4"], SIZES[1], _paddings(SIZES[1])["left"])
    assert isinstance(mask, BandMask)
    assert (mask.dtype, mask.shape, mask.device) == (entries.dtype, entries.shape, entries.device)
    for kept in (mask.detach(), mask.to("cpu"), mask.to(torch.bool), mask.to("meta")):
        assert isinstance(kept, BandMask)
    assert mask.to("meta").rule.key_mask.device.type == "meta"
    assert torch.equal(mask[:, :, 1:, :4], entries[:, :, 1:, :4])
    assert torch.equal(mask.float(), entries.float())
    assert torch.equal(torch.cat([mask, mask]), torch.cat([entries, entries]))
    assert "left=3" in repr(mask)


def _spy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for name in ("attention", "attention_varlen"):
        original = getattr(adapter, name)

        def spied(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Tensor:
            calls.append((name, {**kwargs, "num_queries": args[0].shape[-3], "num_keys": args[1].shape[-3]}))
            return original(*args, **kwargs)

        monkeypatch.setattr(adapter, name, spied)
    return calls


@pytest.mark.parametrize(
    ("rule", "sizes", "padding", "expected"),
    [
        ("causal", (11, 11, 0, 0), "none", ("attention", 11, 11, None)),
        ("causal", (11, 11, 0, 0), "full", ("attention", 11, 11, None)),
        ("causal", (11, 11, 0, 0), "left", ("attention_varlen", 19, 19, None)),
        ("window_4", (11, 11, 0, 0), "right", ("attention_varlen", 20, 20, None)),
        ("window_4", (11, 11, 0, 0), "holes", ("attention", 11, 11, (2, 1, 1, 11))),
        ("packed", (11, 11, 0, 0), "none", ("attention_varlen", 22, 22, None)),
        ("causal", (11, 16, 0, 0), "none", ("attention", 11, 11, None)),
        ("causal", (11, 16, 0, 0), "left", ("attention_varlen", 19, 19, None)),
        ("causal", (3, 16, 5, 0), "left", ("attention", 3, 8, (2, 1, 1, 8))),
        ("causal", (1, 9, 8, 0), "full", ("attention", 1, 9, None)),
        ("bidirectional", (4, 9, 5, 0), "left", ("attention", 4, 9, (2, 1, 1, 9))),
    ],
)
def test_no_mask_of_entries_is_built(
    rule: str, sizes: tuple[int, ...], padding: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, keys that no query can see are not passed on, and padding is packed away where it can be."""
    calls = _spy(monkeypatch)
    mask, _ = _mask(RULES[rule], sizes, _paddings(sizes)[padding])
    query, key = torch.randn(BATCH, HEADS, sizes[0], WIDTH), torch.randn(BATCH, GROUPS, sizes[1], WIDTH)
    position_ids = torch.arange(sizes[0])[None]
    adapter.attention_forward(torch.nn.Module(), query, key, key, mask, position_ids=position_ids)
    [(name, arguments)] = calls
    bias = arguments.get("bias")
    bias_shape = None if bias is None else tuple(bias.shape)
    assert (name, arguments["num_queries"], arguments["num_keys"], bias_shape) == expected


def test_garbage_in_the_unfilled_part_of_a_cache_is_not_read() -> None:
    query, key = torch.randn(BATCH, HEADS, 3, WIDTH), torch.randn(BATCH, GROUPS, 16, WIDTH)
    mask, _ = _mask(RULES["causal"], (3, 16, 5, 0), None)
    want = adapter.attention_forward(torch.nn.Module(), query, key[:, :, :8], key[:, :, :8], _implied(3, 8))[0]
    key[:, :, 8:] = torch.nan
    torch.testing.assert_close(adapter.attention_forward(torch.nn.Module(), query, key, key, mask)[0], want)


def _implied(q_length: int, kv_length: int) -> BandMask:
    return BandMask(BandRule((BATCH, 1, q_length, kv_length), None, 0, kv_length - q_length), torch.device("cpu"))


@pytest.mark.parametrize("given", [True, False, None])
def test_without_a_mask_is_causal_decides(given: bool | None) -> None:
    query, key = torch.randn(BATCH, HEADS, 5, WIDTH), torch.randn(BATCH, GROUPS, 5, WIDTH)
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    for attribute in (True, False):
        module = torch.nn.Module()
        module.is_causal = attribute
        got = adapter.attention_forward(module, query, key, key, None, is_causal=given)[0]
        causal = attribute if given is None else given
        torch.testing.assert_close(got, tilestream.attention(q, k, k, causal=causal))
    got = adapter.attention_forward(module, query, key, key, None, is_causal=True, sliding_window=2)[0]
    torch.testing.assert_close(got, tilestream.attention(q, k, k, window=(1, 0)))


def test_what_cannot_be_obeyed_is_refused() -> None:
    query, key = torch.randn(BATCH, HEADS, 5, WIDTH), torch.randn(BATCH, GROUPS, 7, WIDTH)
    ones = torch.ones(BATCH, 1, 5, 7)
    cu_seqlens = torch.tensor([0, 10], dtype=torch.int32)
    for error, mask, options in (
        (tilestream.ArgumentError, None, {"is_causal": True}),
        (tilestream.UnsupportedError, None, {"is_causal": False, "sliding_window": 3}),
        (tilestream.DtypeError, ones.long(), {}),
        (tilestream.DtypeError, "causal", {}),
        (tilestream.ShapeError, ones[:, 0], {}),
        (tilestream.ShapeError, ones[..., :6], {}),
        (tilestream.ShapeError, torch.ones(BATCH, 7, dtype=torch.bool), {}),
        (tilestream.ShapeError, _implied(5, 5), {}),
        (tilestream.UnsupportedError, ones, {"block_indices": cu_seqlens}),
        (tilestream.UnsupportedError, ones, {"output_attentions": True}),
        (tilestream.ArgumentError, ones, {"cu_seq_lens_q": cu_seqlens}),
    ):
        with pytest.raises(error):
            adapter.attention_forward(torch.nn.Module(), query, key, key, mask, **options)


def test_registration() -> None:
    assert adapter.register() == adapter.register() == "tilestream"
    for name in ("my_flash", "sdpa_2", "flex_attention", "me/kernel", "paged|x", ""):
        with pytest.raises(tilestream.ArgumentError, match="another meaning"):
            adapter.register(name)
    with pytest.raises(tilestream.ArgumentError, match="another attention implementation"):
        adapter.register("eager")


def test_missing_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install"):
        adapter.register()


def test_old_transformers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match="too old"):
        adapter.register()
