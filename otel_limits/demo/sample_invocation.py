"""One made-up invocation as the events that a real one would have told."""

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
from otel_limits.core.usage import NO_COST, NO_USAGE, Usage

if TYPE_CHECKING:
    from otel_limits.core.limits import Breach, Limits
    from otel_limits.core.price import Price

TENANT: Final = "tenant.id"
"""What OTEL_LIMITS_AUDIT_KEYS would name."""
PRICES: Final = "demo"
"""The source of prices: neither a policy file nor a list was asked."""

UNREPORTED: Final = 0.01
"""Share of the calls whose provider reported no usage, so that it was estimated."""
FAILING: Final = 0.04
REPEATING: Final = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, and what it costs."""

    name: str
    provider: str
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """How an invocation ended that did not end as it should."""

    turns: int
    reason: str
    action: ActionTaken = "none"
    breach: Breach | None = None
    is_stuck: bool = False
    """True when it called one tool again and again to no effect."""
    limits: Limits | None = None
    """Its limits, where they were not those that its agent had at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is drawn of an invocation before it is told."""

    agent: str
    model: Model
    tools: Sequence[str]
    at: float
    turns: int
    prompt: int
    result: int
    tenant: str
    limits: Limits
    incident: Incident | None = None
    sub_agents: Sequence[Plan] = ()
    """The agents that it asks: one in each turn but the last."""


@dataclass(slots=True)
class RunState:
    """What an invocation has used so far."""

    at: float
    calls: list[ModelCall] = field(default_factory=list)
    tool_calls: int = 0
    prompt: int = 0
    """Tokens of the request before."""
    after: Mapping[str, int] = field(default_factory=dict)
    """The tools whose results the next request has."""

    @property
    def usage(self) -> Usage:
        """The tokens of all calls."""
        parts = ("input", "output", "cache_read", "cache_write")
        return Usage(
            **{part: sum(getattr(call.usage, part) for call in self.calls) for part in parts}
        )


def invocation_events(
    story: Plan, chance: Random, parent: Invocation | None = None
) -> Iterator[Event]:
    """Tell an invocation from its beginning to its end, with those that it starts."""
    invocation = make_invocation(story, chance, parent)
    yield Started(
        invocation=invocation,
        limits=story.limits,
        action="observed" if story.limits.max_iterations else "halted",
        unsampled=False,
        attributes={TENANT: story.tenant},
        at=story.at,
    )
    done = RunState(story.at)
    for turn in range(1, story.turns + 1):
        yield model_call(story, invocation, turn, done, chance)
        # A runaway ends while its tools run, not with an answer.
        is_last = turn == story.turns and not (story.incident and story.incident.is_stuck)
        if turn <= len(story.sub_agents):
            yield from invocation_events(story.sub_agents[turn - 1], chance, invocation)
        yield from () if is_last else tool_calls(story, invocation, turn, done, chance)
    if story.incident is not None and story.incident.reason == "error":
        yield failed_call(invocation, done)
    yield stop_event(story, invocation, done)


def make_invocation(story: Plan, chance: Random, parent: Invocation | None) -> Invocation:
    """Give an invocation its ids."""
    # By the same chance as everything else: a page can name a trace of the example ledger.
    identity = f"{chance.getrandbits(128):032x}"
    return Invocation(
        agent=story.agent,
        id=identity,
        root_id=parent.root_id if parent else identity,
        parent_id=parent.id if parent else None,
        trace_id=parent.trace_id if parent else f"{chance.getrandbits(128):032x}",
        span_id=f"{chance.getrandbits(64):016x}",
    )


def model_call(
    story: Plan, invocation: Invocation, turn: int, done: RunState, chance: Random
) -> ModelCall:
    """Tell a model call: each request has all that was said before, and the new results."""
    output = 60 + int(240 * chance.random())
    prompt = done.prompt + story.result // 2 + int(story.result * chance.random())
    prompt = story.prompt if turn == 1 else prompt
    usage = Usage(
        input=prompt, output=output, **cache_usage(story.model.price, done.prompt, prompt)
    )
    is_reported = chance.random() >= UNREPORTED
    # 0.4 s to the first token, and then 80 tokens a second.
    seconds = round(0.4 + output / 80, 3)
    done.at += seconds
    call = ModelCall(
        invocation=invocation, number=turn, model=story.model.name,
        kind="measured" if is_reported else "unmeasured", usage=usage, estimated=not is_reported,
        span_id=f"{chance.getrandbits(64):016x}", seconds=seconds,
        price=story.model.price.of(usage), price_source=PRICES, price_version="2026-11",
        cache_saved=story.model.price.saved_by_cache(usage), provider=story.model.provider,
        reported=usage if is_reported else None,
        reported_total=usage.total if is_reported else None,
        turn=turn, iteration=turn, after_tools=done.after, at=done.at,
    )  # fmt: skip
    done.calls.append(call)
    done.prompt = prompt
    done.after = {}
    return call


def failed_call(invocation: Invocation, done: RunState) -> ModelCall:
    """Tell the model call that ended an invocation: the provider refused it, and bills nothing."""
    last = done.calls[-1]
    done.at += 1.0
    call = ModelCall(
        invocation=invocation, number=last.number + 1, model=last.model, kind="failed",
        usage=NO_USAGE, estimated=False, span_id=last.span_id, seconds=1.0, provider=last.provider,
        turn=last.turn + 1, iteration=last.iteration + 1, after_tools=done.after, at=done.at,
    )  # fmt: skip
    done.calls.append(call)
    return call


def cache_usage(price: Price, former: int, prompt: int) -> dict[str, int]:
    """Tell which part of a prompt is read from a cache, and which is put there."""
    if price.cache_write is None:
        return {}
    return {"cache_read": former, "cache_write": prompt - former}


def tool_calls(
    story: Plan, invocation: Invocation, turn: int, done: RunState, chance: Random
) -> Iterator[ToolCall]:
    """Tell the tool call of a turn."""
    is_stuck = story.incident is not None and story.incident.is_stuck
    # The last of its tools is the one with which an agent is stuck.
    tool = story.tools[-1 if is_stuck else int(len(story.tools) * chance.random())]
    status: ToolStatus = "error" if chance.random() < FAILING and not is_stuck else "success"
    is_again = is_stuck or (chance.random() < REPEATING and status == "success")
    seconds = round(0.1 + 1.5 * chance.random(), 3)
    done.at += seconds
    done.tool_calls += 1
    done.after = {tool: 1}
    # Equal hashes are what tells that a call was repeated to no effect.
    told_by = f"{invocation.id} {tool} {'' if is_again else done.tool_calls}"
    yield ToolCall(
        invocation=invocation,
        number=done.tool_calls,
        tool=tool,
        status=status,
        seconds=seconds,
        fingerprint=blake2s(told_by.encode(), digest_size=16).hexdigest(),
        turn=turn,
        at=done.at,
    )


def stop_event(story: Plan, invocation: Invocation, done: RunState) -> Stop:
    """Tell how it ended: the sums of its calls."""
    trouble = story.incident
    costs = [call.price or NO_COST for call in done.calls]
    return Stop(
        reason=trouble.reason if trouble else "end_turn",
        action=trouble.action if trouble else "none",
        breach=trouble.breach if trouble else None,
        turns=story.turns,
        usage=done.usage,
        agent=story.agent,
        trace_id=invocation.trace_id,
        invocation_id=invocation.id,
        cycles=len(done.calls),
        model_calls=len(done.calls),
        started=story.at,
        seconds=done.at - story.at,
        tool_calls=done.tool_calls,
        cost=sum(costs, Decimal(0)),
        invocation=invocation,
    )
