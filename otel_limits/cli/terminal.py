"""How the command line shows things: in colour on a terminal, as plain text anywhere else."""

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
"""Columns of tables where there is no terminal."""
PATIENCE_SECONDS: Final = 1.0
"""How long work takes before there is a progress bar."""
EVERY: Final = 500
"""Steps between two looks at the bar."""

T = TypeVar("T")


def console() -> Console:
    """Make the console for standard output."""
    from rich.console import Console, ConsoleDimensions

    class Output(Console):
        def on_broken_pipe(self) -> None:
            # `rich` would exit with 1 here, by which `audit verify` says that something is wrong.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    is_terminal = sys.stdout.isatty()
    made = Output(
        # Without this, FORCE_COLOR would put escape sequences into files.
        force_terminal=is_terminal,
        width=None if is_terminal else PLAIN_WIDTH,
        # Names and values of users are shown as they are, whatever brackets or colons they have.
        highlight=False,
        markup=False,
        emoji=False,
    )
    if made.is_dumb_terminal:
        # That of an editor, or of a build, has a size as well; `rich` takes all of them for 80.
        made.size = ConsoleDimensions(*shutil.get_terminal_size())
    return made


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out for a file or a pipe: each column as wide as it needs, nothing cut off."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1:] = [0]  # no spaces at the ends of lines
    return "".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + "\n"
        for row in rows
    )


class Bar:
    """Work that may take long, and a progress bar that says how far it has got."""

    def __init__(self, title: str, progress: rich.progress.Progress) -> None:
        """Begin at nothing of an unknown total."""
        self._progress = progress
        self._task = progress.add_task(title, total=None)

    def through(self, items: Iterable[T], total: int | None = None) -> Iterator[T]:
        """Pass on `items`, each a step of `total`."""
        self._progress.update(self._task, total=total)
        for number, item in enumerate(items):
            # Not for each step: to write the bar takes longer than most steps do.
            if number % EVERY == 0:
                self._progress.update(self._task, completed=number)
            yield item


class NoProgress:
    """Work that nobody watches."""

    def through(self, items: Iterable[T], total: int | None = None) -> Iterator[T]:  # noqa: ARG002
        """Pass on `items`."""
        return iter(items)


@contextlib.contextmanager
def working(title: str) -> Iterator[ProgressBar]:
    """Work on something; a bar appears after a second, and goes away at the end."""
    if not sys.stderr.isatty():
        yield NoProgress()  # at once: a script does not wait for the import of what draws bars
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
    # Most answers are there before it, and a bar that flashes tells nobody anything.
    alarm = threading.Timer(PATIENCE_SECONDS, progress.start)
    alarm.daemon = True
    alarm.start()
    try:
        yield Bar(title, progress)
    finally:
        alarm.cancel()
        progress.stop()
