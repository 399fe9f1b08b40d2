"""What it costs more to be answered in one part of the world: lists do not say it, vendors do."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

PREMIUM: Final = Decimal("1.1")
"""Ten per cent on every token; each of the vendors below takes as much."""
NO_PREMIUM: Final = Decimal(1)

GLOBAL: Final = "global"
"""How vendors call the whole world, which is what lists have the price of."""

UNTOLD: Final = "the region of its client, which does not tell it"
"""Said of a place that decides the price, and that nobody can read."""

OPENAI: Final = re.compile(r"(?:ft:)?gpt-(?:5\.[4-9]|[6-9]|realtime-2\.1)")
"""Models "released on or after March 5, 2026":
https://developers.openai.com/api/docs/guides/data-residency. That began with GPT-5.4."""

GOOGLE_SAME: Final = re.compile(
    r"claude-(?:3|instant|2|4-|(?:opus|sonnet)-4(?:-[01])?(?:@|-\d{8}|$))|gemini-(?:[12]|pro|flash)"
)
"""Models that cost the same everywhere: Claude before Sonnet 4.5, and Gemini before 3.
https://platform.claude.com/docs/en/build-with-claude/claude-on-vertex-ai, "Global vs regional
endpoints"; https://cloud.google.com/vertex-ai/generative-ai/pricing."""
GOOGLE_MORE: Final = re.compile(r"claude-|gemini-(?:[3-9].*(?:flash|argon))")
"""Models that cost more in regions and in multi-regions: LiteLLM's list of prices,
`regional_endpoint_uplift_multiplier`."""


BOTH_LISTED: Final = ("global.", "regional.")
"""What ids of models of Amazon begin with on the list where it has both prices: a model that costs
more in every region, as https://aws.amazon.com/bedrock/pricing says of each."""
AMERICAN: Final = re.compile(r"us-(?:east|west)-\d")
"""Regions of Amazon whose prices the list has of all other models. Most of them cost more
elsewhere, by 5 to 70 % and by no rule: https://aws.amazon.com/bedrock/pricing."""


def premium(seller: str, model: str, region: str | None) -> Decimal | None:
    """By how much the prices of a list have to be multiplied; `None` where nobody knows.

    Args:
        seller: Who sells, by the name on the list.
        model: The id under which it is sold.
        region: Where it is to be answered; `None` where nobody asked for a place.
    """
    if region is None:
        return NO_PREMIUM
    if seller == "openai":
        return PREMIUM if OPENAI.match(model) else NO_PREMIUM
    if seller == "anthropic":
        # Models before Opus 4.6 refuse to be asked for a place:
        # https://platform.claude.com/docs/en/manage-claude/data-residency.
        return PREMIUM
    if seller == "aws":
        return _of_amazon(model, region)
    if seller == "google" and model.startswith(("claude-", "gemini-")):
        return _of_google(model, region)
    return NO_PREMIUM


def _of_amazon(model: str, region: str) -> Decimal | None:
    is_listed = model.startswith(BOTH_LISTED) and "-gov-" not in region
    return NO_PREMIUM if is_listed or AMERICAN.fullmatch(region) else None


def _of_google(model: str, region: str) -> Decimal | None:
    if GOOGLE_SAME.match(model):
        return NO_PREMIUM
    return PREMIUM if GOOGLE_MORE.match(model) and region != UNTOLD else None
