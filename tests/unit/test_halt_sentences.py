"""The sentence of a halt, which names the place where the limit is set."""

from __future__ import annotations

import logging
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent
from strands.hooks import BeforeToolCallEvent

import otel_limits
from otel_limits import Limits, LimitsPlugin, MaxTurnsReachedException, enable
from otel_limits.core.limits import LIMITS, STOP_REASONS, Breach
from otel_limits.core.policy import Verdict
from otel_limits.core.texts import for_operator
from otel_limits.core.wording import pluralize
from otel_limits.testing import ScriptedModel, endless, uses
from tests.features.of_strands import StrandsSubject
from tests.resumed import NAMES, SUBJECTS, run_allowed

if TYPE_CHECKING:
    from collections.abc import Callable
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
    assert (file, rest.split(" ")[1]) == ("test_halt_sentences.py", "(enable)")
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
    (warning,) = warnings_logged()
    assert warning.startswith(
        "Agent 'tester' was halted by max_calls_per_tool for tool 'search': 1 of 1 tool calls "
        "used, and one more was requested. The limit is set in OTEL_LIMITS_MAX_CALLS_PER_TOOL. "
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
