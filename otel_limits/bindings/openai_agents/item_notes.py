"""Adds sentences for the model to a request, without changing the items of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.openai_agents.model_readers import text_of_item
from otel_limits.usage.text import as_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NO_RESULT: Final = "[The tool returned nothing.]"
RESULT: Final = "function_call_output"
CALL: Final = "function_call"


def with_note(given: Any, note: str) -> Any:
    """Return the input of a request with a sentence for the model."""
    # At the end, so that everything before it stays identical and the vendor's prompt cache still
    # applies.
    if isinstance(given, str):
        return f"{given}\n\n{note}"
    return [*given, {"role": "user", "content": note}]


def nudged(given: Any, repeated: str, note: str) -> Any:
    """Return the input with a sentence in the output of a function call, by its ID."""
    return [_nudged(item, repeated, note) for item in given] if isinstance(given, list) else given


def _nudged(item: Any, repeated: str, note: str) -> Any:
    is_result = isinstance(item, Mapping) and item.get("type") == RESULT
    if not is_result or item.get("call_id") != repeated or not isinstance(item["output"], str):
        return item
    return {**item, "output": f"{item['output']}\n\n{note}"}


def as_texts(given: Any) -> Any:
    """Return the input without tool calls: as texts, and without items of the vendor's own tools.

    Several vendors refuse tool calls in a conversation for which no tools are declared.
    """
    return list(_as_texts(given)) if isinstance(given, list) else given


def _as_texts(items: Sequence[Any]) -> Iterator[Any]:
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
