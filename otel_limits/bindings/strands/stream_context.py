"""Keeps the context of a stream apart from that of its reader.

Python runs an asynchronous generator in the context of its reader, so whatever the generator sets
there would stay between two events, and after the reader has left the stream. Agents and spans that
the reader starts would then belong to the agent whose stream it reads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from opentelemetry.context import attach, detach, get_current

from otel_limits.core.internal_errors import report_suppressed
from otel_limits.runs.registry import CURRENT, TASK_SCOPE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from contextvars import Token

    from opentelemetry.context import Context

    from otel_limits.runs.registry import TaskScope
    from otel_limits.runs.run import Group, Run


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

    # Guarded inside, not by a decorator, because both run for each event of a stream.

    def switch_in(self) -> None:
        """Set the values of the stream."""
        try:
            kept = self._kept or (CURRENT.get(), TASK_SCOPE.get(), get_current())
            self._tokens = CURRENT.set(kept[0]), TASK_SCOPE.set(kept[1]), attach(kept[2])
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)

    def switch_out(self) -> None:
        """Restore the values of the reader."""
        try:
            tokens, self._tokens = self._tokens, None
            if tokens is None:
                return
            self._kept = CURRENT.get(), TASK_SCOPE.get(), get_current()
            try:
                CURRENT.reset(tokens[0])
            except ValueError:  # a waiting task that is destroyed is closed in another context
                return
            TASK_SCOPE.reset(tokens[1])
            detach(tokens[2])
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("binding", error)


def keep_apart(
    original: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    """Wrap a method that streams, so that its reader keeps its own context."""

    @functools.wraps(original)
    async def stream_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        context, events = StreamContext(), original(*args, **kwargs)
        try:
            while True:
                context.switch_in()
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
                finally:
                    context.switch_out()
                yield event
        finally:
            context.switch_in()
            try:
                await events.aclose()
            finally:
                context.switch_out()

    return stream_async
