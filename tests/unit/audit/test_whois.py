"""Hashes of a name, and whether a ledger contains it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context

from otel_limits import disable, enable
from otel_limits.cli import main
from otel_limits.core.events import QuotaGrant
from otel_limits.core.limits import Breach
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.quotas.keys import Template
from otel_limits.runs.conversations import conversation_hash, keyed_identity
from otel_limits.testing import ScriptedModel, endless, uses
from tests.ledger.book import NINE, Entry, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile

POLICY = """
quotas:
  users: {tokens: 9, window: day, key: baggage.user}
  pairs: {tokens: 9, window: day, key: "{agent}/{baggage.user}"}
  agents: {tokens: 9, window: day, key: agent}
"""


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The answer in JSON."""
    capsys.readouterr()
    assert main(["audit", "whois", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows_of(answer: Any) -> set[tuple[Any, ...]]:
    """Kind, subject, hash and number of records of each row."""
    names = ("kind", "of", "hash", "records")
    return {tuple(row[name] for name in names) for row in answer["whois"]}


def hashed(value: str) -> str:
    """A value as keys show it."""
    return "#" + hashlib.blake2b(value.encode(), digest_size=16).hexdigest()[:12]


def fill(ledger: LedgerFile, granted_at: float = NINE) -> None:
    """Joe has a conversation, an audited invocation, and a grant for one of his keys."""
    write(
        ledger.address,
        Entry(attributes={"user.id": "joe"}, conversation=conversation_hash("worker", "joe")),
        Entry(agent="joe", session="joe", at=NINE + 60),
    )
    observer = LedgerObserver(ledger.address)
    shown = Template("{agent}/{baggage.user}").key_of_text("pairs", "worker/joe").shown
    observer(
        QuotaGrant(
            quota="pairs",
            key=shown,
            change="grant",
            amount=5,
            unit="tokens",
            until=None,
            by="dana@ops",
            at=granted_at,
            id="1" * 32,
        )
    )
    observer.close()


@pytest.fixture
def halted_joe(
    ledger: LedgerFile, tmp_path: Path, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota in memory, which records no charges, halts an agent for Joe."""
    halt_joe(tmp_path, make_agent, monkeypatch, "baggage.user")


def halt_joe(
    tmp_path: Path, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Halt an agent for Joe, by the first of two quotas with a key."""
    policy = tmp_path / "limits.yaml"
    policy.write_text(
        "quotas:\n"
        f"  users: {{model_calls: 2, window: year, key: '{key}'}}\n"
        f"  others: {{model_calls: 9, window: year, key: '{key}'}}\n"
    )
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    enable()
    token = context.attach(baggage.set_baggage("user", "joe"))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    context.detach(token)
    disable()


def test_hashes_of_a_name_are_found(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a value, in keys of several parts, as a conversation, and in the open."""
    fill(ledger)
    answer = asked(capsys, "joe")
    assert rows_of(answer) == {
        ("value of a key", None, hashed("joe"), 1),
        ("key of a quota", "pairs", f"worker/{hashed('joe')}", 1),
        ("conversation", "worker", conversation_hash("worker", "joe"), 1),
        ("agent", None, None, 1),
        ("session", None, None, 1),
        ("audit key", "user.id", None, 1),
    }
    assert {row["known"] for row in answer["whois"]} == {"yes"}
    assert {row["first"] for row in answer["whois"] if row["kind"] == "agent"} == {
        "2025-10-09T09:01:00+00:00"
    }
    assert answer["summary"] == "The ledger contains the name."
    # Of several parts, without a policy file, as the ledger has such a key.
    composite = rows_of(asked(capsys, "worker/joe"))
    assert ("key of a quota", "pairs", f"worker/{hashed('joe')}", 1) in composite


def test_hashes_of_an_unknown_name_follow_from_the_policy_file(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known, so nothing is claimed."""
    fill(ledger)
    policy = tmp_path / "limits.yaml"
    policy.write_text(POLICY)
    answer = asked(capsys, "worker/ann", "--policy", str(policy))
    assert rows_of(answer) == {
        ("value of a key", None, hashed("worker/ann"), 0),
        ("key of a quota", "users", hashed("worker/ann"), 0),
        ("key of a quota", "pairs", f"worker/{hashed('ann')}", 0),
    }
    assert {(row["known"], row["first"]) for row in answer["whois"]} == {("no", None)}
    assert answer["summary"] == "The ledger does not contain the name."
    # Other values have this key, too.
    answer = asked(capsys, "a\u3000b", "--policy", str(policy))
    assert rows_of(answer) == set()
    assert answer["summary"] == (
        "The ledger does not contain the name. No key has it, since it contains the character "
        "'\\u3000', which is not printable. Calls with such a value count as '(invalid)'."
    )


@pytest.mark.usefixtures("halted_joe")
def test_a_halt_by_a_quota_in_memory_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Its charges are not recorded, but the sentence about the halt is."""
    answer = asked(capsys, "joe")
    assert rows_of(answer) == {
        ("value of a key", None, hashed("joe"), 1),
        ("key of a quota", "users", hashed("joe"), 1),
        ("key of a quota", "others", hashed("joe"), 0),
    }
    assert answer["summary"] == "The ledger contains the name."
    assert {row["known"] for row in asked(capsys, "ann")["whois"]} == {"no"}


def test_a_key_follows_from_audit_keys_of_calls_without_charges(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the answer about the use of quotas."""
    write(ledger.address, Entry(attributes={"user": "joe"}), Entry(attributes={"user": "ann"}))
    policy = tmp_path / "limits.yaml"
    policy.write_text(POLICY)
    rows = rows_of(asked(capsys, "joe", "--policy", str(policy)))
    assert ("value of a key", None, hashed("joe"), 2) in rows
    assert ("key of a quota", "users", hashed("joe"), 1) in rows
    assert ("key of a quota", "pairs", f"worker/{hashed('joe')}", 1) in rows
    # Without a hash, the name itself is the key.
    assert ("key of a quota", "agents", None, 2) in rows_of(
        asked(capsys, "worker", "--policy", str(policy))
    )


def test_first_and_last_record_of_a_hash_are_found_in_any_order(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changes by operators are read before calls."""
    fill(ledger, granted_at=NINE + 9)
    write(ledger.address, Entry(attributes={"user": "joe"}), first=9)
    policy = tmp_path / "limits.yaml"
    policy.write_text(POLICY)
    answer = asked(capsys, "joe", "--policy", str(policy))
    (pair,) = (row for row in answer["whois"] if row["of"] == "pairs")
    times = ("2025-10-09T09:00:00+00:00", "2025-10-09T09:00:09+00:00")
    assert (pair["records"], pair["first"], pair["last"]) == (2, *times)


def test_a_hash_is_found_with_the_name_that_the_ledger_has(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Someone who reads it in the message of a halt asks whose it is."""
    fill(ledger)
    observed = asked(capsys, hashed("joe"))
    pair = ("key of a quota", "pairs", f"worker/{hashed('joe')}", 1)
    name_rows = {
        ("agent", None, None, 1),
        ("session", None, None, 1),
        ("audit key", "user.id", None, 1),
    }
    value = ("value of a key", None, hashed("joe"), 1)
    assert rows_of(observed) == {value, pair, *name_rows}
    assert observed["summary"] == (
        f"The ledger contains the hash. {hashed('joe')} is the hash of 'joe', recorded as audit "
        "key user.id."
    )
    # A key of several parts is that key only.
    observed = asked(capsys, f"worker/{hashed('joe')}")
    assert rows_of(observed) == {value, pair, *name_rows}
    assert "the hash of 'joe'" in observed["summary"]
    assert pair not in rows_of(asked(capsys, f"other/{hashed('joe')}"))


@pytest.mark.usefixtures("halted_joe")
def test_a_hash_without_a_name_names_its_audit_key(capsys: pytest.CaptureFixture[str]) -> None:
    """A hash cannot be turned into a name; the halt is found even with a quota in memory."""
    answer = asked(capsys, hashed("joe"))
    assert rows_of(answer) == {
        ("value of a key", None, hashed("joe"), 1),
        ("key of a quota", "users", hashed("joe"), 1),
    }
    assert answer["summary"] == (
        "The ledger contains the hash. Its name is not recorded, and a hash cannot be turned into "
        "a name. With OTEL_LIMITS_AUDIT_KEYS=user, the names of later invocations are recorded."
    )
    answer = asked(capsys, hashed("ann"))
    assert answer["summary"].startswith("The ledger does not contain the hash.")
    assert {row["known"] for row in answer["whois"]} == {"no"}
    # In a shell, # begins a comment.
    assert asked(capsys, hashed("joe")[1:])["summary"] == (
        "The ledger does not contain the name. Write the hash of a key with its #, and in quotes."
    )
    for name in ("joe", "cafe", "550e8400-e29b-41d4-a716-446655440000"):
        assert "Write the hash" not in asked(capsys, name)["summary"]


def test_a_hash_is_not_that_of_a_key_that_contains_it(
    ledger: LedgerFile,
    tmp_path: Path,
    make_agent: MakeAgent,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A halt names the whole key."""
    halt_joe(tmp_path, make_agent, monkeypatch, "{baggage.user}/{agent}")
    assert rows_of(asked(capsys, hashed("joe"))) == {("value of a key", None, hashed("joe"), 1)}
    whole = f"{hashed('joe')}/tester"
    assert ("key of a quota", "users", whole, 1) in rows_of(asked(capsys, whole))


def test_word_of_a_halt_is_no_key(ledger: LedgerFile, capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence names the key "for #182838919694" before "no price for model 'm'"."""
    note = f"quota 'users' for {hashed('joe')} is in USD, and no price for model 'm' is known"
    breach = Breach("users", 1, 0, "quota_exceeded", "USD", note=note)
    write(ledger.address, Entry(breach=breach, reason="quota_exceeded", action="halted"))
    assert ("key of a quota", "users", hashed("joe"), 1) in rows_of(asked(capsys, hashed("joe")))
    assert rows_of(asked(capsys, "model")) == {("value of a key", None, hashed("model"), 0)}


def test_a_conversation_is_found_by_its_name_and_by_its_hash(
    ledger: LedgerFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The name is the ID of a session, or the value that names conversations."""
    keyed = conversation_hash("worker", keyed_identity("attribute.user.id", "joe"))
    thread = conversation_hash("worker", "anna")
    write(
        ledger.address,
        Entry(attributes={"user.id": "joe"}, conversation=keyed),
        Entry(session="anna", conversation=thread),
    )
    monkeypatch.setenv("OTEL_LIMITS_CONVERSATION_KEY", "attribute.user.id")
    policy = tmp_path / "limits.yaml"
    policy.write_text(POLICY)
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    for name, hash_, place in (("anna", thread, "session"), ("joe", keyed, "audit key user.id")):
        row = ("conversation", "worker", hash_, 1)
        assert row in rows_of(asked(capsys, name))
        for text in (hash_, hash_[:12]):
            answer = asked(capsys, text)
            assert row in rows_of(answer)
            # The hash of the hash is in no key.
            assert {kind for kind, *_ in rows_of(answer)} == {
                "conversation",
                place.removesuffix(" user.id"),
            }
            assert answer["summary"] == (
                f"The ledger contains the hash. {hash_} is the hash of {name!r}, recorded as "
                f"{place}."
            )


def test_broken_policy_file_leaves_recorded_keys(
    ledger: LedgerFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only unrecorded keys need the file of the environment, and the answer says it."""
    fill(ledger)
    policy = tmp_path / "limits.yaml"
    policy.write_text("defaults: {limits: {max_turn: 3}}\n" + POLICY)
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    answer = asked(capsys, "worker/joe")
    assert ("key of a quota", "pairs", f"worker/{hashed('joe')}", 1) in rows_of(answer)
    assert answer["summary"] == (
        "The ledger contains the name. The policy file contains mistakes and was not used: "
        "otel-limits check lists them."
    )


def test_a_question_stores_nothing_and_its_answer_has_no_name(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that is filed is no list of names and their hashes."""
    write(ledger.address, Entry(), Entry(agent="joe.public@example.com"))
    policy = tmp_path / "limits.yaml"
    policy.write_text(POLICY)
    files = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    for form in ("table", "json", "csv", "html"):
        for name in ("joe.public@example.com", "jane.public@example.com"):
            arguments = ("--policy", str(policy), "--format", form)
            assert main(["audit", "whois", name, *arguments]) == 0
            assert "public" not in capsys.readouterr().out
    after = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    assert not any(b"jane.public" in each for each in after.values())
    assert after[ledger.path] == files[ledger.path]
