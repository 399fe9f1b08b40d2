"""Parses a number of tokens from any value that vendors and client libraries report."""

from __future__ import annotations

import numbers
import operator
from typing import Final, SupportsIndex, cast

from otel_limits.core.usage import MAX_TOKENS

DIGITS: Final = len(str(MAX_TOKENS))


def token_count(value: object) -> int | None:
    """Return a number of tokens, or `None` if the value is not one.

    Whole floats, numpy integers and decimal digits as text are numbers. Booleans, other text, NaN,
    infinities, negative numbers and numbers above `MAX_TOKENS` are not.
    """
    if type(value) is int:  # nearly always
        count = value
    elif value is None or isinstance(value, bool):
        return None
    elif isinstance(value, str):
        # Micrometer's tags are text, as are the 64-bit integers of protobuf's JSON.
        if len(value) > DIGITS or not (value.isascii() and value.isdigit()):
            return None
        count = int(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        number = float(value)
        if not number.is_integer():
            return None
        count = int(number)
    else:
        try:
            count = operator.index(cast("SupportsIndex", value))
        except TypeError:
            return None
    return count if 0 <= count <= MAX_TOKENS else None
