"""A mask as text."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tilestream.block_mask.lists import EMPTY, FULL

__all__ = ["picture"]


def picture(to_kinds: Callable[[slice], Tensor], rows: slice, num_columns: int, most: int) -> str:
    """A line per row of blocks and a character per block, or per square of blocks where there are more than `most`."""
    step = max(1, -(-max(rows.stop - rows.start, num_columns) // most))
    lines = []
    for start in range(rows.start, rows.stop, step):
        kinds = to_kinds(slice(start, min(start + step, rows.stop)))
        lines.append("".join(_character(kinds[:, n : n + step]) for n in range(0, num_columns, step)))
    return "\n".join(lines)


def _character(kinds: Tensor) -> str:
    if bool((kinds == FULL).all()):
        return "#"
    return "." if bool((kinds == EMPTY).all()) else "+"
