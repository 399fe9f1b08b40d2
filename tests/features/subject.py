"""The interface of a framework whose features are observed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from otel_limits import Stop, stop_of

if TYPE_CHECKING:
    from otel_limits.testing import Answer


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

    def model(self, script: Iterable[Answer], pause: Pause | None = None) -> Any:
        """Return a model that counts its `calls`."""

    def agent(self, model: Any, *tools: Any, name: str = "boss", output: Any = None) -> Any:
        """Return an agent with the tool `search`, possibly with a typed output."""

    def agent_with_plugin(self, model: Any, plugin: Any) -> Any:
        """Return an agent with `LimitsPlugin`."""

    def calling(self, agent: Any) -> Any:
        """Return a tool named `ask` that calls another agent."""

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

    async def stream(self, agent: Any) -> Ending:
        """Call an agent and read its stream."""

    def approve(self, agent: Any, ending: Ending, more_turns: int | None) -> Ending:
        """Let a human answer the question that a call has ended with.

        Args:
            agent: The agent.
            ending: The end of the call.
            more_turns: By how much the human raises the limit, if the framework supports that.
        """

    def stored(self, agent: Any) -> Any:
        """Return the last message of the agent's conversation, as it is stored."""
