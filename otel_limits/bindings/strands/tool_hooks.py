"""Hooks for the tools of a turn: admitted in request order, recorded when all have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from otel_limits.bindings.span_writer import write_warnings
from otel_limits.bindings.strands.activities import note_request, scope_of
from otel_limits.bindings.strands.batch import Batch
from otel_limits.bindings.strands.inner_stops import note_delegation
from otel_limits.bindings.strands.invocations import live_of
from otel_limits.bindings.strands.notes import append_nudge, reword_results, reworded
from otel_limits.bindings.strands.private import will_end_anyway
from otel_limits.bindings.strands.readers import (
    acceptance_of,
    call_of,
    denial_of,
    identity_of,
    status_of,
    text_of,
    tool_uses,
)
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.labels import clean
from otel_limits.core.texts import TOOLS_REMARK, not_run_note, refusal_note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands.hooks import (
        AfterToolCallEvent,
        AfterToolsEvent,
        BeforeToolCallEvent,
        BeforeToolsEvent,
    )

    from otel_limits.bindings.strands.invocations import StrandsInvocation
    from otel_limits.runs.run import Run

Answered: TypeAlias = "tuple[Mapping[str, Any], Mapping[str, Any], float | None]"
"""A tool use, its result, and its duration in seconds if it ran."""


@suppress_errors("binding")
def before_tools(event: BeforeToolsEvent) -> None:
    """Decide in request order which calls may run, before any of them does."""
    live = live_of(event.agent)
    if live is None:
        return
    against = live.wrapping or live.verdict
    if against is not None:  # requested by the last answer, or before a kill
        event.cancel = not_run_note(against)
        return
    # A turn that a hook denied as a whole uses no budget.
    denied = bool(event.cancel)
    live.leg.batch = batch = Batch(tool_uses(event.agent, event.message), denied=denied)
    if denied:
        return
    # Before any of them starts: tools run concurrently, and the order of the requests decides.
    for position, request in enumerate(batch.requests):
        breach = live.run.tools.admit(request["name"])
        if breach is not None:
            batch.refusals[position] = breach


@suppress_errors("binding")
def before_tool(event: BeforeToolCallEvent) -> None:
    """Refuse a tool call that exceeds a limit, or whose invocation was ended."""
    note_request(event)
    live = live_of(event.agent)
    if live is None:
        return
    if live.verdict is not None and not event.cancel_tool:
        event.cancel_tool = not_run_note(live.verdict)
    elif live.leg.batch is not None:
        position = live.leg.batch.position_of(event.tool_use)
        breach = None if position is None else live.leg.batch.refusals.get(position)
        if breach is not None:
            event.cancel_tool = refusal_note(breach)


@suppress_errors("binding")
def after_tool(event: AfterToolCallEvent) -> None:
    """Keep the final attempt: each retry overwrites it."""
    live, scope = live_of(event.agent), scope_of(event)
    # The result of a delegation becomes the answer to the end user.
    if live is not None and not getattr(event.selected_tool, "delegate", False):
        event.result = reworded(event.result, live.run, scope)
    is_own = live is not None and (scope is None or scope.owner is live.run)
    if live is not None and live.leg.batch is not None and is_own:
        position = live.leg.batch.position_of(event.tool_use)
        if position is not None:
            # The event, as hooks that run after ours may still replace its result.
            live.leg.batch.results[position] = event


@suppress_errors("binding")
def after_tools(event: AfterToolsEvent) -> None:
    """End the loop if a limit was reached and the loop would continue."""
    live = live_of(event.agent)
    if live is None:
        return
    run = live.run
    note_delegation(live, event)
    answered = _finish_batch(live, event)
    # Before limits are checked, so that a warning precedes its halt.
    if run.policy.warn_at:
        write_warnings(event.agent.trace_span, run.warn())
    # Only after the whole turn is recorded: the last tool may reach a limit.
    verdict = run.check_limits()
    if live.wrapping is not None:
        verdict = replace(live.wrapping, remark=TOOLS_REMARK)
    for number, (use, result, _) in enumerate(answered, start=1):
        halts = verdict is not None and number == len(answered)
        run.tools.log(use["name"], use["input"], text_of(result), trigger=halts)
    if verdict is not None and not _ends_anyway(live, event) and live.ends_loop(verdict):
        live.verdict, live.wrapping = verdict, None
        event.end_turn = live.text_of(verdict)
    reword_results(event.message, run)  # of delegations, after their answer was taken from them


def _finish_batch(live: StrandsInvocation, event: AfterToolsEvent) -> list[Answered]:
    """Record the answered calls in request order, and check for loops."""
    # Removed, so that `after_leg` finds a batch only if a hook ended the turn early.
    run, batch, live.leg.batch = live.run, live.leg.batch, None
    if batch is None:
        return []
    answered, calls = [], []
    for position, request in enumerate(batch.requests):
        if position in batch.refusals:
            run.tools.record(request["name"], "refused", None, None)
        elif (answer := _answer_to(position, run, batch, event)) is not None:
            use, result, seconds = answer
            answered.append(answer)
            identity = None
            if run.loops is not None or run.services.keeps_fingerprints:
                calls.append(call_of(run, use, result))
                identity = identity_of(calls[-1])
            run.tools.record(use["name"], status_of(result), seconds, identity)
    if run.loops is not None and event.message["content"]:  # empty if all of it waits for a human
        run.check_loops(calls, live.leg.text)
        if (repeated := run.nudge()) is not None:
            append_nudge(event.message, answered[repeated][1] if answered else None)
    return answered


def _answer_to(position: int, run: Run, batch: Batch, event: AfterToolsEvent) -> Answered | None:
    """Return the answer to a call that no limit refused; only calls that ran count."""
    request, done = batch.requests[position], batch.results.get(position)
    if done is not None and done.cancel_message is None and done.selected_tool is not None:
        return done.tool_use, done.result, done.duration
    # Success without an event: the tool continues as a background task.
    told = batch.result_in(position, [block["toolResult"] for block in event.message["content"]])
    if done is None and (accepted := acceptance_of(told)) is not None:
        return request, accepted, None
    # Only admitted calls have used budget.
    if not batch.denied:
        run.tools.release(request["name"])
    denial: Mapping[str, Any] | None = done.result if done is not None else denial_of(told, event)
    if denial is None:
        return None
    return {**request, "name": clean(request["name"])}, denial, None  # a model may invent the name


def _ends_anyway(live: StrandsInvocation, event: AfterToolsEvent) -> bool:
    """Return whether the loop ends after these tools anyway: a natural end wins."""
    return bool(
        event.end_turn
        or live.leg.has_output
        or will_end_anyway(event.agent)
        or event.agent.cancel_signal.is_set()
        or event.invocation_state.get("request_state", {}).get("stop_event_loop")
    )
