"""The sentence of a halt, which names the place where the limit is set."""

from __future__ import annotations

import itertools
import logging
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.hooks import BeforeToolCallEvent
from strands.multiagent import GraphBuilder

import otel_limits
from otel_limits import Limits, LimitsPlugin, MaxTurnsReachedException, enable
from otel_limits.core.halt_texts import for_end_user, for_model, for_operator
from otel_limits.core.limits import LIMITS, STOP_REASONS, Breach
from otel_limits.core.policy import HALT_MESSAGE_DEFAULT, Verdict
from otel_limits.core.wording import pluralize
from otel_limits.testing import Answer, ScriptedModel, endless, says, uses
from tests.features.of_strands import StrandsSubject
from tests.resumed import NAMES, SUBJECTS, run_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.conftest import MakeAgent
    from tests.features.subject import Subject


LONG = "x" * 100_000
SHORT = "x" * 128

SENTENCE = (
    "Agent 'tester' was halted by max_turns: 2 of 2 turns used. The limit is set in "
    "OTEL_LIMITS_MAX_TURNS. Run the agent again to continue, or raise the limit there."
)


@pytest.mark.parametrize("action", ["halt", "wrap_up", "raise"])
def test_long_names_are_as_short_as_in_labels(
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    action: Any,
) -> None:
    """In every log line and text: a name can come from a user's input."""
    caplog.set_level(logging.INFO, logger="otel_limits")
    monkeypatch.setenv("OTEL_LIMITS_WARN_AT", "0.5")
    monkeypatch.setenv("OTEL_LIMITS_HALT_MESSAGE", "{agent} ended: {reason}")
    enable(Limits(max_turns=2), action=action)
    agent = make_agent(ScriptedModel(endless(uses("search"))), name=LONG)
    texts: list[str] = []
    try:
        result = agent("go")
    except otel_limits.LimitReachedError as error:
        texts.append(str(error))
    else:
        texts.append(str(result))
    texts += [each.getMessage() for each in caplog.records if each.name == "otel_limits"]
    assert any(SHORT in text for text in texts)
    assert [text for text in texts if f"{SHORT}x" in text] == []


@pytest.mark.parametrize(
    ("observed", "reserved", "amount"),
    [
        ("0.42432000", "0", "0.42432 of 0.4 USD used"),
        ("30.00", "0", "30 of 0.4 USD used"),
        ("100", "0", "100 of 0.4 USD used"),
        (
            "0.500",
            "0.200",
            "0.5 of 0.4 USD: 0.3 used, 0.2 reserved by in-flight model calls",
        ),
    ],
)
def test_sum_in_a_sentence_has_no_zeros_at_its_end(
    observed: str, reserved: str, amount: str
) -> None:
    """A sum of prices has eight or more digits, and people read the sentence."""
    breach = Breach(
        "max_cost_usd", Decimal("0.4"), Decimal(observed), "max_cost_usd", "USD",
        reserved=Decimal(reserved),
    )  # fmt: skip
    assert breach.amount == amount


def runaway() -> ScriptedModel:
    """A model that never stops."""
    return ScriptedModel(endless(uses("search")))


def origin_of(result: Any) -> str:
    """Where the limit is set that ended an agent."""
    stop = otel_limits.stop_of(result)
    assert stop is not None
    assert stop.breach is not None
    return stop.breach.origin


def test_halt_sentence_is_the_same_everywhere(
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    warnings_logged: Callable[[], list[str]],
    spans: InMemorySpanExporter,
) -> None:
    """Exception, log, stop and span carry the same sentence for the operator."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "2")
    enable(action="raise")
    agent = make_agent(runaway())
    with pytest.raises(MaxTurnsReachedException) as caught:
        agent("go")
    (span,) = [each for each in spans.get_finished_spans() if each.name.startswith("invoke_agent")]

    assert str(caught.value) == SENTENCE
    assert warnings_logged() == [SENTENCE]
    stop = otel_limits.stop_of(agent.messages[-1])
    assert stop is not None
    assert stop.sentence == SENTENCE
    assert (span.attributes or {})["otel_limits.stop.message"] == SENTENCE


def test_a_line_of_the_policy_file(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file by its name alone: models and users read it, too."""
    path = tmp_path / "limits.yaml"
    path.write_text("defaults:\n  limits:\n    max_turns: 2\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "9")
    enable()
    assert origin_of(make_agent(runaway())("go")) == "limits.yaml:3"


def test_a_tree_of_the_policy_file(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A limit of the tree has its own line."""
    path = tmp_path / "limits.yaml"
    path.write_text("defaults:\n  tree:\n    max_turns: 2\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    enable()
    assert origin_of(make_agent(runaway())("go")) == "limits.yaml:3"


def test_a_preset(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which variable replaces what the preset gives."""
    monkeypatch.setenv("OTEL_LIMITS_PRESET", "recommended")
    enable()
    assert origin_of(make_agent(runaway())("go")) == (
        "preset recommended (override it with OTEL_LIMITS_MAX_IDENTICAL_TOOL_CALLS)"
    )


def test_a_line_of_code(make_agent: MakeAgent) -> None:
    """The one that called `enable()`, or made the plugin; the plugin wins."""
    enable(Limits(max_turns=2))
    file, _, rest = origin_of(make_agent(runaway())("go")).partition(":")
    assert (file, rest.split(" ")[1]) == ("test_halt_texts.py", "(enable)")
    assert rest.split(" ")[0].isdecimal()
    agent = make_agent(runaway(), plugins=[LimitsPlugin(Limits(max_turns=1))])
    assert origin_of(agent("go")).endswith("(LimitsPlugin)")


@pytest.mark.parametrize("folder", ["/tmp/", "C:\\Users\\ada\\Temp\\"])  # noqa: S108  made up
def test_a_cell_of_a_notebook_is_a_place(make_agent: MakeAgent, folder: str) -> None:
    """A notebook cell has no file that a user could open, despite ipykernel's name for it."""
    path = f"{folder}ipykernel_4711{folder[-1]}1490997570.py"
    cell = compile("\nenable(Limits(max_turns=2))", path, "exec")
    exec(cell, {"__name__": "__main__", "enable": enable, "Limits": Limits})  # noqa: S102
    agent = make_agent(runaway())
    assert origin_of(agent("go")) == "a cell of the notebook, line 2 (enable)"


def test_tree_halt_points_to_the_root_agent(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, warnings_logged: Callable[[], list[str]]
) -> None:
    """In its tree it would be halted immediately, so the sentence names the root agent."""
    monkeypatch.setenv("OTEL_LIMITS_TREE_MAX_TURNS", "2")
    enable()
    child = make_agent(runaway(), name="child")
    parent = Agent(name="parent", model=ScriptedModel([uses("child")]), tools=[child.as_tool()])
    parent("go")
    assert warnings_logged() == [
        f"Agent {name!r} was halted by tree_max_turns: 2 of 2 turns used. The limit is set in "
        "OTEL_LIMITS_TREE_MAX_TURNS. The whole tree shares this limit: run the root agent again, "
        "or raise it there."
        for name in ("child", "parent")
    ]


def test_the_tools_of_two_places(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, warnings_logged: Callable[[], list[str]]
) -> None:
    """Caps of single tools are distinguished, and a refused call does not count as used."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_CALLS_PER_TOOL", "search=1")
    enable(Limits(max_calls_per_tool={"fetch": 1}))
    make_agent(runaway())("go")
    _, warning = warnings_logged()
    assert warning.startswith(
        "Agent 'tester' was halted by max_calls_per_tool for tool 'search': 1 of 1 tool calls "
        "used, and 3 turns in a row had only refused calls. The limit is set in "
        "OTEL_LIMITS_MAX_CALLS_PER_TOOL. "
    )


def test_more_from_a_human(make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extended cap is attributed to the answer, and to the setting that it extended."""
    monkeypatch.setenv("OTEL_LIMITS_MAX_TURNS", "1")
    enable(action="ask")
    agent = make_agent(runaway())
    (asked,) = agent("go").interrupts or ()
    assert (
        "max_turns: 1 of 1 turns used. The limit is set in OTEL_LIMITS_MAX_TURNS."
        in (asked.reason["sentence"])
    )
    for cap in (2, 3):
        extended = {"interruptId": asked.id, "response": {"extend": {"max_turns": 1}}}
        answer: Any = [{"interruptResponse": extended}]
        (asked,) = agent(answer).interrupts or ()
        assert asked.reason["origin"] == "an answer, from 1 in OTEL_LIMITS_MAX_TURNS"
        used = f"{cap} of {cap} turns used by this task, over {pluralize(cap - 1, 'resume')}"
        assert (
            f"max_turns: {used}. The limit was extended by an answer, from 1 in "
            "OTEL_LIMITS_MAX_TURNS." in asked.reason["sentence"]
        )
    declined: Any = [{"interruptResponse": {"interruptId": asked.id, "response": "no"}}]
    stop = otel_limits.stop_of(agent(declined))
    assert stop is not None
    assert stop.sentence.endswith("to begin a new task, or raise the limit there.")


@pytest.mark.parametrize("subject", SUBJECTS, ids=NAMES)
@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (
            {"max_turns": 3},
            (
                "max_turns: 3 of 3 turns used by this task, over 3 resumes. The limit is set in "
                "LIMITS_HERE. Send the agent a new message to begin a new task, or raise the limit "
                "there."
            ),
        ),
        (
            {"max_tool_calls": 1},
            (
                "max_tool_calls: 1 of 1 tool calls used by this task, over 2 resumes, and one more "
                "was requested. The limit is set in LIMITS_HERE. Send the agent a new message to "
                "begin a new task, or raise the limit there."
            ),
        ),
        (
            {"max_consecutive_same_tool": 1},
            (
                "max_consecutive_same_tool for tool 'search': 1 of 1 calls in a row in this task, "
                "over 1 resume. The limit is set in LIMITS_HERE. No other tool was called in "
                "between."
            ),
        ),
    ],
)
def test_sentence_after_resumes_is_about_the_task(
    subject: Subject,
    limits: dict[str, int],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    warnings_logged: Callable[[], list[str]],
) -> None:
    """An operator who sees one turn of the last invocation would not understand the halt."""
    ((name, cap),) = limits.items()
    monkeypatch.setenv(f"OTEL_LIMITS_{name.upper()}", str(cap))
    enable()
    _, endings = run_allowed(subject)
    (sentence,) = warnings_logged()
    told = told.replace("LIMITS_HERE", f"OTEL_LIMITS_{name.upper()}")
    assert sentence.startswith(f"Agent 'boss' was halted by {told}")
    assert (stop := endings[-1].stop) is not None
    assert stop.sentence == sentence


@pytest.mark.parametrize("subject", SUBJECTS, ids=NAMES)
def test_tree_sentence_after_resumes_is_about_the_tree(
    subject: Subject, warnings_logged: Callable[[], list[str]]
) -> None:
    """A tree lasts as long as the task that it began with."""
    enable(tree=Limits(max_model_calls=2))
    run_allowed(subject)
    (sentence,) = warnings_logged()
    assert "tree_max_model_calls: 2 of 2 model calls used by this tree, over 2 resumes." in sentence
    assert "send the root agent a new message to begin a new task" in sentence


@pytest.mark.parametrize("subject", SUBJECTS, ids=NAMES)
def test_warning_after_resumes_is_about_the_task(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, warnings_logged: Callable[[], list[str]]
) -> None:
    """Each threshold is reported once per task."""
    monkeypatch.setenv("OTEL_LIMITS_WARN_AT", "0.5,0.75")
    enable(Limits(max_turns=4))
    run_allowed(subject)
    assert warnings_logged()[:2] == [
        "Agent 'boss' has used 50% of max_turns: 2 of 4 in this task, over 1 resume.",
        "Agent 'boss' has used 75% of max_turns: 3 of 4 in this task, over 2 resumes.",
    ]


def test_iterations_after_a_resume_are_those_of_the_leg(
    warnings_logged: Callable[[], list[str]],
) -> None:
    """Each answer restarts them, so the sentence names no task."""
    enable(Limits(max_iterations=2))
    subject = StrandsSubject()
    model = subject.model([uses("ask"), uses("search"), uses("search")])
    agent = subject.agent(model, subject.doing(str))

    def ask(event: BeforeToolCallEvent) -> None:
        if event.tool_use["name"] == "ask":
            event.interrupt("approval")

    agent.hooks.add_callback(BeforeToolCallEvent, ask)
    subject.accept(agent, subject.call(agent))
    (sentence,) = warnings_logged()
    assert "max_iterations: 2 of 2 turns used. " in sentence


def test_question_after_resumes_is_about_the_task() -> None:
    """A human decides about everything the task has used."""
    enable(Limits(max_turns=2), action="ask")
    subject = StrandsSubject()
    agent = subject.asking_first(subject.model([uses("search")] * 3))
    ending = subject.call(agent)
    for _ in range(2):
        ending = subject.accept(agent, ending)
    assert "2 of 2 turns used by this task, over 2 resumes." in ending.question.reason["sentence"]


@pytest.mark.parametrize("reason", STOP_REASONS)
def test_every_reason_names_the_next_step(reason: str) -> None:
    """It ends with the next step, whatever halted the agent."""
    limits = [limit for limit in LIMITS.values() if limit.reason == reason]
    limit = limits[0].name if limits else "quota"
    breaches = () if reason == "killed" else (Breach(limit, 3, 3, reason, origin="limits.yaml:12"),)
    what, *_, then = for_operator("tester", Verdict(reason, breaches), "halted").split(". ")
    assert what.startswith("Agent 'tester' was ")
    assert then.endswith(".")
    assert then.split(" ")[0] in ("Run", "Check", "Wait", "Restore")


# --- the texts of each reader ---------------------------------------------------------------------

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


NUMBERS = "a whole number of 1 or more"


@pytest.mark.parametrize(
    ("response", "remark"),
    [
        ({"extend": {"max_turn": 5}}, "'max_turn' is unknown. Did you mean 'max_turns'?"),
        ({"extent": {"max_turns": 5}}, "'extent' is unknown. Did you mean 'extend'?"),
        ({"extend": {"max_turns": "5"}}, "max_turns must be a whole number of 1 or more, got '5'."),
        ({"extend": {"turns": 5}}, "'turns' is unknown. Did you mean 'max_turns'?"),
        ({"extend": "5 more"}, f"'extend' must be {NUMBERS}, or map limits to caps."),
        ({"max_turns": 5}, "'max_turns' must be within 'extend'."),
        ('{"extend": {"max_turns": 5}}', "it is text, not a mapping."),
        ({"approved": False}, "it has no 'extend'."),
        ("maybe", f"'maybe' is neither yes, no nor {NUMBERS}."),
        ("-3", f"'-3' is not {NUMBERS}."),
        ("2.5", f"'2.5' is not {NUMBERS}."),
        (0, f"'0' is not {NUMBERS}."),
        (
            {"extend": {"max_cost_usd": 1}},
            "it raises max_cost_usd, but not max_turns, which was reached.",
        ),
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
