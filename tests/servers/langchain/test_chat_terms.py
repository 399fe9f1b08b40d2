"""Pricing terms in the settings, the arguments and the messages of LangChain's models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatResult
from langchain_core.tools import StructuredTool
from langchain_google_genai import ChatGoogleGenerativeAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from otel_limits import Event, ModelCall, enable
from otel_limits.bindings.langchain.chat_readers import call_to, terms_of
from otel_limits.testing import ScriptedChatModel, endless, says
from tests.wire import chat_models as models

if TYPE_CHECKING:
    from collections.abc import Iterable

    from otel_limits.testing import Answer

NOWHERE = "http://127.0.0.1:9"

TEXT = "some words " * 500
"""Estimated at 1,219 tokens, with its message."""


def bound(model: Any, *tools: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a call with tools, as a model's own class writes them."""
    return dict(model.bind_tools(list(tools), **options).kwargs)


def book(service_tier: str, location: str, modalities: list[str]) -> str:
    """Book, with parameters that are named like settings."""
    return f"{service_tier} {location} {modalities}"


SETTINGS: dict[str, tuple[Any, Any]] = {
    "OpenAI's tier": (models.openai(NOWHERE, service_tier="flex"), {"tier": "flex"}),
    "Bedrock's tier": (
        models.bedrock(NOWHERE, service_tier="priority"),
        {"tier": "priority", "region": "us-east-1"},
    ),
    "Bedrock's latency": (
        models.bedrock(NOWHERE, performance_config={"latency": "optimized"}),
        {"tier": "optimized", "region": "us-east-1"},
    ),
    "Anthropic's region": (models.anthropic(NOWHERE, inference_geo="us"), {"region": "us"}),
    "Bedrock's client": (models.bedrock(NOWHERE), {"region": "us-east-1"}),
    "Google's own API": (models.gemini(NOWHERE, location="europe-west4"), {"region": None}),
    "Vertex AI": (
        ChatGoogleGenerativeAI(
            model="gemini-2.5-flash", vertexai=True, project="p", location="us-east1"
        ),
        {"region": "us-east1"},
    ),
    "audio": (
        models.openai(NOWHERE, model_kwargs={"modalities": ["text", "audio"]}),
        {"audio_out": True},
    ),
    "search": (models.openai(NOWHERE, extra_body={"web_search_options": {}}), {"searches": True}),
}


def the_same(terms: Any, expected: dict[str, Any]) -> dict[str, Any]:
    """The same terms as are expected."""
    return {name: getattr(terms, name) for name in expected}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_model_are_read(name: str) -> None:
    """In its fields, and in what it passes on to the vendor."""
    model, expected = SETTINGS[name]
    assert the_same(terms_of(model), expected) == expected


def test_arguments_of_a_call_come_first() -> None:
    """`bind` and middleware change the settings of one call."""
    model = models.openai(NOWHERE, service_tier="flex")
    assert terms_of(model, (), {"service_tier": "priority"}).tier == "priority"


@pytest.mark.parametrize("make", [models.openai, models.anthropic, models.bedrock, models.gemini])
def test_parameters_of_a_tool_are_no_settings(make: Any) -> None:
    """Any function may have a parameter with such a name."""
    model = make(NOWHERE)
    assert terms_of(model, (), bound(model, book)) == terms_of(model)


def test_tools_of_the_vendor_are_read() -> None:
    """Searches are billed by item, and other tools at a cost that no usage has."""
    claude = models.anthropic(NOWHERE)
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert terms_of(claude, (), bound(claude, search)).searches
    gpt = models.openai_responses(NOWHERE)
    code = {"type": "code_interpreter", "container": {"type": "auto"}}
    assert terms_of(gpt, (), bound(gpt, code)).server_tools == {"code_interpreter"}
    google = models.gemini(NOWHERE)
    assert terms_of(google, (), bound(google, {"google_search": {}})).searches


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"cachePoint": {"type": "default", "ttl": "1h"}},
    ],
)
def test_lifetime_of_a_cache_is_read(block: Any) -> None:
    """Anthropic's control, and Bedrock's point."""
    assert terms_of(models.anthropic(NOWHERE), [HumanMessage([block])]).cache_ttls == {"1h"}


def test_audio_of_a_message_is_read() -> None:
    """It has its own price."""
    audio: Any = {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"}
    assert terms_of(models.openai(NOWHERE), [HumanMessage([audio])]).audio_in


@pytest.mark.parametrize("asked", [TEXT, [("user", TEXT)], [{"role": "user", "content": TEXT}]])
def test_every_form_of_a_conversation_is_estimated_alike(asked: Any, events: list[Event]) -> None:
    """A model accepts texts, tuples and dictionaries, too."""
    enable(max_turns=9, observers=[events.append])
    model = ScriptedChatModel([says("done", usage=None)])

    def think(_: MessagesState) -> dict[str, Any]:
        return {"messages": [sum(list(model.stream(asked)), AIMessageChunk(content=""))]}

    builder = StateGraph(MessagesState).add_node("think", think)
    builder.add_edge(START, "think").compile().invoke({"messages": []})
    (call,) = [each for each in events if isinstance(each, ModelCall)]
    assert (call.kind, call.estimated) == ("estimated", True)
    assert call.usage.input == 1219


def test_address_shows_the_vendor() -> None:
    """OpenAI's class is used with the vendors that have its API."""
    model = models.openai(NOWHERE, base_url="https://api.deepseek.com/v1")
    assert terms_of(model).vendor == "deepseek"


def test_address_from_a_variable_shows_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the client knows it."""
    monkeypatch.setenv("OPENAI_BASE_URL", "https://openrouter.ai/api/v1")
    assert terms_of(models.openai(NOWHERE, base_url=None)).vendor == "openrouter"


def test_own_class_has_no_known_price() -> None:
    """It may wrap anything."""
    assert terms_of(ScriptedChatModel(endless(says("x")))).own_class == "ScriptedChatModel"


class Weather(BaseModel):
    """Look up the weather."""

    location: str


def lookup(type: str, tools: list[str]) -> str:  # noqa: A002  like a setting
    """Look something up."""
    return f"{type} {tools}"


CLIENT_TOOLS: dict[str, Any] = {
    "tool": StructuredTool.from_function(lookup, metadata={"type": "web_search"}),
    "function": lookup,
    "class": Weather,
    "OpenAI": {"type": "function", "function": {"name": "lookup", "parameters": {}}},
    "OpenAI, Responses": {"type": "function", "name": "lookup", "parameters": {}},
    "OpenAI, functions": {"name": "lookup", "description": "Look up.", "parameters": {}},
    "OpenAI, without parameters": {"name": "lookup", "description": "Look up."},
    "Anthropic": {"name": "lookup", "description": "Look up.", "input_schema": {}},
    "Bedrock": {"toolSpec": {"name": "lookup", "inputSchema": {"json": {}}}},
    "Gemini": {"function_declarations": [{"name": "lookup"}]},
    "Gemini, camel case": {"functionDeclarations": [{"name": "lookup"}]},
    "Cohere": {"name": "lookup", "description": "Look up.", "parameter_definitions": {}},
    "JSON schema": {"title": "lookup", "description": "Look up.", "properties": {}},
    "JSON schema without properties": {"title": "lookup", "type": "object"},
}


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_tools_bound_as_they_are_are_run_by_the_client(name: str) -> None:
    """A model class may convert them only when it sends them; the vendor does not run them."""
    terms = terms_of(models.openai(NOWHERE), (), {"tools": [CLIENT_TOOLS[name]]})
    assert (terms.server_tools, terms.searches) == (frozenset(), False)


def test_tools_that_a_model_class_keeps_are_run_by_the_client() -> None:
    """Under the name of the setting, or in the arguments that it sends."""
    tools = list(CLIENT_TOOLS.values())
    model = models.openai(NOWHERE, model_kwargs={"tools": tools})
    assert terms_of(model).server_tools == frozenset()


def test_tools_of_a_vendor_among_those_of_the_client_are_found() -> None:
    """One tool with an unknown price is enough."""
    tools = [CLIENT_TOOLS["tool"], {"type": "advisor_20260301", "name": "advisor"}]
    found = terms_of(models.anthropic(NOWHERE), (), {"tools": tools})
    assert found.server_tools == frozenset({"advisor"})


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "builtin_function", "function": {"name": "$web_search"}},
        {"type": "openrouter:web_search", "parameters": {"engine": "exa"}},
    ],
    ids=str,
)
def test_type_of_a_vendor_decides_whatever_else_a_tool_has(tool: dict[str, Any]) -> None:
    """Some have the keys of the client's tools, too."""
    found = terms_of(models.openai(NOWHERE), (), {"tools": [tool]})
    assert found.searches or found.server_tools


def test_refused_usage_is_not_projected() -> None:
    """A figure above what any model can use does not predict the next request."""
    usage: Any = {"input_tokens": 10**15, "output_tokens": 77, "total_tokens": 10**15 + 77}
    history = [HumanMessage("hi"), AIMessage("hello", usage_metadata=usage), HumanMessage("more")]
    call = call_to(models.openai(NOWHERE), history, {}, {})
    assert 0 < call.input_estimate < 100


# --- several answers to one request ---------------------------------------------------------------


class Several(ScriptedChatModel):
    """Answers `n` times to each request, as OpenAI's models do, without usage."""

    n: int = 1

    def __init__(self, script: Iterable[Answer], **fields: Any) -> None:
        super().__init__(script, **fields)

    def _generate(self, *args: Any, **options: Any) -> ChatResult:
        made = super()._generate(*args, **options)
        (generation,) = made.generations
        generation.message.usage_metadata = None  # type: ignore[attr-defined]
        return ChatResult(generations=[generation] * options.get("n", self.n))


def output_of(events: list[Event], model: Any, **options: Any) -> int:
    """The estimated output of a call in a graph."""
    events.clear()
    builder: Any = StateGraph(MessagesState)
    builder.add_node("node", lambda _: {"messages": [model.invoke("q", **options)]})
    builder.add_edge(START, "node").compile().invoke({"messages": [("user", "q")]})
    (call,) = (each for each in events if isinstance(each, ModelCall))
    assert call.estimated
    return call.usage.output


@pytest.mark.parametrize(
    ("fields", "options"), [({"n": 4}, {}), ({}, {"n": 4})], ids=["model", "call"]
)
def test_every_answer_to_a_request_is_estimated(
    events: list[Event], fields: dict[str, Any], options: dict[str, Any]
) -> None:
    """The vendor bills all of them."""
    enable(max_turns=9, observers=[events.append])
    story = says("a long story about a harbor in the north, its boats, and its lighthouse")
    one = output_of(events, Several([story]))
    assert output_of(events, Several([story], **fields), **options) == pytest.approx(4 * one, abs=3)


@pytest.mark.parametrize(
    ("settings", "options"),
    [({"n": 3}, {}), ({}, {"n": 3}), ({"n": 9}, {"n": 3})],
    ids=["model", "call", "call first"],
)
def test_cap_on_output_applies_to_each_answer(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """A request for several may use it as often, so as much is reserved."""
    model = models.openai(NOWHERE, max_tokens=100, **settings)
    assert call_to(model, [HumanMessage("hi")], options, {}).output_cap == 300
