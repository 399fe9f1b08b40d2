"""The command `otel-limits doctor`, and its checks in their order."""

from __future__ import annotations

import shutil
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from otel_limits.cli.command import add_command, without_separator
from otel_limits.cli.doctor import framework_checks, settings
from otel_limits.cli.run_command import add_settings, given_options
from otel_limits.settings.run_options import with_options
from otel_limits.settings.variables import environment

if TYPE_CHECKING:
    from otel_limits.cli.doctor.finding import Context, Finding


# --- the command ----------------------------------------------------------------------------------

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
    from otel_limits.cli.doctor.finding import Context, as_json, as_text, exit_status
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
    # A file or a build log has whole lines.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    sys.stdout.write(as_json(findings) if options.json else as_text(findings, columns))
    return exit_status(findings)


# --- the checks, in the order of their findings ---------------------------------------------------

Command: TypeAlias = Literal["check", "doctor"]


class CheckEntry(NamedTuple):
    """A question about an application."""

    name: str
    examine: Callable[[Context], Iterable[Finding]]
    runs_in: Command | Literal["quick"] = "quick"
    """The command that runs it; a quick one is run by both."""


def _runaway(context: Context) -> Iterable[Finding]:
    from otel_limits.cli.doctor.runaway import examine

    return examine(context)


def _otlp(context: Context) -> Iterable[Finding]:
    from otel_limits.cli.doctor.settings import examine_collectors

    return examine_collectors(context)


CHECKS: Final = (
    # First, because it answers the question; the rest explains it.
    CheckEntry("runaway", _runaway, "doctor"),
    CheckEntry("disabled", settings.disabled, "doctor"),
    CheckEntry("settings", settings.values),
    CheckEntry("policy", settings.policy),
    CheckEntry("policy file", settings.policy_access),
    CheckEntry("limits", settings.limits, "doctor"),
    CheckEntry("quotas", settings.quotas),
    CheckEntry("agent", settings.agent, "check"),
    CheckEntry("models", settings.models),
    CheckEntry("action", settings.action, "doctor"),
    CheckEntry("unpriced", settings.unpriced),
    CheckEntry("prices", settings.prices, "doctor"),
    CheckEntry("price list", settings.price_list),
    CheckEntry("metrics port", settings.port, "doctor"),
    CheckEntry("ledger", settings.ledger, "doctor"),
    CheckEntry("spilled rows", settings.spilled, "doctor"),
    CheckEntry("quota store", settings.store, "doctor"),
    CheckEntry("otlp", _otlp, "doctor"),
    CheckEntry("permissions", settings.permissions, "check"),
    CheckEntry("bindings", framework_checks.bindings, "check"),
    CheckEntry("frameworks", framework_checks.needed_names, "check"),
    CheckEntry("releases", framework_checks.releases, "check"),
    CheckEntry("autoload", framework_checks.autoload, "check"),
    CheckEntry("missing framework", framework_checks.missing, "check"),
    # Last, because one of the mistakes may be the reason.
    CheckEntry("unlimited", settings.unlimited, "check"),
)


def findings_of(command: Command, context: Context) -> list[Finding]:
    """Run the checks of a command."""
    return [
        finding
        for check in CHECKS
        if check.runs_in in (command, "quick")
        for finding in check.examine(context)
    ]
