"""What leads a ledger from each version of its tables to the next, in place, wholly or not at all.

The first program that records in a ledger and knows more than it holds upgrades it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import sqlalchemy as sa

from otel_limits.core.errors import NewerLedgerError
from otel_limits.ledger.schema import METADATA, VERSIONS

LOCK_KEY: Final = 6_835_226_430_014
"""Of the advisory lock under which one process migrates a PostgreSQL database."""

Upgrade = Callable[[sa.Connection], None]


def _index_unknown_sizes(connection: sa.Connection) -> None:
    """To version 2: what is unmeasured has an index of its own, and left the one on spending."""
    of_calls = "ON otel_limits_model_calls (day, agent, model, at_us"
    sums = "input_tokens, output_tokens, cache_read_tokens, price_pico"
    unknown = "state IN ('unmeasured', 'estimated')"
    _run(
        connection,
        "DROP INDEX IF EXISTS ix_otel_limits_model_calls_spend",
        f"CREATE INDEX ix_otel_limits_model_calls_sums {of_calls}, {sums})",
        f"CREATE INDEX ix_otel_limits_model_calls_unknown_size {of_calls}) WHERE {unknown}",
    )


def _keep_settlements(connection: sa.Connection) -> None:
    """To version 3: a call has with it what quotas count of it."""
    on_it = "ON otel_limits_model_calls (quota_operation) WHERE quota_operation IS NOT NULL"
    _run(
        connection,
        "ALTER TABLE otel_limits_model_calls ADD COLUMN quota_operation TEXT",
        "ALTER TABLE otel_limits_model_calls ADD COLUMN quota_charges TEXT",
        f"CREATE INDEX ix_otel_limits_model_calls_quota_operation {on_it}",
    )


def _identify_calls_by_number(connection: sa.Connection) -> None:
    """To version 4: span ids only tell imported rows apart, and every call has its invocation.

    An application that seeds `random` makes the same span ids in every run.
    """
    _run(connection, *(f"DROP INDEX IF EXISTS {name}" for name in DROPPED_4))
    if connection.dialect.name == "sqlite":
        for table, statement, columns in REBUILT_4:
            _rebuild(connection, table, statement, columns)
    else:
        _run(connection, *ALTERED_4.split(";"))
    reason = "ALTER TABLE otel_limits_quota_changes ADD COLUMN reason TEXT"
    _run(connection, *INDEXES_4.split(";"), ADOPT_ORPHANS_4, reason)


def _keep_sentences(connection: sa.Connection) -> None:
    """To version 5: an invocation has its halt in a sentence, with where the limit is set."""
    _run(connection, "ALTER TABLE otel_limits_invocations ADD COLUMN halt TEXT")


def _rebuild(connection: sa.Connection, table: str, statement: str, columns: str) -> None:
    """Make a table anew: SQLite cannot take a constraint from one."""
    # Empty where the invocation is the root itself, as this version writes it.
    kept = columns.replace("root_id", "nullif(root_id, invocation_id)")
    _run(
        connection,
        f"ALTER TABLE {table} RENAME TO {table}_3",
        statement,
        f"INSERT INTO {table} ({columns}) SELECT {kept} FROM {table}_3 ORDER BY id",  # noqa: S608
        f"DROP TABLE {table}_3",
    )


def _run(connection: sa.Connection, *statements: str) -> None:
    for statement in statements:
        connection.exec_driver_sql(statement)


DROPPED_4: Final = (
    "ix_otel_limits_model_calls_sums",
    "ix_otel_limits_model_calls_unknown_size",
    "ix_otel_limits_model_calls_quota_operation",
)

# Written out, and not taken from the schema, which goes on to later versions.
MODEL_CALLS_4: Final = """
CREATE TABLE otel_limits_model_calls (
    id INTEGER NOT NULL,
    at_us BIGINT NOT NULL,
    day BIGINT GENERATED ALWAYS AS (at_us / 86400000000) STORED,
    duration_us BIGINT,
    trace_id TEXT,
    span_id TEXT,
    invocation_id TEXT NOT NULL,
    number BIGINT,
    root_id TEXT,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    provider TEXT NOT NULL,
    turn BIGINT,
    iteration BIGINT,
    input_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    cache_read_tokens BIGINT NOT NULL,
    cache_write_tokens BIGINT NOT NULL,
    reported_input_tokens BIGINT,
    reported_output_tokens BIGINT,
    reported_cache_read_tokens BIGINT,
    reported_cache_write_tokens BIGINT,
    reported_total_tokens BIGINT,
    state TEXT NOT NULL,
    estimated BOOLEAN NOT NULL,
    price_pico BIGINT,
    price_source TEXT,
    price_version TEXT,
    source TEXT NOT NULL,
    quota_operation TEXT,
    quota_charges TEXT,
    side BOOLEAN,
    tier TEXT,
    cache_write_1h_tokens BIGINT,
    price_basis TEXT,
    after_tools TEXT,
    cache_saved_pico BIGINT,
    former_price_pico BIGINT,
    former_price_source TEXT,
    former_price_version TEXT,
    PRIMARY KEY (id),
    UNIQUE (invocation_id, number)
)
"""

TOOL_CALLS_4: Final = """
CREATE TABLE otel_limits_tool_calls (
    id INTEGER NOT NULL,
    at_us BIGINT NOT NULL,
    duration_us BIGINT,
    trace_id TEXT,
    span_id TEXT,
    invocation_id TEXT NOT NULL,
    number BIGINT,
    root_id TEXT,
    agent TEXT NOT NULL,
    tool TEXT NOT NULL,
    status TEXT NOT NULL,
    fingerprint TEXT,
    turn BIGINT,
    source TEXT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (invocation_id, number)
)
"""

REBUILT_4: Final = (
    (
        "otel_limits_model_calls",
        MODEL_CALLS_4,
        """
        id, at_us, duration_us, trace_id, span_id, invocation_id, number, root_id, agent, model,
        provider, turn, iteration, input_tokens, output_tokens, cache_read_tokens,
        cache_write_tokens, reported_input_tokens, reported_output_tokens,
        reported_cache_read_tokens, reported_cache_write_tokens, reported_total_tokens, state,
        estimated, price_pico, price_source, price_version, source, quota_operation, quota_charges
        """,
    ),
    (
        "otel_limits_tool_calls",
        TOOL_CALLS_4,
        """
        id, at_us, duration_us, trace_id, span_id, invocation_id, number, root_id, agent, tool,
        status, fingerprint, source
        """,
    ),
)
"""Tables with what makes them, and the columns that they had before."""

ALTERED_4: Final = """
ALTER TABLE otel_limits_model_calls ALTER COLUMN root_id DROP NOT NULL;
ALTER TABLE otel_limits_tool_calls ALTER COLUMN root_id DROP NOT NULL;
ALTER TABLE otel_limits_model_calls
    DROP CONSTRAINT IF EXISTS otel_limits_model_calls_trace_id_span_id_key;
ALTER TABLE otel_limits_tool_calls
    DROP CONSTRAINT IF EXISTS otel_limits_tool_calls_trace_id_span_id_key;
ALTER TABLE otel_limits_model_calls
    ADD COLUMN side BOOLEAN,
    ADD COLUMN tier TEXT,
    ADD COLUMN cache_write_1h_tokens BIGINT,
    ADD COLUMN price_basis TEXT,
    ADD COLUMN after_tools TEXT,
    ADD COLUMN cache_saved_pico BIGINT,
    ADD COLUMN former_price_pico BIGINT,
    ADD COLUMN former_price_source TEXT,
    ADD COLUMN former_price_version TEXT;
ALTER TABLE otel_limits_tool_calls ADD COLUMN turn BIGINT
"""
"""The same for PostgreSQL, which can alter what is there."""

INDEXES_4: Final = """
CREATE INDEX ix_otel_limits_model_calls_sums ON otel_limits_model_calls
    (day, agent, model, at_us, input_tokens, output_tokens, cache_read_tokens, cache_write_tokens,
     price_pico, cache_saved_pico);
CREATE INDEX ix_otel_limits_model_calls_proof ON otel_limits_model_calls
    (invocation_id, number, input_tokens, output_tokens, price_pico);
CREATE INDEX ix_otel_limits_model_calls_unknown_size ON otel_limits_model_calls
    (day, agent, model, at_us) WHERE state IN ('unmeasured', 'estimated');
CREATE INDEX ix_otel_limits_model_calls_quota_operation ON otel_limits_model_calls
    (quota_operation) WHERE quota_operation IS NOT NULL;
CREATE UNIQUE INDEX ix_otel_limits_model_calls_imported ON otel_limits_model_calls
    (trace_id, span_id) WHERE source = 'import';
CREATE UNIQUE INDEX ix_otel_limits_tool_calls_imported ON otel_limits_tool_calls
    (trace_id, span_id) WHERE source = 'import';
CREATE INDEX ix_otel_limits_invocations_open ON otel_limits_invocations
    (started_us) WHERE ended_us IS NULL
"""

ADOPT_ORPHANS_4: Final = """
INSERT INTO otel_limits_invocations
    (id, root_id, agent, trace_id, source, blind, started_us, ended_us, reason, action,
     turns, cycles, tool_calls, model_calls, input_tokens, output_tokens,
     cache_read_tokens, cache_write_tokens, price_pico, unpriced_calls)
SELECT c.invocation_id, coalesce(min(c.root_id), c.invocation_id), min(c.agent), min(c.trace_id),
       min(c.source), false, min(c.at_us),
       CASE min(c.source) WHEN 'import' THEN max(c.at_us) END,
       CASE min(c.source) WHEN 'import' THEN 'unknown' END,
       CASE min(c.source) WHEN 'import' THEN 'none' END,
       sum(CASE WHEN c.state <> 'failed' THEN 1 ELSE 0 END),
       sum(CASE WHEN c.state <> 'failed' THEN 1 ELSE 0 END),
       0, count(*), sum(c.input_tokens), sum(c.output_tokens),
       sum(c.cache_read_tokens), sum(c.cache_write_tokens), coalesce(sum(c.price_pico), 0),
       sum(CASE WHEN c.price_pico IS NULL AND c.input_tokens + c.output_tokens > 0
           THEN 1 ELSE 0 END)
FROM otel_limits_model_calls c
WHERE NOT EXISTS (SELECT 1 FROM otel_limits_invocations i WHERE i.id = c.invocation_id)
GROUP BY c.invocation_id
"""
"""Calls whose invocation was never recorded get one, so that every question finds them."""


UPGRADES: Final[tuple[Upgrade, ...]] = (
    _index_unknown_sizes,
    _keep_settlements,
    _identify_calls_by_number,
    _keep_sentences,
)
"""The n-th leads from version n to n + 1; one that was ever released is never changed."""

CURRENT: Final = len(UPGRADES) + 1
"""The version of the tables that this program makes."""


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
    refuse_newer(found, wanted)
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


def require_version(connection: sa.Connection, upgrades: Sequence[Upgrade]) -> None:
    """Look once more whether tables that were current are of no later version now.

    Raises:
        NewerLedgerError: Another program has upgraded them meanwhile.
    """
    found = connection.execute(sa.select(VERSIONS.c.version)).scalar_one()
    refuse_newer(found, len(upgrades) + 1)


def refuse_newer(found: int, wanted: int) -> None:
    """Refuse tables whose columns may mean what this program does not know of.

    Raises:
        NewerLedgerError: They are of a later version.
    """
    if found > wanted:
        raise NewerLedgerError(found, wanted)
