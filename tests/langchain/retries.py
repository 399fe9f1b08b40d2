"""The middleware of LangChain that repeats failed model calls; LangChain 1.0 has none."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from langchain.agents import middleware
from langchain.agents.middleware import AgentMiddleware

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class RepeatsCalls(AgentMiddleware):
    """Repeats calls immediately, and at last raises the error."""

    def __init__(
        self, max_retries: int, retry_on: tuple[type[Exception], ...] = (Exception,), **_: Any
    ) -> None:
        """Use the arguments of LangChain's; delays are left out."""
        super().__init__()
        self._retries, self._errors = max_retries, retry_on

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Call the model."""
        for _ in range(self._retries):
            with suppress(*self._errors):
                return handler(request)
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Do the same without blocking."""
        for _ in range(self._retries):
            with suppress(*self._errors):
                return await handler(request)
        return await handler(request)


ModelRetries: Final[Any] = getattr(middleware, "ModelRetryMiddleware", RepeatsCalls)
