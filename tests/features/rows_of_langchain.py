"""Behavior that only LangChain and LangGraph have: other classes of models, output tools, names."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models import LLM, BaseChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import PrivateAttr

from otel_limits import Limits, enable, is_synthetic
from otel_limits.core.limits import LIMITS
from otel_limits.testing import endless, only, says, uses
from tests.features.observed import SEARCH, TURNS, Opinion
from tests.features.seen import MANY, expect, facts, logged, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.features.of_langchain import LangChainSubject
    from tests.features.seen import Row


# --- classes of models ----------------------------------------------------------------------------


class TextModel(LLM):
    """A model of LangChain's interface for completions of text."""

    _calls: int = PrivateAttr(default=0)

    @property
    def calls(self) -> int:
        """Requests that reached it."""
        return self._calls

    @property
    def _llm_type(self) -> str:
        return "text"

    def _call(self, *_: Any, **__: Any) -> str:
        self._calls += 1
        return "text"


class OwnInvoke(BaseChatModel):
    """A chat model that overrides `invoke` without calling its parent."""

    _calls: int = PrivateAttr(default=0)

    @property
    def calls(self) -> int:
        """Requests that reached it."""
        return self._calls

    @property
    def _llm_type(self) -> str:
        return "own"

    def invoke(self, *_: Any, **__: Any) -> AIMessage:
        """Answer."""
        self._calls += 1
        return AIMessage("text")

    def _generate(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def of_text(_: LangChainSubject) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model for text, and a function that calls it."""
    model = TextModel()
    return model, model.invoke


def of_own_invoke(_: LangChainSubject) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model with its own `invoke`, and a function that calls it."""
    model = OwnInvoke()
    return model, lambda asked: model.invoke(asked)  # noqa: PLW0108  looked up when it is called


def of_generate(subject: LangChainSubject) -> tuple[Any, Callable[[Any], Any]]:
    """Return a model, and a function that calls its implementation directly."""
    model = subject.model(endless(says("text")))
    return model, lambda messages: model._generate(messages).generations[0].text


MODELS: Final[Mapping[str, Callable[[LangChainSubject], tuple[Any, Callable[[Any], Any]]]]] = {
    "a model for text": of_text,
    "a model with its own invoke": of_own_invoke,
    "a direct call of _generate": of_generate,
}


def in_a_node(build: Callable[[LangChainSubject], tuple[Any, Callable[[Any], Any]]]) -> Row:
    """Return a row about a node of a graph that calls a model forever."""

    def row(subject: LangChainSubject) -> None:
        """Each request counts, whatever class the model has and whatever method is called."""
        model, ask = build(subject)

        def think(state: MessagesState) -> dict[str, Any]:
            return {"messages": [AIMessage(str(ask(state["messages"])))]}

        graph: Any = StateGraph(MessagesState)
        graph.add_node("think", think)
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", lambda _: "think" if model.calls < MANY else END)
        with recording(limits=Limits(max_model_calls=3)):
            compiled = graph.compile(name="boss", checkpointer=InMemorySaver())
            ending = subject.call(compiled)
        seen = {
            "calls": model.calls,
            "reason": ending.stop and ending.stop.reason,
            "synthetic": is_synthetic(ending.message),
        }
        expect(seen, calls=3, reason="max_model_calls", synthetic=True)

    return row


def unfollowed_class(_: LangChainSubject) -> None:
    """The log names it once, as its requests are neither counted nor limited."""
    with recording(limits=TURNS), logged("LangChain's models") as lines:

        class Batching(OwnInvoke):
            """A model that answers several requests itself, with a helper."""

            client: Any = None

            def batch(self, inputs: Any, *_: Any, **__: Any) -> Any:
                """Answer."""
                return self.send(inputs)

            def send(self, several: Any) -> Any:
                """Send its own request."""
                return self.client.complete(several)

        enable(max_turns=3)
    (line,) = lines
    expect(
        {"class": f"batch() of {__name__}" in line, "name": "Batching are neither" in line},
        **{"class": True, "name": True},
    )


class Delegating(OwnInvoke):
    """A model whose own methods call a model, or refuse to."""

    inner: Any = None

    def batch(self, inputs: Any, *_: Any, **__: Any) -> Any:
        """Answer."""
        return [self.ask(each) for each in inputs]

    def ask(self, asked: Any) -> Any:
        """Call the other model."""
        return self.inner.invoke(asked)

    async def abatch(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Answer as its parent."""
        return await super().abatch(inputs, *args, **options)

    def transform(self, input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002  the name of LangChain
        """Refuse."""
        raise NotImplementedError("use invoke")

    def rate(self, prompt: str) -> str:
        """Be a method that is none of LangChain's."""
        return f"{prompt}: {self.inner.complete()}"


VENDORS: Final = (
    *("langchain_anthropic", "langchain_aws", "langchain_google_genai", "langchain_openai"),
    *("langchain_core.language_models.fake", "langchain_core.language_models.fake_chat_models"),
)
"""Modules with classes of models; not all of them are always installed."""


def followed_classes(_: LangChainSubject) -> None:
    """No class of a vendor or of LangChain itself is reported, nor one that calls another one."""
    for module in filter(find_spec, VENDORS):
        importlib.import_module(module)
    with logged("LangChain's models") as lines, recording(limits=TURNS):
        pass
    expect({"lines": lines}, lines=[])


# --- output tools and names -----------------------------------------------------------------------


def output_tool(name: str) -> Row:
    """Return a row about an agent whose output is invalid forever."""

    def row(subject: LangChainSubject) -> None:
        """The tool that takes the output is requested again and again like any other."""
        invalid = uses("Opinion", arguments={"good": "maybe"})
        with recording(limits=only(name, 5)) as events:
            model = subject.model([*[invalid] * MANY, uses("Opinion", arguments={"good": True})])
            ending = subject.call(subject.agent(model, output=ToolStrategy(Opinion)))
        seen = facts(subject, model, ending, events)
        expect(seen, calls=5, reason=LIMITS[name].reason, valid=True)

    return row


def name_of_the_agent(subject: LangChainSubject) -> None:
    """The message of a halt has the name of its agent, as those of its model have."""
    with recording(limits=TURNS):
        agent = subject.agent(subject.model(endless(SEARCH)), name="clerk")
        messages = subject.call(agent).result["messages"]
    names = [each.name for each in messages if isinstance(each, AIMessage)]
    # LangChain 1.0 gives those of its model none.
    expect({"names": {*names} - {None}, "last": names[-1]}, names={"clerk"}, last="clerk")


ROWS: Final[Mapping[str, Row]] = {
    **{f"{what} in a node": in_a_node(build) for what, build in MODELS.items()},
    "class that answers by itself": unfollowed_class,
    "classes that are followed": followed_classes,
    **{
        f"invalid output under {name}": output_tool(name)
        for name in ("max_identical_tool_calls", "max_consecutive_same_tool")
    },
    "name of the agent in a halt": name_of_the_agent,
}
