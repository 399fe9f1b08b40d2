"""Calls in a gateway's log that the ledger has from the agents that made them.

The log has no ID that an agent records. A call is the same if model and tokens are equal and the
gateway was busy with it during the agent's call; each call of an agent is one of the log at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from otel_limits.ledger.litellm_logs import LITELLM
from otel_limits.ledger.rows import SAME_CALL_MICROSECONDS
from otel_limits.ledger.schema import CALLS

if TYPE_CHECKING:
    from otel_limits.ledger.database import Database
    from otel_limits.ledger.litellm_logs import GatewayCall
    from otel_limits.ledger.otlp import Span, SpanKey

CLOCKS_MICROSECONDS: Final = 1_000_000
"""Clocks of two machines may differ by this much."""

Recorded = tuple[int, int, str]
"""A recorded call: its end, its start, and its model."""


def recorded_by_agents(database: Database, spans: Collection[Span]) -> set[SpanKey]:
    """Return the keys of logged calls that the ledger has from agents, and of their sessions.

    A session is one of them if all its calls are.
    """
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
    """Iterate over the calls of agents within a time, in order, with their tokens."""
    statement = (
        sa.select(
            CALLS.at_us, CALLS.duration_us, CALLS.model, CALLS.input_tokens, CALLS.output_tokens
        )
        .where(
            CALLS.at_us >= since_us,
            CALLS.at_us <= until_us + SAME_CALL_MICROSECONDS,
            # Calls of an earlier import of a log are identified by their own ID.
            ~((CALLS.source == "import") & (CALLS.agent == LITELLM)),
        )
        .order_by(CALLS.at_us)
    )
    for at_us, duration_us, model, sent, output in connection.execute(statement):
        yield (int(sent), int(output)), (int(at_us), int(at_us) - int(duration_us or 0), model)


def _same(span: Span, call: GatewayCall, recorded: Sequence[Recorded]) -> int | None:
    """Return the place of the first recorded call that may be a logged one."""
    names = {part for each in call.models for part in _names(each)}
    first = bisect_left(recorded, (span.start_us - CLOCKS_MICROSECONDS,))
    for place in range(first, len(recorded)):
        at_us, start_us, model = recorded[place]
        if at_us > span.end_us + SAME_CALL_MICROSECONDS:
            return None
        is_during = start_us <= span.end_us + CLOCKS_MICROSECONDS
        if is_during and not names.isdisjoint(_names(model)):
            return place
    return None


def _names(model: str) -> tuple[str, str]:
    """Return a model's name with and without a prefix, such as that of a client for a gateway."""
    return model, model.rpartition("/")[2]
