"""The instruction sets that the native kernels are compiled for: one shared library each, the best first.

The loader and the build backend share this table. The build backend loads this file by its path, without the package:
standard library only, no imports of tilestream.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["COMPILERS", "ISAS", "RECORD", "Isa", "cpu_features", "isas_for", "library_name", "machine_name"]

# C++ compilers in the order in which they are tried, where the environment variable CXX names none.
COMPILERS = ("g++", "clang++", "c++")
# What the build says about itself, beside the libraries.
RECORD = "build.json"

_V3_FEATURES = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4_FEATURES = _V3_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX_FEATURES = _V4_FEATURES | {"avx512_bf16", "amx_tile", "amx_bf16"}


class Isa(NamedTuple):
    """An instruction set: for whom, how to compile for it, and what a processor must have to run it."""

    name: str
    machine: str
    # For gcc and clang; zig has its own names of processors.
    flags: tuple[str, ...]
    zig_flags: tuple[str, ...]
    # As Linux lists them in /proc/cpuinfo. Empty: every processor of `machine` has it.
    features: frozenset[str]


# AMX also needs the kernel's permission for the process, which that library asks for itself (`tilestream_usable`).
ISAS = (
    Isa(
        "amx",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        ("-mcpu=x86_64_v4+avx512bf16+amx_tile+amx_bf16",),
        _AMX_FEATURES,
    ),
    Isa("x86-64-v4", "x86_64", ("-march=x86-64-v4",), ("-mcpu=x86_64_v4",), _V4_FEATURES),
    Isa("x86-64-v3", "x86_64", ("-march=x86-64-v3",), ("-mcpu=x86_64_v3",), _V3_FEATURES),
    Isa("neon", "aarch64", (), ("-mcpu=baseline",), frozenset()),
)


def machine_name(name: str | None = None) -> str:
    """This machine's architecture, or `name`, under the one name that `Isa.machine` has for it."""
    lowered = (name or platform.machine()).lower()
    return {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(lowered, lowered)


def isas_for(machine: str, system: str = sys.platform) -> tuple[Isa, ...]:
    """The instruction sets of an architecture, the best first. The kernels use POSIX threads: none on Windows."""
    return () if system == "win32" else tuple(isa for isa in ISAS if isa.machine == machine)


def library_name(isa: str) -> str:
    """The file name of the library for an instruction set."""
    return f"libtilestream_{isa}{'.dylib' if sys.platform == 'darwin' else '.so'}"


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The features that Linux lists for this processor; none on other systems, where no entry of `ISAS` needs any.

    Linux leaves out what it has switched off, so a feature listed is one that may be used. (There is no torch of the
    versions we run on for macOS on Intel.)
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = next((line.split(":", 1)[1] for line in lines if line.startswith("flags") and ":" in line), "")
    return frozenset(listed.split())
