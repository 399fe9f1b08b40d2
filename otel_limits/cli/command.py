"""How a command joins the command line, and how it says that it cannot do what was asked."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, Final

USAGE_ERROR: Final = 2
"""Exit status for what cannot be done as it was typed; argparse uses the same."""


def add_command(
    commands: Any, name: str, text: str, call: Callable[[Namespace], int]
) -> ArgumentParser:
    """Add a command.

    Args:
        commands: Where it belongs on the command line.
        name: What is typed.
        text: Its help, laid out; the first line stands in the list of commands.
        call: What it does; returns the exit status.
    """
    command: ArgumentParser = commands.add_parser(
        name,
        help=text.split("\n", 1)[0],
        description=text,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(call=call)
    return command


def add_group(commands: Any, name: str, text: str) -> Any:
    """Add a command that only has commands of its own; return where those belong."""

    def show_help(_options: Namespace) -> int:
        group.print_help(sys.stderr)
        return USAGE_ERROR

    group = add_command(commands, name, text, show_help)
    return group.add_subparsers(title="commands", metavar="COMMAND")


def refuse(sentences: Sequence[str], status: int = USAGE_ERROR) -> int:
    """Say on standard error why something cannot be done, a line for each sentence."""
    for sentence in sentences:
        sys.stderr.write(f"otel-limits: {sentence}\n")
    return status
