"""Reads `/metrics` endpoints, as a Prometheus does."""

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
from otel_limits.top.scrapes import FAILED, NUMBERS, PROCESS_START, SUMS, Sample, ScrapeError

if TYPE_CHECKING:
    from otel_limits.top.scrapes import Scrape

TIMEOUT_SECONDS: Final = 2.0
"""How long an endpoint may be silent: a Prometheus on the same network waits no longer in practice,
and a row that is two seconds old is not live any more."""

MOST_BYTES: Final = 64 * 2**20
"""Of a page: 50 agents with 50 models and 250 tools have a tenth of it."""

ACCEPT: Final = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
"""OpenMetrics first: only there a halt has the trace that it is an example of."""

METADATA: Final = ("# TYPE ", "# HELP ", "# UNIT ")

HISTOGRAM: Final = ("bucket", "sum", "count")
BUCKETS: Final = table.BUDGET_USED.name
SAMPLES: Final = NUMBERS | SUMS | {PROCESS_START, *(f"{BUCKETS}_{n}" for n in HISTOGRAM)}
FAMILIES: Final = {
    # A histogram of which only the sum is read has no type, as half of one is not valid.
    *(NUMBERS | {*FAILED, BUCKETS, PROCESS_START}),
    *(name.removesuffix("_total") for name in (*NUMBERS, *FAILED)),  # as OpenMetrics has it
}


class Endpoint:
    """One `/metrics` endpoint.

    Args:
        address: Where it is: a URL, or `HOST:PORT` alone.

    Raises:
        ValueError: It is not an address that can be scraped.
    """

    def __init__(self, address: str) -> None:
        """Keep the address."""
        # Without a scheme `urlsplit` takes a host for a scheme or a path.
        url = address if "://" in address else f"http://{address}"
        self.shown = redact_url(url)
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # what stands for a port is not a number
            is_one = False
        if not is_one:
            # Masked, as an address may have a password, and this sentence goes to a terminal or a
            # log.
            raise ValueError(
                f"{redact_url(address)!r} is not the address of an endpoint. Give one such as "
                "http://localhost:9464/metrics or localhost:9464."
            )
        if parts.path in ("", "/"):
            url = parts._replace(path="/metrics").geturl()
            self.shown = redact_url(url)
        self._address = WebAddress(url)

    @property
    def rate_seconds(self) -> float:
        """A minute: it is asked each second."""
        return 60.0

    def history(self, now: float) -> Iterable[Scrape]:  # noqa: ARG002  as every feed
        """Return nothing: an endpoint knows the present alone."""
        return ()

    def samples(self, now: float) -> Sequence[Sample]:  # noqa: ARG002  as every feed
        """Scrape it.

        Raises:
            ScrapeError: It does not answer, or not with metrics of ours.
        """
        began = time.monotonic()
        try:
            with self._address.open("", TIMEOUT_SECONDS, Accept=ACCEPT) as response:
                kind = response.headers.get("Content-Type", "")
                page = _read(response, began)
        except urllib.error.HTTPError as error:
            # An error of HTTP is an answer, and is closed as such: it holds a connection.
            error.close()
            raise ScrapeError(f"{self.shown} answers with status {error.code}.") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ScrapeError(
                f"{self.shown} does not answer ({_reason(error)}). "
                "Is OTEL_LIMITS_PROMETHEUS_PORT set there?"
            ) from None
        try:
            samples = tuple(samples_of(page, is_openmetrics="openmetrics" in kind))
        except ValueError as error:
            raise ScrapeError(f"{self.shown} cannot be read: {error}.") from None
        # Somebody else's endpoint answers well, and would be shown as a fleet without agents. Every
        # program of prometheus_client, and Prometheus itself, says when it was started.
        if all(sample.name == PROCESS_START for sample in samples):
            raise ScrapeError(f"{self.shown} answers, but has no metrics of otel-limits.")
        return samples


def _read(response: Any, began: float) -> str:
    """Read a page that has an end, within a time that has one.

    Raises:
        TimeoutError: It comes too slowly.
        ValueError: It is too long.
    """
    page = bytearray()
    while piece := response.read1(2**16):
        page += piece
        if len(page) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES // 2**20} MiB")
        # A timeout bounds each piece alone.
        if time.monotonic() - began > 2 * TIMEOUT_SECONDS:
            raise TimeoutError(f"not complete after {2 * TIMEOUT_SECONDS:g} s")
    return page.decode(errors="replace")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def samples_of(page: str, *, is_openmetrics: bool) -> Iterator[Sample]:
    """Parse what is ours of an exposition, in either of its formats.

    Raises:
        ValueError: It is not one.
    """
    # What is read alone: another library's metrics may break a rule that prometheus_client's parser
    # knows, and it takes 30 microseconds for a line.
    lines = [line for line in page.split("\n") if _is_read(line)]
    parse: Any = openmetrics.text_string_to_metric_families
    text = "\n".join([*lines, "# EOF\n"])
    if not is_openmetrics:
        parse, text = text_string_to_metric_families, "\n".join([*lines, ""])
    try:
        families = list(parse(text))
    # The parsers stumble in many ways over what is not an exposition.
    except Exception as error:  # noqa: BLE001  whatever it is, the page cannot be read
        raise ValueError(f"{error}" or type(error).__name__) from None
    for family in families:
        for name, labels, value, _, exemplar, *_ in family.samples:
            # A NaN, as of a gauge that was never set, would make every sum with it a NaN.
            if math.isfinite(value):
                trace = exemplar.labels.get("trace_id") if exemplar else None
                yield Sample(name, labels, value, trace)


def _is_read(line: str) -> bool:
    if line.startswith(METADATA):
        return line[len(METADATA[0]) :].partition(" ")[0] in FAMILIES
    name = line.replace("{", " ", 1).partition(" ")[0]
    return name in SAMPLES or (name in FAILED and FAILED[name] in line)
