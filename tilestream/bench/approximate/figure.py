"""The picture of ``tilestream bench approximate``: time and memory against length, with the crossovers marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilestream.bench.approximate.bars import crossing, times_of
from tilestream.bench.approximate.cells import METHODS, REFERENCE
from tilestream.bench.approximate.methods import Kind
from tilestream.bench.measure import Line

__all__ = ["draw"]

# A line for every kind, colours that stay apart for colour-blind eyes (Okabe and Ito), markers that do in grey.
_LINES: dict[Kind, str] = {"exact": "-", "block-sparse": "-.", "approximate": "--"}
_COLOURS = {
    "materialised": "#D55E00", "sdpa": "#0072B2", "tilestream": "#009E73", "tilestream-plain": "#000000",
    "butterfly": "#009E73", "longformer": "#56B4E9", "bigbird": "#CC79A7",
    "linformer": "#E69F00", "performer": "#7F7F7F", "reformer": "#B8860B", "local": "#8B4FBF", "nystrom": "#C23B5A",
}  # fmt: skip
_MARKERS = "os^DPXv<>*hd"
# Below this, the rise of a process's peak memory is noise.
_MIB = 2**20


def draw(lines: Sequence[Line], path: Path) -> None:
    """Write a PNG of the lines of part speed to `path`: forward and backward, and peak memory.

    Raises:
        ImportError: matplotlib is missing.
    """
    # Figure and not pyplot: no window, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    reference = times_of(lines, REFERENCE)
    lengths = sorted({line["seqlen"] for line in lines if line["part"] == "speed"})
    for name, method in METHODS.items():
        style: dict[str, Any] = {
            "color": _COLOURS[name], "marker": _MARKERS[list(METHODS).index(name)], "linestyle": _LINES[method.kind],
            "markersize": 4.5, "linewidth": 2.2 if name in (REFERENCE, "butterfly") else 1.2, "label": method.label,
        }  # fmt: skip
        times, bytes_ = times_of(lines, name), times_of(lines, name, "peak_memory_bytes")
        if times:
            time_axes.plot(list(times), list(times.values()), **style)
        if bytes_:
            memory_axes.plot(list(bytes_), [value / _MIB for value in bytes_.values()], **style)
        point = crossing(times, reference) if method.kind == "approximate" else None
        if point is not None:
            time_axes.plot(*point, marker="o", markersize=11, markerfacecolor="none", color=_COLOURS[name])
            time_axes.annotate(
                f"{point[0]:.0f}", point, textcoords="offset points", xytext=(0, -15), ha="center", fontsize=7
            )
    _label(time_axes, lengths, "Forward and backward; circles: faster than exact attention from here", "ms, median")
    _label(memory_axes, lengths, "Peak memory, inputs, outputs and gradients included", "MiB")
    handles, labels = time_axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        figure.suptitle(_title(next(line for line in lines if line["part"] == "speed")), fontsize=10)
    figure.savefig(path, dpi=130)


def _label(axes: Any, lengths: Sequence[int], title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=9)
    axes.grid(visible=True, which="major", alpha=0.3)


def _title(line: Line) -> str:
    one = line["config"]
    return (
        f"Batch {one['batch']}, {one['num_heads']} heads, head_dim {one['head_dim']}, {one['dtype']}, bidirectional;"
        f" {line['device']}, torch {line['torch']}"
    )
