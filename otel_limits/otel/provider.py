"""Attaches a span processor to the tracer providers of a process, or provides one."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import wrapt
from opentelemetry import trace
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    TELEMETRY_SDK_LANGUAGE,
    TELEMETRY_SDK_NAME,
    TELEMETRY_SDK_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.version import __version__ as sdk_version

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


# --- the provider of a process that has none ------------------------------------------------------
# The program can still set its own.

logger = logging.getLogger("otel_limits")

CANNOT_BE_REPLACED: Final = (
    "otel-limits: this release of OpenTelemetry (%s) keeps the tracer provider of otel-limits. If "
    "the program sets its own, set it before the first agent call, or its spans are lost."
)


class FallbackProvider(TracerProvider, trace.ProxyTracerProvider):
    """A provider that the program's own replaces, whenever it is set.

    A program that configures tracing "unless it is configured" checks for OpenTelemetry's proxy, so
    this is one. Another adds a span processor to an SDK provider, so this is one, too: it then
    becomes the program's own, and OpenTelemetry rejects another, as always.
    """

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        """Return a tracer that uses the program's provider as soon as there is one."""
        tracer = super().get_tracer(*args, **kwargs)
        if _LOOKUP.is_active:
            # Of a provider that wraps this one, and hands the request back without end.
            return tracer
        return cast("trace.Tracer", FallbackTracer(tracer, self, args, kwargs))

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        """Add a processor of the program. Our own are added by the method of the base class."""
        super().add_span_processor(span_processor)
        self.make_ordinary()
        if trace.get_tracer_provider() is self:
            # Once more, so that OpenTelemetry rejects another.
            trace.set_tracer_provider(self)

    def make_ordinary(self) -> None:
        """Turn this into a provider that none replaces."""
        self.__class__ = TracerProvider  # type: ignore[assignment]


class FallbackTracer(wrapt.ObjectProxy[Any]):
    """An SDK tracer that starts each span in the provider that is set at that time.

    Frameworks request a tracer once, as does the proxy of OpenTelemetry's API, and keep it.
    """

    # It calls our `start_span`.
    start_as_current_span = Tracer.start_as_current_span

    # Of the API's proxy while there is no provider: LangSmith sets its own if it finds this
    # (`langsmith.Client`, 0.15).
    _tracer: Final = trace.NoOpTracer()

    def __init__(
        self,
        tracer: trace.Tracer,
        provider: trace.TracerProvider,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Wrap `tracer`, which `provider` made from these arguments."""
        super().__init__(tracer)
        self._self_provider = provider
        self._self_tracer = tracer
        self._self_asked_for = args, kwargs

    def __copy__(self) -> FallbackTracer:
        """Return another tracer of the same provider, which has all state."""
        copied = FallbackTracer(self.__wrapped__, self._self_provider, *self._self_asked_for)
        copied._self_tracer = self._self_tracer
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> FallbackTracer:
        """Return a copy. A provider is one for the process, and has locks."""
        return copy.copy(self)

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        """Start a span in the current provider."""
        provider = trace.get_tracer_provider()
        if provider is not self._self_provider:
            self._self_tracer = self._self_tracer_of(provider)
            self._self_provider = provider
        return self._self_tracer.start_span(*args, **kwargs)

    def _self_tracer_of(self, provider: trace.TracerProvider) -> trace.Tracer:
        named, options = self._self_asked_for
        was_active, _LOOKUP.is_active = _LOOKUP.is_active, True
        try:
            return provider.get_tracer(*named, **options)
        finally:
            _LOOKUP.is_active = was_active


class _Lookup(threading.local):
    """Whether this thread requests a tracer from the provider that replaces ours."""

    is_active = False


_LOOKUP = _Lookup()


class _StaysOpenError(Exception):
    """Leaves the lock of the API open: it closes after a function that returns."""


def set_fallback(provider: FallbackProvider) -> None:
    """Set a provider globally, unless the program sets its own before or at the same time."""
    if keep_replaceable(provider):
        set_once = trace._TRACER_PROVIDER_SET_ONCE.do_once  # noqa: SLF001
        set_once(functools.partial(setattr, trace, "_TRACER_PROVIDER", provider))
    else:
        trace.set_tracer_provider(provider)


def keep_replaceable(provider: FallbackProvider) -> bool:
    """Let OpenTelemetry accept another provider after this one, if that is possible.

    Its API accepts the first one, and warns of each further one, whose spans are lost. There is no
    public way to set one that can be replaced.
    """
    try:
        once = trace._TRACER_PROVIDER_SET_ONCE  # noqa: SLF001
        if "do_once" not in vars(once):
            once.do_once = functools.partial(_do_once, once.do_once)  # type: ignore[method-assign]
    except (AttributeError, TypeError) as error:
        logger.warning(CANNOT_BE_REPLACED, error)
        provider.make_ordinary()
        return False
    return True


def _do_once(
    do_once: Callable[[Callable[[], None]], bool], set_provider: Callable[[], None]
) -> bool:
    """Set a provider. The lock stays open while it is a `FallbackProvider`."""

    def set_it() -> None:
        set_provider()
        if isinstance(trace._TRACER_PROVIDER, FallbackProvider):  # noqa: SLF001
            raise _StaysOpenError

    try:
        return do_once(set_it)
    except _StaysOpenError:
        return True


# --- resource of the process ----------------------------------------------------------------------


DEFAULT_RESOURCE: Final = Resource(
    {
        TELEMETRY_SDK_LANGUAGE: "python",
        TELEMETRY_SDK_NAME: "opentelemetry",
        TELEMETRY_SDK_VERSION: sdk_version,
        SERVICE_NAME: "unknown_service",
    }
)
"""Attributes that the SDK adds to any resource."""


def detected_resource() -> Resource:
    """Return the attributes that OpenTelemetry detects, also after the main thread has ended.

    Other threads may continue then, and call their first agent.
    """
    try:
        return Resource.create()
    except RuntimeError:  # it runs its detectors in a pool, which takes no work any longer
        return DEFAULT_RESOURCE.merge(OTELResourceDetector().detect())


@functools.cache
def resource() -> Resource:
    """Return the resource of the process. Its ID becomes Prometheus' label `instance`."""
    described = detected_resource()
    # An instance set in OTEL_RESOURCE_ATTRIBUTES or by a detector takes precedence.
    if SERVICE_INSTANCE_ID in described.attributes:
        return described
    return described.merge(Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())}))


def service_attributes() -> Mapping[str, Any]:
    """Return the resource attributes from the environment and the current provider."""
    provider = current_provider()
    own = {} if provider is None else provider.resource.attributes
    return {**detected_resource().attributes, **own}
