"""How the command line shows things: in colour on a terminal, as plain text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH: Final = 100
"""Columns of tables where there is no terminal."""


def console() -> Console:
    """Make the console for standard output."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(
        # Without this, FORCE_COLOR would put escape sequences into files.
        force_terminal=is_terminal,
        width=None if is_terminal else PLAIN_WIDTH,
        # Names and values of users are shown as they are, whatever brackets or colons they have.
        highlight=False,
        markup=False,
        emoji=False,
    )


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out for a file or a pipe: each column as wide as it needs, nothing cut off."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1:] = [0]  # no spaces at the ends of lines
    return "".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + "\n"
        for row in rows
    )
