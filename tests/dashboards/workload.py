"""Real agents that produce every value of a dashboard: `python -m tests.dashboards.workload`.

Every agent has a script, so its metrics are known beforehand: `produces`. The process prints `warm`
when every series exists, and plays one round for each line it reads.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from strands import Agent, tool
from strands.telemetry.tracer import Tracer

import otel_limits
from otel_limits.quotas.estimates import FIRST_OUTPUT
from otel_limits.testing import Answer, ScriptedModel, endless, fails, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from otel_limits.core.policy import Action

PRICED, UNPRICED = "priced-model", "unpriced-model"

SPENDABLE, RESEARCHABLE, WAITABLE = 60, 30_000, 20_000
"""Limits of the quotas, in USD and tokens: more than some minutes of rounds use."""

RESERVED = 164 + FIRST_OUTPUT
"""Tokens reserved by the call of `patient` in flight: its estimated input, and unlimited output."""

POLICY = f"""
models:
  priced-model: {{price: {{input: 100, output: 500}}}}
quotas:
  spend: {{usd: {SPENDABLE}, window: P365D, key: model, where: {{agent: "[!p]*"}}}}
  research: {{tokens: {RESEARCHABLE}, window: P365D, key: agent, where: {{agent: research}}}}
  guests: {{tokens: 50, window: P365D, where: {{agent: guest}}}}
  waiting:
    {{tokens: {WAITABLE}, window: P365D, where: {{agent: "p[ao]*"}},
      on_exceeded: wait, max_wait: 1s}}
"""
"""Policy file: USD per million tokens, the same for cached ones.

No quota resets during a test, and no call of `guest` fits into its quota. The single call of
`patient` holds a reservation for which the calls of `postponed` wait; no other agent shares it, so
all other rounds are equal.
"""

CALL = {"inputTokens": 100, "outputTokens": 20, "totalTokens": 120}
CACHED = CALL | {"cacheReadInputTokens": 60, "cacheWriteInputTokens": 10}
ZERO = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}


@dataclass(frozen=True, kw_only=True)
class Produces:
    """Metrics of one invocation."""

    reason: str
    action: str = "none"
    turns: int
    calls: Mapping[str, int]
    """Model calls by kind."""
    tools: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Tool calls by name and status."""
    refusals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Tool calls at a cap by name and action."""
    input: int
    output: int
    cache_read: int = 0
    cache_write: int = 0
    warnings: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By limit and threshold."""
    overshoot: tuple[str, int] | None = None
    """Token limit that halted it, and the tokens above it."""
    used: Mapping[str, float] = field(default_factory=dict)
    """Utilization of each limit."""
    unsampled: bool = False


@dataclass(frozen=True, kw_only=True)
class Actor:
    """One agent with its limits, its script and its metrics per invocation."""

    name: str
    model: str
    script: Callable[[], Iterable[Answer]]
    limits: otel_limits.Limits = field(default_factory=otel_limits.Limits)
    action: Action = "halt"
    output_cap: int | None = None
    produces: Produces


@tool
def search(query: str = "") -> str:
    """Search for a query."""
    return f"nothing about {query!r}"


@tool
def fetch(url: str = "") -> str:
    """Fetch a page."""
    message = f"{url!r} cannot be fetched"
    raise ValueError(message)


ACTORS = (
    Actor(
        name="research",
        model=PRICED,
        script=lambda: endless(uses("search", usage=CACHED)),
        limits=otel_limits.Limits(max_turns=4),
        produces=Produces(
            reason="max_turns",
            action="halted",
            turns=4,
            calls={"measured": 4},
            tools={("search", "success"): 4},
            input=400,
            output=80,
            cache_read=240,
            cache_write=40,
            warnings={("max_turns", "0.5"): 1, ("max_turns", "0.8"): 1},
            used={"max_turns": 1.0},
        ),
    ),
    Actor(
        name="research",
        model=PRICED,
        script=lambda: [uses("search", usage=CACHED), says("done", usage=CACHED)],
        limits=otel_limits.Limits(max_turns=4),
        produces=Produces(
            reason="end_turn",
            turns=2,
            calls={"measured": 2},
            tools={("search", "success"): 1},
            input=200,
            output=40,
            cache_read=120,
            cache_write=20,
            warnings={("max_turns", "0.5"): 1},
            used={"max_turns": 0.5},
        ),
    ),
    Actor(
        name="coder",
        model=PRICED,
        script=lambda: endless(uses("search", usage=CALL)),
        limits=otel_limits.Limits(max_iterations=3),
        action="raise",
        produces=Produces(
            reason="max_iterations",
            action="raised",
            turns=3,
            calls={"measured": 3},
            tools={("search", "success"): 3},
            input=300,
            output=60,
            warnings={("max_iterations", "0.5"): 1, ("max_iterations", "0.8"): 1},
            used={"max_iterations": 1.0},
        ),
    ),
    Actor(
        name="planner",
        model=UNPRICED,
        script=lambda: endless(uses("search", usage=CALL)),
        limits=otel_limits.Limits(max_token_budget=200),
        produces=Produces(
            reason="max_token_budget",
            action="halted",
            turns=2,
            calls={"measured": 2},
            tools={("search", "success"): 2},
            input=200,
            output=40,
            warnings={("max_token_budget", "0.5"): 1, ("max_token_budget", "0.8"): 1},
            overshoot=("max_token_budget", 40),
            used={"max_token_budget": 1.2},
        ),
    ),
    Actor(
        name="writer",
        model=PRICED,
        script=lambda: [uses("fetch", usage=CACHED), says("done", usage=CACHED)],
        limits=otel_limits.Limits(max_turns=10),
        produces=Produces(
            reason="end_turn",
            turns=2,
            calls={"measured": 2},
            tools={("fetch", "error"): 1},
            input=200,
            output=40,
            cache_read=120,
            cache_write=20,
            used={"max_turns": 0.2},
        ),
    ),
    Actor(
        name="trial",
        model=PRICED,
        script=lambda: [*[uses("search", usage=CALL)] * 3, says("done", usage=CALL)],
        limits=otel_limits.Limits(max_turns=2, max_calls_per_tool={"search": 2}),
        action="observe",
        produces=Produces(
            reason="max_turns",
            action="observed",
            turns=4,
            calls={"measured": 4},
            tools={("search", "success"): 3},
            refusals={("search", "observed"): 1},
            input=400,
            output=80,
            warnings={("max_turns", "0.5"): 1, ("max_turns", "0.8"): 1},
            used={"max_turns": 2.0},
        ),
    ),
    Actor(
        name="capped",
        model=UNPRICED,
        script=lambda: [uses("search", "search", usage=CALL), says("done", usage=CALL)],
        limits=otel_limits.Limits(max_calls_per_tool={"search": 1}),
        produces=Produces(
            reason="end_turn",
            turns=2,
            calls={"measured": 2},
            tools={("search", "success"): 1, ("search", "refused"): 1},
            refusals={("search", "refused"): 1},
            input=200,
            output=40,
        ),
    ),
    Actor(
        name="looper",
        model=PRICED,
        script=lambda: endless(uses("search", arguments={"query": "same"}, usage=CALL)),
        limits=otel_limits.Limits(max_identical_tool_calls=3),
        produces=Produces(
            reason="loop_detected",
            action="halted",
            turns=3,
            calls={"measured": 3},
            tools={("search", "success"): 3},
            input=300,
            output=60,
            warnings={
                ("max_identical_tool_calls", "0.5"): 1,
                ("max_identical_tool_calls", "0.8"): 1,
            },
            used={"max_identical_tool_calls": 1.0},
        ),
    ),
    Actor(
        name="quiet",
        model=UNPRICED,
        script=lambda: [
            uses("search", usage=None),
            uses("search", usage=CALL),
            says("", usage=ZERO),
        ],
        produces=Produces(
            reason="end_turn",
            turns=3,
            calls={"zero_token": 1, "measured": 1, "unmeasured": 1},
            tools={("search", "success"): 2},
            input=100,
            output=20,
        ),
    ),
    Actor(
        name="broken",
        model=UNPRICED,
        script=lambda: [fails(RuntimeError("the provider is down"))],
        produces=Produces(reason="error", turns=0, calls={"failed": 1}, input=0, output=0),
    ),
    Actor(
        name="hidden",
        model=PRICED,
        script=lambda: [says("done", usage=CALL)],
        produces=Produces(
            reason="end_turn", turns=1, calls={"measured": 1}, input=100, output=20, unsampled=True
        ),
    ),
    Actor(
        name="guest",
        model=PRICED,
        script=lambda: [says("done", usage=CALL)],
        output_cap=100,
        produces=Produces(
            reason="quota_exceeded", action="halted", turns=0, calls={}, input=0, output=0
        ),
    ),
    Actor(
        name="postponed",
        model=PRICED,
        script=lambda: [says("done", usage=CALL)],
        output_cap=16_000,
        produces=Produces(
            reason="quota_exceeded", action="halted", turns=0, calls={}, input=0, output=0
        ),
    ),
    Actor(
        name="left",
        model=PRICED,
        script=lambda: endless(uses("search", usage=CALL)),
        limits=otel_limits.Limits(max_turns=5),
        produces=Produces(
            reason="aborted",
            turns=1,
            calls={"measured": 1},
            tools={("search", "success"): 1},
            input=100,
            output=20,
            used={"max_turns": 0.2},
        ),
    ),
)
"""Needs OTEL_LIMITS_UNMEASURED=ignore; otherwise the unmeasured call of `quiet` is estimated."""

SETTINGS = {
    "OTEL_LIMITS_WARN_AT": "0.5,0.8",
    "OTEL_LIMITS_UNMEASURED": "ignore",
    "OTEL_LIMITS_UNPRICED": "warn",  # the only limit of `quiet` is a quota in USD
    "OTEL_LIMITS_METRICS_MAX_AGENTS": "16",
    "OTEL_PYTHON_TRACER_PROVIDER": "otel_limits",
    "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=stage,service.version=1.2.3",
}
"""Environment of the process, in addition to a policy file and a port."""


class Stage:
    """The agents of all actors."""

    def __init__(self, actors: Iterable[Actor] = ACTORS) -> None:
        """Create an agent for each actor."""
        self.agents = [(actor, self._make(actor)) for actor in actors]
        self.released = threading.Event()

    def _make(self, actor: Actor) -> Agent:
        plugin = otel_limits.LimitsPlugin(actor.limits, action=actor.action)
        agent = Agent(
            model=ScriptedModel([], model_id=actor.model),
            tools=[search, fetch],
            name=actor.name,
            plugins=[plugin],
            callback_handler=None,
        )
        if actor.produces.unsampled:
            agent.tracer = Tracer()
            agent.tracer.tracer = trace.NoOpTracer()
        return agent

    def play_round(self) -> dict[str, str]:
        """Invoke all agents; return the trace IDs of halted ones."""
        return {
            actor.name: stop.trace_id
            for actor, agent in self.agents
            if (stop := play(actor, agent)) is not None and stop.trace_id is not None
        }

    def hold_one(self) -> threading.Thread:
        """Keep one invocation in its second model call until `released` is set."""

        def script() -> Iterator[Answer]:
            yield uses("search", usage=CALL)
            self.released.wait(1800)
            yield says("done", usage=CALL)

        agent = Agent(
            model=ScriptedModel(script(), model_id=PRICED),
            tools=[search],
            name="patient",
            callback_handler=None,
        )
        thread = threading.Thread(target=agent, args=("wait",), daemon=True)
        thread.start()
        return thread


def play(actor: Actor, agent: Agent) -> otel_limits.Stop | None:
    """Invoke one agent with an empty history, and check how it ends."""
    model = ScriptedModel(actor.script(), model_id=actor.model)
    # With a known maximum, a call that cannot fit is refused before it is made.
    model.update_config(max_tokens=actor.output_cap)
    agent.model = model
    agent.messages.clear()
    if actor.produces.reason == "aborted":
        reason, stop = asyncio.run(leave(agent)), None
    else:
        reason, stop = ended(agent)
    expected = "end_turn" if actor.action == "observe" else actor.produces.reason
    calls = sum(actor.produces.calls.values())
    if (reason, model.calls) != (expected, calls):
        message = f"{actor.name} ended with {reason} after {model.calls} calls, not as {actor}."
        raise AssertionError(message)
    return stop


def ended(agent: Agent) -> tuple[str, otel_limits.Stop | None]:
    """Invoke an agent; return its stop reason and its halt."""
    try:
        result = agent("go")
        return str(result.stop_reason), otel_limits.stop_of(result)
    except otel_limits.LimitReachedError as error:
        return error.stop.reason if error.stop else "limit", error.stop
    except Exception:  # noqa: BLE001  the actor whose provider is down
        return "error", None


async def leave(agent: Agent) -> str:
    """Invoke an agent and close its stream after the first tool."""
    stream: Any = agent.stream_async("go")
    async for event in stream:
        message = event.get("message", {})
        if any("toolResult" in block for block in message.get("content", ())):
            break
    await stream.aclose()
    return "aborted"


def fail_on_stops(event: otel_limits.Event) -> None:
    """Fail at the end of each invocation of one agent."""
    if isinstance(event, otel_limits.Stop) and event.agent == "broken":
        message = "this observer is broken"
        raise ValueError(message)


def main() -> None:
    """Play one round so every series exists, then one per line of standard input."""
    otel_limits.enable(observers=[fail_on_stops])
    stage = Stage()
    stage.hold_one()
    stage.play_round()
    send({"event": "warm"})
    for _ in sys.stdin:
        send({"event": "played", "traces": stage.play_round()})
    stage.released.set()


def send(message: Mapping[str, Any]) -> None:
    """Write a message for the test."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
