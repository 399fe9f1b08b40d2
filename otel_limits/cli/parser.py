"""The `otel-limits` command: the table of commands and the entry point."""

from __future__ import annotations

import errno
import io
import os
import sys
from argparse import Action, ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from otel_limits.cli.command import (
    USAGE_ERROR,
    HelpFormatter,
    Parser,
    example_of,
    refuse,
    uncollected,
)
from otel_limits.core.errors import ConfigurationError, LedgerError

COMMANDS: Final = {
    "run": "run_command",
    "autoload": "autoload_command",
    "check": "check",
    "doctor": "doctor.doctor_command",
    "demo": "demo",
    "top": "top.top_command",
    "audit": "audit",
    "ledger": "ledger_command",
    "dashboards": "dashboards",
    "quotas": "quotas",
    "kill": "quotas",
    "docs": "docs",
}
"""Commands and their modules in this package, in the order of `--help`.

To add a command, write a module with a help text, `add` and the function that runs it, and list it
here.
"""

NOT_WRITTEN: Final = (errno.EPIPE, errno.ENOSPC, errno.EIO)
"""Errors of writing to standard output; commands handle all others themselves."""
BROKEN_PIPE: Final = 141
"""Exit status that shells report for SIGPIPE: 128 + 13."""


class ShowVersion(Action):
    """Print the version. Looking it up takes as long as half of the other imports together."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        """Print it and exit."""
        from otel_limits.core.version import own_version

        sys.stdout.write(f"otel-limits {own_version()}\n")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, by default those of the process; return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Printing a variable with undecodable bytes must not raise.
        sys.stdout.reconfigure(errors="backslashreplace")
    _disable_autoload()
    typed = sys.argv[1:] if arguments is None else arguments
    with uncollected():
        parser = make_parser(typed[0] if typed else None)
        options = parser.parse_args(arguments)
    if options.call is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    status: int = 0
    try:
        status = options.call(options)
        sys.stdout.flush()
    except LedgerError as error:
        _discard_unwritten()  # it may be about an export to standard output
        return refuse([str(error)])
    except ConfigurationError as error:
        return refuse(error.mistakes)
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        return _unwritten(error, status)
    return status


def _unwritten(error: OSError, status: int) -> int:
    """Say once why the output was not written, and return the status of the process."""
    _discard_unwritten()
    if error.errno == errno.EPIPE:  # the reader, e.g. `head`, closed the pipe
        return BROKEN_PIPE
    if status == USAGE_ERROR:  # it has already said why, e.g. that a row could not be written
        return status
    return refuse([f"Cannot write output: {error.strerror}."])


def _discard_unwritten() -> None:
    """Discard output that cannot be written: Python flushes at exit, which would also fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _disable_autoload() -> None:
    """Keep autoload from enabling otel-limits in this command when it imports a framework.

    Limits, /metrics and the ledger are for the programs that a command starts.
    """
    startup = sys.modules.get("otel_limits_startup")
    if startup is not None and startup.FINDER in sys.meta_path:
        sys.meta_path.remove(startup.FINDER)


def make_parser(first: str | None = None) -> ArgumentParser:
    """Create the parser of all commands.

    Args:
        first: The first argument. If it is a command, only that one is added: importing all of
            them takes longer than most commands.
    """
    parser = Parser(
        prog="otel-limits",
        description="Enforce turn, token, cost and time limits on LLM agents.",
        epilog=example_of("otel-limits"),
        formatter_class=HelpFormatter,
        # A new option must not change the meaning of an abbreviation.
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version and exit")
    parser.set_defaults(call=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    wanted = [COMMANDS[first]] if first in COMMANDS else dict.fromkeys(COMMANDS.values())
    for module in wanted:
        import_module(f"otel_limits.cli.{module}").add(commands)
    return parser
