"""The demo's output: live progress and results as text, or JSON."""

from __future__ import annotations

import dataclasses
from concurrent.futures import wait
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from otel_limits.core.secrets import redact_url
from otel_limits.demo.play import AGENT, MAX_CALLS_PER_RUN, RunResult, ScenarioOutcome, command_line
from otel_limits.demo.server import GUARDED
from otel_limits.settings.table import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from rich.console import Console

    from otel_limits.demo.play import DemoRun, Setup
    from otel_limits.demo.server import DemoServers

FRAMES_PER_SECOND: Final = 12
BAR_WIDTH: Final = 18
NARROW: Final = 80
"""Below this width, progress bars are omitted."""

NEXT_STEPS: Final = (
    ("export OTEL_LIMITS_MAX_TURNS=30 OTEL_LIMITS_MAX_TOKEN_BUDGET=100000", "set your limits"),
    ("otel-limits check", "show settings and sources"),
    ("otel-limits run -- python app.py", "run your program with them"),
    ("otel-limits run --prometheus-port 9464 -- python app.py", "and serve /metrics"),
)


EMPTY: Final = "empty: blocked by a guardrail"
"""The text of an answer that has none, which is only that of the guarded agent."""


# --- text ---------------------------------------------------------------------------------------


def show_setup(screen: Console, setup: Setup, servers: DemoServers) -> None:
    """Describe the scenario."""
    embedded = f"built-in model server at {servers.url('SCENARIO')}/v1"
    screen.print("A runaway agent: it polls a job that stays pending", style="bold")
    screen.print("Each poll is another model call, with a longer prompt.\n")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("agent", f"{AGENT}, a Strands agent with one tool: otel_limits/demo/agent.py")
    grid.add_row(
        "model", f"{setup.model} at {redact_url(setup.base_url)}" if setup.base_url else embedded
    )
    grid.add_row("limits", "set only in the environment; the agent's code is unchanged")
    screen.print(grid)
    screen.print()


def watch(screen: Console, running: DemoRun) -> None:
    """Show progress until all scenarios have ended: live on a terminal, otherwise once."""
    if not screen.is_terminal:
        wait(running.futures)
        screen.print(progress(running, screen.width))
        return
    # Rich's refresh thread would only redraw the same numbers.
    with Live(progress(running, screen.width), console=screen, auto_refresh=False) as live:
        while wait(running.futures, timeout=1 / FRAMES_PER_SECOND).not_done:
            live.update(progress(running, screen.width), refresh=True)
        live.update(progress(running, screen.width), refresh=True)


def progress(running: DemoRun, width: int) -> Table:
    """Return a table of the scenarios, without bars on a narrow screen."""
    is_narrow = width < NARROW
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{PREFIX}...", no_wrap=True)
    if not is_narrow:
        table.add_column("model calls", no_wrap=True)
    table.add_column("calls" if is_narrow else "", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("stop reason", overflow="fold")
    if not is_narrow:
        table.add_column("", overflow="fold")
    most = running.setup.pending_polls + 2  # the last poll and the answer
    for scenario, future in zip(running.setup.scenarios, running.futures, strict=True):
        outcome = future.result() if future.done() and future.exception() is None else None
        seen = running.servers.counts(scenario.name)
        # Calls to a real model server are not counted here, but polls are.
        calls = outcome.model_calls if outcome else max(seen.requests, seen.polls)
        color = verdict(outcome)[1] if outcome else "yellow"
        bar = ProgressBar(
            total=most, completed=calls, width=BAR_WIDTH, complete_style=color, finished_style=color
        )
        end = describe_end(future, outcome)
        table.add_row(
            short_form(scenario.variables),
            *(() if is_narrow else (bar,)),
            str(calls),
            f"{outcome.tokens if outcome else seen.tokens:,}",
            *((Text("\n").join(end),) if is_narrow else end),
        )
    return table


def short_form(variables: Mapping[str, str]) -> str:
    """Return variables without their common prefix."""
    settings = (f"{name.removeprefix(PREFIX)}={value}" for name, value in variables.items())
    return " ".join(settings) or "no limits"


def describe_end(
    future: Future[ScenarioOutcome], outcome: ScenarioOutcome | None
) -> tuple[Text, Text]:
    """Return the stop reason of a scenario and what ended it."""
    if outcome is None:
        return (Text("failed", style="bold red") if future.done() else Text("...")), Text()
    end, color = verdict(outcome)
    return Text(outcome.result.stop_reason, style=f"bold {color}"), Text(end, style=color)


def verdict(outcome: ScenarioOutcome) -> tuple[str, str]:
    """Return what ended a scenario, and its color: red if it ran away, green if it was halted."""
    if outcome.result.halt is not None:
        return "halted by otel-limits", "green"
    if outcome.total("otel_limits_stops_total", action="observed"):
        return "ran away, logged only", "red"
    return ("ran away", "red") if outcome.ended_by_demo else ("ended by the model", "default")


def show_outcomes(
    screen: Console, setup: Setup, outcomes: Sequence[ScenarioOutcome], seconds: float
) -> None:
    """Print everything that is not in the table of scenarios."""
    if any(outcome.ended_by_demo for outcome in outcomes):
        screen.print(
            f"\nThe demo finishes the job after {setup.pending_polls} polls and allows at most "
            f"{MAX_CALLS_PER_RUN} model calls per agent.\n"
            "Otherwise, the runs that were not halted would never end.\n"
            "Tokens are known after each call, so a token budget can be exceeded by one call."
        )
    heading(screen, "Log messages, one per reached limit")
    for outcome in outcomes:
        for line in outcome.warnings:
            # Unwrapped, so it can be copied and searched for.
            screen.print(line, soft_wrap=True)
    for outcome in outcomes:
        if outcome.blocked is not None:
            show_program(screen, outcome, outcome.blocked)
    heading(screen, "Next steps")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold cyan", overflow="fold")
    grid.add_column(style="dim", overflow="fold")
    for command, purpose in NEXT_STEPS:
        grid.add_row(command, purpose)
    screen.print(grid)
    screen.print(f"\n{seconds:.1f} s, {len(outcomes)} processes in parallel.", style="dim")


def show_program(screen: Console, outcome: ScenarioOutcome, blocked: RunResult) -> None:
    """Print the metrics of one process and compare its halt with its zero-token call."""
    heading(screen, f"Non-zero counters of the second process, from {outcome.metrics_url}")
    for line in metric_lines(outcome.metrics):
        screen.print(line, soft_wrap=True)
    heading(screen, "A halt message is not an answer, and an answer with zero tokens is not a halt")
    screen.print(messages_table(outcome.result, blocked))


def heading(screen: Console, text: str) -> None:
    """Print a heading."""
    screen.print(f"\n{text}", style="bold")


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return the non-zero counters in the exposition format. Histograms are too long."""
    return [
        f"{series} {value}"
        for series, value in metrics.items()
        if value and series.partition("{")[0].endswith("_total")
    ]


def messages_table(halted: RunResult, blocked: RunResult) -> Table:
    """Compare the last message of a halted agent with an answer with zero tokens."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for title in ("", f"halted: {AGENT}", f"zero tokens: {GUARDED}"):
        table.add_column(title, overflow="fold")
    for (name, text), other in zip(aspects(halted).items(), aspects(blocked).values(), strict=True):
        table.add_row(name, Text(text), Text(other))
    return table


def aspects(result: RunResult) -> dict[str, str]:
    """Return what a program can read from a result."""
    custom = result.message.get("metadata", {}).get("custom")
    usage = result.message.get("metadata", {}).get("usage")
    return {
        "result.stop_reason": result.stop_reason,
        "result.message": "".join(block.get("text", "") for block in result.message["content"])
        or EMPTY,
        "is_synthetic(message)": str(result.is_synthetic),
        'metadata["custom"]': "none" if custom is None else ", ".join(custom),
        "reported usage": "none" if usage is None else f"{usage['totalTokens']} tokens",
    }


# --- JSON ---------------------------------------------------------------------------------------


def events(setup: Setup, outcomes: Sequence[ScenarioOutcome], seconds: float) -> dict[str, Any]:
    """Return the results as JSON."""
    return {
        "version": version("otel-limits"),
        "model_server": {
            "embedded": setup.base_url is None,
            "base_url": setup.base_url and redact_url(setup.base_url),
            "model": setup.model,
        },
        "bounds": {
            "pending_polls": setup.pending_polls,
            "model_calls_per_agent": MAX_CALLS_PER_RUN,
        },
        "seconds": round(seconds, 3),
        "scenarios": [scenario_event(outcome) for outcome in outcomes],
    }


def scenario_event(outcome: ScenarioOutcome) -> dict[str, Any]:
    """Return the outcome of one scenario."""
    return {
        "name": outcome.scenario.name,
        "environment": dict(outcome.scenario.variables),
        "command": command_line(outcome.scenario.variables),
        "model_calls": outcome.model_calls,
        "tokens": outcome.tokens,
        "ended_by_demo": outcome.ended_by_demo,
        "server_counts": dataclasses.asdict(outcome.server_counts),
        "result": result_event(outcome.result),
        "zero_token_call": result_event(outcome.blocked) if outcome.blocked else None,
        "log": list(outcome.log),
        "metrics_url": outcome.metrics_url,
        "metrics": dict(outcome.metrics),
    }


def result_event(result: RunResult) -> dict[str, Any]:
    """Return the result of one invocation."""
    return {**dataclasses.asdict(result), "synthetic": result.is_synthetic, "halt": result.halt}
