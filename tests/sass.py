"""What NVIDIA's tool prints of a binary, and what can be read from it without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["nvidia_code", "unwritten"]

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
# What writes a uniform register besides instructions of the uniform datapath, and which of these write none.
_WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "REDUX", "VOTEU", "ELECT")
_READERS = ("UBLK", "UTMA", "UCGABAR", "USETMAXREG")


def nvidia_code(cubin: bytes, option: str = "-sass") -> str:
    """What the tool prints, which Triton's package carries."""
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def unwritten(code: str) -> list[str]:
    """Instructions that read a uniform register which no instruction before them writes.

    There is none in right code. ptxas of CUDA 12.8 moves what makes an operand of a matrix product (its descriptor)
    ahead of the number that it is made of.
    """
    written: set[int] = set()
    found = []
    for address, name, operands in _INSTRUCTION.findall(code):
        target, sources = _target_and_sources(name, [x.strip() for x in operands.split(",")])
        if not written.issuperset(_read(name, operands, sources)):
            found.append(f"{address}: {name} {operands.strip()}")
        written |= target
    return found


def _target_and_sources(name: str, operands: list[str]) -> tuple[set[int], list[str]]:
    """The uniform registers that an instruction writes, and its operands but those."""
    if not name.startswith(_WRITERS) or name.startswith(_READERS):
        return set(), operands
    # Predicates first.
    rest = [x for x in operands if not re.fullmatch(r"U?P\w+", x)]
    target = re.fullmatch(r"UR(\d+)", rest[0]) if rest else None
    if target is None:
        return set(), rest
    width = 2 if ".64" in name or ".WIDE" in name else 1
    return {int(target[1]) + index for index in range(width)}, rest[1:]


def _read(name: str, operands: str, sources: list[str]) -> Iterator[int]:
    """The uniform registers that an instruction is known to read."""
    for source in sources:
        for register in map(int, _UNIFORM.findall(source)):
            if "gdesc" in source:
                # Of both operands; where the first is in registers, nothing is in the place of its descriptor.
                has_both = re.match(r"R\w+, gdesc", operands) is not None
                yield from range(register + (0 if has_both else 2), register + 4)
            else:
                # Addresses in brackets are one, whatever lies there.
                is_pair = "desc[" in source or (".64" in name and "[" not in source)
                yield from range(register, register + (2 if is_pair else 1))
