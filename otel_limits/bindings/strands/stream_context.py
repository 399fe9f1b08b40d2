"""Keeps the context of a stream apart from that of its reader.

Python runs an asynchronous generator in the context of its reader, so whatever the generator sets
there would stay between two events, and after the reader has left the stream. Agents and spans that
the reader starts would then belong to the agent whose stream it reads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.runs.tree import CURRENT, TASK_SCOPE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextvars import Token

    from opentelemetry.context import Context

    from otel_limits.runs.run import Group, Run
    from otel_limits.runs.tree import TaskScope


class StreamContext:
    """The owner of a stream and its span, while the stream itself runs.

    It is entered for each event, possibly in different tasks. It begins with the values of its
    first reader. Other context variables are the application's, and shared as Python does.
    """

    # No `__init__`: an error in it could not be suppressed.
    _kept: tuple[Run | Group | None, TaskScope | None, Context] | None = None
    """The values of the stream between two events."""
    _tokens: tuple[Token[Any], Token[Any], Token[Any]] | None = None
    """Restore the values of the reader."""

    @suppress_errors("binding")
    def enter(self) -> None:
        """Set the values of the stream."""
        kept = self._kept or (CURRENT.get(), TASK_SCOPE.get(), otel_context.get_current())
        self._tokens = CURRENT.set(kept[0]), TASK_SCOPE.set(kept[1]), otel_context.attach(kept[2])

    @suppress_errors("binding")
    def leave(self) -> None:
        """Restore the values of the reader."""
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return
        self._kept = CURRENT.get(), TASK_SCOPE.get(), otel_context.get_current()
        try:
            CURRENT.reset(tokens[0])
        except ValueError:  # a task that is destroyed while it waits is closed in another context
            return
        TASK_SCOPE.reset(tokens[1])
        otel_context.detach(tokens[2])


def keep_apart(
    original: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    """Wrap a method that streams, so that its reader keeps its own context."""

    @functools.wraps(original)
    async def stream_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        context, events = StreamContext(), original(*args, **kwargs)
        try:
            while True:
                context.enter()
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
                finally:
                    context.leave()
                yield event
        finally:
            context.enter()
            try:
                await events.aclose()
            finally:
                context.leave()

    return stream_async
