"""Delay of deadlines when a provider hangs: `python -m tests.benchmarks.deadlines 100`."""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from strands import Agent

import otel_limits
from otel_limits import Limits
from otel_limits.testing import ScriptedModel, says

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from strands.types.streaming import StreamEvent

CAP_SECONDS: Final = 0.2
BEGINNING: Final[tuple[StreamEvent, ...]] = (
    {"messageStart": {"role": "assistant"}},
    {"contentBlockStart": {"start": {}}},
    {"contentBlockDelta": {"delta": {"text": "Once upon"}}},
)


class Hanging(ScriptedModel):
    """A model that hangs after a number of chunks."""

    def __init__(self, sent: int) -> None:
        super().__init__([says("never")])
        self.sent = sent

    async def stream(self, *_: Any, **__: Any) -> AsyncIterable[StreamEvent]:
        """Stream the chunks, then hang."""
        for event in BEGINNING[: self.sent]:
            yield event
        await asyncio.Event().wait()


def sync(agent: Agent) -> None:
    """Invoke with `agent(…)`."""
    agent("go")


def invoked(agent: Agent) -> None:
    """Invoke with `invoke_async`."""
    asyncio.run(agent.invoke_async("go"))


def streamed(agent: Agent) -> None:
    """Invoke with `stream_async` and read the whole stream."""

    async def read() -> None:
        async for _ in agent.stream_async("go"):
            pass

    asyncio.run(read())


CALLS: Final[dict[str, Callable[[Agent], None]]] = {
    "`agent(…)`": sync,
    "`invoke_async`": invoked,
    "`stream_async`": streamed,
}


def late(invoke: Callable[[Agent], None], sent: int) -> float:
    """Return the milliseconds between a deadline and the end of its invocation."""
    agent = Agent(model=Hanging(sent), callback_handler=None)
    begun = time.monotonic()
    invoke(agent)
    return (time.monotonic() - begun - CAP_SECONDS) * 1000


def main() -> None:
    """Print the distribution. The first argument is the number of rounds."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    logging.disable(logging.CRITICAL)
    otel_limits.enable(Limits(max_duration_seconds=CAP_SECONDS))
    late(sync, 0)  # the first run imports modules
    print("| provider hangs | call | median | 95 % | most |\n|---|---|---|---|---|")  # noqa: T201
    for place, sent in (("before its first chunk", 0), ("between two chunks", len(BEGINNING))):
        for call_name, invoke in CALLS.items():
            times = sorted(late(invoke, sent) for _ in range(rounds))
            most = times[-1]
            p95 = times[max(0, round(len(times) * 0.95) - 1)]
            cells = " | ".join(f"{each:.0f} ms" for each in (statistics.median(times), p95, most))
            print(f"| {place} | {call_name} | {cells} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
