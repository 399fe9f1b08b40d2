"""Recounts what a run has used from its own state, when the record of its task is lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from otel_limits.core.policy import Policy
from otel_limits.runs.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def task_of(identity: str, state: Mapping[str, Any]) -> Task:
    """Return a task that has used what a state shows, which is never more than it has used.

    Args:
        identity: Its ID.
        state: The state as JSON values. It may have been changed in a store.
    """
    task = Task(identity, Policy(), 0)
    tally, responses = task.budget.tally, state["model_responses"]
    tally.turns = _count(state["current_turn"])
    for usage in (each["usage"] for each in responses):
        tally.model_calls += max(_count(usage["requests"]), 1)
        tally.input += _count(usage["input_tokens"])
        tally.output += _count(usage["output_tokens"])
    task.calls_by_tool = dict(Counter(_answered_tools(state)))
    tally.tool_calls = sum(task.calls_by_tool.values())
    return task


def _answered_tools(state: Mapping[str, Any]) -> Iterator[str]:
    items = [item for each in state["model_responses"] for item in each["output"]]
    names = {item["call_id"]: item["name"] for item in items if item["type"] == "function_call"}
    for item in state["session_items"]:
        call = item["raw_item"].get("call_id")
        if item["type"] == "tool_call_output_item" and call in names:
            yield names[call]


def _count(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0
