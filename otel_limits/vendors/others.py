"""Vendors and gateways of which little more than a name is known."""

from __future__ import annotations

from typing import Final

from otel_limits.vendors.vendor import (
    CONVENTIONS,
    PREFIXES,
    PRICE_LIST,
    Source,
    UsageRule,
    Vendor,
)

INSIDE: Final = UsageRule("inside")

MISTRAL: Final = Vendor(
    name="mistral",
    aliases=("mistral_ai",),
    hosts=("api.mistral.ai",),
    classes={"mistral": INSIDE},
    sources={
        "aliases": CONVENTIONS,
        "hosts": PRICE_LIST,
        "classes": Source(
            "https://docs.mistral.ai/api/; mistralai, models/usageinfo.py", "2026-11-22"
        ),
    },
)

XAI: Final = Vendor(
    name="x-ai",
    aliases=("x_ai", "xai"),
    hosts=("api.x.ai",),
    token_tools=frozenset({"mcp"}),
    sources={
        "aliases": CONVENTIONS,
        "hosts": PRICE_LIST,
        "token_tools": Source("https://docs.x.ai/developers/pricing", "2026-11-22"),
    },
)

WRITER: Final = Vendor(
    name="writer",
    hosts=("api.writer.com",),
    # Strands' WriterModel sends zeros unless stream_options request usage.
    classes={"writer": UsageRule("inside", zeros_are_made_up=True)},
    is_listed=False,
    sources={
        "hosts": Source("https://dev.writer.com/home/pricing", "2026-11-22"),
        "classes": Source("writer-sdk, types/chat_completion_usage.py", "2026-11-22"),
    },
)

LLAMA_API: Final = Vendor(
    name="llamaapi",
    classes={"llamaapi": INSIDE},
    is_listed=False,
    sources={"classes": Source("https://llama.developer.meta.com/docs/", "2026-11-22")},
)

LITELLM: Final = Vendor(
    name="litellm",
    # It adds Anthropic's cached tokens to the input itself.
    classes={"litellm": INSIDE},
    is_gateway=True,
    sources={"classes": Source("https://docs.litellm.ai/docs/completion/output", "2026-11-22")},
)
LITELLM_PROXY: Final = Vendor(name="litellm_proxy", is_listed=False)
WATSONX: Final = Vendor(
    name="watsonx",
    aliases=("ibm.watsonx.ai",),
    is_listed=False,
    sources={"aliases": CONVENTIONS},
)

OPENROUTER: Final = Vendor(
    name="openrouter",
    hosts=("openrouter.ai",),
    # The time, and repaired JSON.
    token_tools=frozenset({"openrouter:datetime", "response-healing"}),
    sources={
        "hosts": PRICE_LIST,
        "token_tools": Source(
            "https://openrouter.ai/docs/guides/features/server-tools", "2026-11-25"
        ),
    },
)

BY_NAME: Final = (
    Vendor(name="ai21", hosts=("api.ai21.com",), sources={"hosts": PREFIXES}),
    *(
        Vendor(
            name=name,
            aliases=aliases,
            hosts=hosts,
            sources={"aliases": PREFIXES, "hosts": PRICE_LIST},
        )
        for name, aliases, hosts in (
            ("cerebras", (), ("api.cerebras.ai",)),
            ("cohere", ("cohere_chat",), ("api.cohere.ai", "api.cohere.com")),
            ("fireworks", ("fireworks_ai",), ("api.fireworks.ai",)),
            ("groq", (), ("api.groq.com",)),
            ("moonshotai", ("moonshot", "moonshot_ai"), ("api.moonshot.ai", "api.moonshot.cn")),
            ("novita", (), ("api.novita.ai",)),
            ("perplexity", (), ("api.perplexity.ai",)),
            ("together", ("together_ai",), ("api.together.ai", "api.together.xyz")),
            ("zai", (), ("api.z.ai",)),
        )
    ),
)

OTHERS: Final = (
    MISTRAL, XAI, WRITER, LLAMA_API, LITELLM, LITELLM_PROXY, WATSONX, OPENROUTER, *BY_NAME,
)  # fmt: skip
