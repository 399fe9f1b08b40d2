"""What a request asks for that its price depends on, beside the tokens that it takes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from otel_limits.core.usage import Usage

ONE_HOUR: Final = "1h"
FIVE_MINUTES: Final = "5m"
"""How long a cache lasts where nobody asks for more; writing for an hour costs 2 times the input
instead of 1.25: https://platform.claude.com/docs/en/build-with-claude/prompt-caching."""

STANDARD: Final = "standard"
STANDARDS: Final = frozenset(
    {
        "standard", "standard_only", "default", "on_demand", "none", "", "unspecified",
        "traffic_type_unspecified",
    }
)  # fmt: skip
"""How vendors call the tier that nobody has to ask for."""
PREFIXES: Final = ("on_demand_",)
"""What Gemini puts before the name of a tier: `ON_DEMAND_PRIORITY`."""
AUTOMATIC: Final = "auto"
"""The vendor chooses the tier, and says in its answer which one it was: "the response body will
include the service_tier value based on the processing mode actually used",
https://platform.openai.com/docs/api-reference/chat/create. Not setting it is "auto" there, too, and
standard unless the project says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricingTerms:
    """What a request asks for. What it does not say is the vendor's default."""

    seller: str | None = None
    """Who sells, where the address of the request says so."""
    tier: str = STANDARD
    region: str | None = None
    """Where it is to be answered, where it asks for a part of the world."""
    cache_ttls: frozenset[str] = frozenset({FIVE_MINUTES})
    """How long what it puts in a cache is to stay there: `5m`, `1h`, or both."""
    audio_in: bool = False
    """True when something spoken is in it, or may be."""
    audio_out: bool = False
    searches: bool = False
    """True when the vendor may search the web for the model."""
    paid_tools: frozenset[str] = frozenset()
    """Those of `PAID_TOOLS` that the vendor may use for the model."""


DEFAULT_TERMS: Final = PricingTerms()

PAID_TOOLS: Final = {
    "file_search": "it may have searched files, and nobody says how often",
    "code_interpreter": "it may have run code in a container, and nobody says in how many",
    "shell": "it may have run commands in a container, and nobody says in how many",
    "code_execution": "it may have run code, and nobody says how often",
    "collections_search": "it may have searched files, and nobody says how often",
    "image_generation": "it may have made images, and nobody says what they cost",
}
"""Tools of OpenAI's Responses API that are billed apart from tokens, by the type that a request has
them under, and why a price is unknown with them: by the search, by the container and by the tokens
of images, https://developers.openai.com/api/docs/pricing; and those of xAI, by the call,
https://docs.x.ai/developers/pricing. No usage that is handed on tells of any of these."""


SEARCH_MODEL: Final = re.compile(
    r"(?:^|/)(?:gpt-[\w.-]+-search-|sonar-pro-search)|:online$|^openrouter/perplexity/"
)
"""Models that search by themselves, for a fee that lists do not have with them:
https://developers.openai.com/api/docs/guides/tools-web-search, "Chat Completions"; OpenRouter's
https://openrouter.ai/docs/features/web-search and https://openrouter.ai/perplexity/sonar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BillableCall:
    """One model call, with everything that its price depends on."""

    model: str
    provider: str = "unknown"
    """Who was asked, by the name of the framework's module or of the conventions."""
    usage: Usage
    tier: str = STANDARD
    seller: str | None = None
    """Who sells, where the address says something else than `provider`."""
    region: str | None = None
    """Where it was answered, where that may cost more."""
    opens: tuple[str, ...] = ()
    """Why the price cannot be known: the request permits several, and no answer says which."""

    @property
    def basis(self) -> str | None:
        """What no column of a ledger has, as JSON; `None` for nothing."""
        parts = {name: getattr(self.usage, name) or None for name in BASIS}
        said = {**parts, "seller": self.seller, "region": self.region, "open": self.opens or None}
        known = {name: value for name, value in said.items() if value is not None}
        return json.dumps(known) if known else None


BASIS: Final = ("input_audio", "output_audio", "web_searches")
"""Counts that few calls have."""


def billable_call(
    model: str, provider: str, usage: Usage, answered_tier: str | None, terms: PricingTerms
) -> BillableCall:
    """Put together what a request asked for and what its answer said: the answer decides."""
    # What the vendor answers is what it bills: "priority" may be served, and billed, as standard.
    tier = named_tier(terms.tier if answered_tier is None else answered_tier)
    opens = []
    if usage.cache_write and usage.cache_write_1h is None:
        # All of it was asked for an hour, so that nothing has to be told apart.
        if terms.cache_ttls == {ONE_HOUR}:
            usage = replace(usage, cache_write_1h=usage.cache_write)
        elif ONE_HOUR in terms.cache_ttls:
            opens.append("it wrote to caches of 5 minutes and of 1 hour, and nobody says how much")
    # What is cached of audio has another price at some vendors, and no usage says how much it was.
    is_cached = usage.cache_read + usage.cache_write > 0
    if (terms.audio_in and usage.input_audio is None) or (is_cached and usage.input_audio):
        opens.append("it has audio, and nobody says how much of it was cached or text")
    if terms.audio_out and usage.output_audio is None:
        opens.append("it may have answered with audio, and nobody says how much")
    # As LiteLLM calls it, where a client of OpenAI asks OpenRouter.
    named = f"openrouter/{model}" if terms.seller == "openrouter" else model
    if usage.web_searches is None and (terms.searches or SEARCH_MODEL.search(named)):
        opens.append("it may have searched the web, and nobody says how often")
    opens += [why for tool, why in PAID_TOOLS.items() if tool in terms.paid_tools]
    return BillableCall(
        model=model,
        provider=provider,
        usage=usage,
        tier=tier,
        seller=terms.seller,
        region=terms.region,
        opens=tuple(opens),
    )


def billable_call_in_ledger(
    model: str, provider: str, usage: Usage, tier: str | None, basis: str | None
) -> BillableCall:
    """Put together again what a ledger has of a call; anybody may have written to its rows."""
    try:
        said: Any = json.loads(basis) if basis else {}
    # JSON that is nested deeply raises RecursionError, and rows can be written by anybody.
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        said = {"open": ["what its price depends on cannot be read"]}
    parts: dict[str, Any] = {name: said.get(name) for name in BASIS}
    return BillableCall(
        model=model,
        provider=provider,
        usage=replace(usage, **parts),
        tier=named_tier(tier or STANDARD),
        seller=said.get("seller"),
        region=said.get("region"),
        opens=tuple(said.get("open", ())),
    )


def named_tier(tier: str) -> str:
    """Return the name of a tier, the same for all vendors."""
    name = tier.lower().replace("-", "_")
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return STANDARD if name in STANDARDS else name
