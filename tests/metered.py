"""A scripted model with predictable usage that yields to other tasks while it answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from otel_limits.testing import Answer, ScriptedModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Sequence

    from strands.types.streaming import StreamEvent

PER_MESSAGE = 10
"""Tokens of every message, in either direction."""


class Metered(ScriptedModel):
    """Every message has the same number of tokens, so the usage of a call is known in advance."""

    def __init__(
        self,
        script: Iterable[Answer],
        model_id: str = "metered",
        per_message: int = PER_MESSAGE,
    ) -> None:
        self.per_message = per_message
        super().__init__((replace(answer, usage=None) for answer in script), model_id)
        self.config["max_tokens"] = per_message  # type: ignore[assignment]

    async def count_tokens(self, messages: Sequence[Any], *_: Any, **__: Any) -> int:
        """Return the size of the input, without tools and system prompt."""
        return self.per_message * len(messages)

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script, and its usage."""
        messages = arguments[0] if arguments else named["messages"]
        async for event in super().stream(*arguments, **named):
            await asyncio.sleep(0)
            yield event
        sent = self.per_message * len(messages)
        yield {
            "metadata": {
                "usage": {
                    "inputTokens": sent,
                    "outputTokens": self.per_message,
                    "totalTokens": sent + self.per_message,
                },
                "metrics": {"latencyMs": 1},
            }
        }
