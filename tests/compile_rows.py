"""Rows of compile tests travel to a worker process as JSON, and a line of JSON comes back for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["answer", "ask"]


def ask(worker: Path, rows: Sequence[Any], path: Path, packages: Sequence[str] = ()) -> dict[Any, Any]:
    """What `worker` answers for each row, by row.

    Args:
        path: where the rows are written for it.
        packages: folders of packages that it prefers.
    """
    path.write_text(json.dumps([row._asdict() for row in rows]), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*packages, str(worker.parent.parent)])
    # Gluon has no interpreter, and no kernel is compiled in it.
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, worker, path], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(zip(rows, map(json.loads, done.stdout.splitlines()), strict=True))


def answer(compiled: Callable[..., Any], failed: Callable[[dict[str, str]], Any] = lambda error: error) -> None:
    """In a worker: a line for each row of the file that it was given, also for one that the compiler fails at."""
    for row in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            found = compiled(**row)
        except Exception as error:  # of the compiler: the failure of this row, and of no other
            found = failed({"error": f"{type(error).__name__}: {error}"})
        print(json.dumps(found), flush=True)
