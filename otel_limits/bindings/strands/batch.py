"""Tool calls of one turn by position, as some models use one ID for several of them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.invocation import RequestedTool, RequestedTurn
from otel_limits.bindings.strands.readers import status_of, text_of
from otel_limits.core.labels import clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from strands.hooks import AfterToolCallEvent
    from strands.types.content import Message

    from otel_limits.bindings.tool_call import ToolCallInProgress
    from otel_limits.core.policy import Verdict


HANDOFF: Final = "handoff_to_agent"
"""The tool that each agent of a `Swarm` has, by its documentation."""


class Batch:
    """The tool calls of one turn, by position."""

    def __init__(self, requests: list[Mapping[str, Any]]) -> None:
        """Create a batch of tool uses in the model's order."""
        self.requests = requests
        self.turn: RequestedTurn | None = None
        """The turn that has requested them; `None` if they were all denied."""
        self.results: dict[int, AfterToolCallEvent] = {}
        """The final attempt of each call, by position."""
        self._uses = list(requests)
        """The same objects, or their replacements by hooks."""
        self._seen: set[int] = set()

    def position_of(self, use: Mapping[str, Any]) -> int | None:
        """Return the position of the request that an event is about.

        The framework passes the object in the message. If a hook has replaced it, the ID decides;
        among several with that ID, it is the first that has not started, since calls start in the
        order of the requests.
        """
        for position, known in enumerate(self._uses):
            if known is use:
                self._seen.add(position)
                return position
        alike = self._alike(use)
        waiting = [each for each in alike if each not in self._seen]
        running = [each for each in alike if each not in self.results]
        found = next(iter(waiting or running or alike), None)
        if found is not None:
            self._seen.add(found)
            self._uses[found] = use
        return found

    def tool_of(self, use: Mapping[str, Any]) -> RequestedTool | None:
        """Return the request of the turn that an event is about, if any."""
        position = self.position_of(use)
        turn = self.turn
        return None if turn is None or position is None else turn.tools.get(str(position))

    @property
    def tools(self) -> Iterator[tuple[str, str, object]]:
        """The requests, each with its position as its ID."""
        for position, use in enumerate(self.requests):
            yield str(position), use["name"], use["input"]

    @functools.cached_property
    def denied(self) -> RequestedTurn:
        """The turn of calls that were denied together: none was admitted."""
        tools = {number: RequestedTool(name, use) for number, name, use in self.tools}
        return RequestedTurn("", tools)

    def result_in(self, position: int, message: Message) -> Mapping[str, Any] | None:
        """Return the result of a request in the message to the model: IDs come in order."""
        number = self._alike(request := self.requests[position]).index(position)
        results: list[Any] = [block["toolResult"] for block in message["content"]]
        alike = [each for each in results if each["toolUseId"] == request["toolUseId"]]
        return alike[number] if number < len(alike) else None

    def _alike(self, use: Mapping[str, Any]) -> list[int]:
        identity = use.get("toolUseId")
        return [n for n, each in enumerate(self.requests) if each["toolUseId"] == identity]


class RealtimeBatch(Batch):
    """The tool calls of a response of a realtime model."""

    def __init__(self, requests: list[Mapping[str, Any]], against: Verdict | None) -> None:
        """Create a batch without results."""
        super().__init__(requests)
        self.against = against
        """Why none of them runs, if the agent was about to end when they were requested."""
        self.attempts: dict[int, ToolCallInProgress] = {}
        """The tools that have begun, by position."""


def note_run(tool: RequestedTool, event: AfterToolCallEvent[Any]) -> None:
    """Note a call that ran, as the hooks of the application have changed it."""
    tool.name, tool.arguments = event.tool_use["name"], event.tool_use["input"]
    tool.seconds = event.duration
    tool.is_handoff = tool.name == HANDOFF
    note_result(tool, event.result)


def note_denial(tool: RequestedTool, result: Mapping[str, Any]) -> None:
    """Note the answer to a call that did not run, whose name the model may have invented."""
    tool.name, tool.seconds = clean(tool.name), None
    note_result(tool, result)


def note_result(tool: RequestedTool, result: Mapping[str, Any]) -> None:
    """Note the result of a call."""
    tool.status, tool.result = status_of(result), text_of(result)
