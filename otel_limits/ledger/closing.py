"""Closing the books: digests of each day, which show later that its rows are unchanged.

The canonical form of a row is the JSON array of its columns, in UTF-8 and without spaces, and its
digest is SHA-256 of that. The digest of a day and table is SHA-256 of the digests of its rows, in
their own order: no database has to sort, so that SQLite and PostgreSQL give the same bytes.

The index has the first six bytes of each digest. It shows which rows are new. Without those, the
digest must be that of the close: rows added late hide no change.

Missing rows count as pruned only if retention deleted all that it deletes up to its recorded
border: a border, which anyone can write, hides no deletion of some rows.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import operator
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from otel_limits.core.errors import LedgerError
from otel_limits.core.secrets import redact_value
from otel_limits.ledger.maintenance import pruned_before, retained_trees
from otel_limits.ledger.repricing import RECORDED_PICO, UNPRICED
from otel_limits.ledger.rows import FORMER_PRICE, LOST, dollars
from otel_limits.ledger.schema import (
    ATTRIBUTE_TABLE,
    CALLS,
    DAY_MICROSECONDS,
    INVOCATION_TABLE,
    MAINTENANCE_TABLE,
    MODEL_CALL_TABLE,
    POLICY_TABLE,
    QUOTA_CHANGE_TABLE,
    RUNS,
    TOOL_CALL_TABLE,
    UNCOUNTED_TABLE,
    insertable_columns,
)
from otel_limits.ledger.selection import Joins, Selection, audit_keys
from otel_limits.ledger.totals import SUMMED

FORMAT: Final = "otel-limits/close/1"
OWN_DIGEST: Final = "digest"
"""Key of the digest of everything else in a close."""
EPOCH: Final = date(1970, 1, 1)

PORTION: Final = 2_000
"""Rows fetched together."""

DIGEST: Final = 32
INDEXED: Final = 6
"""Bytes of a digest in the index: with four, a late row would look like a closed one too often."""
PRICES: Final = struct.Struct(">qq")
"""The present price of a call, and what its cache saved, in picodollars: repricing changes both."""
NO_PRICE: Final = sa.cast(sa.literal(-(2**63)), sa.BigInteger)
"""An unknown amount."""

HAS_END: Final = RUNS.ended_us.is_not(None) & (RUNS.action != LOST)
"""The real end of a lost invocation may still be recorded."""


# --- canonical rows -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sealed:
    """A table as it is closed."""

    name: str
    table: sa.Table
    at: sa.ColumnElement[Any]
    """The time that decides to which day a row belongs."""
    columns: tuple[sa.ColumnElement[Any], ...]
    """All that never change."""
    is_pruned: bool = True
    """Whether retention deletes its rows."""

    def rows(
        self,
        connection: sa.Connection,
        since_us: int,
        until_us: int,
        *which: sa.ColumnElement[bool],
    ) -> Iterator[tuple[int, int, int, bytes]]:
        """Iterate over day, both present prices and the canonical form of the rows of some days."""
        prices: tuple[Any, ...] = (NO_PRICE, NO_PRICE)
        within = (self.at >= since_us) & (self.at < until_us)
        if self.table is MODEL_CALL_TABLE:
            both = (CALLS.price_pico, CALLS.cache_saved_pico)
            prices = tuple(sa.func.coalesce(each, NO_PRICE) for each in both)
            # The first column of an index.
            within &= CALLS.day.between(since_us // DAY_MICROSECONDS, until_us // DAY_MICROSECONDS)
        source: sa.FromClause = self.table
        if self.at is RUNS.ended_us:
            within &= HAS_END
            if self.table is not INVOCATION_TABLE:
                source = INVOCATION_TABLE.join(self.table, self.table.c.invocation_id == RUNS.id)
        is_sqlite = connection.dialect.name == "sqlite"
        # SQLite formats a row in less time than its driver takes to read the columns.
        formatted = sa.cast(sa.func.json_array(*self.columns), sa.LargeBinary)
        columns = (formatted,) if is_sqlite else self.columns
        days = (self.at // DAY_MICROSECONDS, *prices)
        statement = sa.select(*days, *columns).select_from(source).where(within, *which)
        result = connection.execute(statement, execution_options={"yield_per": PORTION})
        rows = itertools.chain.from_iterable(result.partitions())
        if is_sqlite:
            yield from rows
            return
        encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
        for day, price, saved, *values in rows:
            yield day, price, saved, encode(values).encode()


def _columns(table: sa.Table, *left_out: str) -> tuple[sa.ColumnElement[Any], ...]:
    columns = (table.c[name] for name in insertable_columns(table) if name not in left_out)
    return tuple(
        # SQLite has no booleans.
        sa.cast(column, sa.Integer) if isinstance(column.type, sa.Boolean) else column
        for column in columns
    )


def _recorded(name: str) -> sa.ColumnElement[Any]:
    """A part of the price with which a call was recorded."""
    former: sa.ColumnElement[Any] = CALLS[f"former_{name}"]
    if name == "price_source":
        former = sa.func.nullif(former, UNPRICED)
    return sa.case((CALLS.former_price_source.is_(None), CALLS[name]), else_=former)


PRICE: Final = ("price_pico", "price_source", "price_version")

SEALED: Final = (
    Sealed(
        "calls",
        MODEL_CALL_TABLE,
        CALLS.at_us,
        (
            *_columns(
                MODEL_CALL_TABLE,
                *("cache_saved_pico", *PRICE, *FORMER_PRICE),
            ),
            *map(_recorded, PRICE),
        ),
    ),
    # Without the totals, which `verify` compares with the calls: calls that are added late, and
    # prices, change them.
    Sealed("invocations", INVOCATION_TABLE, RUNS.ended_us, _columns(INVOCATION_TABLE, *SUMMED)),
    Sealed("attributes", ATTRIBUTE_TABLE, RUNS.ended_us, _columns(ATTRIBUTE_TABLE)),
    Sealed("tools", TOOL_CALL_TABLE, RUNS.ended_us, _columns(TOOL_CALL_TABLE)),
    Sealed("uncounted", UNCOUNTED_TABLE, UNCOUNTED_TABLE.c.at_us, _columns(UNCOUNTED_TABLE)),
    Sealed("grants", QUOTA_CHANGE_TABLE, QUOTA_CHANGE_TABLE.c.at_us, _columns(QUOTA_CHANGE_TABLE)),
    Sealed("policies", POLICY_TABLE, POLICY_TABLE.c.at_us, _columns(POLICY_TABLE)),
    Sealed(
        "maintenance",
        MAINTENANCE_TABLE,
        MAINTENANCE_TABLE.c.at_us,
        _columns(MAINTENANCE_TABLE),
        is_pruned=False,
    ),
)


class Digests:
    """The digests of the rows of one day and table, with the present prices of calls."""

    def __init__(self) -> None:
        """Start without rows."""
        # By the first byte, so that only a part is sorted at a time: a day may have a million rows.
        self._parts = [bytearray() for _ in range(256)]

    def add(self, digest: bytes, prices: bytes) -> None:
        """Add a row."""
        part = self._parts[digest[0]]
        part += digest
        part += prices

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over digests and prices, in the order of the digests."""
        size = DIGEST + PRICES.size
        for part in self._parts:
            for row in sorted(bytes(part[at : at + size]) for at in range(0, len(part), size)):
                yield row[:DIGEST], row[DIGEST:]


def digests_of(
    connection: sa.Connection,
    sealed: Sealed,
    since_us: int,
    until_us: int,
    *which: sa.ColumnElement[bool],
) -> dict[int, Digests]:
    """Compute the digests of the rows of a table, by day."""
    days: dict[int, Digests] = {}
    sha256, pack = hashlib.sha256, PRICES.pack
    for day, price, saved, row in sealed.rows(connection, since_us, until_us, *which):
        digests = days.get(day)
        if digests is None:
            digests = days[day] = Digests()
        digests.add(sha256(row).digest(), pack(price, saved))
    return days


# --- writing a close ------------------------------------------------------------------------------


def first_day(connection: sa.Connection) -> int:
    """Return the first day with rows, since the epoch."""
    times = (table.c[name] for table, name in FIRST_TIMES)
    first = [connection.execute(sa.select(sa.func.min(each))).scalar() for each in times]
    return int(min((each for each in first if each is not None), default=0)) // DAY_MICROSECONDS


FIRST_TIMES: Final = (
    (MODEL_CALL_TABLE, "at_us"),
    (INVOCATION_TABLE, "started_us"),
    (UNCOUNTED_TABLE, "at_us"),
    (QUOTA_CHANGE_TABLE, "at_us"),
    (POLICY_TABLE, "at_us"),
    (MAINTENANCE_TABLE, "at_us"),
)


def unfinished(connection: sa.Connection, until_us: int) -> tuple[list[str], list[str]]:
    """List the invocations that started before a time and are open, and those that are lost."""
    started = RUNS.started_us < until_us
    of_kind = (RUNS.ended_us.is_(None), RUNS.action == LOST)
    opened, lost = (
        sorted(connection.scalars(sa.select(RUNS.id).where(started, kind))) for kind in of_kind
    )
    return opened, lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The days of a close."""

    since: date | None
    """`None` for the first day of the ledger."""
    until: date
    """Exclusive."""

    def microseconds(self, connection: sa.Connection) -> tuple[int, int]:
        """Return its first microsecond and the one after it."""
        since = first_day(connection) if self.since is None else (self.since - EPOCH).days
        until = (self.until - EPOCH).days
        return min(since, until) * DAY_MICROSECONDS, until * DAY_MICROSECONDS


def close(
    connection: sa.Connection, period: Period, tenant_key: str, after: str | None, pending: int
) -> dict[str, Any]:
    """Compute the close of a period.

    Args:
        connection: The ledger.
        period: The days.
        tenant_key: Audit key by which sums are grouped.
        after: SHA-256 of the previous close.
        pending: Rows in spill files, which are not included.
    """
    since_us, until_us = period.microseconds(connection)
    days: dict[str, dict[str, Any]] = {}
    for sealed in SEALED:
        found = digests_of(connection, sealed, since_us, until_us)
        while found:  # each day frees its memory
            number, digests = found.popitem()
            days.setdefault(_name(number), {})[sealed.name] = _seal(digests, sealed)
    for number, sums in _sums(connection, since_us, until_us, tenant_key):
        days.setdefault(_name(number), {}).setdefault(SUMS, []).append(sums)
    for day in days.values():
        day.get(SUMS, []).sort(key=lambda row: [row[key] or "" for key in KEYS])
    opened, lost = unfinished(connection, until_us)
    document = {
        "format": FORMAT,
        "version": importlib.metadata.version("otel-limits"),
        "after": after,
        "since": None if period.since is None else period.since.isoformat(),
        "until": period.until.isoformat(),
        "tenant_key": tenant_key,
        "open_invocations": opened,
        "lost_invocations": lost,
        "pending_rows": pending,
        "days": days,
    }
    return {**document, OWN_DIGEST: digest_of(document)}


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the text of a close, without the line that has it."""
    return _digest_of_lines(as_text(document).encode())


def _digest_of_lines(text: bytes) -> str:
    """Return the SHA-256 of a file without that line, as `grep -v | sha256sum` does."""
    lines = text.splitlines(keepends=True)
    others = (line for line in lines if not line.startswith(f' "{OWN_DIGEST}"'.encode()))
    return hashlib.sha256(b"".join(others)).hexdigest()


def as_text(document: Mapping[str, Any]) -> str:
    """Format a close: the same bytes for the same content."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _name(day: int) -> str:
    return (EPOCH + timedelta(days=day)).isoformat()


def _seal(digests: Digests, sealed: Sealed) -> dict[str, Any]:
    rows, prices, index, count = hashlib.sha256(), hashlib.sha256(), bytearray(), 0
    for digest, price in digests:
        rows.update(digest)
        prices.update(price)
        index += digest[:INDEXED]
        count += 1
    document = {
        "rows": count,
        "sha256": rows.hexdigest(),
        "index": base64.b64encode(index).decode(),
    }
    if sealed.table is MODEL_CALL_TABLE:
        document["prices_sha256"] = prices.hexdigest()
    return document


KEYS: Final = ("agent", "model", "tenant")
TOKENS: Final = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")
FIGURES: Final = ("calls", *TOKENS, "usd_recorded")
PRESENT: Final = ("usd_present", "unpriced_calls")
"""Figures that repricing changes."""
FIGURE: Final = re.compile(r"-?\d{1,40}(\.\d{1,40})?", re.ASCII)
"""A figure in a close, whether it is a number or text."""
SUMS: Final = "sums"
"""Key of the sums of a day, next to its tables."""


def _sums(
    connection: sa.Connection, since_us: int, until_us: int, tenant_key: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Add up the calls of each day by agent, model and tenant."""
    joins = Joins(MODEL_CALL_TABLE)
    # Without a join for a key that no invocation has.
    has_key = tenant_key in audit_keys(connection)
    tenant: Any = joins.column(f"key:{tenant_key}") if has_key else sa.null()
    keys = [CALLS.day, CALLS.agent, CALLS.model, *([tenant] if has_key else [])]
    figures = [
        sa.func.count(),
        *(sa.func.sum(CALLS[name]) for name in TOKENS),
        sa.func.sum(RECORDED_PICO),
        sa.func.sum(CALLS.price_pico),
        sa.func.count().filter(CALLS.price_pico.is_(None)),
    ]
    selection = Selection(since_us=since_us, until_us=until_us)
    for row in connection.execute(joins.select(selection, *keys, *figures).group_by(*keys)):
        day, *of_group = row[: len(keys)]
        calls, *tokens, recorded, present, unpriced = (int(each or 0) for each in row[len(keys) :])
        yield (
            int(day),
            {
                **dict(zip(KEYS, [*of_group, None], strict=False)),
                "calls": calls,
                **dict(zip(TOKENS, tokens, strict=True)),
                "usd_recorded": f"{dollars(recorded):f}",
                "usd_present": f"{dollars(present):f}",
                "unpriced_calls": unpriced,
            },
        )


# --- comparing a close ----------------------------------------------------------------------------


@dataclass(slots=True)
class Difference:
    """How the rows of one day and table differ from a close."""

    day: str
    table: str
    counts: dict[str, int] = field(default_factory=dict)
    """Rows by kind: missing, changed, added late, pruned; 0 for repriced, of an unknown number."""


MISSING: Final = "missing"
CHANGED: Final = "changed"
LATE: Final = "added late"
REPRICED: Final = "repriced"
GONE: Final = "pruned"
FAILING: Final = (MISSING, CHANGED)
"""Differences that no regular operation of a ledger makes."""


@dataclass(frozen=True, slots=True)
class Close:
    """A close that was read from a file."""

    path: Path
    sha256: str
    document: Mapping[str, Any]
    is_original: bool
    """Whether its text has its own digest, so that it was not edited or damaged."""

    @property
    def is_close(self) -> bool:
        """Whether it names its format and its days."""
        try:
            return self.document["format"] == FORMAT and bool(self.period)
        except (KeyError, TypeError, ValueError):
            return False

    @property
    def is_comparable(self) -> bool:
        """Whether it is original and has the form of a close: anyone can recompute a digest."""
        days = self.document.get("days")
        has_days = isinstance(days, dict) and all(_is_day(*each) for each in days.items())
        return (
            self.is_original
            and self.is_close
            and has_days
            and isinstance(self.document.get("tenant_key"), str)
        )

    @property
    def period(self) -> Period:
        """Its days."""
        since = self.document["since"]
        return Period(
            since=None if since is None else date.fromisoformat(since),
            until=date.fromisoformat(self.document["until"]),
        )


def read_close(path: Path) -> Close:
    """Read a close. Of a damaged one, the document can be empty.

    Raises:
        LedgerError: The file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"{redact_value(str(path))} cannot be read: {error.strerror}.") from None
    document: object = None
    with contextlib.suppress(RecursionError, ValueError):
        document = json.loads(content)
    if not isinstance(document, dict):
        document = {}
    is_original = document.get(OWN_DIGEST) == _digest_of_lines(content)
    return Close(path, hashlib.sha256(content).hexdigest(), document, is_original)


def _is_day(name: str, tables: object) -> bool:
    """Return whether this is a day of a close, with its tables and sums."""
    if not isinstance(tables, dict) or not _is_date(name):
        return False
    sums, names = tables.get(SUMS, []), {each.name for each in SEALED}
    return (
        isinstance(sums, list)
        and all(_is_sum(row) for row in sums)
        and all(name in names and _is_seal(each) for name, each in tables.items() if name != SUMS)
    )


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _is_seal(seal: object) -> bool:
    """Return whether this is what a close has of the rows of a day and table."""
    if not isinstance(seal, dict) or type(seal.get("rows")) is not int:
        return False
    texts = [seal.get(name) for name in ("sha256", "index")]
    texts += [seal[name] for name in ("prices_sha256",) if name in seal]
    if not all(isinstance(each, str) for each in texts):
        return False
    try:
        return len(base64.b64decode(seal["index"], validate=True)) % INDEXED == 0
    except ValueError:
        return False


def _is_sum(row: object) -> bool:
    """Return whether this is a sum of a day, with the keys and figures of all sums."""
    if not isinstance(row, dict):
        return False
    has_keys = all(name in row and isinstance(row[name], str | None) for name in KEYS)
    figures = (str(row.get(name)) for name in (*FIGURES, *PRESENT))
    return has_keys and all(FIGURE.fullmatch(each) is not None for each in figures)


def compare(connection: sa.Connection, close: Close) -> Iterator[Difference]:
    """Compare the ledger with a close; yields each day and table that differs, and its sums."""
    since_us, until_us = close.period.microseconds(connection)
    days = close.document["days"]
    if days:  # the first rows may have been deleted
        since_us = min(since_us, (date.fromisoformat(min(days)) - EPOCH).days * DAY_MICROSECONDS)
    of_rows = list(_row_differences(connection, days, since_us, until_us))
    sums: dict[str, list[Mapping[str, Any]]] = {}
    for number, group in _sums(connection, since_us, until_us, close.document["tenant_key"]):
        sums.setdefault(_name(number), []).append(group)
    yield from of_rows
    yield from _sum_differences(days, sums, of_rows)


def _row_differences(
    connection: sa.Connection, days: Mapping[str, Any], since_us: int, until_us: int
) -> Iterator[Difference]:
    border = pruned_before(connection) or 0
    outliving = _outliving(connection, days, since_us, border) if border else Counter()
    if outliving is None:
        border, outliving = 0, Counter()
    for sealed in SEALED:
        found = {
            _name(number): digests
            for number, digests in digests_of(connection, sealed, since_us, until_us).items()
        }
        closed = {day for day, tables in days.items() if sealed.name in tables}
        for day in sorted(closed | set(found)):
            begin = (date.fromisoformat(day) - EPOCH).days * DAY_MICROSECONDS
            counts = _difference(
                days.get(day, {}).get(sealed.name, {}),
                found.pop(day, Digests()),
                is_pruned=sealed.is_pruned and begin < border,
                late=outliving[day, sealed.name],
            )
            if counts:
                yield Difference(day, sealed.name, counts)


def _sum_differences(
    days: Mapping[str, Any],
    sums: Mapping[str, Sequence[Mapping[str, Any]]],
    of_rows: Sequence[Difference],
) -> Iterator[Difference]:
    """Compare the sums of each day whose calls are as they were closed."""
    calls = {each.day: set(each.counts) for each in of_rows if each.table == "calls"}
    # Attributes that are recorded late, e.g. by another import, divide the same calls by tenant.
    has_tenants = all(each.table != "attributes" for each in of_rows)
    keys = KEYS if has_tenants else KEYS[:-1]
    for day in sorted({*days, *sums}):
        found = calls.get(day, set())
        if found <= {REPRICED}:
            names = FIGURES if found else (*FIGURES, *PRESENT)
            closed = _added_up(days.get(day, {}).get(SUMS, ()), keys, names)
            present = _added_up(sums.get(day, ()), keys, names)
            different = {group for group, _ in closed.items() ^ present.items()}
            if different:
                yield Difference(day, SUMS, {CHANGED: len(different)})


def _added_up(
    sums: Iterable[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str]
) -> dict[tuple[str | None, ...], tuple[Decimal, ...]]:
    """Add up the sums of groups that share some keys."""
    totals: dict[tuple[str | None, ...], tuple[Decimal, ...]] = {}
    for row in sums:
        group = tuple(row[key] for key in keys)
        before = totals.get(group, (Decimal(),) * len(names))
        added = (Decimal(row[name]) for name in names)
        totals[group] = tuple(map(operator.add, before, added))
    return totals


def _outliving(
    connection: sa.Connection, days: Mapping[str, Any], since_us: int, border: int
) -> Counter[tuple[str, str]] | None:
    """Count the rows by day and table that retention would have deleted up to a border.

    They came later, such as by a merge. `None` if a closed row is among them: then it was not
    retention that deleted the missing ones.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for sealed in (each for each in SEALED if each.is_pruned):
        has_owner = "invocation_id" in sealed.table.c
        owner = sealed.table.c["invocation_id" if has_owner else "id"]
        of_old_trees = owner.not_in(retained_trees(border))
        found = digests_of(connection, sealed, since_us, border, of_old_trees)
        for day, digests in ((_name(number), found[number]) for number in found):
            index = base64.b64decode(days.get(day, {}).get(sealed.name, {}).get("index", ""))
            closed = {index[at : at + INDEXED] for at in range(0, len(index), INDEXED)}
            for digest, _ in digests:
                if digest[:INDEXED] in closed:
                    return None
                counts[day, sealed.name] += 1
    return counts


def _difference(
    closed: Mapping[str, Any], digests: Digests, *, is_pruned: bool, late: int
) -> dict[str, int]:
    """Compare the rows of a day and table, of which some are known to be no changed ones."""
    index = base64.b64decode(closed.get("index", ""))
    rows, prices = hashlib.sha256(), hashlib.sha256()
    missing = added = at = 0
    for digest, price in digests:
        start = digest[:INDEXED]
        # Both are sorted.
        while at < len(index) and index[at : at + INDEXED] < start:
            missing += 1
            at += INDEXED
        if index[at : at + INDEXED] == start:
            at += INDEXED
            rows.update(digest)
            prices.update(price)
        else:
            added += 1
    missing += (len(index) - at) // INDEXED
    counts = {}
    changed = replaced = min(missing, added - late)
    if not missing and closed and rows.hexdigest() != closed["sha256"]:
        changed = 1  # another row has the same start
    # The index decides which rows are closed, and people read the number.
    if closed and closed["rows"] != len(index) // INDEXED:
        changed = changed or 1
    counts[CHANGED] = changed
    counts[GONE if is_pruned else MISSING] = missing - replaced
    counts[LATE] = added - replaced
    if not missing and prices.hexdigest() != closed.get("prices_sha256", prices.hexdigest()):
        counts[REPRICED] = 0
    return {kind: count for kind, count in counts.items() if count or kind == REPRICED}


def broken_links(closes: Sequence[Close]) -> list[str]:
    """Describe where closes do not follow each other."""
    in_order = sorted(
        (close for close in closes if close.is_close), key=lambda close: close.period.until
    )
    return [
        f"{later.path} does not follow {earlier.path}"
        for earlier, later in itertools.pairwise(in_order)
        if later.document.get("after") != earlier.sha256
    ]
