"""The prices bundled with `genai-prices`, or fetched by the application, and their dates."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import date, datetime, timezone
from datetime import time as time_of_day
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.price import Price
from otel_limits.core.terms import (
    AUTOMATIC,
    DISCOUNTED,
    STANDARD,
    BillableCall,
    ModelListing,
    listing_of,
)
from otel_limits.core.usage import EXACT, NO_COST, Usage
from otel_limits.vendors.facts import LOADING, compared_prices
from otel_limits.vendors.records import vendors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, ModelPrice, TieredPrices


PACKAGE: Final = "genai-prices"
UPGRADE: Final = f"pip install --upgrade {PACKAGE}"
LIST: Final = "genai_prices.data"
"""The module that builds the list."""

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
VERSION_END: Final = re.compile(
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


class CatalogEntry(NamedTuple):
    """A model on the list."""

    info: ModelInfo
    vendor: str
    is_own: bool
    """False if the vendor publishes no price for it, so the maker's is used."""


class Catalogue:
    """The price list, and the models that were looked up on it.

    The package's own look-ups have no bound, but model IDs can come from outside.
    """

    def __init__(self, installed: str) -> None:
        """Create the catalogue of the `installed` version, without loading it."""
        self._installed = installed
        self._found: tuple[DataSnapshot | None, dict[tuple[str, str], CatalogEntry | None]] = (
            None,
            {},
        )
        """The list of the last look-up, and the look-ups on it."""

    @property
    def version(self) -> str:
        """Version of the package, and of a newer list fetched by the application."""
        used = self._found[0]
        if used is None or not used.from_auto_update:
            return self._installed
        return f"{self._installed}@{used.timestamp:%Y-%m-%dT%H:%M:%S}"

    def import_package(self) -> None:
        """Import the package, but not yet its list."""
        with LOADING:
            import genai_prices  # noqa: F401

    def find(self, model: str, provider: str) -> CatalogEntry | None:
        """Return the package's entry for a provider's model, looked up once per list."""
        current, key = current_list(), (model, provider)
        # List and look-ups are one tuple, read in one step: another thread may replace both, and an
        # old price must not be returned for a new list.
        used, found = self._found
        # A full cache is replaced as a whole.
        if used is not current or (len(found) >= MODELS and key not in found):
            found = {}
            self._found = (current, found)
        if key not in found:
            found[key] = _find(model, provider, current)
        return found[key]


def installed_version() -> str | None:
    """Return the version of the package, without importing it; `None` if it cannot be imported."""
    if importlib.util.find_spec(PACKAGE.replace("-", "_")) is None:
        return None
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None  # in a frozen application, where its import fails, too


def current_list() -> DataSnapshot:
    """Return the package's list, or a newer one that the application has set."""
    with LOADING:
        from genai_prices.data_snapshot import get_snapshot

        return get_snapshot()


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
    vendor = vendors().get(listed.vendor)
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


def disputed_factor(listed: CatalogEntry, usage: Usage) -> Decimal | None:
    """Return how many times our price the second list's can be, where they disagree: 1 or more.

    `None` if both agree on the price of the usage, or disagree for a known reason. The factor is
    that of the rates that differ most; for cache reads, of their rate and our uncached one.
    """
    about = compared_prices().disputed.get(listed.vendor, {}).get(listed.info.id, {})
    parts = {
        "all": True,
        "cache_read": usage.cache_read > 0,
        "cache_write": usage.cache_write > 0,
        "long": usage.input > LONG_PROMPT,
    }
    return max((factor for part, factor in about.items() if parts[part]), default=None)


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


def _find(model: str, provider: str, prices: DataSnapshot) -> CatalogEntry | None:
    known = any(each.id == provider for each in prices.providers)
    listing = listing_of(model, provider, known=known)
    if listing is None:
        return None
    # A copy, whose own look-ups are freed.
    return _entry_of(listing, type(prices)(prices.providers, from_auto_update=False))


def is_sold(name: str) -> bool:
    """Return whether any vendor on the list has a model of this name."""
    prices = current_list()
    listings = (ModelListing(each.id, name) for each in prices.providers)
    return any(_entry_of(listing, prices) is not None for listing in listings)


def nearest_listed(name: str) -> list[str]:
    """Return the most similar names on the list, with their vendors if `name` has one."""
    import difflib  # not needed by most processes

    models = [(each.id, model.id) for each in current_list().providers for model in each.models]
    models += [
        (vendor, model) for vendor, ids in compared_prices().stand_ins.items() for model in ids
    ]
    known = {f"{vendor}/{model}" if "/" in name else model for vendor, model in models}
    return difflib.get_close_matches(name, sorted(known), n=3)


def _entry_of(listing: ModelListing, prices: DataSnapshot) -> CatalogEntry | None:
    """Return the entry for a model, if the list contains the model itself."""
    entry = _loose_entry_of(listing, prices)
    if entry is None or not is_of_family(listing.reference, entry.info):
        return None
    compared = compared_prices()
    # Names of the current model move; the comparison is dated.
    if listing.reference.endswith(LATEST_NAME):
        is_known = listing.reference in compared.latest.get(entry.vendor, ())
    else:
        is_known = entry.is_own or entry.info.id in compared.stand_ins.get(entry.vendor, ())
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
    while found := VERSION_END.search(name):
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


# --- date of the price list -----------------------------------------------------------------------

RELEASED: Final[Mapping[str, date]] = {
    "0.2.0": date(2026, 10, 29),
    "0.2.1": date(2026, 10, 30),
    "0.2.2": date(2026, 11, 10),
    "0.2.3": date(2026, 11, 10),
}
"""https://pypi.org/project/genai-prices/#history, looked up on 2026-11-26. Later releases have the
newest date on their list."""

PRICE_CHANGE: Final = re.compile(r"start_date=datetime\.date\((\d+), (\d+), (\d+)\)")
"""The start of a price, in the source of the list."""

OLD_DAYS: Final = 60
"""Days after which a list is reported as old: vendors release models every few weeks."""


def today() -> date:
    """Return the date in UTC."""
    return datetime.fromtimestamp(time.time(), timezone.utc).date()


def list_in_use() -> str | None:
    """Name the installed price list with its date; `None` without one."""
    version = installed_version()
    if version is None:
        return None
    listed = list_date(version)
    return f"{PACKAGE} {version}" + (f" of {listed}" if listed is not None else "")


def old_list() -> str | None:
    """Return a warning if the installed price list is old."""
    version = installed_version()
    listed = None if version is None else list_date(version)
    days = 0 if listed is None else (today() - listed).days
    if days < OLD_DAYS:
        return None
    return (
        f"The price list {PACKAGE} {version} of {listed} is {days} days old, so prices of newer "
        f"models are unknown, and others may have changed. Run: {UPGRADE}"
    )


def list_date(version: str) -> date | None:
    """Return the date of a release, or the newest date on its list that is not in the future."""
    if version in RELEASED:
        return RELEASED[version]
    # As text: an import of the package would take longer, and more memory, than most commands.
    source = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(LIST.replace(".", "/"))))
    try:
        text = source.with_suffix(".py").read_text(encoding="utf-8")
    except OSError:
        return None  # in a frozen application
    dates = (date(*map(int, found)) for found in set(PRICE_CHANGE.findall(text)))
    return max((each for each in dates if each <= today()), default=None)


# --- steps of prices ------------------------------------------------------------------------------
# Between two steps, calls with the same terms have the same rates.


class PriceSteps(NamedTuple):
    """All steps of some prices, each in ascending order."""

    prompts: list[int]
    """Input tokens of a call above which rates change."""
    dates: list[date]
    """Days in UTC from which on rates change."""
    times: list[time_of_day]
    """Times of day in UTC from which on rates change."""


def price_steps(own: Iterable[Price], *, has_list: bool) -> PriceSteps | None:
    """Return the steps of a policy file's prices and of the package's list.

    `None` if the list has a condition of another kind than dates and times of day.
    """
    prompts = {LONG_PROMPT, *(tier.above for price in own for tier in price.tiers)}
    dates: set[date] = set()
    times: set[time_of_day] = set()
    providers = current_list().providers if has_list else []
    for model in (model for provider in providers for model in provider.models):
        listed = model.prices if isinstance(model.prices, list) else []
        conditional = [*listed, *(model.price_variants or ())]
        prices = [each.prices for each in conditional]
        if not isinstance(model.prices, list):
            prices.append(model.prices)
        for rate in (rate for each in prices for rate in vars(each).values()):
            prompts.update(tier.start for tier in getattr(rate, "tiers", ()))
        for condition in (each.constraint for each in conditional):
            match type(condition).__name__:
                case "NoneType":
                    pass
                case "StartDateConstraint":
                    dates.add(condition.start_date)
                case "TimeOfDateConstraint":
                    times.update({_in_utc(condition.start_time), _in_utc(condition.end_time)})
                case _:
                    return None
    return PriceSteps(sorted(prompts), sorted(dates), sorted(times))


def _in_utc(moment: time_of_day) -> time_of_day:
    """Return a time of day in UTC; without a zone, it already is."""
    if moment.tzinfo is None:
        return moment
    return datetime.combine(date(1970, 1, 1), moment).astimezone(timezone.utc).time()
