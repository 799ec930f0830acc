"""Facts about this machine and this code, as benchmarks and ``tilestream doctor`` report them."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import torch

import tilestream

__all__ = ["available_memory_bytes", "busy_warning", "code_version", "cpu_name", "device_name", "load_average"]

_GIT_TIMEOUT_S = 10


@functools.cache
def cpu_name() -> str:
    """The processor's name, as its maker writes it where the system says so."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name() if device.type == "cpu" else f"{device.type} on {cpu_name()}"


@functools.cache
def code_version() -> str:
    """The commit of a source checkout (with ``-dirty`` where files differ from it), else the package's version.

    The variable TILESTREAM_COMMIT says it where the code is a copy without git.
    """
    if told := os.environ.get("TILESTREAM_COMMIT"):
        return told
    folder = Path(tilestream.__file__).parent
    # A package inside somebody else's repository (a virtual environment, say) is not tracked there.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return tilestream.__version__
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return tilestream.__version__
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command in `folder`, or None where it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def load_average() -> float | None:
    """Processes that wanted a core in the last minute, on average; None where this system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def busy_warning() -> str | None:
    """What to tell the reader of times taken now, if other programs keep this machine's cores busy."""
    load, cores = load_average(), os.cpu_count() or 1
    if load is None or load < cores:
        return None
    return (
        f"This machine is busy (load {load:.1f} on {cores} cores): times will be long and noisy, because each parallel"
        " step waits for its slowest thread. --threads 1 suffers least."
    )


def available_memory_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated, or None where this system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
