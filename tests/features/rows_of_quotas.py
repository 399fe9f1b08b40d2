"""Rows about quotas, and about limits that are decided before them and after them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from otel_limits import LimitReachedError, Limits, QuotaDecision, QuotaWait
from otel_limits.testing import Answer, endless, says, uses
from tests.features.observed import CALL_OTHER, SEARCH
from tests.features.seen import QUOTA, Row, Way, expect, facts, in_every_way, recording

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from otel_limits import Event
    from otel_limits.core.policy import Action
    from tests.features.subject import Ending, Subject

DONE: Final = says("done")


def decisions(events: Iterable[Event]) -> list[str]:
    """Return the decisions of quotas, in order."""
    return [each.decision for each in events if isinstance(each, QuotaDecision)]


def refused(subject: Subject) -> None:
    """A quota halts an agent before the call that it does not admit, and the next one as well."""

    def check(call: Way) -> None:
        with recording("quotas: {calls: {model_calls: 4, window: P1D}}") as events:
            model = subject.model(endless(SEARCH))
            ending = call(subject.agent(model))
            other = subject.model(endless(SEARCH))
            halted = call(subject.agent(other, name="other"))
        expect(
            facts(subject, model, ending, events),
            calls=4,
            reason="quota_exceeded",
            text=QUOTA,
            synthetic=True,
            valid=True,
            kinds=["measured"] * 4,
            halts=[("quota_exceeded", "halted")] * 2,
            ends=[(name, "quota_exceeded", "halted") for name in ("boss", "other")],
        )
        seen = facts(subject, other, halted, events)
        expect(seen, calls=0, reason="quota_exceeded", text=QUOTA, synthetic=True)

    in_every_way(subject.ways, check)


# --- limits before quotas, and after them ---------------------------------------------------------

WITH_LIMIT: Final[Mapping[str, tuple[Action, Limits, Answer]]] = {
    "halt": ("halt", Limits(max_turns=3), SEARCH),
    "raise": ("raise", Limits(max_turns=3), SEARCH),
    "ask": ("ask", Limits(max_turns=3), SEARCH),
    "wrap_up": ("wrap_up", Limits(max_turns=2), DONE),  # the quota is asked about the last answer
    "wrap_up without room": ("wrap_up", Limits(max_model_calls=3), SEARCH),
    "observe": ("observe", Limits(max_turns=2), DONE),
}
"""The action, the limit, and the third answer of the model."""


def limit_before_quota(name: str) -> Row:
    """Return a row about an agent whose limit and quota leave it the same three calls."""
    action, limits, third = WITH_LIMIT[name]

    def row(subject: Subject) -> None:
        """The quota is not asked about a call that the limit refuses."""

        def check(call: Way) -> None:
            policy = "quotas: {calls: {model_calls: 3, window: P1D}}"
            with recording(policy, limits=limits, action=action) as events:
                model = subject.model([SEARCH, SEARCH, third])
                with suppress(LimitReachedError):
                    call(subject.agent(model))
            seen = {"calls": model.calls, "decisions": decisions(events)}
            expect(seen, calls=3, decisions=["admitted"] * 3)

        in_every_way(subject.ways, check)

    return row


def shared_limit_before_quota(subject: Subject) -> None:
    """The quota is not asked about the first call of an agent whose tree has nothing left."""
    policy = "quotas: {calls: {model_calls: 1, window: P1D}}"
    with recording(policy, tree=Limits(max_turns=1)) as events:
        boss, helper = subject.model(endless(CALL_OTHER)), subject.model([])
        tool = subject.calling(subject.agent(helper, name="helper"))
        ending = subject.call(subject.agent(boss, tool))
    seen = {**facts(subject, boss, ending, events), "decisions": decisions(events)}
    ends = [("helper", "max_turns", "halted"), ("boss", "max_turns", "halted")]
    expect({**seen, "helper": helper.calls}, helper=0, decisions=["admitted"], ends=ends)


def limit_after_quota(subject: Subject) -> None:
    """A limit that another agent has used up during the wait for a quota halts an agent."""
    other_waits = threading.Event()

    def note_wait(event: Event) -> None:
        if isinstance(event, QuotaWait):
            other_waits.set()

    async def wait_for_other() -> None:
        await asyncio.to_thread(other_waits.wait)

    async def call_both() -> list[Ending]:
        return list(await asyncio.gather(*map(subject.call_later, helpers)))

    def work() -> str:
        run = contextvars.copy_context().run  # so that both belong to the tree of the boss
        with ThreadPoolExecutor(1) as pool:
            return str(len(pool.submit(run, asyncio.run, call_both()).result()))

    policy = "quotas: {slot: {concurrency: 1, on_exceeded: wait}}"
    with recording(policy, observers=[note_wait], tree=Limits(max_model_calls=2)) as events:
        boss = subject.model(endless(uses("ask")))
        models = [subject.model([DONE], wait_for_other) for _ in range(2)]
        helpers = [subject.agent(each, name="helper") for each in models]
        ending = subject.call(subject.agent(boss, subject.doing(work)))
    seen: dict[str, Any] = facts(subject, boss, ending, events)
    seen |= {"helpers": sum(each.calls for each in models), "decisions": decisions(events)}
    expect(
        seen,
        calls=1,
        helpers=1,
        decisions=["admitted", "admitted", "waited"],
        reason="max_model_calls",
        halts=[("max_model_calls", "halted")] * 2,
    )


QUOTA_ROWS: Final[Mapping[str, Row]] = {
    "quota": refused,
    **{f"limit before a quota, {name}": limit_before_quota(name) for name in WITH_LIMIT},
    "shared limit before a quota": shared_limit_before_quota,
    "shared limit after a quota": limit_after_quota,
}
