"""The question `reconcile`: the ledger against Prometheus or bills, for the same window."""

from __future__ import annotations

import bisect
import functools
import json
import math
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_limits.audit import parsing
from otel_limits.audit.answer import Answer, CellKind, Column, Table, written
from otel_limits.audit.question import SINCE, UNTIL, AuditQuery, Option, Question
from otel_limits.audit.reconcile_bill import BILL_TABLES
from otel_limits.core.errors import LedgerError
from otel_limits.core.labels import OTHER, clean
from otel_limits.core.secrets import Secret, redact_url
from otel_limits.dashboards.api import Prometheus, PrometheusError
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
        status=int(any(row[-1] == "no" for table in tables for row in table.rows)),
    )


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


# --- growth of counters ---------------------------------------------------------------------------
# `increase()` would extrapolate to the edges of the window. Here the growth between consecutive
# samples is added up instead, with the time between them, as the exact time of an increment is
# unknown.

STEP_SECONDS: Final = 6 * 60 * 60
"""Length of the portions in which the window is fetched, with every sample of every counter."""
STALE_SECONDS: Final = 5 * 60
"""Prometheus' own threshold for a gap (`query.lookback-delta`): how far beyond both ends of the
window adjacent samples are searched."""
LONG_AGO_SECONDS: Final = 7 * 24 * 60 * 60
"""How far back the last sample is searched if there is none just before the window."""

BEGINNINGS: Final = "process_start_time_seconds"
"""Start time of each process, exported by every Prometheus client library on Linux."""
SIGN_OF_LIFE: Final = "otel_limits_build_info"
"""Exported from the first scrape of a process."""

SeriesLabels: TypeAlias = tuple[str, ...]
Ask: TypeAlias = Callable[[str, float], list[dict[str, Any]]]


@dataclass(slots=True)
class Growth:
    """Increase of a counter in a window."""

    least: float = 0.0
    most: float = 0.0
    restarts: int = 0
    """Restarted processes: what they counted after their last scrape is lost."""

    def merge(self, other: Growth) -> None:
        """Add the growth of another series."""
        self.least += other.least
        self.most += other.most
        self.restarts += other.restarts


@dataclass(slots=True)
class ScrapeTarget:
    """One process, or several that share metrics files."""

    starts: list[float] = field(default_factory=list)
    """Start times of its processes, if known."""
    scrapes: array[float] = field(default_factory=lambda: array("d"))

    def start_within(self, after: float, until: float) -> float | None:
        """Return when a process last started in an interval, if one did."""
        place = bisect.bisect_right(self.starts, until)
        found = self.starts[place - 1] if place else -math.inf
        return found if found > after else None

    def absent_at(self, before: float) -> float:
        """Return when a series did not exist yet that has its first sample at `before`."""
        place = bisect.bisect_left(self.scrapes, before)
        scraped = self.scrapes[place - 1] if place else -math.inf
        return max(scraped, self.start_within(-math.inf, before) or -math.inf)

    def last_scrape(self, until: float) -> float | None:
        """Return its last scrape if it is still alive and will be scraped after `until`."""
        if not self.scrapes or self.scrapes[-1] >= until:
            return None
        last = self.scrapes[-1]
        # A process that missed two scrapes is considered dead.
        interval = last - self.scrapes[-2] if len(self.scrapes) > 1 else STALE_SECONDS
        return last if until - last <= min(2 * interval, STALE_SECONDS) else None


class Counters:
    """Reads counters of a Prometheus server between two times.

    Args:
        ask: Evaluates an expression at a time, and returns its series.
        since: Start of the window, in seconds since the epoch.
        until: Its end.
        jobs: The jobs to read; all if empty.
    """

    def __init__(self, ask: Ask, since: float, until: float, jobs: Sequence[str]) -> None:
        """Read the scrapes and start times of all processes."""
        self._ask = ask
        self._chosen = jobs
        self.since = since
        self.until = until
        self._targets: dict[str, ScrapeTarget] = {}
        for labels, samples in self._samples(self._of_chosen(SIGN_OF_LIFE)):
            self._target(labels).scrapes.extend(at for at, _ in samples)
        self.jobs: Final = {json.loads(target).get("job", "") for target in self._targets}
        """All jobs that were found."""
        for labels, samples in self._samples(_of_jobs(BEGINNINGS, self.jobs)):
            target = self._targets.get(_target_key(labels))
            if target is not None:
                # Several processes behind one address, e.g. workers, have one start each.
                target.starts = sorted({*target.starts, *(value for _, value in samples)})

    @property
    def last_scrape(self) -> float:
        """Return until when counts of live processes are complete: the end, if long past."""
        seen = (target.last_scrape(self.until) for target in self._targets.values())
        return min((at for at in seen if at is not None), default=self.until)

    def growth(self, metric: str, *names: str) -> dict[SeriesLabels, Growth]:
        """Return the growth of a counter, by some of its labels.

        A counter that falls was restarted, and a new one started at 0.
        """
        metric = self._of_chosen(metric)
        last: dict[str, tuple[float, float]] = {}
        every: dict[str, tuple[Mapping[str, str], Growth]] = {}
        missing: dict[str, tuple[float, float]] = {}
        for labels, samples in self._samples(metric):
            key = _identity(labels)
            _, grown = every.setdefault(key, (labels, Growth()))
            for sample in samples:
                before = last.get(key)
                if before is not None:
                    self._add(grown, self._target(labels), before, sample)
                elif sample[1]:
                    missing[key] = sample  # it is new, or was last seen long ago
                last[key] = sample
        # Only if needed, as it reads a week of samples.
        known = self._long_ago(metric) if missing else {}
        for key, sample in missing.items():
            labels, grown = every[key]
            target = self._target(labels)
            before = known.get(key, (target.absent_at(sample[0]), 0.0))
            self._add(grown, target, before, sample)
        total: dict[SeriesLabels, Growth] = {}
        for labels, grown in every.values():
            chosen = tuple(labels.get(name, "") for name in names)
            total.setdefault(chosen, Growth()).merge(grown)
        return total

    def _add(
        self,
        grown: Growth,
        target: ScrapeTarget,
        before: tuple[float, float],
        after: tuple[float, float],
    ) -> None:
        """Add the growth between consecutive samples."""
        (earlier, low), (later, high) = before, after
        if later <= self.since or earlier >= self.until:
            return
        started = target.start_within(earlier, later)
        least = most = high - low
        if high < low or started is not None:
            # Restarted from 0, when the process started.
            least = most = high
            earlier = earlier if started is None else started
            grown.restarts += low > 0
        elif later - earlier > STALE_SECONDS and not target.starts:
            most = high  # it may have restarted during the gap
        if earlier >= self.since and later <= self.until:
            grown.least += least
        grown.most += most

    def _long_ago(self, metric: str) -> dict[str, tuple[float, float]]:
        """Return time and value of each series' last sample before the window."""
        # Two queries, as no function of PromQL returns both a value and its time.
        at, window = self.since - STALE_SECONDS, f"{LONG_AGO_SECONDS}s"
        # Steps shorter than Prometheus' gap meet every last sample.
        times = self._ask(f"max_over_time(timestamp({metric})[{window}:{STALE_SECONDS}s])", at)
        values = self._ask(f"last_over_time({metric}[{window}])", at)
        found = {_identity(each["metric"]): float(each["value"][1]) for each in times}
        return {
            key: (found[key], float(each["value"][1]))
            for each in values
            if (key := _identity(each["metric"])) in found
        }

    def _samples(
        self, selector: str
    ) -> Iterator[tuple[Mapping[str, str], list[tuple[float, float]]]]:
        """Iterate over each series' samples in and around the window, in portions."""
        seen: dict[str, float] = {}
        begin, end = self.since - STALE_SECONDS, self.until + STALE_SECONDS
        while begin < end:
            upto = min(begin + STEP_SECONDS, end)
            span = f"[{round((upto - begin) * 1000)}ms]"
            for series in self._ask(f"{selector}{span}", upto):
                labels, key = series["metric"], _identity(series["metric"])
                # Before Prometheus 3, portions included both of their ends.
                samples = [
                    (float(at), float(value))
                    for at, value in series["values"]
                    if at > seen.get(key, -math.inf)
                ]
                if samples:
                    seen[key] = samples[-1][0]
                    yield labels, samples
            begin = upto

    def _of_chosen(self, selector: str) -> str:
        return _of_jobs(selector, self._chosen) if self._chosen else selector

    def _target(self, labels: Mapping[str, str]) -> ScrapeTarget:
        return self._targets.setdefault(_target_key(labels), ScrapeTarget())


def counters_of(url: str, authorization: str | None) -> Ask:
    """Create a function that queries a Prometheus server.

    Raises:
        LedgerError: From the function, if the server fails.
    """
    prometheus = Prometheus(url, authorization)

    def ask(expression: str, at: float) -> list[dict[str, Any]]:
        try:
            # In milliseconds, the resolution of Prometheus.
            return prometheus.series("query", query=expression, time=f"{at:.3f}")
        except PrometheusError as error:
            raise LedgerError(str(error)) from None

    return ask


@functools.cache
def _own_labels() -> frozenset[str]:
    """Return the labels of the metrics themselves; the others identify the process."""
    from otel_limits.observers.instruments import METRICS

    return frozenset({"__name__", "version"}.union(*(metric.labels for metric in METRICS)))


def _target_key(labels: Mapping[str, str]) -> str:
    chosen = {name: value for name, value in labels.items() if name not in _own_labels()}
    return json.dumps(chosen, sort_keys=True)


def _identity(labels: Mapping[str, str]) -> str:
    chosen = {name: value for name, value in labels.items() if name != "__name__"}
    return json.dumps(chosen, sort_keys=True)


def _of_jobs(selector: str, jobs: Iterable[str]) -> str:
    """Restrict a selector to some jobs, as others may have thousands of processes."""
    metric, _, labels = selector.partition("{")
    pattern = "|".join(map(re.escape, sorted(set(jobs))))
    rest = f",{labels}" if labels else "}"
    return f"{metric}{{job=~{json.dumps(pattern)}{rest}"


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
