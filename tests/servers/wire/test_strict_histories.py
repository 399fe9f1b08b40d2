"""Requests during and after a halt, as strict vendors get them: no rule for histories is broken."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from agents import Agent as SdkAgent
from agents import ModelSettings, RunConfig, Runner, SQLiteSession, function_tool
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from strands import Agent, tool

from otel_limits import LimitReachedError, Limits, enable, stop_of
from tests.wire import agents_models
from tests.wire.agents_models import AGENTS_CLIENTS
from tests.wire.cases import PLAIN
from tests.wire.chat_models import CLIENTS, reply
from tests.wire.formats import Answer
from tests.wire.providers import BY_NAME
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from otel_limits import Stop
    from otel_limits.testing import FakeTime
    from tests.wire.server import Reply, Vendor

pytestmark = pytest.mark.filterwarnings("ignore")

ASKS = Answer(tool=("search", "{}"), parts=("Let me look.",))
ASKS_SILENTLY = Answer(tool=("search", "{}"), parts=())
SAYS = Answer(parts=("Done.",))
BLANK = Answer(parts=(" ",))


STEPS: Any = {"recursion_limit": 60, "configurable": {"thread_id": "1"}}


def search() -> str:
    """Find nothing."""
    return ""


# --- the rules ------------------------------------------------------------------------------------


def anthropic_faults(request: Any) -> Iterator[str]:
    """Anthropic's Messages: https://platform.claude.com/docs/en/agents-and-tools/tool-use."""
    pending: list[str] = []
    for message in request["messages"]:
        blocks = message["content"]
        results = [each["tool_use_id"] for each in blocks if each["type"] == "tool_result"]
        if sorted(results) != sorted(pending):
            yield f"tool results {results} for tool uses {pending}"
        pending = [each["id"] for each in blocks if each["type"] == "tool_use"]
        texts = [each["text"] for each in blocks if each["type"] == "text"]
        yield from shape_faults(message["role"], blocks, texts)
        if (results or pending) and not request.get("tools"):
            yield "tool blocks without tools"
    yield from order_faults(request["messages"])


def bedrock_faults(request: Any) -> Iterator[str]:
    """Bedrock's Converse: https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Converse.html."""
    pending: list[str] = []
    for message in request["messages"]:
        blocks = message["content"]
        results = [each["toolResult"]["toolUseId"] for each in blocks if "toolResult" in each]
        if sorted(results) != sorted(pending):
            yield f"tool results {results} for tool uses {pending}"
        pending = [each["toolUse"]["toolUseId"] for each in blocks if "toolUse" in each]
        texts = [each["text"] for each in blocks if "text" in each]
        yield from shape_faults(message["role"], blocks, texts)
        if (results or pending) and not request.get("toolConfig"):
            yield "tool blocks without tools"
    yield from order_faults(request["messages"])


def openai_faults(request: Any) -> Iterator[str]:
    """OpenAI's Chat Completions: each tool call is answered before anything else follows."""
    pending: list[str] = []
    for message in request["messages"]:
        if message["role"] == "tool":
            if message["tool_call_id"] not in pending:
                yield f"the result {message['tool_call_id']} has no tool call"
            else:
                pending.remove(message["tool_call_id"])
            continue
        if pending:
            yield f"tool calls {pending} have no result"
        pending = [each["id"] for each in message.get("tool_calls") or ()]
        if not message.get("content") and not pending:
            yield f"no content: {message}"
    if request["messages"][-1]["role"] == "assistant":
        yield "the last message is the assistant's"


def shape_faults(role: str, blocks: list[Any], texts: list[str]) -> Iterator[str]:
    """Both refuse empty messages and blank texts."""
    if not blocks:
        yield f"an empty message of the {role}"
    yield from (f"blank text of the {role}" for text in texts if not text.strip())


def order_faults(messages: list[Any]) -> Iterator[str]:
    """Both want turns that alternate, from the user's first to the user's last."""
    roles = [message["role"] for message in messages]
    expected = [("user", "assistant")[number % 2] for number in range(len(roles))]
    if roles != expected or roles[-1] != "user":
        yield f"the roles are {roles}"


def responses_faults(request: Any) -> Iterator[str]:
    """OpenAI's Responses: every call has its output, and nothing else comes between."""
    pending: list[str] = []
    for item in request["input"]:
        if item.get("type") == "function_call":
            pending.append(item["call_id"])
        elif item.get("type") == "function_call_output":
            if item["call_id"] not in pending:
                yield f"the output {item['call_id']} has no call"
            else:
                pending.remove(item["call_id"])
        elif pending:
            yield f"calls {pending} have no output"
    if pending:
        yield f"calls {pending} have no output"


def gemini_faults(request: Any) -> Iterator[str]:
    """Gemini: a call is followed by its response (ai.google.dev, "Function calling")."""
    pending: list[str] = []
    for content in request["contents"]:
        parts = content["parts"]
        answered = [
            each["functionResponse"]["name"] for each in parts if "functionResponse" in each
        ]
        if sorted(answered) != sorted(pending):
            yield f"responses {answered} to calls {pending}"
        pending = [each["functionCall"]["name"] for each in parts if "functionCall" in each]
        if not parts:
            yield "an empty content"
    if request["contents"][-1]["role"] != "user":
        yield "the last content is the model's"


def anthropic_faults_of_texts(request: Any) -> Iterator[str]:
    """Anthropic takes a text in place of a list of blocks."""
    for message in request["messages"]:
        if isinstance(text := message["content"], str):
            message["content"] = [{"type": "text", "text": text}]
    yield from anthropic_faults(request)


RULES: dict[str, Callable[[Any], Iterator[str]]] = {
    "Anthropic": anthropic_faults_of_texts,
    "Bedrock": bedrock_faults,
    "OpenAI Chat": openai_faults,
    "OpenAI Responses": responses_faults,
    "Gemini": gemini_faults,
}


# --- the agents -----------------------------------------------------------------------------------


class StrandsTalk:
    """A conversation with a Strands agent, or with one that calls another one."""

    def __init__(self, name: str, vendor: Vendor) -> None:
        self.provider = BY_NAME[name]
        self._vendor = vendor
        self._agent: Any = None

    def reply(self, answer: Answer) -> Reply:
        """Write an answer in the vendor's format."""
        return self.provider.stream_reply(answer)

    def begin(self, *, has_child: bool = False, is_answer: bool = False) -> None:
        """Make the agent; `is_answer` makes the child's answer its own."""
        model = self.provider.make(self._vendor.url)
        options: Any = {"model": model, "callback_handler": None}
        self._agent = Agent(name="child", tools=[tool(search)], **options)
        if has_child:
            child = self._agent.as_tool(delegate=is_answer)
            self._agent = Agent(name="parent", tools=[child], **options)

    async def send(self, prompt: str) -> Stop | None:
        """Call the agent, decline its questions, and return the stop."""
        try:
            result = await self._agent.invoke_async(prompt)
            for each in result.interrupts or ():
                answer = {"interruptId": each.id, "response": "no"}
                result = await self._agent.invoke_async([{"interruptResponse": answer}])
        except LimitReachedError as error:
            return stop_of(error)
        return stop_of(result)


class ChatTalk:
    """The same with LangChain."""

    def __init__(self, name: str, vendor: Vendor) -> None:
        self.provider = BY_NAME[CLIENTS[name].wire]
        self._name = name
        self._vendor = vendor
        self._numbers = itertools.count()
        self._graph: Any = None

    def reply(self, answer: Answer) -> Reply:
        """Write an answer in the vendor's format."""
        answer = replace(answer, usages=(self.provider.usage(PLAIN),))
        made = reply(self._name, answer, is_streamed=False)
        identity = b'"r1-%d"' % next(self._numbers)  # a message's ID is the response's
        made.chunks = [chunk.replace(b'"r1"', identity) for chunk in made.chunks]
        return made

    def begin(self, *, has_child: bool = False, is_answer: bool = False) -> None:
        """Make the agent."""
        model = CLIENTS[self._name].make(self._vendor.url)
        saver = InMemorySaver()
        child: Any = create_agent(
            model, [search], name="child", checkpointer=None if has_child else saver
        )

        async def ask(input: str = "") -> str:  # noqa: A002  the name of Strands
            state = await child.ainvoke({"messages": [("user", input)]}, STEPS)
            return str(state["messages"][-1].text)

        called = StructuredTool.from_function(
            None, ask, name="child", description="Ask.", return_direct=is_answer
        )
        around = create_agent(model, [called], name="parent", checkpointer=saver)
        self._graph = around if has_child else child

    async def send(self, prompt: str) -> Stop | None:
        """Call the agent, decline its questions, and return the stop."""
        given: Any = {"messages": [("user", prompt)]}
        try:
            state = await self._graph.ainvoke(given, STEPS)
            if (await self._graph.aget_state(STEPS)).interrupts:
                state = await self._graph.ainvoke(Command(resume="no"), STEPS)
        except LimitReachedError as error:
            return stop_of(error)
        return stop_of(state)


class AgentsTalk:
    """The same with the OpenAI Agents SDK."""

    def __init__(self, name: str, vendor: Vendor, *, is_streamed: bool) -> None:
        self.provider = BY_NAME[AGENTS_CLIENTS[name].wire]
        self._name = name
        self._vendor = vendor
        self._is_streamed = is_streamed
        self._numbers = itertools.count()
        self._agent: Any = None
        self._session = SQLiteSession("1")

    def reply(self, answer: Answer) -> Reply:
        """Write an answer in the vendor's format."""
        answer = replace(answer, usages=(self.provider.usage(PLAIN),))
        made = agents_models.reply(self._name, answer, is_streamed=self._is_streamed)
        number = next(self._numbers)
        for mark in (b"t", b"r", b"i"):  # the SDK refuses an ID that it has seen
            old, new = b'"%s1"' % mark, b'"%s1-%d"' % (mark, number)
            made.chunks = [chunk.replace(old, new) for chunk in made.chunks]
        return made

    def begin(self, *, has_child: bool = False, is_answer: bool = False) -> None:
        """Make the agent."""
        # Without `include_usage`, LiteLLM's streams contain no usage.
        options: Any = {
            "model": AGENTS_CLIENTS[self._name].make(self._vendor.url),
            "model_settings": ModelSettings(include_usage=True),
        }
        self._agent = SdkAgent("child", tools=[function_tool(search)], **options)
        if has_child:
            options["tool_use_behavior"] = "stop_on_first_tool" if is_answer else "run_llm_again"
            # With a reader, the SDK streams the child's answers, too.
            reader: Any = {"on_stream": str} if self._is_streamed else {}
            child = self._agent.as_tool("child", "Ask.", **reader)
            self._agent = SdkAgent("parent", tools=[child], **options)

    async def send(self, prompt: str) -> Stop | None:
        """Call the agent, reject its questions, and return the stop."""
        try:
            result = await self._run(prompt)
            if result.interruptions:
                state = result.to_state()
                for each in result.interruptions:
                    state.reject(each)
                result = await self._run(state)
        except LimitReachedError as error:
            return stop_of(error)
        return stop_of(result)

    async def _run(self, given: Any) -> Any:
        options: Any = {"session": self._session, "run_config": RunConfig(tracing_disabled=True)}
        if not self._is_streamed:
            return await Runner.run(self._agent, given, **options)
        result = Runner.run_streamed(self._agent, given, **options)
        async for _ in result.stream_events():
            pass
        return result


Talk: TypeAlias = StrandsTalk | ChatTalk | AgentsTalk
TALKS: dict[str, Callable[[Vendor], Talk]] = {
    **{
        f"Strands, {name}": functools.partial(StrandsTalk, name)
        for name in ("Anthropic", "Bedrock", "OpenAI Chat")
    },
    **{name: functools.partial(ChatTalk, name) for name in CLIENTS if name != "init_chat_model"},
    **{
        f"Agents SDK, {name}, {way}": functools.partial(AgentsTalk, name, is_streamed=is_streamed)
        for name in AGENTS_CLIENTS
        for way, is_streamed in (("run", False), ("run_streamed", True))
    },
}


@pytest.fixture(params=[*TALKS.values()], ids=[*TALKS])
def talk(request: pytest.FixtureRequest, vendor: Vendor) -> Talk:
    """A conversation through every client."""
    made: Talk = request.param(vendor)
    return made


# --- the halts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How an agent is limited, and what its model answers."""

    limits: Limits
    answers: tuple[Answer, ...]
    action: Any = "halt"
    variables: dict[str, str] = field(default_factory=dict)


CASES = {
    "after tools": Case(Limits(max_turns=1), (ASKS, SAYS)),
    "after silent tools": Case(Limits(max_turns=1), (ASKS_SILENTLY, SAYS)),
    "refused tool": Case(Limits(max_tool_calls=1), (ASKS, ASKS, SAYS)),
    "raised": Case(Limits(max_turns=1), (ASKS, SAYS), "raise"),
    "last answer": Case(Limits(max_turns=2), (ASKS, ASKS_SILENTLY, SAYS, SAYS), "wrap_up"),
    "blank last answer": Case(Limits(max_turns=1), (ASKS, BLANK, SAYS), "wrap_up"),
    "last answer with a tool": Case(Limits(max_turns=1), (ASKS, ASKS, SAYS), "wrap_up"),
    "question": Case(Limits(max_turns=1), (ASKS, SAYS), "ask"),
    "hints": Case(
        Limits(max_turns=2), (ASKS, ASKS, SAYS), variables={"OTEL_LIMITS_BUDGET_HINTS": "true"}
    ),
    "nudge": Case(Limits(max_identical_tool_calls=3), (ASKS, ASKS, ASKS, SAYS)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_requests_of_a_halted_agent_are_valid(
    talk: Talk, case: Case, loop: Any, vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of its last answer, and of the next call with its history."""
    for name, value in case.variables.items():
        monkeypatch.setenv(name, value)
    enable(case.limits, action=case.action)
    vendor.replies[:] = [talk.reply(each) for each in case.answers]
    talk.begin()
    call(loop, talk, "go", "again")
    assert len(vendor.requests) == len(case.answers)
    assert faults(talk, vendor) == []


def test_request_after_a_broken_off_response_is_valid(
    talk: Talk, loop: Any, vendor: Vendor, fake_time: FakeTime
) -> None:
    """The response that a deadline has cut leaves the end user's text alone."""
    enable(Limits(max_duration_seconds=30))

    def pass_deadline() -> None:
        time.sleep(0.2)  # in which most clients have read the text; none has to
        fake_time.advance(30)

    vendor.on_hang = pass_deadline
    vendor.replies[:] = [talk.provider.hangs(Bill(), "Once upon a time"), talk.reply(SAYS)]
    talk.begin()
    first, _ = call(
        loop, talk, "go", "again", after=vendor.is_over.set
    )  # or boto's threads would wait
    assert first is not None
    assert len(vendor.requests) == 2
    assert faults(talk, vendor) == []


@pytest.mark.parametrize("is_answer", [False, True])
def test_requests_around_a_halted_agent_are_valid(
    talk: Talk,
    loop: Any,
    vendor: Vendor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_answer: bool,
) -> None:
    """The result of the tool that called it is another text than its last message."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("agents: {child: {limits: {max_turns: 1}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(Limits(max_turns=9))
    asks = Answer(tool=("child", '{"input": "go"}'), parts=())
    answers = (asks, ASKS, SAYS) if is_answer else (asks, ASKS, SAYS, SAYS)
    vendor.replies[:] = [talk.reply(each) for each in answers]
    talk.begin(has_child=True, is_answer=is_answer)
    first, _ = call(loop, talk, "go", "again")
    assert (first is not None) == is_answer
    assert len(vendor.requests) == len(answers)
    assert faults(talk, vendor) == []


def call(
    loop: asyncio.AbstractEventLoop,
    talk: Talk,
    *prompts: str,
    after: Callable[[], object] = list,
) -> list[Stop | None]:
    """Continue a conversation, and return the stop of each call."""

    async def call_all() -> list[Stop | None]:
        stops = []
        for prompt in prompts:
            stops.append(await talk.send(prompt))
            after()
        return stops

    return loop.run_until_complete(call_all())


def faults(talk: Talk, vendor: Vendor) -> list[str]:
    """Say which rules the requests have broken; our mark must be in none of them."""
    rules = RULES[talk.provider.name]
    found = [
        f"{number}: {each}"
        for number, body in enumerate(vendor.requests)
        for each in rules(json.loads(body))
    ]
    return found + ["a mark"] * (b"otel_limits" in b"".join(vendor.requests))
