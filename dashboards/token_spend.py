"""The dashboard of those who pay: tokens and US dollars, by agent and model, and quotas."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import SECONDS, SHARE, SHORT, USD, Target

UID: Final = "otel-limits-spend"


NOW: Final = (
    panels.number(
        "Tokens",
        "Input and output tokens in the time range.",
        SHORT,
        queries.or_zero(queries.in_range(queries.TOKENS)),
    ),
    panels.number(
        "US dollars",
        "Spent in the time range on model calls whose price is known.",
        USD,
        queries.or_zero(queries.in_range(queries.COST)),
    ),
    panels.number(
        "USD to end of month",
        "What will be spent until the month is over (UTC), at the pace of the time range.",
        USD,
        queries.or_zero(queries.until_end_of_month(queries.COST)),
    ),
    panels.number(
        "Tokens to end of month",
        "What will be used until the month is over (UTC), at the pace of the time range.",
        SHORT,
        queries.or_zero(queries.until_end_of_month(queries.TOKENS)),
    ),
    panels.number(
        "Input read from a cache",
        "Share of the input tokens that the provider read from its cache.",
        SHARE,
        queries.share(
            queries.in_range(queries.CACHE_READS), queries.in_range(queries.INPUT_TOKENS)
        ),
    ),
    panels.number(
        "Tokens without a price",
        "Share of the tokens whose price is unknown. No number in US dollars includes them.",
        SHARE,
        queries.share(queries.in_range(queries.UNPRICED), queries.in_range(queries.TOKENS)),
    ),
)
"""One number each, for the time range."""


TOKENS: Final = (
    panels.lines(
        "Tokens per minute by type",
        "Input includes cached tokens.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "type")), "{{type}}"),
    ),
    panels.lines(
        "Tokens per minute by agent",
        "Input and output together.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "agent")), "{{agent}}"),
    ),
    panels.lines(
        "Tokens per minute by model",
        "Input and output together.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "model")), "{{model}}"),
    ),
    panels.lines(
        "Tokens per invocation, 95th percentile",
        "Input and output tokens: 19 of 20 invocations of an agent used no more.",
        SHORT,
        Target(queries.quantile(0.5, queries.INVOCATION_TOKENS), "all agents, median"),
        Target(queries.quantile(0.95, queries.INVOCATION_TOKENS, "agent"), "{{agent}}"),
    ),
    panels.lines(
        "Cached tokens per minute",
        "Parts of the input: tokens read from the provider's cache, and tokens written to it.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.CACHED_TOKENS, "kind")), "{{kind}}"),
    ),
    panels.lines(
        "Input read from a cache, by model",
        "Share of a model's input tokens that were read from the cache.",
        SHARE,
        Target(
            queries.ratio(queries.CACHE_READS, queries.INPUT_TOKENS, "model"),
            "{{model}}",
        ),
    ),
)
"""Where the tokens go."""


MONEY: Final = (
    panels.lines(
        "US dollars per hour by agent",
        "Spend rate on model calls whose price is known.",
        USD,
        Target(queries.per_hour(queries.rate(queries.COST, "agent")), "{{agent}}"),
    ),
    panels.lines(
        "US dollars per hour by model",
        "Spend rate on model calls whose price is known.",
        USD,
        Target(queries.per_hour(queries.rate(queries.COST, "model")), "{{model}}"),
    ),
    panels.ranking(
        "Most expensive agents",
        "US dollars in the time range.",
        USD,
        Target(queries.top(10, queries.in_range(queries.COST, "agent")), "{{agent}}"),
    ),
    panels.ranking(
        "Most expensive models",
        "US dollars in the time range.",
        USD,
        Target(queries.top(10, queries.in_range(queries.COST, "model")), "{{model}}"),
    ),
)
"""Where the money goes."""


QUOTAS: Final = (
    panels.ranking(
        "Quotas used most",
        "Share that the whole fleet has used of what a quota permits in its present window, "
        "grants included.",
        SHARE,
        Target(queries.top(10, queries.share_of_quota(queries.QUOTA_USED)), "{{quota}}: {{key}}"),
    ),
    panels.listing(
        "Time until a quota begins again",
        "What was used counts until then.",
        SECONDS,
        Target(queries.until_reset()),
    ),
    panels.lines(
        "Quota used",
        "Share of what a quota permits. At 100 % every further model call is refused.",
        SHARE,
        Target(queries.share_of_quota(queries.QUOTA_USED), "{{quota}}: {{key}}"),
    ),
    panels.lines(
        "Quota reserved",
        "Share that is set aside for model calls under way. What they don't take comes back when "
        "they end, or after 5 minutes when their worker was killed.",
        SHARE,
        Target(queries.share_of_quota(queries.QUOTA_RESERVED), "{{quota}}: {{key}}"),
    ),
    panels.bars(
        "Decisions of quotas by kind",
        "A model call to which several quotas apply is decided by each. Those that begin with "
        "degraded were taken while the store did not answer.",
        SHORT,
        Target(queries.per_bar(queries.QUOTA_DECISIONS, "decision"), "{{decision}}"),
    ),
    panels.bars(
        "Not simply admitted, by quota",
        "refused; observed (enforcement would have refused it); unpriced (a quota in US dollars "
        "did not count it); degraded (decided without the store).",
        SHORT,
        Target(
            queries.per_bar(queries.NOT_ADMITTED, "quota", "decision"), "{{quota}}: {{decision}}"
        ),
    ),
)
"""What is left of the budgets that a fleet shares."""


UNKNOWNS: Final = (
    panels.bars(
        "Tokens without a price, by model",
        "Give the model a price in the policy file, and they appear in the panels above.",
        SHORT,
        Target(queries.per_bar(queries.UNPRICED, "model"), "{{model}}"),
    ),
    panels.bars(
        "Model calls without usage",
        "Calls whose provider reported no usage. Their tokens are estimated unless "
        "OTEL_LIMITS_UNMEASURED says otherwise.",
        SHORT,
        Target(queries.per_bar(queries.UNMEASURED, "agent", "model"), "{{agent}}: {{model}}"),
    ),
    panels.bars(
        "Model calls by kind",
        "Measured, zero_token (the provider reported 0), unmeasured (it reported nothing), failed.",
        SHORT,
        Target(queries.per_bar(queries.MODEL_CALLS, "kind"), "{{kind}}"),
        width=24,
    ),
)
"""What the numbers above don't know."""

ROWS: Final = (
    ("Now", NOW),
    ("Tokens", TOKENS),
    ("Money", MONEY),
    ("Quotas", QUOTAS),
    ("Not measured, not priced", UNKNOWNS),
)
"""Rows of panels, from the answer to the details."""
