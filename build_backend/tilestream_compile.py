"""Compile the native CPU kernels: one shared library per instruction set of the machine built for.

    python build_backend/tilestream_compile.py    into the source tree, what is out of date

One source file, no C++ standard library, no Python or torch headers: any C++20 compiler of the gcc and clang families
will do. CXX names one; else g++, clang++ and c++ are tried in turn, per instruction set, because an old one may not
know the newest. TILESTREAM_USE_ZIGLANG=1 takes the clang inside PyPI's ziglang package instead. What cannot be compiled
is left out and said: tilestream then runs its loop in PyTorch operations, so nothing here makes an installation fail.

Standard library only: this runs while tilestream is being installed, before torch is there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tilestream.backends.cpu.native.isa import Isa

__all__ = ["NATIVE", "ROOT", "ZIGLANG", "build_libraries", "sources", "uses_ziglang"]

ROOT = Path(__file__).resolve().parent.parent
# In the source tree, and in a wheel.
NATIVE = Path("tilestream", "backends", "cpu", "native")
ZIGLANG = "TILESTREAM_USE_ZIGLANG"

# Rounding stays that of IEEE arithmetic, infinities and NaN included: never -ffast-math. The options of the last line
# let a multiplication and an addition fuse, and say that nobody reads errno or the exception flags.
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_NO_COMPILER = "no C++ compiler was found"


def _load_table() -> Any:
    """The package's isa.py, by its path: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location("tilestream_isa", ROOT / NATIVE / "isa.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_table = _load_table()


class Compiler(NamedTuple):
    """One that runs here, and compiles for the machine built for."""

    command: tuple[str, ...]
    version: str
    is_zig: bool


def sources() -> list[Path]:
    """What a library is made from."""
    return sorted(path for path in (ROOT / NATIVE / "src").iterdir() if path.suffix in (".cpp", ".h"))


def uses_ziglang() -> bool:
    """Whether the user asked for the compiler in PyPI's ziglang package."""
    return os.environ.get(ZIGLANG, "").lower() in ("1", "true", "yes", "on")


def build_libraries(folder: Path) -> list[Path]:
    """Bring the libraries in `folder` up to date; the files there afterwards, the record included.

    A library stays if sources and options are those it was made with, and so is its compiler, or none is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record_path = folder / _table.RECORD
    before = _read_record(record_path)
    machine = _target_machine()
    compilers, note = _find_compilers(machine)
    entries: dict[str, dict[str, str]] = {}
    for isa in _table.isas_for(machine):
        entry = before.get(isa.name, {})
        is_current = entry.get("stamp") == _stamp(isa) and (folder / _table.library_name(isa.name)).exists()
        known = [compiler.version for compiler in compilers]
        if is_current and (entry.get("compiler") in known or not known):
            _say(f"{isa.name} is up to date")
        else:
            entry = _compile_with_any(isa, compilers, folder) if compilers else {"note": note}
            _say(f"{isa.name}: {entry['note']}")
        entries[isa.name] = entry
    if not entries:
        _say(f"there are none for {machine} on this operating system")
    built = [folder / _table.library_name(name) for name, entry in entries.items() if "stamp" in entry]
    for stale in set(folder.glob("libtilestream_*")) - set(built):
        stale.unlink()
    record_path.write_text(json.dumps({"isas": entries}, indent=1) + "\n", encoding="utf-8")
    return [*built, record_path]


def _say(text: str) -> None:
    print(f"native kernels: {text}", flush=True)


def _read_record(path: Path) -> dict[str, dict[str, str]]:
    """What the last build wrote of each instruction set."""
    try:
        isas = json.loads(path.read_text(encoding="utf-8"))["isas"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return {name: dict(entry) for name, entry in isas.items()}


def _target_machine() -> str:
    """The architecture built for: Python's own, or the one in _PYTHON_HOST_PLATFORM, which cross builds set."""
    machine = sysconfig.get_platform().rpartition("-")[2]
    # macOS's Python can be of two architectures at once; the libraries are for the one that runs.
    return str(_table.machine_name(None if machine.startswith("universal") else machine))


def _stamp(isa: Isa) -> str:
    """Changes with the sources and the options."""
    digest = hashlib.sha256(repr((_FLAGS, isa.name, isa.flags, isa.zig_flags)).encode())
    for path in sources():
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The finished command; one that cannot be started has failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _find_compilers(machine: str) -> tuple[list[Compiler], str]:
    """Those to try, in order, and what to say if there are none. One that the user names is the only one."""
    named = shlex.split(os.environ.get("CXX", ""))
    if uses_ziglang():
        commands, note = [[sys.executable, "-m", "ziglang", "c++"]], "the Python package ziglang was not found"
    elif named:
        commands, note = [named], f"CXX is {shlex.join(named)!r}, which does not work"
    else:
        commands, note = [[name] for name in _table.COMPILERS], _NO_COMPILER
    compilers: dict[str, Compiler] = {}
    for command in commands:
        found = shutil.which(command[0])
        target = _run([*command, "-dumpmachine"]) if found else None
        if found is None or target is None or target.returncode:
            continue
        targeted = _table.machine_name(target.stdout.strip().partition("-")[0])
        if targeted != machine:
            note = f"{shlex.join(command)} compiles for {targeted}, not for {machine}"
            continue
        version = next(iter(_run([*command, "--version"]).stdout.splitlines()), command[0])
        if uses_ziglang():
            version = f"ziglang's {version}"
        # c++ is a second name of one of the others, as a rule.
        compilers.setdefault(os.path.realpath(found), Compiler(tuple(command), version, uses_ziglang()))
    return list(compilers.values()), note


def _compile_with_any(isa: Isa, compilers: Sequence[Compiler], folder: Path) -> dict[str, str]:
    """The record of the first compiler that succeeds, or of every failure."""
    failures = []
    for compiler in compilers:
        error = _compile(isa, compiler, folder / _table.library_name(isa.name))
        if error is None:
            note = f"built by {compiler.version}"
            return {"note": note, "compiler": compiler.version, "stamp": _stamp(isa)}
        failures.append(f"{compiler.version} failed: {error}")
    return {"note": "; ".join(failures)}


def _compile(isa: Isa, compiler: Compiler, output: Path) -> str | None:
    """None, or the compiler's first error."""
    options = list(_FLAGS)
    # gcc knows -nostdlib++ from version 13 on; before, the linker leaves out what nothing needs. Apple's always does.
    if _run([*compiler.command, "-nostdlib++", "-x", "c++", "-E", os.devnull]).returncode == 0:
        options.append("-nostdlib++")
    if sys.platform != "darwin":
        options.append("-Wl,--as-needed")
    processor = isa.zig_flags if compiler.is_zig else isa.flags
    # A process that has the old library loaded keeps it: the new one is another file until it is whole.
    partial = output.with_suffix(".partial")
    source = ROOT / NATIVE / "src" / "attention.cpp"
    done = _run([*compiler.command, *options, *processor, str(source), "-o", str(partial), "-lm"])
    if done.returncode == 0:
        partial.replace(output)
        return None
    partial.unlink(missing_ok=True)
    print(done.stderr, file=sys.stderr, flush=True)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")[:300]


if __name__ == "__main__":
    build_libraries(ROOT / NATIVE / "lib")
