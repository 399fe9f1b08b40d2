"""Side calls and calls of hooks beyond a cap are refused: the loop halts, others get an error."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterInvocationEvent
from strands.models.routing import ClassifierStrategy, ModelRouter
from strands.types.exceptions import ContextWindowOverflowException
from strands.vended_interventions.hitl import HumanInTheLoop
from strands.vended_interventions.hitl.classifier import LLMClassifierConfig
from strands.vended_plugins.goal import GoalLoop
from strands.vended_plugins.goal.plugin import JudgeConfig
from strands.vended_plugins.steering import LLMSteeringHandler

from otel_limits import (
    Event,
    Limits,
    MaxModelCallsReachedError,
    MaxTokenBudgetReachedException,
    enable,
)
from otel_limits.testing import Answer, ScriptedModel, endless, fails, says, tokens, uses
from tests.unit.strands.test_sent_requests import (
    ByItself,
    Report,
    asking,
    calls,
    extract,
    read,
    stops,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from strands.types.content import Messages


def assert_valid(messages: Messages) -> None:
    """Assert that every tool use has its result, and that the last message is the assistant's."""
    for message, following in itertools.pairwise(messages):
        asked = [b["toolUse"]["toolUseId"] for b in message["content"] if "toolUse" in b]
        given = [b["toolResult"]["toolUseId"] for b in following["content"] if "toolResult" in b]
        assert sorted(asked) == sorted(given)
    assert messages[-1]["role"] == "assistant"
    assert not any("toolUse" in block for block in messages[-1]["content"])


def caught(ask: Callable[[], Any], errors: list[BaseException]) -> Callable[[], Any]:
    """Call until refused, and keep the error."""

    async def until_refused() -> str:
        try:
            while True:
                await ask()
        except Exception as error:  # noqa: BLE001  the test looks at it
            errors.append(error)
        return "refused"

    return until_refused


@pytest.mark.parametrize("way", [read, extract], ids=["stream", "structured_output"])
def test_side_call_of_tool_is_refused_at_the_cap(
    way: Callable[[Any], Any], source: str, events: list[Event]
) -> None:
    """A cap of N allows exactly N requests, and the tool gets the limit's error for the next."""
    enable(Limits(max_model_calls=4), observers=[events.append])
    helper, errors = ByItself(endless(says("hint")), model_id="helper"), list[BaseException]()
    agent = asking(caught(lambda: way(helper), errors))
    result = agent("go")
    assert (helper.calls, agent.model.calls) == (3, 1)  # type: ignore[attr-defined]
    assert [type(error) for error in errors] == [MaxModelCallsReachedError]
    stop = errors[0].stop  # type: ignore[attr-defined]
    assert (stop.reason, stop.breach.cap) == ("max_model_calls", 4)
    assert (result.stop_reason, stops(events)["thinker"].model_calls) == ("max_model_calls", 4)
    assert_valid(agent.messages)


async def listen(model: Any) -> None:
    """Call a model with audio, passing messages by keyword."""
    spoken = {"audio": {"format": "wav", "source": {"bytes": b""}}}
    async for _ in model.stream(messages=[{"role": "user", "content": [spoken]}]):
        pass


def test_audio_in_keyword_messages_is_detected(
    source: str, events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of audio input is unknown, as its share of the input is not reported."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("models: {helper: {price: {input: 1, output: 1}}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable(observers=[events.append])
    helper = ScriptedModel([says("hint")], model_id="helper")
    asking(lambda: listen(helper))("go")
    (spoken,) = (call for call in calls(events) if call.model == "helper")
    assert spoken.price is None
    assert "it has audio" in str(spoken.unpriced)


def test_token_budget_refuses_side_calls(source: str) -> None:
    """It overshoots by one call at most, whatever made that call."""
    enable(Limits(max_token_budget=200))
    helper = ScriptedModel(endless(says("hint", usage=tokens(1000))))
    errors = list[BaseException]()
    assert asking(caught(lambda: read(helper), errors))("go").stop_reason == "max_token_budget"
    assert helper.calls == 1
    assert [type(error) for error in errors] == [MaxTokenBudgetReachedException]


def test_tools_of_last_turn_may_make_side_calls(source: str) -> None:
    """A side call is not a turn, so it cannot pass a cap on turns."""
    enable(Limits(max_turns=1))
    helper = ScriptedModel([says("hint")])
    assert asking(lambda: read(helper))("go").stop_reason == "max_turns"
    assert helper.calls == 1


def test_side_call_in_observe_mode_is_admitted(source: str, events: list[Event]) -> None:
    """It is reported as a would-be halt."""
    enable(Limits(max_model_calls=1), action="observe", observers=[events.append])
    helper = ScriptedModel([says("hint")])
    assert asking(lambda: read(helper))("go").stop_reason == "end_turn"
    stop = stops(events)["thinker"]
    assert (helper.calls, stop.action, stop.model_calls) == (1, "observed", 3)


@pytest.mark.filterwarnings("ignore:Agent.structured_output:DeprecationWarning")
def test_side_call_in_spent_tree_raises(source: str, events: list[Event]) -> None:
    """It is an invocation without a result that could carry the stop."""
    enable(tree=Limits(max_model_calls=1), observers=[events.append])
    inner = Agent(model=ByItself([]), callback_handler=None, name="inner")
    errors = list[BaseException]()
    ask = caught(lambda: inner.structured_output_async(Report, "what?"), errors)
    assert asking(ask)("go").stop_reason == "max_model_calls"
    assert [type(error) for error in errors] == [MaxModelCallsReachedError]
    assert inner.model.calls == 0  # type: ignore[attr-defined]
    assert (stops(events)["inner"].reason, stops(events)["inner"].action) == (
        "max_model_calls",
        "raised",
    )


# --- side calls of the loop -----------------------------------------------------------------------


def long_conversation() -> Any:
    """Make a conversation long enough to be summarized."""
    return [
        {"role": role, "content": [{"text": f"{number}"}]}
        for number, role in enumerate(["user", "assistant"] * 4)
    ]


@pytest.mark.parametrize("action", ["halt", "raise", "wrap_up", "ask"])
def test_refused_summary_halts(action: Any, source: str, events: list[Event]) -> None:
    """The loop cannot continue without it, because its context has overflowed."""
    enable(Limits(max_model_calls=1), action=action, observers=[events.append])
    model = ScriptedModel([fails(ContextWindowOverflowException("too long"))])
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=1)
    agent = Agent(
        model=model,
        conversation_manager=manager,
        callback_handler=None,
        name="long",
        messages=long_conversation(),
    )
    if action == "raise":
        with pytest.raises(MaxModelCallsReachedError):
            agent("go")
    else:
        assert agent("go").stop_reason == "max_model_calls"
    assert (model.calls, stops(events)["long"].reason) == (1, "max_model_calls")
    assert_valid(agent.messages)
    assert len(agent.messages) == 10


def test_refused_summary_agent_halts(source: str, events: list[Event]) -> None:
    """A halted agent's message must not replace the conversation."""
    enable(tree=Limits(max_model_calls=1), observers=[events.append])
    writer = Agent(model=ScriptedModel([]), callback_handler=None, name="writer")
    manager = SummarizingConversationManager(
        summary_ratio=0.5, preserve_recent_messages=1, summarization_agent=writer
    )
    agent = Agent(
        model=ScriptedModel([fails(ContextWindowOverflowException("too long"))]),
        conversation_manager=manager,
        callback_handler=None,
        name="long",
        messages=long_conversation(),
    )
    assert agent("go").stop_reason == "max_model_calls"
    assert [message["content"][0].get("text") for message in agent.messages[:8]] == [
        str(number) for number in range(8)
    ]
    assert_valid(agent.messages)


def test_router_is_counted_and_refused(source: str, events: list[Event]) -> None:
    """Its classifier is a side call of the loop; the rest is for the models that it selects."""
    enable(Limits(max_model_calls=2), observers=[events.append])
    classifier = ByItself([], model_id="classifier")
    models = [ScriptedModel(endless(uses("think")), model_id=f"m{n}") for n in (1, 2)]

    @tool
    def think() -> str:
        """Do nothing."""
        return "thought"

    router = ModelRouter(models, strategy=ClassifierStrategy(classifier))
    agent = Agent(model=router, tools=[think], callback_handler=None, name="routed")
    result = agent("go")
    assert (result.stop_reason, classifier.calls) == ("max_model_calls", 1)
    assert sum(model.calls for model in models) == 1
    assert next((each.model, each.side) for each in calls(events)) == ("classifier", True)


def test_refused_steering_halts(source: str, events: list[Event]) -> None:
    """Its handler gets no decision, which is the halt and not an error of the agent."""
    enable(tree=Limits(max_model_calls=1), observers=[events.append])

    @tool
    def think() -> str:
        """Do nothing."""
        return "thought"

    judge = ScriptedModel([])
    agent = Agent(
        model=ScriptedModel(endless(uses("think", "think"))),
        tools=[think],
        callback_handler=None,
        name="steered",
        plugins=[LLMSteeringHandler(system_prompt="be strict", model=judge)],
    )
    assert agent("go").stop_reason == "max_model_calls"
    assert (judge.calls, stops(events)["steered"].model_calls) == (0, 1)
    assert_valid(agent.messages)


# --- after the end --------------------------------------------------------------------------------


def test_call_after_end_belongs_to_active_tree(source: str, events: list[Event]) -> None:
    """It is refused once the tree's budget is spent; after the end of the tree nothing is."""
    enable(tree=Limits(max_model_calls=5), observers=[events.append])
    helper = ScriptedModel(endless(says("hint")), model_id="helper")
    errors: list[BaseException] = []
    tasks: list[asyncio.Task[Any]] = []

    async def main() -> None:
        inner_ended, refused, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def later() -> None:
            await inner_ended.wait()
            await caught(lambda: read(helper), errors)()
            refused.set()
            await ended.wait()
            await read(helper)

        async def leave() -> str:
            tasks.append(asyncio.create_task(later()))
            return "begun"

        inner = asking(leave)

        async def ask() -> str:
            await inner.invoke_async("go")  # two calls
            inner_ended.set()
            await refused.wait()
            return "seen"

        outer = asking(ask)
        outer.name = "outer"
        assert (await outer.invoke_async("go")).stop_reason == "max_model_calls"
        assert helper.calls == 2
        ended.set()
        await tasks[0]

    asyncio.run(main())
    assert [type(error) for error in errors] == [MaxModelCallsReachedError]
    late = [each for each in calls(events) if each.model == "helper"]
    assert [each.invocation.agent for each in late] == ["thinker"] * 3
    assert all(each.side for each in late)


# --- refused calls of hooks and plug-ins ----------------------------------------------------------


@tool
def think() -> str:
    """Do nothing."""
    return "thought"


def test_refused_risk_classifier_halts(source: str, events: list[Event]) -> None:
    """It decides before each tool if a human must approve it, and shares the agent's tree."""
    enable(tree=Limits(max_model_calls=2), observers=[events.append])
    decision = Answer(tools=(("_RiskDecision", {"requires_approval": False, "reason": "ok"}),))
    judge = ScriptedModel(endless(decision))
    model = ScriptedModel(endless(uses("think")))
    risks = HumanInTheLoop(classifier=LLMClassifierConfig(model=judge))
    agent = Agent(model=model, tools=[think], callback_handler=None, interventions=[risks])
    assert agent("go").stop_reason == "max_model_calls"
    assert (model.calls, judge.calls) == (1, 1)
    assert_valid(agent.messages)


def test_refused_goal_judge_halts(source: str, events: list[Event]) -> None:
    """Otherwise it would resume the agent forever."""
    enable(tree=Limits(max_model_calls=4), observers=[events.append])
    judge = ScriptedModel(endless(Answer(tools=(("JudgeOutcome", {"passed": False}),))))
    model = ScriptedModel(endless(says("done")))
    goal = GoalLoop("be good", judge=JudgeConfig(model=judge), max_attempts=99)
    agent = Agent(model=model, callback_handler=None, plugins=[goal], name="striving")
    assert agent("go").stop_reason == "max_model_calls"
    assert model.calls + judge.calls == 4
    assert stops(events)["striving"].reason == "max_model_calls"
    assert_valid(agent.messages)


def test_refused_hook_after_the_loop_raises(source: str, events: list[Event]) -> None:
    """Its side call was made by application code, so the error has the limit's stop."""
    enable(Limits(max_model_calls=3), observers=[events.append])
    helper = ScriptedModel(endless(says("hint")))

    async def ask(event: AfterInvocationEvent) -> None:
        for _each in range(9):
            await read(helper)

    agent = Agent(model=ScriptedModel([says("done")]), callback_handler=None, name="asking")
    agent.add_hook(ask, AfterInvocationEvent)
    with pytest.raises(MaxModelCallsReachedError):
        agent("go")
    stop = stops(events)["asking"]
    assert (stop.reason, stop.action, stop.model_calls) == ("max_model_calls", "raised", 3)
    assert helper.calls == 2
    assert_valid(agent.messages)
