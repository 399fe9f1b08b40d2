"""MiniMax, whose API follows OpenAI's and Anthropic's formats."""

from __future__ import annotations

from typing import Final

from otel_limits.vendors.vendor import Source, Vendor

MINIMAX: Final = Vendor(
    name="minimax",
    # Not those in China, which bill in CNY: api.minimaxi.com, api.minimax.cn.
    hosts=("api.minimax.io",),
    sources={
        "hosts": Source(
            "https://platform.minimax.io/docs/api-reference/text-prompt-caching", "2026-11-26"
        )
    },
)
