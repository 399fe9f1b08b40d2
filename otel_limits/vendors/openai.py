"""OpenAI, and its models at Azure."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from otel_limits.vendors.images import ImagePatches, ImageTiles
from otel_limits.vendors.vendor import (
    CONVENTIONS,
    NO_PREMIUM,
    PREFIXES,
    PREMIUM,
    PRICE_LIST,
    MediaRule,
    PlaceRule,
    Source,
    UsageRule,
    Vendor,
)

# Cached tokens and reasoning are parts of prompt_tokens and completion_tokens. xAI (Chat) and
# Gemini's OpenAI endpoint exclude reasoning from completion_tokens; only the total includes it:
# https://github.com/BerriAI/litellm/blob/main/litellm/llms/xai/chat/transformation.py,
# https://github.com/ogx-ai/ogx/issues/5122. So a total above the sum of its parts is output.
COUNTED_INSIDE: Final = UsageRule("inside")

AUDIO: Final = 10.0
"""Tokens per second, derived from the prices per minute: https://community.openai.com/t/971012."""

# For models that count patches, and their tokens per patch. Other factors than the documented ones
# are measured: https://community.openai.com/t/1372291.
PATCH: Final = 32
MOST_PATCHES: Final = 1_536
FACTORS: Final = (
    (r"gpt-((4\.1|5)[\w.]*-|(5\.[2-9]|[6-9]).*)nano", 2.46),
    (r"o4-mini", 1.72),
    (r"gpt-((4\.1|5)[\w.]*-|(5\.[2-9]|[6-9]).*)mini", 1.62),
    (r"gpt-5\.[2-9]|gpt-[6-9]", 1.2),
)

# Tokens of an image and of each 512-pixel tile.
TILED: Final = (
    (r"gpt-4o-mini", 2833, 5667),
    (r"gpt-5", 70, 140),
    (r"\bo[13]\b", 75, 150),
    (r"\b(gpt-\d|o[134]\b|o[134]-|chatgpt|computer-use)", 85, 170),
)

MEDIA: Final = (
    *(
        MediaRule(
            models=re.compile(models),
            image=ImagePatches(side=PATCH, most=MOST_PATCHES, factor=factor),
            audio=AUDIO,
        )
        for models, factor in FACTORS
    ),
    *(
        MediaRule(models=re.compile(models), image=ImageTiles(base=base, each=each), audio=AUDIO)
        for models, base, each in TILED
    ),
)

DEAREST_ZONE: Final = Decimal("1.2")
"""Azure's data zones and regions cost 10 to 20% more."""
SINCE_MARCH_2026: Final = re.compile(r"(?:ft:)?gpt-(?:5\.[4-9]|[6-9]|realtime-2\.1)")
"""Models "released on or after March 5, 2026". That began with GPT-5.4."""


def _premium(model: str, place: str) -> Decimal | None:  # noqa: ARG001  the same in each region
    return PREMIUM if SINCE_MARCH_2026.match(model) else NO_PREMIUM


def _dearest(place: str) -> Decimal | None:  # noqa: ARG001  the same in each region
    return PREMIUM


MEDIA_SOURCE: Final = Source(
    "https://developers.openai.com/api/docs/guides/images-vision", "2026-11-22"
)


def _of_zone(model: str, place: str) -> Decimal | None:  # noqa: ARG001
    return None


def _dearest_zone(place: str) -> Decimal | None:  # noqa: ARG001
    return DEAREST_ZONE


OPENAI: Final = Vendor(
    name="openai",
    aliases=("openai_responses", "text-completion-openai"),
    hosts=("api.openai.com",),
    classes={"openai": COUNTED_INSIDE, "openai_responses": COUNTED_INSIDE},
    media=MEDIA,
    media_of_classes=MEDIA[-1],
    # MCP servers and the search of tools cost their tokens.
    token_tools=frozenset({"mcp", "tool_search"}),
    place=PlaceRule(
        premium=_premium, dearest=_dearest, hosts=(re.compile(r"//([a-z]{2})\.api\.openai\.com"),)
    ),
    # As frameworks use its client for any other vendor, whose name is then in the model ID.
    is_gateway=True,
    sources={
        "aliases": PREFIXES,
        "hosts": PRICE_LIST,
        "classes": Source("openai-python, types/completion_usage.py", "2026-11-22"),
        "media_of_classes": MEDIA_SOURCE,
        "media": MEDIA_SOURCE,
        "token_tools": Source("https://developers.openai.com/api/docs/pricing", "2026-11-22"),
        "place": Source(
            "https://developers.openai.com/api/docs/guides/data-residency", "2026-11-22"
        ),
    },
)

AZURE: Final = Vendor(
    name="azure",
    aliases=(
        "az.ai.inference", "az.ai.openai", "azure.ai.inference", "azure.ai.openai", "azure_ai",
        "azure_openai", "azure_text",
    ),
    hosts=(
        "cognitiveservices.azure.com", "inference.ai.azure.com", "models.ai.azure.com",
        "openai.azure.com", "services.ai.azure.com",
    ),
    token_tools=OPENAI.token_tools,
    # LiteLLM's infix for deployments in a data zone or region, which cost more.
    place=PlaceRule(
        premium=_of_zone,
        dearest=_dearest_zone,
        model_ids=(re.compile(r"^azure/(us|eu)/"),),
    ),
    sources={
        "aliases": CONVENTIONS,
        "hosts": Source(
            "https://learn.microsoft.com/azure/ai-foundry/foundry-models/concepts/endpoints, "
            "https://learn.microsoft.com/dotnet/api/overview/azure/ai.inference-readme, "
            "https://microsoft.github.io/genaiscript/configuration/azure-ai-foundry",
            "2026-11-26",
        ),
        "token_tools": OPENAI.sources["token_tools"],
        "place": Source("https://pypi.org/project/azure-genai-prices/", "2026-11-22"),
    },
)  # fmt: skip
