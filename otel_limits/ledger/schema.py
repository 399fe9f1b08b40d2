"""The tables of a ledger, and what leads from each version of them to the next.

A ledger is upgraded in place, by the first program that opens it and knows more than it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import sqlalchemy as sa

from otel_limits.core.errors import NewerLedgerError
from otel_limits.ledger.rows import (
    ATTRIBUTES,
    INVOCATIONS,
    MODEL_CALLS,
    QUOTA_CHANGES,
    TOOL_CALLS,
    UNKNOWN_SIZE,
)

METADATA: Final = sa.MetaData()

BIG: Final = sa.BigInteger()
KEY: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""SQLite only counts by itself in a column of exactly this type."""
TEXT: Final = sa.Text()

DAY_MICROSECONDS: Final = 24 * 60 * 60 * 1_000_000

LOCK_KEY: Final = 6_835_226_430_014
"""Of the advisory lock under which one process migrates a PostgreSQL database."""

VERSIONS: Final = sa.Table("otel_limits_schema", METADATA, sa.Column("version", BIG))

INVOCATION_TABLE: Final = sa.Table(
    INVOCATIONS,
    METADATA,
    sa.Column("id", TEXT, primary_key=True),
    sa.Column("root_id", TEXT, nullable=False, index=True),
    sa.Column("parent_id", TEXT),
    sa.Column("agent", TEXT, nullable=False),
    sa.Column("session_id", TEXT),
    sa.Column("trace_id", TEXT, index=True),
    sa.Column("span_id", TEXT),
    sa.Column("source", TEXT, nullable=False),
    sa.Column("blind", sa.Boolean, nullable=False),
    sa.Column("limits", TEXT),
    sa.Column("started_us", BIG, nullable=False, index=True),
    sa.Column("ended_us", BIG),
    sa.Column("reason", TEXT),
    sa.Column("action", TEXT),
    sa.Column("breach_limit", TEXT),
    sa.Column("breach_cap", TEXT),
    sa.Column("breach_observed", TEXT),
    sa.Column("turns", BIG),
    sa.Column("cycles", BIG),
    sa.Column("tool_calls", BIG),
    sa.Column("model_calls", BIG),
    sa.Column("input_tokens", BIG),
    sa.Column("output_tokens", BIG),
    sa.Column("cache_read_tokens", BIG),
    sa.Column("cache_write_tokens", BIG),
    sa.Column("price_pico", BIG),
    sa.Column("unpriced_calls", BIG),
)

MODEL_CALL_TABLE: Final = sa.Table(
    MODEL_CALLS,
    METADATA,
    sa.Column("id", KEY, primary_key=True),
    sa.Column("at_us", BIG, nullable=False),
    sa.Column("day", BIG, sa.Computed(f"at_us / {DAY_MICROSECONDS}", persisted=True)),
    sa.Column("duration_us", BIG),
    sa.Column("trace_id", TEXT),
    sa.Column("span_id", TEXT),
    sa.Column("invocation_id", TEXT, nullable=False),
    sa.Column("number", BIG),
    sa.Column("root_id", TEXT, nullable=False),
    sa.Column("agent", TEXT, nullable=False),
    sa.Column("model", TEXT, nullable=False),
    sa.Column("provider", TEXT, nullable=False),
    sa.Column("turn", BIG),
    sa.Column("iteration", BIG),
    sa.Column("input_tokens", BIG, nullable=False),
    sa.Column("output_tokens", BIG, nullable=False),
    sa.Column("cache_read_tokens", BIG, nullable=False),
    sa.Column("cache_write_tokens", BIG, nullable=False),
    sa.Column("reported_input_tokens", BIG),
    sa.Column("reported_output_tokens", BIG),
    sa.Column("reported_cache_read_tokens", BIG),
    sa.Column("reported_cache_write_tokens", BIG),
    sa.Column("reported_total_tokens", BIG),
    sa.Column("state", TEXT, nullable=False),
    sa.Column("estimated", sa.Boolean, nullable=False),
    sa.Column("price_pico", BIG),
    sa.Column("price_source", TEXT),
    sa.Column("price_version", TEXT),
    sa.Column("source", TEXT, nullable=False),
    sa.Column("quota_operation", TEXT),
    sa.Column("quota_charges", TEXT),
    sa.UniqueConstraint("trace_id", "span_id"),
    sa.UniqueConstraint("invocation_id", "number"),
)

SPEND_INDEX: Final = sa.Index(
    "ix_otel_limits_model_calls_sums",
    MODEL_CALL_TABLE.c.day,
    MODEL_CALL_TABLE.c.agent,
    MODEL_CALL_TABLE.c.model,
    MODEL_CALL_TABLE.c.at_us,
    MODEL_CALL_TABLE.c.input_tokens,
    MODEL_CALL_TABLE.c.output_tokens,
    MODEL_CALL_TABLE.c.cache_read_tokens,
    MODEL_CALL_TABLE.c.price_pico,
)
"""What is spent by day, agent and model is answered from this alone, without a sort."""

IS_OF_UNKNOWN_SIZE: Final = MODEL_CALL_TABLE.c.state.in_(
    [sa.literal_column(f"'{state}'") for state in UNKNOWN_SIZE]
)
"""Written with literals: a database uses a partial index only for the very condition it has."""

PARTIAL_INDEXES: Final = (
    """
    CREATE INDEX ix_otel_limits_model_calls_unknown_size
    ON otel_limits_model_calls (day, agent, model, at_us)
    WHERE state IN ('unmeasured', 'estimated')
    """,
    """
    CREATE INDEX ix_otel_limits_model_calls_quota_operation
    ON otel_limits_model_calls (quota_operation)
    WHERE quota_operation IS NOT NULL
    """,
)
"""The few calls without a measured size, so that nobody looks at the state of all others; and those
whose workers could be killed before they had settled them.

They are text since SQLAlchemy imports every dialect that its own partial indexes name.
"""

TOOL_CALL_TABLE: Final = sa.Table(
    TOOL_CALLS,
    METADATA,
    sa.Column("id", KEY, primary_key=True),
    sa.Column("at_us", BIG, nullable=False),
    sa.Column("duration_us", BIG),
    sa.Column("trace_id", TEXT),
    sa.Column("span_id", TEXT),
    sa.Column("invocation_id", TEXT, nullable=False),
    sa.Column("number", BIG),
    sa.Column("root_id", TEXT, nullable=False),
    sa.Column("agent", TEXT, nullable=False),
    sa.Column("tool", TEXT, nullable=False),
    sa.Column("status", TEXT, nullable=False),
    sa.Column("fingerprint", TEXT),
    sa.Column("source", TEXT, nullable=False),
    sa.UniqueConstraint("trace_id", "span_id"),
    sa.UniqueConstraint("invocation_id", "number"),
)

ATTRIBUTE_TABLE: Final = sa.Table(
    ATTRIBUTES,
    METADATA,
    sa.Column("invocation_id", TEXT, primary_key=True),
    sa.Column("key", TEXT, primary_key=True),
    sa.Column("value", TEXT, nullable=False),
    sa.Index("ix_otel_limits_attributes_key_value", "key", "value"),
)

QUOTA_CHANGE_TABLE: Final = sa.Table(
    QUOTA_CHANGES,
    METADATA,
    sa.Column("id", TEXT, primary_key=True),
    sa.Column("at_us", BIG, nullable=False),
    sa.Column("quota", TEXT, nullable=False),
    sa.Column("share", TEXT, nullable=False),
    sa.Column("change", TEXT, nullable=False),
    sa.Column("amount", TEXT, nullable=False),
    sa.Column("unit", TEXT, nullable=False),
    sa.Column("until_us", BIG),
    sa.Column("changed_by", TEXT, nullable=False),
)

for statement in PARTIAL_INDEXES:
    sa.event.listen(METADATA, "after_create", sa.DDL(statement))  # type: ignore[no-untyped-call]

TABLES: Final = (
    INVOCATION_TABLE,
    ATTRIBUTE_TABLE,
    MODEL_CALL_TABLE,
    TOOL_CALL_TABLE,
    QUOTA_CHANGE_TABLE,
)

Upgrade = Callable[[sa.Connection], None]


def _index_unknown_sizes(connection: sa.Connection) -> None:
    """To version 2: what is unmeasured has an index of its own, and left the one on spending."""
    of_calls = "ON otel_limits_model_calls (day, agent, model, at_us"
    sums = "input_tokens, output_tokens, cache_read_tokens, price_pico"
    unknown = "state IN ('unmeasured', 'estimated')"
    for statement in (
        "DROP INDEX IF EXISTS ix_otel_limits_model_calls_spend",
        f"CREATE INDEX ix_otel_limits_model_calls_sums {of_calls}, {sums})",
        f"CREATE INDEX ix_otel_limits_model_calls_unknown_size {of_calls}) WHERE {unknown}",
    ):
        connection.execute(sa.text(statement))


def _keep_settlements(connection: sa.Connection) -> None:
    """To version 3: a call has with it what quotas count of it."""
    on_it = "ON otel_limits_model_calls (quota_operation) WHERE quota_operation IS NOT NULL"
    for statement in (
        "ALTER TABLE otel_limits_model_calls ADD COLUMN quota_operation TEXT",
        "ALTER TABLE otel_limits_model_calls ADD COLUMN quota_charges TEXT",
        f"CREATE INDEX ix_otel_limits_model_calls_quota_operation {on_it}",
    ):
        connection.execute(sa.text(statement))


UPGRADES: Final[tuple[Upgrade, ...]] = (_index_unknown_sizes, _keep_settlements)
"""The n-th leads from version n to n + 1; one that was ever released is never changed."""


def migrate(connection: sa.Connection, upgrades: Sequence[Upgrade] = UPGRADES) -> None:
    """Bring the tables to the version of this program, in the caller's transaction.

    Raises:
        NewerLedgerError: They are of a later version.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
        # What waits for its turn gives up in time; an index over years of calls is worth waiting.
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
    # Looked up under the lock: whoever had it may have upgraded the tables just now.
    found, wanted = version_of(connection), len(upgrades) + 1
    if found > wanted:
        raise NewerLedgerError(found, wanted)
    if found == wanted:
        return
    # New tables are made as they are now; the upgrades are only for what an older program made.
    if found == 0:
        METADATA.create_all(connection, checkfirst=False)
    else:
        for upgrade in upgrades[found - 1 :]:
            upgrade(connection)
        connection.execute(VERSIONS.delete())
    connection.execute(VERSIONS.insert().values(version=wanted))


def version_of(connection: sa.Connection) -> int:
    """The version of the tables, 0 where there are none."""
    if not sa.inspect(connection).has_table(VERSIONS.name):
        return 0
    return int(connection.execute(sa.select(VERSIONS.c.version)).scalar_one())
