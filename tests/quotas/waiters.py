"""Helpers for tests of waiting calls: a model that answers on request, and an observer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from otel_limits import QuotaDecision, QuotaWait
from otel_limits.testing import ScriptedModel, endless, says
from tests.quotas.fixtures import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable

    from strands import Agent
    from strands.types.streaming import StreamEvent

    from otel_limits.core.events import Event

SOON = 20.0
"""A timeout in seconds for immediate effects, long enough for a busy machine.

It is below the 30 s after which a waiter without notifications is admitted.
"""


class Held(ScriptedModel):
    """A model that answers when released, and records its callers."""

    def __init__(self, cap: int = 600) -> None:
        super().__init__(endless(says("done")))
        self.update_config(max_tokens=cap)
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream when released."""
        self.asked.append(named["invocation_state"]["who"])
        await self.may_answer.wait()
        async for event in super().stream(*arguments, **named):
            yield event


class DecisionRecorder:
    """An observer of quota decisions and of the number of waiters."""

    def __init__(self) -> None:
        self.waiting = 0
        self.waits = 0
        self._decisions: list[QuotaDecision] = []

    def __call__(self, fact: Event) -> None:
        """Record the event."""
        if isinstance(fact, QuotaDecision):
            self._decisions.append(fact)
        elif isinstance(fact, QuotaWait):
            self.waits += fact.seconds is None
            self.waiting += 1 if fact.seconds is None else -1

    def decisions(self, quota: str = "q") -> list[str]:
        """Return the decisions of a quota, in order."""
        return [fact.decision for fact in self._decisions if fact.quota == quota]


async def until(condition: Callable[[], bool]) -> None:
    """Run other tasks until a condition holds."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.005)


async def run_others() -> None:
    """Run other tasks as far as they get without a thread or a clock."""
    for _ in range(20):
        await asyncio.sleep(0)


def start(agent: Agent, who: str = "") -> asyncio.Task[Any]:
    """Invoke an agent concurrently."""
    return asyncio.create_task(agent.invoke_async("go", invocation_state={"who": who}))


def seconds_of(action: Callable[[], Any]) -> tuple[Any, float]:
    """Run an action; return its result and duration."""
    begun = time.monotonic()
    return action(), time.monotonic() - begun
