"""Shows the demo's events: to a reader, with progress while it runs, and to a program as JSON."""

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
from otel_limits.demo.play import MOST_CALLS, Errand, ScenarioOutcome, command_line
from otel_limits.settings.table import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from rich.console import Console

    from otel_limits.demo.play import Play, Setup
    from otel_limits.demo.server import Servers

FRAMES_PER_SECOND: Final = 12
BAR_WIDTH: Final = 18
NARROW: Final = 80
"""Columns below which there is no room for bars beside the reasons."""

NEXT_STEPS: Final = (
    ("export OTEL_LIMITS_MAX_TURNS=30 OTEL_LIMITS_MAX_TOKEN_BUDGET=100000", "set your limits"),
    ("otel-limits check", "see what is in force, and why"),
    ("otel-limits run -- python app.py", "run your own program with them"),
    ("otel-limits run --prometheus-port 9464 -- python app.py", "and serve /metrics"),
)


# --- for a reader -----------------------------------------------------------------------------


def show_setup(screen: Console, setup: Setup, servers: Servers) -> None:
    """Say what is about to happen, and what is real about it."""
    embedded = f"a built-in stand-in; real HTTP and server-sent events at {servers.url('AGENT')}/v1"
    screen.print("An agent waits for a job that stays pending", style="bold")
    screen.print(
        "Each time it looks at the job it calls its model once more, with a longer prompt.\n"
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("agent", "a real Strands agent with one tool: otel_limits/demo/agent.py")
    grid.add_row(
        "model", f"{setup.model} at {redact_url(setup.base_url)}" if setup.base_url else embedded
    )
    grid.add_row("limits", "only in the environment; the agent's code does not know them")
    screen.print(grid)
    screen.print()


def watch(screen: Console, running: Play) -> None:
    """Show every scenario until all have ended: live on a terminal, once anywhere else."""
    if not screen.is_terminal:
        # A file has no use for what is overwritten twelve times a second.
        wait(running.futures)
        screen.print(progress(running, screen.width))
        return
    # Drawn here alone: a thread that refreshes would draw the same numbers again.
    with Live(progress(running, screen.width), console=screen, auto_refresh=False) as live:
        while wait(running.futures, timeout=1 / FRAMES_PER_SECOND).not_done:
            live.update(progress(running, screen.width), refresh=True)
        live.update(progress(running, screen.width), refresh=True)


def progress(running: Play, width: int) -> Table:
    """Draw how far every scenario has come; without bars where the screen has no room for them."""
    is_narrow = width < NARROW
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{PREFIX}...", no_wrap=True)
    if not is_narrow:
        table.add_column("model calls", no_wrap=True)
    table.add_column("calls" if is_narrow else "", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("ended with", overflow="fold")
    if not is_narrow:
        table.add_column("", overflow="fold")
    most = running.setup.pending_looks + 2  # the look that finds it done, and the answer
    for scenario, future in zip(running.setup.scenarios, running.futures, strict=True):
        outcome = result_of(future)
        seen = running.servers.seen(scenario.name)
        # Requests to the model of somebody else are not seen, but how often its agent looked is.
        calls = outcome.model_calls if outcome else max(seen.requests, seen.looks)
        bar = ProgressBar(total=most, completed=calls, width=BAR_WIDTH)
        end = ending(future, outcome)
        table.add_row(
            short(scenario.variables),
            *(() if is_narrow else (bar,)),
            str(calls),
            f"{outcome.tokens if outcome else seen.tokens:,}",
            *((Text("\n").join(end),) if is_narrow else end),
        )
    return table


def short(variables: Mapping[str, str]) -> str:
    """Write variables without the prefix that they share."""
    settings = (f"{name.removeprefix(PREFIX)}={value}" for name, value in variables.items())
    return " ".join(settings) or "no limits"


def result_of(future: Future[ScenarioOutcome]) -> ScenarioOutcome | None:
    """Return the outcome, once there is one."""
    return future.result() if future.done() and future.exception() is None else None


def ending(future: Future[ScenarioOutcome], outcome: ScenarioOutcome | None) -> tuple[Text, Text]:
    """Say how a scenario ended, and why."""
    if outcome is None:
        return (Text("failed", style="bold red") if future.done() else Text("...")), Text()
    reason = outcome.errand.stop_reason
    if outcome.errand.halt is not None:
        return Text(reason, style="bold green"), Text("halted by otel-limits", style="green")
    if outcome.total("otel_limits_stops_total", action="observed"):
        return Text(reason, style="bold red"), Text("recorded, not halted")
    why = "the demo ended it" if outcome.bounded else "the model ended by itself"
    return Text(reason, style="bold red"), Text(why)


def show_outcomes(
    screen: Console, setup: Setup, outcomes: Sequence[ScenarioOutcome], seconds: float
) -> None:
    """Say everything that is not in the table of the scenarios."""
    if any(outcome.bounded for outcome in outcomes):
        # In words, as a reader may have no colours.
        screen.print(
            f"\nAfter {setup.pending_looks} looks the demo finishes the job, and an agent may ask "
            f"the model {MOST_CALLS} times at most.\n"
            "Otherwise the runs that otel-limits did not halt would never have ended.\n"
            "Tokens are known after a call, so a budget is exceeded by one call at most."
        )
    heading(screen, "What the log says, once per limit that was reached")
    for outcome in outcomes:
        for line in outcome.warnings:
            # Not folded, so that it can be copied and searched for.
            screen.print(line, soft_wrap=True)
    for outcome in outcomes:
        if outcome.cached is not None:
            show_program(screen, outcome, outcome.cached)
    heading(screen, "What to do next")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold cyan", overflow="fold")
    grid.add_column(style="dim", overflow="fold")
    for command, purpose in NEXT_STEPS:
        grid.add_row(command, purpose)
    screen.print(grid)
    screen.print(f"\n{seconds:.1f} s, one process per agent, all at once.", style="dim")


def show_program(screen: Console, outcome: ScenarioOutcome, cached: Errand) -> None:
    """Show what one program counted: a halt and a zero-token call, and how they differ."""
    heading(screen, f"Scraped from {outcome.metrics_url} of the second program: counters above 0")
    for line in metric_lines(outcome.metrics):
        screen.print(line, soft_wrap=True)
    heading(
        screen, "A halt message is not an answer, and a real answer of zero tokens is not a halt"
    )
    screen.print(messages_table(outcome.errand, cached))


def heading(screen: Console, text: str) -> None:
    """Begin a part."""
    screen.print(f"\n{text}", style="bold")


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Write the counters that are not zero as they were scraped; histograms would fill pages."""
    return [
        f"{series} {value}"
        for series, value in metrics.items()
        if value and series.partition("{")[0].endswith("_total")
    ]


def messages_table(halted: Errand, cached: Errand) -> Table:
    """Compare the last message of a halted agent with a real answer of zero tokens."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for title in ("", "halted agent", "agent that asked a cache"):
        table.add_column(title, overflow="fold")
    seen, compared = aspects(halted), aspects(cached)
    for name, text in seen.items():
        table.add_row(name, Text(text), Text(compared[name]))
    return table


def aspects(errand: Errand) -> dict[str, str]:
    """Say what code and readers can see in one last message."""
    custom = errand.message.get("metadata", {}).get("custom")
    usage = errand.message.get("metadata", {}).get("usage")
    return {
        "result.stop_reason": errand.stop_reason,
        "result.message": "".join(block.get("text", "") for block in errand.message["content"]),
        "is_synthetic(message)": str(errand.synthetic),
        'metadata["custom"]': "none" if custom is None else ", ".join(custom),
        "reported usage": "none" if usage is None else f"{usage['totalTokens']} tokens",
    }


# --- for a program ----------------------------------------------------------------------------


def events(setup: Setup, outcomes: Sequence[ScenarioOutcome], seconds: float) -> dict[str, Any]:
    """Collect the same events for machines."""
    return {
        "version": version("otel-limits"),
        "model_server": {
            "embedded": setup.base_url is None,
            "base_url": setup.base_url and redact_url(setup.base_url),
            "model": setup.model,
        },
        "bound": {"pending_looks": setup.pending_looks, "model_calls_of_each_agent": MOST_CALLS},
        "seconds": round(seconds, 3),
        "scenarios": [scenario_facts(outcome) for outcome in outcomes],
    }


def scenario_facts(outcome: ScenarioOutcome) -> dict[str, Any]:
    """Collect the events of one scenario."""
    return {
        "name": outcome.scenario.name,
        "environment": dict(outcome.scenario.variables),
        "command": command_line(outcome.scenario.variables),
        "model_calls": outcome.model_calls,
        "tokens": outcome.tokens,
        "bounded_by_demo": outcome.bounded,
        "server_saw": dataclasses.asdict(outcome.seen),
        "result": errand_facts(outcome.errand),
        "zero_token_call": errand_facts(outcome.cached) if outcome.cached else None,
        "log": list(outcome.log),
        "metrics_url": outcome.metrics_url,
        "metrics": dict(outcome.metrics),
    }


def errand_facts(errand: Errand) -> dict[str, Any]:
    """Collect the events of one invocation."""
    return {**dataclasses.asdict(errand), "synthetic": errand.synthetic, "halt": errand.halt}
