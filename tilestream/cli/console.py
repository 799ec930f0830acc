"""What the commands print: rich tables and progress bars where rich is installed, plain text where it is not.

Results go to standard output, progress and complaints to standard error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

__all__ = ["Console", "Step"]

# Called once per step of a long work, with what the step is.
Step = Callable[[str], None]


class Console:
    """The terminal, or whatever standard output is."""

    def __init__(self) -> None:
        self.has_rich = importlib.util.find_spec("rich") is not None

    def say(self, text: str = "") -> None:
        """One line of result."""
        print(text, flush=True)

    def hint(self, text: str) -> None:
        """One line beside the result."""
        print(text, file=sys.stderr, flush=True)

    def heading(self, text: str) -> None:
        """The title of what follows."""
        self.say()
        self.say(text)
        self.say("-" * min(len(text), 100))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of text; the last line of a terminal too narrow for it wraps."""
        if self.has_rich and sys.stdout.isatty():
            from rich import box
            from rich.console import Console as RichConsole
            from rich.table import Table

            drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for header in headers:
                drawn.add_column(header, overflow="fold")
            for row in rows:
                drawn.add_row(*row)
            RichConsole(markup=False, highlight=False).print(drawn)
            return
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        for cells in (headers, ["-" * width for width in widths], *rows):
            self.say("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())

    @contextlib.contextmanager
    def progress(self, title: str, num_steps: int | None) -> Iterator[Step]:
        """A bar of `num_steps` steps (None: unknown) on standard error; the value is called at each step's begin."""
        if not (self.has_rich and sys.stderr.isatty()):
            yield self._plain_step(title, num_steps)
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=RichConsole(stderr=True, markup=False), transient=True) as bar:
            task = bar.add_task(title, total=num_steps)
            begun = 0

            def step(text: str) -> None:
                nonlocal begun
                bar.update(task, description=f"{title}: {text}", completed=begun)
                begun += 1

            yield step

    def _plain_step(self, title: str, num_steps: int | None) -> Step:
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            begun += 1
            self.hint(f"[{begun}{'' if num_steps is None else f'/{num_steps}'}] {title}: {text}")

        return step
