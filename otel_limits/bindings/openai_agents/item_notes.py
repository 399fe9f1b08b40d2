"""Adds sentences for the model to a request, without changing the items of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.openai_agents.model_readers import text_of_item
from otel_limits.core.texts import NUDGE_NOTE, budget_note, wrap_up_note
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from otel_limits.bindings.openai_agents.agent_runs import AgentPath
    from otel_limits.core.policy import Verdict

NO_RESULT: Final = "[The tool returned nothing.]"
RESULT: Final = "function_call_output"
CALL: Final = "function_call"


def noted(given: Any, path: AgentPath) -> Any:
    """Return the input of a request with a warning about a repetition or a budget, if due."""
    repeated, path.nudge_for = path.nudge_for, None
    if repeated is not None and isinstance(given, list):
        given = [_nudged(item, repeated) for item in given]
    if path.run.policy.budget_hints and (levels := path.run.levels()):
        return _with_note(given, budget_note(levels))
    return given


def without_tools(given: Any, verdict: Verdict, *, is_stored: bool) -> Any:
    """Return the input of the last request, with a note and without tool calls.

    Several vendors refuse tool calls in a conversation for which no tools are declared.

    Args:
        given: The input.
        verdict: The limit that was reached.
        is_stored: The vendor has stored the conversation, with the calls that this input answers.
    """
    if isinstance(given, list) and not is_stored:
        given = list(_as_texts(given))
    return _with_note(given, wrap_up_note(verdict))


def _with_note(given: Any, note: str) -> Any:
    # At the end, so that everything before it stays identical and the vendor's prompt cache still
    # applies.
    if isinstance(given, str):
        return f"{given}\n\n{note}"
    return [*given, {"role": "user", "content": note}]


def _nudged(item: Any, repeated: str) -> Any:
    is_result = isinstance(item, Mapping) and item.get("type") == RESULT
    if not is_result or item.get("call_id") != repeated or not isinstance(item["output"], str):
        return item
    return {**item, "output": f"{item['output']}\n\n{NUDGE_NOTE}"}


def _as_texts(items: Sequence[Any]) -> Iterator[Any]:
    """Write function calls and their results as texts; omit items of the vendor's own tools."""
    for item in items:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == CALL:
            text = f"[I called the tool {item['name']} with {item['arguments']}]"
            yield {"role": "assistant", "content": text}
        elif kind == RESULT:
            output = item["output"]
            text = output if isinstance(output, str) else as_json(output)
            told = f"[Result of the tool:]\n{text}" if text.strip() else NO_RESULT
            yield {"role": "user", "content": told}
        elif kind in (None, "message"):
            yield item
        elif text := _result_of_other(item):
            yield {"role": "user", "content": f"[Result of the tool:]\n{text}"}


def _result_of_other(item: Mapping[str, Any]) -> str:
    """Return the result of a tool of another kind, such as a shell."""
    is_result = str(item["type"]).endswith("_output")
    return text_of_item({"content": item.get("output")}) if is_result else ""
