"""The measuring of ``tilestream bench block-sparse``: times as the suite gpu takes them, bytes as the suite traffic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from tilestream.bench.ahead import Request, compile_ahead
from tilestream.bench.gpu_cells import DENSE, PEERS, Cell
from tilestream.bench.gpu_suite import SECONDS, measure_cells, suite_settings
from tilestream.bench.measure import Line, Settings
from tilestream.bench.runs import Mode
from tilestream.bench.traffic import measure_traffic

__all__ = ["PROVIDER", "cpu_settings", "measure_sparse", "requests"]

# Whatever every caller gets.
PROVIDER = "tilestream"
_FLEX = "flex"


def cpu_settings(seconds: float = SECONDS) -> Settings:
    """As `suite_settings`, but that 3 turns suffice, and may take longer: a processor has no other length to choose."""
    return Settings(min_samples=3, max_samples=1000, budget_s=seconds, patience=200)


def measure_sparse(
    cells: Sequence[Cell],
    provider_name: str = PROVIDER,
    settings: Settings | None = None,
    on_step: Callable[[str], None] = lambda step: None,
    device: torch.device | None = None,
) -> Iterator[Line]:
    """Measure `cells`, those of one part and of one case one after the other; as `gpu_suite.measure_cells`.

    Args:
        on_step: called before each cell, and on a GPU once before all.
        device: the current CUDA device by default, and a CPU for the part cpu.

    Yields:
        One line per cell. Where the profiler is missing, lines of the part traffic say so and have no numbers.
    """
    for is_cpu, group in itertools.groupby(cells, key=lambda cell: cell.part == "sparse-cpu"):
        found = list(group)
        place = torch.device("cpu" if is_cpu else "cuda") if device is None else device
        if place.type == "cuda":
            wanted = requests(found, provider_name)
            on_step(f"compiling for {len(wanted)} calls, each in a process of its own")
            compile_ahead(wanted, place)
        yield from _measure(found, provider_name, settings, on_step, place)


def _measure(
    cells: Sequence[Cell],
    provider_name: str,
    settings: Settings | None,
    on_step: Callable[[str], None],
    device: torch.device,
) -> Iterator[Line]:
    default = cpu_settings() if device.type == "cpu" else suite_settings()
    for is_traffic, group in itertools.groupby(cells, key=lambda cell: cell.part == "sparse-traffic"):
        if is_traffic:
            yield from measure_traffic(list(group), provider_name, on_step, needs_profiler=False)
        else:
            yield from measure_cells(list(group), provider_name, settings or default, on_step, device)


def requests(cells: Sequence[Cell], provider_name: str = PROVIDER) -> list[Request]:
    """Calls that compile all that `cells` call, each compiled thing once or nearly so; what takes longest first.

    Our kernels are compiled for widths and for what a mask needs, FlexAttention's for lengths and masks, though not for
    how many blocks one keeps; its forward alone is another program.
    """
    found: dict[tuple[object, ...], Request] = {}
    for cell in cells:
        mode: Mode = "forward" if cell.mode == "forward" else "both"
        for name in (provider_name, *PEERS[cell.part]):
            case, provider = (cell.case.dense, provider_name) if name == DENSE else (cell.case, name)
            key: tuple[object, ...] = (provider, case.dtype, case.head_dim, case.head_dim_v)
            if provider == _FLEX:
                key = (*key, mode, str(case.mask).partition("_1/")[0], case.batch, case.num_heads_q, case.seqlen_q)
            else:
                key = (*key, case.mask is None, case.causal, case.window is None, _has_partial(case.mask))
            if key not in found or (mode == "both" and found[key].mode == "forward"):
                found[key] = Request(case, provider, mode)
    return sorted(found.values(), key=lambda request: (request.provider != _FLEX, request.mode == "forward"))


def _has_partial(mask: str | None) -> bool:
    """Whether its blocks are not whole: the kernels may be others."""
    return mask is not None and not mask.startswith(("kept", "butterfly"))
