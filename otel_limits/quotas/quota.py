"""The `Quota` type, its units and their formatting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from otel_limits.core.comparisons import (
    change,
    changed,
    changes,
    higher,
    loosest,
    narrower,
)
from otel_limits.core.usage import EXACT
from otel_limits.core.wording import pluralize
from otel_limits.quotas.estimates import FIRST_OUTPUT, LEAST_EXPECTED
from otel_limits.quotas.keys import Template, value_text
from otel_limits.quotas.store import Count, CountState, Refill
from otel_limits.quotas.windows import UnboundedWindow

if TYPE_CHECKING:
    from otel_limits.core.comparisons import IsLooser
    from otel_limits.core.policy import Action
    from otel_limits.core.usage import Number
    from otel_limits.quotas.estimates import Reserved
    from otel_limits.quotas.keys import Key, Lookup
    from otel_limits.quotas.windows import Window, Windows

Unit = Literal["tokens", "usd", "model_calls", "invocations", "concurrency"]
UNITS: Final[tuple[Unit, ...]] = get_args(Unit)
OnStoreError = Literal["deny", "allow", "local"]
OnLost = Literal["free", "charge"]
OnExceeded = Literal["refuse", "wait"]
Pace = Literal["window", "smooth"]

MAX_WAIT_SECONDS: Final = 30.0
"""Default of `max_wait`."""

# Finer than the price of a token: the cheapest models cost about 10**-8 USD per token.
PARTS_PER_USD: Final = 10**9
"""USD are counted in whole billionths, so that stores add integers."""

MAX_PARTS: Final = 2**53 - 1
"""Largest exact integer in Redis scripts, whose numbers are doubles."""

GRACE_SECONDS: Final = 30.0
"""Default of `grace`: longer than a server takes to restart."""

UNIT_NAMES: Final[Mapping[Unit, str]] = {
    "usd": "USD",
    "model_calls": "model calls",
    "concurrency": "concurrent model calls",
}

NO_KEY: Final = Template("")


class Figures(NamedTuple):
    """The state of a count in display units."""

    unit: str
    used: Number
    reserved: Number
    limit: Number
    left: Number


@dataclass(frozen=True, slots=True)
class Allowance:
    """An amount per time."""

    unit: Unit
    parts: int
    windows: Windows | UnboundedWindow

    def __str__(self) -> str:
        """Describe it."""
        per = "" if isinstance(self.windows, UnboundedWindow) else f" per {self.windows.rule}"
        return in_words(self.unit, self.parts) + per


def _admits_more(old: Allowance, new: Allowance) -> bool | None:
    if old.unit != new.unit:
        return None
    if new.parts * old.windows.mean_seconds > old.parts * new.windows.mean_seconds:
        return True
    # No more on average, but a longer window admits more in one burst.
    return None if new.parts > old.parts else False


def _divides(old: Template, new: Template) -> bool | None:
    """Compare keys: each value of a key gets the full amount."""
    if not new.text or not old.text:
        return bool(new.text)
    # Only the values count, not the text between them.
    return changed(old.sources, new.sources)


def _applies_less(
    old: tuple[tuple[str, str], ...], new: tuple[tuple[str, str], ...]
) -> bool | None:
    """Compare conditions; a missing value also matches `*`."""
    conditions = (tuple(each for each in where if each[1].strip("*")) for where in (old, new))
    return narrower(*conditions)


COMPARED: Final[Mapping[str, IsLooser]] = {
    "pace": changed,
    "key": _divides,
    "where": _applies_less,
    "reserve": loosest("expected"),
    "on_store_error": loosest("allow", "local"),
    "on_lost": loosest("free"),
    "on_exceeded": loosest("wait"),
}
"""Fields of a quota that can make it looser, whatever the others are."""

COMPARED_IF: Final[Mapping[str, tuple[str, str]]] = {
    "grace": ("on_store_error", "deny"),
    "max_wait": ("on_exceeded", "wait"),
}
"""Seconds of which more are looser, and the value of the field without which they mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A budget per time window, or of concurrent calls, shared by many processes."""

    name: str
    unit: Unit
    amount: int
    """In whole parts: tokens, calls, invocations, billionths of a USD, or concurrent calls."""
    windows: Windows | UnboundedWindow
    pace: Pace = "window"
    """Whether the amount is available at the start of a window, or flows back evenly."""
    burst: int = 0
    """With `smooth`: the parts that a full bucket holds; 0 for a tenth of the amount."""
    plan: str = ""
    """The source that names the plan of a call, such as `attribute.plan`; empty for none."""
    plans: Mapping[str, int] = field(default_factory=dict)
    """Plan → amount; `amount` for any other plan."""
    keys: Mapping[str, int] = field(default_factory=dict)
    """Key ID → amount; takes precedence over the plan."""
    key: Template = NO_KEY
    """Each value of the key gets the full amount."""
    where: tuple[tuple[str, str], ...] = ()
    """Sources and globs that a model call must match for the quota to apply."""
    action: Action | None = None
    """The action when reached; `None` for that of the agent's policy."""
    reserve: Reserved = "worst_case"
    """The amount reserved for a call."""
    grace: float = GRACE_SECONDS
    """Seconds of an outage during which a worker may use its local share."""
    on_store_error: OnStoreError = "deny"
    """Behavior during an outage without a local share."""
    on_lost: OnLost = "free"
    """Whether a call whose reservation expired is charged until it is settled."""
    on_exceeded: OnExceeded = "refuse"
    """Whether a call is refused immediately or waits if too little is left."""
    max_wait: float = MAX_WAIT_SECONDS
    """Maximum wait in seconds."""
    fair_by: str = ""
    """The source whose values take turns in a queue; empty for the order of arrival."""
    origin: str = field(default="", compare=False)
    """Its line in the policy file, such as `limits.yaml:12`."""

    def amount_of(self, key: Key, lookup: Lookup) -> int:
        """Return the amount of a key for a call, before changes in the store."""
        plan = value_text(lookup(self.plan)) if self.plan else ""
        return self.keys.get(key.id, self.plans.get(plan, self.amount))

    def loosened(self, before: Quota) -> Iterator[str]:
        """Yield what admits more than an earlier version, or may, one phrase each.

        The action is not compared, because without one it is that of the agent.
        """
        old, new = before._amounts(self), self._amounts(before)
        for (name, part), allowance in new.items():
            yield from change(name, old[name, part], allowance, _admits_more)
        if self.plan and before.plan:
            yield from change("plan", before.plan, self.plan, changed)
        yield from changes(before, self, COMPARED)
        for name, (condition, value) in COMPARED_IF.items():
            if getattr(self, condition) == getattr(before, condition) == value:
                former, now = (timedelta(seconds=getattr(each, name)) for each in (before, self))
                yield from change(name, former, now, higher)
        if self.refill and before.refill and self.burst != before.burst:
            bursts = before.refill.capacity(before.amount), self.refill.capacity(self.amount)
            yield from change("burst", *bursts, higher)

    def _amounts(self, other: Quota) -> dict[tuple[str, str], Allowance]:
        """Return its amounts by name, and by the plans and keys of both versions."""
        highest = max((self.amount, *self.plans.values()))
        amounts = {("amount", ""): self.amount}
        for plan in (*self.plans, *other.plans):
            amounts[f"amount of plan {plan!r}", plan] = self.plans.get(plan, self.amount)
        for key in (*self.keys, *other.keys):
            # Without its name, which is not kept.
            amounts["amount of a key", key] = self.keys.get(key, highest)
        return {name: Allowance(self.unit, parts, self.windows) for name, parts in amounts.items()}

    @property
    def refill(self) -> Refill | None:
        """How its counts refill; `None` for windows."""
        if self.pace == "window":
            return None
        window = self.windows.at(0)
        return Refill(window.end - window.start, self.burst)

    def count(self, key: Key, now: float) -> Count:
        """Return the count of a key at a time, in seconds since the epoch."""
        return Count(
            self.name, key.id, self.window_at(now), self.unit, key.shown, refill=self.refill
        )

    def window_at(self, now: float) -> Window:
        """Return the window of its counts at a time; that of a token bucket never ends."""
        return (UnboundedWindow() if self.refill else self.windows).at(now)

    def figures(self, state: CountState) -> Figures:
        """Return the state of a count in display units."""
        parts = (state.used, state.reserved, state.limit, state.remaining)
        return Figures(unit_name(self.unit), *(in_unit(self.unit, each) for each in parts))

    def __str__(self) -> str:
        """Describe the quota in one line."""
        amount = Allowance(self.unit, self.amount, self.windows)
        key = f" for each {self.key.text}" if self.key.text else ""
        where = "".join(f" where {source} is {glob}" for source, glob in self.where)
        plans = "".join(f"; {plan}: {in_words(self.unit, n)}" for plan, n in self.plans.items())
        if plans:
            plans = f"; by {self.plan}{plans}"
        if self.keys:
            plans += f"; other amounts for {pluralize(len(self.keys), 'key')}"
        settings = "".join(f"; {each}" for each in self._set())
        return f"{amount}{key}{where}{plans}{settings}"

    def _set(self) -> Iterator[str]:
        """Describe settings that differ from their defaults."""
        if self.action is not None:
            yield f"action {self.action}"
        if self.reserve != "worst_case":
            yield f"reserve {self.reserve}"
        # In observe mode no call waits.
        if self.on_exceeded == "wait" and self.action != "observe":
            turns = f", in turns by {self.fair_by}" if self.fair_by else ""
            yield f"calls wait up to {self.max_wait:.15g} s{turns}"
        if self.grace != GRACE_SECONDS:
            yield f"grace {self.grace:.15g} s"
        if self.pace == "smooth":
            at_once = in_words(self.unit, Refill(1, self.burst).capacity(self.amount))
            yield f"smooth, with bursts of {at_once}"
        if self.on_lost != "free":
            yield "lost calls are charged"
        if self.on_store_error != "deny":
            yield f"on_store_error {self.on_store_error}"


def too_small(quota: Quota) -> str | None:
    """Return a warning if a quota is smaller than the reservation of a single call."""
    least = FIRST_OUTPUT if quota.reserve == "worst_case" else LEAST_EXPECTED
    at_once = quota.refill.capacity(quota.amount) if quota.refill else quota.amount
    if quota.unit != "tokens" or at_once >= least:
        return None
    if quota.refill:
        return (
            f'quotas["{quota.name}"] has a burst of {at_once:,} tokens, less than the {least:,} '
            "reserved for a model without an output cap, so such a call is only sent when the "
            "burst is available in full. Raise burst, or set max_tokens on the model."
        )
    return (
        f'quotas["{quota.name}"] is {quota.amount:,} tokens, less than the {least:,} reserved for '
        "a model without an output cap, so it admits one such call at a time. Raise it, or set "
        "max_tokens on the model."
    )


def waits_in_vain(quota: Quota) -> str | None:
    """Return a warning if calls wait for a quota of which nothing is released in a window."""
    window = quota.windows.at(0)
    # A token bucket returns one call after the other.
    calls = quota.amount if quota.pace == "smooth" else 1
    seconds = (window.end - window.start) / calls
    is_short = seconds <= quota.max_wait
    # In these units a call uses what it reserved, unless it was never sent.
    if quota.unit not in ("model_calls", "invocations") or quota.on_exceeded != "wait" or is_short:
        return None
    if quota.pace == "smooth":
        return (
            f'quotas["{quota.name}"] lets calls wait up to {quota.max_wait:.15g} s, but one of '
            f"its {unit_name(quota.unit)} only returns every {seconds:.15g} s. Raise max_wait."
        )
    return (
        f'quotas["{quota.name}"] lets calls wait up to {quota.max_wait:.15g} s, but used '
        f"{unit_name(quota.unit)} only return in the next window, so calls are refused immediately "
        f"except in the last {quota.max_wait:.15g} s of a window. Use a window of at most "
        "max_wait, or remove on_exceeded: wait."
    )


def parts_of_usd(amount: Decimal) -> int:
    """Return USD as whole parts, rounded up, so that no call counts as cheaper than it was."""
    return int(EXACT.multiply(amount, PARTS_PER_USD).to_integral_value(ROUND_CEILING, EXACT))


def in_unit(unit: Unit, parts: int) -> Number:
    """Return an amount in display units."""
    return EXACT.divide(parts, PARTS_PER_USD) if unit == "usd" else parts


def unit_name(unit: Unit) -> str:
    """Return the display name of a unit."""
    return UNIT_NAMES.get(unit, unit)


def in_words(unit: Unit, parts: int) -> str:
    """Return an amount with its unit."""
    name = unit_name(unit)
    if unit == "usd":
        return f"{in_unit(unit, parts):f} {name}"
    return f"{parts} {name.removesuffix('s') if parts == 1 else name}"
