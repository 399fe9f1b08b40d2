"""The command line as a whole: its commands, and what they have in common."""

from __future__ import annotations

import errno
import io
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Final

from otel_limits.cli.command import USAGE_ERROR, HelpFormatter, Parser, refuse
from otel_limits.cli.examples import example_of

COMMANDS: Final = {
    "run": "run",
    "autoload": "autoload",
    "check": "check",
    "doctor": "doctor.command",
    "demo": "demo",
    "top": "top.command",
    "audit": "audit",
    "ledger": "ledger",
    "dashboards": "dashboards",
    "quotas": "quotas",
    "kill": "quotas",
    "docs": "docs",
}
"""Each command with its module in this room, in order of `--help`.

A new command is one module with a help text, `add` and what it does, and its name here.
"""

NOT_WRITTEN: Final = (errno.EPIPE, errno.ENOSPC, errno.EIO)
"""How writing to standard output fails; whatever else fails is told where it is done."""
BROKEN_PIPE: Final = 141
"""What shells report for a program that SIGPIPE ended: 128 + 13."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say, those of the process unless given.

    Returns:
        The exit status.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A variable may hold bytes that are not text; printing it must not end in a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    _stand_aside()
    typed = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(typed[0] if typed else None)
    options = parser.parse_args(arguments)
    if options.call is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    try:
        status: int = options.call(options)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        # Python flushes once more when it ends, which would fail again, unless that goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader, such as `head`, has seen enough
            return BROKEN_PIPE
        return refuse([f"The output cannot be written: {error.strerror}."])
    return status


def _stand_aside() -> None:
    """Keep an environment that autoloads from switching on in the command itself.

    What it imports of a framework is to be looked at. Limits, a second `/metrics` on the port of
    the agents and rows in their ledger are for the programs that a command starts.
    """
    startup = sys.modules.get("otel_limits_startup")
    if startup is not None and startup.FINDER in sys.meta_path:
        sys.meta_path.remove(startup.FINDER)


def make_parser(first: str | None = None) -> ArgumentParser:
    """Describe every command and option.

    Args:
        first: What is typed first. Where that is a command, no other is described: what all of
            them import takes longer than most of them do.
    """
    parser = Parser(
        prog="otel-limits",
        description="Stops LLM agents that go over budget, and tells exactly what happened.",
        epilog=example_of("otel-limits"),
        formatter_class=HelpFormatter,
        # An option added later must not change what an abbreviation means today.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"otel-limits {version('otel-limits')}"
    )
    parser.set_defaults(call=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    wanted = [COMMANDS[first]] if first in COMMANDS else dict.fromkeys(COMMANDS.values())
    for module in wanted:
        import_module(f"otel_limits.cli.{module}").add(commands)
    return parser
