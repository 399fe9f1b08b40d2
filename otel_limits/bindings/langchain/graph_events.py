"""Shows a halt in the events of `astream_events`, which LangChain makes from its callbacks.

Those see the end of a halted graph as an error, for which there is no event.
"""

from __future__ import annotations

import contextvars
import functools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from otel_limits.bindings.owned_streams import owned
from otel_limits.core.internal_errors import suppress_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ENDS: Final[contextvars.ContextVar[list[Any] | None]] = contextvars.ContextVar(
    "otel_limits_graph_ends", default=None
)
"""Receives the last state of the next graph of this task, if that is halted."""


@suppress_errors("binding")
def ends_of_task() -> list[Any] | None:
    """Return the list for this graph's end, which is not for the graphs within it."""
    if (ends := ENDS.get()) is not None:
        ENDS.set(None)
    return ends


VERSION: Final = "v2"
"""The first version is deprecated, and shows only its chunks; the third is read from `astream`."""


def track_astream_events(original: Any) -> Any:
    """Wrap `Pregel.astream_events`."""

    @functools.wraps(original)
    def astream_events(graph: Any, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        events = original(graph, input, config, **options)
        return _with_end(owned(events)) if options.get("version", VERSION) == VERSION else events

    return astream_events


async def _with_end(events: Any) -> AsyncIterator[Any]:
    ends: list[Any] = []
    token = ENDS.set(ends)
    try:
        first = await anext(events, None)  # begins the task that runs the graph
    finally:
        ENDS.reset(token)
    if first is None:
        return
    async with aclosing(events):  # a reader that leaves ends the graph
        yield first
        async for event in events:
            yield event
    if ends:
        kept = ("name", "run_id", "tags", "metadata", "parent_ids")
        shown = {key: first[key] for key in kept if key in first}
        yield {**shown, "event": "on_chain_end", "data": {"output": ends[-1]}}
