"""A quota: how much of what may be used in which window, and by whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from otel_limits.core.usage import EXACT
from otel_limits.quotas.estimates import FIRST_OUTPUT, LEAST_EXPECTED
from otel_limits.quotas.keys import Template
from otel_limits.quotas.store import Count, CountState
from otel_limits.quotas.windows import UnboundedWindow

if TYPE_CHECKING:
    from otel_limits.core.policy import Action
    from otel_limits.core.usage import Number
    from otel_limits.quotas.estimates import Reserved
    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.windows import Windows

Unit = Literal["tokens", "usd", "model_calls", "invocations", "concurrency"]
UNITS: Final[tuple[Unit, ...]] = ("tokens", "usd", "model_calls", "invocations", "concurrency")

BackendError = Literal["deny", "allow", "local"]
BACKEND_ERRORS: Final[tuple[BackendError, ...]] = ("deny", "allow", "local")

Exceeded = Literal["refuse", "wait"]
EXCEEDED: Final[tuple[Exceeded, ...]] = ("refuse", "wait")

MAX_WAIT_SECONDS: Final = 30.0
"""How long a call waits at most where a quota does not say it."""

# Finer than the price of a token: the cheapest models cost some 10**-8 dollars for one.
PARTS_PER_USD: Final = 10**9
"""Money is counted in whole billionths of a dollar, so that stores add integers."""

MAX_PARTS: Final = 2**53 - 1
"""Above this, numbers in the scripts of Redis, which are doubles, are not exact."""

GRACE_SECONDS: Final = 30.0
"""How long a share is used where a quota does not say it: longer than a server takes to restart."""

UNIT_NAMES: Final[Mapping[Unit, str]] = {
    "usd": "USD",
    "model_calls": "model calls",
    "concurrency": "model calls at once",
}

NO_KEY: Final = Template("")


class Figures(NamedTuple):
    """How a count stands, in the unit in which people read it."""

    unit: str
    used: Number
    reserved: Number
    limit: Number
    left: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A budget over a time window, or of calls at once, shared by many processes."""

    name: str
    unit: Unit
    amount: int
    """In whole parts: tokens, calls, invocations, billionths of a dollar, or calls at once."""
    windows: Windows | UnboundedWindow
    key: Template = NO_KEY
    """Each value of the key has the whole amount for itself."""
    where: tuple[tuple[str, str], ...] = ()
    """Sources and globs that a model call must fit for the quota to apply."""
    action: Action | None = None
    """What is done when it is exceeded; `None` for what the agent's policy says."""
    reserve: Reserved = "worst_case"
    """What of a call is set aside before it goes out."""
    grace: float = GRACE_SECONDS
    """Seconds for which a worker that lost the store may use its share of what was left."""
    on_store_error: BackendError = "deny"
    """What is done while the store does not answer, and there is no share to use."""
    on_exceeded: Exceeded = "refuse"
    """Whether a call that finds too little left is refused at once, or waits."""
    max_wait: float = MAX_WAIT_SECONDS
    """Seconds for which it waits at most."""
    origin: str = field(default="", compare=False)
    """Line of the policy file that sets it, such as `limits.yaml:12`."""

    def count(self, key: Key, now: float) -> Count:
        """Name what is counted of a key at a time, in seconds since the epoch."""
        return Count(self.name, key.id, self.windows.at(now), self.unit, key.shown)

    def figures(self, standing: CountState) -> Figures:
        """Put how a count stands into the unit of the quota."""
        parts = (standing.used, standing.reserved, standing.limit, standing.remaining)
        return Figures(unit_name(self.unit), *(in_unit(self.unit, each) for each in parts))

    def __str__(self) -> str:
        """Say it in one line."""
        per = "" if isinstance(self.windows, UnboundedWindow) else f" per {self.windows.rule}"
        key = f" for each {self.key.text}" if self.key.text else ""
        where = "".join(f" where {source} is {glob}" for source, glob in self.where)
        settings = "".join(f"; {each}" for each in self._set())
        return in_words(self.unit, self.amount) + per + key + where + settings

    def _set(self) -> Iterator[str]:
        """Say what is not as it is where a policy file says nothing about it."""
        if self.action is not None:
            yield f"action {self.action}"
        if self.reserve != "worst_case":
            yield f"reserve {self.reserve}"
        # What is only observed keeps nobody waiting.
        if self.on_exceeded == "wait" and self.action != "observe":
            yield f"calls wait up to {self.max_wait:.15g} s"
        if self.grace != GRACE_SECONDS:
            yield f"grace {self.grace:.15g} s"
        if self.on_store_error != "deny":
            yield f"on_store_error {self.on_store_error}"


def too_small(quota: Quota) -> str | None:
    """Say that a quota is below what is set aside for a single call, where it is."""
    least = FIRST_OUTPUT if quota.reserve == "worst_case" else LEAST_EXPECTED
    if quota.unit != "tokens" or quota.amount >= least:
        return None
    return (
        f'quotas["{quota.name}"] is {quota.amount:,} tokens, less than the {least:,} reserved for '
        "a model without an output cap, so it admits one such call at a time. Raise it, or set "
        "max_tokens on the model."
    )


def parts_of_usd(amount: Decimal) -> int:
    """Return money as whole parts, rounded up, so that no call counts as cheaper than it was."""
    return int(EXACT.multiply(amount, PARTS_PER_USD).to_integral_value(ROUND_CEILING, EXACT))


def in_unit(unit: Unit, parts: int) -> Number:
    """Return an amount as people write it."""
    return EXACT.divide(parts, PARTS_PER_USD) if unit == "usd" else parts


def unit_name(unit: Unit) -> str:
    """Return the unit as it is written after a number."""
    return UNIT_NAMES.get(unit, unit)


def in_words(unit: Unit, parts: int) -> str:
    """Return an amount with its unit."""
    return f"{in_unit(unit, parts):{'f' if unit == 'usd' else 'd'}} {unit_name(unit)}"
