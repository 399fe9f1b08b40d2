"""Records of interrupted tasks: one text each, which a framework keeps with the interrupt.

A record comes back from a store, where it may have been changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, NoReturn

from otel_limits.core.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 1

MAX_LENGTH: Final = 1_000_000
"""Characters; a record usually has about 1,000."""

MAX_SUM: Final = 2**60
"""More than any task can use."""

MAX_SECONDS: Final = 10 * 365 * 24 * 60 * 60

MAX_DIGITS: Final = 20
"""Longer numbers are not even converted, which takes long."""


class InvalidRecordError(ValueError):
    """A record cannot be used; the text says why, without its contents."""

    def __init__(self, problem: str) -> None:
        """Describe the problem."""
        super().__init__(f"The stored record of an interrupted task cannot be used: {problem}.")


def record_of(fields: Mapping[str, Any]) -> str:
    """Return the record with these fields: one text, so that no store changes its numbers."""
    text = json.dumps({"version": VERSION, **fields}, default=str)
    return json.dumps({"digest": _digest(text), "task": text})


def fields_of(record: object) -> RecordFields:
    """Return the fields of a record.

    Raises:
        InvalidRecordError: It is not one, or was changed after it was written.
    """
    if not isinstance(record, str):
        raise InvalidRecordError(f"it is not a text but {type(record).__name__}")
    if len(record) > MAX_LENGTH:
        raise InvalidRecordError(f"it has {len(record)} characters")
    sealed = RecordFields(_parsed(record))
    text = sealed.text("task")
    if sealed.text("digest") != _digest(text):
        raise InvalidRecordError("it was changed after it was written")
    fields = RecordFields(_parsed(text))
    if (version := fields.count("version")) != VERSION:
        raise InvalidRecordError(
            f"its version is {version}, and this release of otel-limits reads {VERSION}"
        )
    return fields


def _digest(text: str) -> str:
    # Against accidents and careless edits: a person with access to the store can write any record.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_integer, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise InvalidRecordError("it is not valid JSON") from None


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError
    return int(digits)


def _no_number(name: str) -> NoReturn:  # NaN and infinity
    raise ValueError(name)


class RecordFields:
    """Reads the fields of a record; each raises `InvalidRecordError` if it is not valid."""

    def __init__(self, fields: object) -> None:
        """Take what should be an object of JSON."""
        if not isinstance(fields, dict):
            raise InvalidRecordError("it is not a JSON object")
        self._fields: dict[str, object] = fields

    def has(self, name: str) -> bool:
        """Return whether a field has a value."""
        return self._value(name) is not None

    def part(self, name: str) -> RecordFields:
        """Return the fields of a field."""
        return RecordFields(self._value(name))

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._value(name)
        return value if isinstance(value, str) else _refuse(name)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._value(name)
        return value if isinstance(value, bool) else _refuse(name)

    def count(self, name: str) -> int:
        """Return a count."""
        return _count(name, self._value(name))

    def counts(self, name: str) -> dict[str, int]:
        """Return counts by name."""
        value = self._value(name)
        if not isinstance(value, dict):
            _refuse(name)
        return {key: _count(name, each) for key, each in value.items()}

    def seconds(self, name: str) -> float:
        """Return a duration."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(name)
        return value if math.isfinite(value) and 0 <= value <= MAX_SECONDS else _refuse(name)

    def amount(self, name: str) -> Decimal:
        """Return USD."""
        return _amount(name, self.text(name))

    def limits(self, name: str) -> Limits:
        """Return caps."""
        value = self._value(name)
        if not isinstance(value, dict):
            _refuse(name)
        caps: dict[str, Any] = value
        if isinstance(cost := caps.get("max_cost_usd"), str):
            caps = {**caps, "max_cost_usd": _amount(name, cost)}
        try:
            return Limits(**caps)
        except (TypeError, ValueError):
            _refuse(name)

    def _value(self, name: str) -> object:
        if name not in self._fields:
            raise InvalidRecordError(f"{name} is missing")
        return self._fields[name]


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name)
    return value if 0 <= value <= MAX_SUM else _refuse(name)


def _amount(name: str, text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        _refuse(name)
    return value if value.is_finite() and 0 <= value <= MAX_SUM else _refuse(name)


def _refuse(name: str) -> NoReturn:
    raise InvalidRecordError(f"{name} is not valid")
