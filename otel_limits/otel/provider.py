"""Attaches a span processor to existing and later tracer providers."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

WRAPPERS: Final = 5
"""Most nested wrappers of a provider: one that wraps itself must not hang us."""


class ProcessorInstaller:
    """Adds one processor to every SDK provider of the process.

    A provider created later (`StrandsTelemetry()`, Logfire, Phoenix) gets it first, before all
    other processors. The SDK has no hook for that, hence the wrapped `__init__`.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        """Create an installer that is not attached."""
        self._processor = processor
        self._providers: weakref.WeakSet[TracerProvider] = weakref.WeakSet()
        self._original_init: Any = None

    def attach(self) -> None:
        """Attach to the current provider, and to all later ones."""
        current = current_provider()
        if current is not None:
            self._add(current)
        if self._original_init is None:
            self._watch()

    def detach(self) -> None:
        """Undo `attach` completely."""
        if self._original_init is not None:
            TracerProvider.__init__ = self._original_init  # type: ignore[method-assign]
            self._original_init = None
        for provider in list(self._providers):
            self._remove(provider)
        self._providers.clear()

    def _add(self, provider: TracerProvider) -> None:
        if provider not in self._providers:
            # Noted first: if adding fails half-way, it is not repeated.
            self._providers.add(provider)
            # Unbound, because a subclass may do more than add: Phoenix' own drops its exporter.
            TracerProvider.add_span_processor(provider, self._processor)

    def _remove(self, provider: TracerProvider) -> None:
        # The SDK's public API only adds processors. It reads this tuple without the lock, so it is
        # replaced as a whole, as in the SDK itself.
        every = provider._active_span_processor  # noqa: SLF001
        with every._lock:  # noqa: SLF001
            kept = [each for each in every._span_processors if each is not self._processor]  # noqa: SLF001
            every._span_processors = tuple(kept)  # noqa: SLF001

    def _watch(self) -> None:
        original = self._original_init = TracerProvider.__init__

        @functools.wraps(original)
        def init(provider: TracerProvider, *args: Any, **kwargs: Any) -> None:
            # The original first: it creates the list of processors.
            original(provider, *args, **kwargs)
            self._add(provider)

        TracerProvider.__init__ = init  # type: ignore[assignment, method-assign]


def current_provider() -> TracerProvider | None:
    """Return the current SDK provider, if one is set."""
    # The public API would load the one in OTEL_PYTHON_TRACER_PROVIDER, and set it before the
    # program can set another.
    return sdk_provider(trace._TRACER_PROVIDER)  # noqa: SLF001


def sdk_provider(provider: object) -> TracerProvider | None:
    """Return the SDK provider itself or within a wrapper.

    Logfire sets a proxy as the global provider, with the SDK's in its attribute `provider`
    (`logfire.configure`, 5.2); wrappers of other products use the same name.
    """
    for _ in range(WRAPPERS):
        if isinstance(provider, TracerProvider):
            return provider
        provider = getattr(provider, "provider", None)
    return None
