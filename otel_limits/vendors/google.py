"""Google: the Gemini API, and Vertex AI."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from otel_limits.vendors.images import FixedTiles, Flat
from otel_limits.vendors.vendor import (
    CONVENTIONS,
    HIDDEN_REGION,
    NO_PREMIUM,
    PREMIUM,
    MediaRule,
    PlaceRule,
    Source,
    UsageRule,
    Vendor,
)

if TYPE_CHECKING:
    from decimal import Decimal

MEDIA: Final = (
    # Since Gemini 3, at its default resolution, for any size:
    # https://ai.google.dev/gemini-api/docs/media-resolution.
    MediaRule(models=re.compile(r"gemini-([3-9]|\d\d)(\D|$)"), image=Flat(1_120), page=560),
    MediaRule(
        models=re.compile("gemini"), image=FixedTiles(each=258, small=384, tile=768), page=258
    ),
)

SAME: Final = re.compile(
    r"claude-(?:3|instant|2|4-|(?:opus|sonnet)-4(?:-[01])?(?:@|-\d{8}|$))|gemini-(?:[12]|pro|flash)"
)
"""Models with the same price everywhere: Claude before Sonnet 4.5, and Gemini before 3.
https://platform.claude.com/docs/en/build-with-claude/claude-on-vertex-ai, "Global vs regional
endpoints"."""
MORE: Final = re.compile(r"claude-|gemini-(?:[3-9].*(?:flash|argon))")
"""Models with a premium in regions and multi-regions, from LiteLLM's price list,
`regional_endpoint_uplift_multiplier`."""


def _premium(model: str, place: str) -> Decimal | None:
    if not model.startswith(("claude-", "gemini-")) or SAME.match(model):
        return NO_PREMIUM
    return PREMIUM if MORE.match(model) and place != HIDDEN_REGION else None


def _dearest(place: str) -> Decimal | None:  # noqa: ARG001  the same in each region
    return PREMIUM


MEDIA_SOURCE: Final = Source("https://ai.google.dev/gemini-api/docs/tokens", "2026-11-22")

GOOGLE: Final = Vendor(
    name="google",
    aliases=(
        "gcp.gemini", "gcp.gen_ai", "gcp.vertex_ai", "gcp.vertex.agent", "gemini", "vertex_ai",
    ),
    hosts=(
        "generativelanguage.googleapis.com",
        "aiplatform.googleapis.com", "*-aiplatform.googleapis.com",
        "aiplatform.*.rep.googleapis.com",
        "aiplatform-*.p.googleapis.com", "*-aiplatform-*.p.googleapis.com",
    ),
    # Thoughts are not part of candidates, except in some answers: litellm,
    # vertex_and_google_ai_studio_gemini.py.
    classes={"gemini": UsageRule("inside", zeros_are_made_up=True, total_is_final=True)},
    apart=("candidates_token_count",),
    media=MEDIA,
    media_of_classes=MEDIA[-1],
    # Fields of a tool, which have no type. The search of files is free:
    # https://ai.google.dev/gemini-api/docs/file-search.
    token_tools=frozenset(
        {"code_execution", "file_search", "mcp_servers", "url_context"}
    ),
    place=PlaceRule(
        premium=_premium,
        dearest=_dearest,
        hosts=(
            re.compile(r"//([a-z0-9-]+)-aiplatform(?:-[a-z0-9-]+\.p)?\.googleapis\.com"),
            re.compile(r"//aiplatform\.([a-z]+)\.rep\.googleapis\.com"),
        ),
    ),
    audio_as_text=True,
    sources={
        "aliases": CONVENTIONS,
        "hosts": Source(
            "https://docs.cloud.google.com/vertex-ai/docs/general/googleapi-access-methods",
            "2026-11-26",
        ),
        "classes": Source(
            "google-genai, types.py, GenerateContentResponseUsageMetadata", "2026-11-22"
        ),
        "apart": Source(
            "google-genai, types.py, GenerateContentResponseUsageMetadata", "2026-11-22"
        ),
        "media_of_classes": MEDIA_SOURCE,
        "media": MEDIA_SOURCE,
        "token_tools": Source("https://ai.google.dev/gemini-api/docs/pricing", "2026-11-22"),
        "place": Source("https://cloud.google.com/vertex-ai/generative-ai/pricing", "2026-11-22"),
        "audio_as_text": Source("https://ai.google.dev/gemini-api/docs/pricing", "2026-11-22"),
    },
)  # fmt: skip
