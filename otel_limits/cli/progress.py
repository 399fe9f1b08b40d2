"""A progress bar on standard error for whatever takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_SECONDS: Final = 1.0
EVERY: Final = 500
"""Steps between two looks at the bar."""

T = TypeVar("T")


class Work:
    """Something that may take long, and how far it has got."""

    def __init__(self, title: str, progress: Progress) -> None:
        """Begin at nothing of an unknown total."""
        self._progress = progress
        self._task = progress.add_task(title, total=None)

    def through(self, items: Iterable[T], total: int | None = None) -> Iterator[T]:
        """Pass on `items`, each a step of `total`."""
        self._progress.update(self._task, total=total)
        for number, item in enumerate(items):
            if number % EVERY == 0:
                self._progress.update(self._task, completed=number)
            yield item


@contextlib.contextmanager
def working(title: str) -> Iterator[Work]:
    """Work on something; a bar appears after a second, and goes away at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    alarm = threading.Timer(PATIENCE_SECONDS, progress.start)
    alarm.daemon = True
    alarm.start()
    try:
        yield Work(title, progress)
    finally:
        alarm.cancel()
        progress.stop()
