"""Refused model calls of an agent's hooks and plug-ins: their effect on the agent."""

from __future__ import annotations

import pytest
from strands import Agent, tool
from strands.hooks import AfterInvocationEvent
from strands.vended_interventions.hitl import HumanInTheLoop
from strands.vended_interventions.hitl.classifier import LLMClassifierConfig
from strands.vended_plugins.goal import GoalLoop
from strands.vended_plugins.goal.plugin import JudgeConfig

from otel_limits import Event, Limits, MaxModelCallsReachedError, enable
from otel_limits.testing import Answer, ScriptedModel, endless, says, uses
from tests.unit.test_side_calls import assert_valid
from tests.unit.test_tracked_requests import read, stops


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
