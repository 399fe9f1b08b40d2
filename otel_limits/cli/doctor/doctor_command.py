"""The command `otel-limits doctor`."""

from __future__ import annotations

import sys
from argparse import REMAINDER, Namespace
from typing import Any, Final

from otel_limits.cli.command import add_command, without_separator
from otel_limits.cli.run_command import add_settings, given_options
from otel_limits.settings.run_options import with_options
from otel_limits.settings.variables import environment

HELP: Final = """\
Verify enforcement with a built-in runaway agent.

LAUNCHER is the command you start your program with. The doctor starts its own program instead:

  otel-limits doctor --max-turns 30 -- python app.py
  otel-limits doctor -- opentelemetry-instrument python -m app
  otel-limits doctor -- otel-limits run -- gunicorn app:app

With options of `otel-limits run`, it starts LAUNCHER under `otel-limits run`. Without options and
LAUNCHER it starts Python, and if nothing enables limits there, Python under `otel-limits run`.

Starts an agent with a scripted model and max_turns=3, also in a thread pool and in a child process,
isolated from your ledger, quotas, collectors and alerts. Then checks your settings and the servers
they refer to.

Only frameworks that your program imports are probed, according to its source, which is read and not
run. If no import is found, each installed framework is probed.

Each check prints ok, warn, FAIL, or - if not configured. The exit status is 0 only if the agent was
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
    add_settings(command)


def examine(options: Namespace) -> int:
    """Run all checks and print their findings."""
    from otel_limits.cli.doctor.check_context import Context
    from otel_limits.cli.doctor.checks import findings_of
    from otel_limits.cli.doctor.finding import as_json, as_text, exit_status
    from otel_limits.cli.doctor.launcher import Launcher, UnknownLauncherError, read_launcher

    given = given_options(options)
    environ = with_options(environment(), given)
    launcher: Launcher | UnknownLauncherError
    try:
        launcher = read_launcher(without_separator(options.launcher))
        launcher = launcher.under_run() if given else launcher
        environ |= launcher.settings
    except UnknownLauncherError as error:
        launcher = error
    findings = findings_of("doctor", Context(environ, model=options.model, launcher=launcher))
    sys.stdout.write(as_json(findings) if options.json else as_text(findings))
    return exit_status(findings)
