"""Recorded invocations against other limits: which would have been halted, and what that saves.

A limit is looked at where it is in reality: before each further model call. So an invocation is
only halted when there was a further call, and what it saves are the calls from there on.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from otel_limits.audit.answers import Column, Table
from otel_limits.ledger.rows import PICODOLLARS, known_cost

SUCCESSES: Final = ("end_turn", "stop_sequence", "tool_use")
"""Stop reasons of a natural end; `tool_use` is that of a structured output."""

MAX_ITERATIONS: Final = "max_iterations"
LIMITS: Final = (
    MAX_ITERATIONS,
    "max_turns",
    "max_token_budget",
    "max_input_tokens",
    "max_output_tokens",
    "max_cost_usd",
)
"""What can be tried, in the order in which one of several decides."""

TOP: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The limits that are tried; `None` is no limit."""

    max_iterations: int | None = None
    max_turns: int | None = None
    max_token_budget: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_cost_usd: Decimal | None = None

    @property
    def totals(self) -> dict[str, int]:
        """What an invocation that is halted by one of them has used at least, by property."""
        turns = [cap for cap in (self.max_turns, self.max_iterations) if cap is not None]
        least = {
            "turns": min(turns, default=None),
            "tokens": self.max_token_budget,
            "input_tokens": self.max_input_tokens,
            "output_tokens": self.max_output_tokens,
            "price_pico": self._pico,
        }
        return {name: value for name, value in least.items() if value is not None}

    @property
    def checks(self) -> list[tuple[str, int, int]]:
        """Every cap that is set: its name, itself, and its place in what `replay` adds up."""
        caps = (
            self.max_iterations,
            self.max_turns,
            self.max_token_budget,
            self.max_input_tokens,
            self.max_output_tokens,
            self._pico,
        )
        return [
            (name, cap, place)
            for place, (name, cap) in enumerate(zip(LIMITS, caps, strict=True))
            if cap is not None
        ]

    @property
    def _pico(self) -> int | None:
        return None if self.max_cost_usd is None else int(self.max_cost_usd * PICODOLLARS)

    def __str__(self) -> str:
        """The caps that are set, as a reader would write them."""
        return ", ".join(f"{n}={getattr(self, n)}" for n in LIMITS if getattr(self, n) is not None)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where an invocation would have been halted, and what it would not have spent."""

    limit: str
    turn: int
    """Turns that it would have had."""
    tokens: int
    pico: int
    unpriced: int
    """Calls saved whose price is not known."""


@dataclass(slots=True)
class Outcome:
    """What the caps would have done to the invocations of one agent."""

    invocations: int = 0
    tokens: int = 0
    halted: int = 0
    cut_successes: int = 0
    saved_tokens: int = 0
    saved_pico: int = 0
    saved_unpriced: int = 0
    cuts: list[tuple[Any, Cut]] = field(default_factory=list)


def replay(calls: Iterable[Sequence[Any]], checks: Sequence[tuple[str, int, int]]) -> Cut | None:
    """Go through the calls of one invocation; `None` when no cap would have refused one.

    With `max_iterations` the next leg begins afresh, as it does in reality.

    Args:
        calls: Turn, iteration, input tokens, output tokens and picodollars of each.
        checks: What is tried, from `Caps.checks`.
    """
    first: tuple[str, int] | None = None
    leg_is_over = all_is_over = False
    sent = received = spent = saved_tokens = saved_pico = unpriced = 0
    for number, (turn, iteration, more_sent, more_received, pico) in enumerate(calls, start=1):
        if not all_is_over:
            turns, iterations = (turn or number) - 1, (iteration or number) - 1
            leg_is_over = leg_is_over and iterations > 0
            used = (iterations, turns, sent + received, sent, received, spent)
            limit = None if leg_is_over else first_reached(checks, used)
            if limit is not None:
                first = first or (limit, turns)
                leg_is_over, all_is_over = True, limit != MAX_ITERATIONS
        if leg_is_over:
            saved_tokens += more_sent + more_received
            saved_pico += pico or 0
            unpriced += pico is None and more_sent + more_received > 0
        else:
            sent, received, spent = sent + more_sent, received + more_received, spent + (pico or 0)
    return None if first is None else Cut(*first, saved_tokens, saved_pico, unpriced)


def first_reached(checks: Sequence[tuple[str, int, int]], used: Sequence[int]) -> str | None:
    """The cap that decides, if one is reached."""
    for name, cap, place in checks:
        if used[place] >= cap:
            return name
    return None


def by_invocation(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[str, list[Sequence[Any]]]]:
    """Group calls, which come in order and begin with the id of their invocation."""
    for identity, group in itertools.groupby(rows, key=operator.itemgetter(0)):
        yield str(identity), [row[1:] for row in group]


def judge(outcome: Outcome, row: Any, cut: Cut) -> None:
    """Note what the caps would have done to an invocation of an agent."""
    outcome.halted += 1
    outcome.cut_successes += is_success(row)
    outcome.saved_tokens += cut.tokens
    outcome.saved_pico += cut.pico
    outcome.saved_unpriced += cut.unpriced
    outcome.cuts.append((row, cut))
    if len(outcome.cuts) > 10 * TOP:
        outcome.cuts = _largest(outcome.cuts)


def is_success(row: Any) -> bool:
    """Tell whether an invocation came to its natural end."""
    return row.reason in SUCCESSES and row.action in ("none", "observed")


def _largest(cuts: list[tuple[Any, Cut]]) -> list[tuple[Any, Cut]]:
    return sorted(cuts, key=lambda each: (-each[1].pico, -each[1].tokens, each[0].id))[:TOP]


def outcome_table(outcomes: dict[str, Outcome], caps: Caps) -> Table:
    """One row per agent, the largest saving first."""
    figures = sorted(
        ((agent, *_figures(outcome)) for agent, outcome in outcomes.items()),
        key=lambda row: (-(row[6] or 0), -row[4], row[0]),
    )
    total = Outcome()
    for outcome in outcomes.values():
        total.invocations += outcome.invocations
        total.halted += outcome.halted
        total.cut_successes += outcome.cut_successes
        total.tokens += outcome.tokens
        total.saved_tokens += outcome.saved_tokens
        total.saved_pico += outcome.saved_pico
        total.saved_unpriced += outcome.saved_unpriced
    return Table(
        name="backtest",
        title=f"With {caps}",
        columns=(
            Column("agent", "Agent"),
            Column("invocations", "Invocations", "count"),
            Column("halted", "Would be halted", "count"),
            Column("cut_successes", "Successful ones cut", "count"),
            Column("saved_tokens", "Tokens saved", "count"),
            Column("saved_share", "Of all tokens", "share"),
            Column("saved_usd", "Money saved", "money"),
        ),
        rows=figures,
        total=("total", *_figures(total)),
        note="Money is that of the calls with a known price. An invocation that a limit halted in "
        "the record has no calls beyond it: what it would have done under a higher limit is not "
        "known.",
    )


def _figures(outcome: Outcome) -> tuple[Any, ...]:
    return (
        outcome.invocations,
        outcome.halted,
        outcome.cut_successes,
        outcome.saved_tokens,
        outcome.saved_tokens / outcome.tokens if outcome.tokens else None,
        known_cost(outcome.saved_pico, outcome.saved_unpriced),
    )


def cuts_table(outcomes: dict[str, Outcome]) -> Table:
    """The invocations that would have saved most."""
    cuts = _largest([each for outcome in outcomes.values() for each in outcome.cuts])
    return Table(
        name="cuts",
        title="Largest savings",
        columns=(
            Column("trace_id", "Trace", "id"),
            Column("agent", "Agent"),
            Column("reason", "Ended"),
            Column("successful", "Successful"),
            Column("limit", "Limit"),
            Column("turn", "Halted after turn", "count"),
            Column("turns", "Turns it had", "count"),
            Column("saved_tokens", "Tokens saved", "count"),
            Column("saved_usd", "Money saved", "money"),
        ),
        rows=[_cut_row(row, cut) for row, cut in cuts],
    )


def _cut_row(row: Any, cut: Cut) -> Sequence[Any]:
    return (
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
