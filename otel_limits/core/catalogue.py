"""The prices that the package `genai-prices` brings along, or the application has fetched."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging  # noqa: F401  before a fork it is to wait after us: what is imported makes loggers
import os
import sys
import threading
from datetime import datetime
from decimal import Decimal
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_limits.core.price import Price
from otel_limits.core.terms import STANDARD, BillableCall
from otel_limits.core.usage import EXACT, NO_COST
from otel_limits.core.vendors import ModelListing, listing_of

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, ModelPrice, TieredPrices

PACKAGE: Final = "genai-prices"
LIST: Final = "genai_prices.data"
"""The module that makes the list: 16,000 objects."""

MODELS: Final = 1_000
"""Models that are remembered; names can come from outside."""

PER_THOUSAND: Final = -3

PARTS: Final = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cache_read": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "cache_write_1h": "cache_write_1h_mtok",
    "input_audio": "input_audio_mtok",
    "output_audio": "output_audio_mtok",
}
"""Parts of a price, and what the list calls them."""

UNTOLD: Final = (
    "output_reasoning_mtok",
    "output_citation_mtok",
    "output_image_mtok",
    "output_video_mtok",
)
"""Prices of parts of the output that no framework tells apart: such a price stays unknown."""

VARIANTS: Final = ("service_tier", "processing", "speed")
"""What the list calls a tier, by how a request asks for it."""

ONE_PRICE_FOR_ALL: Final = frozenset({"google"})
"""Sellers whose price of audio is that of text unless they name another one:
https://ai.google.dev/gemini-api/docs/pricing. Others leave it out, such as for
gpt-4o-audio-preview."""

IMPORTS: Final = threading.RLock()
"""Held while the package is imported: a process that forked meanwhile would wait for ever for the
import to end, in a thread that it does not have. A fork waits instead."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=IMPORTS.acquire,
        after_in_parent=IMPORTS.release,
        after_in_child=IMPORTS.release,
    )


class CatalogEntry(NamedTuple):
    """A model of the list."""

    info: ModelInfo
    seller: str
    is_own: bool
    """False where the seller has no list of its own for it, and the maker's prices stand in."""


class Catalogue:
    """The list of prices.

    What the package knows of a model is kept, its list is not: it would be gone through in every
    full garbage collection of the application. What stays is the code that makes it (1.5 MB, which
    no collection looks at); to run that takes 7 ms and more, once for each model.
    """

    def __init__(self, installed: str) -> None:
        """Load nothing yet, of the version that is `installed`."""
        self._installed = installed
        self._found: tuple[DataSnapshot | None, dict[tuple[str, str], CatalogEntry | None]] = (
            None,
            {},
        )
        """The list that the application has fetched, if any, and what was looked up since."""
        self._package: ModuleType | None = None

    @property
    def version(self) -> str:
        """Version of the package, and of the newer list that the application has fetched."""
        fetched = self._found[0]
        if fetched is None or not fetched.from_auto_update:
            return self._installed
        return f"{self._installed}@{fetched.timestamp:%Y-%m-%dT%H:%M:%S}"

    def find(self, model: str, provider: str) -> CatalogEntry | None:
        """What the package knows of a model of a provider, looked up once per price list."""
        fetched, found = self._found
        # The list and what was found in it are one tuple, read in one step: another thread may
        # replace both while this one looks, and an old price must not be taken for one of a new
        # list.
        key = (model, provider)
        if key in found and fetched is self._fetched():
            return found[key]
        with IMPORTS:
            from genai_prices import data_snapshot

            self._package = data_snapshot
            fetched, found = self._found
            # Whoever had the lock before may have looked up the same model. A newer list voids all
            # answers of the older one; a full memory is emptied as a whole, as ids from outside
            # have no end.
            if fetched is not self._fetched() or len(found) >= MODELS:
                fetched, found = self._found = (self._fetched(), {})
            if key not in found:
                found[key] = _find(model, provider, fetched)
            return found[key]

    def _fetched(self) -> DataSnapshot | None:
        """Return the list that the application has put in the place of the package's own."""
        # the public way to ask for it makes the package's own where there is none
        return None if self._package is None else self._package._custom_snapshot  # noqa: SLF001


def installed_version() -> str | None:
    """Version of the package, without importing it."""
    if importlib.util.find_spec(PACKAGE.replace("-", "_")) is None:
        return None
    return importlib.metadata.version(PACKAGE)


def bundled_catalog() -> DataSnapshot:
    """Return the list that the package brings along, for as long as the caller keeps it.

    That of the package itself is there for good once anybody asked for it.
    """
    from genai_prices.data_snapshot import DataSnapshot, get_snapshot

    # Where the application has imported the list anyway, a second one would only double it.
    code = None if LIST in sys.modules else _code_of_list()
    if code is None:
        return get_snapshot()
    names: dict[str, Any] = {"__name__": LIST, "__package__": LIST.partition(".")[0]}
    exec(code, names)  # noqa: S102  it is what an import of the module runs
    return DataSnapshot(providers=names["providers"], from_auto_update=False)


@functools.cache
def _code_of_list() -> CodeType | None:
    """Return what an import of the list runs; compiled once, as bytecode may not be on the disk."""
    spec = importlib.util.find_spec(LIST)
    get_code = getattr(spec and spec.loader, "get_code", None)
    code: CodeType | None = get_code(LIST) if get_code is not None else None
    return code


def price_of(listed: CatalogEntry, sale: BillableCall, when: datetime) -> Price | None:
    """What a model costs at this time and with this much input, if its list says all of it."""
    prices = _prices_at(listed, sale.tier, when)
    if prices is None:
        return None
    parts = vars(prices)
    prompt, usage = sale.usage.input, sale.usage
    rates: dict[str, Any] = {
        name: _tier(parts.get(listed_as), prompt) for name, listed_as in PARTS.items()
    }
    fresh, output = rates.pop("input"), rates.pop("output")
    silent = (fresh is None and usage.input) or (output is None and usage.output)
    if silent or fresh is output is None:
        return None  # nothing in the list does not mean a price of 0
    if any(parts.get(part) is not None for part in UNTOLD):
        return None
    if listed.seller in ONE_PRICE_FOR_ALL:
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


def _prices_at(listed: CatalogEntry, tier: str, when: datetime) -> ModelPrice | None:
    """Return the prices of a tier; `None` where the list does not say what it costs."""
    if tier == STANDARD:
        return listed.info.get_prices(when)
    if not listed.is_own:  # the tiers of the maker are not those of the seller
        return None
    for variant in listed.info.price_variants or ():
        constraint = variant.constraint
        is_active = constraint is None or constraint.active(when)
        # A variant that asks for more than the tier, such as a region too, would be a guess here.
        named = {name: tier for name in variant.when if name in VARIANTS}
        if is_active and named and variant.when == named:
            return listed.info.get_prices(when, named)
    return None


def _find(model: str, provider: str, fetched: DataSnapshot | None) -> CatalogEntry | None:
    """Find a model in a list, or in the package's, by who sells it."""
    prices = bundled_catalog() if fetched is None else fetched
    known = {each.id for each in prices.providers}
    article = listing_of(model, provider, known=provider in known)
    return None if article is None else _offered(article, prices)


def _offered(article: ModelListing, prices: DataSnapshot) -> CatalogEntry | None:
    seller, reference = article
    try:
        found, info = prices.find_provider_model(reference, None, seller, None)
    except LookupError:
        return None
    # A search without a seller may find whoever has a similar name: only the named seller counts.
    if seller not in (None, found.id):
        return None
    return CatalogEntry(info, found.id, is_own=any(info is each for each in found.models))


def _tier(rate: Decimal | TieredPrices | None, prompt: int) -> Decimal | None:
    """USD per unit at the tier that the input of the whole call reaches."""
    if rate is None or isinstance(rate, Decimal):
        return rate
    # The list has its tiers in ascending order, so that the last one reached is the highest.
    reached = [tier.price for tier in rate.tiers if prompt > tier.start]
    return reached[-1] if reached else rate.base
