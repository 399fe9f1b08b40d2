"""Requests during and after a halt, as strict vendors get them: no rule for histories is broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool

from otel_limits import LimitReachedError, Limits, LimitsPlugin, enable, is_synthetic
from tests.wire.formats import Answer
from tests.wire.providers import BY_NAME, Provider
from tests.wire.usages import Bill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.wire.server import Vendor

pytestmark = pytest.mark.filterwarnings("ignore")

ASKS = Answer(tool=("search", "{}"), parts=("Let me look.",))
ASKS_SILENTLY = Answer(tool=("search", "{}"), parts=())
SAYS = Answer(parts=("Done.",))
BLANK = Answer(parts=(" ",))


@tool
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


RULES: dict[str, Callable[[Any], Iterator[str]]] = {
    "Anthropic": anthropic_faults,
    "Bedrock": bedrock_faults,
    "OpenAI Chat": openai_faults,
}
of_each_vendor = pytest.mark.parametrize("provider", [BY_NAME[each] for each in RULES], ids=RULES)


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
@of_each_vendor
def test_requests_of_a_halted_agent_are_valid(
    provider: Provider, case: Case, vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of its last answer, and of the next call with its history."""
    for name, value in case.variables.items():
        monkeypatch.setenv(name, value)
    enable(case.limits, action=case.action)
    vendor.replies[:] = [provider.stream_reply(each) for each in case.answers]
    agent = Agent(model=provider.make(vendor.url), tools=[search], callback_handler=None)
    call(agent, "go", "again")
    assert len(vendor.requests) == len(case.answers)
    assert faults(provider, vendor) == []


@of_each_vendor
def test_request_after_a_broken_off_response_is_valid(provider: Provider, vendor: Vendor) -> None:
    """The response that a deadline has cut leaves the end user's text alone."""
    enable(Limits(max_duration_seconds=0.5))
    begun = provider.hangs(Bill(), "Once upon a time")
    vendor.replies[:] = [begun, provider.stream_reply(SAYS)]
    agent = Agent(model=provider.make(vendor.url), tools=[search], callback_handler=None)
    call(agent, "go", "again", after=vendor.is_over.set)  # or threads of boto wait for the rest
    assert is_synthetic(agent.messages[1])
    assert len(vendor.requests) == 2
    assert faults(provider, vendor) == []


@pytest.mark.parametrize("delegate", [False, True])
@of_each_vendor
def test_requests_around_a_halted_agent_are_valid(
    provider: Provider, vendor: Vendor, *, delegate: bool
) -> None:
    """The result of the tool that called it is another text than its last message."""
    enable(Limits(max_turns=1))
    asks = Answer(tool=("child", '{"input": "go"}'), parts=())
    answers = (asks, ASKS, SAYS) if delegate else (asks, ASKS, SAYS, SAYS)
    vendor.replies[:] = [provider.stream_reply(each) for each in answers]
    model = provider.make(vendor.url)
    child = Agent(name="child", model=model, tools=[search], callback_handler=None)
    parent = Agent(
        name="parent",
        model=model,
        tools=[child.as_tool(delegate=delegate)],
        callback_handler=None,
        plugins=[LimitsPlugin(Limits(max_turns=9))],
    )
    call(parent, "go", "again")
    assert len(vendor.requests) == len(answers)
    assert faults(provider, vendor) == []


def call(agent: Agent, *prompts: str, after: Callable[[], object] = list) -> None:
    """Call an agent that may raise, and decline its questions; in one loop, as clients need."""

    async def call_all() -> None:
        for prompt in prompts:
            with contextlib.suppress(LimitReachedError):
                result = await agent.invoke_async(prompt)
                for each in result.interrupts or ():
                    answer = {"interruptId": each.id, "response": "no"}
                    declined: Any = [{"interruptResponse": answer}]
                    await agent.invoke_async(declined)
            after()

    asyncio.run(call_all())


def faults(provider: Provider, vendor: Vendor) -> list[str]:
    """Say which rules the requests have broken."""
    return [
        fault
        for number, body in enumerate(vendor.requests)
        for fault in (f"{number}: {each}" for each in RULES[provider.name](json.loads(body)))
    ]
