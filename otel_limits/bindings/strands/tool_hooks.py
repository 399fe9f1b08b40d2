"""Hooks for the tools of a turn: admitted in request order, recorded when all have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from otel_limits.bindings.strands.approval import is_answered_by_person
from otel_limits.bindings.strands.batch import Batch, note_denial, note_result, note_run
from otel_limits.bindings.strands.invocations import invocation_of
from otel_limits.bindings.strands.nested_stops import note_delegation
from otel_limits.bindings.strands.notes import append_nudge, reword_results
from otel_limits.bindings.strands.private import will_end_anyway
from otel_limits.bindings.strands.readers import (
    acceptance_of,
    denial_of,
    tool_uses,
)
from otel_limits.bindings.strands.tool_context import attempt_of, begin_tool
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.texts import TOOLS_REMARK, not_run_note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands.hooks import (
        AfterToolCallEvent,
        AfterToolsEvent,
        BeforeToolCallEvent,
        BeforeToolsEvent,
    )

    from otel_limits.bindings.strands.invocations import StrandsInvocation


@suppress_errors("binding")
def before_tools(event: BeforeToolsEvent) -> None:
    """Decide in request order which calls may run, before any of them does."""
    invocation = invocation_of(event.agent)
    if invocation is None:
        return
    against = invocation.wrapping or invocation.verdict
    if against is not None:  # requested by the last answer, or before a kill
        event.cancel = not_run_note(against)
        return
    requests = tool_uses(event.agent, event.message)
    if event.cancel:  # a turn that a hook denied as a whole uses no budget
        invocation.leg.batch = Batch(requests)
        return
    # Before any of them starts: tools run concurrently, and the order of the requests decides. By
    # position, as some models use one ID for several of them.
    invocation.leg.batch = batch = Batch(requests)
    invocation.request_tools(invocation.leg.text, batch.tools)
    batch.turn = invocation.turns[-1]


@suppress_errors("binding")
def before_tool(event: BeforeToolCallEvent) -> None:
    """Refuse a tool call that exceeds a limit, or whose invocation was ended."""
    invocation = invocation_of(event.agent)
    batch = None if invocation is None else invocation.leg.batch
    attempt = begin_tool(event, None if batch is None else batch.tool_of(event.tool_use))
    if invocation is None or attempt is None or attempt.invocation is not invocation:
        return
    if attempt.requested.refusal is not None or not event.cancel_tool:
        event.cancel_tool = attempt.refusal() or event.cancel_tool


@suppress_errors("binding")
def after_tool(event: AfterToolCallEvent) -> None:
    """Keep the final attempt: each retry overwrites it."""
    invocation, attempt = invocation_of(event.agent), attempt_of(event)
    # The result of a delegation becomes the answer to the end user.
    if attempt is not None and not getattr(event.selected_tool, "delegate", False):
        event.result = attempt.end(event.result) or event.result
    is_own = invocation is not None and (attempt is None or attempt.invocation is invocation)
    if invocation is not None and invocation.leg.batch is not None and is_own:
        position = invocation.leg.batch.position_of(event.tool_use)
        if position is not None:
            # The event, as hooks that run after ours may still replace its result.
            invocation.leg.batch.results[position] = event


@suppress_errors("binding")
def after_tools(event: AfterToolsEvent) -> None:
    """End the loop if a limit was reached and the loop would continue."""
    invocation = invocation_of(event.agent)
    if invocation is None:
        return
    note_delegation(invocation, event)
    # Removed, so that `after_leg` finds a batch only if a hook ended the turn early.
    batch, invocation.leg.batch = invocation.leg.batch, None
    if batch is not None:
        _end_turn(invocation, batch, event)
    # Only after the whole turn is recorded: the last tool may reach a limit.
    verdict = invocation.run.check_limits()
    if invocation.wrapping is not None:
        verdict = replace(invocation.wrapping, remark=TOOLS_REMARK)
    if (
        verdict is not None
        and not _ends_anyway(invocation, event)
        and invocation.ends_loop(verdict)
    ):
        invocation.verdict, invocation.wrapping = verdict, None
        event.end_turn = invocation.text_of(verdict)
    # Of delegations, after their answer was taken from them.
    reword_results(event.message, invocation.run)


def _end_turn(invocation: StrandsInvocation, batch: Batch, event: AfterToolsEvent) -> None:
    """Note how each call was answered, record them, and warn the model about a repetition."""
    turn = batch.turn or batch.denied
    for position, tool in enumerate(tuple(turn.tools.values())):
        if tool.refusal is None and not _note_answer(invocation, batch, position, event):
            del turn.tools[str(position)]
    if not event.message["content"]:  # all of it waits for a human
        invocation.drop_turns()
        return
    invocation.turns.clear()
    invocation.end_turn(turn)
    if invocation.nudge is not None:
        (identity, note), invocation.nudge = invocation.nudge, None
        number = int(identity)
        done = batch.results.get(number)
        shown = None if done is not None else batch.result_in(number, event.message)
        append_nudge(event.message, shown if done is None else done.result, note)


def _note_answer(
    invocation: StrandsInvocation, batch: Batch, position: int, event: AfterToolsEvent
) -> bool:
    """Note the answer to a call that no limit refused, if any; only calls that ran count."""
    tool, done = (batch.turn or batch.denied).tools[str(position)], batch.results.get(position)
    if done is not None and done.cancel_message is None and done.selected_tool is not None:
        note_run(tool, done)
        return True
    # Success without an event: the tool continues as a background task.
    shown = batch.result_in(position, event.message)
    if done is None and (accepted := acceptance_of(shown)) is not None:
        note_result(tool, accepted)
        return True
    # Only admitted calls have used budget.
    if batch.turn is not None:
        invocation.run.tools.release(tool.name)
    denial: Mapping[str, Any] | None = done.result if done is not None else denial_of(shown, event)
    if denial is not None:
        note_denial(tool, denial)
        tool.is_rejected = is_answered_by_person(event.agent, batch.requests[position])
    return denial is not None


def _ends_anyway(invocation: StrandsInvocation, event: AfterToolsEvent) -> bool:
    """Return whether the loop ends after these tools anyway: a natural end wins."""
    return bool(
        event.end_turn
        or invocation.leg.has_output
        or will_end_anyway(event.agent)
        or event.agent.cancel_signal.is_set()
        or event.invocation_state.get("request_state", {}).get("stop_event_loop")
    )
