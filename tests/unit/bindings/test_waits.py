"""Waits of an invocation leave nothing behind, in the thread or in the event loop they used."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import enable
from otel_limits.bindings.waits import EndedBeforeError, PendingWaits, Wait, wait_for
from otel_limits.testing import ScriptedChatModel, says
from tests.langchain import graphs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def current_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of an application, which is not running."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


def test_blocking_wait_keeps_the_current_loop(
    current_loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application runs its next coroutine in it."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("quotas: {calls: {model_calls: 9, window: P1D}}")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    state = graphs.agent(ScriptedChatModel([says("done")])).invoke(graphs.ASK, graphs.STEPS)
    assert state["messages"][-1].text == "done"
    assert asyncio.get_event_loop() is current_loop


async def within(wait: Any) -> Any:
    """Wait in a thread whose event loop is running."""
    return wait()


@pytest.mark.parametrize("is_running", [False, True])
def test_blocking_wait_ends_what_was_begun_in_it(is_running: bool) -> None:  # noqa: FBT001
    """Its event loop is closed, so nothing could end it later."""
    begun: list[Any] = []
    ended: list[str] = []

    async def wait_forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def parts() -> Any:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            ended.append("generator")

    async def work() -> str:
        begun.extend([asyncio.create_task(wait_forever()), parts()])
        await anext(begun[-1])
        return "done"

    def wait() -> str | None:
        return wait_for(work())

    assert (asyncio.run(within(wait)) if is_running else wait()) == "done"
    assert ended == ["task", "generator"]


# --- of an agent within the invocation of another one ---------------------------------------------


def joined_wait() -> tuple[Wait, list[PendingWaits]]:
    """A wait of two invocations, and their waits."""
    wait, both = Wait(), [PendingWaits(), PendingWaits()]
    for each in both:
        wait.join(each)
    return wait, both


@pytest.mark.parametrize("ended", [0, 1])
def test_end_of_either_invocation_ends_the_next_wait(ended: int) -> None:
    """It may come between two parts of a stream, when nothing waits."""
    wait, both = joined_wait()
    read: list[int] = []

    async def parts() -> Any:
        for number in range(9):
            read.append(number)
            yield number

    async def main() -> None:
        stream = parts()
        await wait.next_of(stream)
        both[ended].cut()
        try:
            with pytest.raises(EndedBeforeError):
                await wait.next_of(stream)
        finally:
            await stream.aclose()

    asyncio.run(main())
    assert read == [0]


def test_closed_wait_leaves_each_invocation() -> None:
    """Else each call of a model would leave one until the end of the run."""
    wait, both = joined_wait()
    wait.close()
    assert [each.open for each in both] == [[], []]
