"""Dashboard for people who run agents: who was halted and why, and what is about to end."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import COUNT, INVOCATIONS, LONG_STEP, SECONDS, SHARE, SHORT, USD, Target
from dashboards.queries import HOUR, RANGE

HALT_RATE_COLOURS: Final = ((None, "green"), (0.1, "orange"), (0.25, "red"))

LAST_HOUR: Final = (
    panels.number(
        "Halt rate, last hour",
        "Share of invocations finished in the last hour that were halted. "
        "OtelLimitsStopRateHigh fires above 25% per agent.",
        SHARE,
        queries.halt_rate(HOUR),
        steps=HALT_RATE_COLOURS,
        width=6,
    ),
    panels.number(
        "Spend, last hour",
        "Cost of model calls with a known price.",
        USD,
        queries.or_zero(queries.sum_total(queries.COST, HOUR)),
        width=6,
    ),
    panels.number(
        "Invocations in progress",
        "Started but not finished.",
        COUNT,
        queries.or_zero(f"sum({queries.IN_PROGRESS})"),
        width=6,
    ),
    panels.number(
        "Processes not enforcing",
        "otel-limits is enabled but cannot halt agents. See the process log.",
        COUNT,
        queries.NOT_ENFORCING,
        steps=((None, "green"), (1, "red")),
        width=6,
    ),
    panels.ranking(
        "Top agents by spend, last hour",
        "OtelLimitsCostBurnRateHigh fires above 20 USD by default.",
        USD,
        Target(queries.top(5, queries.sum_total(queries.COST, HOUR, "agent")), "{{agent}}"),
        steps=((None, "blue"), (10, "orange"), (20, "red")),
        width=7,
    ),
    panels.ranking(
        "Top halts by agent and reason, last hour",
        "Invocations that otel-limits ended.",
        COUNT,
        Target(
            queries.top(7, queries.sum_total(queries.HALTS, HOUR, "agent", "reason")),
            "{{agent}}: {{reason}}",
        ),
        width=10,
    ),
    panels.ranking(
        "Quotas closest to their limit",
        "Used plus reserved in the current window. OtelLimitsQuotaNearlyUsed fires at 90%; calls "
        f"that do not fit wait or are refused. {panels.HASHED_KEYS}",
        SHARE,
        Target(
            queries.top(5, queries.QUOTA_SHARE),
            "{{quota}}: {{key}}",
        ),
        steps=((None, "green"), (0.75, "orange"), (0.9, "red")),
        width=7,
    ),
)

WHEN: Final = "--since ${__from:date:iso} --until ${__to:date:iso}"
# In the form of a URL query, every character of a name is safe in a shell and in Markdown.
VARIABLES: Final = "--dashboard-vars '${agent:queryparam}&${model:queryparam}&${reason:queryparam}'"
AUDIT_COMMANDS: Final = f"""\
```console
otel-limits audit stops {WHEN} \\
    {VARIABLES}
otel-limits audit spend {WHEN} \\
    {VARIABLES}
```
"""

SELECTED_RANGE: Final = (
    panels.number(
        "Finished invocations",
        "For any reason, in the selected range.",
        INVOCATIONS,
        queries.or_zero(queries.sum_total(queries.STOPS, RANGE)),
    ),
    panels.number(
        "Halt rate",
        "Share of finished invocations that were halted.",
        SHARE,
        queries.halt_rate(RANGE),
        steps=HALT_RATE_COLOURS,
    ),
    panels.note(
        "Audit commands for this selection",
        "Run where the ledger is accessible.",
        AUDIT_COMMANDS,
        width=16,
    ),
)

STOP_REASONS: Final = (
    panels.bars(
        "Halts by agent and reason",
        "Also tool calls that a limit refused. Click an exemplar (diamond) to open its trace.",
        "halts, refused calls",
        Target(
            queries.per_bar(queries.HALTS, "agent", "reason"),
            "{{agent}}: {{reason}}",
            exemplars=True,
        ),
        Target(queries.per_bar(queries.REFUSALS, "agent", "tool"), "{{agent}}: {{tool}} refused"),
    ),
    panels.bars(
        "Finished invocations by stop reason",
        "Would-be: reached that limit and continued, because the action is observe.",
        "invocations",
        Target(queries.per_bar(queries.ENDS, "reason"), "{{reason}}"),
        Target(queries.per_bar(queries.WOULD_BE_HALTS, "reason"), "{{reason}} would-be"),
    ),
    panels.lines(
        "Halt rate by agent",
        "A sustained high rate means the limit is too low or the agent is stuck.",
        SHARE,
        Target(
            queries.ratio(
                queries.sum_step(queries.HALTS, "agent"), queries.sum_step(queries.STOPS, "agent")
            ),
            "{{agent}}",
        ),
        step=LONG_STEP,
    ),
    panels.bars(
        "Would-be halts by agent and reason",
        "Invocations that reached a limit, and tool calls at a cap, that continued because the "
        "action is observe.",
        "halts, refused calls",
        Target(queries.per_bar(queries.WOULD_BE_HALTS, "agent", "reason"), "{{agent}}: {{reason}}"),
        Target(
            queries.per_bar(queries.WOULD_BE_REFUSALS, "agent", "tool"),
            "{{agent}}: {{tool}} refused",
        ),
    ),
)

LIMIT_UTILIZATION: Final = (
    panels.lines(
        "Limit utilization, p95",
        f"By limit. Values near 100% mean halts are likely. {panels.ESTIMATED}",
        SHARE,
        Target(queries.quantile(0.95, queries.BUDGET_USED, "limit"), "{{limit}}"),
        step=LONG_STEP,
    ),
    panels.lines(
        "Turns per invocation, p95",
        "By agent. A turn is one model response and the tool calls it requests. "
        f"{panels.ESTIMATED}",
        SHORT,
        Target(queries.quantile(0.95, queries.INVOCATION_TURNS, "agent"), "{{agent}}"),
        axis="turns",
        step=LONG_STEP,
        is_whole=True,
    ),
    panels.lines(
        "Invocation duration, p95",
        f"By agent, from start to result. {panels.ESTIMATED}",
        SECONDS,
        Target(queries.quantile(0.95, queries.INVOCATION_DURATION, "agent"), "{{agent}}"),
        step=LONG_STEP,
    ),
    panels.ranking(
        "Top tools by calls",
        "Includes refused calls.",
        COUNT,
        Target(queries.top(10, queries.sum_total(queries.TOOL_CALLS, RANGE, "tool")), "{{tool}}"),
    ),
)

ROWS: Final = (
    ("Last hour", LAST_HOUR),
    ("Selected range", SELECTED_RANGE),
    ("Stop reasons", STOP_REASONS),
    ("Limit utilization and tools", LIMIT_UTILIZATION),
)
