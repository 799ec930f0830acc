"""The page of ``tilestream report``: one HTML file of lines, figures and the tile viewer, which needs no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources

from tilestream.bench import viewer
from tilestream.bench.figures import Drawing
from tilestream.bench.measure import Line
from tilestream.bench.page_tables import figure_table, moved_tables, setting_table
from tilestream.bench.report import Table, format_threads

__all__ = ["page"]

_SLOT = re.compile(r"\{\{([a-z_]+)\}\}")


def page(lines: Sequence[Line], drawings: Sequence[Drawing]) -> str:
    """The whole document.

    Args:
        lines: of `page_suite`, and of ``bench traffic`` or ``traffic --measure``, at least one.
        drawings: the figures of these lines.
    """
    parts = {
        "css": _data("report.css"),
        "script": _data("viewer.js"),
        "machine": html.escape(_machine(lines)),
        "tokens": str(viewer.TOKENS),
        "head_dim": str(viewer.HEAD_DIM),
        "choices": _choices(),
        "sections": "\n".join(_sections(lines, drawings)),
        "data": json.dumps(viewer.viewer_data(), separators=(",", ":")),
    }
    return _SLOT.sub(lambda slot: parts[slot[1]], _data("report.html"))


def _data(name: str) -> str:
    return (resources.files("tilestream.cli") / "data" / name).read_text(encoding="utf-8")


def _choices() -> str:
    """The viewer's lists."""
    sizes = {str(size): str(size) for size in viewer.BLOCK_SIZES}
    lists: tuple[tuple[str, str, dict[str, str], str], ...] = (
        ("direction", "direction", {name: name for name in viewer.DIRECTIONS}, "forward"),
        ("mask", "mask", {name: mask.label for name, mask in viewer.MASKS.items()}, "causal"),
        ("block-m", "queries of a tile", sizes, "16"),
        ("block-n", "keys of a tile", sizes, "16"),
    )
    found = []
    for name, label, options, chosen in lists:
        entries = "".join(
            f'<option value="{value}"{" selected" if value == chosen else ""}>{html.escape(text)}</option>'
            for value, text in options.items()
        )
        found.append(f'<label for="{name}">{label}<select id="{name}">{entries}</select></label>')
    return "\n".join(found)


def _sections(lines: Sequence[Line], drawings: Sequence[Drawing]) -> list[str]:
    found = []
    if (setting := setting_table(lines)) is not None:
        title, table = setting
        found.append(_section("FLOP, bytes and time", _titled(title, table)))
    if moved := moved_tables(lines):
        found.append(_section("Measured traffic", "\n".join(_titled(title, table) for title, table in moved)))
    for drawing in drawings:
        found.append(_section(drawing.title, _figure(drawing) + _details(lines, drawing)))
    return found


def _details(lines: Sequence[Line], drawing: Drawing) -> str:
    """The numbers of a figure, for whoever cannot see it or wants them exactly."""
    return f"<details><summary>The numbers</summary>{_table(figure_table(drawing.name, lines))}</details>"


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{body}\n</section>"


def _titled(title: str, table: Table) -> str:
    return f"<p class=soft>{html.escape(title)}</p>{_table(table)}"


def _figure(drawing: Drawing) -> str:
    label = html.escape(f"{drawing.title}. {drawing.description}", quote=True)
    svg = drawing.svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return (
        f'<figure id="figure-{drawing.name}">{svg}<figcaption>{html.escape(drawing.description)}</figcaption></figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(header)}</th>' for header in table.headers)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    # Reached by keyboard, because it may be wider than the page.
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="Table"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _machine(lines: Sequence[Line]) -> str:
    """Device, threads, versions, commit and date of the lines; each that differs stands once."""
    facts: list[str] = []
    for line in lines:
        threads = f", {format_threads(line['num_threads'])}" if line["device_type"] == "cpu" else ""
        facts.append(
            f"{line['device']}{threads}, torch {line['torch']}, {line['platform']}, tilestream {line['commit']}"
        )
    first, last = min(line["date"] for line in lines), max(line["date"] for line in lines)
    when = first if first == last else f"{first} to {last}"
    return f"{'; '.join(dict.fromkeys(facts))}; {when}"
