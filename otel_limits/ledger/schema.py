"""The tables of a ledger and their version. A ledger of another version is refused."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError, NewerLedgerError
from otel_limits.core.version import own_version
from otel_limits.ledger.rows import (
    ATTRIBUTES,
    INVOCATIONS,
    MAINTENANCE,
    MODEL_CALLS,
    POLICIES,
    QUOTA_CHANGES,
    TOOL_CALLS,
    UNCOUNTED,
    UNKNOWN_SIZE,
)

METADATA: Final = sa.MetaData()

BIG: Final = sa.BigInteger()
KEY: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""The only column type that SQLite numbers automatically."""
TEXT: Final = sa.Text()

DAY_MICROSECONDS: Final = 24 * 60 * 60 * 1_000_000

VERSIONS: Final = sa.Table(
    "otel_limits_schema",
    METADATA,
    sa.Column("version", BIG, nullable=False),
    # The otel-limits that created the tables.
    sa.Column("written_by", TEXT, nullable=False),
)

# No foreign keys: rows of several processes arrive in any order, and retention deletes in portions.
INVOCATION_TABLE: Final = sa.Table(
    INVOCATIONS,
    METADATA,
    sa.Column("id", TEXT, primary_key=True),
    sa.Column("root_id", TEXT, nullable=False, index=True),
    sa.Column("parent_id", TEXT),
    sa.Column("task_id", TEXT, nullable=False),
    sa.Column("agent", TEXT, nullable=False),
    sa.Column("session_id", TEXT),
    # Its hash.
    sa.Column("conversation", TEXT),
    sa.Column("trace_id", TEXT, index=True),
    sa.Column("span_id", TEXT),
    sa.Column("source", TEXT, nullable=False),
    sa.Column("blind", sa.Boolean, nullable=False),
    sa.Column("limits", TEXT),
    sa.Column("limit_sources", TEXT),
    sa.Column("configured_action", TEXT),
    sa.Column("started_us", BIG, nullable=False, index=True),
    sa.Column("ended_us", BIG),
    sa.Column("reason", TEXT),
    sa.Column("action", TEXT),
    sa.Column("breach_limit", TEXT),
    # As text, since a limit is in turns, tokens, seconds or exact USD.
    sa.Column("breach_cap", TEXT),
    sa.Column("breach_observed", TEXT),
    sa.Column("breach_unit", TEXT),
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
    sa.Column("halt", TEXT),
    sa.Column("repeated_failures", BIG),
    # Whether the halt added a message.
    sa.Column("synthetic", sa.Boolean),
)

MODEL_CALL_TABLE: Final = sa.Table(
    MODEL_CALLS,
    METADATA,
    sa.Column("id", KEY, primary_key=True),
    sa.Column("at_us", BIG, nullable=False),
    # Stored rather than calculated, so that an index can contain it.
    sa.Column("day", BIG, sa.Computed(f"at_us / {DAY_MICROSECONDS}", persisted=True)),
    sa.Column("duration_us", BIG),
    sa.Column("trace_id", TEXT),
    sa.Column("span_id", TEXT),
    sa.Column("invocation_id", TEXT, nullable=False),
    sa.Column("number", BIG),
    sa.Column("root_id", TEXT),
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
    sa.Column("side", sa.Boolean),
    sa.Column("tier", TEXT),
    sa.Column("cache_write_1h_tokens", BIG),
    sa.Column("price_basis", TEXT),
    sa.Column("after_tools", TEXT),
    sa.Column("cache_saved_pico", BIG),
    # The cost that the response states, and the price by the policy file or the list.
    sa.Column("stated_pico", BIG),
    sa.Column("listed_pico", BIG),
    sa.Column("former_price_pico", BIG),
    sa.Column("former_price_source", TEXT),
    sa.Column("former_price_version", TEXT),
    sa.UniqueConstraint("invocation_id", "number"),
)
"""A call is identified by its invocation and its number in it. `root_id` is null if the invocation
is the root itself, `number` if the call was imported. `after_tools` names the tools whose results
were new in the request; it is null for imported calls."""

SPEND_INDEX: Final = sa.Index(
    "ix_otel_limits_model_calls_sums",
    MODEL_CALL_TABLE.c.day,
    MODEL_CALL_TABLE.c.agent,
    MODEL_CALL_TABLE.c.model,
    MODEL_CALL_TABLE.c.at_us,
    MODEL_CALL_TABLE.c.input_tokens,
    MODEL_CALL_TABLE.c.output_tokens,
    MODEL_CALL_TABLE.c.cache_read_tokens,
    MODEL_CALL_TABLE.c.cache_write_tokens,
    MODEL_CALL_TABLE.c.price_pico,
    MODEL_CALL_TABLE.c.cache_saved_pico,
)
"""Answers spend by day, agent and model without touching the table, and without a sort."""

PROOF_INDEX: Final = sa.Index(
    "ix_otel_limits_model_calls_proof",
    MODEL_CALL_TABLE.c.invocation_id,
    MODEL_CALL_TABLE.c.number,
    MODEL_CALL_TABLE.c.input_tokens,
    MODEL_CALL_TABLE.c.output_tokens,
    MODEL_CALL_TABLE.c.price_pico,
)
"""Answers the sums of all calls, and of each open invocation, without touching the table."""

IS_IMPORTED: Final = MODEL_CALL_TABLE.c.source == sa.literal_column("'import'")
"""With a literal: SQLite uses a partial index only for exactly its condition, and PostgreSQL would
not recognize grouped expressions with other parameters."""
IS_TOTAL: Final = IS_IMPORTED & (
    MODEL_CALL_TABLE.c.invocation_id
    == MODEL_CALL_TABLE.c.trace_id.concat(MODEL_CALL_TABLE.c.span_id)
)
"""A call that is the total of an agent: its span is that of its invocation."""
IS_OF_UNKNOWN_SIZE: Final = MODEL_CALL_TABLE.c.state.in_(
    [sa.literal_column(f"'{state}'") for state in UNKNOWN_SIZE]
)
"""Literals, also above: a database uses a partial index only for exactly its condition."""

PARTIAL_INDEXES: Final = (
    """
    CREATE INDEX ix_otel_limits_model_calls_unknown_size
    ON otel_limits_model_calls (day, agent, model, at_us, estimated)
    WHERE state IN ('unmeasured', 'estimated', 'interrupted')
    """,
    """
    CREATE INDEX ix_otel_limits_model_calls_stated
    ON otel_limits_model_calls (model, day, at_us, agent, stated_pico, listed_pico)
    WHERE stated_pico IS NOT NULL
    """,
    """
    CREATE INDEX ix_otel_limits_model_calls_quota_operation
    ON otel_limits_model_calls (quota_operation)
    WHERE quota_operation IS NOT NULL
    """,
    """
    CREATE UNIQUE INDEX ix_otel_limits_model_calls_imported
    ON otel_limits_model_calls (trace_id, span_id)
    WHERE source = 'import'
    """,
    """
    CREATE UNIQUE INDEX ix_otel_limits_tool_calls_imported
    ON otel_limits_tool_calls (trace_id, span_id)
    WHERE source = 'import'
    """,
    """
    CREATE INDEX ix_otel_limits_tool_calls_breached
    ON otel_limits_tool_calls (invocation_id)
    WHERE breach_limit IS NOT NULL
    """,
    """
    CREATE INDEX ix_otel_limits_invocations_open
    ON otel_limits_invocations (started_us)
    WHERE ended_us IS NULL
    """,
    """
    CREATE INDEX ix_otel_limits_invocations_resumed
    ON otel_limits_invocations (task_id)
    WHERE task_id <> id
    """,
)
"""For the few calls without a measured size; for those with a stated cost; for calls that a killed
worker did not settle; for imported rows, which only their span IDs identify; for the few tool calls
at a cap; for invocations without an end; and for those that continue the task of another one.

Text, since SQLAlchemy's own partial indexes import every dialect that they name.
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
    sa.Column("root_id", TEXT),
    sa.Column("agent", TEXT, nullable=False),
    sa.Column("tool", TEXT, nullable=False),
    sa.Column("status", TEXT, nullable=False),
    sa.Column("fingerprint", TEXT),
    sa.Column("turn", BIG),
    sa.Column("breach_limit", TEXT),
    sa.Column("source", TEXT, nullable=False),
    sa.UniqueConstraint("invocation_id", "number"),
)
"""`breach_limit` is the limit that refused a call, if its status is `refused`, and else the limit
that would have refused it. It is null for imported calls: a call that was refused has no span."""

UNCOUNTED_TABLE: Final = sa.Table(
    UNCOUNTED,
    METADATA,
    sa.Column("id", KEY, primary_key=True),
    sa.Column("at_us", BIG, nullable=False),
    sa.Column("duration_us", BIG),
    sa.Column("trace_id", TEXT, nullable=False),
    sa.Column("span_id", TEXT, nullable=False),
    sa.Column("invocation_id", TEXT, nullable=False, index=True),
    sa.Column("root_id", TEXT),
    sa.Column("agent", TEXT, nullable=False),
    sa.Column("span", TEXT, nullable=False),
    sa.Column("cause", TEXT, nullable=False),
    sa.Column("tokens", BIG, nullable=False),
    sa.UniqueConstraint("trace_id", "span_id"),
)
"""Imported spans with tokens that no model call has. `span` is the name; `invocation_id` may be a
trace without an invocation."""

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
    sa.Column("reason", TEXT),
)

POLICY_TABLE: Final = sa.Table(
    POLICIES,
    METADATA,
    sa.Column("id", TEXT, primary_key=True),
    sa.Column("at_us", BIG, nullable=False),
    sa.Column("host", TEXT, nullable=False),
    sa.Column("path", TEXT, nullable=False),
    sa.Column("owner", TEXT),
    sa.Column("modified_us", BIG),
    sa.Column("digest", TEXT),
    sa.Column("accepted", sa.Boolean, nullable=False),
    sa.Column("loosened", TEXT),
)
"""Versions of policy files. `at_us` is when a process of the host first read a version. `loosened`
is null if that process had no version before it."""

MAINTENANCE_TABLE: Final = sa.Table(
    MAINTENANCE,
    METADATA,
    sa.Column("id", TEXT, primary_key=True),
    sa.Column("at_us", BIG, nullable=False),
    sa.Column("kind", TEXT, nullable=False),
    sa.Column("subject", TEXT, nullable=False),
    sa.Column("amount", BIG),
    sa.Column("until_us", BIG),
    sa.Column("changed_by", TEXT, nullable=False),
    sa.Column("reason", TEXT),
)
"""Interventions in the ledger; see `maintenance.py` for their kinds."""

for statement in PARTIAL_INDEXES:
    sa.event.listen(METADATA, "after_create", sa.DDL(statement))  # type: ignore[no-untyped-call]

TABLES: Final = (
    INVOCATION_TABLE,
    ATTRIBUTE_TABLE,
    MODEL_CALL_TABLE,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
    QUOTA_CHANGE_TABLE,
    POLICY_TABLE,
    MAINTENANCE_TABLE,
)

CALLS: Final = MODEL_CALL_TABLE.c
RUNS: Final = INVOCATION_TABLE.c
TOOLS: Final = TOOL_CALL_TABLE.c
RECORDS: Final = MAINTENANCE_TABLE.c

CALL_TOKENS: Final = CALLS.input_tokens + CALLS.output_tokens
RUN_TOKENS: Final = RUNS.input_tokens + RUNS.output_tokens
IS_UNPRICED: Final = CALLS.price_pico.is_(None) & (CALL_TOKENS > 0)
"""A call without tokens cannot lack a price."""


def insertable_columns(table: sa.Table) -> list[str]:
    """Columns that a row provides. The database fills in the others."""
    return [
        column.name
        for column in table.columns
        if column.computed is None and column is not table.autoincrement_column
    ]


# --- the version ----------------------------------------------------------------------------------

LOCK_KEY: Final = 6_835_226_430_014
"""Key of the advisory lock under which one process creates the tables in PostgreSQL."""

CURRENT: Final = 1
"""The only version so far."""

UNRELEASED: Final = (
    "The ledger was created by a development version of otel-limits, and compatibility begins with "
    "the first release on a package index. Move it away to start a new ledger."
)


def create_tables(connection: sa.Connection) -> None:
    """Create the tables if there are none, in the caller's transaction.

    Raises:
        LedgerError: They are of another version.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
    # Read under the lock: its last holder may have just created them.
    if not has_tables(connection):
        METADATA.create_all(connection, checkfirst=False)
        connection.execute(VERSIONS.insert().values(version=CURRENT, written_by=own_version()))


def has_tables(connection: sa.Connection) -> bool:
    """Return whether a database contains a ledger.

    Raises:
        LedgerError: It is of another version, whose columns may mean something else.
    """
    if not sa.inspect(connection).has_table(VERSIONS.name):
        return False
    # Every column that there is: ledgers of development versions have no `written_by`.
    found = connection.execute(sa.text(f"SELECT * FROM {VERSIONS.name}")).mappings().first()  # noqa: S608
    if found is None or not found.get("written_by"):
        raise LedgerError(UNRELEASED)
    _require_current(found["version"])
    return True


def require_version(connection: sa.Connection) -> None:
    """Check that the tables that were opened still have this version.

    Raises:
        LedgerError: They have another one.
    """
    _require_current(connection.execute(sa.select(VERSIONS.c.version)).scalar_one())


def _require_current(version: object) -> None:
    # In SQLite, a column has values of any type.
    if type(version) is not int or version < CURRENT:
        raise LedgerError(UNRELEASED)
    if version > CURRENT:
        raise NewerLedgerError(version, CURRENT)
