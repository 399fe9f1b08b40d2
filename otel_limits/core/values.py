"""Kinds of values: each is parsed and checked alike in text, code and policy files."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

from otel_limits.core.secrets import quote_value, redact_value
from otel_limits.core.wording import suggestion

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

MAX_PORT: Final = 65_535

DURATION_TEXT: Final = re.compile(r"(\d+)([smhdw])")
DURATION_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

# No spaces or braces, so that the templates of quota keys are unambiguous.
KEY_SOURCE: Final = re.compile(r"(?:baggage|attribute)\.[A-Za-z0-9][A-Za-z0-9_.\-/]{0,127}")

PLAIN: Final = re.compile(r"(?:0|[1-9]\d*)(?:\.\d+)?|true|false")
"""Text that files and code read as a number or as a truth value, unless it is quoted."""

UNQUOTED: Final = "Write it without quotes."


class FrozenDict(dict[K, V]):
    """An immutable dictionary, for events and limits.

    A `dict` rather than a `MappingProxyType`, so that observers can pickle it, copy it and write it
    as JSON.
    """

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("Events and limits are immutable. Change a copy of this dictionary.")

    __setitem__ = __delitem__ = __ior__ = _refuse
    # Each of them, because those of `dict` do not go through `__setitem__`.
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Agree with equality, so that objects that contain it can be hashed, too."""
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy it as a whole, since items cannot be set one by one."""
        return type(self), (dict(self),)


class InvalidValueError(ValueError):
    """A value is invalid; the text, if any, is the fix."""


class Kind(Generic[T]):
    """One kind of value, from any source.

    Mistakes raise `ValueError` with the name, the valid values, the given value and the fix.
    """

    schema: Mapping[str, Any]
    """The valid values, as JSON Schema."""

    def of_text(self, name: str, text: str) -> T:
        """Parse an environment variable or a command line option."""
        raise NotImplementedError

    def of_value(self, name: str, value: object, written: str | None = None) -> T:
        """Check a value from code or a policy file; `written` is its text in the file."""
        raise NotImplementedError

    def absolute(self, text: str) -> str:
        """Return text with the same meaning in every directory."""
        return text


def item_of(name: str, key: str) -> str:
    """Return the name of an item in messages, such as `agents["researcher"]`, without secrets."""
    return f'{name}["{redact_value(key)}"]'


@dataclass(frozen=True, kw_only=True)
class CheckedKind(Kind[T]):
    """A kind with uniform messages: "NAME must be PHRASE, got VALUE. ADVICE"."""

    phrase: str
    """The valid values, in words."""
    check: Callable[[Any], T]
    """Returns the value to keep; raises `ValueError` for an invalid one."""
    parse: Callable[[str], Any]
    """Converts text for `check`; raises `ValueError` for invalid text."""
    schema: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Empty if it cannot occur in a file."""
    advice: str = ""
    """The fix, if there is one for all mistakes."""

    def __post_init__(self) -> None:
        """Freeze the schema, because events reference the table of limits, and that its kinds."""
        object.__setattr__(self, "schema", FrozenDict(self.schema))

    def of_text(self, name: str, text: str) -> T:
        """Parse an environment variable or a command line option."""
        try:
            return self.check(self.parse(text))
        except (ValueError, ArithmeticError) as error:
            # Without its cause, which contains the value: it may be a secret.
            raise self._refusal(name, quote_value(text), error) from None

    def of_value(self, name: str, value: object, written: str | None = None) -> T:
        """Check a value from code or a policy file; `written` is its text in the file."""
        try:
            return self.check(value)
        except (ValueError, ArithmeticError) as error:
            advice = UNQUOTED if self._is_quoted(value) else ""
            raise self._refusal(name, written or quote_value(value), error, advice) from None

    def _is_quoted(self, value: object) -> bool:
        """Return whether this text would be valid without its quotes."""
        if not isinstance(value, str) or not PLAIN.fullmatch(value):
            return False
        try:
            self.check(self.parse(value))
        except (ValueError, ArithmeticError):
            return False
        return True

    def _refusal(self, name: str, written: str, error: Exception, advice: str = "") -> ValueError:
        advice = advice or (str(error) if isinstance(error, InvalidValueError) else "")
        sentence = f"{name} must be {self.phrase}, got {written}."
        # `lstrip`: an item of a list has no name, and its message starts with "must be".
        return ValueError(" ".join(filter(None, (sentence.lstrip(), advice or self.advice))))


@dataclass(frozen=True, kw_only=True)
class TextKind(Kind[T]):
    """Text that another room parses, with its own messages."""

    read: Callable[[str, str], T]
    """Parses text for a setting; raises `ValueError` with a message that contains the name."""
    schema: Mapping[str, Any] = dataclasses.field(default_factory=lambda: TEXT.schema)
    place: Callable[[str], str] | None = None
    """Makes a path absolute; `None` if it is none."""

    def absolute(self, text: str) -> str:
        """Return text with the same meaning in every directory."""
        return text if self.place is None else self.place(text)

    def of_text(self, name: str, text: str) -> T:
        """Parse an environment variable or a command line option."""
        return self.read(name, text)

    def of_value(self, name: str, value: object, written: str | None = None) -> T:
        """Check a value from code or a policy file; `written` is its text in the file."""
        return self.read(name, TEXT.of_value(name, value, written))


@dataclass(frozen=True, kw_only=True)
class MappingKind(Kind[Mapping[str, T]]):
    """A value for each of several names, as text `search=20,fetch=5`."""

    each: Kind[T]
    example: str

    @property
    def written_example(self) -> dict[str, int]:
        """The example, as in a file."""
        parts = (part.partition("=") for part in self.example.split(","))
        return {name: int(value) for name, _, value in parts}

    @property
    def schema(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The valid values, as JSON Schema."""
        return {"type": "object", "additionalProperties": self.each.schema}

    def of_text(self, name: str, text: str) -> Mapping[str, T]:
        """Parse an environment variable or a command line option."""
        values = {}
        # From the right: a name may contain an equals sign, a number cannot.
        for part in text.split(","):
            key, equals, value = part.strip().rpartition("=")
            if not equals or not key:
                raise self._misfit(name, text)
            try:
                values[key] = self.each.of_text(item_of(name, key), value)
            except ValueError:
                if quote_value(part) == repr(part):
                    raise
                # It may contain a password instead of a number.
                raise self._misfit(name, text) from None
        # Frozen, because observers receive limits and must not change them.
        return FrozenDict(values)

    def _misfit(self, name: str, text: str) -> ValueError:
        return ValueError(f"{name} must look like {self.example}, got {quote_value(text)}.")

    def of_value(self, name: str, value: object, written: str | None = None) -> Mapping[str, T]:
        """Check a value from code or a policy file; `written` is its text in the file."""
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(
                f"{name} must map names to values, such as {self.example}, "
                f"got {written or quote_value(value)}."
            )
        return FrozenDict(
            {
                # A fraction as in a file: `repr` of a Decimal differs.
                key: self.each.of_value(
                    item_of(name, key), each, str(each) if isinstance(each, Decimal) else None
                )
                for key, each in value.items()
            }
        )


def setting(default: T, kind: Kind[Any], text: str, /, **more: Any) -> T:
    """Declare a field of a dataclass as a setting (see `otel_limits.settings.table`).

    Args:
        default: Its value if it is unset.
        kind: Parses and checks it.
        text: Its help.
        more: Optional: `name`, if it is not the field's; `default`, shown if the real one depends
            on other settings; `is_secret`; `is_looser`, which compares two values (see
            `otel_limits.core.comparisons`), if it can loosen limits.
    """
    return dataclasses.field(default=default, metadata={"kind": kind, "help": text, **more})


# --- numbers --------------------------------------------------------------------------------------


OUTSIDE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "minimum": operator.lt,
    "exclusiveMinimum": operator.le,
    "maximum": operator.gt,
}
"""Whether a number is out of range, by JSON Schema keyword."""


MOST: Final = 10**12
"""The largest amount of money. Nothing costs more, and sums stay exact."""

MOST_DIGITS: Final = 40
"""Decimal places of an amount; a long exponent would take all memory to write out."""


def _bounded(
    phrase: str,
    take: Callable[[object], T],
    parse: Callable[[str], Any],
    **bounds: int,
) -> CheckedKind[T]:
    """Create a kind of numbers; `bounds` are keywords of `OUTSIDE`."""

    def check(value: object) -> T:
        number = take(value)
        for bound, is_outside in OUTSIDE.items():
            if bound in bounds and is_outside(number, bounds[bound]):
                raise InvalidValueError
        return number

    # frozen, because observers receive limits with their kinds
    schema = FrozenDict({"type": "integer" if take is _whole else "number", **bounds})
    return CheckedKind(phrase=phrase, check=check, parse=parse, schema=schema)


def _digits(text: str) -> int:
    # int() alone would accept signs, underscores, blanks and the digits of every script
    if not (text.isascii() and text.isdecimal()):
        raise InvalidValueError
    return int(text)


def _whole(value: object) -> int:
    # bool is a subclass of int, and `max_turns=True` would be a limit of 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValueError
    return value


def _real(value: object) -> float:
    if isinstance(value, Decimal):  # a fraction in a policy file
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidValueError
    return value


def _exact(value: object) -> Decimal:
    if isinstance(value, float):
        # The shortest decimal form: Decimal(0.1) would be 0.1000000000000000055…. Not `repr`, which
        # subclasses such as numpy's override.
        value = Decimal(float.__repr__(value))
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise InvalidValueError
    number = Decimal(value)
    if not number.is_finite():
        raise InvalidValueError
    if number > MOST:
        raise InvalidValueError(f"The maximum is {MOST:,}.")
    if number and number.adjusted() < -MOST_DIGITS:
        raise InvalidValueError(f"It can have up to {MOST_DIGITS} decimal places.")
    return number


WHOLE_NUMBER: Final = _bounded("a whole number of 1 or more", _whole, _digits, minimum=1)
CAP: Final = dataclasses.replace(WHOLE_NUMBER, advice="Unset means no limit.")
SWITCHABLE_CAP: Final = _bounded(
    "a whole number of 1 or more, or 0 to switch it off", _whole, _digits, minimum=0
)
CALLS_PER_TOOL: Final = MappingKind(each=CAP, example="search=20,fetch=5")
SWITCHABLE_CAPS_PER_TOOL: Final = MappingKind(each=SWITCHABLE_CAP, example="ssh=3,fetch=5")
PORT: Final = _bounded(f"a port from 1 to {MAX_PORT}", _whole, _digits, minimum=1, maximum=MAX_PORT)
SECONDS: Final = _bounded("a number of seconds above 0", _real, float, exclusiveMinimum=0)
SHARE: Final = _bounded(
    "a share of 0 or more, such as 0.01 or 1%",
    _real,
    lambda text: float(text.strip().removesuffix("%")) / (100 if "%" in text else 1),
    minimum=0,
)
MONEY: Final = _bounded(
    "an amount of USD above 0, such as 0.50", _exact, Decimal, exclusiveMinimum=0
)
PRICE: Final = _bounded(
    "USD per million tokens, 0 or more, such as 2.50", _exact, Decimal, minimum=0
)
FEE: Final = _bounded("USD for each, 0 or more, such as 0.01", _exact, Decimal, minimum=0)


def count_up_to(most: int) -> CheckedKind[int]:
    """Return the kind of whole numbers from 1 to `most`."""
    return _bounded(f"a whole number from 1 to {most}", _whole, _digits, minimum=1, maximum=most)


def money_up_to(most: int) -> CheckedKind[Decimal]:
    """Return the kind of exact amounts of USD above 0 and up to `most`."""
    phrase = f"an amount of USD above 0 and up to {most}, such as 0.50"
    return _bounded(phrase, _exact, Decimal, exclusiveMinimum=0, maximum=most)


FRACTION: Final = _bounded(
    "a fraction above 0 and up to 1", _real, float, exclusiveMinimum=0, maximum=1
)


def _fractions(values: object) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)) or not values:
        raise InvalidValueError
    # Unique and sorted: each threshold warns once, the lowest first.
    return tuple(sorted({float(FRACTION.check(value)) for value in values}))


FRACTIONS: Final = CheckedKind[tuple[float, ...]](
    phrase="one or more fractions above 0 and up to 1, such as 0.5,0.8 (in a file [0.5, 0.8])",
    check=_fractions,
    parse=lambda text: [float(part) for part in text.split(",")],
    schema={"type": "array", "items": FRACTION.schema, "minItems": 1},
)


# --- words ----------------------------------------------------------------------------------------


def _true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):  # as in OpenTelemetry
        raise InvalidValueError
    return text.lower() == "true"


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidValueError
    return value


BOOLEAN: Final = CheckedKind[bool](
    phrase="true or false", check=_boolean, parse=_true_or_false, schema={"type": "boolean"}
)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValueError
    return value


TEXT: Final[Kind[str]] = CheckedKind(
    phrase="text", check=_text, parse=str, schema={"type": "string"}
)


def _path(name: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{name} must name a file or a directory, got {quote_value(text)}.")
    return text


PATH: Final = TextKind(read=_path, place=lambda text: str(Path(text).absolute()))


def choice(*words: str) -> CheckedKind[str]:
    """Return the kind that is one of `words`; case is ignored in text."""

    def check(value: object) -> str:
        if value not in words:
            raise InvalidValueError(suggestion(value, words))
        return str(value)

    # In text only, since variables are often upper case: policy files and code use the exact word.
    return CheckedKind(
        phrase=f"one of {', '.join(words)}",
        check=check,
        parse=str.lower,
        schema={"enum": list(words)},
    )


def choices(*words: str) -> CheckedKind[tuple[str, ...]]:
    """Return the kind that is one or more of `words`, or the word `none`."""

    def check(value: list[str]) -> tuple[str, ...]:
        if value == ["none"]:
            return ()
        unknown = [word for word in value if word not in words]
        if unknown:
            raise InvalidValueError(suggestion(unknown[0], words))
        return tuple(dict.fromkeys(value))

    return CheckedKind(
        phrase=f"one or more of {', '.join(words)}, separated by commas, or none",
        check=check,
        parse=lambda text: [word.strip() for word in text.lower().split(",")],
    )


def split_names(text: str) -> tuple[str, ...]:
    """Split text such as `poll_status,wait` into unique names."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


NAMES: Final = CheckedKind[frozenset[str]](
    phrase="names or globs, separated by commas",
    check=frozenset,
    parse=split_names,
)


# --- time -----------------------------------------------------------------------------------------


def _duration(text: object) -> timedelta:
    found = DURATION_TEXT.fullmatch(_text(text).strip())
    if found is None:
        raise InvalidValueError
    return timedelta(**{DURATION_UNITS[found[2]]: int(found[1])})


def duration_text(span: timedelta) -> str:
    """Return a duration as it is written, in the largest unit without a rest."""
    sizes = {unit: timedelta(**{name: 1}) for unit, name in DURATION_UNITS.items()}
    unit = next(each for each in "dhms" if not span % sizes[each])
    return f"{span // sizes[unit]}{unit}"


DURATION: Final = CheckedKind[timedelta](
    phrase="a duration such as 30m, 12h, 7d or 2w",
    check=_duration,
    parse=str,
)


def _time_span(text: object) -> timedelta:
    span = _duration(text)
    if not span:
        raise InvalidValueError
    return span


TIME_SPAN: Final = CheckedKind[timedelta](
    phrase="a duration above 0 such as 30m, 12h, 7d or 2w",
    check=_time_span,
    parse=str,
    schema={"type": "string", "pattern": f"^{DURATION_TEXT.pattern}$"},
)


def _key_source(text: object) -> str:
    if not isinstance(text, str) or not KEY_SOURCE.fullmatch(text):
        raise InvalidValueError
    return text


KEY_SOURCES: Final = CheckedKind[str](
    phrase="attribute.NAME or baggage.NAME, such as baggage.chat.id",
    check=_key_source,
    parse=str,
    schema={"type": "string", "pattern": f"^{KEY_SOURCE.pattern}$"},
)


def _date_time(text: object) -> datetime:
    # Python 3.10 does not accept Z
    found = datetime.fromisoformat(_text(text).strip().replace("Z", "+00:00"))
    # Without a time zone, it would mean a different moment on every machine.
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _from_now(text: str, sign: int) -> datetime:
    if DURATION_TEXT.fullmatch(text.strip()):
        return datetime.fromtimestamp(time.time(), timezone.utc) + sign * _duration(text)
    return _date_time(text)


TIME: Final = CheckedKind[datetime](
    phrase="a time: 7d for seven days ago, 2026-11-01 or 2026-11-01T12:00",
    check=lambda text: _from_now(text, -1),
    parse=str,
)

END: Final = CheckedKind[datetime](
    phrase="a time: 1d for a day from now, 2026-12-01 or 2026-12-01T06:00+01:00 (UTC by default)",
    check=lambda text: _from_now(text, 1),
    parse=str,
)
