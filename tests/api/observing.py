"""A program that is told every fact."""

from __future__ import annotations

import otel_limits
from otel_limits import Fact, Halt, ModelCall, Observer, Stop, ToolCall, Usage, Warned

TOKENS: dict[str, int] = {}
LINES: list[str] = []


def observe(fact: Fact) -> None:
    """Add up tokens by agent, and say what was halted."""
    if isinstance(fact, ModelCall):
        usage: Usage = fact.usage
        agent = fact.invocation.agent
        TOKENS[agent] = TOKENS.get(agent, 0) + usage.total
    elif isinstance(fact, Halt):
        LINES.append(fact.sentence)
    elif isinstance(fact, Warned):
        LINES.append(f"{fact.level.limit} is used to {fact.level.ratio:.0%}")
    elif isinstance(fact, ToolCall):
        LINES.append(f"{fact.tool}: {fact.status}, {fact.seconds or 0.0} s")
    elif isinstance(fact, Stop):
        LINES.append(f"{fact.reason} after {fact.turns} turns and {fact.cost} USD")


OBSERVER: Observer = observe

if __name__ == "__main__":
    otel_limits.enable(observers=[OBSERVER])
