"""The dashboard of those who run otel-limits itself: does it see everything, and does it hold."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import SECONDS, SHORT, Target

UID: Final = panels.HEALTH


TIME_RANGE: Final = (
    panels.number(
        "Processes report",
        "Processes that report to this Prometheus.",
        SHORT,
        queries.or_zero(f"count({queries.BUILDS})"),
        width=6,
    ),
    panels.number(
        "One was last seen so long ago",
        "Time since the process that was seen longest ago was seen.",
        SECONDS,
        f"max({queries.SCRAPE_AGE})",
        width=6,
    ),
    panels.number(
        "Processes enforce no limit",
        "Processes in which otel-limits is on and cannot stop any agent; their log says why.",
        SHORT,
        queries.or_zero(f"count({queries.gauge(queries.ENFORCING)} == 0)"),
        steps=((None, "green"), (1, "red")),
        width=6,
    ),
    panels.number(
        "Policy files were refused",
        "Processes whose newest policy file is invalid, so that the one before stays in force.",
        SHORT,
        queries.or_zero(f"count({queries.gauge(queries.POLICY_VALID)} == 0)"),
        steps=((None, "green"), (1, "red")),
        width=6,
    ),
    panels.number(
        "Errors happened inside",
        "Failures inside otel-limits that were kept away from the agents.",
        SHORT,
        queries.or_zero(queries.in_range(queries.INTERNAL_ERRORS)),
        steps=((None, "green"), (1, "red")),
        width=8,
    ),
    panels.number(
        "Facts were lost",
        "Facts that an observer lost, because it failed or could not keep up.",
        SHORT,
        queries.or_zero(queries.in_range(queries.DROPPED)),
        steps=((None, "green"), (1, "red")),
        width=8,
    ),
    panels.number(
        "Invocations had no span",
        "Invocations whose span did not reach otel-limits. Limits hold all the same.",
        SHORT,
        queries.or_zero(queries.in_range(queries.BLIND)),
        width=8,
    ),
)
"""One number each, for the time range."""


UNSEEN: Final = (
    panels.bars(
        "Spans of these agents did not arrive",
        "Their spans did not reach the span processor (sampling, no SDK, another provider), so "
        "that the framework's hooks were followed instead.",
        SHORT,
        Target(queries.per_bar(queries.BLIND, "agent"), "{{agent}}"),
    ),
    panels.bars(
        "So many names were counted as _other",
        "More names than metrics tell apart. Give each agent a name that does not change, or set "
        "OTEL_LIMITS_METRICS_MAX_AGENTS.",
        SHORT,
        Target(queries.increase(queries.FOLDED, queries.PER_STEP, "label"), "{{label}}"),
    ),
    panels.lines(
        "Processes were last seen so long ago",
        "Time since each process was last seen. It grows when a process is gone or its "
        "endpoint cannot be reached.",
        SECONDS,
        Target(f"max by (job, instance) ({queries.SCRAPE_AGE})", "{{job}} {{instance}}"),
        width=24,
    ),
)
"""Where spans or scrapes are missing."""


SLOW_OR_LOST: Final = (
    panels.bars(
        "These components failed",
        "Failures inside otel-limits that were kept away from the agents; the log says more.",
        SHORT,
        Target(queries.per_bar(queries.INTERNAL_ERRORS, "component"), "{{component}}"),
    ),
    panels.bars(
        "These observers lost events",
        "Facts that an observer lost, because it failed or could not keep up.",
        SHORT,
        Target(queries.per_bar(queries.DROPPED, "observer"), "{{observer}}"),
    ),
    panels.lines(
        "Observers kept 99 of 100 ends waiting at most this long",
        "How long an observer kept the end of an invocation waiting.",
        SECONDS,
        Target(queries.quantile(0.99, queries.LAG, "observer"), "{{observer}}"),
    ),
    panels.bars(
        "Nobody finished these invocations",
        "Aborted: nobody waited for the result. Evicted: dropped from the registry of live "
        "invocations because there were too many, or it was too old.",
        SHORT,
        Target(queries.per_bar(queries.UNFINISHED, "agent", "reason"), "{{agent}}: {{reason}}"),
    ),
)
"""Where observers fail."""


CONFIGURED: Final = (
    panels.listing(
        "These limits are configured",
        "What each limit permits now, in its own unit (turns, tokens, US dollars, seconds); "
        "0 when it was set and is not any more.",
        SHORT,
        Target(f"max by (agent, limit) ({queries.gauge(queries.LIMITS)})"),
        width=16,
    ),
    panels.listing(
        "Processes run these versions",
        "Processes by version of otel-limits.",
        SHORT,
        Target(f"count by (version) ({queries.BUILDS})"),
        width=8,
    ),
)
"""Which limits and versions are in force."""

ROWS: Final = (
    ("The time range", TIME_RANGE),
    ("What is not seen", UNSEEN),
    ("What is slow or lost", SLOW_OR_LOST),
    ("What is configured", CONFIGURED),
)
"""Rows of panels, from the answer to the details."""
