"""Hooks for the tools of a realtime agent, which run while the model continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent, MessageAddedEvent

from otel_limits.bindings.strands.attach import FIRST, LAST
from otel_limits.bindings.strands.batch import RealtimeBatch, note_denial, note_run
from otel_limits.bindings.strands.realtime import realtime_of
from otel_limits.bindings.strands.tool_context import StrandsTool
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.texts import not_run_note, refusal_note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands.bidi import BidiAgent
    from strands.types.content import Message

    from otel_limits.bindings.strands.realtime import RealtimeInvocation


def attach_realtime_hooks(agent: BidiAgent) -> None:
    """Attach to a realtime agent. Idempotent."""
    event = MessageAddedEvent(agent=agent, message={"role": "user", "content": []})
    if message_added not in list(agent.hooks.get_callbacks_for(event)):
        # As for other agents: see `HOOKS` in `attach`.
        agent.add_hook(message_added, MessageAddedEvent, order=FIRST)
        agent.add_hook(before_tool, BeforeToolCallEvent, order=LAST)
        agent.add_hook(after_tool, AfterToolCallEvent, order=LAST)


@suppress_errors("binding")
def message_added(event: MessageAddedEvent[Any]) -> None:
    """Begin a batch of tools when they are requested, and end it when all have answered."""
    realtime, kind = realtime_of(event.agent), _kind_of(event.message)
    if realtime is None or realtime.run.finished:
        return
    if kind == "tool_dispatch":  # follows the message with the requests
        requests = [block["toolUse"] for block in event.agent.messages[-2]["content"]]
        batch = RealtimeBatch(requests, realtime.verdict)
        if batch.against is None:
            realtime.request_tools(realtime.text, batch.tools)
            batch.turn = realtime.turns[-1]
        realtime.batches.append(batch)
    elif kind == "tool_result":
        ids = [block["toolResult"]["toolUseId"] for block in event.message["content"]]
        for batch in realtime.batches:
            if [each["toolUseId"] for each in batch.requests] == ids:
                _end_batch(realtime, batch)
                return


def _kind_of(message: Message) -> object:
    custom: Any = (message.get("metadata") or {}).get("custom") or {}
    return (custom.get("bidi") or {}).get("kind")


def _batch_of(
    realtime: RealtimeInvocation, use: Mapping[str, Any]
) -> tuple[RealtimeBatch, int] | None:
    """Return the batch and the position of a tool call; `None` if the model did not request it."""
    for batch in realtime.batches:
        if (position := batch.position_of(use)) is not None:
            return batch, position
    return None


@suppress_errors("binding")
def before_tool(event: BeforeToolCallEvent[Any]) -> None:
    """Run a tool within the invocation of its agent, or refuse it if it exceeds a limit."""
    realtime = realtime_of(event.agent)
    found = None if realtime is None else _batch_of(realtime, event.tool_use)
    if realtime is None or found is None:
        return
    batch, position = found
    requested = (batch.turn or batch.denied).tools[str(position)]
    if position not in batch.attempts:
        batch.attempts[position] = attempt = StrandsTool(realtime, requested)
        attempt.__enter__()  # never left: its task ends with the tool
    if event.cancel_tool:
        return
    # A later verdict lets tools that were requested before it run to their end.
    if batch.against is not None:
        event.cancel_tool = not_run_note(batch.against)
    elif requested.refusal is not None:
        is_final = requested.refusal.limit in realtime.run.refusals
        event.cancel_tool = refusal_note(requested.refusal, is_final=is_final)


@suppress_errors("binding")
def after_tool(event: AfterToolCallEvent[Any]) -> None:
    """Keep the final attempt of a tool."""
    realtime = realtime_of(event.agent)
    found = None if realtime is None else _batch_of(realtime, event.tool_use)
    if found is not None and not event.retry:
        batch, position = found
        if (attempt := batch.attempts.get(position)) is not None:
            event.result = attempt.end(event.result) or event.result
        batch.results[position] = event


def _end_batch(realtime: RealtimeInvocation, batch: RealtimeBatch) -> None:
    """Record the calls of a batch in request order, and check the limits."""
    realtime.batches.remove(batch)
    turn = batch.turn or batch.denied
    for position, tool in enumerate(tuple(turn.tools.values())):
        done = batch.results.get(position)
        if tool.refusal is not None:
            continue
        if done is None:
            del turn.tools[str(position)]
        elif done.cancel_message is None:
            note_run(tool, done)
        else:
            if batch.turn is not None:
                realtime.run.tools.release(tool.name)
            note_denial(tool, done.result)
    if turn in realtime.turns:
        realtime.turns.remove(turn)
    realtime.end_turn(turn)
    realtime.check()
