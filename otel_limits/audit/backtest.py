"""The question `backtest`: which recorded invocations other limits would have halted.

Limits are checked where they are in production: before each further model call. So an invocation is
only halted if it made a further call, and the savings are the calls from there. Limits count whole
tasks, so an invocation is here one with those that answer its interrupts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.charts import turns_chart
from otel_limits.audit.question import SELECTION, AuditQuery, Option, Question
from otel_limits.audit.survival import interval
from otel_limits.core.errors import LedgerError
from otel_limits.core.events import CUT_SHORT
from otel_limits.core.limits import file_name
from otel_limits.ledger.options import Condition
from otel_limits.ledger.rows import MAX_INTEGER, PICODOLLARS, known_cost

if TYPE_CHECKING:
    from otel_limits.ledger.selection import Selection

MAX_ITERATIONS: Final = "max_iterations"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateLimit:
    """A limit that can be tested on recorded invocations."""

    total: str
    """The total that it caps, as a column of an invocation."""
    read: Callable[[str], Any] = parsing.cap
    metavar: str = "N"
    scale: int = 1
    """Units of `total` per unit of the cap."""


LIMITS: Final[Mapping[str, CandidateLimit]] = {
    MAX_ITERATIONS: CandidateLimit(total="turns"),
    "max_turns": CandidateLimit(total="turns"),
    "max_model_calls": CandidateLimit(total="model_calls"),
    "max_token_budget": CandidateLimit(total="tokens"),
    "max_input_tokens": CandidateLimit(total="input_tokens"),
    "max_output_tokens": CandidateLimit(total="output_tokens"),
    "max_cost_usd": CandidateLimit(
        total="price_pico", read=parsing.usd, metavar="USD", scale=PICODOLLARS
    ),
}
"""In order of precedence, which is also the order of the totals in `replay`."""

TOP: Final = 20


def flag_of(limit: str) -> str:
    """Return the option that tests a limit."""
    return f"--{limit.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class CandidateCap:
    """A cap to test."""

    limit: str
    cap: int
    position: int
    """Index of its total in `replay`."""


def tried_caps(caps: Mapping[str, Any]) -> list[CandidateCap]:
    """List the given caps, in order of precedence."""
    return [
        CandidateCap(name, int(caps[name] * limit.scale), position)
        for position, (name, limit) in enumerate(LIMITS.items())
        if caps[name] is not None
    ]


def least_totals(tried: Iterable[CandidateCap]) -> dict[str, int]:
    """Return the minimum totals of an invocation that one of the caps would halt."""
    least: dict[str, int] = {}
    for each in tried:
        total = LIMITS[each.limit].total
        # The lowest of several caps on one total: invocations below it need not be read. A cap
        # beyond the largest integer is equivalent to it: neither is ever reached.
        least[total] = min(each.cap, least.get(total, MAX_INTEGER))
    return least


@dataclass(frozen=True, slots=True)
class Cut:
    """Where an invocation would have been halted, and what that would have saved."""

    limit: str
    turn: int
    """Turns before the halt."""
    tokens: int
    pico: int
    unpriced: int
    """Saved calls without a known price."""


@dataclass(slots=True)
class Outcome:
    """The effect of the caps on the invocations of one agent."""

    invocations: int = 0
    tokens: int = 0
    halted: int = 0
    cut_successes: int = 0
    cut_short: int = 0
    """Invocations that were halted or killed in the record."""
    halted_cut_short: int = 0
    """Those of them that the caps would have halted, too."""
    saved_tokens: int = 0
    saved_pico: int = 0
    saved_unpriced: int = 0
    cuts: list[tuple[Any, Cut]] = field(default_factory=list)

    def merge(self, other: Outcome) -> None:
        """Add the effect on another agent, except for the list of cuts."""
        for name in set(self.__slots__) - {"cuts"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def unknown(self) -> int:
        """Invocations that were halted or killed before the caps could have taken effect."""
        return self.cut_short - self.halted_cut_short


OUTCOMES: Final = (
    Column("agent", "Agent", is_key=True),
    Column("invocations", "Invocations", "count"),
    Column("halted", "Would-be halts", "count", is_key=True),
    Column("cut_successes", "Of successful ones", "count", is_key=True),
    Column("unknown", "Unknown", "count"),
    Column("halted_share_low", "Halt rate from", "share"),
    Column("halted_share_high", "to", "share"),
    Column("saved_tokens", "Tokens saved", "count"),
    Column("saved_share", "Share of tokens", "share"),
    Column("saved_usd", "Cost saved", "money"),
)

CUTS: Final = (
    Column("trace_id", "Trace", "id", is_key=True),
    Column("agent", "Agent", is_key=True),
    Column("reason", "Stop reason"),
    Column("successful", "Successful"),
    Column("limit", "Limit", is_key=True),
    Column("turn", "Turns", "count"),
    Column("turns", "Recorded turns", "count"),
    Column("saved_tokens", "Tokens saved", "count"),
    Column("saved_usd", "Cost saved", "money"),
)


def backtest(inquiry: AuditQuery, policy: str | None, **caps: Any) -> Answer:
    """Answer what limits would have done to recorded invocations.

    Args:
        inquiry: The ledger, and the part of it to replay.
        policy: Path of a policy file, whose limits are tried on each agent.
        caps: Limits that are tried on all agents instead.

    Raises:
        ConfigurationError: The policy file contains mistakes.
        LedgerError: Neither or both are given, or the ledger lacks a selected property.
    """
    from otel_limits.ledger import whole_tasks

    tried = tried_caps(caps)
    if not tried and policy is None:
        raise LedgerError(
            "No limit given. Pass at least one, e.g. --max-turns 20, or --policy limits.yaml."
        )
    if tried and policy is not None:
        raise LedgerError(f"Pass either --policy or {flag_of(tried[0].limit)}, not both.")
    inquiry.require_known()
    outcomes: dict[str, Outcome] = {}
    for row in whole_tasks.totals_by_agent(inquiry.connection, inquiry.selection):
        more = Outcome(row.tasks, int(row.tokens), cut_short=row.cut_short)
        outcomes.setdefault(row.agent, Outcome()).merge(more)
    if policy is None:
        for row, cut in cuts_of(inquiry, inquiry.selection, tried):
            add_cut(outcomes[row.agent], row, cut)
        title = f"With {', '.join(f'{each.limit}={caps[each.limit]}' for each in tried)}"
        summary = ""
    else:
        title = f"With the limits of {file_name(policy)}"
        summary = " ".join(try_policy(inquiry, policy, outcomes))
    charts = []
    if inquiry.has_charts:
        charts = [
            turns_chart(whole_tasks.tasks(inquiry.connection, inquiry.selection), caps["max_turns"])
        ]
    return Answer(
        question="backtest",
        title="Backtest",
        about=inquiry.about,
        tables=[outcome_table(outcomes, title), cuts_table(outcomes)],
        charts=charts,
        summary=summary,
    )


def try_policy(inquiry: AuditQuery, policy: str, outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Record what the limits of a policy file do to each agent, and say what was not tested."""
    from otel_limits.settings.policy.file import valid_document

    document = valid_document(policy)
    without: list[str] = []
    ignored: set[str] = set()
    for agent, outcome in outcomes.items():
        values = {name: entry.value for name, entry in document.entries(agent).items()}
        ignored |= {name for name in values if name not in LIMITS and "max_" in name}
        tried = tried_caps({name: values.get(name) for name in LIMITS})
        if not tried:
            without.append(agent)
            continue
        for row, cut in cuts_of(inquiry, of_agent(inquiry.selection, agent), tried):
            # A task may have an invocation of another agent, to which other limits apply.
            if row.agent == agent:
                add_cut(outcome, row, cut)
    if without:
        yield f"The file has no limit to test for {', '.join(sorted(without))}."
    if ignored:
        yield f"Not tested, as a ledger cannot replay them: {', '.join(sorted(ignored))}."


def of_agent(selection: Selection, agent: str) -> Selection:
    """Return the part of a selection that is of one of its agents."""
    others = (each for each in selection.where if each.name != "agent" or each.is_excluded)
    return replace(selection, where=(*others, Condition("agent", agent)))


def cuts_of(
    inquiry: AuditQuery, selection: Selection, tried: Sequence[CandidateCap]
) -> Iterator[tuple[Any, Cut]]:
    """Yield each task that the caps would have halted, and where."""
    from otel_limits.ledger import whole_tasks

    connection, totals = inquiry.connection, least_totals(tried)
    count = whole_tasks.count_using(connection, selection, totals)
    ordered = whole_tasks.calls_in_order(connection, selection, totals)
    calls = itertools.groupby(ordered, key=operator.itemgetter(0))  # their task's ID
    # One task at a time: a ledger of years does not fit into memory.
    cuts = {
        identity: replay(group, tried) for identity, group in inquiry.work.through(calls, count)
    }
    for row in whole_tasks.tasks(connection, selection, totals):
        cut = cuts.get(row.task_id) or _at_its_end(row, tried)
        if cut is not None:
            yield row, cut


def replay(calls: Iterable[Sequence[Any]], tried: Sequence[CandidateCap]) -> Cut | None:
    """Replay the calls of one task; `None` if no cap would have refused one.

    With `max_iterations` the next leg starts over, as in production.

    Args:
        calls: Task, turn, iteration, input tokens, output tokens and picodollars of each.
        tried: The caps to test.
    """
    first: tuple[str, int] | None = None
    leg_is_over = all_is_over = False
    made = sent = received = spent = saved_tokens = saved_pico = unpriced = 0
    for number, call in enumerate(calls, start=1):
        _, turn, iteration, more_sent, more_received, pico = call
        if not all_is_over:
            # Checked before the call, when its own turn has not been counted. Imported calls have
            # no turns; the number of the call is the closest substitute.
            turns, iterations = (turn or number) - 1, (iteration or number) - 1
            # Only a new leg restarts at 0, and with it `max_iterations`.
            leg_is_over = leg_is_over and iterations > 0
            if not leg_is_over:
                used = (iterations, turns, made, sent + received, sent, received, spent)
                limit = first_reached(tried, used)
                if limit is not None:
                    first = first or (limit, turns)
                    leg_is_over, all_is_over = True, limit != MAX_ITERATIONS
        if leg_is_over:
            saved_tokens += more_sent + more_received
            saved_pico += pico or 0
            unpriced += pico is None and more_sent + more_received > 0
        else:
            made += 1
            sent, received, spent = sent + more_sent, received + more_received, spent + (pico or 0)
    return None if first is None else Cut(*first, saved_tokens, saved_pico, unpriced)


def _at_its_end(row: Any, tried: Sequence[CandidateCap]) -> Cut | None:
    """Return whether the caps would have halted an invocation exactly where a limit or a kill did.

    It would have continued there; the turns of its last leg are unknown.
    """
    if row.action not in CUT_SHORT:
        return None
    # 0 iterations: rows have none, so `max_iterations` never matches here.
    used = (0, row.turns, row.model_calls, row.input_tokens + row.output_tokens)
    # Converted, as SQLite returns text beyond 64 bits.
    spent = int(row.price_pico or 0)
    limit = first_reached(tried, (*used, row.input_tokens, row.output_tokens, spent))
    return None if limit is None else Cut(limit, row.turns, 0, 0, 0)


def first_reached(tried: Sequence[CandidateCap], used: Sequence[int]) -> str | None:
    """Return the limit that is reached first, if any."""
    # A loop is twice as fast as a generator, and this runs for each call of a ledger.
    for each in tried:
        if used[each.position] >= each.cap:
            return each.limit
    return None


def add_cut(outcome: Outcome, row: Any, cut: Cut) -> None:
    """Record the effect of the caps on an invocation."""
    outcome.halted += 1
    outcome.cut_successes += is_success(row)
    outcome.halted_cut_short += row.action in CUT_SHORT
    outcome.saved_tokens += cut.tokens
    outcome.saved_pico += cut.pico
    outcome.saved_unpriced += cut.unpriced
    outcome.cuts.append((row, cut))
    # Only the largest are shown, so that years of cuts are not held in memory.
    if len(outcome.cuts) > 10 * TOP:
        outcome.cuts = _largest(outcome.cuts)


def is_success(row: Any) -> bool:
    """Return whether an invocation ended naturally."""
    from otel_limits.bindings.known import successes

    return row.reason in successes() and row.action in ("none", "observed")


def _largest(cuts: list[tuple[Any, Cut]]) -> list[tuple[Any, Cut]]:
    return sorted(cuts, key=lambda each: (-each[1].pico, -each[1].tokens, each[0].id))[:TOP]


def outcome_table(outcomes: dict[str, Outcome], title: str) -> Table:
    """Build a table with one row per agent, the largest saving first."""
    # Sorted by the saving, which is the purpose of the question.
    figures = sorted(
        ((agent, *_figures(outcome)) for agent, outcome in outcomes.items()),
        key=lambda row: (-(row[-1] or 0), -row[-3], row[0]),
    )
    total = Outcome()
    for outcome in outcomes.values():
        total.merge(outcome)
    return Table(
        name="backtest",
        title=title,
        columns=OUTCOMES,
        rows=figures,
        total=("total", *_figures(total)),
        note="A task counts as one invocation, also if it has answered interrupts. Cost covers "
        "calls with a known price. An invocation that was halted or killed in "
        "the record has no later calls, so whether these limits would have halted it is unknown. "
        "The halt rate is a 95% interval, in which unknown invocations may be halted or not.",
    )


def _figures(outcome: Outcome) -> tuple[Any, ...]:
    low, _ = interval(outcome.halted / (outcome.invocations or 1), outcome.invocations)
    # All unknown ones may have been halted: the interval covers the worst case.
    most = (outcome.halted + outcome.unknown) / (outcome.invocations or 1)
    return (
        outcome.invocations,
        outcome.halted,
        outcome.cut_successes,
        outcome.unknown,
        low,
        interval(most, outcome.invocations)[1],
        outcome.saved_tokens,
        outcome.saved_tokens / outcome.tokens if outcome.tokens else None,
        known_cost(outcome.saved_pico, outcome.saved_unpriced),
    )


def cuts_table(outcomes: dict[str, Outcome]) -> Table:
    """Build a table of the invocations with the largest savings."""
    cuts = _largest([each for outcome in outcomes.values() for each in outcome.cuts])
    return Table(
        name="cuts",
        title="Largest savings",
        columns=CUTS,
        rows=[
            (
                row.trace_id or row.id,
                row.agent,
                row.reason,
                "yes" if is_success(row) else "no",
                cut.limit,
                cut.turn,
                row.turns,
                cut.tokens,
                known_cost(cut.pico, cut.unpriced),
            )
            for row, cut in cuts
            if cut.tokens or cut.pico
        ],
    )


BACKTEST: Final = Question(
    name="backtest",
    help="Replay recorded invocations against other limits.",
    answer=backtest,
    tables={"backtest": OUTCOMES, "cuts": CUTS},
    options=[
        Option(
            "--policy",
            "FILE",
            str,
            "test the limits that this policy file sets for each agent",
            group="limits to test",
        ),
        *(
            Option(
                flag_of(name),
                limit.metavar,
                limit.read,
                f"test {name}={limit.metavar}",
                group="limits to test",
            )
            for name, limit in LIMITS.items()
        ),
    ],
    selection=SELECTION,
)
