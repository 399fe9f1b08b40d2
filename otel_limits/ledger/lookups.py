"""Statements that find a name in a ledger, and the hashes under which it may be recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from otel_limits.ledger.queries import PORTION
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    CALLS,
    INVOCATION_TABLE,
    QUOTA_CHANGE_TABLE,
    RUNS,
)


class Place(NamedTuple):
    """Where a name, or the hash of a conversation, is recorded."""

    kind: str
    of: str
    records: int
    first_us: int
    last_us: int


SEEN: Final = (sa.func.count(), sa.func.min(RUNS.started_us), sa.func.max(RUNS.started_us))


def charged_keys(connection: sa.Connection) -> Iterator[tuple[int, str]]:
    """Iterate over the times and quota charges of calls."""
    statement = sa.select(CALLS.at_us, CALLS.quota_charges).where(CALLS.quota_charges.is_not(None))
    for row in connection.execute(statement, execution_options={"yield_per": PORTION}):
        yield row.at_us, row.quota_charges


def changed_keys(connection: sa.Connection) -> Iterator[tuple[int, str, str]]:
    """Iterate over the times, quotas and keys of changes by operators."""
    columns = QUOTA_CHANGE_TABLE.c
    for row in connection.execute(sa.select(columns.at_us, columns.quota, columns.share)):
        yield row.at_us, row.quota, row.share


def agents(connection: sa.Connection) -> list[str]:
    """List the agents with a conversation."""
    found = sa.select(RUNS.agent).where(RUNS.conversation.is_not(None)).distinct()
    return sorted(connection.scalars(found))


def conversations(connection: sa.Connection, hashes: Mapping[str, str]) -> Iterator[Place]:
    """Find conversations; `hashes` has their hash for each agent that may have begun them."""
    by_hash = {conversation: agent for agent, conversation in hashes.items()}
    statement = sa.select(RUNS.conversation, *SEEN).where(RUNS.conversation.in_(list(by_hash)))
    for conversation, *seen in connection.execute(statement.group_by(RUNS.conversation)):
        yield Place(conversation, by_hash[conversation], *seen)


def places(connection: sa.Connection, name: str) -> Iterator[Place]:
    """Find a name among agents, sessions and the values of audit keys."""
    columns: dict[str, Any] = {"agent": RUNS.agent, "session": RUNS.session_id}
    for kind, column in columns.items():
        records, *seen = connection.execute(sa.select(*SEEN).where(column == name)).one()
        if records:
            yield Place(kind, name, records, *seen)
    attribute = ATTRIBUTE_TABLE.c
    statement = (
        sa.select(attribute.key, *SEEN)
        .select_from(ATTRIBUTE_TABLE.join(INVOCATION_TABLE, RUNS.id == attribute.invocation_id))
        .where(attribute.value == name)
        .group_by(attribute.key)
        .order_by(attribute.key)
    )
    for key, *seen in connection.execute(statement):
        yield Place("audit key", key, *seen)
