"""Finds the shared libraries of the native kernels, and loads the best that this machine can run.

Nothing here fails at import, and a library that cannot be used is a reason, not an error: without one the cpu backend
runs its loop in PyTorch operations. TILESTREAM_NATIVE_ISA names the instruction set to use, or "none"; it is read when
the first call asks, and is an error where it names what cannot run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tilestream.backends.cpu.native.call import CALL_BYTES
from tilestream.backends.cpu.native.isa import (
    COMPILERS,
    RECORD,
    Isa,
    cpu_features,
    isas_for,
    library_name,
    machine_name,
)
from tilestream.errors import ArgumentError

__all__ = ["VARIABLE", "Library", "Loader", "library", "reason", "report", "runnable", "use"]

VARIABLE = "TILESTREAM_NATIVE_ISA"
_NONE = "none"
# pip may have kept a wheel that was built without a compiler.
_REINSTALL = "run `pip install --force-reinstall --no-deps --no-cache-dir .` in tilestream's source folder"
_ADVICE = f"install g++ or clang, then {_REINSTALL}"


@dataclass(frozen=True)
class Library:
    """A loaded library. `forward` and `backward` take the address of a packed call and return a status.

    They are called without Python's global lock, so other Python threads run meanwhile.
    """

    isa: str
    path: Path
    forward: Callable[[object], int]
    backward: Callable[[object], int]
    packed_tile_shape: Callable[[int, int], int]

    def tile_shape(self, dtype: int, backward: bool) -> tuple[int, int]:
        """(block_m, block_n) for a dtype's number in call.py."""
        packed = self.packed_tile_shape(dtype, int(backward))
        return packed >> 32, packed & 0xFFFFFFFF


class Loader:
    """The libraries in one folder, as one machine can run them.

    Args:
        folder: where the build put them.
        expected_abi: bytes of the struct that Python packs; a library made for another struct is refused.
        machine: the architecture; this machine's by default.
        features: what the processor has; this machine's by default.
    """

    def __init__(
        self,
        folder: Path,
        expected_abi: int,
        machine: str | None = None,
        features: frozenset[str] | None = None,
    ) -> None:
        self._folder = folder
        self._expected_abi = expected_abi
        self._machine = machine_name(machine)
        self._features = cpu_features() if features is None else features
        self._isas = isas_for(self._machine)
        self._opened: dict[str, Library | str] = {}
        # The name that `use` gives; else the environment's.
        self._name: str | None = None
        self._chosen: tuple[Library | None] | None = None

    def library(self) -> Library | None:
        """The library to call, or None; see `reason`.

        Raises:
            ArgumentError: TILESTREAM_NATIVE_ISA names no instruction set, or one that cannot run here.
        """
        if self._chosen is None:
            self._chosen = (self._choose(),)
        return self._chosen[0]

    def reason(self) -> str | None:
        """None, or why `library` is None and what to do. Raises as `library` does."""
        if self.library() is not None:
            return None
        if self._wanted()[1] == _NONE:
            return f"{self._wanted()[0]} is {_NONE!r}, which turns the native kernels off"
        if not self._isas:
            return f"there are no native kernels for {self._machine} on this operating system"
        possible = [isa for isa in self._isas if not self._lacks(isa)]
        if not possible:
            least = self._isas[-1]
            return f"this processor lacks what the native kernels need: {', '.join(self._lacks(least))}"
        if not any(self._path(isa).exists() for isa in possible):
            return f"the native kernels were not built ({self._note(possible[-1])}); {_ADVICE}"
        return "; ".join(f"{isa.name} {self._open(isa)}" for isa in possible)

    def runnable(self) -> tuple[str, ...]:
        """The instruction sets with a library that this machine can run, the best first."""
        return tuple(isa.name for isa in self._isas if isinstance(self._open(isa), Library))

    @contextlib.contextmanager
    def use(self, isa: str) -> Iterator[Library | None]:
        """`library` is the one for `isa` inside, or None for "none"; for tests, and in all threads.

        Raises:
            ArgumentError: there is no such instruction set, or it cannot run here.
        """
        before = self._name, self._chosen
        self._name, self._chosen = isa, None
        try:
            yield self.library()
        finally:
            self._name, self._chosen = before

    def report(self) -> list[tuple[str, str]]:
        """(fact, value) lines for `tilestream doctor`."""
        try:
            chosen = self.library()
            state = f"none: {self.reason()}" if chosen is None else f"{chosen.isa} ({chosen.path})"
        except ArgumentError as error:
            chosen, state = None, f"none: {error}"
        rows = [("in use", state)]
        for isa in self._isas:
            opened = self._open(isa)
            if opened is not chosen:
                rows.append((isa.name, f"can run ({opened.path})" if isinstance(opened, Library) else opened))
        compilers = [found for name in (os.environ.get("CXX"), *COMPILERS) if name and (found := shutil.which(name))]
        missing = f"none; to build the native kernels, {_ADVICE}"
        return [*rows, ("compiler", compilers[0] if compilers else missing)]

    def _wanted(self) -> tuple[str, str | None]:
        """Who names an instruction set, and its name."""
        return (VARIABLE, os.environ.get(VARIABLE) or None) if self._name is None else ("isa", self._name)

    def _choose(self) -> Library | None:
        argument, name = self._wanted()
        if name == _NONE:
            return None
        if name is None:
            opened = (self._open(isa) for isa in self._isas)
            return next((library for library in opened if isinstance(library, Library)), None)
        isa = next((isa for isa in self._isas if isa.name == name), None)
        library = f"is no instruction set of {self._machine}" if isa is None else self._open(isa)
        if isinstance(library, Library):
            return library
        choices = ", ".join(map(repr, (*self.runnable(), _NONE)))
        raise ArgumentError(f"{argument} is {name!r}, which {library}. Choose from {choices}, or leave it unset.")

    def _open(self, isa: Isa) -> Library | str:
        """The library, or why there is none, as the rest of a sentence about `isa`."""
        if isa.name not in self._opened:
            self._opened[isa.name] = self._open_anew(isa)
        return self._opened[isa.name]

    def _open_anew(self, isa: Isa) -> Library | str:
        path = self._path(isa)
        if lacking := self._lacks(isa):
            return f"needs a processor with {', '.join(lacking)}"
        if not path.exists():
            return f"was not built ({self._note(isa)})"
        try:
            return self._bind(isa, path)
        except OSError as error:
            return f"cannot be loaded ({error}); {_REINSTALL}"
        except AttributeError as error:
            return f"lacks a function ({error}); {_REINSTALL}"

    def _bind(self, isa: Isa, path: Path) -> Library | str:
        # CDLL, not PyDLL: calls release the global lock.
        handle = ctypes.CDLL(str(path))
        for function in (handle.tilestream_abi, handle.tilestream_usable, handle.tilestream_tile_shape):
            function.restype = ctypes.c_int64
        handle.tilestream_tile_shape.argtypes = [ctypes.c_int64, ctypes.c_int64]
        for function in (handle.tilestream_forward, handle.tilestream_backward):
            function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p]
        if (abi := handle.tilestream_abi()) != self._expected_abi:
            return f"was built by another version (call of {abi} bytes, not {self._expected_abi}); {_REINSTALL}"
        if not handle.tilestream_usable():
            return "is refused by the operating system"
        handle.tilestream_join.restype, handle.tilestream_join.argtypes = None, [ctypes.c_void_p]
        handle.tilestream_join(_gomp_parallel())
        return Library(
            isa.name, path, handle.tilestream_forward, handle.tilestream_backward, handle.tilestream_tile_shape
        )

    def _path(self, isa: Isa) -> Path:
        return self._folder / library_name(isa.name)

    def _lacks(self, isa: Isa) -> list[str]:
        return sorted(isa.features - self._features)

    def _note(self, isa: Isa) -> str:
        """What the build said of `isa`."""
        try:
            record = json.loads((self._folder / RECORD).read_text(encoding="utf-8"))
            return str(record["isas"][isa.name]["note"])
        except (OSError, ValueError, LookupError, TypeError):
            return "no build has left a record"


@functools.cache
def _gomp_parallel() -> int | None:
    """The entry point of the GNU OpenMP that PyTorch's own threads belong to; None where they are another's."""
    folder = Path(torch.__file__).parent
    bundled = [str(path) for path in (*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*"))]
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    for name in (*bundled, "libgomp.so.1"):
        # Only what is loaded already: loading one would be the second runtime.
        with contextlib.suppress(OSError, AttributeError):
            handle = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            return ctypes.cast(handle.GOMP_parallel, ctypes.c_void_p).value
    return None


@functools.cache
def _installed() -> Loader:
    """The loader of this installation."""
    return Loader(Path(__file__).parent / "lib", CALL_BYTES)


def library() -> Library | None:
    """See `Loader.library`; of this installation."""
    return _installed().library()


def reason() -> str | None:
    """See `Loader.reason`; of this installation."""
    return _installed().reason()


def runnable() -> tuple[str, ...]:
    """See `Loader.runnable`; of this installation."""
    return _installed().runnable()


def use(isa: str) -> contextlib.AbstractContextManager[Library | None]:
    """See `Loader.use`; of this installation."""
    return _installed().use(isa)


def report() -> list[tuple[str, str]]:
    """See `Loader.report`; of this installation."""
    return _installed().report()
