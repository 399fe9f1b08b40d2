"""Streams that the code which reads them also closes."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable


def owned(stream: Any) -> Any:
    """Return an asynchronous stream that its reader closes, and no event loop.

    A loop that ends closes all generators that it knows, concurrently. If one of them closes
    another one, the loop logs the failure of one of the two.
    """
    is_generator = inspect.isasyncgen(stream)
    return OwnedStream(stream) if is_generator else stream


class OwnedStream:
    """A generator of which no event loop knows, also if `generator` is read after its first part.

    Args:
        stream: The generator, of which nothing was read yet.
    """

    def __init__(self, stream: AsyncGenerator[Any, None]) -> None:
        """Take over a generator."""
        self.generator = stream

    def __aiter__(self) -> OwnedStream:
        """Return this stream."""
        return self

    def __anext__(self) -> Awaitable[Any]:
        """Return the next part, and keep the first request for one from the event loop."""
        # Generators report to their loop in the call, not in the wait that follows it.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        try:
            return anext(self.generator)
        finally:
            sys.set_asyncgen_hooks(*hooks)

    async def aclose(self) -> None:
        """Close the generator."""
        await self.generator.aclose()
