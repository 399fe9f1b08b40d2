"""Records of what operators and retention did to a ledger, in the ledger itself.

| kind | subject | amount | until_us |
|---|---|---|---|
| `damaged` | the kept spill file, or the memory of a process | its lost lines | |
| `accepted` | the same | the same | |
| `lost` | an invocation that was ended as lost | | |
| `pruned` | | | trees that ended before this time were deleted |
"""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from otel_limits.core.labels import clean
from otel_limits.ledger.rows import LOST, MAX_SENTENCE, microseconds, name
from otel_limits.ledger.schema import DAY_MICROSECONDS, MAINTENANCE_TABLE, RECORDS

if TYPE_CHECKING:
    from pathlib import Path

    from otel_limits.ledger.address import Address
    from otel_limits.ledger.rows import Row

DAMAGED: Final = "damaged"
ACCEPTED: Final = "accepted"
PRUNED: Final = "pruned"


@dataclass(frozen=True, slots=True)
class Damage:
    """Lines of a spill file that were not rows."""

    id: str
    file: str
    lines: int
    accepted: Any = None
    """The record that accepts them; `None` if there is none."""


def damaged_row(kept: Path, lines: Sequence[bytes]) -> Row:
    """Record the damaged lines of a restored spill file, which is kept under another name."""
    file = os.fsencode(kept).decode(errors="backslashreplace")
    # Of the content too: a restored file that is restored again changes nothing, and another one of
    # the same name is recorded.
    digest = hashlib.blake2s(file.encode() + b"".join(lines), digest_size=16).hexdigest()
    return _row(f"{DAMAGED}-{digest}", DAMAGED, file, amount=len(lines))


def dropped_row(rows: int) -> Row:
    """Record that rows of this process were lost, as no file had accepted them in time."""
    identity = f"{DAMAGED}-{uuid.uuid4().hex}"
    return _row(identity, DAMAGED, f"memory of process {os.getpid()}", amount=rows)


def accepted_row(damage: Damage, reason: str) -> Row:
    """Record that an operator accepts the loss of damaged lines."""
    identity = damage.id.replace(DAMAGED, ACCEPTED)
    return _row(identity, ACCEPTED, damage.file, amount=damage.lines, reason=reason)


def declared_lost_row(invocation_id: str) -> Row:
    """Record that an operator ended an invocation as lost."""
    return _row(f"{LOST}-{invocation_id}", LOST, invocation_id)


def pruned_row(ledger: Address, before_us: int) -> Row:
    """Record up to which end budget trees were deleted: one row per day, with the latest time."""
    day = microseconds(time.time()) // DAY_MICROSECONDS
    # Those of two ledgers are different rows once these are merged: each is closed.
    digest = hashlib.blake2s(os.fsencode(ledger.name), digest_size=8).hexdigest()
    return _row(f"{PRUNED}-{day}-{digest}", PRUNED, "", until_us=before_us)


def _row(identity: str, kind: str, subject: str, **more: Any) -> Row:
    reason = more.pop("reason", None)
    return {
        "id": identity,
        "at_us": microseconds(time.time()),
        "kind": kind,
        "subject": subject,
        "amount": more.get("amount"),
        "until_us": more.get("until_us"),
        "changed_by": name(f"{_user()}@{socket.gethostname()}"),
        "reason": None if reason is None else clean(reason, MAX_SENTENCE),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        return str(getattr(os, "getuid", lambda: "unknown")())


def damages(connection: sa.Connection) -> list[Damage]:
    """List the damaged spill files that were restored, the oldest first."""
    wanted = RECORDS.kind.in_((DAMAGED, ACCEPTED))
    rows = connection.execute(
        sa.select(MAINTENANCE_TABLE).where(wanted).order_by(RECORDS.at_us, RECORDS.id)
    ).all()
    accepted = {row.id: row for row in rows if row.kind == ACCEPTED}
    return [
        Damage(row.id, row.subject, row.amount, accepted.get(row.id.replace(DAMAGED, ACCEPTED)))
        for row in rows
        if row.kind == DAMAGED
    ]


def pruned_before(connection: sa.Connection) -> int | None:
    """Return the time before which trees that had ended were deleted; `None` for never."""
    statement = sa.select(sa.func.max(RECORDS.until_us)).where(RECORDS.kind == PRUNED)
    found: int | None = connection.execute(statement).scalar()
    return found
