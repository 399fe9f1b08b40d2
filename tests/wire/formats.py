"""What each vendor streams, written by hand from its documentation."""

from __future__ import annotations

import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT = "The ships left the harbour at dawn, and nobody on the quay said a word about it."
"""What every model answers, in two parts."""
PARTS = (TEXT[:40], TEXT[40:])

JSON = Any


def sse(*events: JSON, names: bool = False) -> list[bytes]:
    """Write server-sent events; Anthropic and OpenAI's Responses name theirs."""
    return [
        (f"event: {event['type']}\n" if names else "").encode()
        + f"data: {json.dumps(event) if not isinstance(event, str) else event}\n\n".encode()
        for event in events
    ]


def lines(*objects: JSON) -> list[bytes]:
    """Write JSON lines."""
    return [f"{json.dumps(each)}\n".encode() for each in objects]


def event_stream(*events: tuple[str, JSON]) -> list[bytes]:
    """Write messages of AWS' event streams: smithy.io, "Amazon Event Stream Specification"."""
    return [
        _message(kind, payload if isinstance(payload, bytes) else json.dumps(payload).encode())
        for kind, payload in events
    ]


def _message(kind: str, payload: bytes) -> bytes:
    headers = b"".join(
        _header(name, value)
        for name, value in (
            (b":event-type", kind.encode()),
            (b":content-type", b"application/json"),
            (b":message-type", b"event"),
        )
    )
    prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + payload
    return message + struct.pack("!I", zlib.crc32(message))


def _header(name: bytes, value: bytes) -> bytes:
    return struct.pack("!B", len(name)) + name + b"\x07" + struct.pack("!H", len(value)) + value


def openai_chat(usages: Iterable[JSON], *, in_finish: bool = False) -> list[JSON]:
    """Chat completions, as OpenAI and all that follow it stream them.

    Args:
        usages: The usage of each chunk that has one, in order.
        in_finish: It comes with the finish reason, not in a chunk without choices.
    """
    base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: JSON, finish: str | None = None, **more: JSON) -> JSON:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {**base, "choices": [choice], **more}

    events = [chunk({"role": "assistant", "content": part}) for part in PARTS]
    usages = list(usages)
    if in_finish:
        return [
            *events,
            chunk({"content": ""}, "stop", **({"usage": usages[-1]} if usages else {})),
        ]
    ends = [{**base, "choices": [], "usage": usage} for usage in usages]
    return [*events, chunk({}, "stop"), *ends]


def openai_responses(usages: Iterable[JSON]) -> list[JSON]:
    """Events of OpenAI's Responses."""
    response = {
        "id": "r1", "object": "response", "created_at": 1, "model": "m", "output": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "in_progress",
    }  # fmt: skip
    told = list(usages)
    done = {**response, "status": "completed", **({"usage": told[-1]} if told else {})}
    deltas = [
        {
            "type": "response.output_text.delta", "delta": part, "item_id": "i1",
            "output_index": 0, "content_index": 0, "logprobs": [],
        }
        for part in PARTS
    ]  # fmt: skip
    events: list[JSON] = [
        {"type": "response.created", "response": response},
        *deltas,
        {"type": "response.completed", "response": done},
    ]
    return [{**event, "sequence_number": each} for each, event in enumerate(events)]


def anthropic(usages: Iterable[JSON]) -> list[JSON]:
    """Events of Anthropic's Messages: input and cache first, output last."""
    usage = {key: value for each in usages for key, value in each.items()}
    first = {**usage, "output_tokens": 1} if usage else {"input_tokens": 0, "output_tokens": 0}
    message: JSON = {
        "id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": first,
    }  # fmt: skip
    end = {"output_tokens": usage.get("output_tokens", 0)}
    return [
        {"type": "message_start", "message": message},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        },
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": part},
            }
            for part in PARTS
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": end,
        },
        {"type": "message_stop"},
    ]


def bedrock(usages: Iterable[JSON]) -> list[tuple[str, JSON]]:
    """Events of Bedrock's ConverseStream."""
    return [
        ("messageStart", {"role": "assistant"}),
        *(
            ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": part}})
            for part in PARTS
        ),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": "end_turn"}),
        *(("metadata", {"usage": usage, "metrics": {"latencyMs": 1}}) for usage in usages),
    ]


def gemini(usages: Iterable[JSON]) -> list[JSON]:
    """Chunks of Gemini's streamGenerateContent; usage comes with each, and is cumulative."""
    told = list(usages)
    early: list[JSON] = [{"usageMetadata": told[0]}] if len(told) > 1 else [{}]
    last: list[JSON] = [{"usageMetadata": told[-1]}] if told else [{}]
    ends: tuple[JSON, JSON] = ({}, {"finishReason": "STOP"})
    return [
        {"candidates": [{"content": {"role": "model", "parts": [{"text": part}]}, **end}], **usage}
        for part, end, usage in zip(PARTS, ends, [*early, *last], strict=True)
    ]


def ollama(usages: Iterable[JSON]) -> list[JSON]:
    """Objects of Ollama's chat."""
    base = {"model": "m", "created_at": "2026-01-01T00:00:00Z"}
    said = [
        {**base, "message": {"role": "assistant", "content": part}, "done": False} for part in PARTS
    ]
    end = {
        **base, "message": {"role": "assistant", "content": ""}, "done": True,
        "done_reason": "stop", "total_duration": 1, "eval_duration": 1,
    }  # fmt: skip
    return [*said, {**end, **{key: value for each in usages for key, value in each.items()}}]


def llamaapi(usages: Iterable[JSON]) -> list[JSON]:
    """Events of the Llama API."""

    def event(kind: str, text: str, **more: JSON) -> JSON:
        return {"event": {"event_type": kind, "delta": {"type": "text", "text": text}, **more}}

    return [
        event("start", ""),
        *(event("progress", part) for part in PARTS),
        event("complete", "", stop_reason="stop"),
        *(event("metrics", "", metrics=usage) for usage in usages),
    ]


def sagemaker(chunks: Iterable[JSON]) -> list[tuple[str, JSON]]:
    """What a container on SageMaker streams, in the parts of AWS."""
    return [("PayloadPart", event) for event in sse(*chunks, "[DONE]")]
