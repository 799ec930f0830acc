"""The figures of ``tilestream report``: SVG text from lines, in colours that a page may set.

Text and axes take the colour of the page (`currentColor`), so that one drawing serves light and dark schemes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tilestream.bench.measure import Line
from tilestream.errors import UnsupportedError

__all__ = ["Drawing", "draw_all", "needs_matplotlib"]

# Drawn in this colour, which no data has, and replaced by the page's.
_INK = "#010203"
# Colours that stay apart for colour-blind eyes and on white and black (Okabe and Ito), markers that do in grey.
_STYLES = {
    "tilestream": ("#009E73", "o"), "materialised": ("#D55E00", "s"), "sdpa": ("#3B8FD0", "^"),
    "eager": ("#CC79A7", "D"), "teaching": ("#B8860B", "v"), "standard": ("#D55E00", "s"),
}  # fmt: skip
_MORE_COLOURS = ("#CC79A7", "#B8860B", "#7F7F7F", "#56B4E9")
_LABELS = {"materialised": "materialised scores", "sdpa": "PyTorch SDPA"}
_MEBI, _GIGA = 2**20, 1e9
# Below this, the rise of a process's peak memory is noise; a logarithmic axis needs some floor.
_MEMORY_FLOOR_MIB = 0.25
_WIDE, _SMALL = (9.0, 3.9), (6.4, 3.9)
_FONT_SIZE = 9.0


class Drawing(NamedTuple):
    """One figure: what it is of, what it shows in words, and the SVG element."""

    name: str
    title: str
    description: str
    svg: str


def needs_matplotlib() -> None:
    """Raise where there is no matplotlib.

    Raises:
        UnsupportedError: with the extra to install.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            'the figures need matplotlib, which is not installed: pip install "tilestream[cli]"'
        ) from None


def draw_all(lines: Sequence[Line]) -> list[Drawing]:
    """Every figure that `lines` have numbers for.

    Raises:
        UnsupportedError: there is no matplotlib.
    """
    needs_matplotlib()
    painters: tuple[Callable[[Sequence[Line]], Drawing | None], ...] = (_blocks, _kept, _lengths, _roofline)
    return [drawing for paint in painters if (drawing := paint(lines)) is not None]


def _lengths(lines: Sequence[Line]) -> Drawing | None:
    """Figure 3: time and memory against length."""
    found = _timed(lines, "lengths")
    if not found:
        return None
    figure, (time_axes, memory_axes) = _figure(_WIDE, 2)
    lengths = sorted({line["seqlen_q"] for line in found})
    for provider in dict.fromkeys(line["provider"] for line in found):
        own = [line for line in found if line["provider"] == provider]
        style = _style(provider)
        at = [line["seqlen_q"] for line in own]
        time_axes.plot(at, [line["ms_p50"] for line in own], **style)
        spread = ([line[name] for line in own] for name in ("ms_p20", "ms_p80"))
        time_axes.fill_between(at, *spread, color=style["color"], alpha=0.2, linewidth=0)
        known = [line for line in own if line["extra_memory_bytes"] is not None]
        mebibytes = [max(_MEMORY_FLOOR_MIB, line["extra_memory_bytes"] / _MEBI) for line in known]
        memory_axes.plot([line["seqlen_q"] for line in known], mebibytes, **style)
    for axes, title, unit in (
        (time_axes, "Time, forward and backward", "ms (median; band: p20 to p80)"),
        (memory_axes, "Memory beyond inputs and results", "MiB at the peak"),
    ):
        _log_axes(axes, lengths, "sequence length (tokens)", unit)
        axes.set_title(title, fontsize=10)
    time_axes.legend(fontsize=8, frameon=False)
    case = found[0]["config"]
    return Drawing(
        "lengths", "Time and memory against sequence length",
        f"Measured: {_call_text(case)}, forward and backward; lengths {lengths[0]} to {lengths[-1]}.",
        _svg(figure, "lengths"),
    )  # fmt: skip


def _blocks(lines: Sequence[Line]) -> Drawing | None:
    """Figure 2, middle: traffic and time against the size of tiles."""
    found = _timed(lines, "blocks")
    if not found:
        return None
    figure, (axes,) = _figure(_SMALL, 1)
    sizes = [line["block"] for line in found]
    times = axes.twinx()
    (bytes_line,) = axes.plot(
        sizes, [line["bytes_model"] / 1e6 for line in found], color="#3B8FD0", marker="s", label="traffic (model)"
    )
    (time_line,) = times.plot(
        sizes, [line["ms_p50"] for line in found], color="#D55E00", marker="o", linestyle="--", label="time (measured)"
    )
    _log_axes(axes, sizes, "queries and keys of a tile", "MB between slow and fast memory (model)")
    times.set_yscale("log")
    _log_numbers(times.yaxis, "ms, median (measured)")
    for spine in times.spines.values():
        spine.set_visible(False)
    axes.legend(handles=[bytes_line, time_line], fontsize=8, frameon=False)
    return Drawing(
        "blocks", "Traffic and time against the size of tiles",
        f"Forward of {_call_text(found[0]['config'])}. Traffic is the model's; time was measured of the loop of"
        f" teaching.py, the one whose tiles can be chosen, on {found[0]['device']}. It is of PyTorch operations, each"
        " of which costs its start.",
        _svg(figure, "blocks"),
    )  # fmt: skip


def _kept(lines: Sequence[Line]) -> Drawing | None:
    """Figure 2, right: against the kept fraction; times where somebody measured them."""
    found = [line for line in lines if line.get("part") == "kept" and line.get("bytes_model") is not None]
    if not found:
        return None
    timed = [line for line in found if line.get("ms_p50") is not None]
    figure, (axes,) = _figure(_SMALL, 1)
    kept = [100 * line["kept_fraction"] for line in found]
    axes.plot(
        kept,
        [line["bytes_model"] / _GIGA for line in found],
        label="tilestream, kept blocks (model)",
        **_look("tilestream"),
    )
    axes.plot(
        [kept[0], kept[-1]], [found[0]["bytes_standard"] / _GIGA] * 2, linestyle=":", color=_STYLES["standard"][0],
        label="standard attention (model)",
    )  # fmt: skip
    axes.set_xlim(0, 102)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("blocks that are kept (%)")
    axes.set_ylabel("GB between slow and fast memory (model)")
    handles, _ = axes.get_legend_handles_labels()
    if timed:
        times = axes.twinx()
        handles += times.plot(
            [100 * line["kept_fraction"] for line in timed], [line["ms_p50"] for line in timed],
            color="#3B8FD0", marker="^", linestyle="--", label="time (measured)",
        )  # fmt: skip
        times.set_ylim(bottom=0)
        times.set_ylabel("ms, median (measured)")
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(0.02, 0.7))
    note = "" if timed else " Time is not shown: there are no block-sparse kernels to measure yet."
    return Drawing(
        "kept", "Traffic against the kept fraction",
        f"Forward and backward of {_call_text(found[0]['config'])}, tiles of {found[0]['block']} x {found[0]['block']},"
        f" random blocks; all of it the model's.{note}",
        _svg(figure, "kept"),
    )  # fmt: skip


def _roofline(lines: Sequence[Line]) -> Drawing | None:
    """Speed against FLOP per byte, under what the machine computes and copies at best."""
    roofs = {line["name"]: line for line in lines if line.get("part") == "roofs"}
    found = _timed(lines, "lengths") + _timed(lines, "setting")
    if not found or set(roofs) != {"product", "copy"}:
        return None
    figure, (axes,) = _figure(_WIDE, 1)
    top, slope = roofs["product"]["tflops"], roofs["copy"]["gbps"] / 1e3
    points = [(line, line["flops"] / (line["bytes_model"] or line["bytes_least"]), line["tflops"]) for line in found]
    left = min(1.0, min(x for _, x, _ in points)) / 2
    right = max(2 * top / slope, 2 * max(x for _, x, _ in points))
    axes.plot([left, top / slope, right], [left * slope, top, top], color=_INK, linewidth=1.5)
    axes.text(left * 2, left * slope * 1.2, f"copy: {roofs['copy']['gbps']:.0f} GB/s", fontsize=8, color=_INK)
    axes.text(right / 1.1, top * 1.08, f"matrix product: {top:.3g} TFLOP/s", fontsize=8, ha="right", color=_INK)
    for provider in dict.fromkeys(line["provider"] for line in found):
        own = [(line, x, y) for line, x, y in points if line["provider"] == provider]
        style = _style(provider)
        is_known = own[0][0]["bytes_model"] is not None
        if not is_known:
            style |= {
                "markerfacecolor": "none",
                "label": f"{style['label']} (traffic not modelled: at the least there can be)",
            }
        axes.plot([x for _, x, _ in own], [y for _, _, y in own], linestyle="none", **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=2 * top)
    _log_numbers(axes.xaxis, "FLOP per byte between slow and fast memory (model)")
    _log_numbers(axes.yaxis, "TFLOP/s (measured)")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return Drawing(
        "roofline", "Roofline of every kernel of this run",
        "Speed was measured, FLOP per byte is the model's. The roofs are the best matrix product and the best copy that"
        " PyTorch made here; caches let a kernel pass the slope.",
        _svg(figure, "roofline"),
    )  # fmt: skip


def _timed(lines: Sequence[Line], part: str) -> list[Line]:
    return [line for line in lines if line.get("part") == part and line.get("ms_p50") is not None]


def _call_text(case: dict[str, Any]) -> str:
    mask = "causal" if case["causal"] else "full"
    return (
        f"{mask} attention, batch {case['batch']}, {case['num_heads_q']} head{'s' * (case['num_heads_q'] > 1)},"
        f" head_dim {case['head_dim']}, {case['dtype']}"
    )


def _look(provider: str) -> dict[str, Any]:
    """Colour and marker of a provider; one that is unknown has a colour by its name."""
    known = _STYLES.get(provider) or _STYLES.get(provider.split("/")[0])
    if known is None or (provider.startswith("sdpa/") and provider != "sdpa/flash"):
        known = (_MORE_COLOURS[sum(provider.encode()) % len(_MORE_COLOURS)], "P")
    return {"color": known[0], "marker": known[1]}


def _style(provider: str) -> dict[str, Any]:
    return {**_look(provider), "label": _LABELS.get(provider, provider)}


def _figure(size: tuple[float, float], num_axes: int) -> tuple[Any, list[Any]]:
    """A figure in ink on nothing."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK
    )
    with rc_context({**ink, "font.size": _FONT_SIZE}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, num_axes, squeeze=False)[0]
        for one in axes:
            one.patch.set_alpha(0)
            one.grid(visible=True, which="major", alpha=0.2)
            one.spines[["top", "right"]].set_visible(False)
    figure.patch.set_alpha(0)
    return figure, list(axes)


def _log_axes(axes: Any, ticks: Sequence[int], x_label: str, y_label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    _log_numbers(axes.yaxis, y_label)


def _log_numbers(axis: Any, label: str) -> None:
    """A logarithmic axis with 1, 2, 5 of each power of ten as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axis.set_label_text(label)


def _svg(figure: Any, name: str) -> str:
    """The svg element, with the page's ink, and identifiers that no other figure has; the same for the same lines."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "tilestream", "svg.fonttype": "path"}):
        for axes in figure.axes:
            _ink(axes)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text[text.index("<svg") :])
    return text.replace(_INK, "currentColor").strip()


def _ink(axes: Any) -> None:
    """What was made after the context of `_figure` takes its colours too."""
    axes.title.set_color(_INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(_INK)
        axis.label.set_fontsize(_FONT_SIZE)
        axis.set_tick_params(which="both", colors=_INK, labelsize=_FONT_SIZE)
    axes.patch.set_alpha(0)
    if (legend := axes.get_legend()) is not None:
        for text in legend.get_texts():
            text.set_color(_INK)
