"""What is asked of Prometheus, by the noun that it answers.

Every selector takes the variables of the dashboard. Every aggregation names the labels it keeps,
so that labels which a pipeline adds (scope, service, pod) change nothing.
"""

from __future__ import annotations

from typing import Final

PLACE: Final = ("cluster", "namespace", "job", "instance")
"""Labels of a process. Those that Kubernetes does not give are empty, which `.*` matches."""

TARGET: Final = tuple(f'{label}=~"${label}"' for label in PLACE)
ENVIRONMENT: Final = 'deployment_environment=~"$environment"'
AGENT: Final = 'agent=~"$agent"'
MODEL: Final = 'model=~"$model"'
REASON: Final = 'reason=~"$reason"'
QUOTA: Final = 'quota=~"$quota"'
ENFORCED: Final = 'action=~"halted|wrapped_up|raised"'
OBSERVED: Final = 'action="observed"'

WHOLE_RANGE: Final = "$__range"
HOUR: Final = "1h"
DAY: Final = "1d"
PER_STEP: Final = "$__interval"
"""Steps stand side by side: each counts what happened since the one before."""

LOOK_BACK: Final = "1h"
"""How long a series may have been silent and still be the one that was there before.

A failed scrape or a Prometheus that restarts must not make old counts look like new ones.
"""


def select(name: str, *matchers: str) -> str:
    """One metric of the targets chosen in the dashboard."""
    return f"{name}{{{','.join((*TARGET, *matchers))}}}"


def growth(selector: str, over: str) -> str:
    """How much each series of a counter went up, whole and from its first event on."""
    return " or ".join(branches_of_growth(selector, over))


def branches_of_growth(selector: str, over: str) -> tuple[str, ...]:
    """How much each series of a counter went up: the first of these that has an answer for it.

    `increase()` knows nothing of what was counted before the first scrape, nothing of what happens
    between two windows, and stretches what it saw to the edges of its window. So the last value is
    compared with the one before the window, and a series that was not there then began at 0.

    A counter that began again once within the window went up to its largest value first, where that
    is more than it has now: unless `increase()` saw more than twice as much, because the counter
    had also begun again right before the window's first sample.

    What began again more often is left to `increase()`, which adds up what went before each time:
    too much by up to 2.2 scrape intervals of the window, as no function tells what it began with.
    It can't be more than the largest value each time, so that a process that is restarted at its
    every halt is counted exactly. Of a series that is new in the window it is only asked what went
    before: `delta()`, which knows of no beginnings, takes the rest from it, or what a new series
    had counted before its first scrape would be lost.
    """
    now = f"last_over_time({selector}[{over}])"
    peak = f"max_over_time({selector}[{over}])"
    before = f"({selector_before(selector, over)} or 0 * {now})"
    added = f"increase({selector}[{over}])"
    new = f"({now} - delta({selector}[{over}]) unless {selector_before(selector, over)})"
    resets = f"resets({selector}[{over}])"
    most = f"{resets} * {peak} + {now}"
    return (
        f"((({peak} > {now}) >= {before}) - {before} + {now} >= {added} / 2 and {resets} == 1)",
        f"(({added} + {new} or {added}) < {most} and {added} < {most} and {resets} > 0)",
        f"({most} and {resets} > 0)",
        # It may have begun again between the window and the sample before it.
        f"({now} - {before} unless min_over_time({selector}[{over}]) < {before})",
        now,
    )


def deployed(over: str = "") -> str:
    """Keep what comes from processes of the environments that are chosen.

    Only `otel_limits_build_info` says which one that is, so that every other metric is matched with
    it by where it comes from.
    """
    builds = select("otel_limits_build_info", ENVIRONMENT)
    seen = f"last_over_time({builds}[{over}])" if over else builds
    return f"and on ({', '.join(PLACE)}) {seen}"


def gauge(selector: str) -> str:
    """Value of a gauge now, in the environments that are chosen."""
    return f"({selector} {deployed()})"


def selector_before(selector: str, over: str) -> str:
    """Value of each series before a window, also where the last scrapes before it failed."""
    return f"last_over_time({selector}[{LOOK_BACK}] offset {over})"


def increase(selector: str, over: str, *by: str) -> str:
    """How much a counter went up, over all its series."""
    return f"sum{kept(by)}(({growth(selector, over)}) {deployed(over)})"


def in_range(selector: str, *by: str) -> str:
    """How much a counter went up in the time range that is shown."""
    return increase(selector, WHOLE_RANGE, *by)


def last_hour(selector: str, *by: str) -> str:
    """How much a counter went up in the hour before now."""
    return increase(selector, HOUR, *by)


def usual_hour(selector: str) -> str:
    """How much a counter goes up in an hour, on average of the last day.

    Hours in which no process reported are left out: on its first day, or with agents that work in
    the morning, a twenty-fourth of the day would be far less than is usual.
    """
    hours = f"count_over_time(count({BUILDS})[{DAY}:{HOUR}])"
    return f"{increase(selector, DAY)} / ({hours} or vector(1))"


def per_bar(selector: str, *by: str) -> str:
    """How much a counter went up within each bar, without bars of nothing."""
    return f"{increase(selector, PER_STEP, *by)} > 0"


def rate(selector: str, *by: str) -> str:
    """How fast a counter went up within each step, per second."""
    return f"{increase(selector, PER_STEP, *by)} / ($__interval_ms / 1000)"


def quantile(share: float, histogram: str, *by: str) -> str:
    """Value below which a share of the observations of each step lies."""
    observed = increase(buckets(histogram), PER_STEP, "le", *by)
    return f"histogram_quantile({share}, {observed})"


def buckets(histogram: str) -> str:
    """Select the buckets of a histogram."""
    return histogram.replace("{", "_bucket{", 1)


def mean(histogram: str, *by: str) -> str:
    """Average of the observations of each step, where there are any."""
    total, count = (histogram.replace("{", f"_{part}{{", 1) for part in ("sum", "count"))
    return ratio(total, count, *by)


def ratio(part: str, whole: str, *by: str) -> str:
    """Part of a whole within each step, where there is a whole."""
    return f"{increase(part, PER_STEP, *by)} / ({increase(whole, PER_STEP, *by)} > 0)"


def top(number: int, query: str) -> str:
    """Largest results, without zeros."""
    return f"topk({number}, {query} > 0)"


def or_zero(query: str) -> str:
    """0 where there would be no data."""
    return f"{query} or vector(0)"


def share(part: str, whole: str) -> str:
    """Part of a whole, 0 where there is no whole."""
    return or_zero(f"({part} / ({whole} > 0))")


def kept(by: tuple[str, ...]) -> str:
    """Which labels an aggregation keeps."""
    return f" by ({', '.join(by)}) " if by else ""


STOPS: Final = select("otel_limits_stops_total", AGENT)
TURNS: Final = select("otel_limits_turns_total", AGENT)
HALTS: Final = select("otel_limits_stops_total", AGENT, ENFORCED, REASON)
KILLS: Final = select("otel_limits_stops_total", AGENT, ENFORCED, 'reason="killed"')
WOULD_BE_HALTS: Final = select("otel_limits_stops_total", AGENT, OBSERVED, REASON)
NATURAL_ENDS: Final = select("otel_limits_stops_total", AGENT, REASON, 'action="none"')
OTHER_HALTS: Final = select(
    "otel_limits_stops_total", AGENT, ENFORCED, REASON, 'reason!~"max_turns|max_iterations"'
)
UNFINISHED: Final = select("otel_limits_stops_total", AGENT, 'reason=~"aborted|evicted"')
BUDGET_USED: Final = select("otel_limits_budget_used_ratio", AGENT)
INVOCATION_TURNS: Final = select("otel_limits_invocation_turns", AGENT)
INVOCATION_DURATION: Final = select("otel_limits_invocation_duration_seconds", AGENT)
INVOCATION_TOKENS: Final = select("otel_limits_invocation_tokens", AGENT)
OVERSHOOT: Final = select("otel_limits_overshoot_tokens", AGENT)
WARNINGS: Final = select("otel_limits_warnings_total", AGENT)
IN_PROGRESS: Final = select("otel_limits_invocations_in_progress", AGENT)
SYNTHETIC: Final = select("otel_limits_synthetic_messages_total", AGENT, REASON)
TOOL_CALLS: Final = select("otel_limits_tool_calls_total", AGENT)
LIMITS: Final = select("otel_limits_limit", AGENT)
BLIND: Final = select("otel_limits_unsampled_invocations_total", AGENT)

TOKENS: Final = select("otel_limits_tokens_total", AGENT, MODEL)
INPUT_TOKENS: Final = select("otel_limits_tokens_total", AGENT, MODEL, 'type="input"')
CACHE_READS: Final = select("otel_limits_cached_tokens_total", AGENT, MODEL, 'kind="read"')
CACHED_TOKENS: Final = select("otel_limits_cached_tokens_total", AGENT, MODEL)
COST: Final = select("otel_limits_cost_usd_total", AGENT, MODEL)
UNPRICED: Final = select("otel_limits_unpriced_tokens_total", AGENT, MODEL)
MODEL_CALLS: Final = select("otel_limits_model_calls_total", AGENT, MODEL)
UNMEASURED: Final = select("otel_limits_model_calls_total", AGENT, MODEL, 'kind="unmeasured"')

QUOTA_USED: Final = select("otel_limits_quota_used", QUOTA)
QUOTA_RESERVED: Final = select("otel_limits_quota_reserved", QUOTA)
QUOTA_LIMIT: Final = select("otel_limits_quota_limit", QUOTA)
QUOTA_RESETS: Final = select("otel_limits_quota_resets_timestamp_seconds", QUOTA)
QUOTA_DECISIONS: Final = select("otel_limits_quota_decisions_total", QUOTA)
NOT_ADMITTED: Final = select("otel_limits_quota_decisions_total", QUOTA, 'decision!="admitted"')

QUOTA_WAITING: Final = select("otel_limits_quota_waiting", QUOTA)
QUOTA_WAIT: Final = select("otel_limits_quota_wait_seconds", QUOTA)

BUILDS: Final = select("otel_limits_build_info", ENVIRONMENT)
ENFORCING: Final = select("otel_limits_enforcing")
POLICY_VALID: Final = select("otel_limits_policy_valid")
INTERNAL_ERRORS: Final = select("otel_limits_internal_errors_total")
FOLDED: Final = select("otel_limits_label_overflows_total")
DROPPED: Final = select("otel_limits_observer_dropped_events_total")
LAG: Final = select("otel_limits_observer_lag_seconds")


def stops_by(reason: str) -> str:
    """Invocations that one limit of ours stopped."""
    return select("otel_limits_stops_total", AGENT, ENFORCED, REASON, f'reason="{reason}"')


def calls_of(kind: str) -> str:
    """Model calls of one kind."""
    return select("otel_limits_model_calls_total", AGENT, MODEL, f'kind="{kind}"')


def share_of_quota(part: str) -> str:
    """Part of what each quota permits, as the process knows it that saw the most of it.

    A process that has not asked since the window ended knows nothing of the present one.
    """
    share = f"({part}) / ({QUOTA_LIMIT} > 0) and {QUOTA_RESETS} > time() {deployed()}"
    return f"max by (quota, key) ({share})"


def until_reset() -> str:
    """Seconds until each quota begins again."""
    return f"max by (quota, key) ({QUOTA_RESETS} > time() {deployed()}) - time()"


def per_minute(query: str) -> str:
    """What a rate comes to in a minute."""
    return f"{query} * 60"


def per_hour(query: str) -> str:
    """What a rate comes to in an hour."""
    return f"{query} * 3600"


SECONDS_LEFT_IN_MONTH: Final = (
    "((days_in_month() - day_of_month()) * 86400 + (24 - hour()) * 3600 - minute() * 60)"
)
"""Until midnight after the last day of the month, UTC."""


def until_end_of_month(counter: str) -> str:
    """What a counter will go up by until the month is over, at the pace of the range shown."""
    return f"{in_range(counter)} / $__range_s * {SECONDS_LEFT_IN_MONTH}"


SCRAPE_AGE: Final = f"time() - (timestamp({BUILDS}) or max_over_time(timestamp({BUILDS})[1h:1m]))"
"""A series ends with the first scrape that fails: for an hour its last moment is remembered."""


DEPLOYMENTS: Final = (
    f"count by (job, service_version, version) ({BUILDS}) unless "
    f"count by (job, service_version, version) ({selector_before(BUILDS, PER_STEP)})"
)
"""A version that no process of the job had in the hour before: a restart is not a deployment."""

DEPLOYED: Final = "{{job}}: version {{service_version}}, otel-limits {{version}}"

READS: Final = select("otel_limits_policy_reads_total")
POLICIES: Final = (
    f"sum by (outcome) ((last_over_time({READS}[{PER_STEP}]) - {selector_before(READS, PER_STEP)} "
    f"{deployed(PER_STEP)}) > 0) > 0"
)
"""New versions of a policy file, by processes that were there before: not the first one."""

# Not of the reason or the agent that is chosen alone: they may be why it looks as it does.
KILLED: Final = per_bar(KILLS, "agent")
HALTED: Final = per_bar(select("otel_limits_stops_total", AGENT, ENFORCED), "agent", "reason")
