"""A simulated invocation, as the events that a real one publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2s
from random import Random
from typing import TYPE_CHECKING, Final

from otel_limits.core.events import (
    ActionTaken,
    Event,
    Invocation,
    ModelCall,
    Started,
    Stop,
    ToolCall,
    ToolStatus,
)
from otel_limits.core.limits import origins_of
from otel_limits.core.policy import Verdict
from otel_limits.core.texts import for_operator
from otel_limits.core.usage import NO_COST, NO_USAGE, Usage

if TYPE_CHECKING:
    from otel_limits.core.limits import Breach, Limits
    from otel_limits.core.price import Price

TENANT: Final = "tenant.id"
"""The column that OTEL_LIMITS_AUDIT_KEYS would configure."""
PRICES: Final = "demo"
"""The recorded price source."""

UNREPORTED: Final = 0.01
"""Share of calls without reported usage, which is then estimated."""
FAILING: Final = 0.04
REPEATING: Final = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and its price."""

    name: str
    provider: str
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """How an unsuccessful invocation ended."""

    turns: int
    reason: str
    action: ActionTaken = "none"
    breach: Breach | None = None
    is_stuck: bool = False
    """Whether it repeated one tool call without progress."""
    limits: Limits | None = None
    """Its limits, if they differ from those of its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent and its daily workload."""

    name: str
    model: Model
    tools: Sequence[str]
    weekday: int
    """Invocations on each day from Monday to Friday."""
    weekend: int
    opens: int
    """Hour of its first invocation of the day, in UTC."""
    turns: Sequence[int]
    """Minimum and maximum."""
    prompt: int
    """Tokens of the first request, including instructions and tools."""
    result: int
    """Approximate tokens of a turn's tool results."""
    limits: Limits
    tenants: Sequence[str] = ("internal",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The properties of an invocation before its events are generated."""

    agent: Agent
    at: float
    turns: int
    tenant: str
    limits: Limits
    incident: Incident | None = None
    sub_agents: Sequence[Plan] = ()
    """Invocations it starts, one per turn except the last."""


@dataclass(slots=True)
class RunState:
    """The state of an invocation while its events are generated."""

    at: float
    calls: list[ModelCall] = field(default_factory=list)
    tool_calls: int = 0
    prompt: int = 0
    """Tokens of the previous request."""
    after: Mapping[str, int] = field(default_factory=dict)
    """The tools whose results are in the next request."""

    @property
    def usage(self) -> Usage:
        """Total usage of all calls."""
        parts = ("input", "output", "cache_read", "cache_write")
        return Usage(
            **{part: sum(getattr(call.usage, part) for call in self.calls) for part in parts}
        )


def invocation_events(
    plan: Plan, chance: Random, parent: Invocation | None = None
) -> Iterator[Event]:
    """Yield the events of an invocation and its sub-agents."""
    invocation = make_invocation(plan, chance, parent)
    is_new = bool(plan.limits.max_iterations)  # its team observes the preset first
    yield Started(
        invocation=invocation,
        limits=plan.limits,
        action="observed" if is_new else "halted",
        configured_action="observe" if is_new else "halt",
        origins=origins_of(plan.limits, "preset recommended" if is_new else "limits.yaml:4"),
        unsampled=False,
        attributes={TENANT: plan.tenant},
        at=plan.at,
    )
    done = RunState(plan.at)
    for turn in range(1, plan.turns + 1):
        yield model_call(plan, invocation, turn, done, chance)
        # A runaway ends after its tools, without an answer.
        is_last = turn == plan.turns and not (plan.incident and plan.incident.is_stuck)
        if turn <= len(plan.sub_agents):
            yield from invocation_events(plan.sub_agents[turn - 1], chance, invocation)
        yield from () if is_last else tool_calls(plan, invocation, turn, done, chance)
    if plan.incident is not None and plan.incident.reason == "error":
        yield failed_call(invocation, done)
    yield stop_event(plan, invocation, done)


def make_invocation(plan: Plan, chance: Random, parent: Invocation | None) -> Invocation:
    """Create an invocation with reproducible IDs, which documentation pages can refer to."""
    identity = f"{chance.getrandbits(128):032x}"
    return Invocation(
        agent=plan.agent.name,
        id=identity,
        root_id=parent.root_id if parent else identity,
        parent_id=parent.id if parent else None,
        trace_id=parent.trace_id if parent else f"{chance.getrandbits(128):032x}",
        span_id=f"{chance.getrandbits(64):016x}",
    )


def model_call(
    plan: Plan, invocation: Invocation, turn: int, done: RunState, chance: Random
) -> ModelCall:
    """Create a model call."""
    model = plan.agent.model
    usage = draw_usage(plan.agent, turn, done.prompt, chance)
    is_reported = chance.random() >= UNREPORTED
    seconds = seconds_of_call(usage)
    done.at += seconds
    call = ModelCall(
        invocation=invocation, number=turn, model=model.name,
        kind="measured" if is_reported else "estimated", usage=usage, estimated=not is_reported,
        span_id=f"{chance.getrandbits(64):016x}", seconds=seconds,
        price=model.price.of(usage), price_source=PRICES, price_version="2026-11",
        cache_saved=model.price.saved_by_cache(usage), provider=model.provider,
        reported=usage if is_reported else None,
        reported_total=usage.total if is_reported else None,
        turn=turn, iteration=turn, after_tools=done.after, at=done.at,
    )  # fmt: skip
    done.calls.append(call)
    done.prompt = usage.input
    done.after = {}
    return call


def draw_usage(agent: Agent, turn: int, last: int, chance: Random) -> Usage:
    """Draw the usage of a call: its prompt has the conversation and the new tool results.

    Args:
        agent: The agent.
        turn: The number of the call, from 1.
        last: Tokens of the previous prompt.
        chance: The source of randomness.
    """
    output = 60 + int(240 * chance.random())
    prompt = last + agent.result // 2 + int(agent.result * chance.random())
    prompt = agent.prompt if turn == 1 else prompt
    if agent.model.price.cache_write is None:
        return Usage(input=prompt, output=output)
    return Usage(input=prompt, output=output, cache_read=last, cache_write=prompt - last)


def seconds_of_call(usage: Usage) -> float:
    """Return the duration of a call: 0.4 s to the first token, then 80 tokens per second."""
    return round(0.4 + usage.output / 80, 3)


def failed_call(invocation: Invocation, done: RunState) -> ModelCall:
    """Create the failed and unbilled model call that ended an invocation."""
    last = done.calls[-1]
    done.at += 1.0
    call = ModelCall(
        invocation=invocation, number=last.number + 1, model=last.model, kind="failed",
        usage=NO_USAGE, estimated=False, span_id=last.span_id, seconds=1.0, provider=last.provider,
        turn=last.turn + 1, iteration=last.iteration + 1, after_tools=done.after, at=done.at,
    )  # fmt: skip
    done.calls.append(call)
    return call


def tool_calls(
    plan: Plan, invocation: Invocation, turn: int, done: RunState, chance: Random
) -> Iterator[ToolCall]:
    """Yield the tool call of a turn."""
    drawn = draw_tool(plan, chance)
    done.at += drawn.seconds
    done.tool_calls += 1
    done.after = {drawn.tool: 1}
    # Equal fingerprints mark repeated calls.
    identity = f"{invocation.id} {drawn.tool} {'' if drawn.is_again else done.tool_calls}"
    yield ToolCall(
        invocation=invocation,
        number=done.tool_calls,
        tool=drawn.tool,
        status=drawn.status,
        seconds=drawn.seconds,
        fingerprint=blake2s(identity.encode(), digest_size=16).hexdigest(),
        turn=turn,
        at=done.at,
    )


@dataclass(frozen=True, slots=True)
class DrawnTool:
    """A tool call before it is made."""

    tool: str
    status: ToolStatus
    is_again: bool
    """Whether it has the arguments of an earlier call."""
    seconds: float


def draw_tool(plan: Plan, chance: Random) -> DrawnTool:
    """Draw the tool call of a turn; a stuck agent repeats that of its last tool."""
    is_stuck = plan.incident is not None and plan.incident.is_stuck
    tool = plan.agent.tools[-1 if is_stuck else int(len(plan.agent.tools) * chance.random())]
    status: ToolStatus = "error" if chance.random() < FAILING and not is_stuck else "success"
    is_again = is_stuck or (chance.random() < REPEATING and status == "success")
    return DrawnTool(tool, status, is_again, round(0.1 + 1.5 * chance.random(), 3))


def stop_event(plan: Plan, invocation: Invocation, done: RunState) -> Stop:
    """Create the stop event, with the totals of all calls."""
    incident = plan.incident
    costs = [call.price or NO_COST for call in done.calls]
    sentence = ""
    if incident is not None:
        breaches = (incident.breach,) if incident.breach else ()
        sentence = for_operator(
            plan.agent.name, Verdict(incident.reason, breaches), incident.action
        )
    return Stop(
        reason=incident.reason if incident else "end_turn",
        action=incident.action if incident else "none",
        breach=incident.breach if incident else None,
        sentence=sentence,
        turns=plan.turns,
        usage=done.usage,
        agent=plan.agent.name,
        trace_id=invocation.trace_id,
        invocation_id=invocation.id,
        cycles=len(done.calls),
        model_calls=len(done.calls),
        started=plan.at,
        seconds=done.at - plan.at,
        tool_calls=done.tool_calls,
        cost=sum(costs, Decimal(0)),
        invocation=invocation,
    )
