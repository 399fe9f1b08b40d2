"""A sample fleet of nine agents and the events of its last four weeks.

Each agent, week and weekday has its own random seed. So two recordings differ only in their dates,
and the totals of the four weeks are always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from random import Random
from typing import Final

from otel_limits.core.events import Event, QuotaGrant
from otel_limits.core.limits import LIMITS, Breach, Limits
from otel_limits.core.price import Price
from otel_limits.demo.sample_invocation import Incident, Model, Plan, invocation_events
from otel_limits.settings.table import PRESETS

WEEKS: Final = 4
DAYS: Final = 7 * WEEKS
SATURDAY: Final = 5

# USD per million tokens, as published in November 2026 (and listed by genai-prices 0.2.3):
# https://platform.claude.com/docs/en/about-claude/pricing, https://openai.com/api/pricing,
# https://ai.google.dev/gemini-api/docs/pricing
HAIKU: Final = Model(
    name="claude-haiku-4-5",
    provider="anthropic",
    price=Price(
        input=Decimal(1), output=Decimal(5), cache_read=Decimal("0.10"), cache_write=Decimal("1.25")
    ),
)
SONNET: Final = Model(
    name="claude-sonnet-4-5",
    provider="anthropic",
    price=Price(
        input=Decimal(3),
        output=Decimal(15),
        cache_read=Decimal("0.30"),
        cache_write=Decimal("3.75"),
    ),
)
GPT: Final = Model(
    name="gpt-5", provider="openai", price=Price(input=Decimal("1.25"), output=Decimal(10))
)
GPT_MINI: Final = Model(
    name="gpt-5-mini", provider="openai", price=Price(input=Decimal("0.25"), output=Decimal(2))
)
FLASH: Final = Model(
    name="gemini-2.5-flash-lite",
    provider="gcp.gemini",
    price=Price(input=Decimal("0.10"), output=Decimal("0.40")),
)

RECOMMENDED: Final = Limits(
    **{name: cap for name, cap in PRESETS["recommended"].items() if name in LIMITS}  # type: ignore[arg-type]
)
OWN_CAPS: Final = Limits(max_turns=20)
OWN_CAPS_SINCE_A_LOOP: Final = Limits(max_turns=20, max_identical_tool_calls=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent and its daily workload."""

    name: str
    model: Model
    tools: Sequence[str]
    weekday: int
    """Invocations on each day from Monday to Friday."""
    weekend: int
    opens: int
    """Hour of its first invocation of the day, in UTC."""
    turns: tuple[int, int]
    """Minimum and maximum."""
    prompt: int
    """Tokens of the first request, including instructions and tools."""
    result: int
    """Approximate tokens of a turn's tool results."""
    tenants: Sequence[str] = ("internal",)
    limits: Limits = RECOMMENDED


SUPPORT: Final = Agent(
    name="support-assistant", model=HAIKU, tools=("find_order", "search_help", "create_ticket"),
    weekday=6, weekend=2, opens=7, turns=(2, 6), prompt=2_400, result=450,
    tenants=("acme", "acme", "globex", "initech"),
)  # fmt: skip
RESEARCH: Final = Agent(
    name="research-lead", model=SONNET, tools=("ask_reader",), weekday=2, weekend=0, opens=9,
    turns=(3, 5), prompt=3_100, result=1_500,
)  # fmt: skip
READER: Final = Agent(
    name="research-reader", model=HAIKU, tools=("search_web", "read_page"), weekday=0, weekend=0,
    opens=9, turns=(2, 5), prompt=1_200, result=3_000,
)  # fmt: skip
REVIEWER: Final = Agent(
    name="code-reviewer", model=GPT_MINI, tools=("read_file", "grep", "run_tests"), weekday=4,
    weekend=0, opens=8, turns=(4, 15), prompt=5_200, result=2_200, limits=OWN_CAPS,
)  # fmt: skip
EXTRACTOR: Final = Agent(
    name="invoice-extractor", model=FLASH, tools=("save_invoice",), weekday=4, weekend=4, opens=2,
    turns=(1, 2), prompt=6_500, result=120, tenants=("acme", "globex", "initech"),
)  # fmt: skip
WATCHER: Final = Agent(
    name="delivery-watcher", model=GPT_MINI, tools=("track_parcel",), weekday=1, weekend=1, opens=5,
    turns=(2, 8), prompt=1_900, result=1_400, tenants=("acme", "globex"),
)  # fmt: skip
TRIAGER: Final = Agent(
    name="ticket-triager", model=FLASH, tools=("label_ticket", "assign_team"), weekday=5, weekend=2,
    opens=6, turns=(1, 3), prompt=1_700, result=200, tenants=("acme", "globex", "initech"),
)  # fmt: skip
ANALYST: Final = Agent(
    name="sales-analyst", model=GPT, tools=("list_tables", "run_query"), weekday=2, weekend=0,
    opens=7, turns=(3, 9), prompt=2_800, result=900, limits=OWN_CAPS,
)  # fmt: skip
CONTRACTS: Final = Agent(
    name="contract-checker", model=SONNET, tools=("read_section",), weekday=2, weekend=0, opens=8,
    turns=(2, 4), prompt=4_000, result=1_800, tenants=("acme", "globex"),
)  # fmt: skip
FLEET: Final = (
    SUPPORT, RESEARCH, REVIEWER, EXTRACTOR, WATCHER, TRIAGER, ANALYST, CONTRACTS,
)  # fmt: skip
"""The agents that are called directly; `RESEARCH` also starts `READER`."""

IDENTICAL_CALLS: Final = "max_identical_tool_calls"
LOST_PARCEL: Final = Incident(
    turns=64, reason="error", action="observed", is_stuck=True,
    breach=Breach(IDENTICAL_CALLS, 5, 5, "loop_detected", "identical calls", "track_parcel"),
)  # fmt: skip
"""The carrier has lost a parcel and always returns the same status. The action was observe, so the
agent continued until its provider refused a request."""
FLAKY_TESTS: Final = Incident(
    turns=20, reason="max_turns", action="halted", is_stuck=True,
    breach=Breach("max_turns", 20, 20, "max_turns", "turns"),
)  # fmt: skip
FLAKY_TESTS_AGAIN: Final = Incident(
    turns=5, reason="loop_detected", action="halted", is_stuck=True, limits=OWN_CAPS_SINCE_A_LOOP,
    breach=Breach(IDENTICAL_CALLS, 5, 5, "loop_detected", "identical calls", "run_tests"),
)  # fmt: skip
"""The same, after a loop limit was added."""
BUDGET_SPENT: Final = Incident(
    turns=1,
    reason="quota_exceeded",
    action="halted",
    breach=Breach("tenant-daily-usd", Decimal(2), Decimal("2.001"), "quota_exceeded", "USD"),
)
EMPTY_RESULT: Final = Incident(
    turns=20, reason="max_turns", action="halted", is_stuck=True,
    breach=Breach("max_turns", 20, 20, "max_turns", "turns"),
)  # fmt: skip
"""The query returns no rows, so the agent runs it again."""
KILLED: Final = Incident(turns=9, reason="killed", action="killed")

INCIDENTS: Final[Mapping[tuple[str, int, int], Incident]] = {
    (WATCHER.name, 0, 3): LOST_PARCEL,
    (WATCHER.name, 1, 1): LOST_PARCEL,
    (WATCHER.name, 2, 4): LOST_PARCEL,
    (WATCHER.name, 3, 2): LOST_PARCEL,
    (REVIEWER.name, 1, 3): FLAKY_TESTS,
    (REVIEWER.name, 2, 0): FLAKY_TESTS_AGAIN,
    (REVIEWER.name, 3, 1): KILLED,
    (SUPPORT.name, 2, 2): BUDGET_SPENT,
    (SUPPORT.name, 2, 3): Incident(turns=2, reason="error"),
    (EXTRACTOR.name, 1, 5): Incident(turns=1, reason="max_tokens"),
    (TRIAGER.name, 1, 3): BUDGET_SPENT,
    (TRIAGER.name, 2, 1): BUDGET_SPENT,
    (TRIAGER.name, 3, 4): BUDGET_SPENT,
    (ANALYST.name, 0, 1): EMPTY_RESULT,
    (ANALYST.name, 0, 4): EMPTY_RESULT,
    (ANALYST.name, 1, 0): EMPTY_RESULT,
    (ANALYST.name, 1, 2): KILLED,
    (ANALYST.name, 2, 3): EMPTY_RESULT,
    (ANALYST.name, 3, 0): EMPTY_RESULT,
    (CONTRACTS.name, 2, 2): BUDGET_SPENT,
    (CONTRACTS.name, 3, 3): BUDGET_SPENT,
}
"""How an agent's first invocation of a day ended, by week and weekday."""

LONG_PROMPT: Final = (SUPPORT.name, 3, 1)
"""The day on which an entire manual was part of the instructions."""
UPGRADED_FROM: Final = (3, 3)
"""Week and weekday from which the reviewer uses a larger model."""


def history(today: date) -> Iterator[Event]:
    """Yield the events of the four weeks before `today`."""
    for ago in range(DAYS, 0, -1):
        day = today - timedelta(days=ago)
        week = (DAYS - ago) // 7
        for agent in FLEET:
            yield from events_of_day(agent, day, week)
    yield from quota_changes(today)


def events_of_day(agent: Agent, day: date, week: int) -> Iterator[Event]:
    """Yield the events of one agent on one day."""
    weekday = day.weekday()
    # A string is the same seed in every process and Python version.
    chance = Random(f"{agent.name} {week} {weekday}")  # noqa: S311  an example, not a secret
    incident = INCIDENTS.get((agent.name, week, weekday))
    opens = midnight(day) + 3_600 * agent.opens
    for number in range(agent.weekend if weekday >= SATURDAY else agent.weekday):
        at = opens + 4_800 * number + round(3_000 * chance.random())
        plan = plan_invocation(
            agent, at, chance, (week, weekday), incident if number == 0 else None
        )
        yield from invocation_events(plan, chance)


def plan_invocation(
    agent: Agent, at: float, chance: Random, when: tuple[int, int], incident: Incident | None
) -> Plan:
    """Draw one invocation of an agent and those of its sub-agents."""
    low, high = agent.turns
    # `random()` is reproducible in all Python versions, unlike `randint`.
    turns = low + int((high - low + 1) * chance.random())
    readers = turns - 1 if agent is RESEARCH else 0
    is_upgraded = agent is REVIEWER and when >= UPGRADED_FROM
    return Plan(
        agent=agent.name,
        model=GPT if is_upgraded else agent.model,
        tools=agent.tools,
        at=at,
        turns=incident.turns if incident else turns,
        prompt=agent.prompt * (9 if (agent.name, *when) == LONG_PROMPT else 1),
        result=agent.result,
        tenant=agent.tenants[int(len(agent.tenants) * chance.random())],
        limits=incident.limits if incident and incident.limits else agent.limits,
        incident=incident,
        sub_agents=[
            plan_invocation(READER, at + 20 * n, chance, when, None) for n in range(1, readers + 1)
        ],
    )


def quota_changes(today: date) -> Iterator[QuotaGrant]:
    """Yield an operator's changes to a quota after it refused calls."""
    at = midnight(today - timedelta(days=4)) + 3_600 * 8
    grant = QuotaGrant(
        quota="tenant-daily-usd", key="globex", change="grant", amount=Decimal(3), unit="USD",
        until=at + 86_400, by="dana@ops-1", at=at, id=f"{1:032x}", reason="end of quarter",
    )  # fmt: skip
    block = replace(
        grant, key="initech", change="block", amount=0, until=None, at=at + 5_400, id=f"{2:032x}",
        reason="unpaid invoice",
    )  # fmt: skip
    yield from (grant, block)
    yield replace(block, change="unblock", at=at + 9_900, id=f"{3:032x}", reason="")


def midnight(day: date) -> float:
    """Return the start of a day in UTC, in seconds since the epoch."""
    return datetime(day.year, day.month, day.day, tzinfo=timezone.utc).timestamp()
