"""The arguments of a call of a model, by name and by position."""

from __future__ import annotations

from typing import Any, Final

POSITIONS: Final = {
    "system_instructions": 0,
    "input": 1,
    "model_settings": 2,
    "tools": 3,
    "output_schema": 4,
    "handoffs": 5,
    "tracing": 6,
}
"""The arguments of `Model.get_response` and `stream_response` that may be positional."""


class RequestArguments:
    """The arguments of one request. Each stays where it was, as a subclass may name it otherwise.

    Args:
        positional: The positional arguments.
        named: The others.
    """

    def __init__(self, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the arguments."""
        self.positional = list(positional)
        self.named = dict(named)

    def __getitem__(self, name: str) -> Any:
        """Return an argument; `None` if it is missing."""
        position = POSITIONS.get(name)
        if position is not None and position < len(self.positional):
            return self.positional[position]
        return self.named.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Replace an argument."""
        position = POSITIONS.get(name)
        if position is not None and position < len(self.positional):
            self.positional[position] = value
        else:
            self.named[name] = value
