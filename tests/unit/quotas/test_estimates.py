"""Reservations for a model call: its worst case, or the expected size."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.core.events import QuotaDecision, QuotaUse
from otel_limits.core.usage import Usage
from otel_limits.quotas.estimates import Estimates, Reserved
from otel_limits.testing import ScriptedModel, endless, says

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_limits.core.events import Event
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold

MODEL = "m"


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def taught(outputs: Sequence[int], clock: Clock) -> Estimates:
    """Estimates trained with these answers."""
    estimates = Estimates(clock)
    for output in outputs:
        estimates.record(MODEL, 10, Usage(input=10, output=output))
    return estimates


def output(estimates: Estimates, what: Reserved, cap: int | None = None) -> int:
    """The current output reservation."""
    return estimates.estimate(what, MODEL, 10, cap).usage.output


@pytest.mark.parametrize(
    ("minutes", "expected"), [(0, 21_000), (10, 12_548), (20, 8_322), (120, 4_100)]
)
def test_a_long_answer_is_forgotten_with_a_half_life_of_ten_minutes(
    minutes: int, expected: int
) -> None:
    """Down to the default for an unknown model."""
    clock = Clock()
    estimates = taught([21_000] * 20, clock)
    clock.now = minutes * 60
    assert output(estimates, "worst_case") == expected


def test_maximum_below_the_default_estimate_does_not_decay() -> None:
    """A model of 3,000 tokens an answer still needs 3,000 tomorrow."""
    clock = Clock()
    estimates = taught([3_000] * 20, clock)
    clock.now = 86_400
    assert output(estimates, "worst_case") == 3_000


def test_the_highest_is_that_of_the_last_hundred_answers() -> None:
    """Compared with a plain maximum, over answers of all sizes at all times."""
    clock, chance = Clock(), random.Random(7)  # noqa: S311  nothing here is secret
    estimates, seen = Estimates(clock), deque[tuple[int, float]](maxlen=100)
    for _ in range(1_000):
        clock.now += chance.expovariate(1 / 30)
        tokens = int(chance.paretovariate(0.7) * 1_000)
        estimates.record(MODEL, 10, Usage(input=10 + tokens, output=tokens))
        seen.append((tokens, clock.now))
        left = [(each, 0.5 ** ((clock.now - at) / 600)) for each, at in seen]
        highest = max(min(each, 4_096) + max(0, each - 4_096) * part for each, part in left)
        shortfall = max(each * part for each, part in left)
        usage = estimates.estimate("worst_case", MODEL, 10, None).usage
        assert usage.output == round(highest if len(seen) >= 20 else max(highest, 4_096))
        assert usage.input == 10 + round(shortfall)


@pytest.mark.parametrize(
    ("outputs", "cap", "expected"),
    [([], None, 1_024), ([], 500, 500), ([300] * 9, None, 1_024), ([1_000, 3_000], None, 4_000)],
)
def test_twice_the_mean_answer_is_expected(
    outputs: list[int], cap: int | None, expected: int
) -> None:
    """At least 1,024, and never more than the model's cap."""
    assert output(taught(outputs, Clock()), "expected", cap) == expected


class Meeting(ScriptedModel):
    """A model whose first call waits until others have been refused."""

    def __init__(self) -> None:
        super().__init__(endless(says("done")))
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()

    async def stream(self, *arguments: Any, **more: Any) -> Any:
        """Wait, then answer."""
        self.is_asked.set()
        await asyncio.to_thread(self.may_answer.wait, 20)
        async for event in super().stream(*arguments, **more):
            yield event


@pytest.mark.parametrize(("reserve", "admitted"), [("worst_case", 3), ("expected", 20)])
def test_expected_estimate_admits_more_concurrent_calls(
    hold: Hold, make_agent: MakeAgent, events: list[Event], reserve: str, admitted: int
) -> None:
    """20 agents that may answer 64,000 tokens each, on a quota of 200,000."""
    quota = {"tokens": 200_000, "window": "day", "reserve": reserve}
    decided = threading.Semaphore(0)

    def count(fact: Event) -> None:
        events.append(fact)
        if isinstance(fact, QuotaDecision):
            decided.release()

    hold({"fleet": quota}, observers=[count])
    model = Meeting()
    model.update_config(max_tokens=64_000)
    agents = [make_agent(model, tools=[]) for _ in range(20)]

    async def ask_all() -> list[str]:
        # A thread for each of them: they wait for one another.
        threads = ThreadPoolExecutor(2 * len(agents))
        asyncio.get_running_loop().set_default_executor(threads)
        calls = [asyncio.ensure_future(agent.invoke_async("go")) for agent in agents]
        for _ in agents:
            assert await asyncio.to_thread(decided.acquire, timeout=20)
        model.may_answer.set()
        return [(await call).stop_reason for call in calls]

    assert asyncio.run(ask_all()).count("end_turn") == admitted
    (last,) = [fact for fact in events if isinstance(fact, QuotaUse)][-1:]
    assert (last.used, last.reserved) == (15 * admitted, 0)
