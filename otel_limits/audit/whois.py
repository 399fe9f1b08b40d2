"""The question `whois`: under which hashes a ledger has a name, if at all.

Nothing of the question is stored, and the answer does not repeat the name, so it can be filed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.question import AuditQuery, Option, Question

if TYPE_CHECKING:
    from otel_limits.quotas.keys import Key
    from otel_limits.quotas.quota import Quota
    from otel_limits.settings.policy.document import Document

COLUMNS: Final = (
    Column("kind", "Kind", is_key=True),
    Column("of", "Of", is_key=True),
    Column("hash", "Hash", "id", is_key=True),
    Column("known", "Known", is_key=True),
    Column("records", "Records", "count"),
    Column("first", "First", "time"),
    Column("last", "Last", "time"),
)
HASHED: Final = re.compile(r"#([0-9a-f]{12})")
"""A value from outside in a key as it is shown."""


@dataclass(slots=True)
class Found:
    """How often the ledger has something, and when."""

    records: int = 0
    first_us: int | None = None
    last_us: int | None = None

    def add(self, at_us: int) -> None:
        """Count a record."""
        self.records += 1
        self.first_us = min(at_us, self.first_us or at_us)
        self.last_us = max(at_us, self.last_us or at_us)

    @property
    def figures(self) -> tuple[Any, ...]:
        """The values of the last four of `COLUMNS`."""
        return ("yes" if self.records else "no", self.records, self.first_us, self.last_us)


def whois(inquiry: AuditQuery, name: str, policy: str | None) -> Answer:
    """Answer under which hashes a name is recorded.

    Raises:
        ConfigurationError: The given policy file contains mistakes.
    """
    from otel_limits.ledger import queries
    from otel_limits.quotas.keys import displayed, key_text
    from otel_limits.settings.policy.file import usable_document, valid_document

    # Without the file of the environment, the forms of keys follow from those recorded.
    document, remark = (valid_document(policy), "") if policy else usable_document()
    shown = displayed("baggage", key_text(name))
    keys = {(quota.name, key.shown): Found() for quota, key in keys_in(document, name)}
    value = Found()
    for at_us, quota, key in (*recorded_keys(inquiry), *derived_keys(inquiry, document)):
        if shown in key:
            value.add(at_us)
        if shown in key or means(key, name):
            keys.setdefault((quota, key), Found()).add(at_us)
    # Not every call has a charge or an audit key, but a halt by a quota names its key.
    for at_us, quota, sentence in queries.halts_naming(inquiry.connection, "#"):
        if shown in sentence:
            value.add(at_us)
        for (of, key), found in keys.items():
            if of == quota and HASHED.search(key) and key in sentence:
                found.add(at_us)
    rows = [
        ("value of a key", None, shown, *value.figures),
        *(("key of a quota", quota, key, *found.figures) for (quota, key), found in keys.items()),
        *others(inquiry, name),
    ]
    is_known = any(row[3] == "yes" for row in rows)
    return Answer(
        question="whois",
        title="Hashes of a name",
        about=inquiry.about,
        tables=[
            Table(
                name="whois",
                title="Hashes of the name",
                columns=COLUMNS,
                rows=rows,
                note="Records: calls, halts and operator changes of a quota key, otherwise "
                "invocations. "
                "The form of a key follows from the policy file, or from recorded keys; only its "
                "values from baggage and attributes are hashed.",
            )
        ],
        summary=" ".join(
            filter(
                None,
                [f"The ledger {'contains' if is_known else 'does not contain'} the name.", remark],
            )
        ),
    )


def keys_in(document: Document, name: str) -> Iterator[tuple[Quota, Key]]:
    """Yield the keys of the quotas of a policy file that have the form of a name."""
    for entry in document.quotas.values():
        quota: Quota = entry.value
        if quota.key.sources:
            try:
                yield quota, quota.key.key_of_text(quota.name, name)
            except ValueError:  # of another form
                continue


def recorded_keys(inquiry: AuditQuery) -> Iterator[tuple[int, str, str]]:
    """Iterate over time, quota and displayed key of each charge and each change."""
    from otel_limits.ledger import queries
    from otel_limits.quotas.recovery import decode_charges

    yield from queries.changed_keys(inquiry.connection)
    for at_us, charges in inquiry.work.through(queries.charged_keys(inquiry.connection)):
        for charge in decode_charges(charges):
            yield at_us, charge.count.quota, charge.count.shown


def derived_keys(inquiry: AuditQuery, document: Document) -> Iterator[tuple[int, str, str]]:
    """Iterate over the keys of calls that recorded no charge, e.g. of quotas in memory.

    They follow from the audit keys of a call, as in `otel-limits audit budget`.
    """
    from otel_limits.audit.quota_budget import RecordedUse, calls_of
    from otel_limits.ledger.rows import MICROSECONDS

    quotas = [RecordedUse(entry.value, None, None) for entry in document.quotas.values()]
    for call in inquiry.work.through(calls_of(inquiry, quotas)) if quotas else ():
        for each in quotas:
            key = each.derived_key(call)
            if key is not None and each.quota.name not in call.charges:
                yield int(call.started * MICROSECONDS), each.quota.name, key.shown


def means(key: str, name: str) -> bool:
    """Return whether a displayed key is that of a name, such as `researcher/joe`."""
    from otel_limits.quotas.keys import displayed, key_text

    parts = HASHED.split(key)
    # `split` with a group alternates texts and hashes: the odd ones are hashes.
    texts = ("(.+?)" if n % 2 else re.escape(part) for n, part in enumerate(parts))
    match = re.fullmatch("".join(texts), name)
    if match is None:
        return False
    hashed = [displayed("baggage", key_text(each)) for each in match.groups()]
    return hashed == [f"#{each}" for each in parts[1::2]]


def others(inquiry: AuditQuery, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield rows of conversations, and of places that have the name in the open."""
    from otel_limits.ledger import queries
    from otel_limits.runs.conversations import conversation_hash

    connection = inquiry.connection
    hashes = {agent: conversation_hash(agent, name) for agent in queries.agents(connection)}
    for conversation, agent, *seen in queries.conversations(connection, hashes):
        yield "conversation", agent, conversation, "yes", *seen
    for kind, of, *seen in queries.places(connection, name):
        yield kind, of if kind == "audit key" else None, None, "yes", *seen


WHOIS: Final = Question(
    name="whois",
    help="Show the hashes of a name, e.g. of a user, and whether the ledger contains it.",
    answer=whois,
    tables={"whois": COLUMNS},
    options=(
        Option(
            "name",
            "NAME",
            str,
            "value of a key, several as in researcher/joe, or the ID of a thread or session",
        ),
        Option(
            "--policy",
            "FILE",
            str,
            "policy file whose quotas have the keys (default: OTEL_LIMITS_POLICY)",
        ),
    ),
    selection=(),
)
