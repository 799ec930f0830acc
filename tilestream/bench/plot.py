"""The picture of a run: time and memory against length, drawn from the lines that `measure` yields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilestream.bench.measure import Line
from tilestream.bench.report import format_threads

__all__ = ["draw"]

# Below this, the rise of a process's peak memory is noise; a logarithmic axis needs some floor.
_MEMORY_FLOOR_MIB = 0.25
# Colours that stay apart for colour-blind eyes (Okabe and Ito), and markers that stay apart in grey.
_STYLES = {"materialised": ("#D55E00", "s"), "sdpa": ("#0072B2", "^"), "tilestream": ("#009E73", "o")}
_LABELS = {"materialised": "scores stored (matmul, softmax, matmul)", "sdpa": "PyTorch scaled_dot_product_attention"}


def draw(lines: Sequence[Line], path: Path) -> None:
    """Write a PNG of the forward measurements in `lines` to `path`.

    Raises:
        ImportError: matplotlib is missing.
    """
    # Figure and not pyplot: no window, no global state.
    from matplotlib.figure import Figure

    measured = [line for line in lines if line["mode"] == "forward" and line["ms_p50"] is not None]
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for provider in dict.fromkeys(line["provider"] for line in measured):
        own = [line for line in measured if line["provider"] == provider]
        colour, marker = _STYLES[provider.split("/")[0]]
        style: dict[str, Any] = {"color": colour, "marker": marker, "label": _LABELS.get(provider, provider)}
        lengths = [line["seqlen_q"] for line in own]
        time_axes.plot(lengths, [line["ms_p50"] for line in own], **style)
        time_axes.fill_between(
            lengths, [line["ms_p20"] for line in own], [line["ms_p80"] for line in own], color=colour, alpha=0.2
        )
        known = [line for line in own if line["extra_memory_bytes"] is not None]
        mebibytes = [max(_MEMORY_FLOOR_MIB, line["extra_memory_bytes"] / 2**20) for line in known]
        memory_axes.plot([line["seqlen_q"] for line in known], mebibytes, **style)
    _label(time_axes, "Time of one forward", "milliseconds, median; band: 20th to 80th percentile", measured)
    _label(memory_axes, "Memory beyond inputs and outputs", f"MiB at the peak (floor {_MEMORY_FLOOR_MIB})", measured)
    time_axes.legend(loc="best", fontsize=9)
    if measured:
        figure.suptitle(_title(measured[0]), fontsize=11)
    figure.savefig(path, dpi=150)


def _label(axes: Any, title: str, unit: str, measured: Sequence[Line]) -> None:
    lengths = sorted({line["seqlen_q"] for line in measured})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.grid(visible=True, which="major", alpha=0.3)


def _title(line: Line) -> str:
    case = line["config"]
    mask = "causal" if case["causal"] else "full"
    threads = f", {format_threads(line['num_threads'])}" if line["device_type"] == "cpu" else ""
    shape = f"{case['num_heads_q']} heads, head_dim {case['head_dim']}, {case['dtype']}, {mask}"
    return f"Exact attention, {shape}; {line['device']}{threads}, torch {line['torch']}"
