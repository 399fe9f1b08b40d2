"""How the command line shows things: in colour on a terminal, as plain text anywhere else."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

PLAIN_WIDTH: Final = 100
"""Columns of tables where there is no terminal."""


def console() -> Console:
    """Make the console for standard output."""
    is_terminal = sys.stdout.isatty()
    return Console(
        force_terminal=is_terminal,
        width=None if is_terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
