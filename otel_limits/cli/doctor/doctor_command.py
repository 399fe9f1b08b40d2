"""The command `otel-limits doctor`."""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from typing import Any, Final

from otel_limits.cli.command import add_command
from otel_limits.settings.variables import environment

HELP: Final = """\
Verify enforcement with a built-in runaway agent.

LAUNCHER is the command you start your program with (default: python). The doctor starts its own
program instead:

  otel-limits doctor -- otel-limits run -- python app.py
  otel-limits doctor -- opentelemetry-instrument python -m app
  otel-limits doctor -- otel-limits run -- gunicorn app:app

Starts an agent with a scripted model and max_turns=3, also in a thread pool and in a child process,
isolated from your ledger, quotas, collectors and alerts. Then checks your settings and the servers
they refer to.

Only frameworks that your program imports are probed, according to its source, which is read and not
run. If no import is found, each installed framework is probed.

Each check prints ok, FAIL, or - if not configured. The exit status is 0 only if the agent was
halted and no check failed.
"""


def add(commands: Any) -> None:
    """Add `doctor`."""
    command = add_command(commands, "doctor", HELP, examine)
    command.usage = "otel-limits doctor [options] [-- LAUNCHER ...]"
    command.add_argument("--model", metavar="NAME", help="check that this model has a price")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "launcher",
        nargs=REMAINDER,
        metavar="LAUNCHER",
        help="the command you start your program with",
    )


def examine(options: Namespace) -> int:
    """Run all checks and print their findings."""
    from otel_limits.cli.doctor.check_context import Context
    from otel_limits.cli.doctor.checks import findings_of
    from otel_limits.cli.doctor.finding import as_json, as_text, exit_status
    from otel_limits.cli.doctor.launcher import Launcher, UnknownLauncherError, read_launcher

    # argparse leaves the `--` in the remaining arguments.
    words = options.launcher[1:] if options.launcher[:1] == ["--"] else options.launcher
    environ = environment()
    launcher: Launcher | UnknownLauncherError
    try:
        launcher = read_launcher(words, run_options)
        environ |= launcher.settings
    except UnknownLauncherError as error:
        launcher = error
    findings = findings_of("doctor", Context(environ, model=options.model, launcher=launcher))
    sys.stdout.write(as_json(findings) if options.json else as_text(findings))
    return exit_status(findings)


def run_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Parse the arguments of `otel-limits run` into variables and a command."""
    from otel_limits.cli.doctor.launcher import UnknownLauncherError
    from otel_limits.cli.parser import make_parser
    from otel_limits.cli.run_command import given_options

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            options = make_parser().parse_args(["run", *arguments])
    except SystemExit as exited:
        if exited.code:
            raise
        raise UnknownLauncherError(
            "otel-limits run shows its help and starts no program.", "Remove --help."
        ) from None
    given = {setting.variable: text for setting, text in given_options(options)}
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return given, list(command)
