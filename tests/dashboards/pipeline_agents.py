"""Agents with scripted counts: `python -m tests.dashboards.pipeline_agents`.

Twenty agents on four models, of five kinds: one ends naturally, and one each is halted by turns,
halted by tokens, raises at iterations, or is only observed. The process prints `ready`. For each
line it reads, a list of agent numbers, it invokes these agents and prints `played`; for `stuck` it
starts an invocation that hangs in its first tool, and prints `hanging`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from strands import Agent, tool

import otel_limits
from otel_limits.testing import Answer, ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_limits.core.policy import Action

AGENTS: Final = 20
MODELS: Final = 4
INPUT, OUTPUT = 10, 5
"""Tokens of every model call."""

STUCK: Final = "stuck"
"""The agent whose process is killed in its tool."""

PRICES: Final = {f"model-{number}": (100 * (number + 1), 500) for number in range(MODELS)}
POLICY: Final = "models:\n" + "".join(
    f"  {model}: {{price: {{input: {read}, output: {written}}}}}\n"
    for model, (read, written) in PRICES.items()
)
"""USD per million tokens."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How the invocations of an agent end."""

    reason: str
    action_label: str
    calls: int
    """Model calls, each of which is a turn."""
    tools: int
    limits: otel_limits.Limits
    action: Action = "halt"


KINDS: Final = (
    Kind(
        reason="end_turn",
        action_label="none",
        calls=2,
        tools=1,
        limits=otel_limits.Limits(max_turns=9),
    ),
    Kind(
        reason="max_turns",
        action_label="halted",
        calls=3,
        tools=3,
        limits=otel_limits.Limits(max_turns=3),
    ),
    Kind(
        reason="max_token_budget",
        action_label="halted",
        calls=2,
        tools=2,
        limits=otel_limits.Limits(max_token_budget=2 * (INPUT + OUTPUT)),
    ),
    Kind(
        reason="max_iterations",
        action_label="raised",
        calls=2,
        tools=2,
        limits=otel_limits.Limits(max_iterations=2),
        action="raise",
    ),
    Kind(
        reason="max_turns",
        action_label="observed",
        calls=3,
        tools=2,
        limits=otel_limits.Limits(max_turns=2),
        action="observe",
    ),
)


def kind_of(number: int) -> Kind:
    """Return the kind of an agent."""
    return KINDS[number % len(KINDS)]


def agent_of(number: int) -> str:
    """Return the name of an agent."""
    return f"agent-{number:02}"


def model_of(number: int) -> str:
    """Return the ID of its model."""
    return f"model-{number % MODELS}"


def dollars(model: str, calls: int) -> float:
    """Return the cost of some calls."""
    read, written = PRICES[model]
    return calls * (INPUT * read + OUTPUT * written) / 1e6


@tool
def search() -> str:
    """Search."""
    return "nothing"


@tool
def wait() -> str:
    """Wait until the process is killed."""
    send("hanging")
    threading.Event().wait()
    return "never"


def script_of(kind: Kind) -> Iterable[Answer]:
    """Return the answers of the model: endless where it is halted."""
    if kind.action_label in ("none", "observed"):
        return [*[uses("search")] * kind.tools, says("done")]
    return endless(uses("search"))


def stage() -> Iterator[Agent]:
    """Create every agent."""
    for number in range(AGENTS):
        kind = kind_of(number)
        yield Agent(
            model=ScriptedModel([], model_id=model_of(number)),
            tools=[search],
            name=agent_of(number),
            plugins=[otel_limits.LimitsPlugin(kind.limits, action=kind.action)],
            callback_handler=None,
        )


def play(agents: list[Agent], number: int) -> None:
    """Invoke one agent with an empty history."""
    agent = agents[number]
    agent.messages.clear()
    agent.model = ScriptedModel(script_of(kind_of(number)), model_id=model_of(number))
    try:
        agent("go")
    except otel_limits.LimitReachedError:
        if kind_of(number).action_label != "raised":
            raise


def hang() -> None:
    """Start an invocation that never ends."""
    model = ScriptedModel([uses("wait")], model_id="model-0")
    agent = Agent(model=model, tools=[wait], name=STUCK, callback_handler=None)
    threading.Thread(target=agent, args=("go",), daemon=True).start()


def main() -> None:
    """Execute one command per line."""
    agents = list(stage())
    send("ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command == STUCK:
            hang()
        else:
            for number in command:
                play(agents, number)
            send("played")


def send(word: str) -> None:
    """Write a line for the test."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
