"""All vendors, read from their files on first use, and the tables that follow from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import cache
from typing import Any, Final

from otel_limits.vendors.facts import facts
from otel_limits.vendors.images import IMAGE_RULES
from otel_limits.vendors.vendor import (
    CostRule,
    MediaRule,
    Premium,
    RegionRule,
    UsageRule,
    Vendor,
)

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
