"""Follows an agent's own spans into its run: an ordinary OpenTelemetry span processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import format_span_id

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.faults import note
from otel_limits.core.usage import Usage
from otel_limits.otel import semconv
from otel_limits.runs.calls import FOLLOWED, OpenCall
from otel_limits.runs.run import Run
from otel_limits.runs.tree import CURRENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import MappingProxyType

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

    from otel_limits.bindings.framework import Framework, SpanNames
    from otel_limits.runs.registry import Runs


class LimitsSpanProcessor(SpanProcessor):
    """Turns agent and cycle spans into facts, and the chat spans of other instrumentations.

    It never raises, never blocks and does no I/O. Only the name, the parent and the scope of a
    span are known when Strands starts it: its attributes are set afterwards. A model call of the
    agent loop is booked where its response passes, which every sampler lets us see; its span says
    under which id it can be looked up.
    """

    def __init__(self, runs: Runs, frameworks: Iterable[Framework] = FRAMEWORKS) -> None:
        """Follow spans of these frameworks into `runs`."""
        self._runs = runs
        self._names = {each.spans.scope: each.spans for each in frameworks}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002
        """Note the agent spans that reach us, and which run everything below them belongs to."""
        try:
            name, span_id = span.name, span.context.span_id
            names = self._names_of(span)
            if names is not None and name.startswith(names.agent):
                self._runs.spans.sight(span_id)
            elif span.parent is not None:
                is_call = name.startswith(semconv.MODEL_CALL_PREFIXES)
                run = self._runs.spans.begin(span_id, span.parent.span_id, is_call=is_call)
                if run is not None and names is not None and name == names.cycle:
                    run.cycle()
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            note("processor", error)

    def on_end(self, span: ReadableSpan) -> None:
        """Book a model call that another instrumentation saw."""
        try:
            is_call = span.name.startswith(semconv.MODEL_CALL_PREFIXES)
            if is_call and self._names_of(span) is None:
                self._book(span)
            self._runs.spans.end(span.context.span_id)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            note("processor", error)

    def _names_of(self, span: ReadableSpan) -> SpanNames | None:
        """Return how the framework that made a span names its spans; `None` for any other one."""
        scope = span.instrumentation_scope
        return None if scope is None else self._names.get(scope.name)

    def _book(self, span: ReadableSpan) -> None:
        """Settle such a call, but for one within the span of a model call: it is that same call."""
        run, in_call = self._runs.spans.owner(span.parent.span_id if span.parent else 0)
        if (direct := direct_request()) is not None:
            run, in_call = direct, False  # it has no span of its own that others could hang under
        if run is None or in_call:
            return
        attributes = cast("MappingProxyType[str, Any]", span.attributes).copy()  # faster to read
        usage = usage_of(attributes)
        if usage is None or not usage.total or FOLLOWED.get() in run.calls.under_way:
            return
        call = OpenCall(_model_of(attributes) or "unknown")
        call.span_id = format_span_id(span.context.span_id)
        run.calls.settle(call, usage)


def direct_request() -> Run | None:
    """Return the direct request that the present task works for, if it is one."""
    scope = CURRENT.get()
    is_direct = isinstance(scope, Run) and scope.is_direct and not scope.finished
    return cast("Run", scope) if is_direct else None


def usage_of(attributes: Mapping[str, Any]) -> Usage | None:
    """Read token usage under any of its names; `None` when input or output is not there."""
    input_tokens = _count(attributes, semconv.INPUT_TOKENS)
    output_tokens = _count(attributes, semconv.OUTPUT_TOKENS)
    if input_tokens is None or output_tokens is None:
        return None
    return Usage(
        input=input_tokens,
        output=output_tokens,
        cache_read=_count(attributes, semconv.CACHE_READ_TOKENS) or 0,
        cache_write=_count(attributes, semconv.CACHE_WRITE_TOKENS) or 0,
    )


def _count(attributes: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Number of tokens under the first of `names` that is there."""
    for name in names:
        if name in attributes:
            return token_count(attributes[name])
    return None


def token_count(value: object) -> int | None:
    """Return a number of tokens, or `None` for anything that is none (NaN, negative, text)."""
    if type(value) is int:  # as good as always
        return value if value >= 0 else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


def _model_of(attributes: Mapping[str, Any]) -> str | None:
    model = attributes.get(semconv.REQUEST_MODEL)
    return model if isinstance(model, str) else None
