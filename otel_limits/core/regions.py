"""Regional price premiums missing from price lists."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

PREMIUM: Final = Decimal("1.1")
"""10% on every token, at all vendors below."""
NO_PREMIUM: Final = Decimal(1)

GLOBAL: Final = "global"
"""Vendors' name for requests without a region, whose prices are in the lists."""

HIDDEN_REGION: Final = "the region of its client, which is not exposed"
"""A region that determines the price but cannot be read."""

OPENAI: Final = re.compile(r"(?:ft:)?gpt-(?:5\.[4-9]|[6-9]|realtime-2\.1)")
"""Models "released on or after March 5, 2026":
https://developers.openai.com/api/docs/guides/data-residency. That began with GPT-5.4."""

GOOGLE_SAME: Final = re.compile(
    r"claude-(?:3|instant|2|4-|(?:opus|sonnet)-4(?:-[01])?(?:@|-\d{8}|$))|gemini-(?:[12]|pro|flash)"
)
"""Models with the same price everywhere: Claude before Sonnet 4.5, and Gemini before 3.
https://platform.claude.com/docs/en/build-with-claude/claude-on-vertex-ai, "Global vs regional
endpoints"; https://cloud.google.com/vertex-ai/generative-ai/pricing."""
GOOGLE_MORE: Final = re.compile(r"claude-|gemini-(?:[3-9].*(?:flash|argon))")
"""Models with a premium in regions and multi-regions, from LiteLLM's price list,
`regional_endpoint_uplift_multiplier`."""


BOTH_LISTED: Final = ("global.", "regional.")
"""Prefixes of Amazon's model IDs on the list if it has both prices: the model costs more in every
region, see https://aws.amazon.com/bedrock/pricing."""
AMERICAN: Final = re.compile(r"us-(?:east|west)-\d")
"""Amazon's regions whose prices are on the list for all other models. Elsewhere most cost 5 to 70%
more, with no common factor: https://aws.amazon.com/bedrock/pricing."""


def premium(vendor: str, model: str, region: str | None) -> Decimal | None:
    """Return the factor on list prices; `None` if unknown.

    Args:
        vendor: The vendor, as named on the list.
        model: The vendor's model ID.
        region: The requested region, if any.
    """
    if region is None:
        return NO_PREMIUM
    if vendor == "openai":
        return PREMIUM if OPENAI.match(model) else NO_PREMIUM
    if vendor == "anthropic":
        # Models before Opus 4.6 reject a region:
        # https://platform.claude.com/docs/en/manage-claude/data-residency.
        return PREMIUM
    if vendor == "aws":
        return _of_amazon(model, region)
    if vendor == "google" and model.startswith(("claude-", "gemini-")):
        return _of_google(model, region)
    return NO_PREMIUM


def _of_amazon(model: str, region: str) -> Decimal | None:
    is_listed = model.startswith(BOTH_LISTED) and "-gov-" not in region
    return NO_PREMIUM if is_listed or AMERICAN.fullmatch(region) else None


def _of_google(model: str, region: str) -> Decimal | None:
    if GOOGLE_SAME.match(model):
        return NO_PREMIUM
    return PREMIUM if GOOGLE_MORE.match(model) and region != HIDDEN_REGION else None
