"""Tells whether two spans show one response, by its id."""

from __future__ import annotations

from typing import Final

MOST: Final = 10_000
"""Responses that are remembered; a later one is taken for one of its own."""


class SeenResponses:
    """The responses that the spans of one invocation, or of one trace, have shown.

    Two instrumentations show one response under one id. One that shows an id again beside other
    tokens shows another response, as there are servers whose ids repeat: songquanpeng/one-api,
    relay/adaptor/cohere/main.go, makes them of the second.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._shown: dict[str, set[tuple[str, int]]] = {}
        self._number = 0

    def has(self, response_id: str, scope: str, tokens: int) -> bool:
        """Tell whether another span has shown a response.

        Args:
            response_id: Its id, as the vendor sent it.
            scope: The instrumentation that shows it.
            tokens: What it used, input and output.
        """
        shown = self._shown.get(response_id)
        if shown is None:
            return False
        return any(tokens == each for _, each in shown) or all(scope != each for each, _ in shown)

    def add(self, response_id: str, scope: str, tokens: int) -> None:
        """Note that a span has shown a response."""
        if self._number < MOST:
            self._number += 1
            self._shown.setdefault(response_id, set()).add((scope, tokens))
