"""Wraps the public methods of realtime agents (`BidiAgent`), to limit them."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from strands.bidi.types import BidiConnectionStopEvent

from otel_limits.bindings.pending_waits import InvocationEndedError, Wait
from otel_limits.bindings.strands.invocations import STATES
from otel_limits.bindings.strands.realtime import begin_realtime, realtime_of
from otel_limits.bindings.strands.realtime_tools import attach_realtime_hooks
from otel_limits.bindings.strands.strands_framework import STRANDS
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from strands.bidi import BidiAgent

    from otel_limits.bindings.strands.realtime import RealtimeInvocation


def track_start(original: Any) -> Any:
    """Wrap `start`, with which the invocation begins, before its first event."""

    @functools.wraps(original)
    async def start(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        _prepare()
        await original(agent, *args, **kwargs)
        _begun(agent)
        realtime = realtime_of(agent)
        if realtime is not None:
            # Nothing was sent yet: an agent without quota ends before its first response.
            await realtime.probe_quotas()

    return start


@suppress_errors("binding")
def _prepare() -> None:
    if (host := STRANDS.host) is not None:
        host.prepare(has_own=False)


@suppress_errors("binding")
def _begun(agent: BidiAgent) -> None:
    STATES.of(agent).realtime = None  # one that ended without the application's `stop()`
    host, is_tracked = STRANDS.host, begin_realtime(agent)
    if is_tracked:
        attach_realtime_hooks(agent)
    elif host is not None and host.is_on:
        host.report_untracked_agent("strands", agent.name)


def track_send(original: Any) -> Any:
    """Wrap `send`: input for an agent that ends would request another response."""

    @functools.wraps(original)
    async def send(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        realtime = realtime_of(agent)
        if realtime is not None:
            realtime.check()
            # Without an error while its events are read: their reader is about to see the end.
            # Afterwards the sender gets the framework's own error.
            if realtime.verdict is not None and realtime.readers:
                return
        await original(agent, *args, **kwargs)

    return send


def track_receive(original: Any) -> Any:
    """Wrap `receive`, where limits are checked and the agent is ended."""

    @functools.wraps(original)
    async def receive(agent: BidiAgent, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        realtime, events = realtime_of(agent), original(agent, *args, **kwargs)
        if realtime is None:
            async for event in events:
                yield event
            return
        wait = Wait()
        wait.join(realtime.waits)
        realtime.readers += 1
        try:
            async for event in _follow(realtime, wait, events):
                yield event
        finally:
            wait.close()
            await events.aclose()
            realtime.readers -= 1

    return receive


async def _follow(
    realtime: RealtimeInvocation, wait: Wait, events: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Pass on the events of an agent until it ends, or has to."""
    while True:
        realtime.check()
        if realtime.is_due:
            break
        try:
            event = await wait.next_of(events)
        except (StopAsyncIteration, InvocationEndedError):
            break
        except Exception:
            realtime.has_failed = True
            raise
        await realtime.note(event)
        if realtime.is_cut or (realtime.verdict and isinstance(event, BidiConnectionStopEvent)):
            break
        yield event
    if realtime.verdict is not None and not realtime.run.released:
        await realtime.close()
        if (error := realtime.error) is not None:
            raise error
        yield realtime.last_event()


def track_stop(original: Any) -> Any:
    """Wrap `stop`, with which the invocation ends."""

    @functools.wraps(original)
    async def stop(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        realtime = realtime_of(agent)
        if realtime is None:
            await original(agent, *args, **kwargs)
            return
        if realtime.closing is not None and asyncio.current_task() is not realtime.closing:
            # The application's own stop after ours, which would call its hooks twice.
            STATES.of(agent).realtime = None
            await asyncio.shield(realtime.closing)
            return
        realtime.conclude()
        try:
            await original(agent, *args, **kwargs)
        finally:
            realtime.finish(realtime.run.reason or "aborted")
            if realtime.closing is None:
                STATES.of(agent).realtime = None

    return stop
