"""A span processor that assigns spans to invocations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import StatusCode, format_span_id

from otel_limits.core.internal_errors import report_suppressed
from otel_limits.otel import semconv
from otel_limits.otel.kinds import BOUNDARIES, MODEL_CALLS, kind_of, shown_call
from otel_limits.runs.calls import InFlightCall
from otel_limits.runs.current import CURRENT, enclosing_call_of
from otel_limits.runs.run import Run
from otel_limits.runs.spans import UnreportedCall

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import MappingProxyType

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

    from otel_limits.otel.kinds import OperationKind, ShownCall, SpanNames
    from otel_limits.runs.registry import RunRegistry
    from otel_limits.runs.spans import SpanNode


class LimitsSpanProcessor(SpanProcessor):
    """Turns agent spans, cycle spans and model calls of other instrumentations into events.

    It never raises, never blocks and does no I/O. Only the name, the parent and the scope of a
    span are known when Strands starts it: its attributes are set afterwards. A model call of the
    agent loop is counted by its response, independently of sampling; its span adds the ID.
    """

    def __init__(self, runs: RunRegistry, names: Iterable[SpanNames]) -> None:
        """Assign spans with these names, and those below them, to `runs`."""
        self._runs = runs
        self._names = {each.scope: each for each in names}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002
        """Register agent spans, and assign the spans below them to their run."""
        try:
            scope = span.instrumentation_scope
            names = None if scope is None else self._names.get(scope.name)
            if names is None:
                self._begin_third_party(span)
            elif span.name.startswith(names.invocations):
                self._runs.spans.register_span(span.context.span_id)
            else:
                self._begin(span, names)
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("processor", error)

    def on_end(self, span: ReadableSpan) -> None:
        """Count a model call that another instrumentation traced."""
        try:
            # One look-up, as most spans of a process are not tracked.
            node = self._runs.spans.node(span.context.span_id)
            if node is not None and node.is_open:
                is_boundary = (
                    node.is_third_party and self._settle_shown_call(span, node) in BOUNDARIES
                )
                self._runs.spans.end(span.context.span_id, is_boundary=is_boundary)
                if node.run.finished:  # whose limits are no longer checked
                    node.run.calls.unreported.settle()
        except Exception as error:  # noqa: BLE001  the agent must not feel it
            report_suppressed("processor", error)

    def _begin(self, span: Span, names: SpanNames) -> None:
        """Register a framework's span."""
        above = self._runs.spans.node(span.parent.span_id) if span.parent else None
        if above is None or span.parent is None:
            return
        # Inherited, as an instrumentation of the provider's client adds its own span of the same
        # call under the `chat` span: it is one model call, not two.
        in_call = above.in_call or span.name.startswith(semconv.MODEL_CALL_PREFIXES)
        self._runs.spans.begin(
            span.context.span_id,
            above.run,
            parent=span.parent.span_id,
            in_call=in_call,
            is_boundary=not in_call,
        )
        if span.name == names.cycle:
            above.run.cycle()

    def _begin_third_party(self, span: Span) -> None:
        """Register a span of another instrumentation: it belongs to the run of its parent.

        Without a known parent, or below that of an outer run, it belongs to the task's run. So does
        a span within a model call of the task: instrumentations of LangChain choose the parent by
        themselves, and it can be a span of the agent around this one.
        """
        parent = span.parent.span_id if span.parent else 0
        above, owner = self._runs.spans.node(parent), CURRENT.get()
        run = None if above is None else above.run
        if isinstance(owner, Run) and (
            run is None
            or (owner.is_direct and not owner.finished)
            or enclosing_call_of(owner) is not None
        ):
            run = owner
        if run is None or run.released:
            return
        call = enclosing_call_of(run) or (None if above is None else above.call)
        in_call = above is not None and above.in_call and above.run is run
        in_call = in_call or (above is None and self._runs.spans.was_model_call(parent))
        self._runs.spans.begin(
            span.context.span_id,
            run,
            parent=parent,
            in_call=in_call or (call is not None and call.is_of_loop),
            call=call,
            is_third_party=True,
            # If known already: some instrumentations set the kind only at the end.
            is_boundary=kind_of(attributes_of(span), span.name) in BOUNDARIES,
        )

    def _settle_shown_call(self, span: ReadableSpan, node: SpanNode[Run]) -> OperationKind:
        """Settle the model call of a span, once, even if several instrumentations trace it.

        A span within the framework's span of a model call is that same call. Among other nested
        spans, the one that ends first is counted.
        """
        attributes = attributes_of(span)
        kind = kind_of(attributes, span.name)
        if kind in MODEL_CALLS and node.call is not None:
            node.call.is_traced = True
        if kind not in MODEL_CALLS or node.in_call or node.run.released:
            return kind
        scope = "" if span.instrumentation_scope is None else span.instrumentation_scope.name
        events = ((event.name, event.attributes or {}) for event in span.events)
        shown = shown_call(attributes, scope, events, is_error=is_error(span))
        tokens, response, span_id = shown.tokens, shown.response_id, span.context.span_id
        if tokens and not self._runs.spans.claim_call(span_id, response, scope, tokens):
            return kind
        if (tracked := node.call) is not None:
            # It is counted elsewhere, and only completed here if its provider reported no usage.
            if tokens and tracked.is_side and tracked.record.sure == "missing":
                tracked.record = shown.record
                tracked.span_id = tracked.span_id or format_span_id(span_id)
        elif tokens:
            node.run.calls.settle(_call_of(shown, span), shown.record)
        else:
            call = _call_of(shown, span)
            node.unreported = UnreportedCall(
                call, shown.record, node, scope, response, shown.failed
            )
            node.run.calls.unreported.add(node.unreported)
        return kind


def _call_of(shown: ShownCall, span: ReadableSpan) -> InFlightCall:
    """Create the call of an ended span; it is never opened."""
    call = InFlightCall(shown.model, shown.input_estimate, shown.provider)
    call.terms = shown.terms
    call.span_id = format_span_id(span.context.span_id)
    call.answer_estimate = shown.answer_estimate
    call.answered = shown.answered
    return call


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    """Copy the attributes of a span, as the copy is faster to read."""
    return cast("MappingProxyType[str, Any]", span.attributes).copy()


def is_error(span: ReadableSpan) -> bool:
    """Return whether a span has the status ERROR."""
    return span.status.status_code is StatusCode.ERROR
