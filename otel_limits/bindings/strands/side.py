"""Side calls: model calls outside of an agent's loop, and their refusal by limits.

A refusal raises the limit's error, as every caller of a model expects exceptions. If the loop
itself requested the call, e.g. for a summary, the error leaves the loop and becomes its halt.
Application code gets the error, and can continue without the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_limits.bindings.gateways import chain_of
from otel_limits.bindings.strands.invocations import LiveInvocation
from otel_limits.core.errors import LimitReachedError, limit_reached
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.core.limits import TREE_PREFIX
from otel_limits.core.policy import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strands.types.content import Message

    from otel_limits.runs.calls import InFlightCall
    from otel_limits.runs.run import Run


def admit_side_call(run: Run, call: InFlightCall) -> None:
    """Reserve usage for a side call, or raise the error of the limit that it would exceed."""
    try:
        verdict = run.calls.admit(call)
        if verdict is not None and verdict.action == "observe" and not run.finished:
            run.halt(verdict, "observed")
    except Exception as error:  # noqa: BLE001  the agent must not feel it
        report_suppressed("binding", error)
        return
    # Raised outside of the guard above, which would suppress it as an internal error.
    if verdict is not None and call.reservation is None:
        raise _error_of(run, verdict)


def _error_of(run: Run, verdict: Verdict) -> LimitReachedError:
    if run.is_direct:  # the request is the whole invocation
        run.halt(verdict, "raised")
    error = limit_reached(verdict, run.stop(verdict.reason))
    note_refusal(run, verdict)
    # A tool that made the call may return the error to the model of `run` itself.
    run.halted[str(error)] = (run, verdict)
    run.note_halt(str(error), verdict)
    return error


def note_refusal(run: Run, verdict: Verdict) -> None:
    """Remember a refused side call that the loop of `run` may have requested."""
    if isinstance(run.state, LiveInvocation):
        run.state.side_verdict = verdict


def halt_from_error(live: LiveInvocation, error: Exception) -> Verdict | None:
    """Return the halt that caused an error of the loop, if any.

    The loop requested a call that was refused. The error is that of the limit, or one that a
    steering handler or a classifier raises because its own agent gave no output.
    """
    for each in chain_of(error):
        if isinstance(each, LimitReachedError) and each.stop is not None and each.stop.breaches:
            stop = each.stop
            if _is_of(live.run, stop.breaches[0].limit, stop.breaches[0].cap, stop.invocation_id):
                return Verdict(stop.reason, stop.breaches)
    return live.side_verdict


def _is_of(run: Run, limit: str, cap: object, invocation_id: str) -> bool:
    """Return whether a breach is one of this invocation, or of a tree that contains it."""
    if invocation_id == run.invocation.id:
        return True
    name = limit.removeprefix(TREE_PREFIX)
    return limit.startswith(TREE_PREFIX) and any(
        dict(tree.policy.limits.items()).get(name) == cap for tree in run.trees
    )


@suppress_errors("binding")
def refused_to_loop(run: Run) -> bool:
    """Return whether another invocation's loop started a halted one, and note its refusal.

    The loop would use our message as an answer, e.g. as the summary of a conversation, so the halt
    is raised there. For a tool or the reader of a stream, the message is the agent's answer.
    """
    verdict, parent = run.verdict, getattr(run.parent, "state", None)
    if verdict is None or verdict.breach is None or not isinstance(parent, LiveInvocation):
        return False
    if parent.run.finished or not any(each.is_waiting for each in parent.waits.open):
        return False  # its loop is idle, while other code of the application runs
    if not _is_of(parent.run, verdict.breach.limit, verdict.breach.cap, ""):
        return False
    note_refusal(parent.run, verdict)
    return parent.batch is None


def results_for(messages: Sequence[Message], text: str) -> Message | None:
    """Return error results for the tools that the last message requests but that never ran."""
    asked = [
        block["toolUse"]["toolUseId"]
        for message in messages[-1:]
        if message["role"] == "assistant"
        for block in message["content"]
        if "toolUse" in block
    ]
    if not asked:
        return None
    results: Any = [
        {"toolResult": {"toolUseId": each, "status": "error", "content": [{"text": text}]}}
        for each in asked
    ]
    return {"role": "user", "content": results}
