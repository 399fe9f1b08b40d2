"""Connects the invocations of a process to observers, prices, a tool log, a ledger and quotas.

A new observer is one line in `OBSERVERS`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_limits.core.internal_errors import suppress_errors
from otel_limits.core.price_lookup import Prices
from otel_limits.core.secrets import redact_value
from otel_limits.core.version import own_version
from otel_limits.observers.log import FirstCalls, LogObserver
from otel_limits.observers.protocol import LazyObserver
from otel_limits.quotas.stores import is_shared
from otel_limits.settings.policy.document import NO_DOCUMENT, Document
from otel_limits.settings.table import Settings
from otel_limits.settings.variables import otlp_protocol, otlp_timeout_seconds

if TYPE_CHECKING:
    from opentelemetry._logs import LoggerProvider
    from opentelemetry.metrics import Meter

    from otel_limits.core.events import Enforcing, Observer
    from otel_limits.core.labels import Names
    from otel_limits.ledger.address import Address
    from otel_limits.ledger.quota_usage import ChargedCall, QuotaReset
    from otel_limits.observers.counting import Service
    from otel_limits.observers.ledger import LedgerObserver
    from otel_limits.observers.otlp_observer import EventObserver, OtlpObserver
    from otel_limits.observers.prometheus import PrometheusObserver
    from otel_limits.observers.protocol import BaseObserver
    from otel_limits.observers.toollog import ToolLog
    from otel_limits.otel.export import OwnMeters
    from otel_limits.otel.provider import FallbackProvider
    from otel_limits.quotas.quota import Quota
    from otel_limits.quotas.setup import Quotas
    from otel_limits.runs.registry import RunRegistry

    Named: TypeAlias = Callable[[], Names]
    """Returns the names in the policy file, which always have their own label value."""

logger = logging.getLogger("otel_limits")

PORT_IS_TAKEN: Final = (
    "If several processes of an application share this port, set PROMETHEUS_MULTIPROC_DIR; "
    "otherwise choose a free port (--prometheus-port, OTEL_LIMITS_PROMETHEUS_PORT)."
)
"""Workers first: separate ports for them are seldom intended."""

NO_SUCH_ADDRESS: Final = (
    "Set OTEL_LIMITS_PROMETHEUS_HOST to an address of this machine, and "
    "OTEL_LIMITS_PROMETHEUS_PORT to a port that this user may bind."
)

ALREADY_REGISTERED: Final = (
    "otel-limits does not emit the metrics of OTEL_LIMITS_GENAI_METRICS (%s): another "
    "instrumentation has registered them in prometheus_client. Disable one of the two."
)


# --- missing OpenTelemetry providers --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OtlpProviders:
    """Providers for metrics and events; `None` for the global one of the process.

    Not set globally, because the program may set a global provider later.
    """

    meter: OwnMeters | None = None
    logger: LoggerProvider | None = None


def make_otlp_providers() -> OtlpProviders:
    """Create providers for the signals to export that have no provider yet."""
    from otel_limits.otel import export

    timeout = otlp_timeout_seconds()
    return OtlpProviders(
        meter=export.meter_provider(otlp_protocol(signal="metrics"), timeout),
        logger=export.logger_provider(otlp_protocol(signal="logs"), timeout),
    )


def make_tracer_provider() -> FallbackProvider:
    """Create a tracer provider, with an OTLP exporter if requested."""
    from otel_limits.otel import export

    return export.tracer_provider(otlp_protocol(), otlp_timeout_seconds())


# --- the observers that a process can have --------------------------------------------------------


def own_service() -> Service:
    """Return the service of this process, as far as configured."""
    from otel_limits.observers.counting import service_of
    from otel_limits.otel.provider import service_attributes

    return service_of(service_attributes())


def _make_prometheus(
    settings: Settings, _: OtlpProviders, named: Named
) -> PrometheusObserver | None:
    from otel_limits.observers.prometheus import PrometheusObserver

    make = functools.partial(
        PrometheusObserver,
        max_agents=settings.metrics_max_agents,
        named=named,
        created=settings.metrics_created,
    )
    try:
        try:
            observer = make(conventions=settings.genai_metrics)
        except ValueError as error:
            if not settings.genai_metrics:
                raise
            logger.error(ALREADY_REGISTERED, error)  # noqa: TRY400  no traceback needed
            observer = make()
        observer.info(own_version(), own_service())
    except (OSError, ValueError) as error:  # enforcement does not depend on metrics
        logger.error(  # noqa: TRY400  no traceback needed
            "otel-limits cannot use prometheus_client (%s); limits are still enforced. "
            "Check PROMETHEUS_MULTIPROC_DIR and the names in the default registry.",
            error,
        )
        return None
    return observer


def _make_otlp(settings: Settings, providers: OtlpProviders, named: Named) -> OtlpObserver:
    """Create the observer for OTLP metrics."""
    from otel_limits.observers.otlp_observer import OtlpObserver
    from otel_limits.otel.export import flush_metrics

    own = providers.meter
    observer = OtlpObserver(
        _meter(own),
        settings.metrics_max_agents,
        named,
        conventions=settings.genai_metrics,
        flush=functools.partial(flush_metrics, own),
        # The application resets its own provider.
        meter_of_child=None if own is None else functools.partial(_meter_of_child, own),
    )
    observer.info(own_version(), own_service())
    return observer


def _meter(own: OwnMeters | None) -> Meter:
    from opentelemetry.metrics import get_meter

    return get_meter("otel_limits", own_version(), own)


def _meter_of_child(own: OwnMeters) -> Meter:
    own.reset_after_fork()
    return _meter(own)


def _make_events(_: Settings, providers: OtlpProviders, __: Named) -> EventObserver:
    from opentelemetry._logs import get_logger  # the only public API, despite its name

    from otel_limits.observers.otlp_observer import EventObserver

    return EventObserver(get_logger("otel_limits", own_version(), providers.logger))


def _make_ledger(settings: Settings, _: OtlpProviders, __: Named) -> LedgerObserver:
    from otel_limits.observers.ledger import LedgerObserver

    assert settings.ledger is not None
    address = replace(settings.ledger, group=settings.ledger_group)
    return LedgerObserver(address, settings.ledger_sync, settings.ledger_retention)


@dataclass(frozen=True, slots=True)
class ObserverEntry:
    """An observer that the settings enable."""

    name: str
    make: Callable[[Settings, OtlpProviders, Named], Any]
    settings: Sequence[str] = ()
    """The settings it is made of: it is kept while they are equal."""
    uses_providers: bool = False
    """Whether it is made of the providers, too."""
    is_wanted: Callable[[Settings], bool] = lambda _: True
    is_lazy: bool = True
    """Created with its first event, because most imports take longer than `enable()`."""
    is_last: bool = False
    """Called after the application's observers, because it may wait for a disk."""


OBSERVERS: Final = (
    ObserverEntry("log", lambda *_: LogObserver(), is_lazy=False),
    ObserverEntry(
        "first_calls",
        lambda settings, *_: FirstCalls(quiet=settings.quiet),
        ("quiet",),
        is_lazy=False,
    ),
    ObserverEntry(
        "prometheus",
        _make_prometheus,
        ("genai_metrics", "metrics_created"),
        is_wanted=lambda settings: "prometheus" in settings.metrics,
    ),
    ObserverEntry(
        "otlp",
        _make_otlp,
        ("genai_metrics",),
        uses_providers=True,
        is_wanted=lambda settings: "otlp" in settings.metrics,
    ),
    ObserverEntry("events", _make_events, uses_providers=True),
    ObserverEntry(
        "ledger",
        _make_ledger,
        ("ledger", "ledger_sync", "ledger_group", "ledger_retention"),
        is_wanted=lambda settings: settings.ledger is not None,
        is_lazy=False,  # it opens nothing before its first event
        is_last=True,
    ),
)
"""In the order in which they receive an event."""


# --- connections of a process ---------------------------------------------------------------------


class Wiring:
    """Connects the invocations of a process according to its settings.

    Callers hold the lock of the runtime, except for `use_document`, which every invocation calls.
    """

    def __init__(self, runs: RunRegistry) -> None:
        """Start without connections."""
        self.providers = OtlpProviders()
        """The providers that new observers use."""
        self._runs = runs
        self._settings = Settings()
        self._document = NO_DOCUMENT
        self._prices: tuple[Document, Prices] | None = None
        self._open: dict[str, tuple[object, BaseObserver | LazyObserver[Any]]] = {}
        """The open observers of the table, each with the values it depends on."""
        self._quotas: Quotas | None = None

    def connect(
        self, settings: Settings, application: Sequence[Observer], document: Document
    ) -> None:
        """Connect the observers of `settings` and `application`, and disconnect all others."""
        self._settings = settings
        self._document = document
        for entry in OBSERVERS:
            self._open_or_close(entry)
        self._runs.observers.set_observers(
            (
                *self._open_observers(is_last=False),
                *application,
                *self._open_observers(is_last=True),
            )
        )
        self._runs.audit_keys = settings.audit_keys
        self._runs.keeps_fingerprints = settings.ledger is not None
        self._runs.prices = self._prices_of(document)
        self._runs.tool_log = _make_tool_log(settings)

    def disconnect(self) -> None:
        """Close everything."""
        self._runs.observers.set_observers(())
        self._runs.audit_keys = ()
        self._runs.keeps_fingerprints = False
        self._runs.prices = self._runs.tool_log = None
        for name in reversed(list(self._open)):
            self._close(name)
        self.release_quotas()

    def after_fork(self) -> None:
        """Reset inherited state after a fork."""
        for _, observer in self._open.values():
            observer.after_fork()
        if self._quotas is not None:
            self._quotas.after_fork()

    def import_packages(self) -> None:
        """Import in this thread what the first call needs, of the price list and the ledger."""
        self._prices_of(self._document).import_package()
        if (ledger := self.opened("ledger")) is not None:
            with contextlib.suppress(Exception):  # its first event reports it
                ledger.import_packages()

    # --- observers --------------------------------------------------------------------------------

    def flushes(self) -> list[Callable[[], object]]:
        """Return functions that flush all observers.

        Without the lock, because a signal handler may have interrupted the thread that holds it.
        """
        return [observer.flush for _, observer in list(self._open.values())]

    def unscraped(self) -> tuple[str, int] | None:
        """Return host and port of a never scraped endpoint, if it is the only exporter."""
        metrics = self.opened("prometheus")
        if metrics is None or metrics.made is None or "otlp" in self._settings.metrics:
            return None
        return metrics.made.unscraped  # type: ignore[no-any-return]

    def opened(self, name: str) -> Any:
        """Return the open observer of this name, or `None`."""
        return self._open.get(name, (None, None))[1]

    def _open_or_close(self, entry: ObserverEntry) -> None:
        providers = self.providers if entry.uses_providers else None
        made_of = (providers, *(getattr(self._settings, name) for name in entry.settings))
        is_wanted = entry.is_wanted(self._settings)
        if entry.name in self._open:
            # Kept, because counters that restart at 0 look like a restart of the process.
            if is_wanted and self._open[entry.name][0] == made_of:
                return
            self._close(entry.name)
        if is_wanted:
            # A lazy observer uses the settings of this moment, but the names of the policy file
            # that applies when it is created.
            make = functools.partial(
                entry.make, self._settings, self.providers, lambda: self._document.names
            )
            lazy = functools.partial(LazyObserver, entry.name, make, self._runs.observers.replace)
            self._open[entry.name] = made_of, lazy() if entry.is_lazy else make()

    def _close(self, name: str) -> None:
        _, observer = self._open.pop(name)
        observer.close()

    def _open_observers(self, *, is_last: bool) -> Iterable[Observer]:
        """Return the open observers that are called first or last, without their lazy wrappers."""
        for entry in OBSERVERS:
            observer = self.opened(entry.name)
            if observer is not None and entry.is_last is is_last:
                yield (entry.is_lazy and observer.made) or observer

    def export(self, state: Enforcing) -> None:
        """Export the state of enforcement through prometheus_client, whose import calls this."""
        metrics = self.opened("prometheus")
        observer = None if metrics is None else metrics.make_if_free()
        if observer is not None:
            observer(state)

    @suppress_errors("prometheus")
    def serve(self) -> None:
        """Start or stop serving /metrics according to the settings."""
        metrics = self.opened("prometheus")
        if metrics is None:
            return
        port, host = self._settings.prometheus_port, self._settings.prometheus_host
        # Created now if it is served, so that a scrape before the first agent call finds zeros.
        observer = metrics.made if port is None else metrics.make()
        if observer is None:
            return
        if port is None:
            observer.stop_serving()
            return
        try:
            observer.serve(port, host)
        except (OSError, UnicodeError) as error:  # taken, or not an address at all
            self._report_unserved(error, host, port)

    def _report_unserved(self, error: OSError | UnicodeError, host: str, port: int) -> None:
        is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
        logger.error(
            "otel-limits cannot serve /metrics on %s port %d (%s); limits are still enforced. %s",
            redact_value(host),
            port,
            getattr(error, "strerror", None) or error,
            PORT_IS_TAKEN if is_taken else NO_SUCH_ADDRESS,
        )
        self._runs.observers.publish_internal_error("prometheus")

    # --- prices -----------------------------------------------------------------------------------

    @suppress_errors("prices")
    def use_document(self, document: Document) -> None:
        """Use the prices and quotas of the current policy file."""
        self._document = document
        self._runs.prices = self._prices_of(document)

    def load_prices(self) -> None:
        """Load the price list before the first model call needs it."""
        self._prices_of(self._document).load()

    def _prices_of(self, document: Document) -> Prices:
        # By identity, which is fast and sufficient: a document never changes.
        if self._prices is None or self._prices[0] is not document:
            self._prices = (document, Prices(document.price_list()))
        return self._prices[1]

    # --- quotas -----------------------------------------------------------------------------------

    @property
    def has_quotas(self) -> bool:
        """True while quotas apply to model calls."""
        return self._quotas is not None

    def hold_quotas(self) -> None:
        """Apply quotas to model calls, and receive kills through a shared store."""
        settings = self._settings
        asked = (settings.quota_store, settings.quota_store_timeout, settings.quota_namespace)
        if self._quotas is not None and self._quotas.asked == asked:
            return
        self.release_quotas()
        # Without quotas, a shared store is still used to receive kills.
        if is_shared(settings.quota_store) or self._document.quotas:
            # Imported here, because most processes don't use quotas.
            from otel_limits.quotas.setup import Quotas
            from otel_limits.quotas.store import StorePlace

            place = StorePlace(*asked)
            records = LedgerRecords(lambda: self._settings.ledger)
            self._quotas = Quotas(place, self._current_quotas, self._runs, records)

    def release_quotas(self) -> None:
        """Stop applying quotas."""
        quotas, self._quotas = self._quotas, None
        if quotas is not None:
            quotas.close()

    def _current_quotas(self) -> Sequence[Quota]:
        return [entry.value for entry in self._document.quotas.values()]


def _make_tool_log(settings: Settings) -> ToolLog | None:
    """Create the tool log if it is enabled."""
    if settings.tool_log_dir is None:
        return None
    from pathlib import Path

    from otel_limits.observers.toollog import ToolLog

    return ToolLog(Path(settings.tool_log_dir), settings.tool_log_interval)


# --- the ledger, as quotas read it ----------------------------------------------------------------


class LedgerRecords:
    """Calls and operators' changes in a ledger; empty without one.

    Args:
        address: Returns the address of the current ledger.
    """

    def __init__(self, address: Callable[[], Address | None]) -> None:
        """Open nothing yet."""
        self._address = address

    @property
    def source(self) -> str:
        """The name of the ledger; files of several hosts are different ledgers."""
        address = self._address()
        if address is None:
            return ""
        return address.name if address.file is None else f"{socket.gethostname()}:{address.name}"

    def charges_of(self, operations: Sequence[str]) -> Iterable[tuple[str, str]]:
        """Return those of `operations` that are recorded, with their charges."""
        address = self._address()
        if address is None:
            return ()
        # Imported here, because most processes never query their ledger.
        from otel_limits.ledger.quota_usage import charges_in

        return charges_in(address, operations)

    def charges_between(self, since: float, until: float) -> Iterable[ChargedCall]:
        """Iterate over the charges of calls between two times.

        Raises:
            LedgerError: The ledger is not readable.
        """
        address = self._address()
        if address is None:
            return ()
        from otel_limits.ledger.quota_usage import charges_between

        return charges_between(address, since, until)

    def resets_since(self, since: float) -> Sequence[QuotaReset]:
        """Return the resets of quota keys since a time.

        Raises:
            LedgerError: The ledger is not readable.
        """
        address = self._address()
        if address is None:
            return ()
        from otel_limits.ledger.quota_usage import resets_since

        return resets_since(address, since)
