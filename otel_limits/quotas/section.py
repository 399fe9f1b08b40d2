"""The `quotas` section of policy files: its keys, reader and JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from otel_limits.core.policy import ACTIONS
from otel_limits.core.secrets import redact_url
from otel_limits.core.values import (
    DURATION,
    DURATION_TEXT,
    TEXT,
    CheckedKind,
    InvalidValueError,
    Kind,
    TextKind,
    choice,
    count_up_to,
    money_up_to,
)
from otel_limits.quotas.estimates import RESERVED
from otel_limits.quotas.keys import Template, require_source
from otel_limits.quotas.quota import (
    BACKEND_ERRORS,
    EXCEEDED,
    LOST,
    MAX_PARTS,
    PACES,
    PARTS_PER_USD,
    UNITS,
    Quota,
    Unit,
    parts_of_usd,
)
from otel_limits.quotas.windows import (
    CALENDAR,
    HOUR_SECONDS,
    UTC,
    UnboundedWindow,
    Windows,
    length_of,
    zone_of,
)

# Used in Redis keys and Prometheus labels: no characters that need escaping.
NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.\-]{0,63}")

Refuse = Callable[[tuple[str, ...], str], None]
"""Called with the path of an invalid value within the section, and a message."""


def _rule(_: str, text: str) -> str:
    if text not in CALENDAR:
        length_of(text)
    return text


def _conditions(globs: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(globs, Mapping) or not globs:
        raise InvalidValueError
    if not all(isinstance(each, str) for pair in globs.items() for each in pair):
        raise InvalidValueError
    try:
        return tuple((require_source("It", source), glob) for source, glob in globs.items())
    except ValueError as error:
        raise InvalidValueError(str(error)) from None


def _wait(text: object) -> float:
    seconds = DURATION.check(text).total_seconds()
    if not seconds:
        raise InvalidValueError
    return seconds


def _grace(text: object) -> float:
    # YAML parses 0 as a number.
    return 0.0 if text in (0, "0") and text is not False else DURATION.check(text).total_seconds()


@dataclass(frozen=True, kw_only=True)
class AmountKind(Kind[Any]):
    """An amount, or one for each plan."""

    each: CheckedKind[Any]
    """An amount."""

    @property
    def schema(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The valid values, as JSON Schema."""
        plans = {"type": "object", "additionalProperties": self.each.schema}
        return {"anyOf": [self.each.schema, plans | {"required": [DEFAULT_PLAN]}]}

    def of_text(self, name: str, text: str) -> Any:
        """Parse an amount typed by an operator."""
        return self.each.of_text(name, text)

    def of_value(self, name: str, value: object, written: str | None = None) -> Any:
        """Check an amount or a mapping of plans to amounts."""
        if not isinstance(value, Mapping):
            return self.each.of_value(name, value, written)
        if DEFAULT_PLAN not in value:
            raise ValueError(
                f"{name} must have an amount for calls of any other plan, such as default: 100."
            )
        return amounts(self.each, name, value)


def amounts(kind: Kind[Any], name: str, values: Mapping[Any, object]) -> dict[str, Any]:
    """Check an amount for each of several names."""
    return {
        str(key): kind.of_value(
            f'{name}["{key}"]', each, str(each) if isinstance(each, Decimal) else None
        )
        for key, each in values.items()
    }


def _keys(values: object) -> Mapping[Any, object]:
    if not isinstance(values, Mapping) or not values:
        raise InvalidValueError
    return values


DEFAULT_PLAN: Final = "default"
COUNT: Final = AmountKind(each=count_up_to(MAX_PARTS))
MONEY: Final = AmountKind(each=money_up_to(MAX_PARTS // PARTS_PER_USD))
KEYS: Final = CheckedKind[Mapping[Any, object]](
    phrase="a mapping of keys to amounts, such as acme: 5000000",
    check=_keys,
    parse=str,
    schema={
        "type": "object",
        "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
        "minProperties": 1,
    },
)
MAX_WAIT: Final = CheckedKind[float](
    phrase="a duration above 0 such as 30s or 5m",
    check=_wait,
    parse=str,
    schema={"type": "string", "pattern": f"^{DURATION_TEXT.pattern}$"},
)
GRACE: Final = CheckedKind[float](
    phrase="a duration such as 30s or 5m, or 0 for none",
    check=_grace,
    parse=str,
    schema={"anyOf": [{"type": "string", "pattern": f"^{DURATION_TEXT.pattern}$"}, {"const": 0}]},
)
CONDITIONS: Final = CheckedKind[tuple[tuple[str, str], ...]](
    phrase="a mapping of sources to globs, such as agent: nightly-*",
    check=_conditions,
    parse=str,
    schema={"type": "object", "additionalProperties": TEXT.schema, "minProperties": 1},
)


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a quota."""

    kind: Kind[Any]
    help: str


FIELDS: Final[Mapping[str, Field]] = {
    "tokens": Field(COUNT, "Input and output tokens per window."),
    "usd": Field(MONEY, "USD per window, by the price of each model call."),
    "model_calls": Field(COUNT, "Requests to providers per window, retries included."),
    "invocations": Field(COUNT, "Invocations per window that call a model at least once."),
    "concurrency": Field(COUNT, "In-flight model calls; without a window."),
    "window": Field(
        TextKind(read=_rule),
        "hour, day, week (from Monday), month, quarter, year, or an ISO duration such as PT15M or "
        "P7D, counted from 1970-01-01 UTC.",
    ),
    "pace": Field(
        choice(*PACES),
        "window (default: the amount is available at the start of each window) or smooth (it flows "
        "back evenly; windows of up to an hour).",
    ),
    "burst": Field(
        MONEY.each,
        "With pace: smooth, the amount that a full bucket holds; default a tenth of the amount.",
    ),
    "time_zone": Field(
        TextKind(read=lambda _, text: zone_of(text).key),
        "Time zone in which hours, days and longer calendar units begin; default UTC.",
    ),
    "key": Field(
        TextKind(read=lambda _, text: Template(text)),
        "Partition key: agent, model, baggage.NAME, attribute.NAME, or several as "
        "{agent}/{baggage.tenant.id}. Each key gets the full amount. If unset, all calls share one "
        "count.",
    ),
    "plan": Field(
        TextKind(read=require_source),
        "Source of a call's plan, such as attribute.plan or baggage.plan, for amounts by plan as "
        "tokens: {free: 1000, pro: 50000, default: 1000}.",
    ),
    "keys": Field(KEYS, "Amounts for single keys, whatever their plan, such as acme: 5000000."),
    "where": Field(
        CONDITIONS, "Sources and globs that a model call must match for the quota to apply."
    ),
    "action": Field(
        # No prompt can extend a quota that a whole fleet shares.
        choice(*(each for each in ACTIONS if each != "ask")),
        "Action when reached; defaults to that of the agent's policy.",
    ),
    "reserve": Field(
        choice(*RESERVED),
        "Amount reserved for a call: worst_case (default) or expected (twice the average of the "
        "model's recent answers).",
    ),
    "on_lost": Field(
        choice(*LOST),
        "What happens to the reservation of a call whose process was killed, when it expires: free "
        "(default) or charge (the mean of the model's last 20 calls).",
    ),
    "on_exceeded": Field(
        choice(*EXCEEDED),
        "Behavior when too little is left: refuse (default) or wait.",
    ),
    "max_wait": Field(MAX_WAIT, "Maximum wait, e.g. 5m; default 30s."),
    "fair_by": Field(
        TextKind(read=require_source),
        "Source whose values take turns among the waiting calls of a process, such as "
        "baggage.tenant.id; default: first come, first served.",
    ),
    "grace": Field(
        GRACE,
        "How long a process may use its local share of the remainder during a store outage; "
        "default 30s, 0 for none.",
    ),
    "on_store_error": Field(
        choice(*BACKEND_ERRORS),
        "Behavior during a store outage without a local share: deny (default), allow, or local "
        "(each process uses the last known remainder).",
    ),
}
"""All keys of a quota: the source of the reader, the schema and the documentation."""


def parts_in(unit: Unit, amount: Any) -> int:
    """Return an amount in display units as whole parts."""
    return parts_of_usd(amount) if unit == "usd" else int(amount)


def read_quotas(section: object, refuse: Refuse) -> dict[str, Quota]:
    """Return every valid quota of the section; call `refuse` for each error."""
    if not isinstance(section, Mapping):
        refuse((), "quotas must map names to quotas, such as daily: {tokens: 5000}.")
        return {}
    readings = (_Reading(name, entry, refuse) for name, entry in section.items())
    quotas = (reading.quota() for reading in readings)
    return {quota.name: quota for quota in quotas if quota is not None}


class _Reading:
    """Reads one entry and reports its errors."""

    def __init__(self, name: object, entry: object, refuse: Refuse) -> None:
        self._name = str(name)
        self._entry: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
        self._tell = refuse
        self._sentences: list[str] = []
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self._refuse("must have a name of up to 64 lower case letters, digits, '.', '-', '_'.")
        elif not isinstance(entry, Mapping):
            self._refuse("must be a mapping with an amount and a window.")

    def quota(self) -> Quota | None:
        """Return the quota; `None` if it has errors."""
        if self._sentences:
            return None
        values = {key: self._read(key, value) for key, value in self._entry.items()}
        given = [unit for unit in UNITS if unit in self._entry]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            self._refuse(f"must have exactly one of {', '.join(UNITS)}, got {got}.")
        windowless = given == ["concurrency"]
        if not windowless and "window" not in self._entry:
            self._refuse("must have a window, such as day.")
        for key in self._entry.keys() & set(WINDOW_KEYS) if windowless else ():
            self._refuse(f"limits concurrent calls and has no {key}: remove it.", key)
        self._refuse_idle(given, values)
        self._check_pace(given, values)
        amount = values[given[0]] if len(given) == 1 else None
        self._check_plans(amount)
        windows = (
            None if self._sentences else UnboundedWindow() if windowless else self._windows(values)
        )
        keys = None if windows is None else self._amounts_of_keys(given[0], values)
        burst = None if windows is None else self._burst(given[0], windows, values)
        if windows is None or keys is None or burst is None:
            return None
        by_plan = amount if isinstance(amount, Mapping) else {DEFAULT_PLAN: amount}
        plans = {plan: parts_in(given[0], each) for plan, each in by_plan.items()}
        return Quota(
            name=self._name,
            unit=given[0],
            amount=plans.pop(DEFAULT_PLAN),
            plans=plans,
            keys=keys,
            windows=windows,
            burst=burst,
            **{key: values[key] for key in self._entry if key in OPTIONAL},
        )

    def _refuse_idle(self, given: list[Unit], values: Mapping[str, Any]) -> None:
        """Reject settings without effect, because their author expects one."""
        if "max_wait" in values and values.get("on_exceeded") != "wait":
            self._refuse(
                "has a max_wait but refuses calls immediately: add on_exceeded: wait, or remove "
                "max_wait.",
                "max_wait",
            )
        if "fair_by" in values and values.get("on_exceeded") != "wait":
            self._refuse(
                "has a fair_by but refuses calls immediately: add on_exceeded: wait, or remove "
                "fair_by.",
                "fair_by",
            )
        if "reserve" in values and len(given) == 1 and given[0] not in ESTIMATED:
            self._refuse(f"counts {given[0]}, and each call uses one: remove reserve.", "reserve")
        if "on_lost" in values and given == ["concurrency"]:
            self._refuse("limits concurrent calls and charges nothing: remove on_lost.", "on_lost")

    def _check_pace(self, given: list[Unit], values: Mapping[str, Any]) -> None:
        """Reject settings that contradict the pace."""
        is_smooth = values.get("pace") == "smooth"
        if "pace" in values and given == ["concurrency"]:
            self._refuse("limits concurrent calls, which have no pace: remove pace.", "pace")
        if "burst" in values and not is_smooth:
            self._refuse(
                "has a burst but its pace is window: add pace: smooth, or remove burst.", "burst"
            )
        if "time_zone" in values and is_smooth:
            self._refuse(
                "flows back evenly, whatever the time of day: remove time_zone.", "time_zone"
            )

    def _burst(
        self, unit: Unit, windows: Windows | UnboundedWindow, values: Mapping[str, Any]
    ) -> int | None:
        """Return the burst in parts, 0 for the default; `None` if it or the window is invalid."""
        if values.get("pace") != "smooth":
            return 0
        window = windows.at(0)
        if window.end - window.start > HOUR_SECONDS:
            self._refuse(
                "can only be smooth with a window of up to an hour, such as PT1M: shorten the "
                "window, or remove pace.",
                "pace",
            )
            return None
        if "burst" not in values:
            return 0
        try:
            kind = MONEY if unit == "usd" else COUNT
            return parts_in(unit, kind.each.of_value("burst", self._entry["burst"]))
        except ValueError as error:
            self._refuse(str(error), "burst", separator=": ")
            return None

    def _check_plans(self, amount: object) -> None:
        """Reject amounts by plan without a plan, and the reverse."""
        if isinstance(amount, Mapping) and "plan" not in self._entry:
            self._refuse(
                "has amounts by plan but no plan: add the source of a call's plan, such as "
                "plan: attribute.plan."
            )
        elif "plan" in self._entry and amount is not None and not isinstance(amount, Mapping):
            self._refuse(
                "has a plan but one amount for all: write amounts by plan, such as "
                "tokens: {pro: 5000, default: 100}, or remove plan.",
                "plan",
            )
        if "keys" in self._entry and "key" not in self._entry:
            self._refuse(
                "has amounts for single keys but one count for all calls: add a key, such as "
                "key: baggage.tenant.id, or remove keys.",
                "keys",
            )

    def _amounts_of_keys(self, unit: Unit, values: Mapping[str, Any]) -> dict[str, int] | None:
        """Return the amounts of single keys by their ID; `None` if one is invalid."""
        try:
            kind = MONEY if unit == "usd" else COUNT
            given = amounts(kind.each, "keys", values.get("keys", {}))
            return {
                values["key"].key_of_text(self._name, text).id: parts_in(unit, each)
                for text, each in given.items()
            }
        except ValueError as error:
            self._refuse(str(error), "keys", separator=": ")
            return None

    def _read(self, key: str, value: object) -> Any:
        field = FIELDS.get(key)
        if field is None:
            self._refuse(
                f"has an unknown key {redact_url(key)!r}. Valid keys: {', '.join(FIELDS)}.", key
            )
            return None
        # As written in the file: `repr` of a Decimal differs.
        written = str(value) if isinstance(value, Decimal) else None
        try:
            return field.kind.of_value(key, value, written)
        except ValueError as error:
            self._refuse(str(error), key, separator=": ")
            return None

    def _windows(self, values: Mapping[str, Any]) -> Windows | None:
        try:
            return Windows(values["window"], values.get("time_zone", UTC))
        except ValueError as error:
            self._refuse(str(error), "time_zone", separator=": ")
            return None

    def _refuse(self, text: str, *keys: str, separator: str = " ") -> None:
        self._sentences.append(text)
        self._tell((self._name, *keys), f'quotas["{self._name}"]{separator}{text}')


WINDOW_KEYS: Final = ("window", "time_zone")
"""Keys that define the window."""

ESTIMATED: Final[tuple[Unit, ...]] = ("tokens", "usd")
"""Units in which the usage of a call is unknown until it ends."""

OPTIONAL: Final = (
    "pace",
    "key",
    "plan",
    "where",
    "action",
    "reserve",
    "on_lost",
    "on_exceeded",
    "max_wait",
    "fair_by",
    "grace",
    "on_store_error",
)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the section."""
    properties = {
        name: {"description": field.help, **field.kind.schema} for name, field in FIELDS.items()
    }
    quota = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "oneOf": [
            {"required": [unit], "not": {"anyOf": [{"required": [each]} for each in WINDOW_KEYS]}}
            if unit == "concurrency"
            else {"required": [unit, "window"]}
            for unit in UNITS
        ],
        "dependencies": {
            "max_wait": {
                "required": ["on_exceeded"],
                "properties": {"on_exceeded": {"const": "wait"}},
            },
            "fair_by": {
                "required": ["on_exceeded"],
                "properties": {"on_exceeded": {"const": "wait"}},
            },
            "keys": {"required": ["key"]},
            "reserve": {"anyOf": [{"required": [unit]} for unit in ESTIMATED]},
            "on_lost": {"not": {"required": ["concurrency"]}},
            "pace": {"not": {"required": ["concurrency"]}},
            "burst": {"required": ["pace"], "properties": {"pace": {"const": "smooth"}}},
            "time_zone": {"properties": {"pace": {"const": "window"}}},
        },
    }
    return {
        "type": "object",
        "propertyNames": {"pattern": f"^{NAME.pattern}$"},
        "additionalProperties": quota,
    }
