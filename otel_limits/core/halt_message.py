"""The message of a halt for the end user, as a policy sets it."""

from __future__ import annotations

import string
from typing import Final

from otel_limits.core.values import CheckedKind, InvalidValueError

HALT_MESSAGE_DEFAULT: Final = "This request could not be completed because {reason}."

FIELDS: Final = ("agent", "reason", "limit", "used")


def _halt_message(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidValueError
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        raise InvalidValueError("Write a single brace as {{ or }}.") from None
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    for _, name, form, conversion in parts:
        # Not even an attribute of a known field: its value would be code of the process.
        if name is not None and (name not in FIELDS or form or conversion):
            raise InvalidValueError(f"{{{name}}} is unknown. The fields are {known}.")
    # The other fields can be empty, and providers refuse messages without text.
    if not text.format(agent="", reason="it", limit="", used="").strip():
        raise InvalidValueError(f"It needs words besides {known}.")
    return text


HALT_MESSAGE: Final = CheckedKind[str](
    phrase="a message with text, and any of the fields {agent}, {reason}, {limit} and {used}",
    check=_halt_message,
    parse=str,
    schema={"type": "string", "minLength": 1},
)
