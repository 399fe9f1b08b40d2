"""Last answers: how a model's ends the loop, and what stands for one that has no words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from strands.types.events import ModelStopReason

from otel_limits.core.messages import halt_message, halt_text, partial_note

if TYPE_CHECKING:
    from strands.types.content import ContentBlock, Message

    from otel_limits.core.policy import Verdict

GO_ON: Final = frozenset(("tool_use", "cancelled"))
"""Stop reasons of a last answer that stay: tools asked for need their results, and the text that a
cancelled call is to leave is put in by Strands."""


def as_last(answer: ModelStopReason, verdict: Verdict, agent: str) -> ModelStopReason:
    """Let a last answer end the loop for the reason of the halt.

    The model's own would have it go on: after `end_turn` the loop asks for structured output that
    is missing, and at `max_tokens` it raises. It says that it is partial, in a block of its own.
    Providers refuse a conversation in which a message has no content, so that our text takes the
    place of an answer without any.
    """
    if answer.stop_reason in GO_ON:
        return answer
    # A tool use here was cut off in the middle, and would never get its result.
    content = [block for block in answer.message["content"] if "toolUse" not in block]
    message: Any = halt_message(verdict, agent)
    if any(map(_says_something, content)):
        content = [*content, {"text": partial_note(verdict, agent)}]
        message = {**answer.message, "content": content}
    return ModelStopReason(cast("Any", verdict.reason), message, answer.usage, answer.metrics)


def cancelled_answer() -> ModelStopReason:
    """Make what Strands makes of a response that is cancelled at its first chunk."""
    return ModelStopReason(
        "cancelled",
        {"role": "assistant", "content": [{"text": "Cancelled by user"}]},
        {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0},
        {"latencyMs": 0, "timeToFirstByteMs": 0},
    )


def is_ours(message: Message, verdict: Verdict, agent: str) -> bool:
    """Tell whether a message is a halt's: nothing but our text says so."""
    return message["content"] == [{"text": halt_text(verdict, agent)}]


def _says_something(block: ContentBlock) -> bool:
    """Tell whether a block answers anything: text that is not blank, or a picture for instance."""
    return "reasoningContent" not in block and bool(block.get("text", "more than text").strip())
