"""Scripted models, and the names for tests."""

from __future__ import annotations

import asyncio
from importlib import reload
from typing import TYPE_CHECKING, Any

import pytest
from agents import Agent as OpenAIAgent
from agents import RunConfig, Runner
from langchain.agents import create_agent
from strands import Agent

from otel_limits import testing
from otel_limits.bindings import known
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.testing import ScriptedAgentsModel, ScriptedChatModel, ScriptedModel, says, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = [says("one")]


def strands_agent() -> Callable[[], object]:
    """Return the call of an agent of Strands."""
    agent = Agent(model=ScriptedModel(SCRIPT), callback_handler=None)
    return lambda: agent("go")


def langchain_agent() -> Callable[[], object]:
    """Return the call of an agent of LangChain."""
    agent = create_agent(ScriptedChatModel(SCRIPT), [])
    asked: Any = {"messages": [("user", "go")]}
    return lambda: agent.invoke(asked)


def openai_agent() -> Callable[[], object]:
    """Return the call of an agent of the OpenAI Agents SDK."""
    agent = OpenAIAgent("boss", model=ScriptedAgentsModel(SCRIPT))
    quiet = RunConfig(tracing_disabled=True)
    return lambda: asyncio.run(Runner.run(agent, "go", run_config=quiet))


@pytest.mark.parametrize("make", [strands_agent, langchain_agent, openai_agent])
def test_script_that_ended_names_the_request(make: Callable[[], Callable[[], object]]) -> None:
    """A StopIteration would be replaced, as generators of the framework read the answer."""
    call = make()
    call()
    with pytest.raises(Exception, match=r"The script has no answer for request 2\. Add one"):
        call()


def test_all_names_can_be_imported_with_one_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from otel_limits.testing import *` imports each of `__all__`."""
    with monkeypatch.context() as without:
        without.setattr(known, "is_there", lambda framework: framework is STRANDS)
        names = reload(testing).__all__
    assert {"ScriptedModel", "says"} <= {*names}
    assert not {"ScriptedChatModel", "ScriptedAgentsModel"} & {*names}
    reload(testing)


def test_usage_of_no_tokens_is_zero() -> None:
    """As a provider reports a zero-token call."""
    assert set(tokens(0).values()) == {0}
