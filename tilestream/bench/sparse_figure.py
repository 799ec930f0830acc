"""The figure of ``tilestream bench block-sparse``: time, speed over dense and over FlexAttention against density.

SVG text, written here without a library, so that the same lines give the same file wherever they are drawn.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tilestream.bench.bars import number
from tilestream.bench.gpu_cells import DENSE
from tilestream.bench.measure import Line
from tilestream.bench.sparse_bars import SPEED_OVER_FLEX

__all__ = ["draw"]

# Okabe and Ito's, which stay apart for colour-blind eyes; a backward is dashed.
_COLOURS = {64: "#0072B2", 128: "#D55E00"}
_DASHES = {"forward": "", "backward": ' stroke-dasharray="6 3"'}
_GREY = "#767676"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _GAP = 250, 210, 52, 34, 46, 62
_LEGEND = 24


class _Panel(NamedTuple):
    """One of the diagrams: its number for a line, and what it is compared with at a density."""

    title: str
    value: Callable[[Line], float | None]
    ideal: Callable[[float], float]
    ideal_name: str


def _share(line: Line) -> float | None:
    speed = number(line["peers"].get(DENSE, {}), "ratio_p50")
    return None if speed is None else 1 / speed


_PANELS = (
    _Panel("time over dense's", _share, lambda density: density, "in proportion"),
    _Panel(
        "speed over dense",
        lambda line: number(line["peers"].get(DENSE, {}), "ratio_p50"),
        lambda density: 1 / density,
        "in proportion",
    ),
    _Panel(
        "speed over flex_attention",
        lambda line: number(line["peers"].get("flex", {}), "ratio_p50"),
        lambda density: SPEED_OVER_FLEX,
        "the bar",
    ),
)


def draw(lines: Sequence[Line]) -> str | None:
    """The SVG file of the lines about random blocks; None where they have no numbers."""
    found = [line for line in lines if line["part"] in ("sparse-density", "sparse-cpu") and _share(line) is not None]
    if not found:
        return None
    panels = [panel for panel in _PANELS if any(panel.value(line) is not None for line in found)]
    width = len(panels) * (_LEFT + _WIDTH) + (len(panels) - 1) * (_GAP - _LEFT) + 20
    height = _TOP + _HEIGHT + _BOTTOM + _LEGEND
    title = f"Block-sparse attention against the fraction of blocks that is kept, on {found[0]['device']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" font-size="11" role="img"><title>{html.escape(title)}</title>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for place, panel in enumerate(panels):
        parts += _diagram(panel, found, _LEFT + place * (_WIDTH + _GAP))
    return "\n".join([*parts, *_legend(found, panels, height - 10), "</svg>"]) + "\n"


def _diagram(panel: _Panel, lines: Sequence[Line], left: int) -> list[str]:
    """Axes with logarithms to base 2 of both, the ideal in grey, and a line for each head dimension and direction."""
    series: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for line in lines:
        if (value := panel.value(line)) is not None and value > 0:
            key = (line["config"]["head_dim"], line["mode"])
            series.setdefault(key, []).append((float(line["kept_fraction"]), value))
    densities = sorted({density for points in series.values() for density, _ in points})
    ideal = [(density, panel.ideal(density)) for density in densities]
    values = [value for points in (ideal, *series.values()) for _, value in points]
    lowest, highest = (
        round_(math.log2(edge)) for round_, edge in ((math.floor, min(values)), (math.ceil, max(values)))
    )
    highest = max(highest, lowest + 1)
    first, last = math.log2(densities[0]) - 0.2, math.log2(densities[-1]) + 0.2

    def x(density: float) -> float:
        return left + _WIDTH * (math.log2(density) - first) / (last - first)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (highest - math.log2(value)) / (highest - lowest)

    parts = [
        f'<text x="{left}" y="{_TOP - 14}" font-weight="bold">{panel.title}</text>',
        f'<text x="{left + _WIDTH / 2:.1f}" y="{_TOP + _HEIGHT + 34}" text-anchor="middle">blocks that are kept</text>',
    ]
    for exponent in range(lowest, highest + 1):
        level = y(2.0**exponent)
        parts.append(f'<path d="M{left} {level:.1f}h{_WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{level + 4:.1f}" text-anchor="end">{_plain(exponent)}</text>')
    for density in densities:
        place = f'x="{x(density):.1f}" y="{_TOP + _HEIGHT + 16}"'
        parts.append(f'<text {place} text-anchor="middle">{_plain(math.log2(density))}</text>')
    parts.append(_path(ideal, x, y, _GREY, ' stroke-dasharray="1 3"'))
    for (head_dim, mode), points in series.items():
        colour = _COLOURS.get(head_dim, _GREY)
        parts.append(_path(sorted(points), x, y, colour, _DASHES.get(mode, "")))
        parts += [f'<circle cx="{x(d):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for d, v in points]
    return parts


def _path(
    points: Sequence[tuple[float, float]],
    x: Callable[[float], float],
    y: Callable[[float], float],
    colour: str,
    dashes: str,
) -> str:
    corners = "L".join(f"{x(density):.1f} {y(value):.1f}" for density, value in points)
    return f'<path d="M{corners}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'


def _plain(exponent: float) -> str:
    """A power of two, as a fraction where it is less than 1."""
    if exponent == int(exponent):
        return str(2 ** int(exponent)) if exponent >= 0 else f"1/{2 ** int(-exponent)}"
    return f"{2**exponent:.2g}"


def _legend(lines: Sequence[Line], panels: Sequence[_Panel], level: int) -> list[str]:
    names = [
        (f"head_dim {head_dim}, {mode}", _COLOURS.get(head_dim, _GREY), _DASHES.get(mode, ""))
        for head_dim, mode in dict.fromkeys((line["config"]["head_dim"], line["mode"]) for line in lines)
    ]
    grey = " or ".join(dict.fromkeys(panel.ideal_name for panel in panels))
    parts = []
    for place, (name, colour, dashes) in enumerate([*names, (grey, _GREY, ' stroke-dasharray="1 3"')]):
        left = _LEFT + 178 * place
        parts.append(f'<path d="M{left} {level - 4}h24" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        parts.append(f'<text x="{left + 30}" y="{level}">{name}</text>')
    return parts
