"""Hooks of the tools of a turn: admitted in request order, told and judged when all have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from otel_limits.bindings.strands.halting import ends_loop
from otel_limits.bindings.strands.invocations import Batch, live_of
from otel_limits.bindings.strands.notes import append_nudge
from otel_limits.bindings.strands.private import ends_by_itself
from otel_limits.bindings.strands.reading import (
    acceptance_of,
    call_of,
    denial_of,
    identity_of,
    status_of,
    text_of,
    tool_uses,
)
from otel_limits.bindings.strands.spans import write_warnings
from otel_limits.core.faults import never_raises
from otel_limits.core.labels import clean
from otel_limits.core.messages import halt_text, refusal_note, why
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands.hooks import (
        AfterToolCallEvent,
        AfterToolsEvent,
        BeforeToolCallEvent,
        BeforeToolsEvent,
    )

    from otel_limits.bindings.strands.invocations import Live
    from otel_limits.runs.run import Run

Answered: TypeAlias = "tuple[Mapping[str, Any], Mapping[str, Any], float | None]"
"""A tool use, its result, and the seconds that it ran for if it did."""


@never_raises("binding")
def before_tools(event: BeforeToolsEvent) -> None:
    """Decide in request order which calls may run, before any of them does."""
    live = live_of(event.agent)
    if live is None:
        return
    if CURRENT.get() is not live.run:
        CURRENT.set(live.run)
    if live.wrapping is not None:
        event.cancel = f"Not run: {why(live.wrapping)}."
        return
    denied = bool(event.cancel)
    live.batch = batch = Batch(tool_uses(event.agent, event.message), denied=denied)
    if denied:
        return
    # Now, and not as each one starts: tools run at once, and the order of the requests decides.
    for request in batch.requests:
        breach = live.run.tools.admit(request["name"])
        if breach is not None:
            batch.refusals[request["toolUseId"]] = breach


@never_raises("binding")
def before_tool(event: BeforeToolCallEvent) -> None:
    """Answer in the place of a tool that has no call left."""
    live = live_of(event.agent)
    if live is not None and live.batch is not None:
        breach = live.batch.refusals.get(event.tool_use["toolUseId"])
        if breach is not None:
            event.cancel_tool = refusal_note(breach)


@never_raises("binding")
def after_tool(event: AfterToolCallEvent) -> None:
    """Keep the final attempt: a retry comes by here again."""
    live = live_of(event.agent)
    if live is not None and live.batch is not None:
        live.batch.results[event.tool_use["toolUseId"]] = event


@never_raises("binding")
def after_tools(event: AfterToolsEvent) -> None:
    """End the loop when a limit was reached and the loop would go on."""
    live = live_of(event.agent)
    if live is None:
        return
    run = live.run
    answered = _close_batch(live, event)
    if run.policy.warn_at:
        write_warnings(event.agent.trace_span, run.warn())
    # Only when all of the turn is told: the last tool may be the one that passes a limit.
    verdict = live.wrapping or run.judge()
    for number, (use, result, _) in enumerate(answered, start=1):
        halts = verdict is not None and number == len(answered)
        run.tools.keep(use["name"], use["input"], text_of(result), trigger=halts)
    if verdict is not None and not _ends_anyway(live, event) and ends_loop(live, verdict):
        live.verdict, live.wrapping = verdict, None
        event.end_turn = halt_text(verdict)


def _close_batch(live: Live, event: AfterToolsEvent) -> list[Answered]:
    """Tell the calls that were answered, in request order, and look for repetitions."""
    run, batch, live.batch = live.run, live.batch, None
    if batch is None:
        return []
    answered, calls = [], []
    for request in batch.requests:
        if request["toolUseId"] in batch.refusals:
            run.tools.ended(request["name"], "refused", None, None)
        elif (answer := _answer_to(request, run, batch, event)) is not None:
            use, result, seconds = answer
            answered.append(answer)
            identity = None
            if run.loops is not None:
                calls.append(call_of(run, use, result))
                identity = identity_of(calls[-1])
            run.tools.ended(use["name"], status_of(result), seconds, identity)
    if run.loops is not None and event.message["content"]:  # or all of it waits for a human
        run.repeat(calls, live.text)
        if run.nudge():
            append_nudge(event.message)
    return answered


def _answer_to(
    request: Mapping[str, Any], run: Run, batch: Batch, event: AfterToolsEvent
) -> Answered | None:
    """Return what the model is told of a call that no limit refused; only those that ran count."""
    done = batch.results.get(request["toolUseId"])
    if done is not None and done.cancel_message is None:
        return done.tool_use, done.result, done.duration
    if done is None and (accepted := acceptance_of(request, event)) is not None:
        return request, accepted, None
    if not batch.denied:
        run.tools.give_back(request["name"])
    denial: Mapping[str, Any] | None = (
        done.result if done is not None else denial_of(request, event)
    )
    if denial is None:
        return None
    return {**request, "name": clean(request["name"])}, denial, None  # a model may make it up


def _ends_anyway(live: Live, event: AfterToolsEvent) -> bool:
    """Tell whether the loop stops after these tools without us: the natural end wins."""
    return bool(
        event.end_turn
        or live.has_output
        or ends_by_itself(event.agent)
        or event.agent.cancel_signal.is_set()
        or event.invocation_state.get("request_state", {}).get("stop_event_loop")
    )
