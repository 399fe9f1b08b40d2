"""The texts of a halt, as each of its readers gets them."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.multiagent import GraphBuilder

import otel_limits
from otel_limits import Limits, LimitsPlugin, enable
from otel_limits.core.limits import LIMITS, STOP_REASONS, Breach
from otel_limits.core.policy import HALT_MESSAGE_DEFAULT, Verdict
from otel_limits.core.texts import for_end_user, for_model
from otel_limits.testing import Answer, ScriptedModel, endless, says, uses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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

    @tool(name=child.name)
    def ask() -> str:
        """Call the child."""
        return str(child("go"))

    return ask


def as_graph(child: Agent) -> Any:
    """A tool that runs a graph; its result has each answer behind the name of its node."""
    builder = GraphBuilder()
    builder.add_node(child, "child")
    builder.set_entry_point("child")
    builder.set_max_node_executions(1)
    graph = builder.build()

    @tool(name="child")
    def ask() -> str:
        """Call the graph."""
        return str(graph("go"))

    return ask


@pytest.mark.parametrize("way", [as_tool, as_function, as_graph])
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
        "Agent 'child' stopped before it finished: the limit of 5 turns was reached. Do not "
        "call it again for this task. Answer with what you have, and say what is missing."
    )
    assert ("half of it" in read) is (action == "wrap_up")
    assert FOR_USER not in read
    assert "halted by" not in read


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("way", [as_tool, as_function])
def test_each_tool_names_its_own_agent(
    make_agent: MakeAgent, source: str, way: Callable[[Agent], Any], *, is_parallel: bool
) -> None:
    """Agents that were halted for the same reason have the same last message."""
    enable()
    names = ("first", "second", "third")
    children = [
        make_agent(
            ScriptedModel(endless(uses("search"))),
            name=name,
            plugins=[LimitsPlugin(Limits(max_turns=turns))],
        )
        for turns, name in enumerate(names, start=2)
    ]
    asks = [(name, {"input": "go"} if way is as_tool else {}) for name in names]
    script = (
        [Answer(tools=tuple(asks))] if is_parallel else [Answer(tools=(each,)) for each in asks]
    )
    parent = Agent(
        model=ScriptedModel([*script, says("done")]),
        tools=[way(child) for child in children],
        callback_handler=None,
    )
    parent("go")
    read = [
        block["toolResult"]["content"][0]["text"].strip().split(". ")[0]
        for message in parent.messages
        for block in message["content"]
        if "toolResult" in block
    ]
    assert read == [
        f"Agent '{name}' stopped before it finished: the limit of {turns} turns was reached"
        for turns, name in enumerate(names, start=2)
    ]


def test_each_node_in_the_result_of_a_tool_has_its_own_text(
    make_agent: MakeAgent, source: str
) -> None:
    """`str(result)` of a graph has each answer behind the name of its node."""
    enable()
    builder = GraphBuilder()
    for turns, name in ((2, "first"), (3, "second")):
        plugin = LimitsPlugin(Limits(max_turns=turns))
        child = make_agent(ScriptedModel(endless(uses("search"))), name=name, plugins=[plugin])
        builder.add_node(child, name)
        builder.set_entry_point(name)
    builder.set_max_node_executions(2)
    graph = builder.build()

    @tool
    def ask() -> str:
        """Call the graph."""
        return str(graph("go"))

    agent = Agent(model=ScriptedModel([uses("ask"), says("x")]), tools=[ask], callback_handler=None)
    agent("go")
    text = agent.messages[2]["content"][0]["toolResult"]["content"][0]["text"]
    assert sorted(line.split(" turns")[0] for line in text.splitlines()) == [
        "first: Agent 'first' stopped before it finished: the limit of 2",
        "second: Agent 'second' stopped before it finished: the limit of 3",
    ]


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
    assert "Agent 'leaf' stopped before it finished" in str(top.messages[2])


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


def test_halt_message_of_the_nearest_source_applies(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment, `enable()`, the policy file and the plugin, each over the one before."""

    def message(**arguments: Any) -> str:
        return str(make_agent(ScriptedModel(endless(uses("search"))), **arguments)("go")).strip()

    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "1")
    monkeypatch.setenv("OTEL_LIMITS_HALT_MESSAGE", "{agent}: {reason} ({used} of {limit}).")
    enable()
    assert message() == "tester: it took too many steps (1 turn of 1 turn)."
    enable(halt_message="By code.")
    assert message() == "By code."
    path = tmp_path / "limits.yaml"
    path.write_text("agents: {test*: {halt_message: 'By file.'}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    enable(halt_message="By code.")
    assert message() == "By file."
    assert message(plugins=[LimitsPlugin(halt_message="By plugin.")]) == "By plugin."


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            "{model} stopped",
            "{model} is unknown. The fields are {agent}, {reason}, {limit}, {used}.",
        ),
        ("{agent.__class__}", "{agent.__class__} is unknown."),
        ("{agent[0]}", "{agent[0]} is unknown."),
        ("{agent!r}", "{agent} is unknown."),
        ("{limit:>9999999}", "{limit} is unknown."),
        ("{} stopped", "{} is unknown."),
        ("{stopped", "Write a single brace as {{ or }}."),
        (" \n", "It needs words besides"),
        ("{agent} {limit}", "It needs words besides"),
        (5, "halt_message must be a message with text"),
    ],
)
def test_invalid_halt_message_is_rejected(
    message: Any, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In code and in the environment, with a sentence."""
    for way in (enable, LimitsPlugin):
        with pytest.raises(ValueError, match=re.escape(advice)):
            way(halt_message=message)
    if message != 5 and message.strip():
        monkeypatch.setenv("OTEL_LIMITS_HALT_MESSAGE", message)
        with pytest.raises(ValueError, match=re.escape(advice)):
            enable()


def test_fields_are_empty_for_a_kill(make_agent: MakeAgent) -> None:
    """A kill has no limit and no usage."""

    @tool
    def search() -> str:
        """End everything."""
        return str(otel_limits.kill(all=True))

    enable(halt_message="[{agent}|{reason}|{limit}|{used}]")
    agent = make_agent(ScriptedModel(endless(uses("search"))), tools=[search])
    assert str(agent("go")) == "[tester|it was stopped||]\n"


@pytest.mark.parametrize("reason", STOP_REASONS)
def test_texts_for_end_users_and_models_suit_their_readers(reason: str) -> None:
    """No names of variables or code for end users, and no invitation for either."""
    limits = [limit for limit in LIMITS.values() if limit.reason == reason]
    for name in [limit.name for limit in limits] or ["quota"]:
        breaches = () if reason == "killed" else (Breach(name, 3, 3, reason, "turns", "search"),)
        verdict = Verdict(reason, breaches)
        for_user = for_end_user("tester", verdict, HALT_MESSAGE_DEFAULT)
        told = for_model("tester", verdict)
        assert re.fullmatch(r"This request could not be completed because [a-z ]+\.", for_user)
        assert "Do not call it again for this task." in told
        assert not INVITATION.search(for_user + told)


def test_preset_caps_the_whole_tree(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an agent that calls a sub-agent in each turn makes 25 times its calls."""
    monkeypatch.setenv("OTEL_LIMITS_PRESET", "recommended")
    enable()
    numbers = itertools.count()

    def different(name: str) -> Iterator[Any]:
        while True:
            yield uses(
                name, arguments={"query" if name == "search" else "input": str(next(numbers))}
            )

    @tool
    def search(query: str) -> str:
        """Search."""
        return query

    leaf, root = ScriptedModel(different("search")), ScriptedModel(different("leaf"))
    child = make_agent(leaf, name="leaf", tools=[search])
    result = Agent(model=root, tools=[child.as_tool()], callback_handler=None)("go")
    assert (result.stop_reason, leaf.calls + root.calls) == ("max_model_calls", 100)


LOOPS = {
    "max_consecutive_same_tool": "No other tool was called in between.",
    "max_identical_tool_calls": "Arguments and results were the same each time.",
    "max_repeated_tool_cycles": "The same few calls returned the same results each time.",
    "max_no_progress_turns": "These turns had no new tool result and no new text.",
}


@pytest.mark.parametrize("limit", LOOPS)
def test_operator_reads_what_a_loop_limit_saw(make_agent: MakeAgent, limit: str) -> None:
    """Turns without progress may call different tools, so each limit has its own words."""
    caps: Any = {limit: 2}
    enable(Limits(**caps))
    script = itertools.cycle(uses("search", arguments={"query": each}) for each in "ab")
    stop = otel_limits.stop_of(make_agent(ScriptedModel(script))("go"))
    assert stop is not None
    assert f" {LOOPS[limit]} Check " in stop.sentence
    assert ("EXEMPT_TOOLS" in stop.sentence) is (limit != "max_no_progress_turns")


@pytest.mark.parametrize(
    ("response", "remark"),
    [
        ({"extend": {"max_turn": 5}}, "'max_turn' is unknown. Did you mean 'max_turns'?"),
        ({"extent": {"max_turns": 5}}, "'extent' is unknown. Did you mean 'extend'?"),
        ({"extend": {"max_turns": "5"}}, "max_turns must be a whole number of 1 or more, got '5'."),
        ({"extend": {"turns": 5}}, "'turns' is unknown. Did you mean 'max_turns'?"),
        ({"extend": "5 more"}, "'extend' must be a number, or map limits to caps."),
        ({"max_turns": 5}, "'max_turns' must be within 'extend'."),
        ('{"extend": {"max_turns": 5}}', "it is text, not a mapping."),
        ({"approved": False}, "it has no 'extend'."),
        ("maybe", "'maybe' is neither yes, no nor a number."),
        ({"extend": None}, ""),
        ("no", ""),
    ],
)
def test_misspelled_answer_to_a_question_is_named(
    make_agent: MakeAgent, source: str, response: Any, remark: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The person who answered sees why the agent halted anyway."""
    enable(Limits(max_turns=1), action="ask")
    agent = make_agent(ScriptedModel(endless(uses("search"))))
    result = agent("go")
    while result.interrupts:
        (asked,) = result.interrupts
        answer: Any = [{"interruptResponse": {"interruptId": asked.id, "response": response}}]
        result = agent(answer)
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert stop.sentence in caplog.text
    if remark:
        assert f" The answer was not understood: {remark} " in stop.sentence
    else:
        assert "not understood" not in stop.sentence
