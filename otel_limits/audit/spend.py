"""The question `spend`: model calls, tokens and cost, by any property."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.by_tool import NOTE, TOOL, TOOL_FIGURES, ToolUse, shared, uses_of
from otel_limits.audit.charts import overview
from otel_limits.audit.compare import CHANGES, changes_table, periods_of
from otel_limits.audit.completeness import of_everything
from otel_limits.audit.forecast import forecast
from otel_limits.audit.formatting import money, written
from otel_limits.audit.outcomes import OUTCOMES, outcomes_table
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.audit.stated_costs import DIFFERENCES, differences_table
from otel_limits.audit.sums import DATES, Groups, SummedCalls, Sums, fold
from otel_limits.audit.uncounted import COLUMNS as UNCOUNTED
from otel_limits.audit.uncounted import uncounted_table
from otel_limits.core.errors import LedgerError
from otel_limits.ledger.options import AFTER_TOOLS

if TYPE_CHECKING:
    from otel_limits.audit.by_tool import UseByGroup

CURRENT, RECORDED = parsing.PRICES
DEFAULT_BY: Final = ("agent", "model")

FIGURES: Final = (
    Column("calls", "Calls", "count"),
    Column("input_tokens", "Input", "count"),
    Column("output_tokens", "Output", "count"),
    Column("tokens", "Tokens", "count", is_key=True),
    Column("cached_share", "Cached", "share"),
    Column("cache_write_tokens", "Cache writes", "count"),
    Column("cost_usd", "Cost", "money", is_key=True),
    Column("cache_saved_usd", "Saved by cache", "money"),
    Column("unpriced_tokens", "Unpriced tokens", "count"),
    Column("estimated_calls", "Estimated calls", "count"),
    Column("unmeasured_calls", "Unmeasured calls", "count"),
)
ALL_NOTE: Final = (
    "Input includes cached tokens. Cost covers calls with a known price; tokens of other calls are "
    "unpriced. Saved by cache is how much more the calls would have cost without caching; it is "
    "negative if more was written to caches than read. Calls without reported usage are estimated, "
    "or unmeasured if they count no estimate."
)


def spend(
    inquiry: AuditQuery,
    by: Sequence[str] | None,
    prices: str,
    top: int | None,
    compare: parsing.Against | None,
    fail_above: Decimal | None,
) -> Answer:
    """Answer what was spent.

    With `fail_above` the exit status is 1 if that many USD were exceeded in total, or in any group
    of `by`.

    Raises:
        LedgerError: The ledger lacks a property, there is nothing to compare, or `fail_above` is
            combined with a comparison.
    """
    groups_to_judge = by or ()
    by = DEFAULT_BY if by is None else by
    inquiry.require_known(by)
    # Recorded prices have no forecast and no outcomes, which cover actual spend.
    is_recorded = prices == RECORDED
    title = "Token spend at recorded prices" if is_recorded else "Token spend"
    if compare is not None:
        if fail_above is not None:
            raise LedgerError(
                "--fail-above judges one period: use --since and --until instead of --compare."
            )
        return _changes(inquiry, by, compare, top, title, is_recorded=is_recorded)
    rows = rows_of(inquiry, by, is_recorded=is_recorded)
    total = fold(rows, ()).get((), Sums())
    uses = uses_of(inquiry, by) if TOOL in by else None
    outcomes = None if is_recorded else outcomes_table(inquiry, by)
    uncounted = uncounted_table(inquiry)
    differences = None if is_recorded else differences_table(inquiry)
    status, summary = 0, ""
    if fail_above is not None:
        judged = fold(rows, groups_to_judge, inquiry.selection.zone)
        status, summary = _judge(judged, groups_to_judge, fail_above)
    # Without groups there is no row of totals, but only one row.
    ended = outcomes.total or outcomes.rows[0] if outcomes is not None else ()
    return Answer(
        question="spend",
        title=title,
        about=inquiry.about,
        tables=[
            spend_table(inquiry, rows, by, total, top=top, uses=uses),
            *(each for each in (outcomes, uncounted, differences) if each is not None),
        ],
        charts=[] if is_recorded else overview(inquiry),
        totals=_totals(total, ended),
        forecast=None if is_recorded else forecast(inquiry),
        complete="" if is_recorded else of_everything(inquiry, total),
        status=status,
        summary=summary,
    )


def _judge(groups: Groups, by: Sequence[str], most: Decimal) -> tuple[int, str]:
    """Return exit status and sentence: which groups cost more than `most` USD."""
    costs = [(each.cost or Decimal(0), key) for key, each in groups.items()]
    above = sorted((each for each in costs if each[0] > most), key=lambda each: -each[0])
    named = [
        f"{', '.join(written(part, 'text') for part in key) or 'total'} {money(cost)}"
        for cost, key in above
    ]
    sentence = f"Above {money(most)}: {'; '.join(named)}."
    if not above:
        subject = f"No group by {', '.join(by)} is" if by else "The total is not"
        sentence = f"{subject} above {money(most)}."
    if unpriced := sum(each.unpriced_tokens for each in groups.values()):
        sentence += f" {unpriced:,} tokens of calls without a known price are not included."
    return int(bool(above)), sentence


def rows_of(inquiry: AuditQuery, by: Sequence[str], *, is_recorded: bool = False) -> SummedCalls:
    """Add up model calls at least as finely as `by`."""
    from otel_limits.ledger import spending

    # Calls have the tools whose results they received, and are split among them afterwards.
    names = [AFTER_TOOLS if name == TOOL else name for name in by]
    sums = spending.spend(inquiry.connection, names, inquiry.selection, recorded=is_recorded)
    rows = inquiry.work.through(sums)
    return list(shared(rows) if TOOL in by else rows)


def _totals(total: Sums, ended: Sequence[Any]) -> list[Any]:
    # From the end, after any number of grouping columns.
    figures = zip(OUTCOMES, ended[-len(OUTCOMES) :], strict=False)
    return [
        ("Model calls", "count", total.calls),
        ("Tokens", "count", total.tokens),
        ("Cached input", "share", total.cached_share),
        ("Cost", "money", total.cost),
        ("Saved by cache", "money", total.cache_saved),
        *((each.title, each.kind, value) for each, value in figures if each.kind == "money"),
        ("Unpriced tokens", "count", total.unpriced_tokens),
        ("Estimated calls", "count", total.estimated_calls),
        ("Unmeasured calls", "count", total.unmeasured_calls),
    ]


def _changes(
    inquiry: AuditQuery,
    by: Sequence[str],
    against: parsing.Against,
    top: int | None,
    title: str,
    *,
    is_recorded: bool,
) -> Answer:
    """Answer how spend changed compared with another period."""
    zone = inquiry.selection.zone
    periods = periods_of(inquiry.selection, against, by)
    # Both in the same zone, so that their groups match.
    before, now = (
        fold(rows_of(replace(inquiry, selection=each), by, is_recorded=is_recorded), by, zone)
        for each in (periods.before, periods.now)
    )
    keys = inquiry.key_columns(by, CHANGES)
    table = changes_table(before, now, keys, top, periods.about)
    present = replace(inquiry, selection=periods.now)
    uncounted = uncounted_table(present)
    return Answer(
        question="spend",
        title=f"{title}, compared",
        about=present.about,
        tables=[table, *([uncounted] if uncounted is not None else [])],
    )


def spend_table(
    inquiry: AuditQuery,
    rows: SummedCalls,
    by: Sequence[str],
    total: Sums,
    *,
    top: int | None = None,
    uses: UseByGroup | None = None,
) -> Table:
    """Build a table with one row per group, ordered by date, then by cost.

    With `top` it has only the costliest groups, and one row for the rest.
    """
    groups = fold(rows, by, inquiry.selection.zone)
    # A tool without subsequent model calls has a row as well.
    for key in uses or ():
        groups.setdefault(key, Sums())
    figures = (*FIGURES, *(TOOL_FIGURES if uses is not None else ()))
    blank = tuple("" for _ in by[1:])
    others: list[tuple[Any, ...]] = []
    if top is not None and top < len(groups) and by:
        # By cost alone: ordered by date, the first days would be kept instead of the costliest
        # groups.
        rest = dict(sorted(groups.items(), key=lambda item: _rank(item[0], item[1], ()))[top:])
        groups = {key: sums for key, sums in groups.items() if key not in rest}
        others = [(f"({len(rest):,} others)", *blank, *_figures(rest, uses))]
    in_order = sorted(groups.items(), key=lambda item: _rank(item[0], item[1], by))
    everything = {(): total, **({key: Sums() for key in uses} if uses is not None else {})}
    return Table(
        name="spend",
        title="Spend by " + ", ".join(by) if by else "Spend",
        # Considers all figures, including hidden ones: names must not depend on options.
        columns=(*inquiry.key_columns(by, (*FIGURES, *TOOL_FIGURES)), *figures),
        rows=[*((*key, *_figures({key: sums}, uses)) for key, sums in in_order), *others],
        total=(*(("total", *blank) if by else ()), *_figures(everything, uses)),
        note=" ".join([ALL_NOTE, *([NOTE] if TOOL in by else []), *_price_list()]),
    )


def _price_list() -> list[str]:
    """Name the installed price list, which reprices calls, and warn if it is old."""
    from otel_limits.core.catalogue import list_in_use, old_list

    in_use = list_in_use()
    sentences = [in_use and f"Installed price list: {in_use}.", old_list()]
    return [each for each in sentences if each is not None]


def _figures(groups: Groups, uses: Mapping[tuple[Any, ...], ToolUse] | None) -> tuple[Any, ...]:
    """The values of `FIGURES`, and of `TOOL_FIGURES` if present, over some groups."""
    sums, use = Sums(), ToolUse()
    for key, each in groups.items():
        sums.merge(each)
        if uses is not None and key in uses:
            one = uses[key]
            use.add(one.calls, one.errors, one.micros)
    return (
        sums.calls,
        sums.input,
        sums.output,
        sums.tokens,
        sums.cached_share,
        sums.written,
        sums.cost,
        sums.cache_saved,
        sums.unpriced_tokens,
        sums.estimated_calls,
        sums.unmeasured_calls,
        *(use.figures if uses is not None else ()),
    )


def _rank(key: tuple[Any, ...], sums: Sums, by: Sequence[str]) -> tuple[Any, ...]:
    # As text, since a property may be missing in some rows and would not compare.
    dates = tuple(str(value) for name, value in zip(by, key, strict=False) if name in DATES)
    return (dates, -sums.pico, -sums.tokens, tuple(str(value) for value in key))


SPEND: Final = Question(
    name="spend",
    help="Break down calls, tokens and cost.",
    answer=spend,
    tables={
        "spend": FIGURES,
        "outcomes": OUTCOMES,
        "uncounted": UNCOUNTED,
        "differences": DIFFERENCES,
        "changes": CHANGES,
    },
    more={"spend": TOOL_FIGURES},
    optional=frozenset({"spend", "outcomes", "uncounted", "differences", "changes"}),
    has_forecast=True,
    options=(
        Option(
            "--by",
            "NAMES",
            parsing.properties,
            "properties to group by, separated by commas: agent, model, provider, tool, state, "
            "side, session, conversation (its hash), reason, hour, day, week, month, or an audit "
            "key; key:NAME is an audit key with the same name as a property (default: agent,model)",
        ),
        Option(
            "--top",
            "N",
            parsing.cap,
            "list the N costliest groups, and combine the rest (default: all groups)",
        ),
        Option(
            "--compare",
            "PERIOD",
            parsing.against,
            "show changes compared with a period: previous, 7d for the same time 7 days earlier, "
            "or e.g. 2026-10",
        ),
        Option(
            "--prices",
            "WHICH",
            parsing.prices,
            "prices: current, or recorded (before `otel-limits ledger reprice`; default: current)",
            default=CURRENT,
        ),
        Option(
            "--fail-above",
            "USD",
            parsing.usd,
            "exit with status 1 if more than this was spent: in total, or with --by in any group",
        ),
    ),
)
