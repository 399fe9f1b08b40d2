"""A program that sets limits in code and evaluates results."""

from __future__ import annotations

import sys

from strands import Agent

import otel_limits
from otel_limits import (
    ConfigurationError,
    LimitReachedError,
    Limits,
    LimitsPlugin,
    MaxTurnsReachedException,
    QuotaExceededError,
    Remaining,
    Stop,
)
from otel_limits.testing import ScriptedModel, endless, uses


def make() -> Agent:
    """Return an agent with its own limits."""
    own = LimitsPlugin(Limits(max_turns=2), action="halt", tree=Limits(max_turns=9))
    model = ScriptedModel(endless(uses("search")))
    return Agent(model=model, plugins=[own], callback_handler=None)


def switch_on() -> list[str]:
    """Limit all agents. Return the mistakes in the settings."""
    caps = Limits(max_turns=30, max_cost_usd=0.5, max_calls_per_tool={"search": 20})
    try:
        otel_limits.enable(max_turns=5, max_cost_usd=0.5)
        otel_limits.enable(caps, action="wrap_up", tree=Limits(max_token_budget=100_000))
    except ConfigurationError as error:
        return list(error.mistakes)
    return []


def describe(agent: Agent) -> str:
    """Call an agent and describe the end of its invocation."""
    try:
        result = agent("Find it")
    except MaxTurnsReachedException as error:
        return f"{error.turns} of {error.max_turns}"
    except QuotaExceededError as error:
        left = error.stop.quota if error.stop is not None else None
        return "" if left is None else f"again in {left.retry_after_seconds} s"
    except LimitReachedError as error:
        return f"{error.observed} of {error.cap}"
    stop: Stop | None = otel_limits.stop_of(result)
    if stop is None or stop.breach is None:
        return "finished"
    is_model = not otel_limits.is_synthetic(dict(result.message))
    return (
        f"{stop.reason} at {stop.breach.limit}, {stop.breach.origin}, {stop.usage.total} {is_model}"
    )


async def shut_down() -> str:
    """Read a quota, kill agents and disable otel-limits."""
    now: Remaining = otel_limits.remaining("tenants", baggage={"tenant.id": "acme"})
    later: Remaining = await otel_limits.remaining_async("tenants", agent="researcher")
    ended: int = otel_limits.kill(agent="research-*")
    otel_limits.flush()
    otel_limits.disable()
    return f"{now.quota}: {now.left} of {now.limit}, {later.used} used, {ended} ended"


if __name__ == "__main__":
    sys.stdout.write(f"{describe(make())}\n")
