"""A scripted realtime model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from strands.bidi.models import BidiModel, ConnectionTimeoutError
from strands.bidi.types import (
    BidiConnectionStartEvent,
    BidiResponseStartEvent,
    BidiResponseStopEvent,
    BidiTextDeltaEvent,
    BidiTextStartEvent,
    BidiTextStopEvent,
    BidiToolUseBlocksEvent,
    BidiUsageEvent,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MOST = 40
"""Responses after which the scripted model has nothing more to say."""


class RealtimeModel(BidiModel):
    """Answers forever, as long as its events are read.

    Args:
        tool: The tool that each response requests.
        usage: Whether responses report 15 tokens each.
        bounded: Whether responses have a start and a stop.
        most: Responses before it falls silent.
        on_silence: Called when it falls silent.
    """

    def __init__(
        self,
        tool: str | None = None,
        *,
        usage: bool = True,
        bounded: bool = True,
        most: int = MOST,
        on_silence: Callable[[], object] = lambda: None,
    ) -> None:
        self.on_silence = on_silence
        self.tool, self.usage, self.bounded, self.most = tool, usage, bounded, most
        self.responses = self.stops = self.starts = 0
        self.timeouts: set[int] = set()
        self.sent: list[Any] = []
        """The results of tools, and the texts."""
        self.answered = asyncio.Event()
        self.stopped = asyncio.Event()

    def update_config(self, **model_config: Any) -> None:
        """Change nothing."""

    def get_config(self) -> Any:
        """Return the name of the model."""
        return {"model_id": "realtime-1"}

    async def start(self, *_: Any, **__: Any) -> None:
        """Count a connection."""
        self.starts += 1

    async def stop(self) -> None:
        """Count the end of a connection."""
        self.stops += 1
        self.stopped.set()

    async def send(self, content: Any) -> None:
        """Note the results of a tool, or a text."""
        self.sent.append(content)
        self.answered.set()

    async def receive(self) -> AsyncIterator[Any]:
        """Yield the events of each response, and then nothing."""
        yield BidiConnectionStartEvent("connection-1", "realtime-1")
        while self.responses < self.most:
            self.responses += 1
            if self.responses in self.timeouts:
                self.timeouts.remove(self.responses)
                raise ConnectionTimeoutError("time is up")
            for event in self.response(str(self.responses)):
                yield event
            if self.tool is not None:  # the next response answers to its result
                await self.answered.wait()
                self.answered.clear()
        self.on_silence()
        await asyncio.Event().wait()

    def response(self, name: str) -> list[Any]:
        """Return the events of one response."""
        events: list[Any] = [
            BidiTextStartEvent(name),
            BidiTextDeltaEvent("hello", name),
            BidiTextStopEvent(name),
        ]
        if self.tool is not None:
            use: Any = {"toolUseId": f"use-{name}", "name": self.tool, "input": {}}
            events.append(BidiToolUseBlocksEvent([use]))
        if self.usage:
            events.append(BidiUsageEvent(6, 4, 10))
            events.append(BidiUsageEvent(3, 2, 5))
        if self.bounded:
            return [BidiResponseStartEvent(name), *events, BidiResponseStopEvent(name)]
        return events
