"""The question `whois`: under which hashes a ledger has a name, and which name a hash belongs to.

Nothing of the question is stored, and the answer does not repeat a name that is asked for, so it
can be filed. The name of a hash is in the answer only if the ledger has it in the open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from otel_limits.audit.answer import Answer, Column, Table
from otel_limits.audit.question import AuditQuery, Option, Question
from otel_limits.core.labels import quoted

if TYPE_CHECKING:
    from otel_limits.ledger.queries import Place
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
BARE_HASH: Final = re.compile(r"(?<![#\w-])[0-9a-f]{12}(?![\w-])")
"""Such a value without its #, which begins a comment in a shell."""
CONVERSATION: Final = re.compile(r"[0-9a-f]{8,32}")
"""The hash of a conversation, or its first characters."""


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


@dataclass(frozen=True, slots=True)
class Asked:
    """The text of the question: a name, or hashes as they are shown."""

    text: str
    values: tuple[str, ...]
    """The values of keys that it means, as they are shown; none if no key can have it."""
    is_hash: bool

    @classmethod
    def of(cls, text: str) -> Asked:
        """Read the text: `joe`, `worker/joe`, `#77f94bd05649` or `worker/#77f94bd05649`."""
        from otel_limits.quotas.keys import displayed, key_text, unusable

        hashes = tuple(dict.fromkeys(match[0] for match in HASHED.finditer(text)))
        value = () if unusable(text) else (displayed("baggage", key_text(text)),)
        return cls(text, hashes or value, bool(hashes))

    def means(self, key: str) -> bool:
        """Return whether a displayed key has the value, or is the key that is asked for."""
        # The hash in `worker/#77f94bd05649` is that of one part, which other keys have, too.
        is_part = self.is_hash and self.text not in self.values
        is_value = not is_part and any(value in key for value in self.values)
        return key == self.text or is_of(key, self.text) or is_value


def whois(inquiry: AuditQuery, name: str, policy: str | None) -> Answer:
    """Answer under which hashes a name is recorded, or which name a hash belongs to.

    Raises:
        ConfigurationError: The given policy file contains mistakes.
    """
    from otel_limits.quotas.keys import unusable
    from otel_limits.settings.policy.file import usable_document, valid_document

    # Without the file of the environment, the forms of keys follow from those recorded.
    document, remark = (valid_document(policy), "") if policy else usable_document()
    asked = Asked.of(name)
    values, keys = records_of(inquiry, document, asked)
    conversations = list(conversations_of(inquiry, document, name))
    is_conversation = any(each.kind.startswith(name) for each in conversations)
    is_hash = asked.is_hash or is_conversation
    if is_conversation:  # it is in a key only if a name looks like it
        values = {value: found for value, found in values.items() if found.records}
        keys = {key: found for key, found in keys.items() if found.records}
    rows = [
        *(("value of a key", None, value, *found.figures) for value, found in values.items()),
        # A key of agents and models is the name itself.
        *(
            ("key of a quota", quota, None if key == name and not is_hash else key, *found.figures)
            for (quota, key), found in keys.items()
        ),
        *(("conversation", each.of, each.kind, "yes", *each[2:]) for each in conversations),
        *places_of(inquiry, name),
    ]
    sentences: list[str] = []
    if is_hash:
        named = list(names_of(inquiry, document, asked, {each.kind for each in conversations}))
        rows += [row for each in named for row in places_of(inquiry, each.name)]
        sentences += map(str, named) if named else hints(document, asked, keys)
    is_known = any(row[3] == "yes" for row in rows)
    verb = "contains" if is_known else "does not contain"
    if not is_known and BARE_HASH.search(name):
        sentences.append("Write the hash of a key with its #, and in quotes.")
    if not (asked.values or keys):
        sentences.append(f"No key has it, since it {unusable(name)}")
    first = f"The ledger {verb} the {'hash' if is_hash else 'name'}."
    return Answer(
        question="whois",
        title="Hashes of a name",
        about=inquiry.about,
        tables=[
            Table(
                name="whois",
                title="Hashes of the name",
                columns=COLUMNS,
                rows=list(dict.fromkeys(rows)),
                note="Records: calls, halts and operator changes of a quota key, otherwise "
                "invocations. "
                "The form of a key follows from the policy file, or from recorded keys; only its "
                "values from baggage and attributes are hashed.",
            )
        ],
        summary=" ".join(filter(None, [first, *sentences, remark])),
    )


# --- keys of quotas -------------------------------------------------------------------------------


def records_of(
    inquiry: AuditQuery, document: Document, asked: Asked
) -> tuple[dict[str, Found], dict[tuple[str, str], Found]]:
    """Find the records of the values, and of the keys of each quota that have them."""
    values = {value: Found() for value in asked.values}
    # The form of a key says nothing about a hash: several quotas may have the same.
    written = () if asked.is_hash else keys_in(document, asked.text)
    # A key of agents and models has no hash, so it is only of interest if it is recorded.
    keys = {(quota.name, key.shown): Found() for quota, key in written if key.shown != asked.text}
    for at_us, quota, key in (*recorded_keys(inquiry), *derived_keys(inquiry, document)):
        for value, found in values.items():
            if value in key:
                found.add(at_us)
        if asked.means(key):
            keys.setdefault((quota, key), Found()).add(at_us)
    add_halts(inquiry, asked, values, keys)
    return values, keys


def add_halts(
    inquiry: AuditQuery,
    asked: Asked,
    values: dict[str, Found],
    keys: dict[tuple[str, str], Found],
) -> None:
    """Add the halts by quotas: not every call has a charge or an audit key, but they name a key."""
    from otel_limits.ledger import queries

    for at_us, quota, sentence in queries.halts_naming(inquiry.connection, "#"):
        for value, found in values.items():
            if value in sentence:
                found.add(at_us)
        if asked.is_hash and is_about(sentence, asked.text):
            keys.setdefault((quota, asked.text), Found())
        for (of, key), found in keys.items():
            if of == quota and is_about(sentence, key):
                found.add(at_us)


def is_about(sentence: str, key: str) -> bool:
    """Return whether the sentence of a halt names a key, and not one that contains it."""
    return re.search(rf" for {re.escape(key)}(?![^\s:;,.])", sentence) is not None


def keys_in(document: Document, name: str) -> Iterator[tuple[Quota, Key]]:
    """Yield the keys of the quotas of a policy file that have the form of a name."""
    for entry in document.quotas.values():
        quota: Quota = entry.value
        if quota.key.sources:
            try:
                keys = quota.key.keys_of_text(quota.name, name)
            except ValueError:  # of another form
                continue
            yield from ((quota, key) for key in keys)


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


def is_of(key: str, name: str) -> bool:
    """Return whether a displayed key is that of a name, such as `researcher/joe`."""
    from otel_limits.quotas.keys import displayed, key_text, readings

    # `split` with a group alternates texts and hashes: the odd ones are hashes.
    parts = HASHED.split(key)
    hashes = [f"#{each}" for each in parts[1::2]]
    return any(
        [displayed("baggage", key_text(value)) for value in values] == hashes
        for values in readings(name, parts[::2])
    )


# --- conversations, and names in the open ---------------------------------------------------------


def conversations_of(inquiry: AuditQuery, document: Document, name: str) -> Iterator[Place]:
    """Find the conversations of a name, and those whose hash begins with it."""
    from otel_limits.ledger import queries
    from otel_limits.runs.conversations import conversation_hash

    connection = inquiry.connection
    ids = identities(conversation_keys(document), name)
    hashes = {
        conversation_hash(agent, each): agent
        for agent in queries.agents(connection)
        for each in ids
    }
    for place in queries.conversations(connection, list(hashes)):
        yield place._replace(of=hashes[place.kind])
    if CONVERSATION.fullmatch(name):
        yield from queries.conversations_from(connection, name)


def identities(keys: Iterable[str], name: str) -> list[str]:
    """List the IDs that a conversation of a name may have: of a thread, or of a value."""
    from otel_limits.runs.conversations import keyed_identity

    return [name, *(keyed_identity(key, name) for key in keys)]


def conversation_keys(document: Document) -> list[str]:
    """List what names the conversations of agents, such as `baggage.user`."""
    from otel_limits.settings.settings_reader import read_settings

    policies = document.policies(read_settings().settings.policy).values()
    return sorted({each.conversation_key for each in policies if each.conversation_key})


def places_of(inquiry: AuditQuery, name: str) -> Iterator[tuple[Any, ...]]:
    """Yield rows of the places that have the name in the open."""
    from otel_limits.ledger import queries

    for kind, of, *seen in queries.places(inquiry.connection, name):
        yield kind, of if kind == "audit key" else None, None, "yes", *seen


# --- the name of a hash ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Named:
    """A name that the ledger has in the open, and its hash."""

    hash: str
    name: str
    kind: str
    """An audit key, or what else has the name."""

    def __str__(self) -> str:
        """Return a sentence."""
        return f"{self.hash} is the hash of {quoted(self.name)}, recorded as {self.kind}."


def names_of(
    inquiry: AuditQuery, document: Document, asked: Asked, conversations: set[str]
) -> Iterator[Named]:
    """Find the names of hashes among the values of audit keys, and the IDs of sessions."""
    from otel_limits.ledger import queries
    from otel_limits.quotas.keys import displayed, key_text
    from otel_limits.runs.conversations import conversation_hash

    connection = inquiry.connection
    if asked.is_hash:
        for key, value in inquiry.work.through(queries.audit_values(connection)):
            shown = displayed("baggage", key_text(value))
            if shown in asked.values:
                yield Named(shown, value, f"audit key {key}")
    keys = conversation_keys(document)
    for conversation in sorted(conversations):
        for agent, key, value in queries.names_within(connection, conversation):
            ids = identities(keys, value)
            if any(conversation_hash(agent, each) == conversation for each in ids):
                yield Named(conversation, value, f"audit key {key}" if key else "session")


def hints(document: Document, asked: Asked, keys: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Say that the name of a hash is unknown, and what would record it."""
    from otel_limits.audit.quota_budget import ALWAYS_RECORDED, audit_key_of

    yield "Its name is not recorded, and a hash cannot be turned into a name."
    quotas = {name for name, _ in keys}
    sources = {
        source
        for entry in document.quotas.values()
        if entry.value.name in quotas
        for source in entry.value.key.sources
        if source not in ALWAYS_RECORDED
    }
    names = ",".join(sorted(map(audit_key_of, sources or conversation_keys(document))))
    if names:
        yield f"With OTEL_LIMITS_AUDIT_KEYS={names}, the names of later invocations are recorded."
    elif asked.is_hash:
        yield (
            "Names of later invocations are recorded if OTEL_LIMITS_AUDIT_KEYS has the baggage or "
            "attribute that is the key of the quota."
        )


WHOIS: Final = Question(
    name="whois",
    help="Show the hashes of a name, e.g. of a user, or the name of a hash, and whether the ledger "
    "contains it.",
    answer=whois,
    tables={"whois": COLUMNS},
    options=(
        Option(
            "name",
            "NAME",
            str,
            "value of a key, several as in researcher/joe, the ID of a thread or session, or a "
            "hash as it is shown, e.g. #77f94bd05649",
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
