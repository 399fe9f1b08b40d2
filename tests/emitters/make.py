"""Makes the fixtures again: spans of the libraries themselves, of calls to a loopback server.

Each line is a separate environment, because otel-limits does not depend on these libraries:

    pip install openai anthropic langchain-openai openai-agents \
        openinference-instrumentation-{openai,anthropic,langchain,openai-agents} \
        opentelemetry-instrumentation-{openai,anthropic,langchain,openai-agents}
    pip install "pydantic-ai-slim[openai]" opentelemetry-sdk
    pip install google-adk
    pip install langfuse openai
    pip install litellm opentelemetry-sdk
    pip install 'strands-agents==1.30.*'
    pip install strands-agents

    PYTHONPATH=. python tests/emitters/make.py openinference-langchain strands-1.30 ...

A client makes one call. An agent makes two, as it uses a tool, so that its own span has a sum.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.ledger.otlp import line
from tests.wire.formats import event_stream

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent

CALLS = (
    {"input": 1_200, "output": 30, "read": 1_000, "write": 150, "thoughts": 10},
    {"input": 1_300, "output": 20, "read": 1_200, "write": 0, "thoughts": 5},
)
"""The server's replies to the first and the second call."""
TOOL = "weather"
PLACE = {"city": "Oslo"}
ANSWER = "Hi"


# --- what the vendors answer ----------------------------------------------------------------------


def chat(used: dict[str, int], *, with_tool: bool) -> Any:
    """OpenAI's Chat: cached tokens are within the prompt."""
    function = {"name": TOOL, "arguments": json.dumps(PLACE)}
    asks = {"content": None, "tool_calls": [{"id": "t1", "type": "function", "function": function}]}
    message = {"role": "assistant", **(asks if with_tool else {"content": ANSWER})}
    finish = "tool_calls" if with_tool else "stop"
    return {
        "id": f"chatcmpl-{1 if used is CALLS[0] else 2}",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-4o-2024-08-06",
        "choices": [{"index": 0, "finish_reason": finish, "message": message}],
        "usage": {
            "prompt_tokens": used["input"],
            "completion_tokens": used["output"],
            "total_tokens": used["input"] + used["output"],
            "prompt_tokens_details": {"cached_tokens": used["read"]},
        },
    }


def responses(used: dict[str, int], *, with_tool: bool) -> Any:
    """OpenAI's Responses."""
    text = {"type": "output_text", "text": ANSWER, "annotations": []}
    said = {"type": "message", "id": "m1", "role": "assistant", "status": "completed"}
    asks = {"type": "function_call", "id": "f1", "call_id": "t1", "name": TOOL}
    asks["arguments"] = json.dumps(PLACE)
    return {
        "id": f"resp_{1 if used is CALLS[0] else 2}",
        "object": "response",
        "created_at": 1,
        "model": "gpt-4o-2024-08-06",
        "status": "completed",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [asks if with_tool else {**said, "content": [text]}],
        "usage": {
            "input_tokens": used["input"],
            "output_tokens": used["output"],
            "total_tokens": used["input"] + used["output"],
            "input_tokens_details": {"cached_tokens": used["read"]},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def messages(used: dict[str, int], *, with_tool: bool) -> Any:
    """Anthropic's Messages: input excludes cached tokens."""
    assert not with_tool
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5-20250929",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": used["input"] - used["read"] - used["write"],
            "cache_read_input_tokens": used["read"],
            "cache_creation_input_tokens": used["write"],
            "output_tokens": used["output"],
        },
    }


def generate_content(used: dict[str, int], *, with_tool: bool) -> Any:
    """Gemini: candidates exclude thoughts."""
    part = {"functionCall": {"name": TOOL, "args": PLACE}} if with_tool else {"text": ANSWER}
    content = {"role": "model", "parts": [part]}
    return {
        "candidates": [{"content": content, "finishReason": "STOP"}],
        "modelVersion": "gemini-2.5-flash",
        "responseId": f"g{1 if used is CALLS[0] else 2}",
        "usageMetadata": {
            "promptTokenCount": used["input"],
            "candidatesTokenCount": used["output"] - used["thoughts"],
            "thoughtsTokenCount": used["thoughts"],
            "cachedContentTokenCount": used["read"],
            "totalTokenCount": used["input"] + used["output"],
        },
    }


def converse(used: dict[str, int], *, with_tool: bool) -> bytes:
    """Bedrock's ConverseStream: input excludes cached tokens."""
    start = {"toolUse": {"toolUseId": "t1", "name": TOOL}}
    begin = [("contentBlockStart", {"contentBlockIndex": 0, "start": start})] if with_tool else []
    delta = {"toolUse": {"input": json.dumps(PLACE)}} if with_tool else {"text": ANSWER}
    usage = {
        "inputTokens": used["input"] - used["read"] - used["write"],
        "outputTokens": used["output"],
        "totalTokens": used["input"] + used["output"],
        "cacheReadInputTokens": used["read"],
        "cacheWriteInputTokens": used["write"],
    }
    events = [
        ("messageStart", {"role": "assistant"}),
        *begin,
        ("contentBlockDelta", {"contentBlockIndex": 0, "delta": delta}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": "tool_use" if with_tool else "end_turn"}),
        ("metadata", {"usage": usage, "metrics": {"latencyMs": 1}}),
    ]
    return b"".join(event_stream(*events))


FORMATS: dict[str, Callable[..., Any]] = {
    "/chat/completions": chat,
    "/responses": responses,
    "/messages": messages,
    ":generateContent": generate_content,
    "/converse-stream": converse,
}


class Vendor(BaseHTTPRequestHandler):
    """Answers as all of them do: first with a tool, if there are any, then with text."""

    answered = 0

    def do_POST(self) -> None:
        """Answer any request."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        has_tools = bool(request.get("tools") or request.get("toolConfig"))
        write = next(each for end, each in FORMATS.items() if self.path.endswith(end))
        used = CALLS[min(Vendor.answered, 1)]
        body = write(used, with_tool=has_tools and not Vendor.answered)
        Vendor.answered += 1
        is_stream = isinstance(body, bytes)
        kind = "application/vnd.amazon.eventstream" if is_stream else "application/json"
        body = body if is_stream else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


# --- who asks -------------------------------------------------------------------------------------


def weather(city: str) -> str:
    """Tell the weather."""
    return f"Rain in {city}"


def openai_client(address: str) -> None:
    """Make one call."""
    client = import_module("openai").OpenAI(api_key="k", base_url=f"{address}/v1")
    message = {"role": "user", "content": "Hello"}
    client.chat.completions.create(model="gpt-4o", messages=[message])


def anthropic_client(address: str) -> None:
    """Make one call."""
    client = import_module("anthropic").Anthropic(api_key="k", base_url=address)
    message = {"role": "user", "content": "Hello"}
    client.messages.create(model="claude-sonnet-4-5", max_tokens=100, messages=[message])


def langfuse_client(address: str) -> None:
    """Make one call with Langfuse's client, a drop-in replacement for OpenAI's."""
    langfuse = import_module("langfuse")
    mine = langfuse.Langfuse(
        public_key="k",
        secret_key="k",  # noqa: S106
        base_url=address,
        tracer_provider=trace.get_tracer_provider(),
        span_exporter=InMemorySpanExporter(),
    )
    client = import_module("langfuse.openai").OpenAI(api_key="k", base_url=f"{address}/v1")
    message = {"role": "user", "content": "Hello"}
    client.chat.completions.create(model="gpt-4o", messages=[message])
    mine.flush()


def litellm_client(address: str) -> None:
    """Make one call with LiteLLM, which reports it through a callback."""
    os.environ["USE_OTEL_LITELLM_REQUEST_SPAN"] = "true"
    litellm: Any = import_module("litellm")
    told = import_module("litellm.integrations.opentelemetry")
    litellm.callbacks = [told.OpenTelemetry(tracer_provider=trace.get_tracer_provider())]
    message = {"role": "user", "content": "Hello"}

    async def ask() -> None:
        asked = {"api_key": "k", "api_base": f"{address}/v1", "messages": [message]}
        await litellm.acompletion(model="openai/gpt-4o", **asked)
        await asyncio.sleep(1)  # it reports once the answer has arrived

    asyncio.run(ask())


def langchain_chain(address: str) -> None:
    """Ask twice, in a chain: a tool's result is given by hand."""
    tools, chat_model = import_module("langchain_core.tools"), import_module("langchain_openai")
    runnables = import_module("langchain_core.runnables")
    model = chat_model.ChatOpenAI(model="gpt-4o", api_key="k", base_url=f"{address}/v1")
    tool = tools.tool(weather)

    def ask(question: str) -> Any:
        asking = model.bind_tools([tool])
        first = asking.invoke(question)
        results = [tool.invoke(call) for call in first.tool_calls]
        return asking.invoke([("user", question), first, *results])

    runnables.RunnableLambda(ask).invoke("How is the weather?")


def langsmith_chain(address: str) -> None:
    """Make the same call with LangChain's own tracing exporting OpenTelemetry spans."""
    os.environ.update(LANGSMITH_TRACING="true", LANGSMITH_OTEL_ENABLED="true")
    os.environ.update(LANGCHAIN_REVISION_ID="1", LANGSMITH_OTEL_ONLY="true")
    os.environ.update(LANGSMITH_API_KEY="k", LANGSMITH_ENDPOINT=address)
    langchain_chain(address)
    import_module("langchain_core.tracers.langchain").wait_for_all_tracers()
    os.environ["LANGSMITH_TRACING"] = "false"


def openai_agent(address: str) -> None:
    """Let an agent of the SDK of OpenAI use a tool."""
    agents = import_module("agents")
    client = import_module("openai").AsyncOpenAI(api_key="k", base_url=f"{address}/v1")
    agents.set_default_openai_client(client, use_for_tracing=False)
    tool = agents.function_tool(weather)
    agent = agents.Agent(name="forecaster", model="gpt-4o", tools=[tool])
    agents.Runner.run_sync(agent, "How is the weather?")


def pydantic_agent(address: str) -> None:
    """Let an agent of Pydantic AI use a tool; it makes spans itself."""
    ai = import_module("pydantic_ai")
    models = import_module("pydantic_ai.models.openai")
    providers = import_module("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(api_key="k", base_url=f"{address}/v1")
    model = models.OpenAIChatModel("gpt-4o", provider=provider)
    agent = ai.Agent(model, name="forecaster", tools=[weather])
    agent.instrument = True
    agent.run_sync("How is the weather?")


def adk_agent(address: str) -> None:
    """Let an agent of Google's ADK use a tool; it makes spans itself."""
    os.environ.update(GOOGLE_API_KEY="k", GOOGLE_GEMINI_BASE_URL=address)
    agents, runners = import_module("google.adk.agents"), import_module("google.adk.runners")
    types = import_module("google.genai.types")
    agent = agents.LlmAgent(name="forecaster", model="gemini-2.5-flash", tools=[weather])
    runner = runners.InMemoryRunner(agent=agent, app_name="app")
    question = types.Content(role="user", parts=[types.Part(text="How is the weather?")])

    async def run() -> None:
        session = await runner.session_service.create_session(app_name="app", user_id="u")
        asked = {"user_id": "u", "session_id": session.id, "new_message": question}
        async for _ in runner.run_async(**asked):
            pass

    asyncio.run(run())


def strands_agent(address: str) -> None:
    """Let an agent of Strands use a tool, with a cache of Bedrock; it makes spans itself."""
    os.environ.update(dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "k"))
    strands, models = import_module("strands"), import_module("strands.models")
    model = models.BedrockModel(
        model_id="us.anthropic.claude-sonnet-4-5-20250929-v1:0",
        region_name="us-east-1",
        endpoint_url=address,
    )
    agent = strands.Agent(
        name="forecaster",
        model=model,
        tools=[strands.tool(weather)],
        system_prompt=[{"text": "Be brief."}, {"cachePoint": {"type": "default"}}],
        callback_handler=None,
    )
    agent("How is the weather?")


OPENINFERENCE, OPENLLMETRY = "openinference.instrumentation", "opentelemetry.instrumentation"

EMITTERS: dict[str, tuple[Callable[[str], None], str, str]] = {
    "openinference-openai": (openai_client, f"{OPENINFERENCE}.openai", "OpenAIInstrumentor"),
    "openinference-anthropic": (
        anthropic_client,
        f"{OPENINFERENCE}.anthropic",
        "AnthropicInstrumentor",
    ),
    "openinference-langchain": (
        langchain_chain,
        f"{OPENINFERENCE}.langchain",
        "LangChainInstrumentor",
    ),
    "openinference-openai-agents": (
        openai_agent,
        f"{OPENINFERENCE}.openai_agents",
        "OpenAIAgentsInstrumentor",
    ),
    "openllmetry-openai": (openai_client, f"{OPENLLMETRY}.openai", "OpenAIInstrumentor"),
    "openllmetry-anthropic": (
        anthropic_client,
        f"{OPENLLMETRY}.anthropic",
        "AnthropicInstrumentor",
    ),
    "openllmetry-langchain": (langchain_chain, f"{OPENLLMETRY}.langchain", "LangchainInstrumentor"),
    "openllmetry-openai-agents": (
        openai_agent,
        f"{OPENLLMETRY}.openai_agents",
        "OpenAIAgentsInstrumentor",
    ),
    "langfuse": (langfuse_client, "", ""),
    "langsmith": (langsmith_chain, "", ""),
    "litellm": (litellm_client, "", ""),
    "pydantic-ai": (pydantic_agent, "", ""),
    "google-adk": (adk_agent, "", ""),
    "strands-1.30": (strands_agent, "", ""),
    "strands": (strands_agent, "", ""),
}
"""Each emitter: the client, and the instrumentation where the client makes no spans."""


def main(names: list[str]) -> None:
    """Write one file for each of these."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vendor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    for name in names:
        ask, module, instrumentor = EMITTERS[name]
        instrumentation = getattr(import_module(module), instrumentor)() if module else None
        if instrumentation is not None:
            instrumentation.instrument(tracer_provider=provider)
        with provider.get_tracer("app").start_as_current_span("request"):
            ask(f"http://127.0.0.1:{server.server_port}")
        if instrumentation is not None:
            instrumentation.uninstrument()
        (HERE / f"{name}.jsonl").write_text(line(exporter.get_finished_spans()))
        exporter.clear()
        Vendor.answered = 0
    server.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
