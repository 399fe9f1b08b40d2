"""Applies halts to an agent's conversation and span, and ends its loop with an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from opentelemetry import trace
from strands.interrupt import Interrupt, InterruptException
from strands.types.events import ModelStopReason, TypedEvent

from otel_limits.bindings.span_writer import write_halt
from otel_limits.bindings.strands.marks import SPANS, mark
from otel_limits.bindings.strands.private import EventLoopStopEvent
from otel_limits.core.halt_texts import CANCELLED_REMARK, EMPTY_REMARK
from otel_limits.core.internal_errors import suppress_errors
from otel_limits.otel.semconv import MODEL_CALL_PREFIXES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from strands.agent.agent import Agent
    from strands.types.content import ContentBlock, Message

    from otel_limits.bindings.strands.invocations import StrandsInvocation
    from otel_limits.core.events import ActionTaken
    from otel_limits.core.policy import Verdict


# --- halts in a conversation and its span ---------------------------------------------------------


class RefusedError(InterruptException):
    """Carries a halt from the model stage to the agent stage.

    It is an interrupt because those pass through the loop without being wrapped or logged, and
    without an `AfterModelCallEvent`: no model was called.
    """

    def __init__(self) -> None:
        """Create an interrupt with placeholder values."""
        super().__init__(Interrupt(id="otel_limits", name="otel_limits"))


@suppress_errors("span")
def end_quietly(span: trace.Span | None) -> None:
    """End the span of a refused call with status OK, before Strands ends it as an error."""
    if span is None or not span.is_recording():
        return
    name = getattr(span, "name", "")
    if name == SPANS.cycle or name.startswith(MODEL_CALL_PREFIXES):
        # OpenTelemetry ignores any status after OK, and any end after the first, so the error that
        # Strands writes for the refusal has no effect.
        span.set_status(trace.StatusCode.OK)
        span.end()


def apply_halt(
    agent: Agent,
    invocation: StrandsInvocation,
    message: Message,
    verdict: Verdict,
    action: ActionTaken,
) -> None:
    """Publish the halt and annotate its message and span."""
    # First, as the stop in the message reads action and verdict from the run.
    invocation.run.halt(verdict, action)
    invocation.run.note_halt(invocation.run.sentence, verdict)
    invocation.leg.message = message
    invocation.run.synthetic = is_ours(message, invocation, verdict)
    stop = invocation.run.stop(verdict.reason)
    mark(cast("Any", message), stop, synthetic=stop.synthetic)
    write_halt(agent.trace_span, verdict, invocation.run)


@suppress_errors("binding")
def apply_halt_if_due(agent: Agent, invocation: StrandsInvocation, message: Message) -> None:
    """Apply a pending halt if this is its message and it is not applied yet."""
    if invocation.leg.message is not None or invocation.verdict is None:
        return
    if is_ours(message, invocation, invocation.verdict):
        action = invocation.verdict.action or invocation.run.policy.action
        taken: ActionTaken = "raised" if action == "raise" else "halted"
        apply_halt(agent, invocation, message, invocation.verdict, taken)


# --- last answers ---------------------------------------------------------------------------------
# The loop ends with the model's answer, or with our message if that is empty.

GO_ON: Final = frozenset(("tool_use", "cancelled"))
"""Stop reasons of a last answer that stay: requested tools need their results, and Strands inserts
the text of a cancelled call."""


def halt_message(invocation: StrandsInvocation, verdict: Verdict) -> Message:
    """Return the assistant message that ends a halted conversation."""
    return {"role": "assistant", "content": [{"text": invocation.text_of(verdict)}]}


def finish_with_answer(
    answer: ModelStopReason, invocation: StrandsInvocation, verdict: Verdict
) -> ModelStopReason:
    """End the loop with a last answer, for the reason of the halt.

    With the model's own reason the loop would continue: after `end_turn` it requests missing
    structured output, and at `max_tokens` it raises. A separate block informs the end user that
    the answer is incomplete. Providers refuse messages without content, so our text replaces an
    empty answer.
    """
    if answer.stop_reason in GO_ON:
        return answer
    # A tool use here is incomplete and would never get a result.
    content = [block for block in answer.message["content"] if "toolUse" not in block]
    message: Any = halt_message(invocation, verdict)
    if any(map(_has_content, content)):
        content = [*content, {"text": "\n" + invocation.text_of(verdict)}]
        message = {**answer.message, "content": content}
    return ModelStopReason(cast("Any", verdict.reason), message, answer.usage, answer.metrics)


class TextDelta(TypedEvent):
    """A text event like Strands' own, whose class is private."""

    def prepare(self, invocation_state: dict[str, Any]) -> None:
        """Add the caller's invocation state, which callback handlers may rely on."""
        self.update(invocation_state)


async def ending_as_last(
    events: AsyncGenerator[Any, None], invocation: StrandsInvocation
) -> AsyncGenerator[Any, None]:
    """Stream a last answer, with a final block that states that it is partial.

    Some applications read only the stream, never the message.
    """
    ending: list[TypedEvent] = []
    streamed = False
    try:
        async for event in events:
            chunk = event.get("event")
            streamed = streamed or chunk is not None
            if isinstance(event, ModelStopReason):
                ended = _end(event, invocation, ending, streamed=streamed)
                for each in ended or (*ending, event):
                    yield each
                ending = []
            # Held back until the message is known: a block after the end of a message would be a
            # malformed stream, and only the complete message shows whether it has content.
            elif ending or (isinstance(chunk, dict) and "messageStop" in chunk):
                ending.append(event)
            else:
                yield event
    finally:
        await events.aclose()


@suppress_errors("binding")
def _end(
    answer: ModelStopReason,
    invocation: StrandsInvocation,
    ending: list[TypedEvent],
    *,
    streamed: bool,
) -> list[TypedEvent]:
    """Return the end of a stream, with our block added to the last answer."""
    last = answer
    # No longer wrapping: another call has been refused since, and the halt is about that one.
    if invocation.wrapping is not None:
        last = finish_with_answer(answer, invocation, invocation.wrapping)
        if is_ours(last.message, invocation, invocation.wrapping):
            invocation.wrapping = replace(invocation.wrapping, remark=EMPTY_REMARK)
        elif answer.stop_reason == "cancelled":
            invocation.wrapping = replace(invocation.wrapping, remark=CANCELLED_REMARK)
    invocation.leg.has_streamed_text = last is not answer
    # An answer from a middleware's cache may have no stream, and then no block is expected.
    has_block = streamed and last is not answer
    block = _block_of(last.message["content"][-1]["text"]) if has_block else ()
    return [*block, *ending, last]


def _block_of(text: str) -> Iterator[TypedEvent]:
    """Yield the events of one more text block, in Strands' order."""
    delta = {"text": text}
    yield TypedEvent({"event": {"contentBlockStart": {"start": {}}}})
    yield TypedEvent({"event": {"contentBlockDelta": {"delta": delta}}})
    yield TextDelta({"data": text, "delta": delta})
    yield TypedEvent({"event": {"contentBlockStop": {}}})


def with_text(
    event: TypedEvent, invocation: StrandsInvocation, open_parts: tuple[str, ...]
) -> list[TypedEvent]:
    """Return an event of a halted leg, after the text of the halt if that belongs there.

    Some applications read only the stream, e.g. chat pages. Nothing is streamed if an exception
    follows instead of a result.

    Args:
        event: The next event of the leg.
        invocation: The halted invocation.
        open_parts: The parts of the stream that were not ended.
    """
    is_message = event.get("message") is invocation.leg.message
    if is_message and invocation.run.raised:
        return []
    if is_message or type(event) is EventLoopStopEvent:
        return [*(_text_events(invocation, open_parts, with_message=not is_message) or ()), event]
    return [event]


@suppress_errors("binding")
def open_after(chunk: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of a streamed response that a chunk leaves open, the outer one first."""
    if "messageStop" in chunk or "metadata" in chunk:
        return ()
    is_in_block = "contentBlockStart" in chunk or "contentBlockDelta" in chunk
    return ("message", "block") if is_in_block else ("message",)


@suppress_errors("binding")
def _text_events(
    invocation: StrandsInvocation, open_parts: tuple[str, ...], *, with_message: bool
) -> list[TypedEvent]:
    """Return the events of the end user's text, once, within a message that is still open.

    Args:
        invocation: The halted invocation.
        open_parts: The parts of the stream that were not ended.
        with_message: Add the event of the whole message, which Strands does not add itself.
    """
    if (
        invocation.leg.has_streamed_text
        or invocation.run.raised
        or invocation.run.action == "wrapped_up"
    ):
        return []
    invocation.leg.has_streamed_text = True
    message: Any = invocation.leg.message
    text = message["content"][0]["text"]
    events = []
    if "block" in open_parts:
        events.append(TypedEvent({"event": {"contentBlockStop": {}}}))
        text = "\n" + text  # a chat page joins the texts
    if not open_parts:
        events.append(TypedEvent({"event": {"messageStart": {"role": "assistant"}}}))
    events += _block_of(text)
    events.append(TypedEvent({"event": {"messageStop": {"stopReason": "end_turn"}}}))
    if with_message:
        events.append(TypedEvent({"message": message}))
    return events


def cancelled_answer() -> ModelStopReason:
    """Return the same as Strands does for a response cancelled at its first chunk."""
    return ModelStopReason(
        "cancelled",
        {"role": "assistant", "content": [{"text": "Cancelled by user"}]},
        {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0},
        {"latencyMs": 0, "timeToFirstByteMs": 0},
    )


def is_ours(message: Message, invocation: StrandsInvocation, verdict: Verdict) -> bool:
    """Return whether a message was written by a halt: its text is the only sign."""
    return message["content"] == [{"text": invocation.text_of(verdict)}]


def _has_content(block: ContentBlock) -> bool:
    """Return whether a block has content: text that is not blank, or e.g. a picture."""
    return "reasoningContent" not in block and bool(block.get("text", "more than text").strip())
