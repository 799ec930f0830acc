"""What this machine can do at best, as small loops in the native library measure it."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from tilestream import dispatch

__all__ = ["Peaks", "load_peaks"]


class Peaks:
    """The measuring functions of the native library at `path`.

    Raises:
        AttributeError: that library has none.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._fma, self._read = library.tilestream_fma_gflops, library.tilestream_read_gbps
        self._fma.argtypes = [ctypes.c_double]
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_double]
        self._fma.restype = self._read.restype = ctypes.c_double

    def fma_gflops(self, seconds: float) -> float:
        """float32 GFLOP/s of one core in multiply-adds on registers alone: the best millisecond of `seconds`."""
        return float(self._fma(seconds))

    def read_gbps(self, buffer: Tensor, num_threads: int, seconds: float = 0.0) -> float:
        """GB/s of reading `buffer` from end to end: the best pass of `seconds`, one pass at least."""
        return float(self._read(buffer.data_ptr(), buffer.nbytes, num_threads, seconds))


def load_peaks() -> Peaks | None:
    """The functions of the native library in use, or None where there is no library or it lacks them."""
    found = dispatch.native_library()
    if found is None:
        return None
    try:
        return Peaks(found[1])
    except AttributeError:
        return None
