"""Servers on the user's own machines, and the cloud of Ollama."""

from __future__ import annotations

from typing import Final

from otel_limits.vendors.vendor import LOCAL, PREFIXES, Source, UsageRule, Vendor

INSIDE: Final = UsageRule("inside")

LOCAL_SERVERS: Final = Vendor(
    name=LOCAL,
    aliases=(
        "llamacpp", "llamafile", "llm_studio", "lm_studio", "mlx", "MLXModel", "ollama",
        "ollama_chat",
    ),
    # prompt_eval_count; usage_json_oaicompat of llama.cpp.
    classes={"llamacpp": INSIDE, "ollama": INSIDE},
    is_listed=False,
    sources={
        "aliases": PREFIXES,
        "classes": Source(
            "https://github.com/ollama/ollama/blob/main/docs/api.md, "
            "https://github.com/ggml-org/llama.cpp/tree/master/tools/server",
            "2026-11-22",
        ),
    },
)  # fmt: skip

OLLAMA_CLOUD: Final = Vendor(
    name="ollama-cloud",
    hosts=("ollama.com",),
    is_listed=False,
    sources={"hosts": Source("https://docs.ollama.com/cloud", "2026-11-22")},
)
