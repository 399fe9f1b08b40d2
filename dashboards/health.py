"""Dashboard for people who run otel-limits: does it see every invocation, and does it enforce."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import COUNT, SECONDS, SHORT, Target
from dashboards.queries import RANGE
from otel_limits.core.limits import LIMITS, SHARED_LIMITS

LIMITS_WITH_UNITS: Final = {
    f"{prefix}{name}": f"{prefix}{name} ({LIMITS[name].unit})"
    for prefix, names in (("", tuple(LIMITS)), *SHARED_LIMITS.items())
    for name in names
}

RED_FROM_ONE: Final = ((None, "green"), (1, "red"))

OVERVIEW: Final = (
    panels.number(
        "Reporting processes",
        "Processes with metrics in this Prometheus.",
        COUNT,
        queries.or_zero(f"count({queries.BUILDS})"),
        width=5,
    ),
    panels.number(
        "Processes not enforcing",
        "otel-limits is enabled but cannot halt agents. See the process log.",
        COUNT,
        queries.NOT_ENFORCING,
        steps=RED_FROM_ONE,
        width=5,
    ),
    panels.number(
        "Processes with a rejected policy file",
        "They still use the previous version.",
        COUNT,
        queries.or_zero(f"count({queries.POLICY_VALID} == 0)"),
        steps=RED_FROM_ONE,
        width=6,
    ),
    panels.number(
        "Internal errors",
        "In the selected range. Suppressed; agents are unaffected.",
        COUNT,
        queries.or_zero(queries.sum_total(queries.INTERNAL_ERRORS, RANGE)),
        steps=RED_FROM_ONE,
    ),
    panels.number(
        "Dropped events",
        "In the selected range. Lost because an observer failed or fell behind.",
        COUNT,
        queries.or_zero(queries.sum_total(queries.DROPPED, RANGE)),
        steps=RED_FROM_ONE,
    ),
)

TELEMETRY_GAPS: Final = (
    panels.bars(
        "Invocations without spans, by agent",
        "Sampling, no SDK or another provider; hooks are used instead. Limits are still enforced.",
        "invocations",
        Target(queries.per_bar(queries.UNSAMPLED, "agent"), "{{agent}}"),
    ),
    panels.lines(
        "Time since last report, by process",
        "Grows when a process has exited or its endpoint is unreachable.",
        SECONDS,
        Target(f"max by (job, instance) ({queries.LAST_REPORT_AGE})", "{{job}} {{instance}}"),
    ),
)

ERRORS: Final = (
    panels.bars(
        "Internal errors by component",
        "Suppressed; agents are unaffected. See the process log.",
        "errors",
        Target(queries.per_bar(queries.INTERNAL_ERRORS, "component"), "{{component}}"),
    ),
    panels.bars(
        "Dropped events by observer",
        "Lost because the observer failed or fell behind.",
        "events",
        Target(queries.per_bar(queries.DROPPED, "observer"), "{{observer}}"),
    ),
    panels.bars(
        "Aborted and evicted invocations",
        "Aborted: the caller went away. Evicted: no longer tracked because of age or number.",
        "invocations",
        Target(queries.per_bar(queries.UNFINISHED, "agent", "reason"), "{{agent}}: {{reason}}"),
        width=24,
    ),
)

CONFIGURATION: Final = (
    panels.listing(
        "Configured limits",
        "Per invocation of an agent. 0: no longer set.",
        SHORT,
        Target(f"max by (agent, limit) ({queries.LIMITS})"),
        value="configured value",
        shown=LIMITS_WITH_UNITS,
        width=16,
    ),
    panels.listing(
        "Processes by version",
        "Version of otel-limits.",
        COUNT,
        Target(f"count by (version) ({queries.BUILDS})"),
        value="processes",
        width=8,
    ),
)

ROWS: Final = (
    ("Overview", OVERVIEW),
    ("Telemetry gaps", TELEMETRY_GAPS),
    ("Errors", ERRORS),
    ("Configuration", CONFIGURATION),
)
