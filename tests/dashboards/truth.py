"""What every panel must show, from what the agents of the workload produce.

A number is what the whole window adds up to. Prometheus extrapolates an increase to the edges of
its window, all by the same factor; where that factor cancels out, the number is `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from otel_limits.observers import instruments
from tests.dashboards.workload import (
    ACTORS,
    CALL,
    PRICED,
    RESEARCHABLE,
    SPENDABLE,
    UNPRICED,
    WAITABLE,
    Actor,
    Produces,
)

if TYPE_CHECKING:
    from tests.dashboards.servers import Scene

Values: TypeAlias = Mapping[str, float]
"""By the name in the legend."""

ONE = ""
"""Name of a single number."""


@dataclass(frozen=True)
class Expected:
    """What one query must return."""

    values: Values
    exact: bool = False
    """True where nothing is extrapolated."""
    loose: bool = False
    """True where only the names are known beforehand: times and durations."""


def total(value: Callable[[Produces], float]) -> float:
    """Sum over all actors, of one round."""
    return sum(value(actor.produces) for actor in ACTORS)


def by(key: Callable[[Actor], str | None], value: Callable[[Produces], float]) -> dict[str, float]:
    """Sums of one round, by a name; actors without one are left out."""
    return merged(
        {name: value(actor.produces)} for actor in ACTORS if (name := key(actor)) is not None
    )


def merged(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add mappings up."""
    sums: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def times(factor: float, values: Values) -> dict[str, float]:
    """Multiply every value."""
    return {name: value * factor for name, value in values.items()}


def some(values: Values) -> dict[str, float]:
    """Only what is more than nothing."""
    return {name: value for name, value in values.items() if value > 0}


def enforced(produces: Produces) -> bool:
    """Whether a limit ended the invocation."""
    return produces.action in {"halted", "wrapped_up", "raised"}


def agent(actor: Actor) -> str:
    """Name of the agent."""
    return actor.name


def model(actor: Actor) -> str:
    """Id of the model."""
    return actor.model


def tokens(produces: Produces) -> int:
    """Input and output."""
    return produces.input + produces.output


def dollars(actor: Actor) -> float:
    """Cost of one invocation, by the policy of the workload."""
    produces = actor.produces
    return (produces.input * 100 + produces.output * 500) / 1e6 if actor.model == PRICED else 0.0


def dollars_by(key: Callable[[Actor], str]) -> dict[str, float]:
    """Cost of one round, by a name."""
    return merged({key(actor): dollars(actor)} for actor in ACTORS)


def reasons(chosen: Callable[[Produces], bool]) -> dict[str, float]:
    """Stops of one round by reason."""
    return by(lambda actor: actor.produces.reason if chosen(actor.produces) else None, one)


def agents_and_reasons(chosen: Callable[[Produces], bool]) -> dict[str, float]:
    """Stops of one round by agent and reason."""

    def key(actor: Actor) -> str | None:
        return f"{actor.name}: {actor.produces.reason}" if chosen(actor.produces) else None

    return by(key, one)


def one(_: Produces) -> int:
    """Count."""
    return 1


def calls(kind: str) -> float:
    """Model calls of one kind in one round."""
    return total(lambda produces: produces.calls.get(kind, 0))


def bucketed(values: Iterable[float], spec: instruments.MetricSpec) -> list[tuple[float, int]]:
    """Sort values into the buckets of a histogram, each with all below it."""
    counted = list(values)
    return [
        (bound, sum(value <= bound for value in counted)) for bound in (*spec.buckets, math.inf)
    ]


def quantile(share: float, values: Iterable[float], spec: instruments.MetricSpec) -> float:
    """Estimate a quantile as Prometheus does: by a straight line within a bucket."""
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
    value: Callable[[Produces], float], spec: instruments.MetricSpec
) -> dict[str, float]:
    """95th percentile of each agent."""
    names = {actor.name for actor in ACTORS}
    return {
        name: quantile(0.95, [value(a.produces) for a in ACTORS if a.name == name], spec)
        for name in names
    }


def used() -> list[tuple[str, float]]:
    """Limit and share of it, for every invocation of a round."""
    return [pair for actor in ACTORS for pair in actor.produces.used.items()]


def quantiles_of_budgets() -> dict[str, float]:
    """95th percentile of each limit."""
    return {
        limit: quantile(0.95, [v for name, v in used() if name == limit], instruments.BUDGET_USED)
        for limit in {name for name, _ in used()}
    }


def buckets_of_budgets() -> dict[str, float]:
    """Bounds as Prometheus writes them."""
    return {
        "+Inf" if bound == math.inf else repr(bound): float(count)
        for bound, count in bucketed([v for _, v in used()], instruments.BUDGET_USED)
    }


def labels(**values: str) -> str:
    """Name a series by its labels, as a table does."""
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items()))


def limits() -> dict[str, float]:
    """Caps, by labels."""
    return {
        labels(agent=actor.name, limit=limit): float(cap)
        for actor in ACTORS
        for limit, cap in actor.limits.items()
    }


def expectations(played: Scene) -> dict[tuple[str, str], list[Expected]]:
    """What each query of each panel must return, by dashboard and title of the panel."""
    return {
        **{("agent-limits", title): each for title, each in _agent_limits(played).items()},
        **{("token-spend", title): each for title, each in _token_spend(played).items()},
        **{("health", title): each for title, each in _health(played).items()},
    }


def _agent_limits(played: Scene) -> dict[str, list[Expected]]:
    rounds = played.rounds

    def increases(*values: Values) -> list[Expected]:
        return [Expected(times(rounds, each)) for each in values]

    def limit(reason: str) -> float:
        return reasons(enforced)[reason]

    halts = reasons(enforced)
    others = {k: v for k, v in halts.items() if k not in {"max_turns", "max_iterations"}}
    statuses = merged(
        {status: number} for a in ACTORS for (_, status), number in a.produces.tools.items()
    )
    tools = merged({tool: n} for a in ACTORS for (tool, _), n in a.produces.tools.items())
    warned = merged(
        {f"{limit} at {threshold}": number}
        for actor in ACTORS
        for (limit, threshold), number in actor.produces.warnings.items()
    )
    seen = {a.name for a in ACTORS}  # who could be halted is drawn at 0
    return {
        **_last_hour(played),
        "Invocations finished": increases({ONE: len(ACTORS)}),
        "Limits stopped this share": [Expected({ONE: total(enforced) / len(ACTORS)}, exact=True)],
        "max_turns stopped": increases({ONE: limit("max_turns")}),
        "max_iterations stopped": increases({ONE: limit("max_iterations")}),
        "Enforcement would halt": increases({ONE: total(lambda p: p.action == "observed")}),
        "Invocations are in progress": [Expected({ONE: 1}, exact=True)],
        "Invocations ended for these reasons": increases(
            {"max_turns": limit("max_turns")},
            {"max_iterations": limit("max_iterations")},
            others,
            reasons(lambda produces: produces.action == "none"),
        ),
        "Limits stopped this share of each agent's invocations": [
            Expected(
                {name: by(agent, enforced)[name] / by(agent, one)[name] for name in seen},
                exact=True,
            )
        ],
        "Limits halted these agents; a diamond leads to the trace": increases(
            agents_and_reasons(enforced)
        ),
        "Enforcement would have halted these": increases(
            agents_and_reasons(lambda produces: produces.action == "observed")
        ),
        "Invocations used this share of their limits": increases(buckets_of_budgets()),
        "19 of 20 invocations used at most this much of a limit": [
            Expected(quantiles_of_budgets(), exact=True)
        ],
        "19 of 20 invocations took at most so many turns": [
            Expected(
                {
                    "all agents, median": quantile(
                        0.5, [a.produces.turns for a in ACTORS], instruments.INVOCATION_TURNS
                    )
                },
                exact=True,
            ),
            Expected(
                quantiles_by_agent(lambda p: p.turns, instruments.INVOCATION_TURNS), exact=True
            ),
        ],
        "19 of 20 invocations took at most this long": [
            Expected({"all agents, median": 0}, loose=True),
            Expected(dict.fromkeys((a.name for a in ACTORS), 0), loose=True),
        ],
        "Invocations passed these soft thresholds": increases(warned),
        "Halted invocations went so far above a token limit": [
            Expected(
                {
                    f"{a.name}: {a.produces.overshoot[0]}": a.produces.overshoot[1]
                    for a in ACTORS
                    if a.produces.overshoot
                },
                exact=True,
            )
        ],
        "Limits stopped these agents most": increases(some(by(agent, enforced))),
        "These agents took the most turns": increases(some(by(agent, lambda p: p.turns))),
        "These tools were called most": increases(tools),
        "Tool calls ended like this": increases(statuses),
        "A halt is not a call, and a call can be without tokens": increases(
            {"synthetic message": total(enforced)},
            {"zero-token call": calls("zero_token")},
            {"unmeasured call": calls("unmeasured")},
            {"failed call": calls("failed")},
        ),
    }


def _last_hour(played: Scene) -> dict[str, list[Expected]]:
    """The first row, of the whole play: with the rehearsal, and with the one call of `patient`."""
    rounds = played.rounds + 1
    cost = times(rounds, dollars_by(agent)) | {
        "patient": (CALL["inputTokens"] * 100 + CALL["outputTokens"] * 500) / 1e6
    }
    most = sorted(some(cost).items(), key=lambda each: -each[1])[:5]
    quotas = ("spend: priced-model", "research: research", "waiting: (all)")
    return {
        "Limits stopped this share of invocations": [
            Expected({ONE: total(enforced) / len(ACTORS)}, exact=True)
        ],
        "Agents spent this in the last hour": [Expected({ONE: sum(cost.values())}, exact=True)],
        "That is so much of a usual hour": [Expected({ONE: 1}, exact=True)],
        "So many processes enforce no limit": [Expected({ONE: 0}, exact=True)],
        "These agents spent most": [Expected(dict(most), exact=True)],
        "Limits stopped these agents, for these reasons": [
            Expected(times(rounds, agents_and_reasons(enforced)), exact=True)
        ],
        "These quotas are nearest to their end": [Expected(dict.fromkeys(quotas, 0), loose=True)],
    }


def _token_spend(played: Scene) -> dict[str, list[Expected]]:
    rounds, seconds = played.rounds, played.window.range
    at_rest = {"patient": 0.0}

    def increases(*values: Values) -> list[Expected]:
        return [Expected(times(rounds, each)) for each in values]

    def per_minute(values: Values) -> list[Expected]:
        return [Expected(times(rounds / seconds * 60, values))]

    def per_hour(values: Values) -> list[Expected]:
        return [Expected(times(rounds / seconds * 3600, values))]

    cost = sum(map(dollars, ACTORS))
    spent = total(tokens)
    unpriced = by(model, tokens)[UNPRICED]
    cached = by(model, lambda p: p.cache_read)
    read = by(model, lambda p: p.input)
    kinds = merged(actor.produces.calls for actor in ACTORS)
    return {
        **_quotas(played),
        "Agents used these tokens": increases({ONE: spent}),
        "Agents spent these dollars": increases({ONE: cost}),
        "The month will still cost": [Expected({ONE: 0}, loose=True)],
        "The month will still use": [Expected({ONE: 0}, loose=True)],
        "A cache gave so much input": [
            Expected({ONE: total(lambda p: p.cache_read) / total(lambda p: p.input)}, exact=True)
        ],
        "So many tokens lack a price": [Expected({ONE: unpriced / spent}, exact=True)],
        "Agents read and wrote so many tokens a minute": per_minute(
            {"input": total(lambda p: p.input), "output": total(lambda p: p.output)}
        ),
        "These agents used the tokens, a minute": per_minute(by(agent, tokens) | at_rest),
        "These models used the tokens, a minute": per_minute(by(model, tokens)),
        "19 of 20 invocations used at most so many tokens": [
            Expected(
                {
                    "all agents, median": quantile(
                        0.5, [tokens(a.produces) for a in ACTORS], instruments.INVOCATION_TOKENS
                    )
                },
                exact=True,
            ),
            Expected(quantiles_by_agent(tokens, instruments.INVOCATION_TOKENS), exact=True),
        ],
        "Caches were read and written, tokens a minute": per_minute(
            {"read": total(lambda p: p.cache_read), "write": total(lambda p: p.cache_write)}
        ),
        "Caches gave each model so much of its input": [
            Expected({name: cached[name] / read[name] for name in read}, exact=True)
        ],
        "These agents spent the money, USD an hour": per_hour(dollars_by(agent) | at_rest),
        "These models cost the money, USD an hour": per_hour(dollars_by(model)),
        "These agents cost most": increases(some(dollars_by(agent))),
        "These models cost most": increases(some(dollars_by(model))),
        "These models used tokens without a price": increases({UNPRICED: unpriced}),
        "Providers reported no usage of these calls": increases(
            some(
                by(
                    lambda a: f"{a.name}: {a.model}",
                    lambda produces: produces.calls.get("unmeasured", 0),
                )
            )
        ),
        "Model calls were of these kinds": increases(kinds),
    }


def _quotas(played: Scene) -> dict[str, list[Expected]]:
    rounds = played.rounds + 1  # the rehearsal counts too
    used = {
        "spend: priced-model": rounds * sum(map(dollars, ACTORS)) / SPENDABLE,
        "research: research": rounds * by(agent, tokens)["research"] / RESEARCHABLE,
        "waiting: (all)": CALL["totalTokens"] / WAITABLE,
    }
    every = used | {"guests: (all)": 0.0}
    refused = by(lambda a: a.name if a.produces.reason == "quota_exceeded" else None, one)
    unpriced = sum(sum(a.produces.calls.values()) for a in ACTORS if asks_without_price(a))
    priced = sum(sum(a.produces.calls.values()) for a in ACTORS if a.model == PRICED)
    admitted = priced + by(agent, lambda p: sum(p.calls.values()))["research"]

    def increases(values: Values) -> list[Expected]:
        return [Expected(times(played.rounds, values))]

    return {
        "These quotas are used most": [Expected(used, exact=True)],
        "Quotas begin again after this time": [
            Expected({labels(quota=q, key=k): 0 for q, k in map(named, every)}, loose=True)
        ],
        "Quotas were used to this share": [Expected(every, exact=True)],
        "Calls under way have reserved this share": [Expected(dict.fromkeys(every, 0), loose=True)],
        "Quotas decided like this": increases(
            {
                "admitted": admitted,
                "unpriced": unpriced,
                "refused": refused["guest"],
                "gave_up": refused["postponed"],
            }
        ),
        "Quotas did not simply admit these calls": increases(
            {
                "spend: unpriced": unpriced,
                "guests: refused": refused["guest"],
                "waiting: gave_up": refused["postponed"],
            }
        ),
        "So many calls wait for these quotas": [Expected({"waiting": 0}, exact=True)],
        "19 of 20 calls that waited did so at most this long": [
            Expected({"waiting": 0}, loose=True)
        ],
    }


def asks_without_price(actor: Actor) -> bool:
    """Whether the quota in US dollars applies and cannot count: it leaves out names with p."""
    return actor.model == UNPRICED and not actor.name.startswith("p")


def named(legend: str) -> tuple[str, str]:
    """Quota and key of a legend."""
    quota, _, key = legend.partition(": ")
    return quota, key


def _health(played: Scene) -> dict[str, list[Expected]]:
    rounds = played.rounds
    failing = float(sum(actor.name == "broken" for actor in ACTORS))
    blind = some(by(agent, lambda produces: produces.blind))

    def increases(values: Values) -> list[Expected]:
        return [Expected(times(rounds, values))]

    return {
        "Processes report": [Expected({ONE: 1}, exact=True)],
        "One was last seen so long ago": [Expected({ONE: 0}, loose=True)],
        "Errors happened inside": increases({ONE: failing}),
        "Facts were lost": increases({ONE: failing}),
        "Policy files were refused": [Expected({ONE: 0}, exact=True)],
        "Processes enforce no limit": [Expected({ONE: 0}, exact=True)],
        "Invocations had no span": increases({ONE: sum(blind.values())}),
        "Spans of these agents did not arrive": increases(blind),
        "So many names were counted as _other": [
            Expected(dict.fromkeys(instruments.LABEL_OVERFLOWS.values, 0.0), exact=True)
        ],
        "Processes were last seen so long ago": [
            Expected({f"agents 127.0.0.1:{played.port}": 0}, loose=True)
        ],
        "These components failed": increases({"observer": failing}),
        "These observers lost events": increases({"observer": failing}),
        "Observers kept 99 of 100 ends waiting at most this long": [
            Expected(
                dict.fromkeys(("events", "first_calls", "log", "observer", "prometheus"), 0),
                loose=True,
            )
        ],
        "Nobody finished these invocations": increases(
            agents_and_reasons(lambda produces: produces.reason == "aborted")
        ),
        "These limits are configured": [Expected(limits(), exact=True)],
        "Processes run these versions": [Expected({labels(version=played.version): 1}, exact=True)],
    }
