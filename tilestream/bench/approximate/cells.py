"""What ``tilestream bench approximate`` measures: every method at every length, and its error on real states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilestream.bench.approximate.methods import EXACT, SPARSE, Method
from tilestream.bench.approximate.packages import APPROXIMATE
from tilestream.bench.approximate.setting import Setting
from tilestream.bench.measure import Line

__all__ = ["LENGTHS", "METHODS", "PLAIN", "REFERENCE", "Cell", "Key", "plan"]

# speed: times and memory of a training step on random tensors; error: against exact attention on real states.
Part = Literal["speed", "error"]

METHODS: dict[str, Method] = {method.name: method for method in (*EXACT, *SPARSE, *APPROXIMATE)}
# Exact attention that all are compared with, and what its users run where nothing is dropped or padded.
REFERENCE, PLAIN = "tilestream", "tilestream-plain"
# Those of the paper's tables (arXiv:2205.14135, appendix E.6), and what a CPU does in minutes.
LENGTHS = {
    "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "cpu": (128, 256, 512, 1024, 2048, 4096),
}
_QUICK_LENGTHS = {"cuda": (512, 4096), "cpu": (128, 512)}
_BATCH = {"cuda": 16, "cpu": 1}
_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


class Key(NamedTuple):
    """What names a cell: the part, the method, and a length or a model."""

    part: str
    method: str
    place: int | str


@dataclass(frozen=True)
class Cell:
    """One line: `method` on `setting`, or on the states of `model`."""

    part: Part
    method: str
    setting: Setting
    model: str | None = None

    @classmethod
    def of_line(cls, line: Line) -> Cell:
        """The cell that `line` measured."""
        return cls(line["part"], line["method"], Setting.from_dict(line["config"]), line["model"])

    @property
    def key(self) -> Key:
        return Key(self.part, self.method, self.setting.seqlen if self.model is None else self.model)

    def __str__(self) -> str:
        where = (
            f"{self.setting.batch}x{self.setting.seqlen} tokens" if self.model is None else f"states of {self.model}"
        )
        return f"{METHODS[self.method].label}, {where}"


def plan(device_type: str, quick: bool = False, lengths: Sequence[int] | None = None) -> list[Cell]:
    """The cells of part speed on a kind of device, length by length; `lengths` instead of those of the plan."""
    kind = "cuda" if device_type == "cuda" else "cpu"
    chosen = lengths or (_QUICK_LENGTHS if quick else LENGTHS)[kind]
    settings = [Setting(_BATCH[kind], seqlen, dtype=_DTYPE[kind]) for seqlen in sorted(set(chosen))]
    return [Cell("speed", name, setting) for setting in settings for name in METHODS]
