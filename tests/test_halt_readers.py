"""The texts of a halt, as each of its readers gets them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool

import otel_limits
from otel_limits import Limits, LimitsPlugin, enable
from otel_limits.testing import ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import MakeAgent

FOR_USER = "This request could not be completed because it took too many steps."
INVITATION = re.compile(r"(?<!not )(?:call|try|run|ask)[^.]* again", re.IGNORECASE)


class Obedient(ScriptedModel):
    """Calls its tool, and does so again whenever the result invites it."""

    def __init__(self, tool_name: str) -> None:
        super().__init__(())
        self.tool_name = tool_name

    async def stream(self, messages: Any, *arguments: Any, **named: Any) -> Any:
        """Stream a call, or an answer."""
        read = str(messages[-1]["content"])
        is_invited = "toolResult" not in read or INVITATION.search(read)
        self._script = iter([uses(self.tool_name) if is_invited else says("what there is")])
        async for event in super().stream(messages, *arguments, **named):
            yield event


def as_tool(child: Agent) -> Any:
    """The framework's way."""
    return child.as_tool()


def as_function(child: Agent) -> Any:
    """The way of many programs."""

    @tool(name="child")
    def ask() -> str:
        """Call the child."""
        return str(child("go"))

    return ask


@pytest.mark.parametrize("way", [as_tool, as_function])
@pytest.mark.parametrize("action", ["halt", "raise", "wrap_up"])
def test_obedient_model_calls_halted_agent_once(
    make_agent: MakeAgent, source: str, way: Callable[[Agent], Any], action: Any
) -> None:
    """A model that does as it reads makes one call of a sub-agent that reached its limit."""
    enable(Limits(max_turns=5))
    plugin = LimitsPlugin(action=action)
    leaf = ScriptedModel([*[uses("search")] * 5, says("half of it")])
    child = make_agent(leaf, name="child", plugins=[plugin])
    model = Obedient("child")
    parent = Agent(name="parent", model=model, tools=[way(child)], callback_handler=None)
    result = parent("go")
    assert (result.stop_reason, model.calls) == ("end_turn", 2)
    assert leaf.calls == 5 + (action == "wrap_up")
    read = parent.messages[2]["content"][0]["toolResult"]["content"][0]["text"]
    assert read.strip().endswith(
        "Agent 'child' stopped before it was finished: the limit of 5 turns was reached. Do not "
        "call it again for this task. Answer with what you have, and say what is missing."
    )
    assert ("half of it" in read) is (action == "wrap_up")
    assert FOR_USER not in read
    assert "halted by" not in read


def test_delegation_answers_with_the_end_users_text(make_agent: MakeAgent, source: str) -> None:
    """The answer of a delegation goes to the end user; only the tool result is for a model."""
    enable(Limits(max_turns=2))
    child = make_agent(ScriptedModel(endless(uses("search"))), name="child")
    model = ScriptedModel([uses("child"), says("never")])
    parent = Agent(
        name="parent", model=model, tools=[child.as_tool(delegate=True)], callback_handler=None
    )
    assert str(parent("go")) == f"{FOR_USER}\n"
    assert model.calls == 1
    assert "Do not call it again" in str(parent.messages[2])


def test_grandchild_passed_through_is_reworded(make_agent: MakeAgent, source: str) -> None:
    """A delegation in the middle hands the text on; the model at the top reads its own."""
    enable(Limits(max_turns=2))
    leaf = make_agent(ScriptedModel(endless(uses("search"))), name="leaf")
    middle = Agent(
        name="middle",
        model=ScriptedModel([uses("leaf")]),
        tools=[leaf.as_tool(delegate=True)],
        callback_handler=None,
    )
    top = Agent(
        name="top", model=Obedient("middle"), tools=[middle.as_tool()], callback_handler=None
    )
    assert str(top("go")) == "what there is\n"
    assert "Agent 'leaf' stopped before it was finished" in str(top.messages[2])


def test_refused_side_call_of_a_tool_is_reworded(make_agent: MakeAgent, source: str) -> None:
    """The error that a tool gets instead of an answer does not invite the model to repeat it."""
    enable(Limits(max_turns=9))
    helper = ScriptedModel(endless(says("short")))
    inner: list[Agent] = []

    @tool
    async def ask() -> str:
        """Run an agent whose tool calls a model."""
        agent = Agent(
            name="inner",
            model=ScriptedModel([uses("more"), says("x")]),
            tools=[more],
            plugins=[LimitsPlugin(Limits(max_model_calls=1), action="raise")],
            callback_handler=None,
        )
        inner.append(agent)
        return str(await agent.invoke_async("go"))

    @tool
    async def more() -> str:
        """Call a model."""
        async for _ in helper.stream([{"role": "user", "content": [{"text": "go"}]}]):
            pass
        return "done"

    model = Obedient("ask")
    agent = Agent(name="outer", model=model, tools=[ask], callback_handler=None)
    agent("go")
    assert (model.calls, helper.calls) == (2, 0)
    for reader in (inner[0], agent):
        assert "MaxModelCallsReachedError - Agent 'inner' stopped" in str(reader.messages[2])


def test_results_that_only_resemble_a_halt_stay(make_agent: MakeAgent, source: str) -> None:
    """A short message of a halt within other text is not replaced."""
    enable(Limits(max_turns=2))
    child = make_agent(
        ScriptedModel(endless(uses("search"))),
        name="child",
        plugins=[LimitsPlugin(halt_message="Sorry.")],
    )

    @tool
    def ask() -> str:
        """Call the child."""
        return f"It said: Sorry. Then:\n{child('go')}"

    agent = Agent(
        name="parent",
        model=ScriptedModel([uses("ask"), says("x")]),
        tools=[ask],
        callback_handler=None,
    )
    agent("go")
    text = agent.messages[2]["content"][0]["toolResult"]["content"][0]["text"]
    first, second = text.splitlines()[:2]
    assert first == "It said: Sorry. Then:"
    assert second.startswith("Agent 'child' stopped")
    assert str(child.messages[-1]["content"][0]["text"]) == "Sorry."
    assert otel_limits.is_synthetic(child.messages[-1])
