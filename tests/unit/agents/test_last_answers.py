"""Last answers (`wrap_up`) that are truncated, empty or of the wrong kind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent, tool
from strands.handlers import PrintingCallbackHandler
from strands.hooks import AfterInvocationEvent, BeforeModelCallEvent
from strands.middleware import InvokeModelStage
from strands.multiagent import GraphBuilder
from strands.types.events import ModelStopReason

import otel_limits
from otel_limits import Halt, Limits, Stop, enable
from otel_limits.core.halt_texts import CANCELLED_REMARK
from otel_limits.testing import Answer, ScriptedModel, says, uses

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Sequence

    from strands.types.streaming import StreamEvent

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent

TEXT = "This request could not be completed because it took too many steps."
"""The end user's text."""

pytestmark = pytest.mark.usefixtures("source")


def wrap_up(make_agent: MakeAgent, last: Answer, events: list[Event]) -> Any:
    """Run an agent with `last` as its last answer, then invoke it again."""
    enable(Limits(max_turns=1), action="wrap_up", observers=[events.append])
    model = ScriptedModel([uses("search"), last, says("again")])
    agent = make_agent(model)
    result = agent("go")
    assert (result.stop_reason, model.calls) == ("max_turns", 2)
    assert [message["role"] for message in agent.messages] == ["user", "assistant"] * 2
    assert all(message["content"] for message in agent.messages)
    assert not any("toolUse" in block for block in agent.messages[-1]["content"])
    assert agent("go on").stop_reason == "end_turn"
    return result


def actions(events: list[Event]) -> Sequence[str]:
    """Return the actions of the halt and of the stop."""
    return [event.action for event in events if isinstance(event, (Halt, Stop))][:2]


def test_answer_truncated_by_output_cap_is_kept(make_agent: MakeAgent, events: list[Event]) -> None:
    """A truncated answer is no error here: the limit ended the agent."""
    last = says("The answer so", stop_reason="max_tokens")
    result = wrap_up(make_agent, last, events)
    answer, note = result.message["content"]
    assert answer == {"text": "The answer so"}
    assert note["text"] == f"\n{TEXT}"
    assert not otel_limits.is_synthetic(result.message)
    assert actions(events) == ["wrapped_up", "wrapped_up"]


@pytest.mark.parametrize(
    "last",
    [
        says(""),
        says(" \n"),
        says("", stop_reason="max_tokens"),
        uses("search", stop_reason="max_tokens"),
    ],
    ids=["empty", "blank", "cut", "cut-in-a-tool-use"],
)
def test_answer_without_text_is_replaced(
    make_agent: MakeAgent, last: Answer, events: list[Event]
) -> None:
    """Providers reject a message without content, so the conversation ends as after a halt."""
    result = wrap_up(make_agent, last, events)
    assert otel_limits.is_synthetic(result.message)
    assert str(result) == f"{TEXT}\n"
    assert actions(events) == ["halted", "halted"]


def test_truncated_answer_keeps_text_without_tool_use(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """A truncated tool use has no result and can have none."""
    last = Answer(text="Half of it", tools=(("search", {}),), stop_reason="max_tokens")
    result = wrap_up(make_agent, last, events)
    assert [*map(list, result.message["content"])] == [["text"], ["text"]]
    assert result.message["content"][0] == {"text": "Half of it"}


def streamed(agent: Any, prompt: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the raw chunks of the last message of a stream, and its texts."""
    chunks: list[dict[str, Any]] = []
    texts: list[str] = []

    async def read() -> None:
        async for event in agent.stream_async(prompt):
            if "messageStart" in (chunk := event.get("event", {})):
                chunks.clear()
                texts.clear()
            chunks.extend([chunk] if chunk else [])
            texts.extend([event["data"]] if "data" in event else [])

    asyncio.run(read())
    return chunks, texts


@pytest.mark.parametrize(
    "last",
    [
        says("in short"),
        says("cut", stop_reason="max_tokens"),
        says(" "),
        uses("search", stop_reason="max_tokens"),
    ],
    ids=["whole", "cut", "blank", "cut-in-a-tool-use"],
)
def test_stream_ends_with_the_note(make_agent: MakeAgent, last: Answer) -> None:
    """The last text of the stream is the last block of the message, within that message."""
    enable(Limits(max_turns=1), action="wrap_up")
    agent = make_agent(ScriptedModel([uses("search"), last]))
    chunks, texts = streamed(agent, "go")
    assert texts[-1] == agent.messages[-1]["content"][-1]["text"]
    assert texts[-1].strip() == TEXT
    kinds = [kind for chunk in chunks for kind in chunk]
    end = kinds.index("messageStop")
    assert kinds[end - 3 : end] == ["contentBlockStart", "contentBlockDelta", "contentBlockStop"]
    assert chunks[end - 2]["contentBlockDelta"]["delta"]["text"] == texts[-1]
    assert not any(kind.startswith("content") for kind in kinds[end:])


def test_callback_handler_gets_the_note(
    make_agent: MakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chat window shows the note at the end, with the state of the caller attached."""
    enable(Limits(max_turns=1), action="wrap_up")
    agent, states = make_agent(ScriptedModel([uses("search"), says("in short")])), []
    printing = PrintingCallbackHandler()

    def handle(**event: Any) -> None:
        printing(**event)
        states.extend([event.get("tenant")] if "data" in event else [])

    agent.callback_handler = handle
    agent("go", invocation_state={"tenant": "acme"})
    printed = capsys.readouterr().out.rstrip()
    assert printed.endswith(agent.messages[-1]["content"][-1]["text"])
    assert set(states) == {"acme"}


def test_cached_answer_has_the_note_only_in_its_message(make_agent: MakeAgent) -> None:
    """Its message is marked as partial; nothing is added to a stream without chunks."""
    enable(Limits(max_turns=1), action="wrap_up")
    agent = make_agent(ScriptedModel([says("hello"), uses("search")]))
    agent("hello")  # middleware registered after the first invocation runs within our stage
    asked: list[object] = []

    async def cached(context: Any, next_fn: Any) -> Any:
        asked.append(context)
        if len(asked) == 1:
            async for event in next_fn(context):
                yield event
            return
        message: Any = {"role": "assistant", "content": [{"text": "from the cache"}]}
        usage: Any = {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}
        yield ModelStopReason("end_turn", message, usage, {"latencyMs": 0})

    agent.add_middleware(InvokeModelStage, cached)
    texts = streamed(agent, "go")[1]
    assert texts == []
    answer, note = agent.messages[-1]["content"]
    assert answer["text"] == "from the cache"
    assert note["text"].strip() == TEXT


class Thinking(ScriptedModel):
    """Gives a last answer with reasoning but no text."""

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer, or a thought."""
        if self.calls != 1:
            async for event in super().stream(*arguments, **named):
                yield event
            return
        self.calls += 1
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockDelta": {"delta": {"reasoningContent": {"text": "Hm"}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}


def test_answer_with_only_reasoning_is_replaced(make_agent: MakeAgent) -> None:
    """Reasoning is not an answer."""
    enable(Limits(max_turns=1), action="wrap_up")
    result = make_agent(Thinking([uses("search")]))("go")
    assert (result.stop_reason, otel_limits.is_synthetic(result.message)) == ("max_turns", True)


def test_cancelled_answer_is_reported_as_such(make_agent: MakeAgent) -> None:
    """The model did not write the text of a cancelled response."""
    enable(Limits(max_turns=1), action="wrap_up")
    agent = make_agent(ScriptedModel([uses("search"), says("never read")]))

    def cancel(event: BeforeModelCallEvent) -> None:
        if len(event.agent.messages) > 1:
            agent.cancel()

    agent.hooks.add_callback(BeforeModelCallEvent, cancel)
    stop = otel_limits.stop_of(agent("go"))
    assert stop is not None
    assert CANCELLED_REMARK in stop.sentence


def test_resuming_hook_does_not_replace_the_last_answer(make_agent: MakeAgent) -> None:
    """An invocation that was wrapped up is over, and its answer is the result."""
    enable(Limits(max_turns=1), action="wrap_up")
    agent = make_agent(model := ScriptedModel([uses("search"), says("in short"), says("never")]))

    def resume(event: AfterInvocationEvent) -> None:
        event.resume = "Is the goal reached?"

    agent.hooks.add_callback(AfterInvocationEvent, resume)
    assert str(agent("go")) == f"in short\n\n{TEXT}\n"
    assert model.calls == 2


@pytest.mark.parametrize("result", ["", " \n", {"status": "success", "content": []}])
def test_last_request_has_no_blank_text(make_agent: MakeAgent, result: Any) -> None:
    """Providers refuse it, and a tool may return nothing."""

    @tool
    def search() -> Any:
        """Find nothing."""
        return result

    enable(Limits(max_turns=1), action="wrap_up")
    blank = Answer(text=" ", tools=(("search", {}),))
    model = ScriptedModel([blank, says("in short")])
    agent = make_agent(model, tools=[search])
    assert str(agent("go")).startswith("in short")
    blocks = [block for message in model.requests[-1] for block in message["content"]]
    assert all(block["text"].strip() for block in blocks)
    assert "[The tool returned nothing.]" in str(blocks)


def nested(leaf: ScriptedModel, root: ScriptedModel, make_agent: MakeAgent) -> Agent:
    """Make an agent whose tool is another agent with the tool `search`."""
    child = make_agent(leaf, name="leaf")
    return Agent(name="root", model=root, tools=[child.as_tool()], callback_handler=None)


def test_member_at_its_own_limit_writes_its_answer(
    make_agent: MakeAgent, events: list[Event]
) -> None:
    """The tree has room, so its own last answer is kept, and the root continues."""
    enable(Limits(max_turns=3), tree=Limits(max_turns=9), action="wrap_up")
    leaf = ScriptedModel([*[uses("search")] * 3, says("from the leaf")])
    root = ScriptedModel([uses("leaf"), says("done")])
    agent = nested(leaf, root, make_agent)
    assert str(agent("go")) == "done\n"
    assert "from the leaf" in str(agent.messages[2])


def test_running_node_of_a_graph_is_the_outermost(make_agent: MakeAgent) -> None:
    """A graph has no model to answer; its node has."""
    enable(tree=Limits(max_turns=2), action="wrap_up")
    model = ScriptedModel([*[uses("search")] * 2, says("in short")])
    builder = GraphBuilder()
    builder.set_max_node_executions(9)
    builder.add_node(make_agent(model), "only")
    result = builder.build()("go")
    assert "in short" in str(result.results["only"].result)
    assert model.calls == 3
