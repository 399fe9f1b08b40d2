"""Calls that the ledger has from another source: an agent, a log, or spans.

A log has no ID that an agent or a span records. A call is the same if model and tokens are equal
and their times overlap; each recorded call matches at most one logged call. An agent's call at the
address of a vendor did not go through LiteLLM, as `audit reconcile --bill` sees it, too.
Spans of Claude Code have the IDs of its log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from otel_limits.core.terms import billable_call_in_ledger
from otel_limits.core.usage import NO_USAGE
from otel_limits.ledger.coding_agents import CLAUDE_CODE, key_in_log
from otel_limits.ledger.litellm_logs import LITELLM
from otel_limits.ledger.rows import SAME_CALL_MICROSECONDS, portions
from otel_limits.ledger.schema import CALLS, IS_IMPORTED
from otel_limits.otel.kinds import CLAUDE_CODE as SPANS_OF_CLAUDE_CODE

if TYPE_CHECKING:
    from otel_limits.ledger.coding_agents import CallInLog
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.otlp import Span, SpanKey

GATEWAY_NAMES: Final = frozenset({LITELLM, "litellm_proxy"})
CLOCKS_MICROSECONDS: Final = 1_000_000
"""Clocks of two machines may differ by this much."""

PORTION: Final = 2_000
"""Traces in a statement: SQLite allows 32,766 parameters, PostgreSQL 65,535."""

Recorded = tuple[int, int, str, str, str | None]
"""A recorded call: its end, its start, its model, the program of its log, if it is of one, and the
inputs of its price."""


def recorded_elsewhere(database: Database, spans: Collection[Span]) -> set[SpanKey]:
    """Return the keys of calls that the ledger has from another source, and of their sessions.

    A session is one of them if all its calls are.
    """
    return _of_logs(database, spans) | _of_spans(database, spans)


def _of_logs(database: Database, spans: Collection[Span]) -> set[SpanKey]:
    """Return the keys of calls of a log that agents recorded, or that spans or other logs have."""
    logged = sorted(
        ((span, span.logged) for span in spans if span.logged is not None),
        key=lambda each: each[0].end_us,
    )
    if not logged:
        return set()
    wanted = {call.tokens for _, call in logged}
    recorded: dict[tuple[int, int], list[Recorded]] = {}
    since_us = min(span.start_us for span, _ in logged) - CLOCKS_MICROSECONDS
    with database.reading() as connection:
        for tokens, each in _calls(connection, since_us, logged[-1][0].end_us):
            if tokens in wanted:
                recorded.setdefault(tokens, []).append(each)
    found: set[SpanKey] = set()
    for span, call in logged:
        candidates = recorded.get(call.tokens, [])
        place = _same(span, call, candidates)
        if place is not None:
            del candidates[place]
            found.add(span.key)
    others = {span.parent for span, _ in logged if span.key not in found}
    return found | {span.parent for span, _ in logged if span.parent and span.parent not in others}


def _calls(
    connection: sa.Connection, since_us: int, until_us: int
) -> Iterator[tuple[tuple[int, int], Recorded]]:
    """Iterate over the calls within a time, in order, with their tokens."""
    program = sa.case((IS_IMPORTED, CALLS.agent), else_="")
    statement = (
        sa.select(
            CALLS.at_us,
            CALLS.duration_us,
            CALLS.model,
            program,
            CALLS.input_tokens,
            CALLS.output_tokens,
            CALLS.price_basis,
        )
        .where(
            CALLS.at_us >= since_us,
            CALLS.at_us <= until_us + SAME_CALL_MICROSECONDS,
        )
        .order_by(CALLS.at_us)
    )
    for at_us, duration_us, model, program, sent, output, basis in connection.execute(statement):
        start_us = int(at_us) - int(duration_us or 0)
        yield (int(sent), int(output)), (int(at_us), start_us, model, program, basis)


def _same(span: Span, call: CallInLog, recorded: Sequence[Recorded]) -> int | None:
    """Return the place of the first recorded call that may be a logged one."""
    names = {part for each in call.models for part in _names(each)}
    first = bisect_left(recorded, (span.start_us - CLOCKS_MICROSECONDS,))
    for place in range(first, len(recorded)):
        at_us, start_us, model, program, basis = recorded[place]
        if at_us > span.end_us + SAME_CALL_MICROSECONDS:
            return None
        # Calls of an earlier import of this log are identified by their own ID.
        is_other = program != call.program and not _is_past(call.program, program, basis)
        is_during = start_us <= span.end_us + CLOCKS_MICROSECONDS
        if is_other and is_during and not names.isdisjoint(_names(model)):
            return place
    return None


def _is_past(log: str, program: str, basis: str | None) -> bool:
    """Return whether an agent made a call at the address of a vendor, and so not through LiteLLM.

    The spans of LiteLLM have such addresses, too.
    """
    if log != LITELLM or program:
        return False
    vendor = billable_call_in_ledger("", "", NO_USAGE, None, basis).vendor
    return vendor is not None and vendor not in GATEWAY_NAMES


def _names(model: str) -> tuple[str, str]:
    """Return a model's name with and without a prefix, such as that of a client for a gateway."""
    return model, model.rpartition("/")[2]


def _of_spans(database: Database, spans: Collection[Span]) -> set[SpanKey]:
    """Return the keys of spans of Claude Code whose calls the ledger has from its log."""
    in_log: dict[SpanKey, SpanKey] = {}
    for span in spans:
        session = str(span.attributes.get(CLAUDE_CODE.session) or "")
        identity = None if span.call is None else span.call.response_id
        if session and identity and span.scope.startswith(SPANS_OF_CLAUDE_CODE):
            in_log[key_in_log(CLAUDE_CODE, session, identity)] = span.key
    found: set[SpanKey] = set()
    with database.reading() as connection:
        for traces in portions(sorted({trace_id for trace_id, _ in in_log}), PORTION):
            statement = sa.select(CALLS.trace_id, CALLS.span_id)
            statement = statement.where(IS_IMPORTED, CALLS.trace_id.in_(traces))
            for trace_id, span_id in connection.execute(statement):
                if (trace_id, span_id) in in_log:
                    found.add(in_log[trace_id, span_id])
    return found
