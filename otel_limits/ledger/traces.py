"""Spans of the files of an import, and which of them are model calls that count."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from otel_limits.ledger.otlp import Span, SpanKey, read_spans
from otel_limits.runs.spans import SeenResponses

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from otel_limits.ledger.documents import JsonDocument
    from otel_limits.otel.kinds import ShownCall

SHOWN_CHARACTERS: Final = 200
LARGE_BYTES: Final = 64 * 1024**2
"""Documents are read as a whole, with some four times their size in memory."""


@dataclass(slots=True)
class Traces:
    """Spans of the files: those that become rows, and the parent of every span."""

    parents: dict[SpanKey, SpanKey | None] = field(default_factory=dict)
    spans: dict[SpanKey, Span] = field(default_factory=dict)
    boundaries: set[SpanKey] = field(default_factory=set)
    """Spans that request model calls, such as a tool's, of any instrumentation."""
    documents: int = 0
    """Documents that were read."""
    bad: list[str] = field(default_factory=list)
    """Parts that could not be read, and why."""

    large: list[str] = field(default_factory=list)
    """The places of large documents."""
    unfinished: int = 0
    """Spans without an end, which are left out."""

    def add(self, document: JsonDocument, keys: Sequence[str], place: str) -> None:
        """Add the spans of a document."""
        try:
            found = read_spans(document, keys)
        except ValueError as error:
            self.bad.append(f"{place}: {str(error)[:SHOWN_CHARACTERS]}")
            return
        self.documents += 1
        if len(document.text) > LARGE_BYTES:
            self.large.append(f"{place} ({len(document.text) / 1024**2:,.0f} MB)")
        self.unfinished += found.unfinished
        for span in found.spans:
            # Of every span: rows may hang under spans that do not become rows.
            self.parents[span.key] = span.parent
            if span.is_boundary:
                self.boundaries.add(span.key)
            if span.is_agent or span.call is not None or span.is_tool or span.is_use:
                self.spans[span.key] = _widened(span, self.spans.get(span.key))

    def times(self) -> dict[SpanKey, int]:
        """Return start times of invocations and end times of model calls, as in a ledger."""
        return {
            key: span.start_us if span.is_agent else span.end_us
            for key, span in self.spans.items()
            if span.is_agent or span.call is not None
        }

    def above(self, span: Span) -> Iterator[Span]:
        """Iterate over the spans above one that become rows, the nearest first."""
        return (self.spans[key] for key in self.keys_above(span.key) if key in self.spans)

    def keys_above(self, of: SpanKey) -> Collection[SpanKey]:
        """Return the spans above one as far as they are known, the nearest first."""
        above: dict[SpanKey, None] = {}
        key = self.parents.get(of)
        # Files may be broken: a span that is its own ancestor must not loop forever.
        while key is not None and key not in above and key != of:
            above[key] = None
            key = self.parents.get(key)
        # In a ring each call would be within another, and none would count.
        return () if key == of else above

    def _calls_around(self, span: Span) -> Iterator[Span]:
        """Iterate over the enclosing spans of the same model call: up to a tool or an agent."""
        for key in self.keys_above(span.key):
            if key in self.boundaries:
                return
            if key in self.spans and self.spans[key].call is not None:
                yield self.spans[key]

    def calls(self) -> Iterator[tuple[Span, ShownCall, list[Span]]]:
        """Iterate over every model call that counts, with the invocations that contain it.

        Of nested calls the outer one counts, unless only the inner one has its tokens. Live, the
        inner one counts: it ends first, and limits cannot wait for the outer one.
        """
        within: dict[SpanKey, list[Span]] = {}
        candidates = []
        for span in self.spans.values():
            if span.call is not None:
                around = list(self._calls_around(span))
                for each in around:
                    within.setdefault(each.key, []).append(span)
                # The outermost with tokens: a framework's instrumentation sees the whole call, a
                # client's only a part of it.
                calls = [each for each in around if not each.is_possible_call]
                if not any(each.tokens for each in calls) and (span.tokens or not around):
                    candidates.append((span, span.call))
        # Spans with tokens take precedence.
        candidates.sort(key=lambda each: each[1].tokens, reverse=True)
        shown: dict[str, SeenResponses] = {}
        elsewhere: dict[tuple[Any, ...], list[Span]] = {}
        for span, call in candidates:
            inner = within.get(span.key, [])
            is_weaker = not call.tokens or span.is_possible_call
            has_inner_tokens = is_weaker and any(each.tokens for each in inner)
            responses = shown.setdefault(span.trace_id, SeenResponses())
            if has_inner_tokens or not _is_new([span, *inner], responses):
                continue
            if not _is_in_another_trace(span, call, elsewhere):
                yield span, call, [each for each in self.above(span) if each.is_agent]


def _widened(span: Span, known: Span | None) -> Span:
    """Return a span with the time of an earlier part: each call of a session shows the session."""
    if known is None:
        return span
    start, end = min(span.start_us, known.start_us), max(span.end_us, known.end_us)
    return replace(span, start_us=start, end_us=end)


def _is_new(spans: Sequence[Span], responses: SeenResponses) -> bool:
    """Return whether no other span has shown this call, by its response ID."""
    shown = [
        (each.call.response_id, each.scope, each.tokens)
        for each in spans
        if each.call is not None and each.call.response_id is not None
    ]
    # All are checked before any is added: the spans of one call may share an ID.
    is_known = any(responses.has(*each) for each in shown)
    for each in shown:
        responses.add(*each)
    return not is_known


def _is_in_another_trace(
    span: Span, call: ShownCall, shown: dict[tuple[Any, ...], list[Span]]
) -> bool:
    """Return whether a span of another trace has shown this call, and add the span to `shown`.

    A client and a gateway that are not connected by a trace show one response during the same time.
    """
    if call.response_id is None:
        return False
    others = shown.setdefault((call.response_id, call.model, call.tokens), [])
    others.append(span)
    return any(
        each.trace_id != span.trace_id
        and each.start_us <= span.end_us
        and span.start_us <= each.end_us
        for each in others
    )
