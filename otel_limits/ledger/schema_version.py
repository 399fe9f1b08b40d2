"""The schema version of a ledger. One of another version is refused and left unchanged."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError, NewerLedgerError
from otel_limits.core.version import own_version
from otel_limits.ledger.schema import METADATA, VERSIONS

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
