"""All vendors, read from their files on first use, and the tables that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from otel_limits.vendors.facts import facts
from otel_limits.vendors.images import IMAGE_RULES

if TYPE_CHECKING:
    from otel_limits.vendors.images import ImageRule


# --- one vendor -----------------------------------------------------------------------------------

Cached: TypeAlias = Literal["inside", "outside", "by total"]
"""Whether the input contains cached tokens; `by total` if only the total reveals it."""

Rest: TypeAlias = Literal["input", "output", "unknown"]
"""The side of tokens of a total that no part explains."""

LOCAL: Final = "local"
"""The vendor of models that run on the user's own machines."""

GLOBAL: Final = "global"
"""Vendors' name for requests without a region, whose prices are in the lists."""
HIDDEN_REGION: Final = "the region of its client, which is not exposed"
"""A region that determines the price but cannot be read."""

PAGE: Final = 1_400
"""Tokens of a PDF page, assumed for vendors that do not document it."""
AUDIO: Final = 32.0
"""Tokens per second of audio, Google's: https://ai.google.dev/gemini-api/docs/audio. Assumed for
others."""


@dataclass(frozen=True, slots=True)
class UsageRule:
    """How one vendor, or one instrumentation, counts."""

    cached: Cached
    zeros_are_made_up: bool = False
    """True if the client reports 0 for usage that the vendor did not send."""
    total_is_final: bool = False
    """True if the total is right even if the parts are more, because some overlap."""
    total_omits_cache: bool = False
    """True if it is unknown whether the total contains cached tokens that the input omits."""
    total_repeats_cache: bool = False
    """True if the total may contain cached tokens of the input again."""
    rest: Rest = "unknown"
    may_be_net: bool = False
    """True if the input may leave out cached tokens although no total shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRule:
    """How many tokens images, documents and audio are for some models."""

    models: re.Pattern[str]
    """The models, by a part of their lower-case ID at any vendor."""
    image: ImageRule
    page: int = PAGE
    """Tokens of a PDF page: its text and an image of it."""
    audio: float = AUDIO
    """Tokens per second."""
    is_default: bool = False
    """True if it is also the rule for other models of the vendor's classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Premium:
    """A factor on list prices."""

    models: re.Pattern[str]
    """The models, by the beginning of their ID on the list."""
    regions: re.Pattern[str]
    """The regions, by their whole name."""
    factor: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRule:
    """Where a call is processed, and how that affects its price."""

    premium: tuple[Premium, ...]
    """The first that fits a model and a region is the factor. If none fits, it is unknown."""
    dearest: tuple[Premium, ...]
    """The first that fits a region is the highest factor known of any model there."""
    hosts: tuple[re.Pattern[str], ...] = ()
    """Addresses that contain a region."""
    model_ids: tuple[re.Pattern[str], ...] = ()
    """Model IDs that contain a region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRule:
    """Where a response states what the call cost."""

    field: str
    """The amount within the usage, with dots between the names of its levels."""
    per_usd: int = 1
    """Units of the amount in one USD."""
    own_key: str | None = None
    """The amount that the maker bills to the customer's own key, in addition."""
    has_own_key: str | None = None
    """True if the customer's own key was used."""
    is_bill: bool = True
    """False for a gateway, which computes the amount from a price list and bills nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A vendor, a gateway to several, or a kind of server."""

    name: str
    """On the price list, if it is there."""
    aliases: frozenset[str] = frozenset()
    """Other names: in conventions, of frameworks' modules, and LiteLLM's prefixes."""
    hosts: re.Pattern[str] | None = None
    """Hosts of its API, including subdomains. Not those at which users run their own servers, such
    as load balancers."""
    classes: Mapping[str, UsageRule] = field(default_factory=dict)
    """How its usage counts, by each framework's module for it."""
    families: Mapping[str, UsageRule] = field(default_factory=dict)
    """How it counts for other makers' models, by a part of their lower-case ID."""
    apart: frozenset[str] = frozenset()
    """Its own names of an output that excludes reasoning."""
    media: tuple[MediaRule, ...] = ()
    """For its models, wherever they are sold."""
    page_as_text: int | None = None
    """Tokens of a PDF page that is read as text only."""
    token_tools: frozenset[str] = frozenset()
    """Tools that run at the vendor and cost only tokens, by type without date."""
    region: RegionRule | None = None
    stated_cost: CostRule | None = None
    search_fees: Mapping[str, Mapping[str, Decimal]] = field(default_factory=dict)
    """USD of one call by the size of its search context, by model; on the list is the highest."""
    drops_usage: bool = False
    """True for a library that passes on only a part of the usage in streams."""
    own_cache_rates: bool = False
    """True if cached tokens have separate rates, also where the list has none."""
    audio_as_text: bool = False
    """True if audio costs the same as text unless the list says otherwise."""
    is_gateway: bool = False
    """True if the model ID names the vendor, before a slash."""
    is_listed: bool = True
    """False if its models are on no price list under this name."""


# --- all vendors ----------------------------------------------------------------------------------

VENDORS: Final = (
    "anthropic", "google", "aws", "sagemaker", "openai", "azure", "local", "ollama-cloud",
    "deepseek", "minimax", "mistral", "x-ai", "writer", "llamaapi", "litellm", "litellm_proxy",
    "watsonx", "openrouter", "ai21", "cerebras", "cohere", "fireworks", "groq", "moonshotai",
    "novita", "perplexity", "together", "zai",
)  # fmt: skip
"""Names and files of all vendors. Models are compared with media rules in this order, as a newer
model's name may contain an older one's."""

BLOCKED: Final = frozenset({"content_filter", "content_filtered", "guardrail_intervened"})
"""Stop reasons of an answer that a guardrail of the vendor or of a gateway wrote:
<https://platform.openai.com/docs/api-reference/chat/object>,
<https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Converse.html>."""


@cache
def vendors() -> Mapping[str, Vendor]:
    """Return all vendors by name."""
    return {name: _vendor(name, facts(f"vendors/{name}.yaml")) for name in VENDORS}


@cache
def canonical_names() -> Mapping[str, str]:
    """Return vendors' names by other names than those on the price list."""
    return {alias: each.name for each in vendors().values() for alias in each.aliases}


@cache
def vendors_of_classes() -> Mapping[str, Vendor]:
    """Return vendors by a framework's module for the provider."""
    return {module: each for each in vendors().values() for module in each.classes}


@cache
def gateways() -> frozenset[str]:
    """Return the vendors whose model IDs name the vendor."""
    return frozenset(each.name for each in vendors().values() if each.is_gateway)


@cache
def unlisted() -> frozenset[str]:
    """Return the vendors that are not on the price list."""
    return frozenset(each.name for each in vendors().values() if not each.is_listed)


@cache
def media_rules() -> tuple[MediaRule, ...]:
    """Return all rules for media, in the order in which models are compared."""
    return tuple(rule for each in vendors().values() for rule in each.media)


@cache
def cost_rules() -> Mapping[str, CostRule]:
    """Return where responses state costs, by vendor."""
    return {each.name: each.stated_cost for each in vendors().values() if each.stated_cost}


@cache
def other_media() -> MediaRule:
    """Return the rule for models whose vendor does not document any."""
    return _media_rule(_shared()["other_media"])


@cache
def _shared() -> Mapping[str, Any]:
    return facts("vendors/shared.yaml")  # type: ignore[no-any-return]


def _vendor(name: str, known: Mapping[str, Any]) -> Vendor:
    found = {fact: value for fact, value in known.items() if fact != "sources"}
    return Vendor(name=name, **{fact: READERS[fact](value) for fact, value in found.items()})


def _hosts(hosts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of some hosts: `*` is any part of a name without dots, e.g. a region."""
    names = "|".join(map(re.escape, hosts)).replace(re.escape("*"), "[a-z0-9-]+")
    return re.compile(rf"(?:.+\.)?(?:{names.replace(re.escape('{amazon}'), _amazon())})")


def _amazon() -> str:
    """Return the pattern of Amazon's domains."""
    return f"(?:{'|'.join(map(re.escape, _shared()['amazon']))})"


def _media_rule(known: Mapping[str, Any]) -> MediaRule:
    ((kind, sizes),) = known["image"].items()
    image, models = IMAGE_RULES[kind](**sizes), re.compile(known["models"])
    return MediaRule(**{**known, "image": image, "models": models})


def _region(known: Mapping[str, Any]) -> RegionRule:
    return RegionRule(
        premium=tuple(map(_premium, known["premium"])),
        dearest=tuple(map(_premium, known["dearest"])),
        hosts=tuple(
            re.compile(each.replace("{amazon}", _amazon())) for each in known.get("hosts", ())
        ),
        model_ids=tuple(map(re.compile, known.get("model_ids", ()))),
    )


def _premium(known: Mapping[str, Any]) -> Premium:
    models, regions = (
        re.compile(known.get("models", "")),
        re.compile(known.get("regions", "(?s:.*)")),
    )
    return Premium(models=models, regions=regions, factor=Decimal(str(known["factor"])))


def _amounts(known: Mapping[str, float]) -> Mapping[str, Decimal]:
    return {name: Decimal(str(amount)) for name, amount in known.items()}


READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "aliases": frozenset,
    "hosts": _hosts,
    "classes": lambda classes: {module: UsageRule(**rule) for module, rule in classes.items()},
    "families": lambda families: {each: UsageRule(**rule) for each, rule in families.items()},
    "apart": frozenset,
    "media": lambda rules: tuple(map(_media_rule, rules)),
    "page_as_text": int,
    "token_tools": frozenset,
    "region": _region,
    "drops_usage": bool,
    "own_cache_rates": bool,
    "search_fees": lambda models: {model: _amounts(fees) for model, fees in models.items()},
    "stated_cost": lambda rule: CostRule(**rule),
    "audio_as_text": bool,
    "is_gateway": bool,
    "is_listed": bool,
}
"""Each fact in the file of a vendor, and how its value is read."""
