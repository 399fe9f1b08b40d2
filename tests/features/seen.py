"""Describes what is seen of an agent, and compares it with what must be seen."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from otel_limits import Event, Halt, ModelCall, Started, Stop, ToolCall, Turn, is_synthetic
from tests.compositions.judge import is_valid
from tests.features.observed import enabled
from tests.features.subject import Ending, Subject

if TYPE_CHECKING:
    from tests.compositions.judge import Entry

Row = Callable[[Any], None]
"""Raises an `AssertionError` with the differences if a framework behaves differently."""
Way = Callable[[Any], Ending]
"""Calls an agent."""

TURN: Final[ContextVar[int | None]] = ContextVar("turn", default=None)
"""The number of the row that is checked, or none if all ways to call an agent are."""

STEPS: Final = "This request could not be completed because it took too many steps."
TIME: Final = "This request could not be completed because it took too long."
KILLED: Final = "This request could not be completed because it was stopped."
QUOTA: Final = "This request could not be completed because a usage limit was reached."
"""Texts for the end user."""

FOR_MODEL: Final = (
    "Agent 'helper' stopped before it finished: the limit of 2 turns was reached. Do not call it "
    "again for this task. Answer with what you have, and say what is missing."
)

MANY: Final = 10
"""Requests of an agent that is not halted, before it ends by itself."""


@contextlib.contextmanager
def logged(text: str) -> Iterator[list[str]]:
    """Collect the lines of the log that contain a text."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("otel_limits")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        lines[:] = [line for line in lines if text in line]


@contextlib.contextmanager
def recording(
    policy: str = "", *, observers: Iterable[Callable[[Event], object]] = (), **options: Any
) -> Iterator[list[Event]]:
    """Enable otel-limits and collect its events, besides other observers."""
    events: list[Event] = []
    with enabled(policy, observers=[events.append, *observers], **options):
        yield events


def facts(subject: Subject, model: Any, ending: Ending, events: list[Event]) -> dict[str, object]:
    """Describe a call of an agent."""
    stop = ending.stop
    return {
        "calls": model.calls,
        "reason": stop.reason if stop else None,
        "action": stop.action if stop else None,
        "agent": stop.agent if stop else None,
        "text": ending.text.strip(),
        "synthetic": is_synthetic(ending.message),
        "valid": is_every_request_valid(subject, model),
        **published(events),
    }


def is_every_request_valid(subject: Subject, model: Any) -> bool:
    """Return whether every tool call in the requests of a model is followed by its result."""
    return all(is_valid(subject.history(request)) for request in model.requests)


def published(events: list[Event]) -> dict[str, object]:
    """Describe the events of a call."""
    calls = [each for each in events if isinstance(each, ModelCall)]
    tools = [each for each in events if isinstance(each, ToolCall)]
    return {
        "started": [each.invocation.agent for each in events if isinstance(each, Started)],
        "models": [each.model for each in calls],
        "kinds": [each.kind for each in calls],
        "tokens": [each.usage.total for each in calls],
        "side": [each.side for each in calls],
        "turns": [each.number for each in events if isinstance(each, Turn)],
        "tools": [(each.tool, each.status) for each in tools],
        "tool_turns": [each.turn for each in tools],
        "halts": [(each.reason, each.action) for each in events if isinstance(each, Halt)],
        "ends": [
            (each.agent, each.reason, each.action) for each in events if isinstance(each, Stop)
        ],
    }


def expect(seen: Mapping[str, object], **expected: object) -> None:
    """Compare what is seen with what must be.

    Raises:
        AssertionError: They differ.
    """
    different = [
        f"{name}: {seen[name]!r} instead of {value!r}"
        for name, value in expected.items()
        if seen[name] != value
    ]
    if different:
        raise AssertionError("; ".join(different))


@contextlib.contextmanager
def turn_of(row: int) -> Iterator[None]:
    """Check a row in two of the ways to call an agent, which are others in the next row."""
    before = TURN.set(row)
    try:
        yield
    finally:
        TURN.reset(before)


def ways_of_row(ways: Mapping[str, Way]) -> Mapping[str, Way]:
    """Choose the ways in which the present row is checked."""
    turn = TURN.get()
    if turn is None:
        return ways
    names = list(ways)
    chosen = {names[(turn + shift) % len(names)] for shift in (0, len(names) // 2)}
    return {name: ways[name] for name in names if name in chosen}


def in_every_way(ways: Mapping[str, Way], check: Callable[[Way], None]) -> None:
    """Check each way to call an agent, or those whose turn it is.

    Raises:
        AssertionError: The differences of these ways, once if they are the same.
    """
    problems: dict[str, str] = {}
    ways = ways_of_row(ways)
    for name, way in ways.items():
        try:
            check(way)
        except AssertionError as error:  # noqa: PERF203  every way is checked
            problems[name] = str(error)
    found = set(problems.values())
    if len(problems) == len(ways) and len(found) == 1:
        raise AssertionError(*found)
    if problems:
        raise AssertionError("; ".join(f"{name}: {each}" for name, each in problems.items()))


def tool_entries(subject: Subject, request: Any) -> list[Entry]:
    """Return the tool calls and their results in a request."""
    return [each for each in subject.history(request) if each[0] != "other"]


def error_of(call: Callable[[], object]) -> BaseException:
    """Return the error that a call raises."""
    try:
        found = call()
    except Exception as error:  # noqa: BLE001  compared by each row
        return error
    raise AssertionError(f"nothing was raised, but {found!r} returned")


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
