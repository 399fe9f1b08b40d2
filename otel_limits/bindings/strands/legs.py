"""Hooks of a leg, its model calls and its messages."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from otel_limits.bindings.strands.asking import (
    answer_of,
    declined_verdict,
    extension_of,
    is_unanswered,
)
from otel_limits.bindings.strands.halting import perform, perform_if_due
from otel_limits.bindings.strands.invocations import STATES, Live, is_direct, live_of
from otel_limits.bindings.strands.reading import request_of
from otel_limits.bindings.strands.spans import write_warnings
from otel_limits.core.faults import never_raises, never_raises_async

if TYPE_CHECKING:
    from strands.agent.agent import Agent
    from strands.hooks import (
        AfterInvocationEvent,
        AfterModelCallEvent,
        BeforeInvocationEvent,
        BeforeModelCallEvent,
        MessageAddedEvent,
    )
    from strands.types.content import Message


@never_raises("binding")
def before_leg(event: BeforeInvocationEvent) -> None:
    """Begin a leg; the first one keeps what the invocation began with."""
    live, agent = live_of(event.agent), event.agent
    if live is None or is_direct(agent):
        return
    live.run.leg()
    # Strands tells of each leg alike; what the first one began with is in `live` already.
    if not live.run.tally.cycles:
        return
    answer = answer_of(agent)  # of a hook that resumes our own question
    if answer is not None and answer is not live.answer:
        more = extension_of(answer.response)
        if more is not None:
            live.run.extend(more)
    STATES.of(agent).live[-1] = live.run.state = Live(
        live.run,
        weakref.ref(agent),
        agent.hooks,
        verdict=declined_verdict(answer),
        answer=answer or live.answer,
    )


@never_raises("binding")
def after_leg(event: AfterInvocationEvent) -> None:
    """A leg that was refused, or asks a human, is not resumed: nothing would come of it."""
    live = live_of(event.agent)
    if live is None or is_direct(event.agent):
        return
    if live.batch is not None:  # a hook asked a human before any tool ran
        batch, live.batch = live.batch, None
        for request in batch.requests:  # none of it began: its replay is admitted anew
            if request["toolUseId"] not in batch.refusals and not batch.denied:
                live.run.tools.give_back(request["name"])
    # A hook would resume for ever: each further leg would be refused as this one was.
    if live.refused or (event.resume is not None and is_unanswered(event)):
        event.resume = None


@never_raises("binding")
def before_model(event: BeforeModelCallEvent) -> None:
    """A response is asked for, whoever answers: a middleware can do so itself."""
    live = live_of(event.agent)
    if live is not None and not event.cancel:
        live.asked = True


@never_raises_async("quotas")
async def ask_gate(event: BeforeModelCallEvent) -> None:
    """Ask whether quotas let the call go out; a hook is the one place where we may wait."""
    live = live_of(event.agent)
    gate = live.run.runs.observers.gate if live is not None else None
    if live is not None and gate is not None and not event.cancel:
        request = request_of(live.run, event)
        live.against = await gate.admit(request) if request is not None else None


@never_raises_async("quotas")
async def tell_gate(event: AfterModelCallEvent) -> None:
    """Settle what was reserved; the call has been counted by now."""
    live = live_of(event.agent)
    gate = live.run.runs.observers.gate if live is not None else None
    if gate is not None and live is not None:
        await gate.settle(live.run.invocation.id)


@never_raises("binding")
def message_added(event: MessageAddedEvent) -> None:
    """Count a turn, or tag the message that a halt left."""
    live, message = live_of(event.agent), event.message
    if live is None or message["role"] != "assistant":
        return
    # Strands writes metadata into each response. What else an assistant says while none is asked
    # for is an earlier response, a denial or a halt.
    if not (live.asked and "metadata" in message):
        perform_if_due(event.agent, live, message)
        return
    live.asked = False
    run = live.run
    run.turn()
    if run.policy.warn_at or run.loops is not None or live.wrapping is not None:
        _look_at_turn(event.agent, live, message)


def _look_at_turn(agent: Agent, live: Live, message: Message) -> None:
    """Do what some limits ask for after each response that was taken into the conversation."""
    if live.run.policy.warn_at:
        write_warnings(agent.trace_span, live.run.warn())
    if live.run.loops is not None:
        live.text = "".join(block.get("text", "") for block in message["content"])
    if live.wrapping is not None and not any("toolUse" in each for each in message["content"]):
        perform(agent, live, message, live.wrapping, "wrapped_up")
