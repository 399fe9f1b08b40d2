"""The dashboard of those who run agents: what was stopped, by which limit, and how close it is."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import SECONDS, SHARE, SHORT, USD, Target
from dashboards.queries import PER_STEP

UID: Final = panels.AGENTS


LAST_HOUR: Final = (
    panels.number(
        "Limits stopped this share of invocations",
        "Of the invocations that finished in the last hour. From a quarter on, "
        "OtelLimitsStopRateHigh fires for an agent.",
        SHARE,
        queries.share(queries.last_hour(queries.HALTS), queries.last_hour(queries.STOPS)),
        steps=((None, "green"), (0.1, "orange"), (0.25, "red")),
        width=6,
    ),
    panels.number(
        "Agents spent this in the last hour",
        "US dollars for model calls whose price is known.",
        USD,
        queries.or_zero(queries.last_hour(queries.COST)),
        width=6,
    ),
    panels.number(
        "That is so much of a usual hour",
        "The last hour in US dollars against the average of those hours of the last day in which "
        "a process reported. 100 % is as usual.",
        SHARE,
        queries.share(queries.last_hour(queries.COST), queries.usual_hour(queries.COST)),
        steps=((None, "green"), (2, "orange"), (3, "red")),
        width=6,
    ),
    panels.number(
        "So many processes enforce no limit",
        "otel-limits is on in them and cannot stop any agent; their log says why.",
        SHORT,
        queries.or_zero(f"count({queries.gauge(queries.ENFORCING)} == 0)"),
        steps=((None, "green"), (1, "red")),
        width=6,
    ),
    panels.ranking(
        "These agents spent most",
        "US dollars in the last hour. From 20 on, unless thresholds.yaml was changed, "
        "OtelLimitsCostBurnRateHigh fires.",
        USD,
        Target(queries.top(5, queries.last_hour(queries.COST, "agent")), "{{agent}}"),
        steps=((None, "blue"), (10, "orange"), (20, "red")),
        width=7,
    ),
    panels.ranking(
        "Limits stopped these agents, for these reasons",
        "Invocations that a limit ended in the last hour.",
        SHORT,
        Target(
            queries.top(7, queries.last_hour(queries.HALTS, "agent", "reason")),
            "{{agent}}: {{reason}}",
        ),
        width=10,
    ),
    panels.ranking(
        "These quotas are nearest to their end",
        "Share of a quota that is used or reserved in its present window. From 90 % on, "
        "OtelLimitsQuotaNearlyUsed fires; at 100 % every further model call is refused.",
        SHARE,
        Target(
            queries.top(
                5, queries.share_of_quota(f"{queries.QUOTA_USED} + {queries.QUOTA_RESERVED}")
            ),
            "{{quota}}: {{key}}",
        ),
        steps=((None, "green"), (0.75, "orange"), (0.9, "red")),
        width=7,
    ),
)
"""Which agent burns money, why it was stopped, and what is about to end: in ten seconds."""


TIME_RANGE: Final = (
    panels.number(
        "Invocations finished",
        "However they ended, in the time range.",
        SHORT,
        queries.or_zero(queries.in_range(queries.STOPS)),
    ),
    panels.number(
        "Limits stopped this share",
        "Share of finished invocations that a limit ended.",
        SHARE,
        queries.share(queries.in_range(queries.HALTS), queries.in_range(queries.STOPS)),
        steps=((None, "green"), (0.1, "orange"), (0.25, "red")),
    ),
    panels.number(
        "max_turns stopped",
        "Invocations that reached max_turns: the agent went on for too long.",
        SHORT,
        queries.or_zero(queries.in_range(queries.stops_by("max_turns"))),
    ),
    panels.number(
        "max_iterations stopped",
        "Invocations that reached max_iterations within one leg.",
        SHORT,
        queries.or_zero(queries.in_range(queries.stops_by("max_iterations"))),
    ),
    panels.number(
        "Enforcement would halt",
        "Invocations that reached a limit and went on, because the action is observe.",
        SHORT,
        queries.or_zero(queries.in_range(queries.WOULD_BE_HALTS)),
    ),
    panels.number(
        "Invocations are in progress",
        "Invocations that have begun and not ended.",
        SHORT,
        queries.or_zero(f"sum({queries.gauge(queries.IN_PROGRESS)})"),
    ),
)
"""One number each, for the time range."""


WHEN: Final = "--since ${__from:date:iso} --until ${__to:date:iso}"
SELECTED: Final = "--selected '${agent:queryparam}&${model:queryparam}&${reason:queryparam}'"
"""As in an address every character of a name is harmless: of a shell, of Markdown, of `--where`."""

AUDIT: Final = f"""\
```console
otel-limits audit stops {WHEN} {SELECTED}
otel-limits audit spend {WHEN} {SELECTED}
```
"""


STOPS: Final = (
    panels.bars(
        "Limits halted these agents; a diamond leads to the trace",
        "Invocations that a limit ended. A diamond is an exemplar: open it to see the trace.",
        SHORT,
        Target(
            queries.per_bar(queries.HALTS, "agent", "reason"),
            "{{agent}}: {{reason}}",
            exemplars=True,
        ),
    ),
    panels.bars(
        "Invocations ended for these reasons",
        "Finished invocations by stop reason: our limits first, natural ends last. Those that went "
        "past a limit with the action observe are in the panel on what would have been halted.",
        SHORT,
        *(
            Target(queries.per_bar(stops, "reason"), "{{reason}}")
            for stops in (
                queries.stops_by("max_turns"),
                queries.stops_by("max_iterations"),
                queries.OTHER_HALTS,
                queries.NATURAL_ENDS,
            )
        ),
    ),
    panels.lines(
        "Limits stopped this share of each agent's invocations",
        "A lasting high share means that the cap is too low or the agent is stuck.",
        SHARE,
        Target(
            queries.ratio(queries.HALTS, queries.STOPS, "agent"),
            "{{agent}}",
        ),
    ),
    panels.bars(
        "Enforcement would have halted these",
        "Limits that were reached while the action is observe: what halt would have stopped.",
        SHORT,
        Target(queries.per_bar(queries.WOULD_BE_HALTS, "agent", "reason"), "{{agent}}: {{reason}}"),
    ),
    panels.note(
        "The ledger knows each of them: copy this where it is",
        "The same time range, and the agents, models and reasons that are selected; a reason also "
        "finds what it would have halted. Which processes it has is up to where they keep it.",
        AUDIT,
    ),
)
"""Why invocations ended, over time."""


BUDGETS: Final = (
    panels.spread(
        "Invocations used this share of their limits",
        "Finished invocations by the share of a limit that they used, all limits together. "
        "At 100 % and above the limit was reached.",
        SHARE,
        Target(queries.increase(queries.buckets(queries.BUDGET_USED), PER_STEP, "le"), "{{le}}"),
    ),
    panels.lines(
        "19 of 20 invocations used at most this much of a limit",
        "95th percentile by limit. Near 100 % the limit is about to stop many.",
        SHARE,
        Target(queries.quantile(0.95, queries.BUDGET_USED, "limit"), "{{limit}}"),
    ),
    panels.lines(
        "19 of 20 invocations took at most so many turns",
        "95th percentile of the model responses that an invocation took, by agent.",
        SHORT,
        Target(queries.quantile(0.5, queries.INVOCATION_TURNS), "all agents, median"),
        Target(queries.quantile(0.95, queries.INVOCATION_TURNS, "agent"), "{{agent}}"),
    ),
    panels.lines(
        "19 of 20 invocations took at most this long",
        "95th percentile of the time from begin to end, by agent.",
        SECONDS,
        Target(queries.quantile(0.5, queries.INVOCATION_DURATION), "all agents, median"),
        Target(queries.quantile(0.95, queries.INVOCATION_DURATION, "agent"), "{{agent}}"),
    ),
    panels.bars(
        "Invocations passed these soft thresholds",
        "Those of OTEL_LIMITS_WARN_AT.",
        SHORT,
        Target(
            queries.per_bar(queries.WARNINGS, "limit", "threshold"), "{{limit}} at {{threshold}}"
        ),
    ),
    panels.lines(
        "Halted invocations went so far above a token limit",
        "Mean overshoot in tokens: the last model call is counted when it is over.",
        SHORT,
        Target(queries.mean(queries.OVERSHOOT, "agent", "limit"), "{{agent}}: {{limit}}"),
    ),
)
"""How much of the limits is used."""


AGENTS_AND_TOOLS: Final = (
    panels.ranking(
        "Limits stopped these agents most",
        "Halted invocations in the time range.",
        SHORT,
        Target(queries.top(10, queries.in_range(queries.HALTS, "agent")), "{{agent}}"),
        width=8,
    ),
    panels.ranking(
        "These agents took the most turns",
        "Model responses taken in the time range.",
        SHORT,
        Target(queries.top(10, queries.in_range(queries.TURNS, "agent")), "{{agent}}"),
        width=8,
    ),
    panels.ranking(
        "These tools were called most",
        "Tool calls in the time range, refused ones included.",
        SHORT,
        Target(queries.top(10, queries.in_range(queries.TOOL_CALLS, "tool")), "{{tool}}"),
        width=8,
    ),
    panels.bars(
        "Tool calls ended like this",
        "Refused calls are those that a limit kept from running.",
        SHORT,
        Target(queries.per_bar(queries.TOOL_CALLS, "status"), "{{status}}"),
        width=24,
    ),
)
"""Who is stopped, and what agents do."""


CALLS_WITHOUT_TOKENS: Final = (
    panels.bars(
        "A halt is not a call, and a call can be without tokens",
        "A synthetic message is a halt: no model was called. A zero-token call is a real "
        "answer for which the provider reported 0. An unmeasured call had no usage at all.",
        SHORT,
        Target(queries.per_bar(queries.SYNTHETIC), "synthetic message"),
        *(
            Target(queries.per_bar(queries.calls_of(kind)), legend)
            for kind, legend in (
                ("zero_token", "zero-token call"),
                ("unmeasured", "unmeasured call"),
                ("failed", "failed call"),
            )
        ),
        width=24,
    ),
)
"""What looks alike and is not."""

ROWS: Final = (
    ("The last hour", LAST_HOUR),
    ("The time range", TIME_RANGE),
    ("Why invocations ended", STOPS),
    ("How close the others are", BUDGETS),
    ("Who is stopped, and what agents do", AGENTS_AND_TOOLS),
    ("What looks alike and is not", CALLS_WITHOUT_TOKENS),
)
"""Rows of panels, from the answer to the details."""
