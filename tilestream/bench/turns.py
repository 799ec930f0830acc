"""Contestants that take turns in one process, so that a slow moment of the machine falls on all of them.

The turns go A B, B A, A B: a number is the median over turns, a ratio the median of the ratios within each turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from tilestream.bench.measure import Settings, percentiles

__all__ = ["Take", "Turns", "median", "slow_reason", "take_turns"]

# One sample: milliseconds, or whatever ours is compared with.
Take = Callable[[], float]
Turns = list[tuple[float, ...]]


def take_turns(takes: Sequence[Take], settings: Settings) -> Turns:
    """Samples of all `takes`, turn by turn, every other turn in reverse order; none where it would take too long."""
    turns: Turns = []
    began = time.perf_counter()
    while True:
        values = [0.0] * len(takes)
        order = range(len(takes))
        for index in order if len(turns) % 2 == 0 else reversed(order):
            values[index] = takes[index]()
        turns.append(tuple(values))
        spent_s = time.perf_counter() - began
        if len(turns) == 1 and spent_s * settings.min_samples > settings.patience * settings.budget_s:
            return []
        if len(turns) >= settings.max_samples or (len(turns) >= settings.min_samples and spent_s >= settings.budget_s):
            return turns


def slow_reason(settings: Settings) -> str:
    """Why `take_turns` gave none."""
    return f"{settings.min_samples} turns would take more than {settings.patience * settings.budget_s:.3g} s"


def median(values: Iterable[float]) -> float:
    """The middle of at least one value."""
    return percentiles(list(values))[1]
