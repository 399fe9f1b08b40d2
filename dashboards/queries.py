"""PromQL of the dashboards and rules.

Counts have one form, `total()`, over a range as over each step of a graph. Flows, such as tokens
per minute, are `rate(x[$__rate_interval])`. Every selector takes the variables of its dashboard,
and every aggregation names the labels it keeps, so labels that a pipeline adds (scope, service,
pod) change nothing.
"""

from __future__ import annotations

from typing import Final

TARGET_LABELS: Final = ("cluster", "namespace", "job", "instance")
"""Missing ones are empty, which `.*` matches."""

AGENT: Final = 'agent=~"$agent"'
MODEL: Final = 'model=~"$model"'
REASON: Final = 'reason=~"$reason"'
QUOTA: Final = 'quota=~"$quota"'
ENFORCED: Final = 'action=~"halted|wrapped_up|raised"'
OBSERVED: Final = 'action="observed"'

RANGE: Final = "$__range"
HOUR: Final = "1h"
DAY: Final = "1d"
STEP: Final = "$__interval"
LOOK_BACK: Final = "1h"
"""A series without a sample for this long before a window is new in it."""


def select(name: str, *matchers: str) -> str:
    """Select one metric of the targets chosen in the dashboard."""
    targets = (f'{label}=~"${label}"' for label in TARGET_LABELS)
    return f"{name}{{{','.join((*targets, *matchers))}}}"


def total(selector: str, window: str, *, ahead: bool = False) -> str:
    """Return the events of each series of a counter in a window, new series included.

    Only the last sample before the window and the last one in it count: whole events, and those
    of adjacent windows add up. A series that is new counts from 0. If its process restarted in the
    window, Prometheus estimates.

    Args:
        selector: The counter.
        window: Its length.
        ahead: Whether it begins at the time of evaluation instead of ending there.
    """
    inside = f"{selector}[{window}]{f' offset -{window}' if ahead else ''}"
    before = f"{selector}[{LOOK_BACK}]{'' if ahead else f' offset {window}'}"
    return (
        f"increase({inside}) and resets({inside}) > 0"
        f" or last_over_time({inside}) - last_over_time({before}) >= 0"
        f" or last_over_time({inside})"
    )


def sum_total(selector: str, window: str, *by: str) -> str:
    """Sum `total()` over all series."""
    return f"sum{_by(by)}({total(selector, window)})"


def sum_step(selector: str, *by: str) -> str:
    """Sum `total()` of the step of a graph that begins at each point.

    Grafana evaluates at full multiples of a step, none of them in the future. With steps that end
    at a point, the newest events would be missing.
    """
    return f"sum{_by(by)}({total(selector, STEP, ahead=True)})"


def sum_rate(selector: str, *by: str) -> str:
    """Sum the rate per second."""
    return f"sum{_by(by)}(rate({selector}[$__rate_interval]))"


def per_bar(selector: str, *by: str) -> str:
    """Return the whole number of events in each bar, without empty bars."""
    return f"round({sum_step(selector, *by)}) > 0"


def per_minute(selector: str, *by: str) -> str:
    """Return the rate per minute."""
    return f"{sum_rate(selector, *by)} * 60"


def per_hour(selector: str, *by: str) -> str:
    """Return the rate per hour."""
    return f"{sum_rate(selector, *by)} * 3600"


def quantile(share: float, histogram: str, *by: str) -> str:
    """Estimate a quantile from the buckets of a histogram."""
    buckets = histogram.replace("{", "_bucket{", 1)
    return f"histogram_quantile({share}, {sum_step(buckets, 'le', *by)})"


def ratio(part: str, whole: str) -> str:
    """Divide where the divisor is not 0."""
    return f"{part} / ({whole} > 0)"


def top(number: int, query: str) -> str:
    """Return the largest results, without zeros."""
    return f"topk({number}, {query} > 0)"


def or_zero(query: str) -> str:
    """Return 0 instead of no data."""
    return f"{query} or vector(0)"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


STOPS: Final = select("otel_limits_stops_total", AGENT)
HALTS: Final = select("otel_limits_stops_total", AGENT, ENFORCED, REASON)
WOULD_BE_HALTS: Final = select("otel_limits_stops_total", AGENT, OBSERVED, REASON)
ENDS: Final = select("otel_limits_stops_total", AGENT, REASON, 'action!="observed"')
UNFINISHED: Final = select("otel_limits_stops_total", AGENT, 'reason=~"aborted|evicted"')
BUDGET_USED: Final = select("otel_limits_budget_used_ratio", AGENT)
INVOCATION_TURNS: Final = select("otel_limits_invocation_turns", AGENT)
INVOCATION_DURATION: Final = select("otel_limits_invocation_duration_seconds", AGENT)
INVOCATION_TOKENS: Final = select("otel_limits_invocation_tokens", AGENT)
IN_PROGRESS: Final = select("otel_limits_invocations_in_progress", AGENT)
TOOL_CALLS: Final = select("otel_limits_tool_calls_total", AGENT)
REFUSALS: Final = select("otel_limits_tool_refusals_total", AGENT, 'action="refused"')
WOULD_BE_REFUSALS: Final = select("otel_limits_tool_refusals_total", AGENT, OBSERVED)
LIMITS: Final = select("otel_limits_limit", AGENT)
UNSAMPLED: Final = select("otel_limits_unsampled_invocations_total", AGENT)

TOKENS: Final = select("otel_limits_tokens_total", AGENT, MODEL)
INPUT_TOKENS: Final = select("otel_limits_tokens_total", AGENT, MODEL, 'type="input"')
CACHE_READS: Final = select("otel_limits_cached_tokens_total", AGENT, MODEL, 'kind="read"')
COST: Final = select("otel_limits_cost_usd_total", AGENT, MODEL)
UNPRICED: Final = select("otel_limits_unpriced_tokens_total", AGENT, MODEL)
NOT_MEASURED: Final = 'kind=~"estimated|unmeasured"'
UNMEASURED: Final = select("otel_limits_model_calls_total", AGENT, MODEL, NOT_MEASURED)

QUOTA_USED: Final = select("otel_limits_quota_used", QUOTA)
QUOTA_RESERVED: Final = select("otel_limits_quota_reserved", QUOTA)
QUOTA_LIMIT: Final = select("otel_limits_quota_limit", QUOTA)
QUOTA_RESETS: Final = select("otel_limits_quota_resets_timestamp_seconds", QUOTA)
QUOTA_WAITING: Final = select("otel_limits_quota_waiting", QUOTA)
NOT_ADMITTED: Final = select("otel_limits_quota_decisions_total", QUOTA, 'decision!="admitted"')

BUILDS: Final = select("otel_limits_build_info")
ENFORCING: Final = select("otel_limits_enforcing")
POLICY_VALID: Final = select("otel_limits_policy_valid")
INTERNAL_ERRORS: Final = select("otel_limits_internal_errors_total")
DROPPED: Final = select("otel_limits_observer_dropped_events_total")


def halt_rate(window: str) -> str:
    """Return the share of finished invocations that were halted, 0 if none finished."""
    return or_zero(ratio(sum_total(HALTS, window), sum_total(STOPS, window)))


_SHARE: Final = (
    f"({QUOTA_USED} + {QUOTA_RESERVED}) / ({QUOTA_LIMIT} > 0) and {QUOTA_RESETS} > time()"
)
QUOTA_SHARE: Final = f"max by (quota, key) ({_SHARE})"
"""Used or reserved share of each quota, as reported by the process that saw most of it.

A process that has not used the quota since its window ended reports nothing of the present one.
"""

QUOTA_PEAK: Final = f"max by (quota, key) (max_over_time(({_SHARE})[{STEP}:]))"
"""The highest in each step: a window that is as long as a step would be seen at its reset only."""

TIME_UNTIL_RESET: Final = f"max by (quota, key) ({QUOTA_RESETS} > time()) - time()"

NOT_ENFORCING: Final = or_zero(f"count(max by (job, instance) ({ENFORCING} == 0))")

LAST_REPORT_AGE: Final = (
    f"time() - (timestamp({BUILDS}) or max_over_time(timestamp({BUILDS})[1h:1m]))"
)
"""A series ends at its first failed scrape; the subquery remembers its last sample for an hour."""

SECONDS_LEFT_IN_MONTH: Final = (
    "((days_in_month() - day_of_month()) * 86400 + (24 - hour()) * 3600 - minute() * 60)"
)
PROJECTED_COST: Final = (
    f"{sum_total(COST, DAY)} / 86400 * {SECONDS_LEFT_IN_MONTH}"
    f" and count(last_over_time({COST}[6d] offset {DAY}))"
)
"""No value before there is a day of data: the pace of an hour is not that of a month."""

DEPLOYMENTS: Final = (
    f"count by (job, service_version, version) ({BUILDS}) unless "
    f"count by (job, service_version, version) "
    f"(last_over_time({BUILDS}[{LOOK_BACK}] offset $__interval))"
)
"""Versions that no process of the job ran in the hour before: a restart is not a deployment."""

POLICY_READS: Final = f"{sum_rate(select('otel_limits_policy_reads_total'), 'outcome')} > 0"
"""A rate, because the first read of a process is not a change."""

# Not filtered by reason: these marks may explain a panel that is.
KILLS: Final = (
    sum_total(select("otel_limits_stops_total", AGENT, 'action="killed"'), STEP, "agent") + " > 0"
)
ALL_HALTS: Final = (
    sum_total(select("otel_limits_stops_total", AGENT, ENFORCED), STEP, "agent", "reason") + " > 0"
)
