"""The dashboard of those who run agents: what was stopped, by which limit, and how close it is."""

from __future__ import annotations

from typing import Final

from dashboards import panels, queries
from dashboards.panels import SECONDS, SHARE, SHORT, Target
from dashboards.queries import PER_STEP

UID: Final = "otel-limits-agents"


NOW: Final = (
    panels.number(
        "Invocations",
        "Invocations that finished, however they ended.",
        SHORT,
        queries.or_zero(queries.in_range(queries.STOPS)),
    ),
    panels.number(
        "Stopped by a limit",
        "Share of finished invocations that a limit ended.",
        SHARE,
        queries.share(queries.in_range(queries.HALTS), queries.in_range(queries.STOPS)),
    ),
    panels.number(
        "Stopped by max_turns",
        "Invocations that reached max_turns: the agent went on for too long.",
        SHORT,
        queries.or_zero(queries.in_range(queries.stops_by("max_turns"))),
    ),
    panels.number(
        "Stopped by max_iterations",
        "Invocations that reached max_iterations within one leg.",
        SHORT,
        queries.or_zero(queries.in_range(queries.stops_by("max_iterations"))),
    ),
    panels.number(
        "Would have been halted",
        "Invocations that reached a limit and went on, because the action is observe.",
        SHORT,
        queries.or_zero(queries.in_range(queries.WOULD_BE_HALTS)),
    ),
    panels.number(
        "In progress",
        "Invocations that have begun and not ended.",
        SHORT,
        queries.or_zero(f"sum({queries.IN_PROGRESS})"),
    ),
)
"""One number each, for the time range."""


STOPS: Final = (
    panels.bars(
        "Stops by reason",
        "Finished invocations by stop reason: our limits first, natural ends last.",
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
        width=14,
    ),
    panels.lines(
        "Share stopped by a limit, by agent",
        "Share of an agent's invocations that otel-limits ended. A lasting high share means "
        "that the cap is too low or the agent is stuck.",
        SHARE,
        Target(
            queries.ratio(queries.HALTS, queries.STOPS, "agent"),
            "{{agent}}",
        ),
        width=10,
    ),
    panels.bars(
        "Halts by agent, with links to their traces",
        "Invocations that a limit ended. A diamond is an exemplar: open it to see the trace.",
        SHORT,
        Target(
            queries.per_bar(queries.HALTS, "agent", "reason"),
            "{{agent}}: {{reason}}",
            exemplars=True,
        ),
        width=14,
    ),
    panels.bars(
        "What enforcement would have halted",
        "Limits that were reached while the action is observe: what halt would have stopped.",
        SHORT,
        Target(queries.per_bar(queries.WOULD_BE_HALTS, "agent", "reason"), "{{agent}}: {{reason}}"),
        width=10,
    ),
)
"""Why invocations ended, over time."""


BUDGETS: Final = (
    panels.spread(
        "Budget used",
        "Finished invocations by the share of a limit that they used, all limits together. "
        "At 100 % and above the limit was reached.",
        SHARE,
        Target(queries.increase(queries.buckets(queries.BUDGET_USED), PER_STEP, "le"), "{{le}}"),
    ),
    panels.lines(
        "Budget used by limit, 95th percentile",
        "19 of 20 invocations used no more than this. Near 100 % the limit is about to stop many.",
        SHARE,
        Target(queries.quantile(0.95, queries.BUDGET_USED, "limit"), "{{limit}}"),
    ),
    panels.lines(
        "Turns per invocation, 95th percentile",
        "Model responses that an invocation took: 19 of 20 invocations of an agent took no more.",
        SHORT,
        Target(queries.quantile(0.5, queries.INVOCATION_TURNS), "all agents, median"),
        Target(queries.quantile(0.95, queries.INVOCATION_TURNS, "agent"), "{{agent}}"),
    ),
    panels.lines(
        "Duration of an invocation, 95th percentile",
        "Time from begin to end: 19 of 20 invocations of an agent took no longer.",
        SECONDS,
        Target(queries.quantile(0.5, queries.INVOCATION_DURATION), "all agents, median"),
        Target(queries.quantile(0.95, queries.INVOCATION_DURATION, "agent"), "{{agent}}"),
    ),
    panels.bars(
        "Warnings",
        "Invocations that passed a soft threshold of a limit (OTEL_LIMITS_WARN_AT).",
        SHORT,
        Target(
            queries.per_bar(queries.WARNINGS, "limit", "threshold"), "{{limit}} at {{threshold}}"
        ),
    ),
    panels.lines(
        "Tokens above a token limit",
        "Mean overshoot of halted invocations: the last model call is counted when it is over.",
        SHORT,
        Target(queries.mean(queries.OVERSHOOT, "agent", "limit"), "{{agent}}: {{limit}}"),
    ),
)
"""How much of the limits is used."""


AGENTS_AND_TOOLS: Final = (
    panels.ranking(
        "Agents most often stopped by a limit",
        "Halted invocations in the time range.",
        SHORT,
        Target(queries.top(10, queries.in_range(queries.HALTS, "agent")), "{{agent}}"),
        width=8,
    ),
    panels.ranking(
        "Agents with the most turns",
        "Model responses taken in the time range.",
        SHORT,
        Target(queries.top(10, queries.in_range(queries.TURNS, "agent")), "{{agent}}"),
        width=8,
    ),
    panels.ranking(
        "Tools called most",
        "Tool calls in the time range, refused ones included.",
        SHORT,
        Target(queries.top(10, queries.in_range(queries.TOOL_CALLS, "tool")), "{{tool}}"),
        width=8,
    ),
    panels.bars(
        "Tool calls by how they ended",
        "Refused calls are those that a limit kept from running.",
        SHORT,
        Target(queries.per_bar(queries.TOOL_CALLS, "status"), "{{status}}"),
        width=24,
    ),
)
"""Who is stopped, and what agents do."""


CALLS_WITHOUT_TOKENS: Final = (
    panels.bars(
        "Synthetic messages beside model calls without tokens",
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
    ("Now", NOW),
    ("Stops", STOPS),
    ("Budgets", BUDGETS),
    ("Agents and tools", AGENTS_AND_TOOLS),
    ("Calls without tokens", CALLS_WITHOUT_TOKENS),
)
"""Rows of panels, from the answer to the details."""
