"""Halts of agents that another agent's loop has started, and results for tools that never ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_limits.bindings.admission import limits_run, note_refusal
from otel_limits.bindings.strands.invocations import StrandsInvocation
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strands.types.content import Message

    from otel_limits.runs.run import Run


@suppress_errors("binding")
def refused_to_loop(run: Run) -> bool:
    """Return whether another invocation's loop started a halted one, and note its refusal.

    The loop would use our message as an answer, e.g. as the summary of a conversation, so the halt
    is raised there. For a tool or the reader of a stream, the message is the agent's answer.
    """
    verdict, parent = run.verdict, getattr(run.parent, "state", None)
    if verdict is None or verdict.breach is None or not isinstance(parent, StrandsInvocation):
        return False
    if parent.run.finished or not any(each.is_waiting for each in parent.waits.open):
        return False  # its loop is idle, while other code of the application runs
    if not limits_run(verdict.breach, parent.run):
        return False
    note_refusal(parent.run, verdict)
    return parent.leg.batch is None


def results_for(messages: Sequence[Message], text: str) -> Message | None:
    """Return error results for the tools that the last message requests but that never ran."""
    ids = [
        block["toolUse"]["toolUseId"]
        for message in messages[-1:]
        if message["role"] == "assistant"
        for block in message["content"]
        if "toolUse" in block
    ]
    if not ids:
        return None
    results: Any = [
        {"toolResult": {"toolUseId": each, "status": "error", "content": [{"text": text}]}}
        for each in ids
    ]
    return {"role": "user", "content": results}
