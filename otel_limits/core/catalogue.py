"""The prices bundled with the package `genai-prices`, or fetched by the application."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging  # noqa: F401  before a fork, our lock comes before that of logging
import os
import re
import sys
import threading
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.listings import ModelListing, listing_of
from otel_limits.core.price import Price
from otel_limits.core.terms import AUTOMATIC, DISCOUNTED, STANDARD, BillableCall
from otel_limits.core.usage import EXACT, NO_COST, Usage
from otel_limits.vendors.price_lists import DISPUTED, LATEST, STAND_INS
from otel_limits.vendors.records import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, ModelPrice, TieredPrices

PACKAGE: Final = "genai-prices"
LIST: Final = "genai_prices.data"
"""The module that builds the list: 16,000 objects."""

MODELS: Final = 1_000
"""Cached models; names can come from outside."""

LONG_PROMPT: Final = 200_000
"""Input tokens above which vendors have another price, if they have one."""

PER_THOUSAND: Final = -3

LATEST_NAME: Final = "-latest"
FINE_TUNED: Final = "ft:"
"""Followed by the model, and by names that the customer chose."""
AREA: Final = re.compile(r"^[a-z-]+\.(?=[a-z0-9-]+\.)")
"""Prefix of an inference profile of Bedrock."""
VERSION: Final = re.compile(
    r"(?:[-@](?:\d{8}|\d{4}-\d\d-\d\d|\d\d-\d{4}|\d\d-\d\d|\d{4}|\d{3})|-preview|[-:]v\d+(?::\d+)?"
    r"|:\d+|@default)$"
)
"""Ends of names: dates, Google's three digits, Bedrock's versions."""

PARTS: Final = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cache_read": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "cache_write_1h": "cache_write_1h_mtok",
    "input_audio": "input_audio_mtok",
    "output_audio": "output_audio_mtok",
}
"""Rates of a price, and their names on the list."""

UNREPORTED_RATES: Final = (
    "output_reasoning_mtok",
    "output_citation_mtok",
    "output_image_mtok",
    "output_video_mtok",
)
"""Rates of output parts that no framework reports separately: with one, the price is unknown."""

VARIANTS: Final = ("service_tier", "processing", "speed")
"""The list's names for a tier, depending on how it is requested."""

IMPORTS: Final = threading.RLock()
"""Held while the package is imported: a process forked during the import would wait forever for it
to finish, in a thread that does not exist there. The fork waits instead."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=IMPORTS.acquire,
        after_in_parent=IMPORTS.release,
        after_in_child=IMPORTS.release,
    )


class CatalogEntry(NamedTuple):
    """A model on the list."""

    info: ModelInfo
    vendor: str
    is_own: bool
    """False if the vendor publishes no price for it, so the maker's is used."""


class Catalogue:
    """The price list.

    Entries are cached, but not the whole list, which every full garbage collection of the
    application would traverse. The code that builds it stays in memory (1.5 MB, ignored by the
    collector); running it takes at least 7 ms, once per model.
    """

    def __init__(self, installed: str) -> None:
        """Create the catalogue of the `installed` version, without loading it."""
        self._installed = installed
        self._found: tuple[DataSnapshot | None, dict[tuple[str, str], CatalogEntry | None]] = (
            None,
            {},
        )
        """The list that the application has fetched, if any, and the look-ups since."""
        self._package: ModuleType | None = None

    @property
    def version(self) -> str:
        """Version of the package, and of a newer list fetched by the application."""
        fetched = self._found[0]
        if fetched is None or not fetched.from_auto_update:
            return self._installed
        return f"{self._installed}@{fetched.timestamp:%Y-%m-%dT%H:%M:%S}"

    def import_package(self) -> None:
        """Import the package, but not yet its list."""
        with IMPORTS:
            from genai_prices import data_snapshot

            self._package = data_snapshot

    def find(self, model: str, provider: str) -> CatalogEntry | None:
        """Return the package's entry for a provider's model, looked up once per list."""
        fetched, found = self._found
        # List and look-ups are one tuple, read in one step: another thread may replace both, and an
        # old price must not be returned for a new list.
        key = (model, provider)
        if key in found and fetched is self._fetched():
            return found[key]
        with IMPORTS:
            from genai_prices import data_snapshot

            self._package = data_snapshot
            fetched, found = self._found
            # The previous lock holder may have looked up the same model. A newer list invalidates
            # all entries; a full cache is cleared as a whole, because IDs from outside are
            # unbounded.
            if fetched is not self._fetched() or len(found) >= MODELS:
                fetched, found = self._found = (self._fetched(), {})
            if key not in found:
                found[key] = _find(model, provider, fetched)
            return found[key]

    def _fetched(self) -> DataSnapshot | None:
        """Return the list that the application has set instead of the package's own."""
        # the public function builds the package's own list if there is none
        return None if self._package is None else self._package._custom_snapshot  # noqa: SLF001


def installed_version() -> str | None:
    """Return the version of the package, without importing it; `None` if it cannot be imported."""
    if importlib.util.find_spec(PACKAGE.replace("-", "_")) is None:
        return None
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None  # in a frozen application, where its import fails, too


def bundled_catalog() -> DataSnapshot:
    """Return the package's list, to be freed by the caller.

    The package's own copy stays in memory once loaded.
    """
    from genai_prices.data_snapshot import DataSnapshot, get_snapshot

    # If the application has imported the list anyway, a second copy would only double it.
    code = None if LIST in sys.modules else _code_of_list()
    if code is None:
        return get_snapshot()
    names: dict[str, Any] = {"__name__": LIST, "__package__": LIST.partition(".")[0]}
    exec(code, names)  # noqa: S102  what an import of the module runs
    return DataSnapshot(providers=names["providers"], from_auto_update=False)


@functools.cache
def _code_of_list() -> CodeType | None:
    """Return the code of the list's module; compiled once, since there may be no bytecode."""
    spec = importlib.util.find_spec(LIST)
    get_code = getattr(spec and spec.loader, "get_code", None)
    code: CodeType | None = get_code(LIST) if get_code is not None else None
    return code


def price_of(listed: CatalogEntry, call: BillableCall, when: datetime) -> Price | None:
    """Return the price of a model at a time and for an input size, if the list has all of it."""
    prices = _prices_at(listed, call.tier, when)
    if prices is None:
        return None
    parts = vars(prices)
    prompt, usage = call.usage.input, call.usage
    rates: dict[str, Any] = {
        name: _tier(parts.get(listed_as), prompt) for name, listed_as in PARTS.items()
    }
    fresh, output = rates.pop("input"), rates.pop("output")
    silent = (fresh is None and usage.input) or (output is None and usage.output)
    if silent or fresh is output is None:
        return None  # a missing price is not 0
    if any(parts.get(part) is not None for part in UNREPORTED_RATES):
        return None
    vendor = BY_NAME.get(listed.vendor)
    # Others omit the price of audio, for example for gpt-4o-audio-preview.
    if vendor is not None and vendor.audio_as_text:
        rates["input_audio"] = fresh if rates["input_audio"] is None else rates["input_audio"]
    requests, searches = (
        _tier(parts.get(name), prompt) for name in ("requests_kcount", "web_searches_kcount")
    )
    return Price(
        input=fresh or NO_COST,
        output=output or NO_COST,
        per_request=(requests or NO_COST).scaleb(PER_THOUSAND, EXACT),
        web_search=None if searches is None else searches.scaleb(PER_THOUSAND, EXACT),
        **rates,
    )


def dearest_prices(listed: CatalogEntry, call: BillableCall, when: datetime) -> list[Price | None]:
    """Return the prices of which one is an upper bound; with `None`, there is no bound."""
    tiers = [call.tier]
    if call.tier == AUTOMATIC:
        conditions = [each.when for each in listed.info.price_variants or ()]
        tiers = [STANDARD, *(on[name] for on in conditions for name in on if name in VARIANTS)]
    prices = [price_of(listed, replace(call, tier=each), when) for each in tiers]
    if call.tier in DISCOUNTED and prices == [None]:
        return [price_of(listed, replace(call, tier=STANDARD), when)]
    return prices


def is_disputed(listed: CatalogEntry, usage: Usage) -> bool:
    """Return whether two price lists disagree on the price of a usage, for no known reason."""
    about = DISPUTED.get(listed.vendor, {}).get(listed.info.id, frozenset())
    parts = {
        "all": True,
        "cache_read": usage.cache_read > 0,
        "cache_write": usage.cache_write > 0,
        "long": usage.input > LONG_PROMPT,
    }
    return any(parts[part] for part in about)


def _prices_at(listed: CatalogEntry, tier: str, when: datetime) -> ModelPrice | None:
    """Return the prices of a tier; `None` if they are not on the list."""
    if tier == STANDARD:
        return listed.info.get_prices(when)
    if not listed.is_own:  # the maker's tiers are not the vendor's
        return None
    for variant in listed.info.price_variants or ():
        constraint = variant.constraint
        is_active = constraint is None or constraint.active(when)
        # A variant with further conditions, such as a region, would be a guess here.
        named = {name: tier for name in variant.when if name in VARIANTS}
        if is_active and named and variant.when == named:
            return listed.info.get_prices(when, named)
    return None


def _find(model: str, provider: str, fetched: DataSnapshot | None) -> CatalogEntry | None:
    """Return the entry for a model, from the given list or the package's."""
    prices = bundled_catalog() if fetched is None else fetched
    known = {each.id for each in prices.providers}
    listing = listing_of(model, provider, known=provider in known)
    return None if listing is None else _entry_of(listing, prices)


def is_sold(name: str) -> bool:
    """Return whether any vendor on the package's list has a model of this name."""
    prices = bundled_catalog()
    listings = (ModelListing(each.id, name) for each in prices.providers)
    return any(_entry_of(listing, prices) is not None for listing in listings)


def nearest_listed(name: str) -> list[str]:
    """Return the most similar names on the package's list, with their vendors if `name` has one."""
    import difflib  # not needed by most processes

    models = [(each.id, model.id) for each in bundled_catalog().providers for model in each.models]
    models += [(vendor, model) for vendor, ids in STAND_INS.items() for model in ids]
    known = {f"{vendor}/{model}" if "/" in name else model for vendor, model in models}
    return difflib.get_close_matches(name, sorted(known), n=3)


def as_listed(model: str, provider: str) -> CatalogEntry | None:
    """Return what the package's own look-up finds for a model, however loosely it matches."""
    listing = listing_of(model, provider, known=True)
    return None if listing is None else _loose_entry_of(listing, bundled_catalog())


def _entry_of(listing: ModelListing, prices: DataSnapshot) -> CatalogEntry | None:
    """Return the entry for a model, if the list contains the model itself."""
    entry = _loose_entry_of(listing, prices)
    if entry is None or not is_of_family(listing.reference, entry.info):
        return None
    # Names of the current model move; the tables are dated.
    if listing.reference.endswith(LATEST_NAME):
        is_known = listing.reference in LATEST.get(entry.vendor, ())
    else:
        is_known = entry.is_own or entry.info.id in STAND_INS.get(entry.vendor, ())
    return entry if is_known else None


def is_of_family(reference: str, info: ModelInfo) -> bool:
    """Return whether a name is that of a listed model, or of a dated version of it.

    The list matches prefixes, so the next model of a series would get the price of an earlier one.
    """
    strings = [(kind, text.lower()) for kind, text in _strings_in(info.match)]
    reference = reference.lower()
    named = {info.id.lower(), *(text for kind, text in strings if kind != "regex")}
    if reference in named or reference.startswith(FINE_TUNED):
        return True
    families = set(map(_family, named))
    bare = AREA.sub("", reference)
    forms = (reference, bare, *(f"{area}.{bare}" for area in ("regional", "global")))
    return any(_family(form) in families for form in forms)


def _family(name: str) -> str:
    """Return a model's name without dates and versions."""
    while found := VERSION.search(name):
        name = name[: found.start()]
    return name


def _strings_in(clause: object) -> Iterator[tuple[str, str]]:
    """Yield the texts that a clause of the list compares with, and how."""
    for kind in ("equals", "starts_with", "contains", "ends_with", "regex"):
        if isinstance(text := getattr(clause, kind, None), str):
            yield kind, text
    for each in getattr(clause, "or_", None) or getattr(clause, "and_", None) or ():
        yield from _strings_in(each)


def _loose_entry_of(listing: ModelListing, prices: DataSnapshot) -> CatalogEntry | None:
    vendor, reference = listing
    try:
        found, info = prices.find_provider_model(reference, None, vendor, None)
    except LookupError:
        return None
    # A search without a vendor may find a similar name elsewhere: only the named vendor counts.
    if vendor not in (None, found.id):
        return None
    return CatalogEntry(info, found.id, is_own=any(info is each for each in found.models))


def _tier(rate: Decimal | TieredPrices | None, prompt: int) -> Decimal | None:
    """Return the rate of the tier that the input of the whole call reaches."""
    if rate is None or isinstance(rate, Decimal):
        return rate
    # The tiers are in ascending order, so the last one reached is the highest.
    reached = [tier.price for tier in rate.tiers if prompt > tier.start]
    return reached[-1] if reached else rate.base
