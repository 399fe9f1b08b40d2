"""The schema version of a ledger, and the upgrades that lead from one version to the next.

The first program that records in a ledger of an earlier version upgrades it in place, in one
transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError, NewerLedgerError
from otel_limits.core.version import own_version
from otel_limits.ledger.schema import METADATA, VERSIONS

LOCK_KEY: Final = 6_835_226_430_014
"""Key of the advisory lock under which one process upgrades a PostgreSQL database."""

Upgrade = Callable[[sa.Connection], None]

UPGRADES: Final[tuple[Upgrade, ...]] = ()
"""The n-th leads from version n to n + 1. A released one is never changed."""

CURRENT: Final = len(UPGRADES) + 1
"""The schema version that this program creates."""

UNRELEASED: Final = (
    "The ledger was created by a development version of otel-limits, and compatibility begins with "
    "the first release on a package index. Move it away to start a new ledger."
)


def migrate(connection: sa.Connection, upgrades: Sequence[Upgrade] = UPGRADES) -> None:
    """Create the tables or upgrade them, in the caller's transaction.

    Raises:
        LedgerError: Their version is later than this program's, or was never released.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK_KEY)))
        # The wait for the lock has a timeout; an upgrade of years of calls may take its time.
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
    # Read under the lock: its last holder may have just upgraded the tables.
    found, wanted = version_of(connection), len(upgrades) + 1
    refuse_newer(found, wanted)
    if found == wanted:
        return
    if found == 0:
        METADATA.create_all(connection, checkfirst=False)
    else:
        for upgrade in upgrades[found - 1 :]:
            upgrade(connection)
        connection.execute(VERSIONS.delete())
    connection.execute(VERSIONS.insert().values(version=wanted, written_by=own_version()))


def version_of(connection: sa.Connection) -> int:
    """Return the schema version, 0 if there are no tables.

    Raises:
        LedgerError: The version was never released.
    """
    if not sa.inspect(connection).has_table(VERSIONS.name):
        return 0
    # Every column that there is: ledgers of development versions have no `written_by`.
    found = connection.execute(sa.text(f"SELECT * FROM {VERSIONS.name}")).mappings().first()  # noqa: S608
    if found is None or not found.get("written_by"):
        raise LedgerError(UNRELEASED)
    return _released(found["version"])


def _released(version: object) -> int:
    """Return a version that may have been released: in SQLite, a column has values of any type.

    Raises:
        LedgerError: It was not.
    """
    if type(version) is not int or version < 1:
        raise LedgerError(UNRELEASED)
    return version


def require_version(connection: sa.Connection, upgrades: Sequence[Upgrade]) -> None:
    """Check that no later version has upgraded the tables since they were opened.

    Raises:
        NewerLedgerError: One has.
    """
    found = connection.execute(sa.select(VERSIONS.c.version)).scalar_one()
    refuse_newer(_released(found), len(upgrades) + 1)


def refuse_newer(found: int, wanted: int) -> None:
    """Refuse tables of a later version: their columns may mean something else.

    Raises:
        NewerLedgerError: They are of a later version.
    """
    if found > wanted:
        raise NewerLedgerError(found, wanted)
