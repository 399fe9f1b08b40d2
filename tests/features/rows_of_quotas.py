"""Rows about quotas, and about limits that are decided before them and after them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from otel_limits import LimitReachedError, Limits, QuotaDecision, QuotaUse, QuotaWait
from otel_limits.testing import Answer, endless, says, uses
from tests.features.observed import CALL_OTHER, SEARCH
from tests.features.seen import QUOTA, Row, Way, expect, facts, in_every_way, recording

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from otel_limits import Event
    from otel_limits.core.policy import Action
    from otel_limits.core.usage import Number
    from tests.features.subject import Ending, Subject

DONE: Final = says("done")


NOTHING_TO_SUM_UP: Final = " No final answer was requested: there is nothing to sum up. "


def last_use(events: Iterable[Event]) -> Number:
    """Return the amount that a quota has used in the end."""
    return [each.used for each in events if isinstance(each, QuotaUse)][-1]


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


# --- the model's last answer ----------------------------------------------------------------------


def last_answer(subject: Subject) -> None:
    """An agent that has something to sum up gets one; the next one halts before its first call."""

    def check(call: Way) -> None:
        policy = "quotas: {calls: {model_calls: 2, window: P1D}}"
        with recording(policy, action="wrap_up") as events:
            model = subject.model([SEARCH, SEARCH, says("what I know")])
            ending = call(subject.agent(model))
            other = subject.model([])
            halted = call(subject.agent(other, name="other"))
        seen = facts(subject, model, ending, events)
        seen |= {"others": other.calls, "used": last_use(events)}
        seen["remark"] = halted.stop is not None and NOTHING_TO_SUM_UP in halted.stop.sentence
        expect(
            seen,
            calls=3,
            others=0,
            used=3,
            reason="quota_exceeded",
            action="wrapped_up",
            remark=True,
            ends=[
                ("boss", "quota_exceeded", "wrapped_up"),
                ("other", "quota_exceeded", "halted"),
            ],
        )

    in_every_way(subject.ways, check)


SLOTS: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "halts": ("refuse", {"calls": 1, "action": "halted", "text": QUOTA}),
    "waits": ("wait", {"calls": 2, "action": "wrapped_up"}),
}
"""A call without a slot: `on_exceeded` of the quota, and the facts that are seen then."""


def last_answer_without_a_slot(name: str) -> Row:
    """Return a row about a last answer while the only slot is taken."""
    on_exceeded, expected = SLOTS[name]
    policy = f"""quotas:
      calls: {{model_calls: 1, window: P1D, where: {{agent: boss}}}}
      slot: {{concurrency: 1, on_exceeded: {on_exceeded}}}"""

    def row(subject: Subject) -> None:
        """Also a last answer is one of the calls in flight."""
        is_sent, may_answer = threading.Event(), threading.Event()

        async def answer_later() -> None:
            is_sent.set()
            await asyncio.to_thread(may_answer.wait)

        def note_wait(event: Event) -> None:
            if isinstance(event, QuotaWait):
                may_answer.set()

        helper = subject.agent(subject.model([DONE], answer_later), name="helper")
        with (
            recording(policy, observers=[note_wait], action="wrap_up") as events,
            ThreadPoolExecutor(1) as pool,
        ):

            def work() -> str:
                pool.submit(subject.call, helper)
                return str(is_sent.wait())

            model = subject.model([uses("ask"), says("what I know")])
            try:
                ending = subject.call(subject.agent(model, subject.doing(work)))
            finally:
                may_answer.set()
        seen = facts(subject, model, ending, events)
        expect(seen, reason="quota_exceeded", **expected)

    return row


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
    "wrap_up at a quota": last_answer,
    **{f"wrap_up without a slot {name}": last_answer_without_a_slot(name) for name in SLOTS},
    **{f"limit before a quota, {name}": limit_before_quota(name) for name in WITH_LIMIT},
    "shared limit before a quota": shared_limit_before_quota,
    "shared limit after a quota": limit_after_quota,
}
