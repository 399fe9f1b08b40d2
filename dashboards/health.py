"""The dashboard of those who run otel-limits itself: does it see everything, and does it hold."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import SECONDS, SHORT, Target

UID: Final = "otel-limits-health"


NOW: Final = (
    panels.number(
        "Processes",
        "Processes that report to this Prometheus.",
        SHORT,
        queries.or_zero(f"count({queries.BUILDS})"),
    ),
    panels.number(
        "Oldest scrape",
        "Time since the process that was seen longest ago was seen.",
        SECONDS,
        f"max({queries.SCRAPE_AGE})",
    ),
    panels.number(
        "Not enforcing",
        "Processes in which otel-limits is on and cannot stop any agent; their log says why.",
        SHORT,
        queries.or_zero(f"count({queries.ENFORCING} == 0)"),
    ),
    panels.number(
        "Internal errors",
        "Failures inside otel-limits that were kept away from the agents.",
        SHORT,
        queries.or_zero(queries.in_range(queries.INTERNAL_ERRORS)),
    ),
    panels.number(
        "Facts lost",
        "Facts that an observer lost, because it failed or could not keep up.",
        SHORT,
        queries.or_zero(queries.in_range(queries.DROPPED)),
    ),
    panels.number(
        "Refused policy files",
        "Processes whose newest policy file is invalid, so that the one before stays in force.",
        SHORT,
        queries.or_zero(f"count({queries.POLICY_VALID} == 0)"),
    ),
    panels.number(
        "Blind invocations",
        "Invocations whose span did not reach otel-limits. Limits hold all the same.",
        SHORT,
        queries.or_zero(queries.in_range(queries.BLIND)),
    ),
)
"""One number each, for the time range."""


UNSEEN: Final = (
    panels.bars(
        "Blind invocations by agent",
        "Their spans did not reach the span processor (sampling, no SDK, another provider), so "
        "that the framework's hooks were followed instead.",
        SHORT,
        Target(queries.per_bar(queries.BLIND, "agent"), "{{agent}}"),
    ),
    panels.bars(
        "Names counted as _other, by label",
        "More names than metrics tell apart. Give each agent a name that does not change, or set "
        "OTEL_LIMITS_METRICS_MAX_AGENTS.",
        SHORT,
        Target(queries.increase(queries.FOLDED, queries.PER_STEP, "label"), "{{label}}"),
    ),
    panels.lines(
        "Scrape age",
        "Time since each process was last seen. It grows when a process is gone or its "
        "endpoint cannot be reached.",
        SECONDS,
        Target(f"max by (job, instance) ({queries.SCRAPE_AGE})", "{{job}} {{instance}}"),
    ),
)
"""Where spans or scrapes are missing."""


SLOW_OR_LOST: Final = (
    panels.bars(
        "Internal errors by component",
        "Failures inside otel-limits that were kept away from the agents; the log says more.",
        SHORT,
        Target(queries.per_bar(queries.INTERNAL_ERRORS, "component"), "{{component}}"),
    ),
    panels.bars(
        "Facts lost by observer",
        "Facts that an observer lost, because it failed or could not keep up.",
        SHORT,
        Target(queries.per_bar(queries.DROPPED, "observer"), "{{observer}}"),
    ),
    panels.lines(
        "Observer lag, 99th percentile",
        "How long an observer kept the end of an invocation waiting.",
        SECONDS,
        Target(queries.quantile(0.99, queries.LAG, "observer"), "{{observer}}"),
    ),
    panels.bars(
        "Invocations that nobody finished",
        "Aborted: nobody waited for the result. Evicted: dropped from the registry of live "
        "invocations because there were too many, or it was too old.",
        SHORT,
        Target(queries.per_bar(queries.UNFINISHED, "agent", "reason"), "{{agent}}: {{reason}}"),
    ),
)
"""Where observers fail."""


CONFIGURED: Final = (
    panels.listing(
        "Configured limits",
        "What each limit permits now, in its own unit (turns, tokens, US dollars, seconds); "
        "0 when it was set and is not any more.",
        SHORT,
        Target(f"max by (agent, limit) ({queries.LIMITS})"),
        width=16,
    ),
    panels.listing(
        "Versions",
        "Processes by version of otel-limits.",
        SHORT,
        Target(f"count by (version) ({queries.BUILDS})"),
        width=8,
    ),
)
"""Which limits and versions are in force."""

ROWS: Final = (
    ("Now", NOW),
    ("What is not seen", UNSEEN),
    ("What is slow or lost", SLOW_OR_LOST),
    ("What is configured", CONFIGURED),
)
"""Rows of panels, from the answer to the details."""
