"""The dashboard of those who pay: tokens and US dollars, by agent and model, and quotas."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import SECONDS, SHARE, SHORT, USD, Target
from dashboards.queries import PER_BAR, WHOLE_RANGE

UID: Final = "otel-limits-spend"


NOW: Final = (
    panels.number(
        "Tokens",
        "Input and output tokens in the time range.",
        SHORT,
        Target(queries.or_zero(queries.increase(queries.TOKENS, WHOLE_RANGE))),
        width=4,
        height=4,
    ),
    panels.number(
        "US dollars",
        "Spent in the time range on model calls whose price is known.",
        USD,
        Target(queries.or_zero(queries.increase(queries.COST, WHOLE_RANGE))),
        width=4,
        height=4,
    ),
    panels.number(
        "USD to end of month",
        "What will be spent until the month is over (UTC), at the pace of the time range.",
        USD,
        Target(queries.or_zero(queries.until_end_of_month(queries.COST))),
        width=4,
        height=4,
    ),
    panels.number(
        "Tokens to end of month",
        "What will be used until the month is over (UTC), at the pace of the time range.",
        SHORT,
        Target(queries.or_zero(queries.until_end_of_month(queries.TOKENS))),
        width=4,
        height=4,
    ),
    panels.number(
        "Input read from a cache",
        "Share of the input tokens that the provider read from its cache.",
        SHARE,
        Target(
            queries.share(
                queries.increase(queries.CACHE_READS, WHOLE_RANGE),
                queries.increase(queries.INPUT_TOKENS, WHOLE_RANGE),
            )
        ),
        width=4,
        height=4,
    ),
    panels.number(
        "Tokens without a price",
        "Share of the tokens whose price is unknown. No number in US dollars includes them.",
        SHARE,
        Target(
            queries.share(
                queries.increase(queries.UNPRICED, WHOLE_RANGE),
                queries.increase(queries.TOKENS, WHOLE_RANGE),
            )
        ),
        width=4,
        height=4,
    ),
)
"""One number each, for the time range."""


TOKENS: Final = (
    panels.lines(
        "Tokens per minute by type",
        "Input includes cached tokens.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "type")), "{{type}}"),
        width=12,
    ),
    panels.lines(
        "Tokens per minute by agent",
        "Input and output together.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "agent")), "{{agent}}"),
        width=12,
    ),
    panels.lines(
        "Tokens per minute by model",
        "Input and output together.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "model")), "{{model}}"),
        width=12,
    ),
    panels.lines(
        "Tokens per invocation, 95th percentile",
        "Input and output tokens: 19 of 20 invocations of an agent used no more.",
        SHORT,
        Target(queries.quantile(0.5, queries.INVOCATION_TOKENS), "all agents, median"),
        Target(queries.quantile(0.95, queries.INVOCATION_TOKENS, "agent"), "{{agent}}"),
        width=12,
    ),
    panels.lines(
        "Cached tokens per minute",
        "Parts of the input: tokens read from the provider's cache, and tokens written to it.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.CACHED_TOKENS, "kind")), "{{kind}}"),
        width=12,
    ),
    panels.lines(
        "Input read from a cache, by model",
        "Share of a model's input tokens that were read from the cache.",
        SHARE,
        Target(
            f"{queries.rate(queries.CACHE_READS, 'model')}"
            f" / {queries.rate(queries.INPUT_TOKENS, 'model')}",
            "{{model}}",
        ),
        width=12,
    ),
)
"""Where the tokens go."""


MONEY: Final = (
    panels.lines(
        "US dollars per hour by agent",
        "Spend rate on model calls whose price is known.",
        USD,
        Target(queries.per_hour(queries.rate(queries.COST, "agent")), "{{agent}}"),
        width=12,
    ),
    panels.lines(
        "US dollars per hour by model",
        "Spend rate on model calls whose price is known.",
        USD,
        Target(queries.per_hour(queries.rate(queries.COST, "model")), "{{model}}"),
        width=12,
    ),
    panels.ranking(
        "Most expensive agents",
        "US dollars in the time range.",
        USD,
        Target(queries.top(10, queries.increase(queries.COST, WHOLE_RANGE, "agent")), "{{agent}}"),
        width=12,
    ),
    panels.ranking(
        "Most expensive models",
        "US dollars in the time range.",
        USD,
        Target(queries.top(10, queries.increase(queries.COST, WHOLE_RANGE, "model")), "{{model}}"),
        width=12,
    ),
)
"""Where the money goes."""


QUOTAS: Final = (
    panels.ranking(
        "Quotas used most",
        "Share that the whole fleet has used of what a quota permits in its present window, "
        "grants included.",
        SHARE,
        Target(
            queries.top(10, queries.share_of_quota(queries.QUOTA_USED)),
            "{{quota}}: {{key}}",
        ),
        width=12,
    ),
    panels.listing(
        "Time until a quota begins again",
        "What was used counts until then.",
        SECONDS,
        Target(queries.until_reset()),
        width=12,
    ),
    panels.lines(
        "Quota used",
        "Share of what a quota permits. At 100 % every further model call is refused.",
        SHARE,
        Target(queries.share_of_quota(queries.QUOTA_USED), "{{quota}}: {{key}}"),
        width=12,
    ),
    panels.lines(
        "Quota reserved",
        "Share that is set aside for model calls under way. What they don't take comes back when "
        "they end, or after 5 minutes when their worker was killed.",
        SHARE,
        Target(queries.share_of_quota(queries.QUOTA_RESERVED), "{{quota}}: {{key}}"),
        width=12,
    ),
    panels.bars(
        "Decisions of quotas by kind",
        "A model call to which several quotas apply is decided by each. Those that begin with "
        "degraded were taken while the store did not answer.",
        SHORT,
        Target(
            f"{queries.increase(queries.QUOTA_DECISIONS, PER_BAR, 'decision')} > 0",
            "{{decision}}",
        ),
        width=12,
    ),
    panels.bars(
        "Not simply admitted, by quota",
        "refused; observed (enforcement would have refused it); unpriced (a quota in US dollars "
        "did not count it); degraded (decided without the store).",
        SHORT,
        Target(
            f"{queries.increase(queries.NOT_ADMITTED, PER_BAR, 'quota', 'decision')} > 0",
            "{{quota}}: {{decision}}",
        ),
        width=12,
    ),
)
"""What is left of the budgets that a fleet shares."""


UNKNOWNS: Final = (
    panels.bars(
        "Tokens without a price, by model",
        "Give the model a price in the policy file, and they appear in the panels above.",
        SHORT,
        Target(f"{queries.increase(queries.UNPRICED, PER_BAR, 'model')} > 0", "{{model}}"),
        width=12,
    ),
    panels.bars(
        "Model calls without usage",
        "Calls whose provider reported no usage. Their tokens are estimated unless "
        "OTEL_LIMITS_UNMEASURED says otherwise.",
        SHORT,
        Target(
            f"{queries.increase(queries.UNMEASURED, PER_BAR, 'agent', 'model')} > 0",
            "{{agent}}: {{model}}",
        ),
        width=12,
    ),
    panels.bars(
        "Model calls by kind",
        "Measured, zero_token (the provider reported 0), unmeasured (it reported nothing), failed.",
        SHORT,
        Target(f"{queries.increase(queries.MODEL_CALLS, PER_BAR, 'kind')} > 0", "{{kind}}"),
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
