"""The question `reconcile`: the ledger against Prometheus or bills, for the same window."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, CellKind, Column, Table, written
from otel_limits.audit.completeness import pruned_clause
from otel_limits.audit.counter_growth import Counters, Growth, counters_of
from otel_limits.audit.question import SINCE, UNTIL, AuditQuery, Option, Question
from otel_limits.audit.reconcile_bill import BILL_TABLES
from otel_limits.core.errors import LedgerError
from otel_limits.core.labels import OTHER, clean
from otel_limits.core.secrets import Secret, redact_url
from otel_limits.ledger.rows import MICROSECONDS, PICODOLLARS, dollars
from otel_limits.settings.variables import inherited_authorization

if TYPE_CHECKING:
    from otel_limits.ledger.selection import Selection


# --- the question ---------------------------------------------------------------------------------

DAY_SECONDS: Final = 24 * 60 * 60
FLOATS: Final = 1e-9
"""Tolerance for sums of money, which Prometheus stores as floats."""

LabelPair = tuple[str, str]
"""Agent and model, or agent and reason."""
Counts = Mapping[LabelPair, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that both have counted."""

    title: str
    metric: str
    of: str
    """Its name in the ledger."""


MEASURES: Final = (
    Measure("model calls", "otel_limits_model_calls_total", "calls"),
    Measure("input tokens", 'otel_limits_tokens_total{type="input"}', "input"),
    Measure("output tokens", 'otel_limits_tokens_total{type="output"}', "output"),
)
COST: Final = Measure("cost", "otel_limits_cost_usd_total", "pico")
STOPS: Final = Measure("stops", "otel_limits_stops_total", "stops")


def _figures(kind: CellKind) -> tuple[Column, ...]:
    return (
        Column("ledger", "Ledger", kind, is_key=True),
        Column("prometheus", "Prometheus", kind, is_key=True),
        Column("prometheus_most", "At most", kind),
        Column("difference", "Difference", kind, is_key=True),
        Column("difference_share", "Share of ledger", "share"),
        Column("restarts", "Restarts", "count"),
        Column("accepted", "Within tolerance", is_key=True),
    )


AGENT: Final = Column("agent", "Agent", is_key=True)
MODEL: Final = Column("model", "Model", is_key=True)
COMPARED: Final = (AGENT, MODEL, Column("measure", "Figure", is_key=True), *_figures("count"))
COSTS: Final = (AGENT, MODEL, *_figures("money"))
ENDS: Final = (AGENT, Column("reason", "Stop reason", is_key=True), *_figures("count"))

NOTE: Final = (
    "Prometheus has the time of scrapes, not of calls. The lower figure is what its samples "
    "prove to be within the window; the upper one includes what may be, at both ends and during "
    "gaps. A difference is how far the ledger is outside this range. Counts after "
    "the last scrape of a process are missing in Prometheus."
)


def reconcile(
    inquiry: AuditQuery,
    prometheus: str,
    tolerance: float,
    authorization_file: Secret | None = None,
    jobs: Sequence[str] = (),
) -> Answer:
    """Compare calls, tokens and cost per agent and model, and stops per agent and reason.

    Raises:
        LedgerError: Prometheus cannot be queried, or has no metrics of a job.
    """
    window = window_of(inquiry.selection)
    # One note for all three tables: they are counted by the same rule.
    tables = [
        Table(name=name, title=title, columns=columns, rows=rows)
        for name, title, columns, rows in compared(
            inquiry, window, prometheus, tolerance, authorization_file, jobs
        )
    ]
    noted = next((n for n, table in enumerate(tables) if table.rows), 0)
    tables[noted] = replace(tables[noted], note=NOTE)
    return Answer(
        question="reconcile",
        title="Ledger and Prometheus",
        about=f"{replace(inquiry, selection=window).about}, against {redact_url(prometheus)}"
        f"{_of_which(jobs)}, tolerance {tolerance:.2%} of the ledger",
        tables=tables,
        summary=_pruned(inquiry, window),
        status=int(any(row[-1] == "no" for table in tables for row in table.rows)),
        since_us=window.since_us,
    )


def _pruned(inquiry: AuditQuery, window: Selection) -> str:
    """Describe which part of the window cannot be compared; empty if all of it can."""
    clause = pruned_clause(replace(inquiry, selection=window))
    return f"Not comparable: the ledger's {clause}." if clause else ""


def window_of(selection: Selection) -> Selection:
    """Return the window to compare, by default the last day.

    Raises:
        LedgerError: It is empty.
    """
    until_us, since_us = selection.until_us, selection.since_us
    if until_us is None:
        # The local clock rather than that of Prometheus, as the rows of the ledger use it too.
        until_us = round(time.time() * MICROSECONDS)
    if since_us is None:
        since_us = until_us - DAY_SECONDS * MICROSECONDS
    if since_us >= until_us:
        raise LedgerError("The window is empty: --since must be before --until.")
    return replace(selection, since_us=since_us, until_us=until_us)


def compared(
    inquiry: AuditQuery,
    window: Selection,
    prometheus: str,
    tolerance: float,
    authorization: Secret | None,
    jobs: Sequence[str],
) -> Iterator[tuple[str, str, Sequence[Column], list[Sequence[Any]]]]:
    """Yield name, title, columns and rows of each table, the largest difference first in each.

    Raises:
        LedgerError: Prometheus cannot be queried, or has no metrics of a job.
    """
    from otel_limits.ledger import reconciling

    since_us, until_us = window.since_us or 0, window.until_us or 0
    ask = counters_of(prometheus, _credentials(authorization))
    counters = Counters(ask, since_us / MICROSECONDS, until_us / MICROSECONDS, jobs)
    if missing := sorted(set(jobs) - counters.jobs):
        raise LedgerError(
            f"{redact_url(prometheus)} has no metrics{_of_which(missing)} between "
            f"{written(since_us, 'time')} and {written(until_us, 'time')} UTC."
        )
    # What live processes counted after their last scrape is not in Prometheus yet.
    scraped_us = round(counters.last_scrape * MICROSECONDS)

    def both(read: Any) -> tuple[Counts, Counts]:
        late = read(inquiry.connection, max(since_us, scraped_us), until_us)
        return dict(read(inquiry.connection, since_us, until_us)), dict(late)

    calls, late_calls = both(reconciling.live_calls)
    stops, late_stops = both(reconciling.live_stops)
    rows = []
    for measure in MEASURES:
        grown = counters.growth(measure.metric, "agent", "model")
        for pair, *figures in comparison(measure, calls, late_calls, grown, tolerance):
            rows.append((*pair, measure.title, *figures))
    yield "reconcile", "Calls and tokens", COMPARED, _in_order(rows)
    grown = counters.growth(COST.metric, "agent", "model")
    costs = comparison(COST, calls, late_calls, grown, tolerance)
    in_usd = (  # the first four figures are picodollars
        (*pair, *(dollars(round(figure)) for figure in figures[:4]), *figures[4:])
        for pair, *figures in costs
    )
    yield "cost", "Cost", COSTS, _in_order(in_usd)
    grown = counters.growth(STOPS.metric, "agent", "reason")
    ends = comparison(STOPS, stops, late_stops, grown, tolerance)
    yield "stops", "Stops", ENDS, _in_order((*pair, *figures) for pair, *figures in ends)


def _of_which(jobs: Sequence[str]) -> str:
    return f" of job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}" if jobs else ""


def _credentials(authorization: Secret | None) -> str | None:
    try:
        found = authorization or inherited_authorization()
    except ValueError as error:
        raise LedgerError(str(error)) from None
    return found.value if found else None


def _in_order(rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Sort by share of the ledger, unknown ones and the largest first, then by names."""
    # The share is third from the end in every table.
    return sorted(rows, key=lambda row: (row[-3] is not None, -(row[-3] or 0), *map(str, row[:3])))


def comparison(
    measure: Measure,
    ledger: Counts,
    late: Counts,
    counted: Mapping[tuple[str, ...], Growth],
    tolerance: float,
) -> Iterator[tuple[Any, ...]]:
    """Yield a pair, its figures in ledger and Prometheus (at least, at most), and differences.

    Args:
        measure: The figure to compare.
        ledger: The figures of the ledger.
        late: The part of them that was not scraped yet.
        counted: The growth in Prometheus, by labels.
        tolerance: Accepted difference, as a share of the ledger.
    """
    # Growth has tuples of any length as labels; here they are always pairs.
    series = {(pair[0], pair[1]): grown for pair, grown in counted.items()}
    ours = as_labels(ledger, measure.of, series)
    unseen = as_labels(late, measure.of, series)
    scale = PICODOLLARS if measure is COST else 1
    for pair in {**ours, **series}:
        grown, have = series.get(pair, Growth()), ours.get(pair, 0)
        # By decimals: a float times 10¹² would lose its last digits.
        least = round(Decimal(grown.least) * scale)
        most = round(Decimal(grown.most) * scale) + unseen.get(pair, 0)
        if not have and not most:
            continue  # a series initialized to 0, so that its first event is an increase
        difference = min(0, most - have) or max(0, least - have)
        share = abs(difference) / have if have else None
        # Prometheus adds money as floats, so the last digits depend on the order.
        accepted = tolerance + (FLOATS if measure is COST else 0)
        is_near = not difference if share is None else share <= accepted
        yield pair, have, least, most, difference, share, grown.restarts, "yes" if is_near else "no"


def as_labels(
    ledger: Counts, figure: str, series: Mapping[LabelPair, Growth]
) -> dict[LabelPair, int]:
    """Sum the ledger under the labels of the metrics: cleaned, and `_other` beyond a limit."""
    folded: dict[LabelPair, int] = {}
    for recorded, figures in ledger.items():
        first, second = map(clean, recorded)
        pair = (first, second)
        # Only the process that replaced a name by `_other` has a record of it, so it is inferred
        # from the existing series.
        if pair not in series:
            others = ((first, OTHER), (OTHER, second), (OTHER, OTHER))
            pair = next((each for each in others if each in series), pair)
        folded[pair] = folded.get(pair, 0) + figures[figure]
    return folded


def reconcile_with(
    inquiry: AuditQuery,
    prometheus: str | None,
    bill: Sequence[Path] | None,
    tolerance: float,
    authorization_file: Secret | None,
    job: Sequence[str] | None,
) -> Answer:
    """Compare the ledger with Prometheus, or with bills.

    Raises:
        LedgerError: Not exactly one of them is given, or it cannot be read.
    """
    from otel_limits.audit.reconcile_bill import reconcile_bill

    if (prometheus is None) == (bill is None):
        raise LedgerError(
            "Pass either --prometheus URL or --bill FILE, to name what the ledger is compared with."
        )
    if prometheus is not None:
        return reconcile(inquiry, prometheus, tolerance, authorization_file, job or ())
    for option, value in (("--authorization-file", authorization_file), ("--job", job)):
        if value is not None:
            raise LedgerError(f"{option} is for Prometheus. Leave it out with --bill.")
    return reconcile_bill(inquiry, bill or (), tolerance)


# --- the definition -------------------------------------------------------------------------------

AUTHORIZATION_FILE: Final = Option(
    "--authorization-file",
    "FILE",
    parsing.authorization_file,
    "file with the Authorization header value for Prometheus, e.g. Bearer TOKEN "
    "(default: OTEL_LIMITS_PROMETHEUS_AUTHORIZATION)",
)
RECONCILE: Final = Question(
    name="reconcile",
    help="Compare the ledger with Prometheus or with bills (exit status 1 above the tolerance).",
    answer=reconcile_with,
    tables={"reconcile": COMPARED, "cost": COSTS, "stops": ENDS, **BILL_TABLES},
    optional=frozenset({"reconcile", "cost", "stops", *BILL_TABLES}),
    options=(
        Option("--prometheus", "URL", str, "e.g. http://localhost:9090"),
        Option(
            "--bill",
            "FILE",
            Path,
            "exports of OpenAI's or Anthropic's usage and costs, OpenRouter's activity, or "
            "LiteLLM's spend logs",
            is_list=True,
        ),
        AUTHORIZATION_FILE,
        Option(
            "--job",
            "NAME",
            str,
            "Prometheus jobs whose processes record in this ledger (default: all)",
            is_list=True,
        ),
        Option(
            "--tolerance",
            "SHARE",
            parsing.share,
            "maximum allowed difference, e.g. 0.01 or 1% (default: 1%)",
            default=0.01,
        ),
    ),
    selection=(
        replace(SINCE, help="start of the window (default: 1d, or the first day of the bills)"),
        replace(UNTIL, help="end of the window (default: now, or the last day of the bills)"),
    ),
)
