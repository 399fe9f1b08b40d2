"""Compares the installed price list with LiteLLM's, at four usages.

`python -m tests.price_lists.compare` reads LiteLLM's list, where it is installed, into the fixture,
and writes `otel_limits/vendors/price_lists.yaml`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from decimal import ROUND_UP, Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import yaml

from otel_limits.core import catalogue, price_lookup
from otel_limits.core.catalogue import CatalogEntry, current_list, is_of_family
from otel_limits.core.price_lookup import Prices
from otel_limits.core.terms import BillableCall, canonical, listing_of, region_of
from otel_limits.core.usage import Usage
from otel_limits.vendors.records import vendors
from tests.readme import table

if TYPE_CHECKING:
    from otel_limits.core.price import Price

FIXTURE: Final = Path(__file__).with_name("litellm.json")
LISTS: Final = Path("otel_limits/vendors/price_lists.yaml")
NOON: Final = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)
"""Outside DeepSeek's peak hours, on the day on which the lists were read."""

USAGES: Final = (
    Usage(input=1_000, output=500),
    Usage(input=100_000, output=1_000, cache_read=80_000),
    Usage(input=20_000, output=500, cache_write=10_000),
    Usage(input=300_000, output=2_000),
)
"""A short call, one that reads a cache, one that writes one, and a long prompt."""

PARTS: Final = {
    "all": ("input", "output"),
    "cache_read": ("cache_read",),
    "cache_write": ("cache_write",),
    "long": ("input", "output", "cache_write"),
}
"""Subject of a disagreement at each usage, in the table of disputed prices, and its rates."""

RATES: Final = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cache_read": "cache_read_input_token_cost",
    "cache_write": "cache_creation_input_token_cost",
}
"""Rates of a price, and their names on LiteLLM's list."""

SIZES: Final = (1_000, 300_000)
"""Prompts at which the fixture has rates."""

MILLION: Final = 1_000_000

TOLERANCE: Final = Decimal("0.01")
MODES: Final = ("chat", "responses", "completion")


def as_listed(model: str, provider: str) -> CatalogEntry | None:
    """Return what the package's own look-up finds for a model, however loosely it matches."""
    listing = listing_of(model, provider, known=True)
    return None if listing is None else catalogue._loose_entry_of(listing, current_list())


@dataclass(frozen=True)
class Comparison:
    """A model that both lists price."""

    vendor: str
    model: str
    """As LiteLLM names it."""
    is_deprecated: bool
    ratios: Mapping[int, Decimal]
    """Our price divided by LiteLLM's, by the number of the usage."""
    excess: Mapping[int, Decimal]
    """How many times our price LiteLLM's can be, at most, by the number of the usage; at least 1.
    It is that of the rates which differ most, so it holds for every mix of their tokens."""


@functools.cache
def second_list() -> dict[str, Any]:
    """Return the fixture: the rates of each size by model, `None` if one is not listed."""
    found: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))
    return found


def compared() -> Iterator[Comparison]:
    """Yield each model that both lists price."""
    prices = Prices()
    for model, (vendor, sizes, is_deprecated) in second_list()["models"].items():
        ratios, excess = {}, {}
        for number, (usage, part) in enumerate(zip(USAGES, PARTS, strict=True), start=1):
            call = BillableCall(model=model, provider=vendor, usage=usage, region=region_of(model))
            ours, rates = prices.quote(call, NOON), rates_at(usage, sizes)
            amount = amount_of(usage, rates)
            if ours.price is not None and ours.rates is not None and amount is not None:
                ratios[number] = ours.price / amount
                excess[number] = _excess(rates, ours.rates, PARTS[part])
        if ratios:
            yield Comparison(vendor, model, is_deprecated, ratios, excess)


def _excess(theirs: Mapping[str, Decimal], ours: Price, names: Iterable[str]) -> Decimal:
    """Return by which factor LiteLLM's rates exceed ours at most; at least 1."""
    _, write, _ = ours.cache_rates
    # A bound bills cache reads as other input.
    bounds = {"cache_read": ours.input, "cache_write": write, "output": ours.output}
    found = (
        theirs[name] / bounds.get(name, ours.input) * MILLION for name in names if name in theirs
    )
    return max(Decimal(1), *found)


def disagreements() -> list[Comparison]:
    """Return the models whose price differs by more than 1% at any usage, with these ratios."""
    found = []
    for each in compared():
        off = {number: ratio for number, ratio in each.ratios.items() if abs(ratio - 1) > TOLERANCE}
        if off:
            found.append(replace(each, ratios=off))
    return found


def rates_at(usage: Usage, sizes: list[list[str | None]]) -> dict[str, Decimal]:
    """Return LiteLLM's rates for the prompt of a usage, in USD per token."""
    held = sizes[max(number for number, size in enumerate(SIZES) if size <= usage.input)]
    rates = zip(RATES, held, strict=True)
    return {name: Decimal(rate) for name, rate in rates if rate is not None}


def amount_of(usage: Usage, rates: Mapping[str, Decimal]) -> Decimal | None:
    """Return the USD of a usage; `None` if LiteLLM's list lacks a rate, or has it as 0."""
    parts = {
        "input": usage.input - usage.cache_read - usage.cache_write,
        "cache_read": usage.cache_read,
        "cache_write": usage.cache_write,
        "output": usage.output,
    }
    used = {name: tokens for name, tokens in parts.items() if tokens}
    if not all(rates.get(name) for name in used):
        return None
    return sum((rates[name] * tokens for name, tokens in used.items()), Decimal(0))


@dataclass(frozen=True)
class Rule:
    """Why our price is right although the lists disagree."""

    vendor: str | None
    model: str
    """Pattern of the models in LiteLLM's list."""
    low: str
    high: str
    """Range of our price divided by LiteLLM's."""
    reason: str


RULES: Final = (
    Rule("aws", r"(anthropic|openai)\.|claude", "1.09", "1.11",
         "IDs without an area are processed in one region, which costs 10% more than the global "
         "price that the second list has ([Amazon](https://aws.amazon.com/bedrock/pricing))"),
    Rule("deepseek", "", "0.49", "0.51",
         "the second list has the price of "
         "[peak hours](https://api-docs.deepseek.com/quick_start/pricing)"),
    Rule("perplexity", "", "1.01", "10",
         "with the [fee per request](https://docs.perplexity.ai/getting-started/pricing), which "
         "the second list has separately"),
    Rule("ovhcloud", "", "1.07", "1.13", "converted from EUR"),
)  # fmt: skip
DEPRECATED: Final = "no longer sold, according to the second list"


def reason_of(vendor: str, model: str, ratio: Decimal, *, is_deprecated: bool) -> str | None:
    """Return why our price is right despite a disagreement; `None` if it may be wrong."""
    for rule in RULES:
        is_for = rule.vendor == vendor and re.match(rule.model, model)
        if is_for and Decimal(rule.low) <= ratio <= Decimal(rule.high):
            return rule.reason
    return DEPRECATED if is_deprecated else None


def explained_table() -> str:
    """Format the disagreements that remain, by reason."""
    found: dict[str, list[tuple[str, Decimal]]] = {}
    for each in disagreements():
        for ratio in each.ratios.values():
            why = reason_of(each.vendor, each.model, ratio, is_deprecated=each.is_deprecated)
            found.setdefault(f"{each.vendor}: {why}", []).append((each.model, ratio))
    rows = []
    for name, listed in sorted(found.items()):
        vendor, _, why = name.partition(": ")
        models = {model for model, _ in listed}
        low, high = (
            f"{each:.2f}" for each in (min(r for _, r in listed), max(r for _, r in listed))
        )
        rows.append((vendor, str(len(models)), low if low == high else f"{low} to {high}", why))
    return table(("vendor", "models", "price, divided by the second list's", "reason"), rows)


# --- what the lists are read into -----------------------------------------------------------------


def rates_of(entry: Mapping[str, Any], prompt: int) -> list[str | None]:
    """Return the rates of an entry of LiteLLM's list for a prompt; `None` for one it lacks."""

    def rate(name: str) -> str | None:
        found, best = entry.get(name), 0
        for key, value in entry.items():
            above = re.fullmatch(rf"{name}_above_(\d+)k_tokens", key)
            if above and value is not None and best < int(above[1]) < prompt // 1_000:
                found, best = value, int(above[1])
        return None if found is None else str(found)

    return [rate(name) for name in RATES.values()]


def read_litellm() -> dict[str, Any]:
    """Return the fixture from LiteLLM's list, without importing LiteLLM."""
    spec = find_spec("litellm")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).with_name("model_prices_and_context_window_backup.json")
    models = {}
    listed = {each.id for each in current_list().providers}
    for model, entry in json.loads(path.read_text(encoding="utf-8")).items():
        vendor = canonical(entry.get("litellm_provider", ""))
        vendor = "google" if vendor.startswith("vertex_ai") else vendor
        is_tiered = "tiered_pricing" in entry
        if entry.get("mode") not in MODES or not entry.get("input_cost_per_token") or is_tiered:
            continue
        if vendor not in listed:
            continue
        deprecated = entry.get("deprecation_date", "")
        is_deprecated = bool(re.fullmatch(r"\d{4}-\d\d-\d\d", deprecated)) and (
            date.fromisoformat(deprecated) < NOON.date()
        )
        models[model] = [vendor, [rates_of(entry, size) for size in SIZES], is_deprecated]
    return {
        "package": f"litellm {importlib.metadata.version('litellm')}",
        "date": str(NOON.date()),
        "models": models,
    }


def as_lines(found: Mapping[str, Any]) -> str:
    """Write a line for each model."""
    models = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found["models"].items()
    )
    head = json.dumps({name: each for name, each in found.items() if name != "models"})
    return f'{head[:-1]}, "models": {{\n{models}\n}}}}\n'


def tables() -> dict[str, Any]:
    """Return which pairs of seller and model, and which moving names, both lists price alike."""
    stand_ins: dict[str, dict[str, bool]] = {}
    latest: dict[str, dict[str, bool]] = {}
    # By the package's own look-up, since ours uses these tables.
    with (
        patch.object(catalogue, "_entry_of", catalogue._loose_entry_of),
        patch.object(price_lookup, "disputed_factor", lambda *_: None),
    ):
        loose = list(compared())
    agreed = {(each.vendor, each.model): _agree(each.ratios) for each in loose}
    # An alias alone disputes no model.
    agreed_on = {
        (entry.vendor, entry.info.id, number)
        for each in loose
        if (entry := as_listed(each.model, each.vendor)) is not None
        for number, ratio in each.ratios.items()
        if abs(ratio - 1) <= TOLERANCE
    }
    disputed: dict[str, dict[str, dict[str, Decimal]]] = {}
    names = dict(enumerate(PARTS, start=1))
    for each in loose:
        entry = as_listed(each.model, each.vendor)
        listing = listing_of(each.model, each.vendor, known=True)
        if entry is None or listing is None or not entry.is_own:
            continue
        if listing.reference.endswith("-latest") or not is_of_family(listing.reference, entry.info):
            continue
        for number, ratio in each.ratios.items():
            why = reason_of(each.vendor, each.model, ratio, is_deprecated=each.is_deprecated)
            is_alias = (entry.vendor, entry.info.id, number) in agreed_on
            if abs(ratio - 1) > TOLERANCE and why is None and not is_alias:
                models = disputed.setdefault(entry.vendor, {})
                parts = models.setdefault(entry.info.id, {})
                part = names[number]
                parts[part] = max(each.excess[number], parts.get(part, Decimal(1)))
    for (vendor, model), is_agreed in agreed.items():
        entry = as_listed(model, vendor)
        if entry is None:
            continue
        if not entry.is_own and entry.vendor in vendors():
            held = stand_ins.setdefault(entry.vendor, {})
            held[entry.info.id] = held.get(entry.info.id, True) and is_agreed
        listing = listing_of(model, vendor, known=True)
        if listing is not None and listing.reference.endswith("-latest"):
            held = latest.setdefault(entry.vendor, {})
            held[listing.reference] = held.get(listing.reference, True) and is_agreed
    return {
        "compared": {
            "lists": [
                f"genai-prices {importlib.metadata.version('genai-prices')}",
                second_list()["package"],
            ],
            "date": date.fromisoformat(second_list()["date"]),
        },
        "stand_ins": _agreed(stand_ins),
        "latest": _agreed(latest),
        "disputed": {
            vendor: {
                model: {part: _rounded_up(factor) for part, factor in sorted(parts.items())}
                for model, parts in sorted(models.items())
            }
            for vendor, models in sorted(disputed.items())
        },
    }


def _agreed(found: Mapping[str, Mapping[str, bool]]) -> dict[str, list[str]]:
    return {
        vendor: sorted(model for model, is_agreed in models.items() if is_agreed)
        for vendor, models in sorted(found.items())
    }


def _rounded_up(factor: Decimal) -> float:
    return float(factor.quantize(Decimal("0.001"), rounding=ROUND_UP))


COMMENTS: Final = {
    "compared": "Prices on which two lists agree: by `python -m tests.price_lists.compare`.",
    "stand_ins": "Models that a vendor sells at their maker's price, by the maker's ID.",
    "latest": "Names of a vendor's current model that both lists price alike.",
    "disputed": "Models on which the lists disagree for no known reason, and at which usage: how "
    "many times\n# the first list's rates those of the second are, at most.",
}


def as_yaml(found: Mapping[str, Any]) -> str:
    """Write the tables, with a line for each model."""
    parts = []
    for name, held in found.items():
        in_line = None if name == "disputed" else False  # the innermost lists
        text = yaml.safe_dump({name: held}, default_flow_style=in_line, width=math.inf)
        parts.append(f"# {COMMENTS[name]}\n{text}")
    return "\n".join(parts)


def _agree(ratios: Mapping[int, Decimal]) -> bool:
    return all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values())


def main() -> None:
    """Write the fixture and the tables."""
    if find_spec("litellm") is not None:
        FIXTURE.write_text(as_lines(read_litellm()), encoding="utf-8")
        second_list.cache_clear()
    LISTS.write_text(as_yaml(tables()), encoding="utf-8")


if __name__ == "__main__":
    main()
