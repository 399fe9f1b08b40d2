"""Strands' model classes, each with the wire format, usage and quirks of its vendor."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.wire import formats, models, usages
from tests.wire.formats import Answer
from tests.wire.server import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from strands.models import Model

    from tests.wire.usages import Bill

SERVER_ERROR = {"error": {"message": "The server is overloaded", "type": "server_error"}}
TOO_LONG = "This model's maximum context length is 8192 tokens. However, you requested 9999."


@dataclass(frozen=True, kw_only=True)
class Provider:
    """A vendor, and the Strands class for it."""

    name: str
    make: Callable[..., Model]
    """Makes the model from the address of the server and the settings of a case."""
    bills: str
    """The vendor's documentation of its billing."""
    stream: Callable[[Answer], list[Any]]
    """The streamed answer."""
    write: Callable[..., list[bytes]]
    usage: Callable[[Bill], Any]
    """The bill in the vendor's format."""
    whole: Callable[[Answer], Any] | None = None
    """The whole answer; `None` where Strands' class never requests one."""
    unstreamed: dict[str, Any] | None = None
    """Settings that switch streaming off; `None` if the class always streams."""
    content_type: str = "text/event-stream"
    has_cache: bool = True
    """True if its format reports cache reads."""
    has_cache_write: bool = False
    has_reasoning: bool = True
    """True if its format reports reasoning tokens."""
    is_cumulative: bool = False
    """True if usage is sent repeatedly, and the last one counts."""
    no_usage: Any = None
    """The format's way to report no usage."""
    always_has_usage: bool = False
    error: Any = None
    """The stream of a call that fails midway; `None` where that format is unknown."""
    too_long: str = TOO_LONG
    """The error for an overlong prompt, with status 400."""
    shortens: bool = True
    """True if Strands' class recognizes that error, so the conversation is shortened."""
    has_filter: bool = False
    """True if its format marks answers that a filter or a guardrail has ended."""
    is_local: bool = False
    """True if its tokens are free."""

    def reply(self, *bills: Bill, **answer: Any) -> Reply:
        """Stream an answer, with a usage for each of these bills."""
        return self.stream_reply(Answer(usages=tuple(map(self.usage, bills)), **answer))

    def stream_reply(self, answer: Answer) -> Reply:
        """Make a streamed answer."""
        return Reply(self.write(*self.stream(answer)), self.content_type)

    def whole_reply(self, answer: Answer) -> Reply:
        """Make an answer that is not streamed."""
        assert self.whole is not None
        (body,) = formats.lines(self.whole(answer))
        return Reply([body], "application/json")

    def begun(self, usage: Bill, *, parts: int = 1, text: str = formats.PARTS[0]) -> list[Any]:
        """The output streamed by the end of the first part; none with `parts=0`."""
        answer = Answer(usages=(self.usage(usage),), parts=(text, formats.PARTS[1]))
        events = self.stream(answer)
        if not parts:
            return events[:1] if self.name in BEGIN_EMPTY else []
        written = (self.write(event)[0] for event in events)
        return events[: next(n for n, chunk in enumerate(written) if text.encode() in chunk) + 1]

    def fails(self, usage: Bill, *, parts: int = 1) -> Reply:
        """Make an answer that ends with an error in the stream."""
        return Reply(self.write(*self.begun(usage, parts=parts), self.error), self.content_type)

    def breaks_off(self, usage: Bill) -> Reply:
        """Make an answer that disconnects after its first part."""
        chunks = [self.write(event)[0] for event in self.begun(usage)]
        return Reply(chunks, self.content_type, breaks_off=True)

    def hangs(self, usage: Bill, text: str) -> Reply:
        """Make an answer that hangs after a text."""
        chunks = [self.write(event)[0] for event in self.begun(usage, text=text)]
        return Reply(chunks, self.content_type, hangs=True)


XAI = "https://github.com/BerriAI/litellm/blob/main/litellm/llms/xai/chat/transformation.py"
"""Tokens that xAI counts outside its completion; its own pages only name the fields."""

BEGIN_EMPTY = ("Anthropic", "Bedrock", "OpenAI Responses", "Llama API")
"""Formats with an event before any content."""

CHAT: dict[str, Any] = {
    "stream": formats.openai_chat,
    "whole": formats.openai_chat_whole,
    "write": formats.sse_with_end,
    "usage": usages.openai,
    "error": SERVER_ERROR,
}
BY_OPENAI: dict[str, Any] = {
    **CHAT,
    "make": models.openai,
    "unstreamed": {"stream": False},
    "is_cumulative": True,
    "has_filter": True,
}
BY_LITELLM: dict[str, Any] = {**CHAT, "unstreamed": {"stream": False}, "has_filter": True}
OUTSIDE = functools.partial(usages.openai, outside=True)
AWS: dict[str, Any] = {
    "write": formats.event_stream,
    "content_type": "application/vnd.amazon.eventstream",
}
GEMINI: dict[str, Any] = {
    "stream": formats.gemini,
    "whole": formats.gemini_whole,
    "write": formats.sse,
    "usage": usages.gemini,
    "bills": "https://ai.google.dev/gemini-api/docs/pricing",
    "is_cumulative": True,
    "has_filter": True,
    "error": {"error": {"code": 503, "message": "Overloaded", "status": "UNAVAILABLE"}},
    "too_long": "The input token count (9999) exceeds the maximum number of tokens allowed (8192).",
}


def litellm(model_id: str) -> Callable[..., Model]:
    """Make models for one of LiteLLM's routes."""
    return functools.partial(models.litellm, model_id=model_id)


PROVIDERS = (
    Provider(
        name="OpenAI Chat",
        bills="https://platform.openai.com/docs/guides/prompt-caching",
        has_cache_write=True,
        **BY_OPENAI,
    ),
    Provider(
        name="xAI via OpenAI's class",
        bills=XAI,
        **{
            **BY_OPENAI,
            "usage": OUTSIDE,
            "make": functools.partial(models.openai, model_id="grok-4"),
        },
    ),
    Provider(
        name="Gemini via OpenAI's class",
        bills="https://ai.google.dev/gemini-api/docs/openai",
        **{
            **BY_OPENAI,
            "usage": OUTSIDE,
            "error": GEMINI["error"],
            "make": functools.partial(models.openai, model_id="gemini-2.5-pro"),
        },
    ),
    Provider(
        name="DeepSeek via OpenAI's class",
        bills="https://api-docs.deepseek.com/guides/kv_cache",
        **{**BY_OPENAI, "usage": usages.deepseek},
    ),
    Provider(
        name="MiniMax via OpenAI's class",
        bills="https://platform.minimax.io/docs/api-reference/text-prompt-caching",
        **{**BY_OPENAI, "usage": usages.minimax},
    ),
    Provider(
        name="OpenAI Responses",
        bills="https://platform.openai.com/docs/guides/prompt-caching",
        make=models.openai_responses,
        stream=formats.openai_responses,
        whole=formats.openai_responses_whole,
        write=functools.partial(formats.sse, names=True),
        usage=usages.responses,
        has_cache_write=True,
        has_filter=True,
        error={"type": "error", "code": "server_error", "message": "Overloaded", "param": None},
    ),
    Provider(
        name="Anthropic",
        bills="https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching",
        make=models.anthropic,
        stream=formats.anthropic,
        write=functools.partial(formats.sse, names=True),
        usage=usages.anthropic,
        has_cache_write=True,
        has_reasoning=False,
        is_cumulative=True,
        always_has_usage=True,
        has_filter=True,
        error={"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        too_long="prompt is too long: 9999 tokens > 8192 maximum",
    ),
    Provider(
        name="Bedrock",
        bills="https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_TokenUsage.html",
        make=models.bedrock,
        stream=formats.bedrock,
        whole=formats.bedrock_whole,
        unstreamed={"streaming": False},
        usage=usages.bedrock,
        has_cache_write=True,
        has_reasoning=False,
        has_filter=True,
        error=("modelStreamErrorException", {"message": "Overloaded"}),
        too_long="Input is too long for requested model",
        **AWS,
    ),
    Provider(name="Gemini", make=models.gemini, **GEMINI),
    Provider(
        name="Mistral",
        bills="https://docs.mistral.ai/api/",
        make=models.mistral,
        unstreamed={"stream": False},
        **{**CHAT, "stream": formats.chat_with_finish},
    ),
    Provider(
        name="Ollama",
        bills="https://github.com/ollama/ollama/blob/main/docs/api.md",
        make=models.ollama,
        stream=formats.ollama,
        whole=formats.ollama_whole,
        write=formats.lines,
        usage=usages.ollama,
        content_type="application/x-ndjson",
        has_cache=False,
        has_reasoning=False,
        no_usage={"prompt_eval_count": None, "eval_count": None},
        error={"error": "The server is overloaded"},
        too_long="the input length exceeds the context length",
        is_local=True,
    ),
    Provider(
        name="llama.cpp",
        bills="https://github.com/ggml-org/llama.cpp/tree/master/tools/server",
        make=models.llamacpp,
        is_local=True,
        **{**CHAT, "stream": functools.partial(formats.openai_chat, null=False)},
    ),
    Provider(
        name="LiteLLM, OpenAI",
        bills="https://platform.openai.com/docs/guides/prompt-caching",
        make=litellm("openai/gpt-4o"),
        **BY_LITELLM,
    ),
    Provider(
        name="LiteLLM, xAI",
        bills=XAI,
        make=litellm("xai/grok-4"),
        **{**BY_LITELLM, "usage": OUTSIDE},
    ),
    Provider(
        name="LiteLLM, Azure",
        bills="https://learn.microsoft.com/azure/ai-foundry/openai/how-to/manage-costs",
        make=models.litellm_azure,
        **BY_LITELLM,
    ),
    Provider(
        name="LiteLLM, OpenRouter",
        bills="https://openrouter.ai/docs/use-cases/usage-accounting",
        make=litellm("openrouter/openai/gpt-4o"),
        shortens=False,
        **{
            **BY_LITELLM,
            "error": {"error": {"code": 502, "message": "Provider disconnected"}, "choices": []},
        },
    ),
    Provider(name="LiteLLM, Vertex", make=models.litellm_vertex, **{**BY_LITELLM, **GEMINI}),
    Provider(
        name="Writer",
        bills="https://dev.writer.com/home/pricing",
        make=models.writer,
        **{**CHAT, "usage": functools.partial(usages.openai, singular=True)},
    ),
    Provider(
        name="Llama API",
        bills="https://llama.developer.meta.com/docs/",
        make=models.llamaapi,
        stream=formats.llamaapi,
        write=formats.llamaapi_sse,
        error=SERVER_ERROR,
        usage=usages.llamaapi,
        has_cache=False,
        has_reasoning=False,
        no_usage=[],
    ),
    Provider(
        name="SageMaker",
        bills="https://docs.aws.amazon.com/sagemaker/latest/dg/realtime-endpoints.html",
        make=models.sagemaker,
        stream=formats.sagemaker,
        whole=formats.openai_chat_whole,
        unstreamed={"payload_config": {"max_tokens": 1_000, "stream": False}},
        usage=usages.plain,
        has_cache=False,
        has_reasoning=False,
        is_cumulative=True,
        shortens=False,
        error=("ModelStreamError", {"Message": "Overloaded", "ErrorCode": "ModelInvocation"}),
        **AWS,
    ),
)
BY_NAME = {provider.name: provider for provider in PROVIDERS}
