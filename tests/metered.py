"""A scripted model whose tokens are projected right, and that gives way while it answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from otel_limits.testing import Answer, ScriptedModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Sequence

    from strands.types.streaming import StreamEvent

PER_MESSAGE = 10
"""Tokens of every message, whoever wrote it."""


class Metered(ScriptedModel):
    """Every message has as many tokens, so that what a call is going to use is known before.

    Attributes:
        at_once: Most calls of all such models together that were ever under way at once.
    """

    under_way = 0
    at_once = 0

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
        """Project the input, without tools and system prompt."""
        return self.per_message * len(messages)

    async def stream(self, *arguments: Any, **named: Any) -> AsyncIterable[StreamEvent]:
        """Stream the next answer of the script, and what it has used."""
        messages = arguments[0] if arguments else named["messages"]
        Metered.under_way += 1
        Metered.at_once = max(Metered.at_once, Metered.under_way)
        try:
            async for event in super().stream(*arguments, **named):
                await asyncio.sleep(0)
                yield event
        finally:
            Metered.under_way -= 1
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
