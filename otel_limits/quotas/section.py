"""The `quotas` section of policy files: the model of a quota, and the rules between its keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final, TypeAlias, get_args

from pydantic import ConfigDict, WithJsonSchema

from otel_limits.core.file_parts import KeyPath, Of, Part, mistakes_in, optional
from otel_limits.core.policy import ACTIONS
from otel_limits.core.values import (
    DURATION,
    DURATION_TEXT,
    TEXT,
    CheckedKind,
    InvalidValueError,
    Kind,
    MappingKind,
    TextKind,
    choice,
    count_up_to,
    item_of,
    money_up_to,
)
from otel_limits.quotas.estimates import Reserved
from otel_limits.quotas.keys import Template, require_source
from otel_limits.quotas.quota import (
    MAX_PARTS,
    PARTS_PER_USD,
    UNITS,
    OnExceeded,
    OnLost,
    OnStoreError,
    Pace,
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

Refuse = Callable[[KeyPath, str], None]
"""Called with the path of an invalid value within the section, and a message."""


def _rule(_: str, text: str) -> str:
    if text not in CALENDAR:
        length_of(text)
    return text


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
    def by_name(self) -> MappingKind[Any]:
        """Amounts by plan or key."""
        return MappingKind(each=self.each, example="pro: 5000, default: 100")

    @property
    def schema(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The valid values, as JSON Schema."""
        return {"anyOf": [self.each.schema, {**self.by_name.schema, "required": [DEFAULT_PLAN]}]}

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
        return self.by_name.of_value(name, value, written)


DEFAULT_PLAN: Final = "default"
COUNT: Final = AmountKind(each=count_up_to(MAX_PARTS))
MONEY: Final = AmountKind(each=money_up_to(MAX_PARTS // PARTS_PER_USD))


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

AMOUNTS: Final[Mapping[Unit, AmountKind]] = dict.fromkeys(UNITS, COUNT) | {"usd": MONEY}
"""How the amount of a quota is written, by its unit."""

CountAmount: TypeAlias = Annotated[Any, Of(COUNT)]
Source: TypeAlias = Annotated[Any, Of(TextKind(read=require_source))]
# Checked with the unit of the quota, which is another key.
UnitAmount: TypeAlias = Annotated[Any, WithJsonSchema({"type": "number", "exclusiveMinimum": 0})]


# --- rules between keys ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyRule:
    """A key that has no effect without another one, or with it: its author expects one."""

    key: str
    needs: Mapping[str, str | None]
    """Another key, and its value; `None` for any."""
    sentence: str
    """Told if the rule is broken."""
    is_reversed: bool = False
    """True if the key excludes the other one."""

    def is_broken_by(self, entry: Mapping[str, Any]) -> bool:
        """Return whether a quota breaks the rule."""
        is_met = all(
            key in entry and value in (None, entry[key]) for key, value in self.needs.items()
        )
        return self.key in entry and is_met == self.is_reversed

    @property
    def has_unit(self) -> bool:
        """True if it is about a unit."""
        return not {self.key, *self.needs}.isdisjoint(UNITS)

    @property
    def schema(self) -> dict[str, Any]:
        """The rule for quotas with the key, as JSON Schema."""
        consts = {key: {"const": value} for key, value in self.needs.items() if value is not None}
        met = {"required": list(self.needs)} | ({"properties": consts} if consts else {})
        return {"not": met} if self.is_reversed else met


def _without(key: str, other: str, sentence: str, value: str | None = None) -> KeyRule:
    """Return the rule that a key excludes another one."""
    return KeyRule(key, {other: value}, sentence, is_reversed=True)


CONCURRENCY: Final = "concurrency"
PER_WINDOW: Final = tuple(unit for unit in UNITS if unit != CONCURRENCY)

RULES: Final = (
    *(KeyRule(unit, {"window": None}, "must have a window, such as day.") for unit in PER_WINDOW),
    *(
        _without(key, CONCURRENCY, f"limits concurrent calls and has no {key}: remove it.")
        for key in ("window", "time_zone")
    ),
    *(
        KeyRule(
            key,
            {"on_exceeded": "wait"},
            f"has a {key} but refuses calls immediately: add on_exceeded: wait, or remove {key}.",
        )
        for key in ("max_wait", "fair_by")
    ),
    *(
        _without("reserve", unit, f"counts {unit}, and each call uses one: remove reserve.")
        for unit in ("model_calls", "invocations", CONCURRENCY)
    ),
    _without(
        "on_lost", CONCURRENCY, "limits concurrent calls and charges nothing: remove on_lost."
    ),
    _without("pace", CONCURRENCY, "limits concurrent calls, which have no pace: remove pace."),
    KeyRule(
        "burst",
        {"pace": "smooth"},
        "has a burst but its pace is window: add pace: smooth, or remove burst.",
    ),
    _without(
        "time_zone",
        "pace",
        "flows back evenly, whatever the time of day: remove time_zone.",
        value="smooth",
    ),
    KeyRule(
        "keys",
        {"key": None},
        "has amounts for single keys but one count for all calls: add a key, such as "
        "key: baggage.tenant.id, or remove keys.",
    ),
)


# --- the model of a quota -------------------------------------------------------------------------


class WrittenQuota(Part):
    """A quota of a policy file."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [unit]} for unit in UNITS],
            "dependencies": {
                key: {"allOf": [rule.schema for rule in RULES if rule.key == key]}
                for key in dict.fromkeys(rule.key for rule in RULES)
            },
        }
    )

    tokens: CountAmount = optional("Input and output tokens per window.")
    usd: Annotated[Any, Of(MONEY)] = optional("USD per window, by the price of each model call.")
    model_calls: CountAmount = optional("Requests to providers per window, retries included.")
    invocations: CountAmount = optional("Invocations per window that call a model at least once.")
    concurrency: CountAmount = optional("In-flight model calls; without a window.")
    window: Annotated[Any, Of(TextKind(read=_rule))] = optional(
        "hour, day, week (from Monday), month, quarter, year, or an ISO duration such as PT15M or "
        "P7D, counted from 1970-01-01 UTC."
    )
    pace: Annotated[Any, Of(choice(*get_args(Pace)))] = optional(
        "window (default: the amount is available at the start of each window) or smooth (it flows "
        "back evenly; windows of up to an hour)."
    )
    burst: UnitAmount = optional(
        "With pace: smooth, the amount that a full bucket holds; default a tenth of the amount."
    )
    time_zone: Annotated[Any, Of(TextKind(read=lambda _, text: zone_of(text).key))] = optional(
        "Time zone in which hours, days and longer calendar units begin; default UTC."
    )
    key: Annotated[Any, Of(TextKind(read=lambda _, text: Template(text)))] = optional(
        "Partition key: agent, model, baggage.NAME, attribute.NAME, or several as "
        "{agent}/{baggage.tenant.id}. Each key gets the full amount. If unset, all calls share one "
        "count."
    )
    plan: Source = optional(
        "Source of a call's plan, such as attribute.plan or baggage.plan, for amounts by plan as "
        "tokens: {free: 1000, pro: 50000, default: 1000}."
    )
    keys: dict[str, UnitAmount] = optional(
        "Amounts for single keys, whatever their plan, such as acme: 5000000.",
        examples=[{"acme": 5_000_000}],
        min_length=1,
    )
    where: dict[Source, Annotated[Any, Of(TEXT)]] = optional(
        "Sources and globs that a model call must match for the quota to apply.",
        examples=[{"agent": "nightly-*"}],
        min_length=1,
    )
    # No prompt can extend a quota that a whole fleet shares.
    action: Annotated[Any, Of(choice(*(each for each in ACTIONS if each != "ask")))] = optional(
        "Action when reached; defaults to that of the agent's policy."
    )
    reserve: Annotated[Any, Of(choice(*get_args(Reserved)))] = optional(
        "Amount reserved for a call: worst_case (default) or expected (twice the average of the "
        "model's recent answers)."
    )
    on_lost: Annotated[Any, Of(choice(*get_args(OnLost)))] = optional(
        "What happens to the reservation of a call whose process was killed, when it expires: free "
        "(default) or charge (the mean of the model's last 20 calls)."
    )
    on_exceeded: Annotated[Any, Of(choice(*get_args(OnExceeded)))] = optional(
        "Behavior when too little is left: refuse (default) or wait."
    )
    max_wait: Annotated[Any, Of(MAX_WAIT)] = optional("Maximum wait, e.g. 5m; default 30s.")
    fair_by: Source = optional(
        "Source whose values take turns among the waiting calls of a process, such as "
        "baggage.tenant.id; default: first come, first served."
    )
    grace: Annotated[Any, Of(GRACE)] = optional(
        "How long a process may use its local share of the remainder during a store outage; "
        "default 30s, 0 for none."
    )
    on_store_error: Annotated[Any, Of(choice(*get_args(OnStoreError)))] = optional(
        "Behavior during a store outage without a local share: deny (default), allow, or local "
        "(each process uses the last known remainder)."
    )

    def quota(self, name: str) -> Quota:
        """Return the quota.

        Raises:
            UnfitError: Its values don't fit together.
        """
        given = self.given()
        unit = next(unit for unit in UNITS if unit in given)
        by_plan = given[unit] if isinstance(given[unit], Mapping) else {DEFAULT_PLAN: given[unit]}
        plans = {plan: parts_in(unit, each) for plan, each in by_plan.items()}
        return Quota(
            **{key: given[key] for key in Quota.__dataclass_fields__ if key in given}
            | {
                "name": name,
                "unit": unit,
                "amount": plans.pop(DEFAULT_PLAN),
                "plans": plans,
                "windows": self._windows(),
                "keys": self._amounts_of_keys(name, unit),
                "where": tuple((self.where or {}).items()),
                "burst": self._burst(unit),
            }
        )

    def _windows(self) -> Windows | UnboundedWindow:
        if self.window is None:
            return UnboundedWindow()
        with _about_key("time_zone"):
            return Windows(self.window, self.time_zone or UTC)

    def _amounts_of_keys(self, name: str, unit: Unit) -> dict[str, int]:
        """Return the amounts of single keys by their ID."""
        with _about_key("keys"):
            amounts = AMOUNTS[unit].by_name.of_value("keys", self.keys or {})
        ids = {}
        for text in amounts:
            with _about_key("keys", text):
                ids[text] = self.key.key_of_text(name, text).id
        return {ids[text]: parts_in(unit, amount) for text, amount in amounts.items()}

    def _burst(self, unit: Unit) -> int:
        """Return the burst in parts; 0 for the default."""
        if self.pace != "smooth":
            return 0
        window = self._windows().at(0)
        if window.end - window.start > HOUR_SECONDS:
            raise UnfitError(
                " can only be smooth with a window of up to an hour, such as PT1M: shorten the "
                "window, or remove pace.",
                "pace",
            )
        with _about_key("burst"):
            if self.burst is None:
                return 0
            # A fraction as in the file: `repr` of a Decimal differs.
            written = str(self.burst) if isinstance(self.burst, Decimal) else None
            return parts_in(unit, AMOUNTS[unit].each.of_value("burst", self.burst, written))


class UnfitError(ValueError):
    """A value does not fit the others; the text continues the name of the quota."""

    def __init__(self, text: str, *path: str) -> None:
        """Remember the path of the value in the quota."""
        super().__init__(text)
        self.path = path


@contextmanager
def _about_key(*path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UnfitError(f": {error}", *path) from None


# --- reading --------------------------------------------------------------------------------------


def parts_in(unit: Unit, amount: Any) -> int:
    """Return an amount in display units as whole parts."""
    return parts_of_usd(amount) if unit == "usd" else int(amount)


def read_quotas(
    section: object, refuse: Refuse, shown: Callable[[KeyPath], str]
) -> dict[str, Quota]:
    """Return every valid quota of the section.

    Args:
        section: What the file contains.
        refuse: Called for each mistake.
        shown: Returns the text of a value in the file.
    """
    if not isinstance(section, Mapping):
        refuse((), "quotas must map names to quotas, such as daily: {tokens: 5000}.")
        return {}
    quotas = {}
    for name, entry in section.items():
        mistakes = list(_mistakes(name, entry, shown))
        if not mistakes:
            try:
                quotas[name] = WrittenQuota.model_validate(entry).quota(name)
            except UnfitError as error:
                mistakes = [(error.path, str(error))]
        for path, text in mistakes:
            refuse((name, *path), item_of("quotas", name) + text)
    return quotas


def _mistakes(
    name: str, entry: object, shown: Callable[[KeyPath], str]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with an entry, each with its path in it."""
    if not NAME.fullmatch(name):
        yield (), " must have a name of up to 64 lower case letters, digits, '.', '-', '_'."
    elif not isinstance(entry, Mapping):
        yield (), " must be a mapping with an amount and a window."
    else:
        for path, sentence in mistakes_in(entry, WrittenQuota, lambda path: shown((name, *path))):
            yield path, f": {sentence}"
        for key, sentence in _contradictions(entry):
            yield (key,) if key else (), f" {sentence}"


def _contradictions(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield combinations of keys that are invalid, each with one of the keys."""
    given = [unit for unit in UNITS if unit in entry]
    if len(given) != 1:
        yield (
            "",
            f"must have exactly one of {', '.join(UNITS)}, got {' and '.join(given) or 'none'}.",
        )
    for rule in RULES:
        # With two units, rules about one of them mislead.
        if rule.is_broken_by(entry) and (len(given) == 1 or not rule.has_unit):
            yield rule.key, rule.sentence
    has_plans = any(isinstance(entry[unit], Mapping) for unit in given)
    if len(given) != 1 or has_plans == ("plan" in entry):
        return
    if has_plans:
        sentence = "has amounts by plan but no plan: add the source of a call's plan, such as "
        yield "", f"{sentence}plan: attribute.plan."
    else:
        sentence = "has a plan but one amount for all: write amounts by plan, such as "
        yield "plan", f"{sentence}tokens: {{pro: 5000, default: 100}}, or remove plan."


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the section."""
    return {
        "type": "object",
        "propertyNames": {"pattern": f"^{NAME.pattern}$"},
        "additionalProperties": WrittenQuota.model_json_schema(),
    }
