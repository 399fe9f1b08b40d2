"""Wraps the public methods of realtime agents (`BidiAgent`), to limit their sessions."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from strands.bidi.types import BidiConnectionStopEvent

from otel_limits.bindings.pending_waits import InvocationEndedError, Wait
from otel_limits.bindings.strands.invocations import STATES
from otel_limits.bindings.strands.marks import HOST
from otel_limits.bindings.strands.session_tools import attach_session_hooks
from otel_limits.bindings.strands.sessions import begin_session, session_of
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from strands.bidi import BidiAgent

    from otel_limits.bindings.strands.sessions import Session


def track_start(original: Any) -> Any:
    """Wrap `start`, after which the session begins, before its first event."""

    @functools.wraps(original)
    async def start(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        _prepare()
        await original(agent, *args, **kwargs)
        _begun(agent)
        session = session_of(agent)
        if session is not None:
            # Nothing was sent yet: a session without quota ends before its first response.
            await session.probe_quotas()

    return start


@suppress_errors("binding")
def _prepare() -> None:
    if (host := HOST.host) is not None:
        host.prepare(has_own=False)


@suppress_errors("binding")
def _begun(agent: BidiAgent) -> None:
    STATES.of(agent).session = None  # one that ended without the application's `stop()`
    host, is_tracked = HOST.host, begin_session(agent)
    if is_tracked:
        attach_session_hooks(agent)
    elif host is not None and host.is_on:
        host.report_untracked_agent("strands", agent.name)


def track_send(original: Any) -> Any:
    """Wrap `send`: input for a session that ends would request another response."""

    @functools.wraps(original)
    async def send(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        session = session_of(agent)
        if session is not None:
            session.check()
            # Without an error while its events are read: their reader is about to see the end.
            # Afterwards the sender gets the framework's own error.
            if session.verdict is not None and session.readers:
                return
        await original(agent, *args, **kwargs)

    return send


def track_receive(original: Any) -> Any:
    """Wrap `receive`, where limits are checked and the session is ended."""

    @functools.wraps(original)
    async def receive(agent: BidiAgent, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        session, events = session_of(agent), original(agent, *args, **kwargs)
        if session is None:
            async for event in events:
                yield event
            return
        wait = Wait()
        wait.join(session.waits)
        session.readers += 1
        try:
            async for event in _follow(session, wait, events):
                yield event
        finally:
            wait.close()
            await events.aclose()
            session.readers -= 1

    return receive


async def _follow(
    session: Session, wait: Wait, events: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """Pass on the events of a session until it ends, or has to."""
    while True:
        session.check()
        if session.is_due:
            break
        try:
            event = await wait.next_of(events)
        except (StopAsyncIteration, InvocationEndedError):
            break
        except Exception:
            session.has_failed = True
            raise
        await session.note(event)
        if session.is_cut or (session.verdict and isinstance(event, BidiConnectionStopEvent)):
            break
        yield event
    if session.verdict is not None and not session.run.released:
        await session.close()
        if (error := session.error) is not None:
            raise error
        yield session.last_event()


def track_stop(original: Any) -> Any:
    """Wrap `stop`, with which a session ends."""

    @functools.wraps(original)
    async def stop(agent: BidiAgent, *args: Any, **kwargs: Any) -> None:
        session = session_of(agent)
        if session is None:
            await original(agent, *args, **kwargs)
            return
        if session.closing is not None and asyncio.current_task() is not session.closing:
            # The application's own stop after ours, which would call its hooks twice.
            STATES.of(agent).session = None
            await asyncio.shield(session.closing)
            return
        session.settle()
        try:
            await original(agent, *args, **kwargs)
        finally:
            session.finish()
            if session.closing is None:
                STATES.of(agent).session = None

    return stop
