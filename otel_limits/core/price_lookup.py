"""Price lookup. Unknown prices are `None`, never 0 and never a guess."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from otel_limits.core.catalogue import (
    MODELS,
    PACKAGE,
    Catalogue,
    PriceSteps,
    current_list,
    dearest_prices,
    disputed_factor,
    installed_version,
    price_of,
    price_steps,
)
from otel_limits.core.installing import install_command
from otel_limits.core.internal_errors import report_suppressed, suppress_errors
from otel_limits.core.labels import best_match, clean
from otel_limits.core.loops import fingerprint
from otel_limits.core.price import NO_QUOTE, Price, Quote, priced_with
from otel_limits.core.terms import (
    AUTOMATIC,
    SEARCHES,
    STANDARD,
    BillableCall,
    canonical,
    highest_premium,
    is_local,
    may_search,
    premium,
    region_of,
    search_fees,
    vendor_by_id,
    vendor_of,
)
from otel_limits.core.usage import EXACT, NO_COST, Usage
from otel_limits.vendors.records import LOCAL, vendors

if TYPE_CHECKING:
    from otel_limits.core.catalogue import CatalogEntry


POLICY: Final = "policy"
ANY: Final = "unknown"
"""The provider of a call that could be any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOverride:
    """An entry of the policy file: the price of some models, or where it is on the list.

    With neither, they run locally and cost nothing.
    """

    price: Price | None = None
    priced_as: str | None = None
    """A model on the price list, such as `azure/gpt-4o`, whose price applies unless `price` is
    set."""
    provider: str | None = None
    """The provider that it applies to; all if unset."""

    def holds_for(self, *names: str) -> bool:
        """Return whether it applies to a provider with these names."""
        if self.provider is None or self.provider in names:
            return True
        return canonical(self.provider).lower() in names


def missing_prices() -> str:
    """Return the message about a cost limit without any prices, after the name of the limit."""
    return (
        f"needs prices, and there are none. Run: {install_list()}, or give them in the policy file "
        "under models."
    )


def install_list() -> str:
    """Return the command that installs the price list, with the Pythons that can have it."""
    return f"{install_command('prices')} (Python 3.11 or newer)"


MAX_PRICE: Final = Decimal(2**63 - 1).scaleb(-12)
"""USD of one call that a ledger can store, in whole picodollars: about $9.2 million."""

NO_PRICE: Final = "no price is known for it"
TOO_HIGH: Final = f"its price is above {MAX_PRICE:,.0f} USD, the most that a ledger can store"
DISPUTED_PRICE: Final = "two price lists disagree about it"
NO_VENDOR: Final = (
    "its class {!r} and its address identify no vendor (`as: {}/{}` in the policy file names one)"
)
NO_LIST: Final = "`as: {}` in the policy file needs the price list. Run: {}"
NO_CACHE_RATE: Final = "no price of its cached tokens is known"
NO_SEARCH_SIZE: Final = "its fee depends on the size of the search context, which is unreported"
NO_TIER: Final = "the service tier is the vendor's choice, and its answer does not name it"
NO_OVERRIDES: Final[Mapping[str, PriceOverride]] = MappingProxyType({})


LONGEST_REASON: Final = 300
"""Characters of a reason in a halt: it contains names from outside."""


def because_of(quote: Quote) -> str:
    """Return why a price is unknown, as part of a sentence; empty if none is listed."""
    reason = quote.unknown if quote.unknown not in (None, NO_PRICE) else ""
    return reason and f", because {clean(reason, LONGEST_REASON)}"


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
        # A reference to the list is not a price.
        own = [each for each in self._overrides.values() if each.price or not each.priced_as]
        named = {POLICY: own, PACKAGE: self._catalogue}
        self._policy_version = fingerprint(self._overrides)[:8] if self._overrides else ""
        self.source = "+".join(name for name, prices in named.items() if prices) or "none"

    @property
    def has_list(self) -> bool:
        """Whether the price list is installed."""
        return self._catalogue is not None

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
            current_list()

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
            quote = self._computed(call, when)
            if call.stated is not None:
                quote = priced_with(quote, call.stated, MAX_PRICE)
            # Nothing can store such a price, and an invocation must cost what its calls cost.
            return Quote(unknown=TOO_HIGH) if (quote.price or 0) > MAX_PRICE else quote
        except Exception as error:  # noqa: BLE001  errors must not reach the agent
            report_suppressed("pricing", error)
            return Quote(unknown=NO_PRICE)

    def _computed(self, call: BillableCall, when: datetime | None) -> Quote:
        """Return the price by the policy file or the list."""
        # The address takes precedence over the class: an OpenAI client may call any server.
        vendor = call.vendor or canonical(call.provider)
        override = self._override(call.model, vendor, call.provider)
        own = None if override is None else override.price
        priced_as = None if override is None or own is not None else override.priced_as
        if priced_as is not None:
            if self._catalogue is None:
                return Quote(unknown=NO_LIST.format(priced_as, install_list()))
            call = self._as_listed(call, priced_as)
            vendor = call.vendor or canonical(call.provider)
        elif own is None and (override is not None or is_local(call.model, vendor)):
            return Quote(price=NO_COST, source=LOCAL)
        when = when or datetime.fromtimestamp(time.time(), timezone.utc)
        # After local models, which are free in any case, and before any price.
        if call.unknowns:
            quote = Quote(unknown="; ".join(call.unknowns))
        elif own is not None:
            # For every service tier: the author of the policy file knows the contract.
            quote = _quote_of(own, call, POLICY, self._policy_version)
        else:
            quote = self._by_list(call, vendor, when)
        if quote.unknown is None:
            return quote
        return replace(quote, at_most=self._upper_bound(call, own, vendor, when))

    def _as_listed(self, call: BillableCall, name: str) -> BillableCall:
        """Return a call as one of the listed model that it is priced as."""
        listed = self.find(name)
        # Such IDs are those of one vendor, so they need no prefix.
        is_named = listed is not None and ("/" in name or vendor_by_id(name) is not None)
        vendor = listed.vendor if listed is not None and is_named else call.vendor
        searches = call.usage.web_searches is None and may_search(name, vendor)
        return replace(
            call,
            model=name,
            vendor=vendor,
            own_class=None if is_named else call.own_class,
            region=call.region or region_of(name),
            unknowns=(*call.unknowns, SEARCHES) if searches else call.unknowns,
            dearest=None if searches else call.dearest,
        )

    def find(self, name: str, vendor: str = ANY) -> CatalogEntry | None:
        """Return a model on the list; without a vendor, by its prefix or from any vendor."""
        return None if self._catalogue is None else self._catalogue.find(name, vendor)

    def steps(self) -> PriceSteps | None:
        """Return where prices change; `None` if the list does not show it."""
        own = [each.price for each in self._overrides.values() if each.price is not None]
        return price_steps(own, has_list=self.has_list)

    def _by_list(self, call: BillableCall, vendor: str, when: datetime) -> Quote:
        if self._catalogue is None:
            return Quote(unknown=NO_PRICE) if self._overrides else NO_QUOTE
        listed = self._catalogue.find(call.model, vendor)
        if (doubt := _doubt_about(listed, call)) is not None:
            return Quote(unknown=doubt)
        price = None if listed is None else price_of(listed, call, when)
        if listed is None or price is None:
            at = "" if call.tier == STANDARD else f" at the service tier {call.tier}"
            return Quote(unknown=NO_PRICE + at)
        if (missing := _missing_from(listed, price, call)) is not None:
            return Quote(unknown=missing)
        if (fees := search_fees(listed.info.id, listed.vendor)) is not None:
            price = replace(price, per_request=fees[str(call.search_size)])
        # Last, because the premium applies on top of any tier.
        more = premium(listed.vendor, listed.info.id, call.region)
        if more is None:
            return Quote(unknown=f"{NO_PRICE} in {call.region}")
        return _quote_of(price.times(more), call, PACKAGE, self._catalogue.version)

    def _upper_bound(
        self, call: BillableCall, own: Price | None, vendor: str, when: datetime
    ) -> Decimal | None:
        """Return the most that a call can cost although its price is unknown, if that is known."""
        usage = call.dearest if call.unknowns else call.usage
        if usage is None:
            return None
        if own is not None:
            return own.at_most(usage, call.unplaced)
        listed = self.find(call.model, vendor)
        if listed is None or call.own_class is not None:
            return None
        left_out = 0 if call.unplaced is None else call.unplaced.more_input
        longest = replace(usage, input=usage.input + left_out)
        dearer = disputed_factor(listed, longest)
        if dearer is not None:  # maybe about the discount: at most, nothing of it is discounted
            usage, longest = (replace(each, cache_read=0) for each in (usage, longest))
        more = premium(listed.vendor, listed.info.id, call.region)
        if more is None and call.region is not None:
            more = highest_premium(listed.vendor, call.region)
        if more is None:
            return None
        factor = EXACT.multiply(more, dearer or Decimal(1))
        prices = dearest_prices(listed, replace(call, usage=longest), when)
        amounts = [
            None
            if each is None
            else _with_highest_cache_rates(listed.vendor, each, usage)
            .times(factor)
            .at_most(usage, call.unplaced)
            for each in prices
        ]
        known = [each for each in amounts if each is not None]
        return max(known) if len(known) == len(amounts) else None

    def _find_override(self, model: str, vendor: str, provider: str) -> PriceOverride | None:
        named = (provider, vendor, vendor_of(model, vendor), vendor_by_id(model))
        names = tuple(filter(None, named))
        held = [glob for glob, each in self._overrides.items() if each.holds_for(*names)]
        glob = best_match(held, model)
        return None if glob is None else self._overrides[glob]


def _doubt_about(listed: CatalogEntry | None, call: BillableCall) -> str | None:
    """Return why the price on the list may not be that of a call."""
    if call.tier == AUTOMATIC:
        # The answer did not contain the tier, and tiers differ by a factor of 2 and more.
        return NO_TIER
    if listed is None:
        return None
    if call.own_class is not None:
        return NO_VENDOR.format(call.own_class, listed.vendor, listed.info.id)
    return None if disputed_factor(listed, call.usage) is None else DISPUTED_PRICE


def _missing_from(listed: CatalogEntry, price: Price, call: BillableCall) -> str | None:
    """Return why a price lacks a part that the vendor bills, if it does."""
    fees = search_fees(listed.info.id, listed.vendor)
    if fees is not None and call.search_size not in fees:
        return NO_SEARCH_SIZE
    return NO_CACHE_RATE if _has_hidden_rate(listed.vendor, price, call.usage) else None


def _has_hidden_rate(vendor: str, price: Price, usage: Usage) -> bool:
    """Return whether cached tokens have a rate at a vendor that the list leaves out."""
    known = vendors().get(vendor)
    is_left_out = known is not None and known.own_cache_rates and price.cache_read is None
    return is_left_out and usage.cache_read + usage.cache_write > 0


def _with_highest_cache_rates(vendor: str, price: Price, usage: Usage) -> Price:
    """Return a price with the highest rate of written tokens, if it leaves that out."""
    if not _has_hidden_rate(vendor, price, usage) or price.cache_write is not None:
        return price
    return replace(price, cache_write=2 * price.input)


def _quote_of(price: Price, call: BillableCall, source: str, version: str) -> Quote:
    rates, amount = price.at(call.usage.input), price.of(call.usage)
    if amount is None:
        return Quote(unknown=rates.missing_rate(call.usage))
    saved = price.saved_by_cache(call.usage)
    return Quote(price=amount, source=source, version=version, cache_saved=saved, rates=rates)
