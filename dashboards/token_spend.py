"""The dashboard of those who pay: tokens and US dollars, by agent and model, and quotas."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import SECONDS, SHARE, SHORT, USD, Target

UID: Final = panels.SPEND


TIME_RANGE: Final = (
    panels.number(
        "Agents used these tokens",
        "Input and output tokens in the time range.",
        SHORT,
        queries.or_zero(queries.in_range(queries.TOKENS)),
    ),
    panels.number(
        "Agents spent these dollars",
        "Spent in the time range on model calls whose price is known.",
        USD,
        queries.or_zero(queries.in_range(queries.COST)),
    ),
    panels.number(
        "The month will still cost",
        "What will be spent until the month is over (UTC), at the pace of the time range.",
        USD,
        queries.or_zero(queries.until_end_of_month(queries.COST)),
    ),
    panels.number(
        "The month will still use",
        "What will be used until the month is over (UTC), at the pace of the time range.",
        SHORT,
        queries.or_zero(queries.until_end_of_month(queries.TOKENS)),
    ),
    panels.number(
        "A cache gave so much input",
        "Share of the input tokens that the provider read from its cache.",
        SHARE,
        queries.share(
            queries.in_range(queries.CACHE_READS), queries.in_range(queries.INPUT_TOKENS)
        ),
    ),
    panels.number(
        "So many tokens lack a price",
        "Share of the tokens whose price is unknown. No number in US dollars includes them.",
        SHARE,
        queries.share(queries.in_range(queries.UNPRICED), queries.in_range(queries.TOKENS)),
        steps=((None, "green"), (0.01, "orange"), (0.25, "red")),
    ),
)
"""One number each, for the time range."""


TOKENS: Final = (
    panels.lines(
        "Agents read and wrote so many tokens a minute",
        "Input includes cached tokens.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "type")), "{{type}}"),
    ),
    panels.lines(
        "These agents used the tokens, a minute",
        "Input and output together.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "agent")), "{{agent}}"),
    ),
    panels.lines(
        "These models used the tokens, a minute",
        "Input and output together.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.TOKENS, "model")), "{{model}}"),
    ),
    panels.lines(
        "19 of 20 invocations used at most so many tokens",
        "Input and output tokens: 19 of 20 invocations of an agent used no more.",
        SHORT,
        Target(queries.quantile(0.5, queries.INVOCATION_TOKENS), "all agents, median"),
        Target(queries.quantile(0.95, queries.INVOCATION_TOKENS, "agent"), "{{agent}}"),
    ),
    panels.lines(
        "Caches were read and written, tokens a minute",
        "Parts of the input: tokens read from the provider's cache, and tokens written to it.",
        SHORT,
        Target(queries.per_minute(queries.rate(queries.CACHED_TOKENS, "kind")), "{{kind}}"),
    ),
    panels.lines(
        "Caches gave each model so much of its input",
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
        "These agents spent the money, USD an hour",
        "Spend rate on model calls whose price is known.",
        USD,
        Target(queries.per_hour(queries.rate(queries.COST, "agent")), "{{agent}}"),
    ),
    panels.lines(
        "These models cost the money, USD an hour",
        "Spend rate on model calls whose price is known.",
        USD,
        Target(queries.per_hour(queries.rate(queries.COST, "model")), "{{model}}"),
    ),
    panels.ranking(
        "These agents cost most",
        "US dollars in the time range.",
        USD,
        Target(queries.top(10, queries.in_range(queries.COST, "agent")), "{{agent}}"),
    ),
    panels.ranking(
        "These models cost most",
        "US dollars in the time range.",
        USD,
        Target(queries.top(10, queries.in_range(queries.COST, "model")), "{{model}}"),
    ),
)
"""Where the money goes."""


QUOTAS: Final = (
    panels.ranking(
        "These quotas are used most",
        "Share that the whole fleet has used of what a quota permits in its present window, "
        "grants included.",
        SHARE,
        Target(queries.top(10, queries.share_of_quota(queries.QUOTA_USED)), "{{quota}}: {{key}}"),
        steps=((None, "green"), (0.75, "orange"), (0.9, "red")),
    ),
    panels.listing(
        "Quotas begin again after this time",
        "What was used counts until then.",
        SECONDS,
        Target(queries.until_reset()),
    ),
    panels.lines(
        "Quotas were used to this share",
        "Share of what a quota permits. At 100 % every further model call is refused.",
        SHARE,
        Target(queries.share_of_quota(queries.QUOTA_USED), "{{quota}}: {{key}}"),
    ),
    panels.lines(
        "Calls under way have reserved this share",
        "Share that is set aside for model calls under way. What they don't take comes back when "
        "they end, or after 5 minutes when their worker was killed.",
        SHARE,
        Target(queries.share_of_quota(queries.QUOTA_RESERVED), "{{quota}}: {{key}}"),
    ),
    panels.lines(
        "So many calls wait for these quotas",
        "Model calls that wait because their quota has on_exceeded: wait and too little is left.",
        SHORT,
        Target(f"sum by (quota) ({queries.gauge(queries.QUOTA_WAITING)})", "{{quota}}"),
    ),
    panels.lines(
        "19 of 20 calls that waited did so at most this long",
        "95th percentile by quota, however the wait ended.",
        SECONDS,
        Target(queries.quantile(0.95, queries.QUOTA_WAIT, "quota"), "{{quota}}"),
    ),
    panels.bars(
        "Quotas decided like this",
        "A model call to which several quotas apply is decided by each. Those that begin with "
        "degraded were taken while the store did not answer.",
        SHORT,
        Target(queries.per_bar(queries.QUOTA_DECISIONS, "decision"), "{{decision}}"),
    ),
    panels.bars(
        "Quotas did not simply admit these calls",
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
        "These models used tokens without a price",
        "Give the model a price in the policy file, and they appear in the panels above.",
        SHORT,
        Target(queries.per_bar(queries.UNPRICED, "model"), "{{model}}"),
    ),
    panels.bars(
        "Providers reported no usage of these calls",
        "Calls whose provider reported no usage. Their tokens are estimated unless "
        "OTEL_LIMITS_UNMEASURED says otherwise.",
        SHORT,
        Target(queries.per_bar(queries.UNMEASURED, "agent", "model"), "{{agent}}: {{model}}"),
    ),
    panels.bars(
        "Model calls were of these kinds",
        "Measured, zero_token (the provider reported 0), unmeasured (it reported nothing), failed.",
        SHORT,
        Target(queries.per_bar(queries.MODEL_CALLS, "kind"), "{{kind}}"),
        width=24,
    ),
)
"""What the numbers above don't know."""

ROWS: Final = (
    ("The time range", TIME_RANGE),
    ("Where the money went", MONEY),
    ("Where the tokens went", TOKENS),
    ("What is left of the quotas", QUOTAS),
    ("What was not measured or not priced", UNKNOWNS),
)
"""Rows of panels, from the answer to the details."""
