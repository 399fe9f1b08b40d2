"""The question `reconcile`: the ledger against Prometheus, the same window counted twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from otel_limits.audit import asking
from otel_limits.audit.answers import Answer, Column, Table
from otel_limits.audit.question import SINCE, UNTIL, Inquiry, Option, Question
from otel_limits.audit.sums import Sums, fold
from otel_limits.core.errors import LedgerError
from otel_limits.core.labels import OTHER, clean
from otel_limits.core.secrets import masked
from otel_limits.dashboards.api import Prometheus, PrometheusError
from otel_limits.ledger.rows import MICROSECONDS

DAY_SECONDS: Final = 24 * 60 * 60
STEP_SECONDS: Final = 6 * 60 * 60
"""How much of the window is fetched at once: every sample of every counter comes over."""
LOOK_BACK_SECONDS: Final = 5 * 60
"""Where the last sample before the window is looked for."""

Pair = tuple[str, str]
"""Agent and model."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that both have counted."""

    title: str
    metric: str
    of: str
    """Which figure of the ledger."""


MEASURES: Final = (
    Measure("model calls", "otel_limits_model_calls_total", "calls"),
    Measure("input tokens", 'otel_limits_tokens_total{type="input"}', "input"),
    Measure("output tokens", 'otel_limits_tokens_total{type="output"}', "output"),
)

COMPARED: Final = (
    Column("agent", "Agent", is_key=True),
    Column("model", "Model", is_key=True),
    Column("measure", "Counted", is_key=True),
    Column("ledger", "Ledger", "count"),
    Column("prometheus", "Prometheus", "count"),
    Column("difference", "Difference", "count", is_key=True),
    Column("difference_share", "Of the ledger", "share"),
    Column("accepted", "Within tolerance", is_key=True),
)


def reconcile(inquiry: Inquiry, prometheus: str, tolerance: float) -> Answer:
    """Compare, per agent and model.

    Raises:
        LedgerError: Prometheus cannot be asked.
    """
    from otel_limits.ledger import spending

    until_us, since_us = inquiry.selection.until_us, inquiry.selection.since_us
    if until_us is None:
        until_us = round(time.time() * MICROSECONDS)
    if since_us is None:
        since_us = until_us - DAY_SECONDS * MICROSECONDS
    if since_us >= until_us:
        raise LedgerError("The window is empty: --since must be before --until.")
    since, until = since_us / MICROSECONDS, until_us / MICROSECONDS
    window = replace(inquiry.selection, since_us=since_us, until_us=until_us)
    groups = fold(
        spending.spend(inquiry.connection, ("agent", "model"), window), ("agent", "model")
    )
    ledger = {(str(agent), str(model)): sums for (agent, model), sums in groups.items()}
    counted = {
        measure.title: counters(prometheus, measure.metric, since, until) for measure in MEASURES
    }
    table = comparison(ledger, counted, tolerance)
    return Answer(
        question="reconcile",
        title="Ledger and Prometheus",
        about=f"{replace(inquiry, selection=window).about}, against {masked(prometheus)}, "
        f"within {tolerance:.2%} of the ledger",
        tables=[table],
        status=int(any(row[-1] == "no" for row in table.rows)),
    )


def comparison(
    ledger: Mapping[Pair, Sums], counted: Mapping[str, Mapping[Pair, float]], tolerance: float
) -> Table:
    """One row per agent, model and measure, the largest difference first."""
    series = {pair for each in counted.values() for pair in each}
    folded = as_labels(ledger, series)
    rows = []
    for measure in MEASURES:
        metric = counted[measure.title]
        for pair in sorted(set(folded) | set(metric)):
            ours = folded.get(pair, {}).get(measure.of, 0)
            theirs = round(metric.get(pair, 0.0))
            difference = theirs - ours
            share = abs(difference) / ours if ours else float(bool(difference))
            rows.append((*pair, measure.title, ours, theirs, difference, share,
                         "yes" if share <= tolerance else "no"))  # fmt: skip
    rows.sort(key=lambda row: (-row[6], row[0], row[1], row[2]))
    return Table(
        name="reconcile",
        title="Ledger and Prometheus",
        columns=COMPARED,
        rows=rows,
        note="Prometheus knows the time of a scrape, not of a call: at both ends of the window up "
        "to one scrape interval can be counted on the other side. What was not scraped before a "
        "process ended is missing there.",
    )


def as_labels(ledger: Mapping[Pair, Sums], series: set[Pair]) -> dict[Pair, dict[str, int]]:
    """Sum the ledger under the labels that the metrics use: cleaned, and `_other` beyond a cap."""
    folded: dict[Pair, dict[str, int]] = {}
    for recorded, sums in ledger.items():
        agent, model = map(clean, recorded)
        pair = (agent, model)
        if pair not in series:
            others = ((agent, OTHER), (OTHER, model), (OTHER, OTHER))
            pair = next((each for each in others if each in series), pair)
        figures = folded.setdefault(pair, {"calls": 0, "input": 0, "output": 0})
        figures["calls"] += sums.calls
        figures["input"] += sums.input
        figures["output"] += sums.output
    return folded


# --- Prometheus -----------------------------------------------------------------------------------


def counters(url: str, metric: str, since: float, until: float) -> dict[Pair, float]:
    """What counters grew by within a window, per agent and model.

    `increase()` would extrapolate to the edges of the window; the samples themselves are added up
    here instead. A counter that falls has started again, and one that appears began at 0.

    Raises:
        LedgerError: Prometheus does not answer, or not as it should.
    """
    grown: dict[str, float] = {}
    last: dict[str, float] = {}
    pairs: dict[str, Pair] = {}
    for start, end in _steps(since, until):
        for series in query(url, f"{metric}[{round((end - start) * 1000)}ms]", end):
            key = json.dumps(series["metric"], sort_keys=True)
            pairs[key] = (series["metric"].get("agent", ""), series["metric"].get("model", ""))
            for at, text in series["values"]:
                value, before = float(text), last.get(key, 0.0)
                if at >= since:
                    growth = value - before if value >= before else value
                    grown[key] = grown.get(key, 0.0) + growth
                last[key] = value
    by_pair: dict[Pair, float] = {}
    for key, growth in grown.items():
        by_pair[pairs[key]] = by_pair.get(pairs[key], 0.0) + growth
    return by_pair


def _steps(since: float, until: float) -> Iterator[tuple[float, float]]:
    start = since - LOOK_BACK_SECONDS
    while start < until:
        end = min(start + STEP_SECONDS, until)
        yield start, end
        start = end


def query(url: str, expression: str, at: float) -> list[dict[str, Any]]:
    """Ask Prometheus for the samples of an expression.

    Raises:
        LedgerError: It does not answer, or not as it should.
    """
    try:
        return Prometheus(url).series("query", query=expression, time=f"{at:.3f}")
    except PrometheusError as error:
        raise LedgerError(str(error)) from None


RECONCILE: Final = Question(
    name="reconcile",
    help="The ledger against Prometheus counters; exit status 1 above the tolerance.",
    answer=reconcile,
    tables={"reconcile": COMPARED},
    options=(
        Option("--prometheus", "URL", str, "such as http://localhost:9090", is_required=True),
        Option(
            "--tolerance",
            "SHARE",
            asking.share,
            "difference that is still accepted, as a share of the ledger: 0.01 or 1%; the answer "
            "says what it was taken for (default: 1%)",
            default=0.01,
        ),
    ),
    selection=(
        replace(SINCE, help="begin of the window (default: 1d)"),
        replace(UNTIL, help="its end (default: now)"),
    ),
)
