"""Settings of a run under which the same limits hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from agents import (
    Agent,
    AgentsException,
    ModelRetrySettings,
    ModelSettings,
    RunConfig,
    Runner,
    SQLiteSession,
    trace,
)
from agents.models.interface import ModelProvider
from agents.run import CallModelData, ModelInputData
from agents.tracing import set_trace_processors
from agents.tracing.processor_interface import TracingProcessor
from pydantic import BaseModel

from otel_limits import Event, Halt, LimitReachedError, Limits, ModelCall, Stop, enable, stop_of
from otel_limits.testing import ScriptedAgentsModel, endless, fails, says, uses
from tests.openai_agents.runs import CALLS, agent, halt_of, looping, search, unanswered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

each_way = pytest.mark.parametrize("how", CALLS)


class Provider(ModelProvider):
    """An application's own source of models."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_model(self, model_name: str | None) -> Any:
        """Return the model under every name."""
        self.model.model = model_name
        return self.model


@each_way
def test_models_of_a_provider_are_limited(how: str, events: list[Event]) -> None:
    """The agent has only the name of its model."""
    enable(max_turns=2, observers=[events.append])
    model = looping()
    config = RunConfig(model_provider=Provider(model), tracing_disabled=True)
    result = CALLS[how](Agent("boss", model="their-model", tools=[search]), run_config=config)
    assert (model.calls, halt_of(result).turns) == (2, 2)
    calls = [each.model for each in events if isinstance(each, ModelCall)]
    assert calls == ["their-model", "their-model"]


@each_way
def test_model_of_the_run_replaces_that_of_the_agent(how: str) -> None:
    """The one that is called counts."""
    enable(max_turns=2)
    model, unused = looping(), looping()
    config = RunConfig(model=model, tracing_disabled=True)
    halt_of(CALLS[how](agent(unused), run_config=config))
    assert (model.calls, unused.calls) == (2, 0)


def shortened(data: CallModelData[Any]) -> ModelInputData:
    """Send only the last two items."""
    return ModelInputData(data.model_data.input[-2:], data.model_data.instructions)


@each_way
def test_filtered_input_is_limited_and_estimated(how: str, events: list[Event]) -> None:
    """Sent items count, not the whole conversation; wrap_up adds its note to them."""
    enable(max_turns=3, action="wrap_up", observers=[events.append])
    script = [uses("search", usage=None), uses("search", usage=None), uses("search", usage=None)]
    model = ScriptedAgentsModel([*script, says("what I know", usage=None)])
    config = RunConfig(call_model_input_filter=shortened, tracing_disabled=True)
    result = CALLS[how](agent(model), "x" * 4000, run_config=config)
    assert (result.final_output, halt_of(result).action) == ("what I know", "wrapped_up")
    assert [len(each) for each in model.requests] == [1, 2, 2, 3]
    first, *others = [each.usage.input for each in events if isinstance(each, ModelCall)]
    assert first > 500 > max(others) > 0


@each_way
def test_retries_of_the_settings_share_the_limits(how: str, events: list[Event]) -> None:
    """Each attempt is a model call, and the halt amid them is no attempt."""
    enable(max_model_calls=3, observers=[events.append])
    model = ScriptedAgentsModel(endless(fails(OSError("busy"))))
    retry = ModelRetrySettings(
        max_retries=9, policy=lambda _: True, backoff={"initial_delay": 0, "jitter": False}
    )
    result = CALLS[how](agent(model, model_settings=ModelSettings(retry=retry)))
    assert (model.calls, halt_of(result).model_calls) == (3, 3)
    assert len([each for each in events if isinstance(each, Halt)]) == 1


class Recorder(TracingProcessor):
    """Keeps the SDK's own spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def on_trace_start(self, trace: Any) -> None:
        """Do nothing."""

    def on_trace_end(self, trace: Any) -> None:
        """Do nothing."""

    def on_span_start(self, span: Any) -> None:
        """Do nothing."""

    def on_span_end(self, span: Any) -> None:
        """Keep it."""
        self.spans.append(span)

    def shutdown(self) -> None:
        """Do nothing."""

    def force_flush(self) -> None:
        """Do nothing."""


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """The SDK's traces, kept here instead of sent to OpenAI."""
    made = Recorder()
    set_trace_processors([made])
    yield made
    set_trace_processors([])


@each_way
def test_traces_of_the_sdk_show_a_halt_like_an_answer(how: str, recorder: Recorder) -> None:
    """No span of it is an error, and each tool has its span."""
    enable(max_turns=2)
    with trace("outer"):
        result = CALLS[how](agent(looping()), run_config=RunConfig())
    assert halt_of(result).turns == 2
    kinds = [span.span_data.type for span in recorder.spans]
    assert (kinds.count("function"), kinds.count("agent")) == (2, 1)
    assert [span.error for span in recorder.spans if span.error] == []


class Opinion(BaseModel):
    """The output of an agent that must not be text."""

    good: bool


@each_way
def test_session_of_a_typed_agent_goes_on_after_a_halt(how: str, tmp_path: Path) -> None:
    """It raises, with the outputs of the last tools in its session."""
    enable(max_turns=1)
    session = SQLiteSession("1", tmp_path / "session.db")
    model = ScriptedAgentsModel([uses("search", "search"), says('{"good": true}')])
    boss = agent(model, output_type=Opinion)
    with pytest.raises(AgentsException) as caught:
        CALLS[how](boss, session=session)
    assert isinstance(caught.value, LimitReachedError)
    items: list[Any] = asyncio.run(session.get_items())
    assert (unanswered(items), items[-1]["type"]) == ([], "function_call_output")
    enable(max_turns=1)
    assert CALLS[how](boss, "again", session=session).final_output == Opinion(good=True)
    session.close()


@each_way
def test_halt_of_a_typed_agent_as_a_tool_reaches_the_model(how: str) -> None:
    """Its exception becomes the result of the tool, in words for the model."""
    enable(tree=Limits(max_turns=9), max_turns=2)
    tool = agent(looping(), name="helper", output_type=Opinion).as_tool("ask", "Ask.")
    model = ScriptedAgentsModel([uses("ask", arguments={"input": "?"}), says("done")])
    result = CALLS[how](agent(model, tool))
    assert (result.final_output, stop_of(result)) == ("done", None)
    assert "Do not call" in model.requests[-1][-1]["output"]


def test_runs_in_one_process_have_their_own_counts(events: list[Event]) -> None:
    """Twenty concurrent users of one agent object, which the SDK shares among runs."""
    enable(max_turns=2, observers=[events.append])
    model = looping()
    boss = agent(model)
    config = RunConfig(tracing_disabled=True)

    async def main() -> list[Any]:
        runs = [Runner.run(boss, "go", run_config=config) for _ in range(20)]
        return await asyncio.gather(*runs)

    results = asyncio.run(main())
    assert {halt_of(each).turns for each in results} == {2}
    assert model.calls == 40
    assert len([each for each in events if isinstance(each, Stop)]) == 20
