"""A program with an observer."""

from __future__ import annotations

import otel_limits
from otel_limits import Event, Halt, LimitWarning, ModelCall, Observer, Stop, ToolCall, Usage

TOKENS: dict[str, int] = {}
LINES: list[str] = []


def observe(event: Event) -> None:
    """Sum tokens by agent and collect a line for each event."""
    if isinstance(event, ModelCall):
        usage: Usage = event.usage
        agent = event.invocation.agent
        TOKENS[agent] = TOKENS.get(agent, 0) + usage.total
    elif isinstance(event, Halt):
        LINES.append(event.sentence)
    elif isinstance(event, LimitWarning):
        LINES.append(f"{event.level.limit} is used to {event.level.ratio:.0%}")
    elif isinstance(event, ToolCall):
        LINES.append(f"{event.tool}: {event.status}, {event.seconds or 0.0} s")
    elif isinstance(event, Stop):
        LINES.append(f"{event.reason} after {event.turns} turns and {event.cost} USD")


OBSERVER: Observer = observe

if __name__ == "__main__":
    otel_limits.enable(observers=[OBSERVER])
