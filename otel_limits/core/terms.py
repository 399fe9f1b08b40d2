"""Everything but tokens that a price depends on: vendor, name, region and pricing terms."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from otel_limits.core.price import SEARCH_SIZE, SPEED, StatedCost, recorded, stated_in
from otel_limits.core.usage import NOTHING_REPORTED, Unplaced
from otel_limits.vendors.records import GLOBAL, LOCAL, canonical_names, gateways, unlisted, vendors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_limits.core.usage import Usage, UsageRecord
    from otel_limits.vendors.records import Premium


# --- vendor and name of a model -------------------------------------------------------------------

BEDROCK: Final = re.compile(
    r"([a-z-]+\.)?(ai21|amazon|anthropic|cohere|deepseek|google|luma|meta|minimax|mistral"
    r"|moonshotai?|nvidia|openai|qwen|stability|twelvelabs|writer|xai|zai)\.[a-z]"
)
"""Model IDs of Amazon Bedrock, including inference profiles such as `us.` and `global.`."""

BEDROCK_ARN: Final = re.compile(
    r"arn:aws[a-z-]*:bedrock:[^:]*:[^:]*:(?:inference-profile|foundation-model)/(.+)"
)
"""An application's own profile (`application-inference-profile/…`) does not contain its model."""
ARN: Final = "arn:"

RESOURCE: Final = re.compile(r"(?:projects|publishers|models|tunedModels)/(?:.*/)?([^/]+)")
"""Google's resource names: `models/gemini-…`, `publishers/google/models/…`, `projects/…`:
https://ai.google.dev/api/models, https://google.aip.dev/122."""

OFFLOADED: Final = "cloud"
"""End of the tags of Ollama's cloud models, such as `:120b-cloud`: https://docs.ollama.com/cloud."""

CACHED_ADDRESSES: Final = 64
"""Cached addresses."""


class ModelListing(NamedTuple):
    """A model on the price list; without a vendor, any that has this name."""

    vendor: str | None
    reference: str


@functools.lru_cache(CACHED_ADDRESSES)
def vendor_at(address: str) -> str | None:
    """Return the vendor at an address, if it identifies one."""
    # Without slashes, `urlsplit` parses a host as a path, and Ollama's clients accept a bare one.
    host = urlsplit(address if "//" in address else f"//{address}").hostname or ""
    every = vendors().values()
    return next((each.name for each in every if each.hosts and each.hosts.fullmatch(host)), None)


def canonical(provider: str) -> str:
    """Return a vendor's name on the price list, from any of its names."""
    # In its own case first: model classes, such as MLXModel, contain capitals.
    names = canonical_names()
    return names.get(provider, names.get(provider.lower(), provider))


def vendor_of(model: str, provider: str) -> str:
    """Return the vendor; for a gateway, from the prefix of the model ID.

    Args:
        model: The ID as sent.
        provider: The provider, by its canonical name.
    """
    prefix, slash, _ = model.partition("/")
    # Only for a gateway: elsewhere a slash is part of the name, as in `meta-llama/Llama-3`.
    return canonical(prefix) if slash and provider in gateways() else provider


def vendor_by_id(model: str) -> str | None:
    """Return the only vendor with such model IDs; `None` if there may be several.

    A framework's spans may contain the framework's name instead of the vendor's.
    """
    if BEDROCK.match(model) or (model.startswith(ARN) and ":bedrock:" in model):
        return "aws"
    return "google" if RESOURCE.fullmatch(model) else None


def is_local(model: str, provider: str) -> bool:
    """Return whether a model runs locally, so that its tokens are free.

    Args:
        model: The ID as sent.
        provider: The provider, by its canonical name.
    """
    is_offloaded = model.rpartition(":")[2].endswith(OFFLOADED)
    return LOCAL in (provider, vendor_of(model, provider)) and not is_offloaded


def listing_of(model: str, provider: str, *, known: bool) -> ModelListing | None:
    """Return where to look up the price of a model.

    Args:
        model: The ID as sent.
        provider: The provider, by its canonical name.
        known: `provider` is on the price list.

    Returns:
        Vendor and name of the model; `None` if no list can contain it.
    """
    # Names that belong to one vendor take precedence, because gateways pass them on unchanged.
    if found := BEDROCK_ARN.fullmatch(model):
        listing = ModelListing("aws", found[1])
    elif found := RESOURCE.fullmatch(model):
        listing = ModelListing("google", found[1])
    # The name of a gateway does not identify the vendor.
    elif known and provider not in gateways():
        prefix, slash, rest = model.partition("/")
        own = rest if slash and canonical(prefix) == provider else model
        listing = ModelListing(provider, _bare_id(own, provider))
    else:
        listing = _by_name(model, provider if known and provider != "litellm" else None)
    # An operator's alias or private endpoint is on no list.
    is_listed = unlisted().isdisjoint((provider, listing.vendor))
    return listing if is_listed and not listing.reference.startswith(ARN) else None


def _by_name(model: str, vendor: str | None) -> ModelListing:
    """Return the vendor of a model by its name; `vendor` is that of a bare name."""
    prefix, slash, rest = model.partition("/")
    # Before the slash: IDs such as `us.anthropic.claude…` are Bedrock's, through any gateway.
    if BEDROCK.match(model):
        return ModelListing("aws", model)
    # OpenAI's fine-tuned models, before the rule for colons below treats it as a tag.
    if model.startswith("ft:"):
        return ModelListing("openai", model)
    if slash:
        named = canonical(prefix)
        return ModelListing(named, _bare_id(rest, named))
    # A tag, as in `deepseek-r1:8b`, means a local server.
    return ModelListing(LOCAL if ":" in model and not model.startswith(ARN) else vendor, model)


def _bare_id(reference: str, vendor: str) -> str:
    """Remove LiteLLM's infix between vendor and model, such as `converse/` or a region."""
    if vendor == "aws":
        return reference.rpartition("/")[2]
    found = RESOURCE.fullmatch(reference)
    return found[1] if found and vendor == "google" else reference


# --- pricing terms of a request -------------------------------------------------------------------

ONE_HOUR: Final = "1h"
FIVE_MINUTES: Final = "5m"
"""Default lifetime of a cache entry; writing one for an hour costs 2 times the input price instead
of 1.25 times: https://platform.claude.com/docs/en/build-with-claude/prompt-caching."""

STANDARD: Final = "standard"
STANDARDS: Final = frozenset(
    {
        "standard", "standard_only", "default", "on_demand", "none", "", "unspecified",
        "traffic_type_unspecified",
    }
)  # fmt: skip
"""Vendors' names for the default service tier."""
TIER_PREFIXES: Final = ("on_demand_",)
"""Gemini's prefix of tier names, as in `ON_DEMAND_PRIORITY`."""
SPEEDS: Final = frozenset({"fast", "optimized"})
"""Tiers of speed, apart from service tiers: Anthropic's `speed`, and Bedrock's `latency`."""
DISCOUNTED: Final = frozenset({"batch", "flex"})
"""Tiers that cost at most as much as the standard one:
https://developers.openai.com/api/docs/pricing, https://ai.google.dev/gemini-api/docs/flex-inference."""
AUTOMATIC: Final = "auto"
"""The vendor chooses the tier, and returns it: "the response body will include the service_tier
value based on the processing mode actually used",
https://platform.openai.com/docs/api-reference/chat/create. There, unset also means "auto", which
is standard unless the project is configured otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricingTerms:
    """The terms that a request asks for; defaults are the vendor's."""

    vendor: str | None = None
    """The vendor, if the address of the request identifies it."""
    own_class: str | None = None
    """The application's own model class, if it is used and its address is not a vendor's."""
    tier: str = STANDARD
    region: str | None = None
    """The requested region, if any."""
    cache_ttls: frozenset[str] = frozenset({FIVE_MINUTES})
    """Requested lifetimes of cache writes: `5m`, `1h`, or both."""
    audio_in: bool = False
    """True if the input contains, or may contain, audio."""
    audio_out: bool = False
    searches: bool = False
    """True if the vendor may search the web for the model."""
    server_tools: frozenset[str] = frozenset()
    """Tools that the vendor may run for the model at an unreported cost, by type."""


DEFAULT_TERMS: Final = PricingTerms()

SEARCH_MODEL: Final = re.compile(
    r"(?:^|/)(?:gpt-[\w.-]+-search-|sonar-pro-search)|:online$|^openrouter/perplexity/"
)
"""Models with built-in search, whose fee is not in price lists:
https://developers.openai.com/api/docs/guides/tools-web-search, "Chat Completions"; OpenRouter's
https://openrouter.ai/docs/features/web-search and https://openrouter.ai/perplexity/sonar."""


SEARCHES: Final = "it may have searched the web, an unreported number of times"


@dataclass(frozen=True, slots=True, kw_only=True)
class BillableCall:
    """One model call with all its pricing inputs."""

    model: str
    provider: str = "unknown"
    """The provider, as named by the framework's module or by the conventions."""
    usage: Usage
    tier: str = STANDARD
    vendor: str | None = None
    """The vendor, if the address identifies one other than `provider`."""
    own_class: str | None = None
    """The application's own model class, as in `PricingTerms`."""
    region: str | None = None
    """The region, if it may affect the price."""
    unknowns: tuple[str, ...] = ()
    """Why the price cannot be known: the request allows several, and the response does not show
    which applies."""
    dearest: Usage | None = field(default=None, compare=False)
    """The usage that would cost most, if there are `unknowns` and all of them have a bound."""
    unplaced: Unplaced | None = field(default=None, compare=False)
    """Those of its tokens whose rate is unknown, which then is one of the `unknowns`."""
    search_size: str | None = None
    """The size of the search context, on which a fee may depend."""
    stated: StatedCost | None = field(default=None, compare=False)
    """The cost in its response, if that states one."""

    @property
    def basis(self) -> str | None:
        """The pricing inputs without a ledger column, as JSON; `None` if there are none."""
        parts = {name: getattr(self.usage, name) or None for name in BASIS}
        basis_parts = {
            **parts,
            "vendor": self.vendor,
            "own_class": self.own_class,
            "region": self.region,
            SEARCH_SIZE: self.search_size,
            "open": self.unknowns or None,
            UNPLACED: None if self.unplaced is None else self.unplaced.reason,
            STATED_BY: None if self.stated is None else self.stated.by,
        }
        known = {name: value for name, value in basis_parts.items() if value is not None}
        return json.dumps(known) if known else None


UNPLACED: Final = "unplaced"
"""The key of why some tokens have no known rate."""
STATED_BY: Final = "stated_by"
"""The key of the vendor that states a cost."""
BASIS: Final = ("input_audio", "output_audio", "web_searches")
"""Counts that few calls have."""


def may_search(model: str, vendor: str | None) -> bool:
    """Return whether a model may search the web although the request does not ask for it."""
    # LiteLLM's name, for an OpenAI client that calls OpenRouter.
    named = f"openrouter/{model}" if vendor == "openrouter" else model
    return SEARCH_MODEL.search(named) is not None


def search_fees(model: str, vendor: str) -> Mapping[str, Decimal] | None:
    """Return the fees of a call by the size of its search context, if the vendor bills them."""
    known = vendors().get(vendor)
    return None if known is None else known.search_fees.get(model.rpartition("/")[2])


def _served_tier(asked: str, answered: str | None, speed: object) -> str:
    """Return the tier that was served, which vendors bill: "priority" may be served as standard.

    Args:
        asked: The tier of the request.
        answered: The service tier in the answer, if it has one.
        speed: The tier of speed in the answer, if it has one.
    """
    is_of_speed = asked in SPEEDS
    if isinstance(speed, str) and named_tier(speed) != STANDARD:
        return named_tier(speed)
    if is_of_speed and speed is None:  # the service tier says nothing about it
        return asked
    if answered is not None:
        return named_tier(answered)
    return STANDARD if is_of_speed else asked


def billable_call(
    model: str,
    provider: str,
    usage: Usage,
    answered_tier: str | None,
    terms: PricingTerms,
    record: UsageRecord = NOTHING_REPORTED,
) -> BillableCall:
    """Combine the terms of a request with its answer, which takes precedence.

    Args:
        model: The model ID.
        provider: The provider.
        usage: The tokens to be priced.
        answered_tier: The service tier in the answer, if it has one.
        terms: The terms of the request.
        record: The usage in the answer.
    """
    unplaced = record.unplaced
    tier = _served_tier(terms.tier, answered_tier, record.billing.get(SPEED))
    client = canonical(provider)
    vendor = vendor_of(model, terms.vendor or client)
    opens, dearest, is_bounded = [], usage, True
    if unplaced is not None:
        opens.append(unplaced.reason)
        if ONE_HOUR in terms.cache_ttls:
            dearest = replace(dearest, cache_write_1h=dearest.cache_write)
    if usage.cache_write and usage.cache_write_1h is None:
        # All of it was written for an hour.
        if terms.cache_ttls == {ONE_HOUR}:
            usage = dearest = replace(usage, cache_write_1h=usage.cache_write)
        elif ONE_HOUR in terms.cache_ttls:
            opens.append("it wrote to 5-minute and 1-hour caches, in unreported proportions")
            dearest = replace(usage, cache_write_1h=usage.cache_write)
    # Some vendors charge a different price for cached audio, and usage does not report its amount.
    is_cached = usage.cache_read + usage.cache_write > 0
    if (terms.audio_in and usage.input_audio is None) or (is_cached and usage.input_audio):
        opens.append("it has audio, and its cached and text shares are unreported")
        # Audio costs more than text, and more than cached audio.
        fresh = replace(dearest, cache_read=0, cache_write=0, cache_write_1h=None)
        dearest = replace(fresh, input_audio=usage.input)
    if terms.audio_out and usage.output_audio is None:
        opens.append("it may have answered with an unreported amount of audio")
        dearest = replace(dearest, output_audio=usage.output)
    searches = terms.searches and search_fees(model, vendor) is None
    if usage.web_searches is None and (searches or may_search(model, terms.vendor)):
        opens.append(SEARCHES)
        is_bounded = False
    # Vendors bill them by item, or by the tokens of another model; usage contains neither. Nothing
    # bounds them: Anthropic's advisor is called an "unlimited" number of times by default
    # (`max_uses`), reads the whole conversation each time, and "`max_tokens` applies to executor
    # output only. It does not bound advisor tokens":
    # https://platform.claude.com/docs/en/agents-and-tools/tool-use/advisor-tool, 2026-11-28.
    opens += [
        f"it may have used the vendor's tool {tool}, at an unreported cost"
        for tool in sorted(terms.server_tools)
    ]
    return BillableCall(
        model=model,
        provider=provider,
        usage=usage,
        tier=tier,
        vendor=terms.vendor,
        own_class=terms.own_class,
        region=terms.region,
        unknowns=tuple(opens),
        dearest=dearest if is_bounded and not terms.server_tools else None,
        unplaced=unplaced,
        search_size=size if isinstance(size := record.billing.get(SEARCH_SIZE), str) else None,
        stated=stated_in(record.billing, terms.vendor, vendor, client) if record.billing else None,
    )


def billable_call_in_ledger(
    model: str,
    provider: str,
    usage: Usage,
    tier: str | None,
    basis: str | None,
    stated: Decimal | None = None,
) -> BillableCall:
    """Restore a call from the ledger, whose rows may have been edited by hand.

    Args:
        model: The model ID.
        provider: The provider.
        usage: Its tokens.
        tier: The tier it was billed at.
        basis: The other pricing inputs.
        stated: USD that its response states.
    """
    if not basis:
        return BillableCall(
            model=model, provider=provider, usage=usage, tier=named_tier(tier or STANDARD)
        )
    try:
        basis_parts: Any = json.loads(basis)
    # Deeply nested JSON, which anyone could write to a row, raises RecursionError.
    except (ValueError, RecursionError):
        basis_parts = None
    if not isinstance(basis_parts, dict):
        basis_parts = {"open": ["its pricing inputs cannot be read"]}
    parts: dict[str, Any] = {name: basis_parts.get(name) for name in BASIS}
    unplaced = basis_parts.get(UNPLACED)
    return BillableCall(
        model=model,
        provider=provider,
        usage=replace(usage, **parts),
        tier=named_tier(tier or STANDARD),
        vendor=basis_parts.get("vendor"),
        own_class=basis_parts.get("own_class"),
        region=basis_parts.get("region"),
        unknowns=tuple(basis_parts.get("open", ())),
        unplaced=None if unplaced is None else Unplaced(reason=str(unplaced)),
        search_size=basis_parts.get(SEARCH_SIZE),
        stated=None if stated is None else recorded(stated, basis_parts.get(STATED_BY)),
    )


def named_tier(tier: str) -> str:
    """Return the vendor-independent name of a tier."""
    name = tier.lower().replace("-", "_")
    for prefix in TIER_PREFIXES:
        name = name.removeprefix(prefix)
    return STANDARD if name in STANDARDS else name


# --- region and premium ---------------------------------------------------------------------------

NO_PREMIUM: Final = Decimal(1)


def region_of(
    model: str,
    addresses: Iterable[str] = (),
    *,
    set_as: Iterable[str] = (),
    of_client: Iterable[str] = (),
) -> str | None:
    """Return the region where a call is processed; `None` if it is global or nothing shows it.

    Args:
        model: The model ID as sent.
        addresses: URLs or hosts of the endpoint.
        set_as: Regions in the settings of the request.
        of_client: Regions that the client would use by default.
    """
    in_hosts, in_model_ids = _patterns()
    urls = [at if "//" in at else f"//{at}" for at in addresses]
    found = (
        *set_as,
        *(found[1] for url in urls for each in in_hosts if (found := each.search(url))),
        *(found[1] for each in in_model_ids if (found := each.search(model))),
        *of_client,
    )
    region = next(iter(found), area_of(model)) or GLOBAL
    return None if region == GLOBAL else region


@cache
def _patterns() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Return the patterns of all vendors by which addresses and model IDs contain a region."""
    rules = [each.region for each in vendors().values() if each.region is not None]
    in_hosts = [each for rule in rules for each in rule.hosts]
    return in_hosts, [each for rule in rules for each in rule.model_ids]


def area_of(model: str) -> str | None:
    """Return the area of an inference profile of Bedrock, such as `eu` or `global`."""
    profile = BEDROCK.match(model.rpartition("/")[2])
    return profile[1].rstrip(".") if profile and profile[1] else None


def premium(vendor: str, model: str, region: str | None) -> Decimal | None:
    """Return the factor on list prices; `None` if unknown.

    Args:
        vendor: The vendor, as named on the list.
        model: The vendor's model ID.
        region: The requested region, if any.
    """
    known = vendors().get(vendor)
    if region is None or known is None or known.region is None:
        return NO_PREMIUM
    return _first(known.region.premium, model, region)


def highest_premium(vendor: str, region: str) -> Decimal | None:
    """Return the upper bound of an unknown `premium`; `None` if there is none."""
    known = vendors().get(vendor)
    return (
        None if known is None or known.region is None else _first(known.region.dearest, "", region)
    )


def _first(premiums: Iterable[Premium], model: str, region: str) -> Decimal | None:
    for each in premiums:
        if each.models.match(model) and each.regions.fullmatch(region):
            return each.factor
    return None
