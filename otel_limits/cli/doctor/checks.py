"""The checks of `check` and `doctor`, in the order of their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from otel_limits.cli.doctor import framework_checks, settings

if TYPE_CHECKING:
    from otel_limits.cli.doctor.check_context import Context
    from otel_limits.cli.doctor.finding import Finding

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
    from otel_limits.cli.doctor.collector import examine_collectors

    return examine_collectors(context)


CHECKS: Final = (
    # First, because it answers the question; the rest explains it.
    CheckEntry("runaway", _runaway, "doctor"),
    CheckEntry("disabled", settings.disabled, "doctor"),
    CheckEntry("settings", settings.values),
    CheckEntry("policy file", settings.policy_access),
    CheckEntry("policy", settings.policy),
    CheckEntry("limits", settings.limits, "doctor"),
    CheckEntry("quotas", settings.quotas),
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
