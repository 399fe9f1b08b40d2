"""The record of a vendor: its names, and how it counts and bills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    import re
    from decimal import Decimal

    from otel_limits.vendors.images import ImageRule

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
