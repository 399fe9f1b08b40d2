"""Tracer providers: the one that exists, those that come later, and one where there is none."""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("otel_limits")


class Attachment:
    """Puts one processor into every SDK provider of the process, once each.

    A provider that is made later (`StrandsTelemetry()`, Logfire, Phoenix) gets it at birth, ahead
    of every other processor. The unbound base method is used because a subclass may do more than
    add: Phoenix' own drops its exporter.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        """Attach nothing yet."""
        self._processor = processor
        self._providers: weakref.WeakSet[TracerProvider] = weakref.WeakSet()
        self._original_init: Any = None

    def attach(self) -> None:
        """Attach to the provider that is set, and to all that are made from now on."""
        current = trace.get_tracer_provider() if trace._TRACER_PROVIDER is not None else None  # noqa: SLF001  asking would create one
        if isinstance(current, TracerProvider):
            self._add(current)
        if self._original_init is None:
            self._watch()

    def detach(self) -> None:
        """Undo `attach` completely."""
        if self._original_init is not None:
            TracerProvider.__init__ = self._original_init  # type: ignore[method-assign]
            self._original_init = None
        for provider in list(self._providers):
            multi = provider._active_span_processor  # noqa: SLF001  there is no public removal
            with multi._lock:  # noqa: SLF001
                multi._span_processors = tuple(  # noqa: SLF001
                    each
                    for each in multi._span_processors  # noqa: SLF001
                    if each is not self._processor
                )
        self._providers.clear()

    def _add(self, provider: TracerProvider) -> None:
        if provider not in self._providers:
            self._providers.add(provider)
            TracerProvider.add_span_processor(provider, self._processor)

    def _watch(self) -> None:
        original = self._original_init = TracerProvider.__init__

        @functools.wraps(original)
        def init(provider: TracerProvider, *args: Any, **kwargs: Any) -> None:
            original(provider, *args, **kwargs)
            self._add(provider)

        TracerProvider.__init__ = init  # type: ignore[assignment, method-assign]


def make_provider(otlp_protocol: str | None) -> TracerProvider:
    """Make a tracer provider, one that exports when an OTLP protocol is given."""
    provider = TracerProvider()
    exporter = otlp_exporter(otlp_protocol) if otlp_protocol else None
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def otlp_exporter(protocol: str) -> SpanExporter | None:
    """Make the exporter for `grpc` or `http/protobuf`; it reads OTEL_EXPORTER_OTLP_* itself."""
    transport = "grpc" if protocol == "grpc" else "http"
    module = f"opentelemetry.exporter.otlp.proto.{transport}.trace_exporter"
    try:
        exporter: SpanExporter = importlib.import_module(module).OTLPSpanExporter()
    except ImportError:
        logger.error(  # noqa: TRY400  the traceback would not help
            "otel-limits: OTEL_EXPORTER_OTLP_* is set but no OTLP exporter is installed, so no "
            "spans are exported. Run: pip install 'otel-limits[otlp]'"
        )
        return None
    except Exception:
        logger.exception("otel-limits cannot make the OTLP exporter, so no spans are exported.")
        return None
    return exporter
