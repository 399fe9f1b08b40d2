"""The clock of time limits and quota waits, and `FakeTime`, with which tests move it."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from strands import tool

from otel_limits import Limits, QuotaWait, enable
from otel_limits.runs.clock import CLOCK, Clock
from otel_limits.testing import FakeTime, ScriptedModel, endless, says, uses
from tests.pages import files
from tests.processes import PATIENCE_SECONDS
from tests.readme import PAGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from otel_limits import Event
    from tests.conftest import Call, MakeAgent, Metric


def test_example_of_the_page_passes() -> None:
    """Users copy it."""
    (page,) = (each for each in PAGES if each.name == "limits.md")
    names: dict[str, Any] = {}
    exec(files(page)["test_limits.py"], names)  # noqa: S102  our own page
    names["test_research_ends_after_ten_minutes"]()


def test_time_limit_is_reached_by_a_slow_tool(
    make_agent: MakeAgent, source: str, call: Call, fake_time: FakeTime
) -> None:
    """A tool that takes a minute, without waiting for it."""

    @tool
    def search() -> str:
        """Take a minute."""
        fake_time.advance(60)
        return "found"

    enable(Limits(max_duration_seconds=90))
    model = ScriptedModel(endless(uses("search")))
    result = call(make_agent(model, tools=[search]))
    assert (result.stop_reason, model.calls) == ("max_duration", 2)


def test_quota_window_ends_in_fake_time(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_time: FakeTime
) -> None:
    """A quota in memory is full, and an hour later it is not."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {hourly: {model_calls: 1, window: PT1H}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    fake_time.advance(3600)
    assert agent("go").stop_reason == "end_turn"


def test_call_waits_for_its_quota_in_fake_time(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_time: FakeTime
) -> None:
    """It is admitted when the window ends, without a wait in the test."""
    policy = tmp_path / "limits.yaml"
    quota = "{model_calls: 1, window: PT1H, on_exceeded: wait, max_wait: 2h}"
    policy.write_text(f"quotas: {{hourly: {quota}}}", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    waits, seconds = threading.Event(), list[float]()

    def note(event: Event) -> None:
        if isinstance(event, QuotaWait):
            waits.set() if event.seconds is None else seconds.append(event.seconds)

    enable(observers=[note])
    agent = make_agent(ScriptedModel(endless(says("done"))))
    agent("go")
    thread = threading.Thread(target=agent, args=("go",))
    thread.start()
    assert waits.wait(PATIENCE_SECONDS)
    fake_time.advance(3601)
    thread.join(PATIENCE_SECONDS)
    assert len(seconds) == 1


def test_time_is_frozen_and_then_continues_from_there() -> None:
    """Elapsed times stay true after the `with` statement."""
    with FakeTime() as fake:
        began, day = CLOCK.now(), CLOCK.time()
        assert (CLOCK.now(), CLOCK.time()) == (began, day)
        fake.advance(30)
        assert (CLOCK.now() - began, CLOCK.time() - day) == (30, 30)
    assert 0 <= CLOCK.now() - began - 30 < PATIENCE_SECONDS
    assert abs(CLOCK.time() - time.time()) < PATIENCE_SECONDS


def test_fractions_of_a_second_add_up() -> None:
    """Three tenths reach a limit of 0.3 seconds, although 0.1 + 0.2 is not 0.3 in floats."""
    with FakeTime() as fake:
        began = CLOCK.now()
        for _ in range(3):
            fake.advance(0.1)
        assert 0.3 <= CLOCK.now() - began < 0.3001


def test_callbacks_run_in_the_order_of_their_times() -> None:
    """In any order of scheduling; a canceled one does not run."""
    called: list[int] = []
    with FakeTime() as fake:
        for each in (3, 1, 2):
            CLOCK.schedule(CLOCK.now() + each, partial(called.append, each))
        CLOCK.cancel(CLOCK.schedule(CLOCK.now() + 1, partial(called.append, 0)))
        fake.advance(10)
    assert called == [1, 2, 3]


def test_failing_callback_does_not_stop_the_next_one(faulty: None) -> None:
    """They belong to different invocations."""
    called: list[int] = []
    with FakeTime() as fake:
        CLOCK.schedule(CLOCK.now() + 1, lambda: called.append(1 // 0))
        CLOCK.schedule(CLOCK.now() + 2, lambda: called.append(2))
        fake.advance(2)
    assert called == [2]


def test_time_limits_outlive_a_fault_in_the_thread_of_the_clock(
    faulty: None, metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends by a fault, which is counted, and the next callback starts another one."""
    enable()
    clock, called = Clock(), [threading.Event(), threading.Event()]
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now", lambda: 1 // 0)
        clock.schedule(0.0, called[0].set)
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE_SECONDS)
    assert metric("otel_limits_internal_errors_total", component="deadlines") == 1
    clock.schedule(0.0, called[1].set)
    assert all(each.wait(PATIENCE_SECONDS) for each in called)


def test_advance_calls_each_callback_at_its_own_time() -> None:
    """A timer that schedules itself again runs as often as in real time."""
    with FakeTime() as fake:
        began, seen = CLOCK.now(), list[float]()

        def tick() -> None:
            seen.append(CLOCK.now() - began)
            if len(seen) < 3:
                CLOCK.schedule(CLOCK.now() + 10, tick)

        CLOCK.schedule(began + 10, tick)
        fake.advance(35)
        assert (seen, CLOCK.now() - began) == ([10, 20, 30], 35)


def test_callback_that_is_due_is_called_without_advance() -> None:
    """E.g. the deadline of an agent that begins after the time limit of its tree."""
    over = threading.Event()
    with FakeTime():
        CLOCK.schedule(CLOCK.now(), over.set)
        assert over.wait(PATIENCE_SECONDS)


def test_callback_may_advance_the_time() -> None:
    """An observer of a halt may do so; it does not wait for itself."""
    seen = []
    with FakeTime() as fake:
        began = CLOCK.now()
        CLOCK.schedule(began + 1, lambda: fake.advance(5))
        CLOCK.schedule(began + 6, lambda: seen.append(CLOCK.now() - began))
        fake.advance(1)
        assert (seen, CLOCK.now() - began) == ([6], 6)


def test_threads_advance_the_same_time() -> None:
    """Eight tools that run in parallel and take five seconds each add forty."""
    with FakeTime() as fake:
        began = CLOCK.now()
        threads = [threading.Thread(target=fake.advance, args=(5,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert CLOCK.now() - began == 40


def test_wait_in_an_event_loop_ends_by_advance() -> None:
    """In the loop's own thread and from another one."""

    async def wait(advance: Callable[[float], Any]) -> None:
        waiting = asyncio.ensure_future(
            CLOCK.wait(asyncio.get_running_loop().create_future(), CLOCK.now() + 3600)
        )
        await asyncio.sleep(0)  # it begins to wait
        advance(3599)
        await asyncio.sleep(0)
        assert not waiting.done()
        advance(1)
        await asyncio.wait_for(waiting, PATIENCE_SECONDS)

    with FakeTime() as fake:
        asyncio.run(wait(fake.advance))
        asyncio.run(wait(lambda seconds: in_thread(fake.advance, seconds)))
        assert CLOCK.scheduled == 0


def in_thread(work: Callable[[float], None], seconds: float) -> None:
    """Advance the time in another thread."""
    thread = threading.Thread(target=work, args=(seconds,))
    thread.start()
    thread.join(PATIENCE_SECONDS)


def test_wait_ends_when_its_future_is_done() -> None:
    """Nothing stays scheduled for it."""

    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(CLOCK.wait(future, CLOCK.now() + 3600))
        await asyncio.sleep(0)  # it begins to wait
        future.set_result(None)
        await waiting

    with FakeTime():
        asyncio.run(wait())
        assert CLOCK.scheduled == 0


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "5"])
def test_advance_by_an_impossible_time_is_rejected(seconds: Any) -> None:
    """Time never goes back."""
    with (
        FakeTime() as fake,
        pytest.raises(ValueError, match="seconds from 0 to 1,000,000,000, got"),
    ):
        fake.advance(seconds)


def test_advance_outside_the_with_statement_is_an_error() -> None:
    """It would have no effect."""
    with pytest.raises(RuntimeError, match="Use it in a `with` statement"):
        FakeTime().advance(1)


def test_second_fake_time_is_an_error() -> None:
    """There is one clock; the first one stays in force, and can be used again."""
    fake = FakeTime()
    with fake, pytest.raises(RuntimeError, match="Use one at a time"), FakeTime():
        pass
    with fake:
        fake.advance(1)
