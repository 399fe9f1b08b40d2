"""Hooks for the tools of a realtime session, which run while the model continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent, MessageAddedEvent

from otel_limits.bindings.span_writer import write_warnings
from otel_limits.bindings.strands.attach import FIRST, LAST
from otel_limits.bindings.strands.batch import SessionBatch
from otel_limits.bindings.strands.notes import reworded
from otel_limits.bindings.strands.readers import call_of, identity_of, status_of, text_of
from otel_limits.bindings.strands.sessions import session_of
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import clean
from otel_limits.core.texts import not_run_note, refusal_note
from otel_limits.runs.current import CURRENT, TASK_SCOPE, TaskScope, for_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands.bidi import BidiAgent
    from strands.types.content import Message

    from otel_limits.bindings.strands.sessions import Session


def attach_session_hooks(agent: BidiAgent) -> None:
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
    session, kind = session_of(event.agent), _kind_of(event.message)
    if session is None or session.run.finished:
        return
    if kind == "tool_dispatch":  # follows the message with the requests
        requests = [block["toolUse"] for block in event.agent.messages[-2]["content"]]
        session.batches.append(SessionBatch(requests, session.verdict))
    elif kind == "tool_result":
        ids = [block["toolResult"]["toolUseId"] for block in event.message["content"]]
        for batch in session.batches:
            if [each["toolUseId"] for each in batch.requests] == ids:
                _finish(session, batch)
                return


def _kind_of(message: Message) -> object:
    custom: Any = (message.get("metadata") or {}).get("custom") or {}
    return (custom.get("bidi") or {}).get("kind")


def _batch_of(session: Session, use: Mapping[str, Any]) -> tuple[SessionBatch, int] | None:
    """Return the batch and the position of a tool call; `None` if the model did not request it."""
    for batch in session.batches:
        if (position := batch.position_of(use)) is not None:
            return batch, position
    return None


@suppress_errors("binding")
def before_tool(event: BeforeToolCallEvent[Any]) -> None:
    """Run a tool within the invocation of its session, or refuse it if it exceeds a limit."""
    session = session_of(event.agent)
    found = None if session is None else _batch_of(session, event.tool_use)
    if session is None or found is None:
        return
    batch, position = found
    run = session.run
    if position not in batch.scopes:
        _enter(session, batch, position)
    if event.cancel_tool:
        return
    if batch.against is not None:
        event.cancel_tool = not_run_note(batch.against)
    elif position not in batch.admitted:
        breach = run.tools.admit(event.tool_use["name"])
        if breach is None:
            batch.admitted.add(position)  # not once more when a hook repeats it
        else:
            batch.refusals[position] = breach
            event.cancel_tool = refusal_note(breach)


def _enter(session: Session, batch: SessionBatch, position: int) -> None:
    """Make the current task, which is that of one tool, work for the session."""
    scope = TaskScope(session.run, TASK_SCOPE.get())
    batch.scopes[position] = scope
    # Never reset: the task ends with the tool.
    CURRENT.set(session.run)
    TASK_SCOPE.set(scope)
    spans = otel_context.get_current()
    otel_context.attach(for_threads(session.run, scope, spans) or spans)


@suppress_errors("binding")
def after_tool(event: AfterToolCallEvent[Any]) -> None:
    """Keep the final attempt of a tool."""
    session = session_of(event.agent)
    found = None if session is None else _batch_of(session, event.tool_use)
    if session is not None and found is not None and not event.retry:
        batch, position = found
        event.result = reworded(event.result, session.run, batch.scopes.get(position))
        batch.results[position] = event
        if position in batch.scopes:
            batch.scopes[position].has_ended = True


def _finish(session: Session, batch: SessionBatch) -> None:
    """Record the calls of a batch in request order, and check the limits."""
    session.batches.remove(batch)
    run, answered, calls = session.run, [], []
    for position, request in enumerate(batch.requests):
        done = batch.results.get(position)
        if position in batch.refusals:
            run.tools.record(request["name"], "refused", None, None)
        elif done is not None:
            has_run = done.cancel_message is None
            if not has_run and position in batch.admitted:
                run.tools.release(request["name"])
            use: Any = done.tool_use if has_run else {**request, "name": clean(request["name"])}
            answered.append((use, done.result))
            identity = None
            if run.loops is not None or run.services.keeps_fingerprints:
                calls.append(call_of(run, use, done.result))
                identity = identity_of(calls[-1])
            seconds = done.duration if has_run else None
            run.tools.record(use["name"], status_of(done.result), seconds, identity)
    run.check_loops(calls, session.text)
    if run.policy.warn_at:
        write_warnings(session.span, run.warn())
    had_verdict = session.verdict is not None
    session.check()
    for number, (use, result) in enumerate(answered, start=1):
        halts = session.verdict is not None and not had_verdict and number == len(answered)
        run.tools.log(use["name"], use["input"], text_of(result), trigger=halts)
