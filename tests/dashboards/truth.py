"""Expected values of every panel, computed from the script of the workload.

Values are totals of the whole window. Rates are extrapolated to the edges of the window, all by the
same factor; all other values are `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from otel_limits.observers import metrics
from tests.dashboards.workload import (
    ACTORS,
    CALL,
    PRICED,
    RESEARCHABLE,
    RESERVED,
    SPENDABLE,
    UNPRICED,
    WAITABLE,
    Actor,
    Produces,
)

if TYPE_CHECKING:
    from tests.dashboards.servers import Scene

Values: TypeAlias = Mapping[str, float]
"""By legend."""

ONE = ""
"""Legend of a single number."""


@dataclass(frozen=True)
class Expected:
    """Expected result of one query."""

    values: Values
    exact: bool = False
    """Whether the values are not extrapolated."""
    loose: bool = False
    """Whether only the legends are known beforehand, as for durations."""


def total(value: Callable[[Produces], float]) -> float:
    """Sum one round over all actors."""
    return sum(value(actor.produces) for actor in ACTORS)


def by(key: Callable[[Actor], str | None], value: Callable[[Produces], float]) -> dict[str, float]:
    """Sum one round by a name, without actors that have none."""
    return merged(
        {name: value(actor.produces)} for actor in ACTORS if (name := key(actor)) is not None
    )


def merged(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up mappings."""
    sums: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def times(factor: float, values: Values) -> dict[str, float]:
    """Multiply every value."""
    return {name: value * factor for name, value in values.items()}


def positive(values: Values) -> dict[str, float]:
    """Return the values above 0."""
    return {name: value for name, value in values.items() if value > 0}


def enforced(produces: Produces) -> bool:
    """Return whether the invocation was halted."""
    return produces.action in {"halted", "wrapped_up", "raised"}


def agent(actor: Actor) -> str:
    """Return the name of the agent."""
    return actor.name


def model(actor: Actor) -> str:
    """Return the ID of the model."""
    return actor.model


def tokens(produces: Produces) -> int:
    """Return input and output tokens."""
    return produces.input + produces.output


def dollars(actor: Actor) -> float:
    """Return the cost of one invocation, by the prices in the workload's policy."""
    produces = actor.produces
    return (produces.input * 100 + produces.output * 500) / 1e6 if actor.model == PRICED else 0.0


def dollars_by(key: Callable[[Actor], str]) -> dict[str, float]:
    """Return the cost of one round by a name."""
    return merged({key(actor): dollars(actor)} for actor in ACTORS)


def reasons(chosen: Callable[[Produces], bool]) -> dict[str, float]:
    """Return the finished invocations of one round by reason."""
    return by(lambda actor: actor.produces.reason if chosen(actor.produces) else None, one)


def agents_and_reasons(chosen: Callable[[Produces], bool]) -> dict[str, float]:
    """Return the finished invocations of one round by agent and reason."""

    def key(actor: Actor) -> str | None:
        return f"{actor.name}: {actor.produces.reason}" if chosen(actor.produces) else None

    return by(key, one)


def refusals(action: str) -> dict[str, float]:
    """Return the tool calls of one round at a cap by agent and tool."""
    return merged(
        {f"{actor.name}: {tool} refused": n}
        for actor in ACTORS
        for (tool, taken), n in actor.produces.refusals.items()
        if taken == action
    )


def one(_: Produces) -> int:
    """Count one."""
    return 1


def bucketed(values: Iterable[float], spec: metrics.MetricSpec) -> list[tuple[float, int]]:
    """Sort values into the cumulative buckets of a histogram."""
    counted = list(values)
    return [
        (bound, sum(value <= bound for value in counted)) for bound in (*spec.buckets, math.inf)
    ]


def quantile(share: float, values: Iterable[float], spec: metrics.MetricSpec) -> float:
    """Estimate a quantile as Prometheus does: linearly within a bucket."""
    buckets = bucketed(values, spec)
    rank = share * buckets[-1][1]
    below, lower = 0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == math.inf:
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound
    raise AssertionError(share)


def quantiles_by_agent(
    value: Callable[[Produces], float], spec: metrics.MetricSpec
) -> dict[str, float]:
    """Return the 95th percentile of each agent."""
    names = {actor.name for actor in ACTORS}
    return {
        name: quantile(0.95, [value(a.produces) for a in ACTORS if a.name == name], spec)
        for name in names
    }


def quantiles_of_utilization() -> dict[str, float]:
    """Return the 95th percentile of each limit."""
    used = [pair for actor in ACTORS for pair in actor.produces.used.items()]
    return {
        limit: quantile(0.95, [v for name, v in used if name == limit], metrics.BUDGET_USED)
        for limit in {name for name, _ in used}
    }


def labels(**values: str) -> str:
    """Name a series by its labels, as a table does."""
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items()))


def expectations(played: Scene) -> dict[tuple[str, str], list[Expected]]:
    """Return the expected results of each panel's queries, by dashboard and title."""
    return {
        **{("agent-limits", title): each for title, each in _agent_limits(played).items()},
        **{("token-spend", title): each for title, each in _token_spend(played).items()},
        **{("health", title): each for title, each in _health(played).items()},
    }


def _agent_limits(played: Scene) -> dict[str, list[Expected]]:
    rounds = played.rounds

    def increases(*values: Values) -> list[Expected]:
        return [Expected(times(rounds, each), exact=True) for each in values]

    tools = merged({tool: n} for a in ACTORS for (tool, _), n in a.produces.tools.items())
    agents = {a.name for a in ACTORS}
    # Agents without halts have a rate of 0, but nothing halts one that only observes.
    enforcing = {a.name for a in ACTORS if a.action != "observe"}
    return {
        **_last_hour(played),
        "Finished invocations": increases({ONE: len(ACTORS)}),
        "Halt rate": [Expected({ONE: total(enforced) / len(ACTORS)}, exact=True)],
        "Halts by agent and reason": increases(agents_and_reasons(enforced), refusals("refused")),
        "Finished invocations by stop reason": increases(
            reasons(lambda produces: produces.action != "observed"),
            {
                f"{reason} would-be": count
                for reason, count in reasons(lambda p: p.action == "observed").items()
            },
        ),
        "Halt rate by agent": [
            Expected(
                {name: by(agent, enforced)[name] / by(agent, one)[name] for name in enforcing},
                exact=True,
            )
        ],
        "Would-be halts by agent and reason": increases(
            agents_and_reasons(lambda produces: produces.action == "observed"),
            refusals("observed"),
        ),
        "Limit utilization, p95": [Expected(quantiles_of_utilization(), exact=True)],
        "Turns per invocation, p95": [
            Expected(quantiles_by_agent(lambda p: p.turns, metrics.INVOCATION_TURNS), exact=True),
        ],
        "Invocation duration, p95": [Expected(dict.fromkeys(agents, 0), loose=True)],
        "Top tools by calls": increases(tools),
    }


def _last_hour(played: Scene) -> dict[str, list[Expected]]:
    """Include the first round and the one call of `patient`: all series are new in this hour."""
    rounds = played.rounds + 1
    cost = times(rounds, dollars_by(agent)) | {
        "patient": (CALL["inputTokens"] * 100 + CALL["outputTokens"] * 500) / 1e6
    }
    most = sorted(positive(cost).items(), key=lambda each: -each[1])[:5]
    quotas = ("spend: priced-model", "research: research", "waiting: (all)")
    return {
        "Halt rate, last hour": [Expected({ONE: total(enforced) / len(ACTORS)}, exact=True)],
        "Spend, last hour": [Expected({ONE: sum(cost.values())}, exact=True)],
        "Invocations in progress": [Expected({ONE: 1}, exact=True)],
        "Processes not enforcing": [Expected({ONE: 0}, exact=True)],
        "Top agents by spend, last hour": [Expected(dict(most), exact=True)],
        "Top halts by agent and reason, last hour": [
            Expected(times(rounds, agents_and_reasons(enforced)), exact=True)
        ],
        "Quotas closest to their limit": [Expected(dict.fromkeys(quotas, 0), loose=True)],
    }


def _token_spend(played: Scene) -> dict[str, list[Expected]]:
    rounds, seconds = played.rounds, played.window.range
    at_rest = {"patient": 0.0}

    def increases(*values: Values) -> list[Expected]:
        return [Expected(times(rounds, each), exact=True) for each in values]

    def per_minute(values: Values) -> list[Expected]:
        return [Expected(times(rounds / seconds * 60, values))]

    def per_hour(values: Values) -> list[Expected]:
        return [Expected(times(rounds / seconds * 3600, values))]

    spent = total(tokens)
    unpriced = by(model, tokens)[UNPRICED]
    return {
        **_quotas(played),
        "Tokens": increases({ONE: spent}),
        "Cost": increases({ONE: sum(map(dollars, ACTORS))}),
        "Projected cost, rest of month": [Expected({})],
        "Cache hit rate": [
            Expected({ONE: total(lambda p: p.cache_read) / total(lambda p: p.input)}, exact=True)
        ],
        "Unpriced token share": [Expected({ONE: unpriced / spent}, exact=True)],
        "Tokens per minute by agent": per_minute(by(agent, tokens) | at_rest),
        "Tokens per minute by model": per_minute(by(model, tokens)),
        "Tokens per invocation, p95": [
            Expected(quantiles_by_agent(tokens, metrics.INVOCATION_TOKENS), exact=True)
        ],
        "Spend per hour by agent": per_hour(dollars_by(agent) | at_rest),
        "Spend per hour by model": per_hour(dollars_by(model)),
        "Top agents by cost": increases(positive(dollars_by(agent))),
        "Top models by cost": increases(positive(dollars_by(model))),
        "Unpriced tokens by model": increases({UNPRICED: unpriced}),
        "Estimated and unmeasured calls by agent and model": increases(
            positive(
                by(
                    lambda a: f"{a.name}: {a.model}, unmeasured",
                    lambda produces: produces.calls.get("unmeasured", 0),
                )
            )
        ),
    }


def _quotas(played: Scene) -> dict[str, list[Expected]]:
    rounds = played.rounds + 1  # the first round counts too
    used = {
        "spend: priced-model": rounds * sum(map(dollars, ACTORS)) / SPENDABLE,
        "research: research": rounds * by(agent, tokens)["research"] / RESEARCHABLE,
        "waiting: (all)": (CALL["totalTokens"] + RESERVED) / WAITABLE,
        "guests: (all)": 0.0,
    }
    refused = by(lambda a: a.name if a.produces.reason == "quota_exceeded" else None, one)
    unpriced = sum(sum(a.produces.calls.values()) for a in ACTORS if calls_without_price(a))
    return {
        # The highest of the window contains reservations of calls.
        "Quota utilization": [Expected(used, loose=True)],
        "Time until quota reset": [
            Expected({labels(quota=q, key=k): 0 for q, k in map(quota_and_key, used)}, loose=True)
        ],
        "Calls waiting for quota": [Expected({"waiting": 0}, exact=True)],
        "Quota decisions other than admitted": [
            Expected(
                times(
                    played.rounds,
                    {
                        "spend: unpriced": unpriced,
                        "guests: refused": refused["guest"],
                        "waiting: gave_up": refused["postponed"],
                    },
                ),
                exact=True,
            )
        ],
    }


def calls_without_price(actor: Actor) -> bool:
    """Return whether the USD quota applies to an unpriced model; it excludes names with p."""
    return actor.model == UNPRICED and not actor.name.startswith("p")


def quota_and_key(legend: str) -> tuple[str, str]:
    """Split a legend into quota and key."""
    quota, _, key = legend.partition(": ")
    return quota, key


def _health(played: Scene) -> dict[str, list[Expected]]:
    rounds = played.rounds
    failing = float(sum(actor.name == "broken" for actor in ACTORS))
    limits = {
        labels(agent=actor.name, limit=limit): float(cap)
        for actor in ACTORS
        for limit, cap in actor.limits.items()
        if limit != "max_calls_per_tool"
    }

    def increases(values: Values) -> list[Expected]:
        return [Expected(times(rounds, values), exact=True)]

    return {
        "Reporting processes": [Expected({ONE: 1}, exact=True)],
        "Processes not enforcing": [Expected({ONE: 0}, exact=True)],
        "Processes with a rejected policy file": [Expected({ONE: 0}, exact=True)],
        "Internal errors": increases({ONE: failing}),
        "Dropped events": increases({ONE: failing}),
        "Invocations without spans, by agent": increases(
            positive(by(agent, lambda produces: produces.unsampled))
        ),
        "Time since last report, by process": [
            Expected({f"agents 127.0.0.1:{played.port}": 0}, loose=True)
        ],
        "Internal errors by component": increases({"observer": failing}),
        "Dropped events by observer": increases({"observer": failing}),
        "Aborted and evicted invocations": increases(
            agents_and_reasons(lambda produces: produces.reason == "aborted")
        ),
        "Configured limits": [Expected(limits, exact=True)],
        "Processes by version": [Expected({labels(version=played.version): 1}, exact=True)],
    }
