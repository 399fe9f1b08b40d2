"""Waits for a coroutine in a thread that may block."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")


def wait_for(awaitable: Awaitable[T]) -> T:
    """Return the result of an awaitable, also in a thread whose event loop is running.

    Such a thread is blocked in any case, by the synchronous call of the application.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_result_of(awaitable))
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, "otel-limits-quota") as pool:
        return pool.submit(context.run, asyncio.run, _result_of(awaitable)).result()


async def _result_of(awaitable: Awaitable[T]) -> T:
    return await awaitable
