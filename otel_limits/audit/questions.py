"""Asks a ledger and makes the answers: what the command line does, without the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import backtest, charts, suggest, trees
from otel_limits.audit.answers import Answer, Chart
from otel_limits.audit.grants import grants_table
from otel_limits.audit.spend import Sums, merge, spend_table
from otel_limits.audit.spend import fold as fold_spend
from otel_limits.audit.stops import costliest_table, stops_table
from otel_limits.audit.words import moment
from otel_limits.core.errors import LedgerError
from otel_limits.ledger import queries
from otel_limits.ledger.rows import HALTED
from otel_limits.ledger.words import OWN_NAMES

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from otel_limits.audit.backtest import Caps
    from otel_limits.cli.progress import Work
    from otel_limits.ledger.queries import Selection

TOP: Final = 20
BY_DAY: Final = ("day", "agent", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    """A ledger to ask, and which part of it."""

    connection: Connection
    ledger: str
    """Its address, without a password."""
    selection: Selection
    work: Work

    @property
    def about(self) -> str:
        """Which part of which ledger was asked, in words."""
        parts = [f"ledger {self.ledger}"]
        if self.selection.since_us is not None:
            parts.append(f"since {moment(self.selection.since_us):%Y-%m-%d %H:%M:%S} UTC")
        if self.selection.until_us is not None:
            parts.append(f"until {moment(self.selection.until_us):%Y-%m-%d %H:%M:%S} UTC")
        parts += [f"{name} = {value}" for name, value in self.selection.where]
        return ", ".join(parts)

    def require_known(self, names: Iterable[str]) -> None:
        """Refuse to group by what no row has.

        Raises:
            LedgerError: One of `names` is neither ours nor an audit key of this ledger.
        """
        known = (*OWN_NAMES, *queries.audit_keys(self.connection))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise LedgerError(
                f"The ledger has no {unknown[0]}. It has {', '.join(known)}; more are recorded "
                f"with OTEL_LIMITS_AUDIT_KEYS."
            )


def spend(inquiry: Inquiry, by: Sequence[str], *, with_charts: bool) -> Answer:
    """What was spent."""
    inquiry.require_known((*by, *(name for name, _ in inquiry.selection.where)))
    rows = list(inquiry.work.through(queries.spend(inquiry.connection, by, inquiry.selection)))
    total = Sums()
    for sums in fold_spend(rows, ()).values():
        merge(total, sums)
    return Answer(
        question="spend",
        title="Token spend",
        about=inquiry.about,
        tables=[spend_table(rows, by)],
        charts=overview(inquiry) if with_charts else (),
        totals=[
            ("Model calls", "count", total.calls),
            ("Tokens", "count", total.tokens),
            ("Cached input", "share", total.cached_share),
            ("Cost", "money", total.cost),
            ("Unpriced tokens", "count", total.unpriced_tokens),
            ("Unmeasured calls", "count", total.unmeasured_calls),
        ],
    )


def stops(inquiry: Inquiry, top: int, *, with_charts: bool) -> Answer:
    """How invocations ended."""
    inquiry.require_known(name for name, _ in inquiry.selection.where)
    connection, selection = inquiry.connection, inquiry.selection
    table = stops_table(
        inquiry.work.through(queries.stops(connection, selection)),
        queries.odd_calls(connection, selection),
    )
    total = table.total or ()
    return Answer(
        question="stops",
        title="Stops",
        about=inquiry.about,
        tables=[table, costliest_table(queries.costliest_halted(connection, selection, top))],
        charts=overview(inquiry) if with_charts else (),
        totals=[
            (column.title, column.kind, value)
            for column, value in list(zip(table.columns, total, strict=True))[3:]
        ],
    )


def overview(inquiry: Inquiry) -> list[Chart]:
    """The charts of a report: spend, stops and turns."""
    connection, selection = inquiry.connection, inquiry.selection
    return [
        *charts.spend_charts(queries.spend(connection, BY_DAY, selection)),
        charts.stops_chart(queries.stops(connection, selection)),
        turns_chart(queries.invocations(connection, selection)),
    ]


def turns_chart(rows: Iterable[Any], cap: int | None = None) -> Chart:
    """The distribution of turns, with `cap` drawn in, or the latest cap of each agent."""
    turns: dict[int, list[int]] = {}
    latest: dict[str, tuple[int, int | None]] = {}
    for row in rows:
        if row.ended_us is not None:
            turns.setdefault(row.turns, [0, 0])[row.action in HALTED] += 1
        seen = latest.get(row.agent, (-1, None))
        if row.started_us > seen[0]:
            latest[row.agent] = (row.started_us, queries.caps_of(row).get("max_turns"))
    caps = [cap] if cap else [each for _, each in latest.values() if each]
    return charts.turns_chart(turns, caps)


def show(inquiry: Inquiry, identity: str) -> Answer:
    """One budget tree.

    Raises:
        LedgerError: The ledger does not have it.
    """
    invocations = queries.tree(inquiry.connection, identity)
    if not invocations:
        raise LedgerError(f"The {inquiry.about} has no invocation with the trace or id {identity}.")
    ids = [row.id for row in invocations]
    tops = trees.grow(
        invocations,
        queries.calls_of(inquiry.connection, ids),
        queries.tools_of(inquiry.connection, ids),
    )
    return Answer(
        question="show",
        title=f"Budget tree of {identity}",
        about=inquiry.about,
        tables=[trees.tree_table(tops)],
    )


def test_limits(inquiry: Inquiry, caps: Caps, *, with_charts: bool) -> Answer:
    """Recorded invocations against other limits."""
    inquiry.require_known(name for name, _ in inquiry.selection.where)
    connection, selection = inquiry.connection, inquiry.selection
    checks = caps.checks
    count = queries.count_using(connection, selection, caps.totals)
    calls = queries.calls_in_order(connection, selection, caps.totals)
    cuts = {
        identity: backtest.replay(group, checks)
        for identity, group in inquiry.work.through(backtest.by_invocation(calls), count)
    }
    outcomes = {
        row.agent: backtest.Outcome(invocations=row.invocations, tokens=int(row.tokens))
        for row in queries.totals_by_agent(connection, selection)
    }
    for row in queries.invocations(connection, selection, caps.totals):
        cut = cuts.get(row.id)
        if cut is not None:
            backtest.judge(outcomes[row.agent], row, cut)
    return Answer(
        question="backtest",
        title="Backtest",
        about=inquiry.about,
        tables=[backtest.outcome_table(outcomes, caps), backtest.cuts_table(outcomes)],
        charts=[turns_chart(queries.invocations(connection, selection), caps.max_turns)]
        if with_charts
        else (),
    )


def suggest_limits(inquiry: Inquiry, *, share: float, head_room: float, enough: int) -> Answer:
    """A policy file from what successful invocations needed."""
    inquiry.require_known(name for name, _ in inquiry.selection.where)
    rows = inquiry.work.through(queries.invocations(inquiry.connection, inquiry.selection))
    text = suggest.policy_file(
        suggest.collect(rows),
        share=share,
        head_room=head_room,
        enough=enough,
        about=inquiry.about,
    )
    return Answer(question="suggest", title="Suggested limits", about=inquiry.about, text=text)


def grants(inquiry: Inquiry) -> Answer:
    """What people changed in quotas."""
    rows = queries.quota_changes(inquiry.connection, inquiry.selection)
    return Answer(
        question="grants",
        title="Changes of quotas",
        about=inquiry.about,
        tables=[grants_table(rows)],
    )
