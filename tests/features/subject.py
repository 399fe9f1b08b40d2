"""The interface of a framework whose features are observed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from otel_limits import Stop, stop_of

if TYPE_CHECKING:
    from otel_limits.testing import Answer
    from tests.compositions.judge import Entry


@dataclass(frozen=True)
class Ending:
    """How a call of an agent has ended."""

    result: Any
    text: str = ""
    """The last answer, or the text that a stream has shown."""
    output: Any = None
    """The typed output."""
    question: Any = None
    """The question to a human, if any."""
    message: Any = None
    """The last message, or the object that has it."""

    @property
    def stop(self) -> Stop | None:
        """The halt, if any."""
        return stop_of(self.result)


Pause = Callable[[], Awaitable[None]]
"""Awaited by a model before it answers."""


class Subject(Protocol):
    """Builds agents of a framework, and calls them through its public methods."""

    title: str
    """Title of the column."""
    name: str
    """Name of the framework in otel-limits."""
    private_names: int
    """Private names of the framework that its binding uses."""
    ways: Mapping[str, Callable[[Any], Ending]]
    """Every method of the framework that calls an agent."""

    def model(self, script: Iterable[Answer], pause: Pause | None = None) -> Any:
        """Return a model that counts its `calls`."""

    def agent(self, model: Any, *tools: Any, name: str = "boss", output: Any = None) -> Any:
        """Return an agent with the tool `search`, possibly with a typed output."""

    def agent_with_plugin(self, model: Any, plugin: Any) -> Any:
        """Return an agent with `LimitsPlugin`."""

    def calling(self, agent: Any, wrap: Callable[[str], str] | None = None) -> Any:
        """Return a tool named `ask` that calls another agent.

        Args:
            agent: The other agent.
            wrap: Makes the tool's result from the agent's answer.
        """

    def delegating(self, model: Any, agent: Any) -> Any:
        """Return an agent whose tool `ask` calls another agent, whose answer ends the call."""

    def doing(self, work: Callable[[], str]) -> Any:
        """Return a tool named `ask` that calls a function."""

    def raising(self) -> Any:
        """Return a tool named `ask` that raises an exception, which the model reads."""

    def denying(self, model: Any) -> Any:
        """Return an agent in which code of the application denies each call of `search`."""

    def asking_first(self, model: Any) -> Any:
        """Return an agent in which a human decides about each call of `search`."""

    def accept(self, agent: Any, ending: Ending) -> Ending:
        """Let a human answer yes to the question that a call has ended with."""

    def reject(self, agent: Any, ending: Ending) -> Ending:
        """Let a human answer no to the question that a call has ended with."""

    def asking(self, model: Any) -> Any:
        """Return a tool named `ask` that calls a model itself."""

    def handing_off(self, models: tuple[Any, Any]) -> Any:
        """Return a group of two agents, `a` and `b`, that hand over to each other."""

    def hand_off_to(self, name: str) -> list[Answer]:
        """Script a hand-off to the other agent of that group, named `a` or `b`."""

    def call(self, agent: Any, prompt: str = "go") -> Ending:
        """Call an agent without an event loop. A second call continues its conversation."""

    async def call_later(self, agent: Any) -> Ending:
        """Call an agent in an event loop."""

    async def stream(self, agent: Any, reading: Pause | None = None) -> Ending:
        """Call an agent and read its stream, and await a function after each part."""

    async def leave(self, agent: Any) -> None:
        """Call an agent, and leave its stream after the first part."""

    def approve(self, agent: Any, ending: Ending, more_turns: int | None) -> Ending:
        """Let a human answer the question that a call has ended with.

        Args:
            agent: The agent.
            ending: The end of the call.
            more_turns: By how much the human raises the limit, if the framework supports that.
        """

    def stored(self, agent: Any) -> Any:
        """Return the last message of the agent's conversation, as it is stored."""

    def history(self, request: Any) -> Iterable[Entry]:
        """Describe the conversation in a request that a model has received."""

    def results(self, request: Any) -> list[str]:
        """Return the texts of the tool results in a request."""
