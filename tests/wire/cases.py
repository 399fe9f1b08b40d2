"""Cases of a model call, and the vendor's bill for each."""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from tests.wire import formats, models
from tests.wire.formats import Answer
from tests.wire.providers import Provider
from tests.wire.server import Reply
from tests.wire.usages import Bill

PROMPT: Final = "Tell me of the harbour."
MAX_TURNS: Final = 3
"""The limit of every agent."""

PLAIN: Final = Bill(input=120, output=24)
CACHED: Final = Bill(input=12_050, output=30, read=2_000)
WRITTEN: Final = Bill(input=12_050, output=30, read=2_000, write=10_000)
WRITTEN_1H: Final = Bill(input=12_050, output=30, read=2_000, write=10_000, write_1h=10_000)
THOUGHT: Final = Bill(input=10_120, output=4_308, reasoning=2_809)
NOTHING: Final = Bill()

ASKED: Final = Bill(input=13, output=19)
"""Tokens of prompt and answer by `o200k_base`, plus 7 around a message (OpenAI's cookbook,
"How to count tokens"): the bill where the vendor reports none."""
HALF: Final = Bill(input=13, output=10)
"""The same for the first part of the answer."""
STRUCTURED: Final = Bill(input=61, output=10)
"""The same with a schema, and for its answer."""
PICTURED: Final = Bill(input=900, output=10)
"""Tokens of the picture by the vendors' rules: 765 (OpenAI), 1,044 (Claude), 1,032 (Gemini)."""
STATUSES: Final = (400, 402, 403, 429, 500, 503, 529)
"""529 is Anthropic's status when overloaded: https://platform.claude.com/docs/en/api/errors."""

TOOL: Final = ("Report", json.dumps({"text": "a report of the harbour"}))

How: TypeAlias = Literal["call", "output", "output model"]
"""Call an agent, its `structured_output` method, or it with a `structured_output_model`."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A case: the request to one vendor, and its bill."""

    replies: list[Reply]
    bill: Bill
    is_known: bool = True
    """False if the bill is not reported and can only be estimated."""
    config: Mapping[str, Any] = field(default_factory=dict)
    prompt: Any = PROMPT
    history: int = 0
    """Number of earlier turns."""
    has_tool: bool = False
    how: How = "call"
    times: int = 1
    """Number of invocations, each with the next reply."""


Case: TypeAlias = Callable[[Provider], Ask | None]
"""Makes the case; `None` if the vendor's format or Strands' class has no such case."""


def plain(provider: Provider) -> Ask:
    """Stream an ordinary answer."""
    return Ask(replies=[provider.reply(PLAIN)], bill=PLAIN)


def halted(provider: Provider) -> Ask:
    """Request a tool repeatedly, until a limit halts the agent."""
    search = ("search", json.dumps({"query": "harbour"}))
    times = {name: count * MAX_TURNS for name, count in vars(PLAIN).items()}
    return Ask(replies=[provider.reply(PLAIN, tool=search)], bill=Bill(**times), has_tool=True)


def unstreamed(provider: Provider) -> Ask | None:
    """Answer immediately."""
    if provider.unstreamed is None:
        return None
    answer = Answer(usages=(provider.usage(PLAIN),))
    return Ask(replies=[provider.whole_reply(answer)], bill=PLAIN, config=provider.unstreamed)


def cached(provider: Provider) -> Ask | None:
    """Read most of the prompt from a cache."""
    return Ask(replies=[provider.reply(CACHED)], bill=CACHED) if provider.has_cache else None


def written(provider: Provider) -> Ask | None:
    """Write most of the prompt to a cache, which lives until another request reads it."""
    if not provider.has_cache_write:
        return None
    return Ask(replies=[provider.reply(WRITTEN)], bill=WRITTEN)


def written_1h(provider: Provider) -> Ask | None:
    """Put most of the prompt in a cache for an hour, as requested."""
    if provider.name not in ("Anthropic", "Bedrock"):
        return None
    point = {"cachePoint": {"type": "default", "ttl": "1h"}}
    asked = [{"text": PROMPT}, point]
    return Ask(replies=[provider.reply(WRITTEN_1H)], bill=WRITTEN_1H, prompt=asked)


def reasoning(provider: Provider) -> Ask | None:
    """Think before the answer."""
    return Ask(replies=[provider.reply(THOUGHT)], bill=THOUGHT) if provider.has_reasoning else None


def repeated(provider: Provider) -> Ask | None:
    """Report the running total of usage several times."""
    if not provider.is_cumulative:
        return None
    return Ask(replies=[provider.reply(Bill(input=120, output=3), PLAIN)], bill=PLAIN)


def with_finish(provider: Provider) -> Ask | None:
    """Report usage with the finish reason, as some OpenAI-compatible servers do."""
    if provider.write is not formats.sse_with_end:
        return None
    events = formats.chat_with_finish(Answer(usages=(provider.usage(PLAIN),)))
    return Ask(replies=[Reply(provider.write(*events), provider.content_type)], bill=PLAIN)


def null(provider: Provider) -> Ask | None:
    """Report null as usage."""
    if provider.always_has_usage:
        return None
    answer = Answer(usages=(provider.no_usage,))
    return Ask(replies=[provider.stream_reply(answer)], bill=ASKED, is_known=False)


def missing(provider: Provider) -> Ask | None:
    """Report no usage."""
    if provider.always_has_usage:
        return None
    return Ask(replies=[provider.reply()], bill=ASKED, is_known=False)


def filtered(provider: Provider) -> Ask | None:
    """Let a filter or a guardrail end the answer."""
    if not provider.has_filter:
        return None
    return Ask(replies=[provider.reply(PLAIN, is_filtered=True)], bill=PLAIN)


def prompt_filtered(provider: Provider) -> Ask | None:
    """Refuse a prompt for its content: Azure with an error, Bedrock with a guardrail.

    Azure charges for it (see "Manage costs"); for Bedrock "there's no charge for foundation model
    inference calls" (guardrails-how.html), and its usage is zero.
    """
    asked = Bill(input=ASKED.input)
    if provider.name == "Bedrock":
        return Ask(replies=[provider.reply(NOTHING, is_filtered=True)], bill=NOTHING)
    if provider.name == "LiteLLM, Azure":
        error = {"message": "The response was filtered", "code": "content_filter", "status": 400}
        body = json.dumps({"error": error}).encode()
        return Ask(replies=[Reply([body], "application/json", 400)], bill=asked, is_known=False)
    return None


def refused(_: Provider) -> Ask:
    """Refuse with each of the statuses."""
    replies = [
        Reply(
            [b'{"error": {"message": "no", "code": %d, "status": "NO"}}' % status],
            "application/json",
            status,
        )
        for status in STATUSES
    ]
    return Ask(replies=replies, bill=NOTHING, times=len(STATUSES))


def overflow(provider: Provider) -> Ask:
    """Reject an overlong conversation, which Strands then shortens and sends again."""
    code = "context_length_exceeded"
    error = {"message": provider.too_long, "code": code, "status": "INVALID_ARGUMENT"}
    said = {
        "error": provider.too_long if provider.name == "Ollama" else error,
        "message": provider.too_long,
    }
    refusal = Reply([json.dumps(said).encode()], "application/json", 400)
    bill = PLAIN if provider.shortens else NOTHING
    return Ask(replies=[refusal, provider.reply(PLAIN)], bill=bill, history=30)


def failed(provider: Provider) -> Ask | None:
    """Send an error in the middle of an answer."""
    if provider.error is None:
        return None
    return Ask(replies=[provider.fails(ASKED)], bill=HALF, is_known=False)


def failed_at_once(provider: Provider) -> Ask | None:
    """Send an error instead of an answer, after status 200."""
    if provider.error is None:
        return None
    asked = Bill(input=ASKED.input)
    return Ask(replies=[provider.fails(asked, parts=0)], bill=asked, is_known=False)


def broken(provider: Provider) -> Ask:
    """Disconnect in the middle of an answer."""
    return Ask(replies=[provider.breaks_off(ASKED)], bill=HALF, is_known=False)


def output(provider: Provider) -> Ask | None:
    """Answer `agent.structured_output`; most classes pass on no usage."""
    return _output(provider, PROMPT, STRUCTURED)


def unreadable(provider: Provider) -> Ask | None:
    """Answer `agent.structured_output` with invalid output."""
    return _output(provider, PROMPT, STRUCTURED, ("Nothing of interest.",), None)


def picture(provider: Provider) -> Ask | None:
    """Answer `agent.structured_output` for a picture of 1000 by 800 pixels."""
    return _output(provider, with_picture(), PICTURED)


def pictured(provider: Provider) -> Ask | None:
    """Show the same picture to the agent, and report no usage."""
    if provider.always_has_usage:
        return None
    bill = Bill(input=PICTURED.input, output=ASKED.output)
    return Ask(replies=[provider.reply()], bill=bill, prompt=with_picture(), is_known=False)


def with_picture() -> list[dict[str, Any]]:
    """Send a picture of 1000 by 800 pixels."""
    image = {"image": {"format": "png", "source": {"bytes": png(1_000, 800)}}}
    return [{"text": PROMPT}, image]


BY_STREAM: Final = ("Anthropic", "Bedrock", "llama.cpp")
"""Vendors whose class streams for `structured_output`, and so passes on the usage."""


TEXT_ONLY: Final = (models.llamacpp, models.openai)
"""Classes that read output from the text alone, so a tool call in it matters."""


def _output(
    provider: Provider,
    prompt: Any,
    bill: Bill,
    parts: tuple[str, ...] = (TOOL[1],),
    tool: tuple[str, str] | None = TOOL,
) -> Ask | None:
    is_streamed = provider.name in BY_STREAM
    if not is_streamed and provider.whole is None:
        return None
    tool = None if provider.make in TEXT_ONLY else tool
    answer = Answer(usages=(provider.usage(bill),), parts=parts, tool=tool)
    reply = provider.stream_reply(answer) if is_streamed else provider.whole_reply(answer)
    return Ask(replies=[reply], bill=bill, is_known=is_streamed, prompt=prompt, how="output")


def output_model(provider: Provider) -> Ask:
    """Request structured output from the loop, by a tool."""
    replies = [provider.reply(PLAIN, tool=TOOL, parts=("Here it is: ",)), provider.reply(PLAIN)]
    return Ask(replies=replies, bill=PLAIN, how="output model")


@functools.cache
def png(width: int, height: int) -> bytes:
    """Make a picture without pixel data: 400 kB, most of which a decoder skips."""
    head = b"IHDR" + struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    filler = b"tEXt" + bytes(400_000)
    chunks = (
        struct.pack("!I", len(chunk) - 4) + chunk + struct.pack("!I", zlib.crc32(chunk))
        for chunk in (head, filler, b"IEND")
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


CASES: Final[Mapping[str, Case]] = {
    "streamed": plain,
    "halted": halted,
    "not streamed": unstreamed,
    "cache read": cached,
    "cache write": written,
    "1-hour cache write": written_1h,
    "reasoning": reasoning,
    "usage in several chunks": repeated,
    "usage with finish reason": with_finish,
    "null usage": null,
    "no usage": missing,
    "answer filtered": filtered,
    "prompt filtered": prompt_filtered,
    "refused": refused,
    "context overflow, retried": overflow,
    "mid-stream error": failed,
    "error before content": failed_at_once,
    "connection lost": broken,
    "`structured_output`": output,
    "`structured_output`, image": picture,
    "`structured_output`, invalid": unreadable,
    "`structured_output_model`": output_model,
    "no usage, image": pictured,
}
"""The cases by their names in the table of the page."""
