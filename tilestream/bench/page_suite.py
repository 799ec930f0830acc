"""What ``tilestream report`` runs: lines for the figures of FlashAttention's paper, made on this machine.

Parts: `lengths` (time and memory against length, figure 3), `setting` (one call, figure 2 left; its models are the part
`setting_model`), `blocks` (traffic and time against the size of tiles, figure 2 middle), `kept` (traffic against the
kept fraction, figure 2 right), `roofs` (what this machine computes and copies at best). `source` is "model" where all
numbers of a line are, and "measured" where its times are; bytes of the model are named so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tilestream import teaching
from tilestream.bench.cases import DTYPES, Case, growing_lengths, square_case
from tilestream.bench.measure import Line, Settings, facts, measure, num_steps
from tilestream.bench.providers import Forward, Provider, provider_named
from tilestream.bench.runs import IS_BACKWARD
from tilestream.errors import ArgumentError
from tilestream.io.compare import Settings as Traffic
from tilestream.io.compare import algorithms
from tilestream.io.cost import Cost
from tilestream.io.fast_memory import machine_fast_memory
from tilestream.io.model import compulsory_bytes
from tilestream.io.published import BlockMatrix
from tilestream.io.schedule import TileShape, schedule_cost
from tilestream.io.standard import standard_cost
from tilestream.problem import AttentionInputs, Problem

__all__ = ["Plan", "make_lines", "num_plan_steps", "plan_for", "teaching_provider"]

_SUITE = "report"
_QUICK_SETTINGS = Settings(min_samples=2, max_samples=3, budget_s=0.05, patience=2)
_SETTINGS = Settings(min_samples=3, max_samples=12, budget_s=0.4, patience=3)
# Products and copies of this size fill no cache.
_ROOF_SIDE, _ROOF_BYTES, _ROOF_TURNS = 2048, 256 << 20, 5
_BLOCK = 64


@dataclass(frozen=True)
class Plan:
    """Cases and providers of each part; `settings` says how long to measure."""

    device: torch.device
    lengths: tuple[Case, ...]
    setting: Case
    blocks: Case
    block_sizes: tuple[int, ...]
    kept: Case
    providers: tuple[str, ...]
    settings: Settings = field(default=_SETTINGS)
    kept_fractions: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0)
    roof_side: int = _ROOF_SIDE
    roof_bytes: int = _ROOF_BYTES


def plan_for(device: torch.device, quick: bool = False) -> Plan:
    """What `device` measures in under three minutes; `quick` takes seconds and shows that everything works."""
    providers: tuple[str, ...] = ("tilestream", "sdpa", "materialised")
    if device.type == "cuda":
        providers = ("tilestream", "sdpa/flash", "sdpa/cudnn", "materialised")
        many = {"num_heads_q": 16, "num_heads_kv": 16, "dtype": "float16", "batch": 4}
        lengths = growing_lengths((512, 1024, 2048) if quick else (512, 1024, 2048, 4096, 8192, 16384), **many)
        setting = square_case(1024, "float16", 64, causal=True, batch=64, num_heads=16)
    else:
        lengths = growing_lengths((64, 128) if quick else (256, 512, 1024, 2048, 4096))
        setting = square_case(128 if quick else 1024, "float32", 64, causal=True, num_heads=2 if quick else 16)
    tokens = 128 if quick else 1024
    return Plan(
        device, tuple(lengths), setting,
        square_case(tokens, "float32", 64, causal=False),
        (32, 64, 128) if quick else (16, 32, 64, 128, 256, 512),
        square_case(512 if quick else 4096, setting.dtype, 64, causal=False, num_heads=4),
        providers, _QUICK_SETTINGS if quick else _SETTINGS,
        roof_side=256 if quick else _ROOF_SIDE, roof_bytes=1 << 20 if quick else _ROOF_BYTES,
    )  # fmt: skip


def num_plan_steps(plan: Plan) -> int:
    """How often `make_lines` calls `on_step`."""
    timed = num_steps(len(plan.lengths) + 1, len(plan.providers), 1, plan.settings)
    return timed + num_steps(len(plan.block_sizes), 1, 1, _without_memory(plan.settings)) + 3


def make_lines(plan: Plan, on_step: Callable[[str], None] = lambda step: None) -> Iterator[Line]:
    """Measure and model every part of `plan`.

    Args:
        on_step: called with a description before each of `num_plan_steps` steps.

    Yields:
        Lines with ``suite`` "report", ``part`` and ``source`` ("measured" or "model"). ``reason`` says why one has no
        number.
    """
    on_step("the machine's roofs")
    yield from _roofs(plan)
    providers = [provider_named(name) for name in plan.providers]
    for part, cases in (("lengths", plan.lengths), ("setting", (plan.setting,))):
        for line in measure(cases, providers, ["both"], plan.device, plan.settings, on_step):
            yield _of_part(part, line)
    for size in plan.block_sizes:
        provider = teaching_provider(size)
        # On the CPU wherever the rest runs: that is where teaching.py does.
        for line in measure(
            [plan.blocks], [provider], ["forward"], torch.device("cpu"), _without_memory(plan.settings), on_step
        ):
            yield {**_of_part("blocks", line), "block": size}
    on_step("the model of the setting")
    yield from _setting_model(plan)
    on_step("the model of kept blocks")
    yield from _kept_model(plan)


def teaching_provider(block: int) -> Provider:
    """The loop of `teaching.py`, head by head, with square tiles of `block`: the one implementation whose tiles can be
    chosen. It is of PyTorch operations, so small tiles cost it more than they cost a kernel."""

    def refuse(case: Case, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"teaching.py runs on the CPU, not on {device.type}"
        if case.dtype != "float32" or case.num_heads_q != case.num_heads_kv or set(case.spec.features()) - {"causal"}:
            return "teaching.py knows float32, one KV head per query head, and a band"
        return None

    def prepare(case: Case, inputs: AttentionInputs) -> Forward:
        def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            heads = [
                teaching.forward(
                    query[b, :, h], key[b, :, h], value[b, :, h], case.spec.scale, case.spec.band,
                    block_m=block, block_n=block,
                )[0]
                for b in range(case.batch)
                for h in range(case.num_heads_q)
            ]  # fmt: skip
            stacked = torch.stack(heads).unflatten(0, (case.batch, case.num_heads_q))
            out: torch.Tensor = stacked.transpose(1, 2)
            return out

        return forward

    def cost(problem: Problem, backward: bool) -> Cost:
        return schedule_cost(problem, TileShape(block, block, packs_group=False, sums_in_memory=True), backward)

    return Provider(f"teaching/{block}", refuse, prepare, cost)


def _of_part(part: str, line: Line) -> Line:
    case = Case.from_dict(line["config"])
    problem = case.problem(line["device_type"])
    least = sum(compulsory_bytes(problem, backward).total_bytes for backward in IS_BACKWARD[line["mode"]])
    return {"suite": _SUITE, "part": part, "source": "measured", **line, "bytes_least": least}


def _without_memory(settings: Settings) -> Settings:
    return Settings(settings.min_samples, settings.max_samples, settings.budget_s, settings.patience, False)


def _roofs(plan: Plan) -> Iterator[Line]:
    """The best of a few turns: a square product in the dtype of the setting, and a copy that is read and written."""
    dtype, device = DTYPES[plan.setting.dtype], plan.device
    side = plan.roof_side
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product_s = _best_s(lambda: a @ b, device)
    source = torch.ones(plan.roof_bytes, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device)
    base = {"suite": _SUITE, "part": "roofs", "source": "measured", "reason": None, "is_wrong": False}
    yield {
        **base,
        "name": "product",
        "dtype": plan.setting.dtype,
        "tflops": 2 * side**3 / product_s / 1e12,
        **facts(device),
    }
    yield {**base, "name": "copy", "gbps": 2 * plan.roof_bytes / copy_s / 1e9, **facts(device)}


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROOF_TURNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def _model_line(plan: Plan, part: str, case: Case, **numbers: object) -> Line:
    base = {"suite": _SUITE, "part": part, "source": "model", "reason": None, "is_wrong": False}
    return {**base, "config": case.to_dict(), **numbers, **facts(plan.device)}


def _setting_model(plan: Plan) -> Iterator[Line]:
    """Every algorithm on the setting, forward and backward, with the fast memory of this machine."""
    problem, memory = plan.setting.problem(plan.device.type), machine_fast_memory()
    try:
        found = algorithms([problem], Traffic(memory.num_bytes, "both"))
    except ArgumentError as error:
        yield {**_model_line(plan, "setting_model", plan.setting), "reason": str(error)}
        return
    for one in found:
        moved = one.cost.traffic
        yield _model_line(
            plan, "setting_model", plan.setting, algorithm=one.name, flops=one.cost.flops,
            read_bytes=moved.read_bytes, written_bytes=moved.written_bytes, bytes_model=moved.total_bytes,
            extra_memory_bytes=one.cost.extra_memory_bytes, fast_memory_bytes=memory.num_bytes,
            fast_memory_source=memory.source,
        )  # fmt: skip


def _kept_model(plan: Plan) -> Iterator[Line]:
    """Forward and backward over random blocks, by the model: there are no block-sparse kernels to measure yet."""
    problem, shape = plan.kept.problem(plan.device.type), TileShape(_BLOCK, _BLOCK)
    standard = sum(standard_cost(problem, backward).traffic.total_bytes for backward in (False, True))
    for fraction in plan.kept_fractions:
        blocks = _random_blocks(fraction, -(-plan.kept.seqlen_q // _BLOCK), -(-plan.kept.seqlen_k // _BLOCK))
        kept = sum(map(sum, blocks)) / sum(map(len, blocks))
        moved = sum(schedule_cost(problem, shape, backward, blocks).traffic.total_bytes for backward in (False, True))
        yield _model_line(
            plan, "kept", plan.kept, kept_fraction=kept, block=_BLOCK, bytes_model=moved, bytes_standard=standard,
        )  # fmt: skip


def _random_blocks(fraction: float, rows: int, columns: int) -> BlockMatrix:
    """About `fraction` of all, those on the diagonal among them, so that no row is without keys."""
    drawn = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) < fraction
    drawn |= torch.eye(rows, columns, dtype=torch.bool)
    kept: Sequence[Sequence[bool]] = drawn.tolist()
    return kept
