"""The command line; `main` is the entry point of the console script.

In: words of a command line.
Out: text or JSON on standard output, one sentence for each mistake, and an exit status.
May touch: the terminal with `rich`, programs that a command starts, and every other room.
"""

from otel_limits.cli.parser import main

__all__ = ["main"]
