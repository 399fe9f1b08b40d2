"""The demo: a runaway agent with a scripted model, without and with a limit, in this process.

The agent is that of the installed framework. Only the environment differs between the scenarios.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from otel_limits.bindings.recognition import release
from otel_limits.bindings.script import runaway
from otel_limits.core.events import Event, Stop, stop_to_json
from otel_limits.core.version import own_version
from otel_limits.runtime.runtime import RUNTIME
from otel_limits.settings.settings_reader import read_settings

if TYPE_CHECKING:
    from rich.console import Console

    from otel_limits.bindings.framework import Framework

SEARCHES: Final = 21
"""After these, the model answers. Enough to show a runaway."""
MOST_CALLS: Final = SEARCHES + 1
FAILED: Final = 1
NARROW: Final = 100
"""Below this width, bars are omitted."""

NEXT_STEPS: Final = (
    (
        "Your own program, whose code stays the same",
        "otel-limits run --max-turns 30 -- python app.py",
    ),
    ("Dashboards and audits with data, of a fleet", "otel-limits demo --serve"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run of the agent."""

    name: str
    ends_with: str
    """The expected stop reason."""
    variables: Mapping[str, str]


SCENARIOS: Final = (
    Scenario(name="no_limits", ends_with="end_turn", variables={}),
    Scenario(name="max_turns", ends_with="max_turns", variables={"OTEL_LIMITS_MAX_TURNS": "6"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOutcome:
    """How a scenario ended."""

    scenario: Scenario
    calls: int
    """Model calls, as the model counted them."""
    reason: str
    """The stop reason that the program got."""
    stop: Stop
    """The event that otel-limits published."""
    log: Sequence[str]

    @property
    def verdict(self) -> tuple[str, str]:
        """The cause of its end, and its color: red if it ran away, green if it was halted."""
        if self.stop.action == "halted":
            return "halted by otel-limits", "green"
        return "ran away", "red"


class UnlimitedError(Exception):
    """The framework cannot be limited here."""


def main(framework: Framework, screen: Console | None) -> int:
    """Run the demo.

    Args:
        framework: An installed framework.
        screen: Where to print. Without one, JSON goes to standard output.

    Returns:
        The exit status: 1 if a scenario did not end as expected.
    """
    started = time.monotonic()
    try:
        import_module(framework.module)
        # Autoload may have enabled this process, with the user's ledger and exporters.
        RUNTIME.stop()
        outcomes = [play(framework, scenario) for scenario in SCENARIOS]
    except (ImportError, UnlimitedError) as error:
        sys.stderr.write(f"otel-limits demo: {error}\n")
        return FAILED
    seconds = time.monotonic() - started
    if screen is None:
        sys.stdout.write(json.dumps(as_json(framework, outcomes, seconds), indent=2) + "\n")
    else:
        show(screen, framework, outcomes)
    unexpected = [each for each in outcomes if each.reason != each.scenario.ends_with]
    for outcome in unexpected:
        sys.stderr.write(
            f"otel-limits demo: {outcome.scenario.name} ended with {outcome.reason!r}, "
            f"expected {outcome.scenario.ends_with!r}.\n"
        )
    return FAILED if unexpected else 0


class Recorder(logging.Handler):
    """Keeps the lines of a log."""

    def __init__(self) -> None:
        """Keep warnings and errors."""
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def play(framework: Framework, scenario: Scenario) -> ScenarioOutcome:
    """Run the agent with the limits of a scenario, and with no other setting of this process.

    Raises:
        UnlimitedError: otel-limits could not follow the agent.
    """
    events: list[Event] = []
    logger, recorder = logging.getLogger("otel_limits"), Recorder()
    # Quiet, as the demo prints the limits itself.
    settings = read_settings({**scenario.variables, "OTEL_LIMITS_QUIET": "true"}).settings
    logger.addHandler(recorder)
    try:
        RUNTIME.start(settings, [events.append])
        calls, reason = framework.run_script(runaway(SEARCHES, lambda: None))
        obstacles = RUNTIME.enforcement(framework.name).obstacles
    finally:
        RUNTIME.stop()
        logger.removeHandler(recorder)
    stop = next((event for event in events if isinstance(event, Stop)), None)
    if stop is None:
        why = " ".join(obstacles) or "Its agent was not followed."
        raise UnlimitedError(f"{release(framework)} cannot be limited here. {why}")
    return ScenarioOutcome(
        scenario=scenario, calls=calls, reason=reason, stop=stop, log=recorder.lines
    )


# --- text -----------------------------------------------------------------------------------------


def show(screen: Console, framework: Framework, outcomes: Sequence[ScenarioOutcome]) -> None:
    """Print what happened, and what to do next."""
    without, limited = outcomes
    screen.print("A runaway agent: it searches, finds nothing, and searches again.", style="bold")
    screen.print(f"{release(framework)}, with a scripted model: no network, no credentials.\n")
    screen.print(scenario_table(outcomes, screen.width))
    for line in (line for line in limited.log if " max_" in line):
        screen.print(f"\n{line}", style="dim")
    calls, tokens = without.calls, without.stop.usage.total
    share = 1 - limited.stop.usage.total / tokens
    screen.print(
        f"\nSaved {calls - limited.calls} of {calls} model calls and {share:.0%} of {tokens:,} "
        "tokens, as each prompt is longer than the last.",
        style="bold",
    )
    screen.print(f"Without a limit it ended only because the demo ends after {SEARCHES} searches.")
    for purpose, command in NEXT_STEPS:
        screen.print(f"\n{purpose}:")
        screen.print(f"  {command}", style="bold cyan")


def scenario_table(outcomes: Sequence[ScenarioOutcome], width: int) -> Table:
    """Return a table of the scenarios, without bars on a narrow screen."""
    is_narrow = width < NARROW
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    if not is_narrow:
        table.add_column("model calls", no_wrap=True)
    table.add_column("calls" if is_narrow else "", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("stop reason", overflow="fold")
    for outcome in outcomes:
        text, color = outcome.verdict
        bar = ProgressBar(
            total=MOST_CALLS,
            completed=outcome.calls,
            width=MOST_CALLS,
            complete_style=color,
            finished_style=color,
        )
        table.add_row(
            " ".join(f"{name}={value}" for name, value in outcome.scenario.variables.items())
            or "no limits",
            *(() if is_narrow else (bar,)),
            str(outcome.calls),
            f"{outcome.stop.usage.total:,}",
            Text.assemble((outcome.reason, f"bold {color}"), (f" ({text})", color)),
        )
    return table


# --- JSON -----------------------------------------------------------------------------------------


def as_json(
    framework: Framework, outcomes: Sequence[ScenarioOutcome], seconds: float
) -> dict[str, Any]:
    """Return the results as JSON."""
    return {
        "version": own_version(),
        "framework": release(framework),
        "bounds": {"model_calls_per_agent": MOST_CALLS},
        "seconds": round(seconds, 3),
        "scenarios": [scenario_json(outcome) for outcome in outcomes],
    }


def scenario_json(outcome: ScenarioOutcome) -> dict[str, Any]:
    """Return the outcome of a scenario as JSON."""
    variables = outcome.scenario.variables
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    halt = stop_to_json(outcome.stop) if outcome.stop.action == "halted" else None
    return {
        "name": outcome.scenario.name,
        "environment": dict(variables),
        "command": " ".join([*settings, "otel-limits run -- python agent.py"]),
        "model_calls": outcome.calls,
        "tokens": outcome.stop.usage.total,
        "ended_by_demo": outcome.calls == MOST_CALLS,
        "result": {"stop_reason": outcome.reason, "halt": halt},
        "log": list(outcome.log),
    }
