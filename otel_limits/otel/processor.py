"""Follows an agent's own spans into its run: an ordinary OpenTelemetry span processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import format_span_id

from otel_limits.bindings.known import FRAMEWORKS
from otel_limits.core.faults import note
from otel_limits.core.terms import Terms
from otel_limits.otel import semconv
from otel_limits.otel.kinds import (
    RESPONSE_IDS,
    first_text,
    kind_of,
    model_of,
    provider_of,
    tier_of,
)
from otel_limits.runs.calls import OpenCall, followed_call
from otel_limits.runs.run import Run
from otel_limits.runs.tree import CURRENT
from otel_limits.usage.normaliser import record_of_span

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import MappingProxyType

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

    from otel_limits.bindings.framework import Framework, SpanNames
    from otel_limits.core.usage import UsageRecord
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
            # Most spans of a process are none of ours: one look-up by the parent's id tells.
            elif span.parent is not None:
                # Those of others may have a span within them that says more, and ends first.
                is_call = names is not None and name.startswith(semconv.MODEL_CALL_PREFIXES)
                run = self._runs.spans.begin(span_id, span.parent.span_id, is_call=is_call)
                if run is not None and names is not None and name == names.cycle:
                    run.cycle()
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            note("processor", error)

    def on_end(self, span: ReadableSpan) -> None:
        """Book a model call that another instrumentation saw."""
        try:
            # Most spans of a process hang under none of ours: one look-up tells.
            if self._names_of(span) is None and self._is_ours(span):
                self._book(span)
            self._runs.spans.end(span.context.span_id)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            note("processor", error)

    def _names_of(self, span: ReadableSpan) -> SpanNames | None:
        """Return how the framework that made a span names its spans; `None` for any other one."""
        scope = span.instrumentation_scope
        return None if scope is None else self._names.get(scope.name)

    def _is_ours(self, span: ReadableSpan) -> bool:
        """Tell whether a span hangs under one of a live run, or may be of a direct request."""
        parent = span.parent.span_id if span.parent else 0
        return self._runs.spans.owner(parent)[0] is not None or direct_request() is not None

    def _book(self, span: ReadableSpan) -> None:
        """Settle a model call, once, whatever instrumentations made spans of it.

        One within the span of a model call of the framework is that same call. Of two of others
        the one that ends first is booked, which is within the other one.
        """
        run, in_call = self._runs.spans.owner(span.parent.span_id if span.parent else 0)
        if (direct := direct_request()) is not None:
            run, in_call = direct, False  # it has no span of its own that others could hang under
        if run is None or in_call:
            return
        attributes = cast("MappingProxyType[str, Any]", span.attributes).copy()  # faster to read
        if kind_of(attributes, span.name) != "model call":
            return
        record = record_of_span(attributes, scope_of(span))
        response = first_text(attributes, RESPONSE_IDS)
        if not record.usage.total or not self._runs.spans.book(run, span.context.span_id, response):
            return
        followed = followed_call(run)
        if followed is not None:
            _complete(followed, record, span)
            return
        # Never opened: when its span is seen the call is over, so that it is only counted.
        call = OpenCall(model_of(attributes), provider=provider_of(attributes))
        call.terms = Terms(tier=tier_of(attributes, record.tier))
        call.span_id = format_span_id(span.context.span_id)
        run.calls.settle(call, record)


def _complete(call: OpenCall, record: UsageRecord, span: ReadableSpan) -> None:
    """Let the span of an instrumented client say what a way of its own to the provider did not."""
    if call.is_side and call.record.sure == "missing":
        call.record = record
        call.span_id = call.span_id or format_span_id(span.context.span_id)


def direct_request() -> Run | None:
    """Return the direct request that the present task works for, if it is one."""
    scope = CURRENT.get()
    is_direct = isinstance(scope, Run) and scope.is_direct and not scope.finished
    return cast("Run", scope) if is_direct else None


def scope_of(span: ReadableSpan) -> str:
    """Return the name of the instrumentation that made a span."""
    return "" if span.instrumentation_scope is None else span.instrumentation_scope.name
