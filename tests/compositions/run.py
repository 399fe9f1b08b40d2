"""Runs a program with a framework under its limits, and reports its problems."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from unittest.mock import patch

from opentelemetry import context as otel_context

import otel_limits
from otel_limits import Stop, stop_of
from otel_limits.runs.current import CURRENT, TASK_SCOPE
from otel_limits.runs.registry import LIVE
from tests.books import Books
from tests.compositions.judge import problems_of
from tests.compositions.oracle import Ended, Outcome, expected
from tests.compositions.program import Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from otel_limits import Event
    from tests.compositions.judge import Entry
    from tests.compositions.program import Call, Program, Way

ALL_OVER, ALL_STILL = 3, 200
"""Milliseconds without an event after which nothing is waited for, and where something is live."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Builds programs."""

    build: Callable[[Run], Built]
    """Build the agents of a program."""
    busy: Callable[[str], Exception]
    """The error of a model that is worth another attempt."""
    repeats_last: bool = False
    """Its last answer may be repeated as often as the answer before it was."""
    own_ways: Sequence[Way] = ()
    """Ways that only its tools have."""
    own_traits: Sequence[str] = ()
    """Settings that only its agents have."""


class Built(Protocol):
    """The agents of a program."""

    async def call(self, how: Call, prompt: str) -> Any:
        """Call the first agent and return its result."""

    def is_waiting(self) -> bool:
        """Return whether work of it is left that makes no events now."""

    def requests(self) -> dict[str, int]:
        """Return how many requests the model of each agent has received."""

    def histories(self) -> Iterable[tuple[str, list[Entry]]]:
        """Return every conversation with the name of its agent."""


@dataclass
class Run:
    """One run of a program: what its agents share, and what was seen of it."""

    program: Program
    script: Script
    events: list[Event] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)
    histories: list[tuple[str, list[Entry]]] = field(default_factory=list)
    """Every conversation, with the name of its agent."""
    leaks: list[str] = field(default_factory=list)
    """Streams after whose events the reader did not have its own context."""
    left: list[Any] = field(default_factory=list)
    """Streams that are never read to the end."""
    working: set[object] = field(default_factory=set)
    """Tools that run."""

    @contextmanager
    def work(self) -> Iterator[None]:
        """A tool runs."""
        tool = object()
        self.working.add(tool)
        try:
            yield
        finally:
            self.working.discard(tool)

    async def read_a_little(self, agent: str, stream: Any, events: int) -> None:
        """Read the first events of a stream, and look whether its reader keeps its context."""
        before = context_now()
        for _ in range(events):
            if await anext(stream, None) is None:
                return
            if context_now() != before:
                self.leaks.append(agent)

    async def play(self, built: Built) -> None:
        """Call the first agent, and wait for its leftover work."""
        for how in self.program.calls:
            result: Any
            try:
                result = await built.call(how, "go")
                self.outcome.errors.append(False)
            except Exception as error:  # noqa: BLE001  of a limit, or of a model
                result = error
                self.outcome.errors.append(True)
            stop = stop_of(result)
            said = None if stop is None else (stop.agent, stop.reason, stop.action)
            self.outcome.stops.append(said)
        for stream in self.left:  # in another task than that of who has read it
            with suppress(Exception):
                await stream.aclose()
        # A cancelled stream lives as long as the traceback of that, without doing anything.
        quiet, told = 0, -1
        while quiet < (ALL_STILL if len(LIVE) or built.is_waiting() else ALL_OVER):
            await asyncio.sleep(0.001)
            is_busy = self.working or told != len(self.events)
            quiet, told = 0 if is_busy else quiet + 1, len(self.events)


def context_now() -> tuple[Any, ...]:
    """Return what the current task works for, and its span and baggage."""
    return CURRENT.get(), TASK_SCOPE.get(), otel_context.get_current()


POLICY: Final = Path(tempfile.gettempdir(), f"otel-limits-compositions-{os.getpid()}.json")


def run(program: Program, framework: Framework) -> tuple[Run, Books]:
    """Run a program under its limits."""
    seen, books = Run(program, Script(program, framework.busy)), Books()
    POLICY.write_text(json.dumps(program.policy()), encoding="utf-8")
    with books.kept(), patch.dict(os.environ, OTEL_LIMITS_POLICY=str(POLICY)):
        otel_limits.enable(observers=[seen.events.append, books])
        try:
            built = framework.build(seen)
            asyncio.run(seen.play(built))
        finally:
            otel_limits.disable()
            POLICY.unlink()
    seen.outcome.requests.update(built.requests())
    seen.histories += built.histories()
    seen.outcome.ended += [ended(each) for each in seen.events if isinstance(each, Stop)]
    return seen, books


def ended(stop: Stop) -> Ended:
    """Describe the end of an invocation."""
    return Ended(
        agent=stop.agent,
        reason=stop.reason,
        action=stop.action,
        turns=stop.turns,
        calls=stop.model_calls,
        tokens=stop.usage.total,
        tools=stop.tool_calls,
    )


def problems(program: Program, framework: Framework) -> list[str]:
    """Run a program, and report its problems."""
    seen, books = run(program, framework)
    found = list(problems_of(seen, books))
    if not program.is_concurrent:
        found += differences(expected(program, repeats_last=framework.repeats_last), seen.outcome)
    return found


def differences(expected: Outcome, seen: Outcome) -> Iterator[str]:
    """Yield where an outcome is not the expected one: where it begins, as the rest follows."""
    for at, each in enumerate(zip_longest(expected.ended, seen.ended)):
        if each[0] != each[1]:
            yield f"invocation {at} ended as {each[1]} instead of {each[0]}"
            break
    for name in ("requests", "stops", "errors"):
        if getattr(seen, name) != getattr(expected, name):
            yield f"{name}: {getattr(seen, name)} instead of {getattr(expected, name)}"
