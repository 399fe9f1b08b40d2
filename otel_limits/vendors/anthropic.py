"""Anthropic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from otel_limits.vendors.images import ImagePatches
from otel_limits.vendors.vendor import (
    PREMIUM,
    PRICE_LIST,
    MediaRule,
    PlaceRule,
    Source,
    UsageRule,
    Vendor,
)

if TYPE_CHECKING:
    from decimal import Decimal

PATCH: Final = 28
PAGE: Final = 2_300
""""Each page typically uses 1,500-3,000 tokens":
https://platform.claude.com/docs/en/build-with-claude/pdf-support; measured: 2,100 to 2,480."""

MEDIA: Final = (
    MediaRule(  # models since 4.7 allow larger images
        models=re.compile(r"claude-[a-z]+-(4-[7-9]|[5-9])(\D|$)"),
        image=ImagePatches(side=PATCH, most=4_784, edge=2_576),
        page=PAGE,
    ),
    MediaRule(
        models=re.compile("claude"),
        image=ImagePatches(side=PATCH, most=1_600, edge=1_568),
        page=PAGE,
    ),
)


def _premium(model: str, place: str) -> Decimal | None:  # noqa: ARG001
    # Models before Opus 4.6 reject a region.
    return PREMIUM


def _dearest(place: str) -> Decimal | None:  # noqa: ARG001  the same in each region
    return PREMIUM


MEDIA_SOURCE: Final = Source(
    "https://platform.claude.com/docs/en/build-with-claude/vision", "2026-11-22"
)

ANTHROPIC: Final = Vendor(
    name="anthropic",
    hosts=("api.anthropic.com",),
    # "Total input tokens in a request is the summation of input_tokens,
    # cache_creation_input_tokens, and cache_read_input_tokens".
    classes={"anthropic": UsageRule("outside")},
    media=MEDIA,
    media_of_classes=MEDIA[-1],
    # Web fetch, MCP servers and the search of tools cost their tokens. Code execution is free with
    # web search or web fetch, and otherwise within 1,550 hours a month.
    token_tools=frozenset(
        {"code_execution", "mcp_toolset", "tool_search_tool_bm25", "tool_search_tool_regex"}
        | {"web_fetch"}
    ),
    place=PlaceRule(premium=_premium, dearest=_dearest),
    sources={
        "hosts": PRICE_LIST,
        "classes": Source("anthropic-sdk-python, types/usage.py", "2026-11-22"),
        "media_of_classes": MEDIA_SOURCE,
        "media": MEDIA_SOURCE,
        "token_tools": Source(
            "https://platform.claude.com/docs/en/about-claude/pricing", "2026-11-22"
        ),
        "place": Source(
            "https://platform.claude.com/docs/en/manage-claude/data-residency", "2026-11-22"
        ),
    },
)
