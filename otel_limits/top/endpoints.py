"""Scrapes `/metrics` endpoints."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from otel_limits.core.secrets import redact_url
from otel_limits.dashboards.api import WebAddress
from otel_limits.observers import instruments as table
from otel_limits.top.scrapes import FAILED, NUMBERS, PROCESS_START, SUMS, ScrapedSample, ScrapeError

if TYPE_CHECKING:
    from otel_limits.top.scrapes import Scrape

TIMEOUT_SECONDS: Final = 2.0
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
                f"Invalid endpoint {redact_url(address)!r}. Use a URL or HOST:PORT, e.g. "
                "http://localhost:9464/metrics or localhost:9464."
            )
        if parts.path in ("", "/"):
            url = parts._replace(path="/metrics").geturl()
            self.shown = redact_url(url)
        self._address = WebAddress(url)

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
            with self._address.open("", TIMEOUT_SECONDS, Accept=ACCEPT) as response:
                kind = response.headers.get("Content-Type", "")
                page = _read(response, began)
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise ScrapeError(f"{self.shown} returned HTTP status {error.code}.") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ScrapeError(
                f"{self.shown} is unavailable ({self._address.redacted(_reason(error))}). "
                "Is OTEL_LIMITS_PROMETHEUS_PORT set there?"
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
        if time.monotonic() - began > 2 * TIMEOUT_SECONDS:
            raise TimeoutError(f"not complete after {2 * TIMEOUT_SECONDS:g} s")
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
