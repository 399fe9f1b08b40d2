"""A sample fleet of nine agents, described in `fleet.json`, and the events of four weeks.

Each agent, week and weekday has its own random seed. So two recordings differ only in their dates,
and the totals of the four weeks are always the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from importlib.resources import files
from random import Random
from typing import Any, Final

from otel_limits.core.events import Event, QuotaGrant, breach_from_json
from otel_limits.core.limits import LIMITS, Limits
from otel_limits.core.price import Price
from otel_limits.demo.sample_invocation import Agent, Incident, Model, Plan, invocation_events
from otel_limits.settings.table import PRESETS

WEEKS: Final = 4
DAYS: Final = 7 * WEEKS
SATURDAY: Final = 5

RECOMMENDED: Final = Limits(
    **{name: cap for name, cap in PRESETS["recommended"].items() if name in LIMITS}  # type: ignore[arg-type]
)
FILE: Final = files("otel_limits.demo").joinpath("fleet.json")
DATA: Final[Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


def limits_of(entry: Mapping[str, Any]) -> Limits | None:
    """Return the limits of an agent or an incident, if it has its own."""
    return Limits(**entry["limits"]) if "limits" in entry else None


def model_of(name: str, entry: Mapping[str, Any]) -> Model:
    """Return a model with its price."""
    rates: dict[str, Any] = {kind: Decimal(usd) for kind, usd in entry["price"].items()}
    return Model(name=name, provider=entry["provider"], price=Price(**rates))


MODELS: Final = {name: model_of(name, entry) for name, entry in DATA["models"].items()}
AGENTS: Final = {
    each["name"]: Agent(
        **{**each, "model": MODELS[each["model"]], "limits": limits_of(each) or RECOMMENDED}
    )
    for each in DATA["agents"]
}
INCIDENTS: Final = {
    (each["agent"], week, weekday): Incident(
        turns=each["turns"],
        reason=each["reason"],
        action=each.get("action", "none"),
        breach=breach_from_json(DATA["breaches"][each["breach"]]) if "breach" in each else None,
        is_stuck="is_stuck" in each,
        limits=limits_of(each),
    )
    for each in DATA["incidents"]
    for week, weekday in each["days"]
}
"""How an agent's first invocation of a day ended, by week and weekday."""

RESEARCH: Final = AGENTS["research-lead"]
READER: Final = AGENTS["research-reader"]
REVIEWER: Final = AGENTS["code-reviewer"]
FLEET: Final = tuple(each for each in AGENTS.values() if each is not READER)
"""The agents that are called directly; `RESEARCH` also starts `READER`."""

LONG_PROMPT: Final = ("support-assistant", 3, 1)
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
    if agent is REVIEWER and when >= UPGRADED_FROM:
        agent = replace(agent, model=MODELS["gpt-5"])
    if (agent.name, *when) == LONG_PROMPT:
        agent = replace(agent, prompt=9 * agent.prompt)
    return Plan(
        agent=agent,
        at=at,
        turns=incident.turns if incident else turns,
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
