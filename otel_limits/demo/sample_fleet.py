"""A sample fleet of nine agents, described in `fleet.json`, and its ledger of four weeks.

Each agent, week and weekday has its own random seed. So two recordings differ only in their dates,
and the totals of the four weeks are always the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from hashlib import blake2s
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from otel_limits.core.events import (
    ActionTaken,
    Event,
    Invocation,
    ModelCall,
    QuotaGrant,
    Started,
    Stop,
    ToolCall,
    ToolStatus,
    breach_from_json,
)
from otel_limits.core.halt_texts import for_operator
from otel_limits.core.limits import LIMITS, Limits
from otel_limits.core.policy import Verdict
from otel_limits.core.price import Price
from otel_limits.core.usage import NO_COST, NO_USAGE, Usage
from otel_limits.demo.sample_bills import write_bills
from otel_limits.ledger import rows
from otel_limits.quotas.needs import QuotaNeed
from otel_limits.quotas.refusals import exceeded
from otel_limits.quotas.store import CountState, Demand, Reply
from otel_limits.settings.policy.reader import parse
from otel_limits.settings.table import PRESETS

if TYPE_CHECKING:
    from otel_limits.core.limits import Breach
    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.quota import Quota
    from otel_limits.settings.policy.document import Document


# --- a simulated invocation, as its events --------------------------------------------------------

TENANT: Final = "tenant.id"
"""The column that OTEL_LIMITS_AUDIT_KEYS would configure."""
PRICES: Final = "demo"
"""The recorded price source."""

UNREPORTED: Final = 0.01
"""Share of calls without reported usage, which is then estimated."""
FAILING: Final = 0.04
REPEATING: Final = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model and its price."""

    name: str
    provider: str
    price: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """How an unsuccessful invocation ended."""

    turns: int
    reason: str
    action: ActionTaken = "none"
    breach: Breach | None = None
    is_stuck: bool = False
    """Whether it repeated one tool call without progress."""


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
    turns: Sequence[int]
    """Minimum and maximum."""
    prompt: int
    """Tokens of the first request, including instructions and tools."""
    result: int
    """Approximate tokens of a turn's tool results."""
    limits: Limits
    tenants: Sequence[str] = ("internal",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The properties of an invocation before its events are generated."""

    agent: Agent
    at: float
    turns: int
    tenant: str
    incident: Incident | None = None
    sub_agents: Sequence[Plan] = ()
    """Invocations it starts, one per turn except the last."""

    @property
    def is_new(self) -> bool:
        """Whether its team observes the preset first."""
        return bool(self.agent.limits.max_iterations)

    def origin_of(self, limit: str) -> str:
        """Return where one of its limits is set."""
        if self.is_new:
            return "preset recommended"
        document = recorded_document()
        return f"{document.path}:{document.agents[self.agent.name][limit].line}"


@dataclass(slots=True)
class RunState:
    """The state of an invocation while its events are generated."""

    at: float
    calls: list[ModelCall] = field(default_factory=list)
    tool_calls: int = 0
    prompt: int = 0
    """Tokens of the previous request."""
    after: Mapping[str, int] = field(default_factory=dict)
    """The tools whose results are in the next request."""

    @property
    def usage(self) -> Usage:
        """Total usage of all calls."""
        parts = ("input", "output", "cache_read", "cache_write")
        return Usage(
            **{part: sum(getattr(call.usage, part) for call in self.calls) for part in parts}
        )


def invocation_events(
    plan: Plan, chance: Random, parent: Invocation | None = None
) -> Iterator[Event]:
    """Yield the events of an invocation and its sub-agents."""
    invocation = make_invocation(plan, chance, parent)
    yield Started(
        invocation=invocation,
        limits=plan.agent.limits,
        action="observed" if plan.is_new else "halted",
        configured_action="observe" if plan.is_new else "halt",
        origins={name: plan.origin_of(name) for name, _ in plan.agent.limits.items()},
        unsampled=False,
        attributes={TENANT: plan.tenant},
        at=plan.at,
    )
    done = RunState(plan.at)
    for turn in range(1, plan.turns + 1):
        yield model_call(plan, invocation, turn, done, chance)
        # A runaway ends after its tools, without an answer.
        is_last = turn == plan.turns and not (plan.incident and plan.incident.is_stuck)
        if turn <= len(plan.sub_agents):
            yield from invocation_events(plan.sub_agents[turn - 1], chance, invocation)
        yield from () if is_last else tool_calls(plan, invocation, turn, done, chance)
    if plan.incident is not None and plan.incident.reason == "error":
        yield failed_call(invocation, done)
    yield stop_event(plan, invocation, done)


def make_invocation(plan: Plan, chance: Random, parent: Invocation | None) -> Invocation:
    """Create an invocation with reproducible IDs, which documentation pages can refer to."""
    identity = f"{chance.getrandbits(128):032x}"
    return Invocation(
        agent=plan.agent.name,
        id=identity,
        root_id=parent.root_id if parent else identity,
        parent_id=parent.id if parent else None,
        trace_id=parent.trace_id if parent else f"{chance.getrandbits(128):032x}",
        span_id=f"{chance.getrandbits(64):016x}",
    )


def model_call(
    plan: Plan, invocation: Invocation, turn: int, done: RunState, chance: Random
) -> ModelCall:
    """Create a model call."""
    model = plan.agent.model
    usage = draw_usage(plan.agent, turn, done.prompt, chance)
    is_reported = chance.random() >= UNREPORTED
    seconds = seconds_of_call(usage)
    done.at += seconds
    call = ModelCall(
        invocation=invocation, number=turn, model=model.name,
        kind="measured" if is_reported else "estimated", usage=usage, estimated=not is_reported,
        span_id=f"{chance.getrandbits(64):016x}", seconds=seconds,
        price=model.price.of(usage), price_source=PRICES, price_version="2026-11",
        cache_saved=model.price.saved_by_cache(usage), provider=model.provider,
        reported=usage if is_reported else None,
        reported_total=usage.total if is_reported else None,
        turn=turn, iteration=turn, after_tools=done.after, at=done.at,
    )  # fmt: skip
    done.calls.append(call)
    done.prompt = usage.input
    done.after = {}
    return call


def draw_usage(agent: Agent, turn: int, last: int, chance: Random) -> Usage:
    """Draw the usage of a call: its prompt has the conversation and the new tool results.

    Args:
        agent: The agent.
        turn: The number of the call, from 1.
        last: Tokens of the previous prompt.
        chance: The source of randomness.
    """
    output = 60 + int(240 * chance.random())
    prompt = last + agent.result // 2 + int(agent.result * chance.random())
    prompt = agent.prompt if turn == 1 else prompt
    if agent.model.price.cache_write is None:
        return Usage(input=prompt, output=output)
    return Usage(input=prompt, output=output, cache_read=last, cache_write=prompt - last)


def seconds_of_call(usage: Usage) -> float:
    """Return the duration of a call: 0.4 s to the first token, then 80 tokens per second."""
    return round(0.4 + usage.output / 80, 3)


def failed_call(invocation: Invocation, done: RunState) -> ModelCall:
    """Create the failed and unbilled model call that ended an invocation."""
    last = done.calls[-1]
    done.at += 1.0
    call = ModelCall(
        invocation=invocation, number=last.number + 1, model=last.model, kind="failed",
        usage=NO_USAGE, estimated=False, span_id=last.span_id, seconds=1.0, provider=last.provider,
        turn=last.turn + 1, iteration=last.iteration + 1, after_tools=done.after, at=done.at,
    )  # fmt: skip
    done.calls.append(call)
    return call


def tool_calls(
    plan: Plan, invocation: Invocation, turn: int, done: RunState, chance: Random
) -> Iterator[ToolCall]:
    """Yield the tool call of a turn."""
    drawn = draw_tool(plan, chance)
    done.at += drawn.seconds
    done.tool_calls += 1
    done.after = {drawn.tool: 1}
    # Equal fingerprints mark repeated calls.
    identity = f"{invocation.id} {drawn.tool} {'' if drawn.is_again else done.tool_calls}"
    yield ToolCall(
        invocation=invocation,
        number=done.tool_calls,
        tool=drawn.tool,
        status=drawn.status,
        seconds=drawn.seconds,
        fingerprint=blake2s(identity.encode(), digest_size=16).hexdigest(),
        turn=turn,
        at=done.at,
    )


@dataclass(frozen=True, slots=True)
class DrawnTool:
    """A tool call before it is made."""

    tool: str
    status: ToolStatus
    is_again: bool
    """Whether it has the arguments of an earlier call."""
    seconds: float


def draw_tool(plan: Plan, chance: Random) -> DrawnTool:
    """Draw the tool call of a turn; a stuck agent repeats that of its last tool."""
    is_stuck = plan.incident is not None and plan.incident.is_stuck
    tool = plan.agent.tools[-1 if is_stuck else int(len(plan.agent.tools) * chance.random())]
    status: ToolStatus = "error" if chance.random() < FAILING and not is_stuck else "success"
    is_again = is_stuck or (chance.random() < REPEATING and status == "success")
    return DrawnTool(tool, status, is_again, round(0.1 + 1.5 * chance.random(), 3))


TENANT_QUOTA: Final = "tenant-slots"
"""A quota of the calls in flight at one time, which no ledger shows: one of tokens or USD would
have to agree with the recorded usage."""
BUDGET: Final = "tenant-daily-usd"
"""A quota that an operator changed."""


def key_of(quota: str, tenant: str) -> Key:
    """Return the key of a tenant, which is shown as a hash."""
    found: Quota = recorded_document().quotas[quota].value
    return found.key.key(found.name, lambda _: tenant)


def quota_breach(tenant: str, now: float) -> Breach:
    """Return the breach of a tenant's quota, in the words of a real one."""
    quota: Quota = recorded_document().quotas[TENANT_QUOTA].value
    key, limit = key_of(TENANT_QUOTA, tenant), quota.amount
    need = QuotaNeed(quota, key, limit, 1, at_most=False, certain=True, model="", action="halt")
    state = CountState(0, limit, limit)
    demand = Demand(count=quota.count(key, now), amount=1, limit=limit)
    return exceeded(need, demand, Reply("refused", now, (state,), (0,)), state)


def stop_event(plan: Plan, invocation: Invocation, done: RunState) -> Stop:
    """Create the stop event, with the totals of all calls."""
    incident = plan.incident
    costs = [call.price or NO_COST for call in done.calls]
    sentence = ""
    breach = incident.breach if incident else None
    if breach is not None:
        is_quota = breach.limit == TENANT_QUOTA
        breach = (
            quota_breach(plan.tenant, done.at)
            if is_quota
            else replace(breach, origin=plan.origin_of(breach.limit))
        )
    if incident is not None:
        breaches = (breach,) if breach else ()
        sentence = for_operator(
            plan.agent.name, Verdict(incident.reason, breaches), incident.action
        )
    return Stop(
        reason=incident.reason if incident else "end_turn",
        action=incident.action if incident else "none",
        breach=breach,
        sentence=sentence,
        turns=plan.turns,
        usage=done.usage,
        agent=plan.agent.name,
        trace_id=invocation.trace_id,
        invocation_id=invocation.id,
        cycles=len(done.calls),
        model_calls=len(done.calls),
        started=plan.at,
        seconds=done.at - plan.at,
        tool_calls=done.tool_calls,
        cost=sum(costs, Decimal(0)),
        synthetic=incident is not None and incident.action in ("halted", "killed"),
        invocation=invocation,
    )


# --- four weeks of the fleet ----------------------------------------------------------------------

WEEKS: Final = 4
DAYS: Final = 7 * WEEKS
SATURDAY: Final = 5

RECOMMENDED: Final = Limits(
    **{name: cap for name, cap in PRESETS["recommended"].items() if name in LIMITS}  # type: ignore[arg-type]
)
FLEET_FILE: Final = files("otel_limits.demo").joinpath("fleet.json")
DATA: Final[Mapping[str, Any]] = json.loads(FLEET_FILE.read_text(encoding="utf-8"))


def limits_of(entry: Mapping[str, Any]) -> Limits | None:
    """Return the limits of an agent, if it has its own."""
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
GUARDED_FROM: Final = (2, 0)
"""Week and weekday from which the reviewer has a loop limit."""
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
    if agent.name == REVIEWER.name and when < GUARDED_FROM:
        agent = replace(agent, limits=replace(agent.limits, max_identical_tool_calls=None))
    if (agent.name, *when) == LONG_PROMPT:
        agent = replace(agent, prompt=9 * agent.prompt)
    return Plan(
        agent=agent,
        at=at,
        turns=incident.turns if incident else turns,
        tenant=agent.tenants[int(len(agent.tenants) * chance.random())],
        incident=incident,
        sub_agents=[
            plan_invocation(READER, at + 20 * n, chance, when, None) for n in range(1, readers + 1)
        ],
    )


def quota_changes(today: date) -> Iterator[QuotaGrant]:
    """Yield an operator's changes to a quota."""
    at = midnight(today - timedelta(days=4)) + 3_600 * 8
    grant = QuotaGrant(
        quota=BUDGET, key=key_of(BUDGET, "globex").shown, change="grant", amount=Decimal(3),
        unit="USD", until=at + 86_400, by="dana@ops-1", at=at, id=f"{1:032x}",
        reason="end of quarter",
    )  # fmt: skip
    block = replace(
        grant, key=key_of(BUDGET, "initech").shown, change="block", amount=0, until=None,
        at=at + 5_400, id=f"{2:032x}", reason="unpaid invoice",
    )  # fmt: skip
    yield from (grant, block)
    yield replace(block, change="unblock", at=at + 9_900, id=f"{3:032x}", reason="")


def midnight(day: date) -> float:
    """Return the start of a day in UTC, in seconds since the epoch."""
    return datetime(day.year, day.month, day.day, tzinfo=timezone.utc).timestamp()


# --- the ledger of `otel-limits demo --record DIR` ------------------------------------------------

LEDGER_FILE: Final = "ledger.db"
POLICY_FILE: Final = "limits.yaml"
BATCH_SIZE: Final = 10_000
BAD_ARGUMENT: Final = 2

QUESTIONS: Final = (
    ("spend --by agent", "cost by agent"),
    ("budget", "use of each quota"),
    ("stops", "stop reasons and the costliest halts"),
    ("loops", "repeated tool calls and their cost"),
    ("anomalies", "days with unusual spend or turns"),
    ("suggest", "a policy file from recorded usage"),
    ("backtest --max-turns 20", "recorded invocations against other limits"),
    ("verify", "check that the ledger is complete"),
)


def recorded_policy() -> Mapping[str, Any]:
    """Return the policy of the recorded fleet: new agents only observe the preset."""
    own = {agent.name: agent.limits for agent in AGENTS.values() if agent.limits is not RECOMMENDED}
    return {
        "agents": {
            name: {"limits": limits_json(own[name])} if name in own else {"action": "observe"}
            for name in AGENTS
        },
        "models": prices_json(),
        "quotas": DATA["recorded"]["quotas"],
    }


@functools.cache
def recorded_document() -> Document:
    """Return that policy as agents read it, with its lines."""
    document, mistakes = parse(as_file(recorded_policy()), POLICY_FILE)
    assert not mistakes, mistakes
    return document


def limits_json(limits: Limits) -> dict[str, Any]:
    """Return the limits that are set."""
    return {name: cap for name in LIMITS if (cap := getattr(limits, name)) is not None}


def prices_json() -> dict[str, Any]:
    """Return the prices of the fleet's models, as in a policy file."""
    return {
        name: {"price": {kind: float(usd) for kind, usd in model["price"].items()}}
        for name, model in DATA["models"].items()
    }


def as_file(policy: Mapping[str, Any]) -> str:
    """Return the text of a policy file; JSON is YAML, too."""
    return f"{json.dumps(policy, indent=2)}\n"


def record(directory: str) -> int:
    """Write the sample ledger, its policy file and bills, and print example queries.

    Returns:
        The exit status: 2 if the directory has a ledger or is not writable.
    """
    path = Path(directory).expanduser() / LEDGER_FILE
    if path.exists():
        # It may be a real ledger.
        return _refuse(
            f"{path} already exists. Use it as it is, delete it, or choose another directory."
        )
    today = datetime.fromtimestamp(time.time(), timezone.utc).date()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        counts = write_ledger(path, today)
        policy_path = write_policy(path.parent)
        calls = (event for event in history(today) if isinstance(event, ModelCall))
        prices = {name: model.price for name, model in MODELS.items()}
        bills, existing = write_bills(path.parent, calls, prices, today)
    except OSError as error:
        return _refuse(f"Cannot write {path}: {error.strerror or error}.")
    sys.stdout.write(
        f"Recorded four weeks of a sample fleet in {path}: {counts['agents']} agents,\n"
        # Each invocation has a row for its start and one for its end.
        f"{counts[rows.INVOCATIONS] // 2} invocations, {counts[rows.MODEL_CALLS]:,} model calls, "
        f"{counts[rows.TOOL_CALLS]:,} tool calls. The data is simulated; the prices are real.\n"
        f"{_about_bills(bills, existing)}\n"
        f"export OTEL_LIMITS_LEDGER={path}\n"
        f"export OTEL_LIMITS_POLICY={policy_path}\n"
    )
    width = max(len(question) for question, _ in QUESTIONS)
    for question, meaning in QUESTIONS:
        sys.stdout.write(f"otel-limits audit {question:<{width}}   # {meaning}\n")
    return 0


def _about_bills(written: Sequence[Path], existing: Sequence[Path]) -> str:
    sentences = {
        "Vendors' bills of its last week: {}.\n": written,
        "Not replaced, as they already exist: {}.\n": existing,
    }
    return "".join(
        sentence.format(", ".join(bill.name for bill in bills))
        for sentence, bills in sentences.items()
        if bills
    )


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"otel-limits demo: {sentence}\n")
    return BAD_ARGUMENT


def write_policy(directory: Path) -> Path:
    """Write the policy file of the fleet, unless the directory has one; return its path.

    Raises:
        OSError: It cannot be written.
    """
    path = directory / POLICY_FILE
    if not path.exists():
        path.write_text(as_file(recorded_policy()), encoding="utf-8")
    return path


def write_ledger(path: Path, today: date) -> Counter[str]:
    """Write the four weeks before `today` to a new ledger.

    Returns:
        The number of rows written to each table, and of `agents`.

    Raises:
        OSError: The file cannot be written.
    """
    from otel_limits.ledger.address import parse
    from otel_limits.ledger.database import Database, DatabaseError, reason_of

    all_rows = list(rows_of(history(today)))
    counts = Counter(table for table, _ in all_rows)
    counts["agents"] = len({row["agent"] for table, row in all_rows if table == rows.INVOCATIONS})
    try:
        with contextlib.closing(Database(parse("--record", str(path), path.parent))) as database:
            for batch in rows.portions(all_rows, BATCH_SIZE):
                database.write(batch)
    except DatabaseError as error:
        raise OSError(reason_of(error)) from None
    return counts


def rows_of(events: Iterable[Event]) -> Iterable[tuple[str, rows.Row]]:
    """Convert events to rows as the ledger's observer does."""
    started: dict[str, Started] = {}
    for event in events:
        if isinstance(event, Started):
            started[event.invocation.id] = event
            yield from rows.started_rows(event)
        elif isinstance(event, ModelCall):
            yield rows.MODEL_CALLS, rows.model_call_row(event)
        elif isinstance(event, ToolCall):
            yield rows.TOOL_CALLS, rows.tool_call_row(event)
        elif isinstance(event, Stop):
            begun = started.pop(event.invocation_id)
            yield rows.INVOCATIONS, rows.invocation_row(begun, event)
        elif isinstance(event, QuotaGrant):
            yield rows.QUOTA_CHANGES, rows.quota_change_row(event)
