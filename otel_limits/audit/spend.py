"""The question `spend`: model calls, tokens and cost, by any property."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, Column, Table, money, written
from otel_limits.audit.charts import overview
from otel_limits.audit.compare import CHANGES, changes_table, periods_of
from otel_limits.audit.completeness import UNCOUNTED, of_everything, pruned_us, uncounted_table
from otel_limits.audit.forecast import forecast
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.audit.sums import DATES, TOOL_ERRORS, Groups, SummedCalls, Sums, fold, property_of
from otel_limits.core.errors import LedgerError
from otel_limits.ledger.options import AFTER_TOOLS, OF_CALLS
from otel_limits.ledger.rows import MICROSECONDS, dollars, known_cost, tools_in

# --- the question ---------------------------------------------------------------------------------

CURRENT, RECORDED = parsing.PRICES
DEFAULT_BY: Final = ("agent", "model")

UNREPORTED_NOTE: Final = (
    "Calls without reported usage are estimated, or unmeasured if they count no estimate."
)
FIGURES: Final = (
    Column("calls", "Calls", "count"),
    Column("input_tokens", "Input", "count", note="Input includes cached tokens."),
    Column("output_tokens", "Output", "count"),
    Column("tokens", "Tokens", "count", is_key=True),
    Column("cached_share", "Cached", "share"),
    Column("cache_write_tokens", "Cache writes", "count"),
    Column(
        "cost_usd",
        "Cost",
        "money",
        is_key=True,
        note="Cost covers calls with a known price; tokens of other calls are unpriced.",
    ),
    Column(
        "cache_saved_usd",
        "Saved by cache",
        "money",
        note="Saved by cache is how much more the calls would have cost without caching; it is "
        "negative if more was written to caches than read.",
    ),
    Column("unpriced_tokens", "Unpriced tokens", "count"),
    Column("estimated_calls", "Estimated calls", "count", note=UNREPORTED_NOTE),
    Column("unmeasured_calls", "Unmeasured calls", "count", note=UNREPORTED_NOTE),
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
        pruned_us=pruned_us(inquiry),
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
        since_us=periods.before.since_us,
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
        note=" ".join([*([TOOLS_NOTE] if TOOL in by else []), *_price_list()]),
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
            use.add(one.calls, one.errors, one.refusals, one.micros)
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
    return (_dates(key, by), -sums.pico, -sums.tokens, tuple(str(value) for value in key))


def _dates(key: tuple[Any, ...], by: Sequence[str]) -> tuple[str, ...]:
    """Return the dates of a group, which order a table before its amounts."""
    # As text, since a property may be missing in some rows and would not compare.
    return tuple(str(value) for name, value in zip(by, key, strict=False) if name in DATES)


# --- costs by tool --------------------------------------------------------------------------------
# A request with the results of several tools is split among them, by how often each was called in
# the turn before. Whole tokens and picodollars are split, so the parts add up.

TOOL: Final = "tool"
NO_TOOL: Final = "(no tool)"
NOT_RECORDED: Final = "(not recorded)"

TOOL_FIGURES: Final = (
    Column("tool_calls", "Tool calls", "count"),
    Column("tool_errors", "Tool errors", "count"),
    Column("tool_refusals", "Tool refusals", "count"),
    Column("tool_seconds", "Tool time", "seconds"),
)
TOOLS_NOTE: Final = (
    "Each tool has the cost of the model calls that received its results. A call with results of "
    f"several tools is split by how often each was called. {NO_TOOL} is the first call of an "
    f"invocation and side calls; {NOT_RECORDED} is imported calls. Tool calls include "
    f"those that a limit refused. {TOOL_ERRORS}"
)


@dataclass(slots=True)
class ToolUse:
    """Sums over calls of a tool."""

    calls: int = 0
    errors: int = 0
    refusals: int = 0
    micros: int = 0

    @property
    def figures(self) -> tuple[int, int, int, float]:
        """The values of `TOOL_FIGURES`."""
        return self.calls, self.errors, self.refusals, self.micros / MICROSECONDS

    def add(self, calls: int, errors: int, refusals: int, micros: int) -> None:
        """Add sums over further calls."""
        self.calls += calls
        self.errors += errors
        self.refusals += refusals
        self.micros += micros


UseByGroup = Mapping[tuple[Any, ...], ToolUse]


def shared(rows: SummedCalls) -> Iterator[tuple[Mapping[str, Any], Sequence[Any]]]:
    """Split sums of model calls among the tools whose results they received."""
    for keys, sums in rows:
        text = keys[AFTER_TOOLS]
        # Weighted by how often each was called.
        tools = tools_in(text or "")
        if not tools:
            # Empty means none; null means unknown, as in imported calls.
            yield {**keys, TOOL: NOT_RECORDED if text is None else NO_TOOL}, sums
            continue
        parts = zip(*(shares(each, list(tools.values())) for each in sums), strict=True)
        for tool, part in zip(tools, parts, strict=True):
            yield {**keys, TOOL: tool}, part


def shares(amount: int | None, weights: Sequence[int]) -> Sequence[int | None]:
    """Split an amount by weights into whole parts that add up to it."""
    if amount is None:
        return [None] * len(weights)
    whole, parts, sofar, done = sum(weights), [], 0, 0
    # Cumulative sums, so that rounding remainders carry over.
    for weight in weights:
        sofar += weight
        upto = int(amount) * sofar // whole
        parts.append(upto - done)
        done = upto
    return parts


def uses_of(inquiry: AuditQuery, by: Sequence[str]) -> UseByGroup | None:
    """Add up calls of tools; `None` if grouped or selected by a property of model calls."""
    from otel_limits.ledger import queries

    found = queries.tool_uses(inquiry.connection, by, inquiry.selection)
    # A selection by model does not apply to tools, and no number is better than a wrong one.
    if found is None:
        return None
    uses: dict[tuple[Any, ...], ToolUse] = {}
    for keys, (calls, errors, refusals, micros) in found:
        key = tuple(property_of(keys, name, inquiry.selection.zone) for name in by)
        uses.setdefault(key, ToolUse()).add(calls, errors, refusals, int(micros))
    return uses


# --- costs by outcome -----------------------------------------------------------------------------

OUTCOMES: Final = (
    Column("invocations", "Invocations", "count"),
    Column("successful", "Successful", "count", is_key=True),
    Column("halted", "Halted", "count", is_key=True),
    Column("killed", "Killed", "count"),
    Column("failed", "Failed", "count"),
    Column("lost", "Lost", "count"),
    Column("interrupted", "Interrupted", "count"),
    Column("unknown", "Unknown", "count"),
    Column("spent_on_successful_usd", "Spent on successful", "money"),
    Column("spent_on_halted_usd", "Spent on halted", "money", is_key=True),
    Column("spent_on_killed_usd", "Spent on killed", "money"),
    Column("spent_on_failed_usd", "Spent on failed", "money"),
    Column("spent_on_lost_usd", "Spent on lost", "money"),
    Column("spent_on_interrupted_usd", "Spent on interrupted", "money"),
    Column("spent_on_unknown_usd", "Spent on unknown", "money"),
    Column("own_cost_per_success_usd", "Own cost per success", "money"),
    Column("total_cost_per_success_usd", "Total cost per success", "money", is_key=True),
    Column("unsuccessful_share", "Unsuccessful share of cost", "share"),
    Column("unpriced_calls", "Unpriced calls", "count"),
)
KINDS: Final = ("successful", "halted", "killed", "failed", "lost", "interrupted", "unknown")
"""Each ended invocation is exactly one of these."""
UNSUCCESSFUL: Final = ("halted", "killed", "failed", "lost")
"""Those that had an end, and no natural one. The last two kinds are undecided."""


@dataclass(slots=True)
class Outcomes:
    """Ended invocations by outcome, with their cost in picodollars."""

    counts: Counter[str] = field(default_factory=Counter)
    pico: Counter[str] = field(default_factory=Counter)
    unpriced: Counter[str] = field(default_factory=Counter)
    """Model calls without a known price."""

    def add(self, outcome: str, invocations: int, pico: int, unpriced: int) -> None:
        """Add invocations of an outcome."""
        self.counts[outcome] += invocations
        self.pico[outcome] += pico
        self.unpriced[outcome] += unpriced

    @property
    def unsuccessful(self) -> int:
        """Picodollars of unsuccessful ones."""
        return sum(self.pico[kind] for kind in UNSUCCESSFUL)

    @property
    def figures(self) -> tuple[Any, ...]:
        """The values of `OUTCOMES`."""
        return (
            self.counts.total(),
            *(self.counts[kind] for kind in KINDS),
            *(known_cost(self.pico[kind], self.unpriced[kind]) for kind in KINDS),
            self._per_success("successful"),
            self._per_success(*KINDS),
            self._unsuccessful_share(),
            self.unpriced.total(),
        )

    def _per_success(self, *kinds: str) -> Decimal | None:
        successful = self.counts["successful"]
        if not successful or self._lacks_price(kinds):
            return None
        # Whole picodollars: money is never a float.
        return dollars(sum(self.pico[kind] for kind in kinds) // successful)

    def _unsuccessful_share(self) -> float | None:
        decided = self.pico["successful"] + self.unsuccessful
        if not decided or self._lacks_price(("successful", *UNSUCCESSFUL)):
            return None
        return self.unsuccessful / decided

    def _lacks_price(self, kinds: Iterable[str]) -> bool:
        """Return whether a ratio over these outcomes would be wrong by an unknown amount."""
        return any(self.unpriced[kind] for kind in kinds)


def outcomes_table(inquiry: AuditQuery, by: Sequence[str]) -> Table | None:
    """Build a table with one row per group, ordered by date, then by unsuccessful cost.

    Invocations are not grouped by what they lack, e.g. a model. Returns `None` if the selection is
    by such a property.
    """
    from otel_limits.bindings.known import successes
    from otel_limits.ledger import queries

    names = [name for name in by if name not in OF_CALLS]
    if any(each.name in OF_CALLS for each in inquiry.selection.where):
        return None
    zone, total = inquiry.selection.zone, Outcomes()
    groups: dict[tuple[Any, ...], Outcomes] = {}
    found = queries.outcomes(inquiry.connection, names, inquiry.selection, successes())
    for keys, (outcome, *sums) in found:
        key = tuple(property_of(keys, name, zone) for name in names)
        for each in (groups.setdefault(key, Outcomes()), total):
            each.add(outcome, *map(int, sums))

    def rank(item: tuple[tuple[Any, ...], Outcomes]) -> tuple[Any, ...]:
        key, each = item
        return (_dates(key, names), -each.unsuccessful, -each.pico.total(), *map(str, key))

    ranked = sorted(groups.items(), key=rank)
    return Table(
        name="outcomes",
        title="Invocations by " + ", ".join(names) if names else "Invocations",
        columns=(*inquiry.key_columns(names, OUTCOMES), *OUTCOMES),
        rows=[(*key, *each.figures) for key, each in ranked],
        total=("total", *("" for _ in names[1:]), *total.figures) if names else None,
        note="Finished invocations that started in the selected period, with their own cost. "
        "Own cost per success is the mean of successful ones; total cost per success divides the "
        "cost of all by their number. Successful ones ended naturally, halted ones were ended by a "
        "limit, killed ones on request, lost ones by `otel-limits ledger end-lost`; interrupted "
        "ones wait, e.g. for a person's answer, with which another invocation continues. The end "
        "of an import may be unknown. All others failed. The unsuccessful share is that of known "
        "ends. Amounts cover calls with a known price; a cost per success or a share is unknown if "
        "a call that it includes has none.",
    )


# --- stated costs ---------------------------------------------------------------------------------

DIFFERENCES: Final = (
    Column("model", "Model", is_key=True),
    Column("calls", "Calls", "count"),
    Column("different_calls", "Different", "count", is_key=True),
    Column("stated_usd", "Stated", "money", is_key=True),
    Column("listed_usd", "Computed", "money", is_key=True),
)


def differences_table(inquiry: AuditQuery) -> Table | None:
    """Build a table of the models whose stated costs differ from the computed prices, if any do."""
    from otel_limits.ledger import queries

    found = queries.stated_costs(inquiry.connection, inquiry.selection)
    rows = [
        (each.model, each.calls, each.different, dollars(each.stated), dollars(each.listed))
        for each in found
    ]
    if not rows:
        return None
    return Table(
        name="differences",
        title="Stated costs that differ from computed prices",
        columns=DIFFERENCES,
        rows=rows,
        note="Models with a call whose response states a cost that differs by more than 1% from "
        "the price by the policy file or the price list. The sums are of all calls that have both. "
        "The stated cost of a vendor is the price; that of a gateway is only recorded.",
    )


# --- the definition -------------------------------------------------------------------------------

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
