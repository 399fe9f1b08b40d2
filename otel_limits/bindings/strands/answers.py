"""Last answers: how a model's ends the loop, and what stands for one that has no words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from strands.types.events import ModelStopReason, TypedEvent

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.messages import halt_message, halt_text, partial_note

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from strands.types.content import ContentBlock, Message

    from otel_limits.bindings.strands.invocations import LiveInvocation
    from otel_limits.core.policy import Verdict

GO_ON: Final = frozenset(("tool_use", "cancelled"))
"""Stop reasons of a last answer that stay: tools asked for need their results, and the text that a
cancelled call is to leave is put in by Strands."""


def finish_with_answer(answer: ModelStopReason, verdict: Verdict, agent: str) -> ModelStopReason:
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


class TextDelta(TypedEvent):
    """A piece of text in the stream, as Strands' own, whose class is private."""

    def prepare(self, invocation_state: dict[str, Any]) -> None:
        """Carry what the caller gave the invocation: callback handlers may count on it."""
        self.update(invocation_state)


async def ending_as_last(
    events: AsyncGenerator[Any, None], live: LiveInvocation
) -> AsyncGenerator[Any, None]:
    """Stream a last answer, and in its last block that it is partial.

    Some read the stream only, and never see the message.
    """
    held: list[TypedEvent] = []
    streamed = False
    try:
        async for event in events:
            chunk = event.get("event")
            streamed = streamed or chunk is not None
            if isinstance(event, ModelStopReason):
                for each in _end(event, live, held, streamed=streamed):
                    yield each
                held = []
            # Held back until the message is known: a block behind the end of a message is a
            # malformed stream, and only the whole answer tells whether it says anything.
            elif held or (isinstance(chunk, dict) and "messageStop" in chunk):
                held.append(event)
            else:
                yield event
    finally:
        await events.aclose()


def _end(
    answer: ModelStopReason, live: LiveInvocation, held: list[TypedEvent], *, streamed: bool
) -> Iterator[TypedEvent]:
    """Yield the end of a stream, with the block that the last answer gets from us."""
    last = answer
    # No longer wrapping: another call was refused meanwhile, and the halt is about that one.
    if live.wrapping is not None and not live.is_cut:
        last = finish_with_answer(answer, live.wrapping, live.run.invocation.agent)
    # What a middleware answers from its cache may have no stream, and then nobody reads one.
    if streamed and last is not answer:
        yield from _block_of(last.message["content"][-1]["text"])
    yield from held
    yield last


def _block_of(text: str) -> Iterator[TypedEvent]:
    """Make the events of one more block of text, in the order of Strands."""
    delta = {"text": text}
    yield TypedEvent({"event": {"contentBlockStart": {"start": {}}}})
    yield TypedEvent({"event": {"contentBlockDelta": {"delta": delta}}})
    yield TextDelta({"data": text, "delta": delta})
    yield TypedEvent({"event": {"contentBlockStop": {}}})


def cancelled_answer() -> ModelStopReason:
    """Make what Strands makes of a response that is cancelled at its first chunk."""
    return ModelStopReason(
        "cancelled",
        {"role": "assistant", "content": [{"text": "Cancelled by user"}]},
        {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0},
        {"latencyMs": 0, "timeToFirstByteMs": 0},
    )


@suppress_errors("binding")
def as_cut(answer: ModelStopReason, live: LiveInvocation) -> ModelStopReason:
    """Let the halt stand for an answer that was broken off, as Strands does for a cancelled one.

    Strands itself can only cancel all invocations of an agent together.
    """
    assert live.verdict is not None  # why it was
    message: Any = halt_message(live.verdict, live.run.invocation.agent)
    return ModelStopReason("cancelled", message, answer.usage, answer.metrics)


def is_ours(message: Message, verdict: Verdict, agent: str) -> bool:
    """Tell whether a message is a halt's: nothing but our text says so."""
    return message["content"] == [{"text": halt_text(verdict, agent)}]


def _says_something(block: ContentBlock) -> bool:
    """Tell whether a block answers anything: text that is not blank, or a picture for instance."""
    return "reasoningContent" not in block and bool(block.get("text", "more than text").strip())
