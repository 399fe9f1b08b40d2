"""Tool calls of one turn by position, as some models use one ID for several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_limits.bindings.invocation import RequestedTool, RequestedTurn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strands.hooks import AfterToolCallEvent
    from strands.types.content import Message

    from otel_limits.core.limits import Breach
    from otel_limits.core.policy import Verdict
    from otel_limits.runs.current import TaskScope


class Batch:
    """The tool calls of one turn, by position."""

    def __init__(
        self, requests: list[Mapping[str, Any]], turn: RequestedTurn | None = None
    ) -> None:
        """Create a batch of tool uses in the model's order.

        Args:
            requests: The tool uses.
            turn: The turn that has requested them; `None` if a hook has denied them all.
        """
        self.requests = requests
        self.turn = turn
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

    def deny(self) -> RequestedTurn:
        """Return the turn of calls that a hook has denied, none of which was admitted."""
        tools = {
            str(n): RequestedTool(use["name"], use["input"], None)
            for n, use in enumerate(self.requests)
        }
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


class SessionBatch(Batch):
    """The tool calls of a response in a realtime session."""

    def __init__(self, requests: list[Mapping[str, Any]], against: Verdict | None) -> None:
        """Create a batch without results."""
        super().__init__(requests)
        self.refusals: dict[int, Breach] = {}
        """Limits that refuse calls, by position."""
        self.against = against
        """Why none of them runs, if the session was about to end when they were requested."""
        self.admitted: set[int] = set()
        """Calls that count toward the limits, by position."""
        self.scopes: dict[int, TaskScope] = {}
        """The scope of each call, by position."""
