"""Terminal output: colors and progress bars on a terminal, otherwise plain text."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console

    from otel_limits.core.wording import ProgressBar

PLAIN_WIDTH: Final = 100
"""Width of tables if there is no terminal."""
PATIENCE_SECONDS: Final = 1.0
"""Delay before a progress bar appears."""

T = TypeVar("T")


def console() -> Console:
    """Create the console for standard output."""
    from rich.console import Console, ConsoleDimensions

    class Output(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit with 1, which `audit verify` uses to report a problem.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    is_terminal = sys.stdout.isatty()
    made = Output(
        # Otherwise FORCE_COLOR would write escape sequences to files.
        force_terminal=is_terminal,
        width=None if is_terminal else PLAIN_WIDTH,
        # Users' names and values may contain brackets or colons.
        highlight=False,
        markup=False,
        emoji=False,
    )
    if made.is_dumb_terminal:
        # rich assumes 80 columns for dumb terminals, e.g. of editors and builds.
        made.size = ConsoleDimensions(*shutil.get_terminal_size())
    return made


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Align rows in columns for a file or pipe, without truncation."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1:] = [0]  # no spaces at the ends of lines
    return "".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + "\n"
        for row in rows
    )


class Bar:
    """Progress shown as a bar."""

    def __init__(self, title: str, progress: rich.progress.Progress) -> None:
        """Add a task with an unknown total."""
        self._progress = progress
        self._task = progress.add_task(title, total=None)

    def through(self, items: Iterable[T], total: int | None = None) -> Iterator[T]:
        """Yield `items`, each a step of `total`."""
        # In intervals, because updating the bar takes longer than most steps.
        return iter(self._progress.track(items, total=total, task_id=self._task))


class NoProgress:
    """Progress that is not shown."""

    def through(self, items: Iterable[T], total: int | None = None) -> Iterator[T]:  # noqa: ARG002
        """Return `items` unchanged."""
        return iter(items)


@contextlib.contextmanager
def working(title: str) -> Iterator[ProgressBar]:
    """Show a progress bar during work that takes more than a second."""
    if not sys.stderr.isatty():
        yield NoProgress()  # without importing rich
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressDisplay

    progress = ProgressDisplay(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    # Most work is done before; a bar that flashes is useless.
    alarm = threading.Timer(PATIENCE_SECONDS, progress.start)
    alarm.daemon = True
    alarm.start()
    try:
        yield Bar(title, progress)
    finally:
        alarm.cancel()
        progress.stop()
