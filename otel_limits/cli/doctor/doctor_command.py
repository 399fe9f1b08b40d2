"""The command `otel-limits doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from otel_limits.cli.command import add_command
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from otel_limits.cli.doctor.finding import Finding

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

INDENT: Final = " " * 6


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
    from otel_limits.cli.doctor import runaway
    from otel_limits.cli.doctor.collector import examine_collectors
    from otel_limits.cli.doctor.finding import fail
    from otel_limits.cli.doctor.launcher import UnknownLauncherError, read_launcher
    from otel_limits.cli.doctor.settings import examine_settings

    # argparse leaves the `--` in the remaining arguments.
    words = options.launcher[1:] if options.launcher[:1] == ["--"] else options.launcher
    environ = environment()
    try:
        launcher = read_launcher(words, run_options)
    except UnknownLauncherError as error:
        about_agent = [fail("runaway", error.text, error.advice)]
    else:
        environ |= launcher.settings
        about_agent = runaway.examine(launcher, environ)
    findings = [
        # First, because it answers the question; the rest explains it.
        *about_agent,
        *examine_settings(environ, options.model),
        *examine_collectors(environ),
    ]
    sys.stdout.write(as_json(findings) if options.json else as_text(findings))
    return int(any(finding.status == "FAIL" for finding in findings))


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


def as_text(findings: Sequence[Finding]) -> str:
    """Format one line per finding, followed by its advice."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.text}")
        # JSON includes the advice of passed checks.
        if finding.advice and finding.status != "ok":
            lines.append(f"{INDENT}{'':<{width}}  -> {finding.advice}")
    text = "".join(f"{line}\n" for line in lines)
    # A build log may not support other characters.
    return text.encode("ascii", "backslashreplace").decode()


def as_json(findings: Sequence[Finding]) -> str:
    """Format the findings as JSON."""
    return (
        json.dumps(
            {
                "ok": not any(finding.status == "FAIL" for finding in findings),
                "findings": [dataclasses.asdict(finding) for finding in findings],
            },
            indent=2,
        )
        + "\n"
    )
