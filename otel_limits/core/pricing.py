"""What a model call costs, in USD, or that nobody knows: never 0 for unknown, never a guess."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from decimal import Decimal, localcontext
from types import CodeType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.faults import never_raises, note
from otel_limits.core.globs import best_match
from otel_limits.core.loops import fingerprint
from otel_limits.core.usage import EXACT, NO_COST, Usage
from otel_limits.core.values import PRICE

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, TieredPrices

PACKAGE: Final = "genai-prices"

PER_MILLION: Final = -6
PER_THOUSAND: Final = -3
"""Powers of ten from the price of that many to the price of one."""

MODELS: Final = 1_000
"""Models that are remembered; names can come from outside."""

BEDROCK: Final = re.compile(
    r"([a-z-]+\.)?(ai21|amazon|anthropic|cohere|deepseek|google|luma|meta|minimax|mistral"
    r"|moonshotai?|nvidia|openai|qwen|stability|twelvelabs|writer|zai)\.[a-z]"
)
"""Model ids of Amazon Bedrock, inference profiles such as `us.` and `global.` included."""

BEDROCK_PROFILE: Final = re.compile(r"arn:aws[a-z-]*:bedrock:.*:inference-profile/(.+)")

PROVIDERS: Final[Mapping[str, str]] = {
    "azure_ai": "azure",
    "bedrock": "aws",
    "fireworks_ai": "fireworks",
    "gemini": "google",
    "moonshot": "moonshotai",
    "together_ai": "together",
    "vertex_ai": "google",
    "xai": "x-ai",
}
"""Prefixes of model ids (`gemini/gemini-2.5-pro`) whose provider has another id in the list."""

PARTS: Final = (
    "input_mtok",
    "output_mtok",
    "cache_read_mtok",
    "cache_write_mtok",
    "requests_kcount",
)
"""Prices in the list that follow from what a model call reports."""

UNTOLD: Final = ("output_reasoning_mtok", "output_citation_mtok")
"""Prices of parts of the output that no framework tells apart: such a price stays unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD per million tokens of one model.

    Raises:
        ValueError: An amount is not a finite `Decimal` of 0 or more.
    """

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    """For the cached part of the input; as `input` where it is unset."""
    cache_write: Decimal | None = None
    """For the part of the input that is put in the cache; as `input` where it is unset."""
    request: Decimal = NO_COST
    """USD per model call, on top of its tokens."""

    def __post_init__(self) -> None:
        """Refuse what is not an exact amount."""
        for each in fields(self):
            amount = getattr(self, each.name)
            if amount is not None or each.default is not None:
                object.__setattr__(self, each.name, PRICE.of_value(each.name, amount))

    def of(self, usage: Usage) -> Decimal | None:
        """USD for one model call; `None` when its parts are more than the whole."""
        fresh = usage.input - usage.cache_read - usage.cache_write
        if fresh < 0:
            return None
        read = self.input if self.cache_read is None else self.cache_read
        write = self.input if self.cache_write is None else self.cache_write
        with localcontext(EXACT):
            tokens = (
                fresh * self.input
                + usage.cache_read * read
                + usage.cache_write * write
                + usage.output * self.output
            )
            return tokens.scaleb(PER_MILLION) + self.request


MISSING: Final = (
    "needs prices, and there are none. Run: pip install 'otel-limits[prices]' (Python 3.11 or "
    "newer), or give them in the policy file under models."
)
"""What is said of a limit on cost where no price can be known."""

NO_PRICES: Final[Mapping[str, Price]] = MappingProxyType({})


class Prices:
    """Prices of the policy file, and behind them the list of the package `genai-prices`.

    A model id is looked up in the policy, where the most specific glob decides, then in the
    package. The package is imported with the first look-up there, and nothing is ever fetched; an
    application that has it fetch newer prices gets those. Any number of threads may ask.

    Attributes:
        source: `policy`, `genai-prices`, `policy+genai-prices` or `none`.
    """

    def __init__(self, overrides: Mapping[str, Price] = NO_PRICES) -> None:
        """Take the prices of the policy file, by model id or glob."""
        self._overrides = dict(overrides)
        self._override = functools.lru_cache(MODELS)(self._find_override)
        installed = _installed_version()
        self._catalogue = Catalogue(installed) if installed else None
        named = {"policy": self._overrides, PACKAGE: self._catalogue}
        self._policy_version = fingerprint(self._overrides)[:8] if self._overrides else ""
        self.source = "+".join(name for name, prices in named.items() if prices) or "none"

    @property
    def available(self) -> bool:
        """Whether any price can be known."""
        return self.source != "none"

    @property
    def version(self) -> str:
        """Tells the prices of one time from those of another, in the order of `source`."""
        package = self._catalogue.version if self._catalogue is not None else ""
        return "+".join(filter(None, (self._policy_version, package)))

    @never_raises("pricing")
    def load(self) -> None:
        """Import the package ahead of the first look-up, which is within a model call."""
        if self._catalogue is not None:
            self._catalogue.info("gpt-4o")

    def price(self, model: str, usage: Usage, when: datetime | None = None) -> Decimal | None:
        """USD for one model call.

        Tiered prices follow the input of a call, so that calls are priced one by one.

        Args:
            model: Model id, as the provider or a gateway knows it.
            usage: Tokens of this call alone.
            when: Time of the call, for prices that change; now where it is unset, UTC where it
                has no zone.

        Returns:
            The exact amount, or `None` when it is unknown.
        """
        try:
            price = self._override(model)
            if price is None and self._catalogue is not None:
                info = self._catalogue.info(model)
                if info is not None:
                    price = price_of(info, usage, when or datetime.now(timezone.utc))
            return price.of(usage) if price is not None else None
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            note("pricing", error)
            return None

    def _find_override(self, model: str) -> Price | None:
        glob = best_match(self._overrides, model)
        return None if glob is None else self._overrides[glob]


IMPORTS: Final = threading.RLock()
"""Held while the package is imported: a process that forked meanwhile would wait for ever for the
import to end, in a thread that it does not have. A fork waits instead."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=IMPORTS.acquire,
        after_in_parent=IMPORTS.release,
        after_in_child=IMPORTS.release,
    )


LIST: Final = "genai_prices.data"
"""The module that makes the list: 16,000 objects."""


class Catalogue:
    """The prices that the package `genai-prices` brings along, or the application has fetched.

    What the package knows of a model is kept, its list is not: it would be gone through in every
    full garbage collection of the application. What stays is the code that makes it (1.5 MB, which
    no collection looks at); to run that takes 7 ms and more, once for each model.
    """

    def __init__(self, installed: str) -> None:
        """Load nothing yet, of the version that is `installed`."""
        self._installed = installed
        self._found: tuple[DataSnapshot | None, dict[str, ModelInfo | None]] = (None, {})
        """The list that the application has fetched, if any, and what was looked up since."""
        self._package: ModuleType | None = None

    @property
    def version(self) -> str:
        """Version of the package, and of the newer list that the application has fetched."""
        fetched = self._found[0]
        if fetched is None or not fetched.from_auto_update:
            return self._installed
        return f"{self._installed}@{fetched.timestamp:%Y-%m-%dT%H:%M:%S}"

    def info(self, model: str) -> ModelInfo | None:
        """What the package knows of a model, looked up once per price list."""
        fetched, found = self._found
        if model in found and fetched is self._fetched():
            return found[model]
        with IMPORTS:
            from genai_prices import data_snapshot

            self._package = data_snapshot
            fetched, found = self._found
            if fetched is not self._fetched() or len(found) >= MODELS:
                fetched, found = self._found = (self._fetched(), {})
            if model not in found:
                found[model] = _find(model, fetched)
            return found[model]

    def _fetched(self) -> DataSnapshot | None:
        """Return the list that the application has put in the place of the package's own."""
        # the public way to ask for it makes the package's own where there is none
        return None if self._package is None else self._package._custom_snapshot  # noqa: SLF001


def brought_along() -> DataSnapshot:
    """Return the list that the package brings along, for as long as the caller keeps it.

    That of the package itself is there for good once anybody asked for it.
    """
    from genai_prices.data_snapshot import DataSnapshot, get_snapshot

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


def price_of(info: ModelInfo, usage: Usage, when: datetime) -> Price | None:
    """What a model costs at this time and with this much input, if its list says all of it."""
    listed = vars(info.get_prices(when))
    rates = {part: _tier(listed.get(part), usage) for part in PARTS}
    fresh, output = rates["input_mtok"], rates["output_mtok"]
    silent = (fresh is None and usage.input) or (output is None and usage.output)
    if silent or fresh is output is None:
        return None  # nothing in the list does not mean a price of 0
    if any(listed.get(part) is not None for part in UNTOLD):
        return None
    return Price(
        input=fresh or NO_COST,
        output=output or NO_COST,
        cache_read=rates["cache_read_mtok"],
        cache_write=rates["cache_write_mtok"],
        request=(rates["requests_kcount"] or NO_COST).scaleb(PER_THOUSAND, EXACT),
    )


def _find(model: str, fetched: DataSnapshot | None) -> ModelInfo | None:
    """Find a model in a list, or in the package's, by the provider that its id names."""
    provider, reference = _provider(model)
    if reference is None:
        return None
    prices = brought_along() if fetched is None else fetched
    try:
        seller, info = prices.find_provider_model(reference, None, provider, None)
    except LookupError:
        return None
    return info if provider in (None, seller.id) else None


def _provider(model: str) -> tuple[str | None, str | None]:
    """Provider and model that an id names; no model when it names none that has a price."""
    if profile := BEDROCK_PROFILE.fullmatch(model):
        model = profile[1]
    if BEDROCK.match(model):
        return "aws", model
    if model.startswith("ft:"):
        return "openai", model
    prefix, slash, rest = model.partition("/")
    if slash:
        return PROVIDERS.get(prefix, prefix), rest
    return None, None if ":" in model else model  # a tag, as `deepseek-r1:8b`: it runs locally


def _tier(rate: Decimal | TieredPrices | None, usage: Usage) -> Decimal | None:
    """USD per unit at the tier that the input of the whole call reaches."""
    if rate is None or isinstance(rate, Decimal):
        return rate
    reached = [tier.price for tier in rate.tiers if usage.input > tier.start]
    return reached[-1] if reached else rate.base


def _installed_version() -> str | None:
    """Version of the package, without importing it."""
    if importlib.util.find_spec(PACKAGE.replace("-", "_")) is None:
        return None
    return importlib.metadata.version(PACKAGE)
