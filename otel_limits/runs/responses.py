"""Detects spans that show the same response, by its ID."""

from __future__ import annotations

from typing import Final

MOST: Final = 10_000
"""Responses that are kept; later ones count as new."""


class SeenResponses:
    """The responses that the spans of one invocation, or of one trace, have shown.

    Two instrumentations show one response with one ID. An ID that appears again with other tokens
    is another response, because IDs of some servers repeat: songquanpeng/one-api,
    relay/adaptor/cohere/main.go, derives them from the second.
    """

    def __init__(self) -> None:
        """Create an empty set."""
        self._shown: dict[str, set[tuple[str, int]]] = {}
        self._number = 0

    def has(self, response_id: str, instrumentation: str, tokens: int) -> bool:
        """Return whether another span has shown a response.

        Args:
            response_id: Its ID, as sent by the vendor.
            instrumentation: The instrumentation scope of the span that shows it.
            tokens: Its input and output tokens.
        """
        shown = self._shown.get(response_id)
        if shown is None:
            return False
        return any(tokens == each for _, each in shown) or all(
            instrumentation != each for each, _ in shown
        )

    def add(self, response_id: str, instrumentation: str, tokens: int) -> None:
        """Add a response that a span has shown."""
        if self._number < MOST:
            self._number += 1
            self._shown.setdefault(response_id, set()).add((instrumentation, tokens))
