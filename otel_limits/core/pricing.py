"""Price lookup. Unknown prices are `None`, never 0 and never a guess."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from otel_limits.core.catalogue import (
    MODELS,
    PACKAGE,
    Catalogue,
    installed_version,
    is_disputed,
    price_of,
)
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.core.labels import best_match
from otel_limits.core.listings import canonical, is_local, vendor_by_id, vendor_of
from otel_limits.core.loops import fingerprint
from otel_limits.core.price import NO_QUOTE, Price, Quote
from otel_limits.core.regions import premium
from otel_limits.core.terms import AUTOMATIC, STANDARD, BillableCall
from otel_limits.core.usage import NO_COST, Usage
from otel_limits.vendors.vendor import LOCAL

if TYPE_CHECKING:
    from decimal import Decimal


POLICY: Final = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOverride:
    """An entry of the policy file: the price of some models, or that they run locally."""

    price: Price | None = None
    """`None` for models that run locally and cost nothing."""
    provider: str | None = None
    """The provider that it applies to; all if unset."""

    def holds_for(self, *names: str) -> bool:
        """Return whether it applies to a provider with these names."""
        if self.provider is None or self.provider in names:
            return True
        return canonical(self.provider).lower() in names


MISSING: Final = (
    "needs prices, and there are none. Run: pip install 'otel-limits[prices]' (Python 3.11 or "
    "newer), or give them in the policy file under models."
)
"""The message about a cost limit without any prices."""

NO_PRICE: Final = "no price is known for it"
DISPUTED_PRICE: Final = "two price lists disagree about it"
NO_TIER: Final = "the service tier is the vendor's choice, and its answer does not name it"
NO_OVERRIDES: Final[Mapping[str, PriceOverride]] = MappingProxyType({})


class Prices:
    """Prices from the policy file, then from the package `genai-prices`.

    A model ID is looked up in the policy first, where the most specific glob decides, then in the
    package. The package is imported on the first look-up there, and nothing is ever fetched; if the
    application makes it fetch newer prices, those are used. Thread-safe.

    Attributes:
        source: `policy`, `genai-prices`, `policy+genai-prices` or `none`.
    """

    def __init__(self, overrides: Mapping[str, PriceOverride | Price] = NO_OVERRIDES) -> None:
        """Create the look-up from a policy file's entries; a bare price is for all providers."""
        self._overrides = {
            glob: PriceOverride(price=each) if isinstance(each, Price) else each
            for glob, each in overrides.items()
        }
        self._override = functools.lru_cache(MODELS)(self._find_override)
        installed = installed_version()
        self._catalogue = Catalogue(installed) if installed else None
        named = {POLICY: self._overrides, PACKAGE: self._catalogue}
        self._policy_version = fingerprint(self._overrides)[:8] if self._overrides else ""
        self.source = "+".join(name for name, prices in named.items() if prices) or "none"

    @property
    def available(self) -> bool:
        """Whether any price can be known."""
        return self.source != "none"

    @property
    def version(self) -> str:
        """The versions of the sources, in the order of `source`."""
        package = self._catalogue.version if self._catalogue is not None else ""
        return "+".join(filter(None, (self._policy_version, package)))

    @suppress_errors("pricing")
    def import_package(self) -> None:
        """Import the package of the price list in this thread."""
        if self._catalogue is not None:
            self._catalogue.import_package()

    @suppress_errors("pricing")
    def load(self) -> None:
        """Load the list before the first look-up, which happens during a model call."""
        if self._catalogue is not None:
            # Any model will do: the first look-up compiles the list.
            self._catalogue.find("gpt-4o", "openai")

    def price(self, model: str, usage: Usage, when: datetime | None = None) -> Decimal | None:
        """Return the USD of one ordinary call of a model, from any vendor; `None` if unknown."""
        return self.quote(BillableCall(model=model, usage=usage), when).price

    def quote(self, call: BillableCall, when: datetime | None = None) -> Quote:
        """Return the price of one model call.

        Tiered prices depend on the input of a call, so calls are priced one by one.

        Args:
            call: The call, with all its pricing inputs.
            when: Time of the call, for prices that change; defaults to now. UTC if it has no zone.

        Returns:
            The exact amount and its source, or why there is none.
        """
        try:
            return self._quoted(call, when)
        except Exception as error:  # noqa: BLE001  errors must not reach the agent
            report_suppressed("pricing", error)
            return Quote(unknown=NO_PRICE)

    def _quoted(self, call: BillableCall, when: datetime | None) -> Quote:
        # The address takes precedence over the class: an OpenAI client may call any server.
        vendor = call.vendor or canonical(call.provider)
        override = self._override(call.model, vendor, call.provider)
        if (override is not None and override.price is None) or (
            override is None and is_local(call.model, vendor)
        ):
            return Quote(price=NO_COST, source=LOCAL)
        # After local models, which are free in any case, and before any price.
        if call.unknowns:
            return Quote(unknown="; ".join(call.unknowns))
        if override is not None and override.price is not None:
            # For every service tier: the author of the policy file knows the contract.
            return _quote_of(override.price, call, POLICY, self._policy_version)
        return self._by_list(call, vendor, when or datetime.now(timezone.utc))

    def _by_list(self, call: BillableCall, vendor: str, when: datetime) -> Quote:
        if self._catalogue is None:
            return Quote(unknown=NO_PRICE) if self._overrides else NO_QUOTE
        # The answer did not contain the tier, and tiers differ by a factor of 2 and more.
        if call.tier == AUTOMATIC:
            return Quote(unknown=NO_TIER)
        listed = self._catalogue.find(call.model, vendor)
        if listed is not None and is_disputed(listed, call.usage):
            return Quote(unknown=DISPUTED_PRICE)
        price = None if listed is None else price_of(listed, call, when)
        if listed is None or price is None:
            at = "" if call.tier == STANDARD else f" at the service tier {call.tier}"
            return Quote(unknown=NO_PRICE + at)
        # Last, because the premium applies on top of any tier.
        more = premium(listed.vendor, listed.info.id, call.region)
        if more is None:
            return Quote(unknown=f"{NO_PRICE} in {call.region}")
        return _quote_of(price.times(more), call, PACKAGE, self._catalogue.version)

    def _find_override(self, model: str, vendor: str, provider: str) -> PriceOverride | None:
        named = (provider, vendor, vendor_of(model, vendor), vendor_by_id(model))
        names = tuple(filter(None, named))
        held = [glob for glob, each in self._overrides.items() if each.holds_for(*names)]
        glob = best_match(held, model)
        return None if glob is None else self._overrides[glob]


def _quote_of(price: Price, call: BillableCall, source: str, version: str) -> Quote:
    amount = price.of(call.usage)
    if amount is None:
        return Quote(unknown=price.at(call.usage.input).missing_rate(call.usage))
    saved = price.saved_by_cache(call.usage)
    return Quote(price=amount, source=source, version=version, cache_saved=saved)
