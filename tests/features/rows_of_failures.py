"""Rows about invocations in a row with the same input and failure."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, cast

from otel_limits import LimitReachedError, Limits, LoopDetectedError, RepeatedFailures
from otel_limits.testing import Answer, endless, fails, says
from tests.features.observed import SEARCH
from tests.features.seen import (
    Row,
    Way,
    expect,
    facts,
    in_every_way,
    published,
    recording,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.features.subject import Ending, Subject

NO_PROGRESS: Final = "This request could not be completed because it was making no progress."


def down(minute: int = 0) -> Answer:
    """A request that fails, with a time stamp in the text of the error."""
    return fails(ZeroDivisionError(f"2026-01-02 10:{minute:02}:00 the service is down"))


def attempt(subject: Subject, agent: Any, prompts: Iterable[str]) -> list[BaseException | Ending]:
    """Call an agent again and again, as an application does that ignores every error."""
    found: list[BaseException | Ending] = []
    for prompt in prompts:
        try:
            found.append(subject.call(agent, prompt))
        except Exception as error:  # noqa: BLE001, PERF203  what the row is about
            found.append(error)
    return found


def refused(subject: Subject) -> None:
    """The next attempt with the same input costs nothing, however the agent is called."""

    def check(call: Way) -> None:
        with recording(limits=Limits(max_repeated_failures=3)) as events:
            model = subject.model([*(down(minute) for minute in range(3)), says("too late")])
            agent = subject.agent(model)
            attempt(subject, agent, ["go"] * 3)
            first = call(agent)
            second = call(agent)
        stop = first.stop
        parts = ("3 of 3 failures in a row", "10:02:00 the service is down")
        expect(
            {
                **facts(subject, model, first, events),
                "again": second.stop and second.stop.reason,
                "limit": stop and stop.breach and stop.breach.limit,
                "sentence": [bool(stop and part in stop.sentence) for part in parts],
            },
            limit="max_repeated_failures",
            sentence=[True, True],
            calls=3,
            reason="loop_detected",
            again="loop_detected",
            text=NO_PROGRESS,
            synthetic=True,
            valid=True,
            halts=[("loop_detected", "halted")] * 2,
            ends=[("boss", "error", "none")] * 3 + [("boss", "loop_detected", "halted")] * 2,
        )

    in_every_way(subject.ways, check)


def halts_in_a_row(subject: Subject) -> None:
    """An agent that is called again after each halt is refused, too."""
    with recording(limits=Limits(max_turns=1, max_repeated_failures=2)) as events:
        model = subject.model(endless(SEARCH))
        agent = subject.agent(model)
        attempt(subject, agent, ["go"] * 4)
    expect(
        {"calls": model.calls, **published(events)},
        calls=2,
        halts=[("max_turns", "halted")] * 2 + [("loop_detected", "halted")] * 2,
    )


def new_row(second: Answer, prompt: str = "go") -> Row:
    """Return a row about a call between failures that begins a new row.

    Args:
        second: What the model does then.
        prompt: The input.
    """

    def row(subject: Subject) -> None:
        """Only failures in a row count, and not those with something else in between."""
        with recording(limits=Limits(max_repeated_failures=2)) as events:
            model = subject.model([down(), second, down(), down(), says("too late")])
            attempt(subject, subject.agent(model), ["go", prompt, "go", "go", "go"])
        expect(
            {"calls": model.calls, **published(events)},
            calls=4,
            halts=[("loop_detected", "halted")],
        )

    return row


def actions(subject: Subject) -> None:
    """A refusal is raised or only observed; there is nothing that a last answer could sum up."""
    seen = {}
    for action in ("observe", "raise", "wrap_up"):
        with recording(limits=Limits(max_repeated_failures=1), action=action) as events:
            model = subject.model([down(), says("done")])
            last = attempt(subject, subject.agent(model), ["go"] * 2)[-1]
        halts = published(events)["halts"]
        seen[action] = (model.calls, isinstance(last, LoopDetectedError), halts)
    expect(
        seen,
        observe=(2, False, [("loop_detected", "observed")]),
        wrap_up=(1, False, [("loop_detected", "halted")]),
        **{"raise": (1, True, [("loop_detected", "raised")])},
    )


def asked(subject: Subject) -> None:
    """A person may allow a further attempt; its success ends the row."""
    with recording(limits=Limits(max_repeated_failures=1), action="ask") as events:
        model = subject.model([down(), says("done"), down(), says("too late")])
        agent = subject.agent(model)
        first = attempt(subject, agent, ["go"] * 2)[-1]
        ending = subject.accept(agent, cast("Ending", first))
        second = attempt(subject, agent, ["go"] * 2)[-1]
    expect(
        {
            "calls": model.calls,
            "asked": [bool(getattr(each, "question", None)) for each in (first, second)],
            "text": ending.text.strip(),
            **published(events),
        },
        calls=3,
        asked=[True, True],
        text="done",
        halts=[],
    )


def tenth_reported(subject: Subject) -> None:
    """Without a limit, the tenth failure in a row is reported, once."""
    with recording(limits=Limits(max_turns=9)) as events:
        model = subject.model([down(each) for each in range(12)])
        with contextlib.suppress(LimitReachedError):
            attempt(subject, subject.agent(model), ["go"] * 12)
    found = [each for each in events if isinstance(each, RepeatedFailures)]
    expect(
        {
            "calls": model.calls,
            "reported": [(each.invocation.agent, each.failures) for each in found],
            "error": ["the service is down" in each.error for each in found],
            "halts": published(events)["halts"],
        },
        calls=12,
        reported=[("boss", 10)],
        error=[True],
        halts=[],
    )


FAILURE_ROWS: Final[Mapping[str, Row]] = {
    "same failure in a row": refused,
    "same halt in a row": halts_in_a_row,
    "success between failures": new_row(says("done")),
    "other failure between failures": new_row(fails(LookupError("no such user"))),
    "other input between failures": new_row(down(), "other"),
    "same failure in a row, other actions": actions,
    "same failure in a row, and a human is asked": asked,
    "tenth failure in a row": tenth_reported,
}
"""Rows that every framework has."""
