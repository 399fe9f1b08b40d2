"""The sample fleet as real agents, whose models answer from scripts: a day takes a minute."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import baggage, context

from otel_limits.bindings.script import Answer, ScriptedRun, fails, says, uses
from otel_limits.core.limits import LIMITS, Limits
from otel_limits.demo.sample_fleet import (
    AGENTS,
    DATA,
    FLEET,
    INCIDENTS,
    SATURDAY,
    WEEKS,
    plan_invocation,
)
from otel_limits.demo.sample_invocation import (
    TENANT,
    Agent,
    Incident,
    Plan,
    draw_tool,
    draw_usage,
    seconds_of_call,
)
from otel_limits.runs.registry import kill

if TYPE_CHECKING:
    from otel_limits.bindings.framework import Framework
    from otel_limits.core.usage import Usage

DAY_SECONDS: Final = 60.0
DAYS_OF_WEEK: Final = 7
LONGEST_STOP_SECONDS: Final = 10.0
BURNING: Final = {
    agent: incident for (agent, *_), incident in INCIDENTS.items() if incident.action == "observed"
}
"""Agents that are always stuck, as their limits are only observed."""


def live_policy() -> dict[str, Any]:
    """Return the policy of the fleet: limits, prices and quotas."""
    live = DATA["live"]
    agents: dict[str, Any] = {
        agent.name: {"limits": limits_json(agent.limits)}
        | ({"action": "observe"} if agent.name in BURNING else {})
        for agent in AGENTS.values()
    }
    return {
        "agents": agents | live["agents"],
        "models": {
            name: {"price": {kind: float(usd) for kind, usd in model["price"].items()}}
            for name, model in DATA["models"].items()
        },
        "quotas": live["quotas"],
    }


def usage_json(usage: Usage) -> dict[str, int]:
    """Return the usage that a model reports, with the names of `Answer.usage`."""
    cached = {"cacheReadInputTokens": usage.cache_read, "cacheWriteInputTokens": usage.cache_write}
    return {
        "inputTokens": usage.input,
        "outputTokens": usage.output,
        "totalTokens": usage.total,
        **{name: count for name, count in cached.items() if count},
    }


def limits_json(limits: Limits) -> dict[str, Any]:
    """Return the limits that are set."""
    return {name: cap for name in LIMITS if (cap := getattr(limits, name)) is not None}


class FleetError(Exception):
    """An error of a tool or of a provider in the sample fleet."""


class LiveFleet:
    """The agents of the sample fleet, each in its own thread.

    Args:
        framework: Whose agents they are.
    """

    def __init__(self, framework: Framework) -> None:
        """Create the fleet; nothing runs before `start`."""
        self.framework = framework
        self.stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(agent, worker), daemon=True)
            for agent in FLEET
            for worker in range(DATA["live"]["workers"] if agent.name in BURNING else 1)
        ]

    def start(self) -> None:
        """Start the agents."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each agent answer immediately, and wait for all of them."""
        self.stopping.set()
        end = time.monotonic() + LONGEST_STOP_SECONDS
        for thread in self._threads:
            if thread.is_alive():  # not if it was interrupted before all were started
                thread.join(max(0.0, end - time.monotonic()))

    def _work(self, agent: Agent, worker: int) -> None:
        """Call an agent again and again until the fleet stops."""
        chance = Random(f"{agent.name} {worker}")  # noqa: S311  an example, not a secret
        next_at = time.monotonic()
        for plan, seconds in plans_of(agent, chance):
            if plan is not None:
                self.call(plan, chance)
            # An invocation may take longer than the time until the next one.
            next_at = max(next_at + seconds, time.monotonic())
            if self.stopping.wait(next_at - time.monotonic()):
                return

    def call(self, plan: Plan, chance: Random) -> None:
        """Call an agent for a tenant."""
        token = context.attach(baggage.set_baggage(TENANT, plan.tenant))
        try:
            # The framework may raise an error of the provider as another one.
            with contextlib.suppress(Exception):
                LiveInvocation(plan, chance, self).run()
        finally:
            context.detach(token)


def plans_of(agent: Agent, chance: Random) -> Iterator[tuple[Plan | None, float]]:
    """Yield the invocations of an agent, each with the seconds until the next one, forever.

    It begins with the day of the agent's first incident, as users do not watch for long.
    """
    days = (
        DAYS_OF_WEEK * week + weekday for name, week, weekday in INCIDENTS if name == agent.name
    )
    for day in itertools.count(min(days, default=0)):
        when = day // DAYS_OF_WEEK % WEEKS, day % DAYS_OF_WEEK
        planned = agent.weekend if when[1] >= SATURDAY else agent.weekday
        if not planned:
            yield None, DAY_SECONDS
        for number in range(planned):
            incident = INCIDENTS.get((agent.name, *when)) if number == 0 else None
            incident = BURNING.get(agent.name, incident)
            yield plan_invocation(agent, 0.0, chance, when, incident), DAY_SECONDS / planned


@dataclass(slots=True)
class LiveInvocation:
    """An invocation that follows a plan, unless it is halted."""

    plan: Plan
    chance: Random
    fleet: LiveFleet
    sub_agents: Iterator[Plan] = field(init=False)
    tool_seconds: float = 0.0
    is_failing: bool = False
    """Whether the next tool call fails."""

    def __post_init__(self) -> None:
        """Begin with the first sub-agent."""
        self.sub_agents = iter(self.plan.sub_agents)

    def run(self) -> None:
        """Run the agent."""
        agent = self.plan.agent
        self.fleet.framework.run_script(
            ScriptedRun(
                agent=agent.name,
                script=self.answers(),
                tools=dict.fromkeys(agent.tools, self.use_tool),
                model=agent.model.name,
            )
        )

    def answers(self) -> Iterator[Answer]:
        """Yield the answers of the model, each after the time that it takes."""
        incident, last = self.plan.incident, 0
        for turn in range(1, self.plan.turns + 1):
            usage = draw_usage(self.plan.agent, turn, last, self.chance)
            last = usage.input
            if self.fleet.stopping.wait(seconds_of_call(usage)):
                break
            reported = usage_json(usage)
            if turn == self.plan.turns and not (incident and incident.is_stuck):
                yield self.last_answer(incident, reported)
                return
            tool = draw_tool(self.plan, self.chance)
            self.tool_seconds, self.is_failing = tool.seconds, tool.status == "error"
            arguments = {"query": "" if tool.is_again else str(turn)}
            yield uses(tool.tool, arguments=arguments, usage=reported)
        if incident and incident.reason == "error" and not self.fleet.stopping.is_set():
            yield fails(FleetError("The prompt is too long."))
        yield says("Stopped.")

    def last_answer(self, incident: Incident | None, reported: Mapping[str, int]) -> Answer:
        """Return the answer after which an agent that is not stuck ends."""
        reason = incident.reason if incident else ""
        if reason == "killed":
            kill(agent=self.plan.agent.name)
        if reason == "error":
            return fails(FleetError("The provider is overloaded."))
        return says(
            "Done.", usage=reported, stop_reason="max_tokens" if reason == "max_tokens" else None
        )

    def use_tool(self) -> str:
        """Run a sub-agent, or take the time of a tool."""
        plan = next(self.sub_agents, None)
        if plan is not None:
            LiveInvocation(plan, self.chance, self.fleet).run()
        elif not self.fleet.stopping.wait(self.tool_seconds) and self.is_failing:
            raise FleetError("The tool has failed.")
        return "Nothing new."
