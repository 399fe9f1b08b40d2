"""Dashboard for people who pay: tokens and cost by agent and model, and quotas."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import LONG_STEP, SECONDS, SHARE, SHORT, TOKENS, USD, Target
from dashboards.queries import RANGE

SELECTED_RANGE: Final = (
    panels.number(
        "Cost",
        "Cost of model calls with a known price.",
        USD,
        queries.or_zero(queries.sum_total(queries.COST, RANGE)),
        width=5,
    ),
    panels.number(
        "Projected cost, rest of month",
        "At the pace of the last 24 hours, whatever range is selected. The month ends in UTC.",
        USD,
        queries.PROJECTED_COST,
        nothing="Needs a day of data",
        width=5,
    ),
    panels.number(
        "Tokens",
        "Input and output tokens.",
        TOKENS,
        queries.or_zero(queries.sum_total(queries.TOKENS, RANGE)),
        width=5,
    ),
    panels.number(
        "Cache hit rate",
        "Share of input tokens read from the provider's cache.",
        SHARE,
        queries.or_zero(
            queries.ratio(
                queries.sum_total(queries.CACHE_READS, RANGE),
                queries.sum_total(queries.INPUT_TOKENS, RANGE),
            )
        ),
        width=5,
    ),
    panels.number(
        "Unpriced token share",
        "Not included in any USD figure.",
        SHARE,
        queries.or_zero(
            queries.ratio(
                queries.sum_total(queries.UNPRICED, RANGE), queries.sum_total(queries.TOKENS, RANGE)
            )
        ),
        steps=((None, "green"), (0.01, "orange"), (0.25, "red")),
    ),
)

COST: Final = (
    panels.lines(
        "Spend per hour by agent",
        "USD per hour of model calls with a known price.",
        USD,
        Target(queries.per_hour(queries.COST, "agent"), "{{agent}}"),
        axis="USD per hour",
    ),
    panels.lines(
        "Spend per hour by model",
        "USD per hour of model calls with a known price.",
        USD,
        Target(queries.per_hour(queries.COST, "model"), "{{model}}"),
        axis="USD per hour",
    ),
    panels.ranking(
        "Top agents by cost",
        "In the selected range.",
        USD,
        Target(queries.top(10, queries.sum_total(queries.COST, RANGE, "agent")), "{{agent}}"),
    ),
    panels.ranking(
        "Top models by cost",
        "In the selected range.",
        USD,
        Target(queries.top(10, queries.sum_total(queries.COST, RANGE, "model")), "{{model}}"),
    ),
)

TOKEN_USAGE: Final = (
    panels.lines(
        "Tokens per minute by agent",
        "Input and output tokens per minute.",
        SHORT,
        Target(queries.per_minute(queries.TOKENS, "agent"), "{{agent}}"),
        axis="tokens per minute",
    ),
    panels.lines(
        "Tokens per minute by model",
        "Input and output tokens per minute.",
        SHORT,
        Target(queries.per_minute(queries.TOKENS, "model"), "{{model}}"),
        axis="tokens per minute",
    ),
    panels.lines(
        "Tokens per invocation, p95",
        f"By agent, input and output tokens. {panels.ESTIMATED}",
        SHORT,
        Target(queries.quantile(0.95, queries.INVOCATION_TOKENS, "agent"), "{{agent}}"),
        axis="tokens",
        step=LONG_STEP,
        width=24,
    ),
)

QUOTAS: Final = (
    panels.lines(
        "Quota utilization",
        "Used plus reserved, the highest in each step. Calls that do not fit wait or are refused. "
        f"{panels.HASHED_KEYS}",
        SHARE,
        Target(queries.QUOTA_PEAK, "{{quota}}: {{key}}"),
    ),
    panels.listing(
        "Time until quota reset",
        "Usage counts until then. Quotas on concurrent model calls have no window; ignore theirs. "
        f"{panels.HASHED_KEYS}",
        SECONDS,
        Target(queries.TIME_UNTIL_RESET),
        value="time until reset",
    ),
    panels.lines(
        "Calls waiting for quota",
        "Only quotas with on_exceeded: wait.",
        SHORT,
        Target(f"sum by (quota) ({queries.QUOTA_WAITING})", "{{quota}}"),
        axis="calls",
        is_whole=True,
    ),
    panels.bars(
        "Quota decisions other than admitted",
        "One per quota that applies to a call. degraded_*: made while the store was unavailable.",
        "decisions",
        Target(
            queries.per_bar(queries.NOT_ADMITTED, "quota", "decision"), "{{quota}}: {{decision}}"
        ),
    ),
)

UNMEASURED_AND_UNPRICED: Final = (
    panels.bars(
        "Unpriced tokens by model",
        "Add a price in the policy file.",
        "tokens",
        Target(queries.per_bar(queries.UNPRICED, "model"), "{{model}}"),
    ),
    panels.bars(
        "Estimated and unmeasured calls by agent and model",
        "The provider reported no usage. Unmeasured calls count no estimate, e.g. because "
        "OTEL_LIMITS_UNMEASURED is ignore.",
        "calls",
        Target(
            queries.per_bar(queries.UNMEASURED, "agent", "model", "kind"),
            "{{agent}}: {{model}}, {{kind}}",
        ),
    ),
)

ROWS: Final = (
    ("Selected range", SELECTED_RANGE),
    ("Cost", COST),
    ("Token usage", TOKEN_USAGE),
    ("Quotas", QUOTAS),
    ("Estimated, unmeasured and unpriced usage", UNMEASURED_AND_UNPRICED),
)
