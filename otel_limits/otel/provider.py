"""Tracer providers: the one that exists, those that come later, and one where there is none."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

WRAPPERS: Final = 5
"""How many providers may stand around each other: one that names itself must not hang us."""


class ProcessorInstaller:
    """Puts one processor into every SDK provider of the process, once each.

    A provider that is made later (`StrandsTelemetry()`, Logfire, Phoenix) gets it at birth, ahead
    of every other processor. The SDK has no hook for that, hence the wrapped `__init__`.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        """Attach nothing yet."""
        self._processor = processor
        self._providers: weakref.WeakSet[TracerProvider] = weakref.WeakSet()
        self._original_init: Any = None

    def attach(self) -> None:
        """Attach to the provider that is set, and to all that are made from now on."""
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
            # Noted first: should adding fail half-way, it is not added a second time.
            self._providers.add(provider)
            # Unbound, because a subclass may do more than add: Phoenix' own drops its exporter.
            TracerProvider.add_span_processor(provider, self._processor)

    def _remove(self, provider: TracerProvider) -> None:
        # In public the SDK only adds processors. It reads this tuple without the lock, so that it
        # is replaced as a whole, as the SDK does itself.
        every = provider._active_span_processor  # noqa: SLF001
        with every._lock:  # noqa: SLF001
            kept = [each for each in every._span_processors if each is not self._processor]  # noqa: SLF001
            every._span_processors = tuple(kept)  # noqa: SLF001

    def _watch(self) -> None:
        original = self._original_init = TracerProvider.__init__

        @functools.wraps(original)
        def init(provider: TracerProvider, *args: Any, **kwargs: Any) -> None:
            # The provider's own first: before it there is no list of processors to add to.
            original(provider, *args, **kwargs)
            self._add(provider)

        TracerProvider.__init__ = init  # type: ignore[assignment, method-assign]


def current_provider() -> TracerProvider | None:
    """Return the SDK's provider that is set, if one is."""
    # Asking in public would load the one that OTEL_PYTHON_TRACER_PROVIDER names, and set it before
    # the program has had its say.
    return sdk_provider(trace._TRACER_PROVIDER)  # noqa: SLF001


def sdk_provider(provider: object) -> TracerProvider | None:
    """Return the SDK's provider that makes the spans of another one, which may stand around it.

    Logfire sets a proxy as the global provider, and has the SDK's own in its attribute `provider`
    (`logfire.configure`, 5.2); wrappers of other products name it the same.
    """
    for _ in range(WRAPPERS):
        if isinstance(provider, TracerProvider):
            return provider
        provider = getattr(provider, "provider", None)
    return None
