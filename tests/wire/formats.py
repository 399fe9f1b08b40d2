"""Answers in each vendor's format, streamed and whole, hand-written from its documentation."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any

TEXT = "The ships left the harbour at dawn, and nobody on the quay said a word about it."
"""The answer of every model, in two parts."""
PARTS = (TEXT[:40], TEXT[40:])

JSON = Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a model, in any format."""

    usages: tuple[JSON, ...] = ()
    """In the vendor's format: all of them if it reports usage repeatedly; the last one counts."""
    parts: tuple[str, ...] = PARTS
    tool: tuple[str, str] | None = None
    """Name and arguments of a requested tool."""
    is_filtered: bool = False
    """True if a filter or a guardrail of the vendor ends it."""

    @property
    def usage(self) -> JSON:
        """The usage that counts, or `None`."""
        return self.usages[-1] if self.usages else None


def sse(*events: JSON, names: bool = False) -> list[bytes]:
    """Write server-sent events; Anthropic and OpenAI's Responses name theirs."""
    return [
        (f"event: {event['type']}\n" if names else "").encode()
        + f"data: {json.dumps(event) if not isinstance(event, str) else event}\n\n".encode()
        for event in events
    ]


def sse_with_end(*events: JSON) -> list[bytes]:
    """Write server-sent events as OpenAI ends them."""
    return sse(*events, "[DONE]")


def lines(*objects: JSON) -> list[bytes]:
    """Write JSON lines."""
    return [f"{json.dumps(each)}\n".encode() for each in objects]


def event_stream(*events: tuple[str, JSON]) -> list[bytes]:
    """Write messages of AWS' event streams: smithy.io, "Amazon Event Stream Specification".

    An exception is marked as one.
    """
    return [
        _message(kind, payload if isinstance(payload, bytes) else json.dumps(payload).encode())
        for kind, payload in events
    ]


def _message(kind: str, payload: bytes) -> bytes:
    said = "exception" if kind.lower().endswith(("exception", "error")) else "event"
    headers = b"".join(
        _header(name, value)
        for name, value in (
            (f":{said}-type".encode(), kind.encode()),
            (b":content-type", b"application/json"),
            (b":message-type", said.encode()),
        )
    )
    prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + payload
    return message + struct.pack("!I", zlib.crc32(message))


def _header(name: bytes, value: bytes) -> bytes:
    return struct.pack("!B", len(name)) + name + b"\x07" + struct.pack("!H", len(value)) + value


# --- OpenAI Chat and compatible formats -----------------------------------------------------------

CHUNK: JSON = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
TOOL_CALL: JSON = {"index": 0, "id": "t1", "type": "function"}


def _finish(answer: Answer) -> str:
    if answer.is_filtered:
        return "content_filter"
    return "stop" if answer.tool is None else "tool_calls"


def _called(answer: Answer) -> list[JSON]:
    if answer.tool is None:
        return []
    name, arguments = answer.tool
    return [{**TOOL_CALL, "function": {"name": name, "arguments": arguments}}]


def _called_in_parts(answer: Answer) -> list[JSON]:
    """The name of a tool, and then its arguments."""
    if answer.tool is None:
        return []
    name, arguments = answer.tool
    return [
        {**TOOL_CALL, "function": {"name": name, "arguments": ""}},
        {"index": 0, "function": {"arguments": arguments}},
    ]


def openai_chat(answer: Answer, *, null: bool = True, parts: bool = True) -> list[JSON]:
    """Chunks of OpenAI's Chat Completions: usage in a last one without choices.

    In the other chunks it is null, or the running total, as in vLLM's when requested
    (`continuous_usage_stats`). llama.cpp's have none (`null`), and Mistral sends a tool call in one
    piece (`parts`).
    """
    early: list[JSON] = list(answer.usages[:-1]) or [None]

    def chunk(number: int, delta: JSON, finish: str | None = None) -> JSON:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        usage = {"usage": early[min(number, len(early) - 1)]} if null else {}
        return {**CHUNK, "choices": [choice], **usage}

    said: list[JSON] = [{"role": "assistant", "content": part} for part in answer.parts]
    calls = _called_in_parts(answer) if parts else _called(answer)
    said += [{"role": "assistant", "tool_calls": [call]} for call in calls]
    events = [chunk(number, delta) for number, delta in enumerate(said)]
    end = [{**CHUNK, "choices": [], "usage": answer.usage}] if answer.usages else []
    return [*events, chunk(len(said), {}, _finish(answer)), *end]


def chat_with_finish(answer: Answer) -> list[JSON]:
    """Chunks of Mistral's, whose usage comes with the finish reason."""
    *events, last = openai_chat(replace(answer, usages=()), null=False, parts=False)
    return [*events, {**last, **({"usage": answer.usage} if answer.usages else {})}]


def openai_chat_whole(answer: Answer) -> JSON:
    """A whole answer of OpenAI's Chat Completions."""
    message: JSON = {"role": "assistant", "content": "".join(answer.parts)}
    if calls := _called(answer):
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": _finish(answer)}
    usage = {"usage": answer.usage} if answer.usages else {}
    return {**CHUNK, "object": "chat.completion", "choices": [choice], **usage}


# --- OpenAI Responses -----------------------------------------------------------------------------

RESPONSE: JSON = {
    "id": "r1", "object": "response", "created_at": 1, "model": "m", "output": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "in_progress",
}  # fmt: skip


def openai_responses(answer: Answer) -> list[JSON]:
    """Events of OpenAI's Responses."""
    done = {**RESPONSE, "status": "completed"}
    if answer.usages:
        done["usage"] = answer.usage
    if answer.is_filtered:
        details = {"incomplete_details": {"reason": "content_filter"}}
        done = {**done, **details, "status": "incomplete"}
    place = {"item_id": "i1", "output_index": 0}
    events: list[JSON] = [{"type": "response.created", "response": RESPONSE}]
    events += [
        {"type": "response.output_text.delta", "delta": part, **place, "content_index": 0}
        for part in answer.parts
    ]
    if answer.tool is not None:
        name, arguments = answer.tool
        item = {"type": "function_call", "id": "i1", "call_id": "t1", "name": name, "arguments": ""}
        events += [
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.function_call_arguments.delta", "delta": arguments, **place},
        ]
    events.append({"type": f"response.{done['status']}", "response": done})
    return [{**event, "sequence_number": each} for each, event in enumerate(events)]


def openai_responses_whole(answer: Answer) -> JSON:
    """A whole answer of OpenAI's Responses."""
    content = [{"type": "output_text", "text": "".join(answer.parts), "annotations": []}]
    message = {
        "id": "o1", "type": "message", "role": "assistant", "status": "completed",
        "content": content,
    }  # fmt: skip
    usage = {"usage": answer.usage} if answer.usages else {}
    return {**RESPONSE, "status": "completed", "output": [message], **usage}


# --- Anthropic ------------------------------------------------------------------------------------


def anthropic(answer: Answer) -> list[JSON]:
    """Events of Anthropic's Messages: input and cache first, output last, and cumulative."""
    usage = answer.usage or {"input_tokens": 0, "output_tokens": 0}
    message: JSON = {
        "id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 1},
    }  # fmt: skip
    blocks: list[tuple[JSON, list[JSON]]] = [
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": p} for p in answer.parts])
    ]
    reason = "refusal" if answer.is_filtered else "end_turn"
    if answer.tool is not None:
        name, arguments = answer.tool
        block = {"type": "tool_use", "id": "t1", "name": name, "input": {}}
        blocks.append((block, [{"type": "input_json_delta", "partial_json": arguments}]))
        reason = "tool_use"
    events: list[JSON] = [{"type": "message_start", "message": message}]
    for index, (block, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [
            {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
        ]
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": reason, "stop_sequence": None}
    for each in answer.usages or (usage,):
        told = {"output_tokens": each["output_tokens"]}
        events.append({"type": "message_delta", "delta": end, "usage": told})
    return [*events, {"type": "message_stop"}]


# --- Bedrock --------------------------------------------------------------------------------------

GUARDED: JSON = {"guardrail": {"inputAssessment": {}}}


def _bedrock_reason(answer: Answer) -> str:
    if answer.is_filtered:
        return "guardrail_intervened"
    return "end_turn" if answer.tool is None else "tool_use"


def bedrock(answer: Answer) -> list[tuple[str, JSON]]:
    """Events of Bedrock's ConverseStream."""
    events: list[tuple[str, JSON]] = [("messageStart", {"role": "assistant"})]
    events += [
        ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": part}})
        for part in answer.parts
    ]
    events.append(("contentBlockStop", {"contentBlockIndex": 0}))
    if answer.tool is not None:
        name, arguments = answer.tool
        start = {"toolUse": {"toolUseId": "t1", "name": name}}
        delta = {"toolUse": {"input": arguments}}
        events += [
            ("contentBlockStart", {"contentBlockIndex": 1, "start": start}),
            ("contentBlockDelta", {"contentBlockIndex": 1, "delta": delta}),
            ("contentBlockStop", {"contentBlockIndex": 1}),
        ]
    events.append(("messageStop", {"stopReason": _bedrock_reason(answer)}))
    if answer.usages:
        trace = {"trace": GUARDED} if answer.is_filtered else {}
        usage = {"usage": answer.usage} if answer.usage is not None else {}
        events.append(("metadata", {**usage, "metrics": {"latencyMs": 1}, **trace}))
    return events


def bedrock_whole(answer: Answer) -> JSON:
    """A whole answer of Bedrock's Converse."""
    content: list[JSON] = [{"text": "".join(answer.parts)}] if answer.parts else []
    if answer.tool is not None:
        name, arguments = answer.tool
        use = {"toolUseId": "t1", "name": name, "input": json.loads(arguments)}
        content.append({"toolUse": use})
    return {
        "output": {"message": {"role": "assistant", "content": content}},
        "stopReason": _bedrock_reason(answer),
        "metrics": {"latencyMs": 1},
        **({"usage": answer.usage} if answer.usages else {}),
    }


# --- Gemini ---------------------------------------------------------------------------------------


def gemini(answer: Answer) -> list[JSON]:
    """Chunks of Gemini's streamGenerateContent; each has cumulative usage."""
    said: list[JSON] = [{"text": part} for part in answer.parts]
    if answer.tool is not None:
        name, arguments = answer.tool
        said.append({"functionCall": {"name": name, "args": json.loads(arguments)}})
    chunks: list[JSON] = [
        {"candidates": [{"content": {"role": "model", "parts": [part]}}]} for part in said
    ]
    chunks[-1]["candidates"][0]["finishReason"] = "SAFETY" if answer.is_filtered else "STOP"
    for chunk in chunks if answer.usages else ():
        chunk["usageMetadata"] = answer.usages[0] if chunk is not chunks[-1] else answer.usage
    return chunks


def gemini_whole(answer: Answer) -> JSON:
    """A whole answer of Gemini."""
    parts = ("".join(answer.parts),)
    (chunk,) = gemini(replace(answer, parts=parts, tool=None))
    return chunk


# --- Ollama ---------------------------------------------------------------------------------------

OLLAMA: JSON = {"model": "m", "created_at": "2026-01-01T00:00:00Z"}


def ollama(answer: Answer) -> list[JSON]:
    """Objects of Ollama's chat."""
    said: list[JSON] = [{"role": "assistant", "content": part} for part in answer.parts]
    if answer.tool is not None:
        name, arguments = answer.tool
        call = {"function": {"name": name, "arguments": json.loads(arguments)}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
    end = ollama_whole(replace(answer, parts=()))
    return [*({**OLLAMA, "message": each, "done": False} for each in said), end]


def ollama_whole(answer: Answer) -> JSON:
    """A whole answer of Ollama."""
    message = {"role": "assistant", "content": "".join(answer.parts)}
    end = {"done": True, "done_reason": "stop", "total_duration": 1, "eval_duration": 1}
    return {**OLLAMA, "message": message, **end, **(answer.usage or {})}


# --- Llama API ------------------------------------------------------------------------------------


def llamaapi(answer: Answer) -> list[JSON]:
    """Events of the Llama API."""

    def event(kind: str, text: str, **more: JSON) -> JSON:
        return {"event": {"event_type": kind, "delta": {"type": "text", "text": text}, **more}}

    events = [event("start", ""), *(event("progress", part) for part in answer.parts)]
    if answer.tool is not None:
        name, arguments = answer.tool
        named = {"id": "t1", "function": {"name": name}}
        for part in (named, {"function": {"arguments": arguments}}):
            delta = {"type": "tool_call", **part}
            events.append({"event": {"event_type": "progress", "delta": delta}})
    reason = "stop" if answer.tool is None else "tool_calls"
    events.append(event("complete", "", stop_reason=reason))
    if answer.usage is not None:
        events.append(event("metrics", "", metrics=answer.usage))
    return events


def llamaapi_sse(*events: JSON) -> list[bytes]:
    """Write events of the Llama API; its client recognizes an error by its event name.

    llama-api-client, _streaming.py, `Stream.__stream__`.
    """
    return [
        sse({"type": "error", **each}, names=True)[0] if "error" in each else sse(each)[0]
        for each in events
    ]


def sagemaker(answer: Answer) -> list[tuple[str, JSON]]:
    """A SageMaker container's stream, framed as AWS sends it."""
    return [("PayloadPart", event) for event in sse(*openai_chat(answer), "[DONE]")]
