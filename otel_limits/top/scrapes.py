"""Samples of metrics: from `/metrics` endpoints, or from a Prometheus server."""

from __future__ import annotations

import contextlib
import http.client
import math
import time
import urllib.error
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import urlsplit

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from otel_limits.core.secrets import quote_value, redact_url
from otel_limits.dashboards.api import Prometheus, PrometheusError, WebAddress
from otel_limits.observers import metrics as table

PROCESS_START: Final = "process_start_time_seconds"
"""Start time of a process, exported by prometheus_client on Linux."""

NUMBERS: Final = frozenset(
    spec.name
    for spec in (
        *(table.TURNS, table.TOKENS, table.COST, table.UNPRICED_TOKENS, table.STOPS),
        table.TOOL_REFUSALS,
        *(table.IN_PROGRESS, table.LIMIT, table.INTERNAL_ERRORS, table.POLICY_VALID),
        *(table.QUOTA_USED, table.QUOTA_RESERVED, table.QUOTA_LIMIT, table.QUOTA_RESETS),
        *(table.ENFORCING, table.BUILD_INFO),
    )
)
"""Counters and gauges of which all series are read. Skipping the others saves time."""
FAILED: Final = {table.MODEL_CALLS.name: 'kind="failed"', table.TOOL_CALLS.name: 'status="error"'}
"""Counters of which only errors are read."""
SUMS: Final = frozenset(
    f"{spec.name}_sum" for spec in (table.INVOCATION_TURNS, table.INVOCATION_TOKENS)
)
"""Histograms of which only the sum is read."""

OWN_LABELS: Final = frozenset(
    {"__name__", "le", *(label for spec in table.METRICS for label in spec.label_names)}
)
"""Labels of otel-limits metrics. All others identify the process."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Sorted pairs, for comparison."""


class ScrapeError(Exception):
    """A feed is unavailable."""


@dataclass(frozen=True, slots=True)
class ScrapedSample:
    """One value of one series."""

    name: str
    labels: Mapping[str, str]
    value: float
    trace_id: str | None = None
    """Trace ID of an exemplar."""

    @property
    def agent(self) -> str:
        """Value of the label `agent`."""
        return self.labels.get("agent", "")

    def series(self) -> Labels:
        """Return the identity of its series."""
        return (("__name__", self.name), *sorted(self.labels.items()))

    def process(self) -> Labels:
        """Return the labels that identify its process, as one address may serve several."""
        return process_of(sorted(self.labels.items()))


def process_of(labels: Iterable[tuple[str, str]]) -> Labels:
    """Return the labels that identify a process."""
    return tuple(each for each in labels if each[0] not in OWN_LABELS)


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one feed at one time."""

    feed: str
    """Address of the feed, without credentials."""
    at: float
    """Seconds since the epoch."""
    samples: Sequence[ScrapedSample] = ()
    error: str = ""
    """Why there are no samples."""
    is_past: bool = False
    """Whether it is part of the history from before `top` was started."""

    def starts(self) -> Mapping[Labels, float]:
        """Return when each process started that exports it: a restart begins all its counters."""
        return {
            sample.process(): sample.value
            for sample in self.samples
            if sample.name == PROCESS_START
        }


class Feed(Protocol):
    """A source of metrics of one or more processes."""

    @property
    def shown(self) -> str:
        """Address without credentials."""

    @property
    def rate_seconds(self) -> float:
        """Window of turn and token rates."""

    @property
    def least_seconds(self) -> float:
        """Minimum window of a rate."""

    def history(self, now: float) -> Iterable[Scrape]:
        """Return the scrapes of the last hour, oldest first, if the feed stores any.

        Raises:
            ScrapeError: The feed is unavailable.
        """

    def samples(self, now: float) -> Sequence[ScrapedSample]:
        """Return the current samples.

        Raises:
            ScrapeError: The feed is unavailable.
        """


def first_scrapes(feed: Feed) -> Iterator[Scrape]:
    """Yield the history of a feed and its current scrape, which contains the error if it fails."""
    with contextlib.suppress(ScrapeError):
        yield from feed.history(time.time())
    yield scrape(feed, time.time())


def scrape(feed: Feed, now: float) -> Scrape:
    """Scrape a feed; the scrape contains the error if it fails."""
    try:
        return Scrape(feed.shown, now, feed.samples(now))
    except ScrapeError as error:
        return Scrape(feed.shown, now, error=str(error))


# --- `/metrics` endpoints -------------------------------------------------------------------------

THIS_MACHINE: Final = frozenset({"localhost", "127.0.0.1", "::1"})

SCRAPE_SECONDS: Final = 2.0
"""Timeout of an endpoint. Older data is no longer live."""

MOST_BYTES: Final = 64 * 2**20
"""Maximum size of a page. 50 agents, 50 models and 250 tools need a tenth of it."""

ACCEPT: Final = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
"""OpenMetrics is preferred because it includes the trace IDs of halts as exemplars."""

METADATA: Final = ("# TYPE ", "# HELP ", "# UNIT ")

HISTOGRAM: Final = ("bucket", "sum", "count")
BUCKETS: Final = table.BUDGET_USED.name
SAMPLES: Final = NUMBERS | SUMS | {PROCESS_START, *(f"{BUCKETS}_{n}" for n in HISTOGRAM)}
FAMILIES: Final = {
    # Without a type, because a histogram with only its sum is invalid.
    *(NUMBERS | {*FAILED, BUCKETS, PROCESS_START}),
    *(name.removesuffix("_total") for name in (*NUMBERS, *FAILED)),  # as in OpenMetrics
}


class Endpoint:
    """One `/metrics` endpoint.

    Args:
        address: A URL or `HOST:PORT`.

    Raises:
        ValueError: It is not a valid address.
    """

    rate_seconds: Final = 60.0
    """It is scraped each second."""
    least_seconds: Final = 5.0

    def __init__(self, address: str) -> None:
        """Parse the address."""
        # Without a scheme, `urlsplit` parses the host as a scheme or path.
        url = address if "://" in address else f"http://{address}"
        self.shown = redact_url(url)
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # an invalid port
            is_one = False
        if not is_one:
            raise ValueError(
                f"Invalid endpoint {quote_value(address)}. Use a URL or HOST:PORT, e.g. "
                "http://localhost:9464/metrics or localhost:9464."
            )
        if parts.path in ("", "/"):
            url = parts._replace(path="/metrics").geturl()
            self.shown = redact_url(url)
        self._address = WebAddress(url)
        port = f" {parts.port}" if parts.port else ""
        self._advice = f"Is an agent running with --prometheus-port{port}?"
        if parts.hostname in THIS_MACHINE:
            self._advice += f" To try it: otel-limits demo --serve{port}."

    def history(self, now: float) -> Iterable[Scrape]:  # noqa: ARG002  part of the protocol
        """Return nothing, as an endpoint has no history."""
        return ()

    def samples(self, now: float) -> Sequence[ScrapedSample]:  # noqa: ARG002  part of the protocol
        """Scrape the endpoint.

        Raises:
            ScrapeError: It is unavailable or has no otel-limits metrics.
        """
        began = time.monotonic()
        try:
            with self._address.open("", SCRAPE_SECONDS, Accept=ACCEPT) as response:
                kind = response.headers.get("Content-Type", "")
                page = _read(response, began)
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise ScrapeError(f"{self.shown} returned HTTP status {error.code}.") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ScrapeError(
                f"{self.shown} is unavailable ({self._address.redacted(_reason(error))}). "
                f"{self._advice}"
            ) from None
        try:
            samples = tuple(samples_of(page, is_openmetrics="openmetrics" in kind))
        except ValueError as error:
            reason = self._address.redacted(str(error))
            raise ScrapeError(f"{self.shown} returned invalid metrics: {reason}.") from None
        # Otherwise, the endpoint of another program would look like a fleet without agents. All
        # programs with prometheus_client, and Prometheus, export their start time.
        if all(sample.name == PROCESS_START for sample in samples):
            raise ScrapeError(f"{self.shown} has no otel-limits metrics.")
        return samples


def _read(response: Any, began: float) -> str:
    """Read a page of limited size within a limited time.

    Raises:
        TimeoutError: It takes too long.
        ValueError: It is too large.
    """
    page = bytearray()
    while piece := response.read1(2**16):
        page += piece
        if len(page) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES // 2**20} MiB")
        # The socket timeout applies to each chunk only.
        if time.monotonic() - began > 2 * SCRAPE_SECONDS:
            raise TimeoutError(f"not complete after {2 * SCRAPE_SECONDS:g} s")
    return page.decode(errors="replace")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def samples_of(page: str, *, is_openmetrics: bool) -> Iterator[ScrapedSample]:
    """Parse the otel-limits metrics of a page, in either exposition format.

    Raises:
        ValueError: The page is invalid.
    """
    # Other libraries' metrics may violate a rule of the parser, which takes 30 us per line.
    lines = [line for line in page.split("\n") if _is_read(line)]
    parse: Any = openmetrics.text_string_to_metric_families
    text = "\n".join([*lines, "# EOF\n"])
    if not is_openmetrics:
        parse, text = text_string_to_metric_families, "\n".join([*lines, ""])
    try:
        families = list(parse(text))
    except Exception as error:  # noqa: BLE001  the parsers raise various exceptions
        raise ValueError(f"{error}" or type(error).__name__) from None
    for family in families:
        for name, labels, value, _, exemplar, *_ in family.samples:
            # An unset gauge is NaN, as would be every sum that includes it.
            if math.isfinite(value):
                trace = exemplar.labels.get("trace_id") if exemplar else None
                yield ScrapedSample(name, labels, value, trace)


def _is_read(line: str) -> bool:
    if line.startswith(METADATA):
        return line[len(METADATA[0]) :].partition(" ")[0] in FAMILIES
    name = line.replace("{", " ", 1).partition(" ")[0]
    return name in SAMPLES or (name in FAILED and FAILED[name] in line)


# --- a Prometheus server --------------------------------------------------------------------------

QUERY_SECONDS: Final = 10.0
"""Longer than for endpoints, as the history of a large fleet takes megabytes."""

HISTORY_SECONDS: Final = 3600
STEP_SECONDS: Final = 60

NAMES: Final = "|".join(sorted({*NUMBERS, *SUMS, f"{table.BUDGET_USED.name}_bucket"}))
QUERIES: Final = (
    f'{{__name__=~"{NAMES}"}}',
    *(f"{name}{{{only}}}" for name, only in FAILED.items()),
    f"{PROCESS_START} and on (job, instance) {table.BUILD_INFO.name}",
)


class PrometheusFeed:
    """A Prometheus server that scrapes the fleet.

    Args:
        url: E.g. http://localhost:9090.
        authorization: Value of the `Authorization` header.
    """

    rate_seconds: Final = 300.0
    """Scrape intervals are up to two minutes."""
    least_seconds: Final = float(STEP_SECONDS)
    """In a shorter time, Prometheus may not have scraped again, which would look like no usage."""

    def __init__(self, url: str, authorization: str | None = None) -> None:
        """Create a client for the server."""
        self.shown = redact_url(url)
        self._prometheus = Prometheus(url, authorization, QUERY_SECONDS)

    def history(self, now: float) -> Iterator[Scrape]:
        """Query the last hour, one sample per minute.

        Raises:
            ScrapeError: The query failed.
        """
        by_time: dict[float, list[ScrapedSample]] = {}
        window = {"start": f"{now - HISTORY_SECONDS:.3f}", "end": f"{now:.3f}"}
        # Grouped by time, as the follower compares consecutive scrapes.
        for at, sample in self._query("query_range", **window, step=str(STEP_SECONDS)):
            by_time.setdefault(at, []).append(sample)
        for at, samples in sorted(by_time.items()):
            yield Scrape(self.shown, at, samples, is_past=True)

    def samples(self, now: float) -> Sequence[ScrapedSample]:
        """Query the latest samples.

        Raises:
            ScrapeError: The query failed or returned no metrics.
        """
        samples = tuple(sample for _, sample in self._query("query", time=f"{now:.3f}"))
        if not samples:
            raise ScrapeError(f"{self.shown} has no current otel-limits metrics.")
        return samples

    def _query(self, path: str, **parameters: str) -> Sequence[tuple[float, ScrapedSample]]:
        try:
            return [
                pair
                for query in QUERIES
                for series in self._prometheus.series(path, query=query, **parameters)
                for pair in _samples(series)
            ]
        except PrometheusError as error:
            raise ScrapeError(str(error)) from None
        except (KeyError, TypeError, ValueError):
            raise ScrapeError(f"{self.shown} did not return a Prometheus response.") from None


def _samples(series: Mapping[str, Any]) -> Iterator[tuple[float, ScrapedSample]]:
    """Yield all points of a series with their times."""
    labels = dict(series["metric"])
    name = labels.pop("__name__", "")
    # An instant query returns one value, a range query several.
    for at, text in series.get("values") or [series["value"]]:
        # NaN would make every sum NaN.
        if math.isfinite(value := float(text)):
            yield float(at), ScrapedSample(name, labels, value)
