"""Alterations of a ledger that `verify` finds without a close, and the commands it proposes."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from contextlib import closing
from sqlite3 import connect
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits import Limits
from otel_limits.cli import main
from otel_limits.ledger.spill import SpillFiles
from otel_limits.testing import endless, uses
from tests.features.observed import enabled
from tests.features.page import SUBJECTS
from tests.ledger.book import DAY, Call, Entry, write
from tests.unit.audit.test_completeness import ask, change, events_of, record, spill, states

if TYPE_CHECKING:
    from pathlib import Path

    from tests.features.subject import Subject
    from tests.ledger.fixtures import LedgerFile

NOW = time.time() - 60
CALLS = [
    Call(price="0.01", cached=40, tools=["search", "fetch"]),
    Call(price="0.01", written=10, tools=["search"]),
    Call(),
]


def entry(agent: str = "worker", at: float = NOW) -> Entry:
    """Three calls with caches and tools, one of them unpriced."""
    return Entry(agent=agent, calls=CALLS, at=at, attributes={"tenant.id": "acme"})


CALL, RUN, TOOL = (f"otel_limits_{name}" for name in ("model_calls", "invocations", "tool_calls"))


ALTERATIONS = """
    DELETE FROM otel_limits_tool_calls WHERE number = 3: tool calls differ
    DELETE FROM otel_limits_tool_calls WHERE number = 1: tool calls differ
    DELETE FROM otel_limits_tool_calls: tool calls differ
    UPDATE otel_limits_invocations SET tool_calls = 2: tool calls differ
    UPDATE otel_limits_invocations SET tool_calls = 4: tool calls differ
    UPDATE otel_limits_model_calls SET cache_read_tokens = 0: totals differ
    UPDATE otel_limits_invocations SET cache_write_tokens = 0: totals differ
    UPDATE otel_limits_invocations SET unpriced_calls = 0: totals differ
    UPDATE otel_limits_model_calls SET agent = 'other' WHERE number = 2: agent differs
    UPDATE otel_limits_invocations SET agent = 'other': agent differs
"""


@pytest.mark.parametrize("alteration", ALTERATIONS.strip().splitlines())
def test_alteration_of_one_side_is_found_with_a_command_to_look_at_it(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], alteration: str
) -> None:
    """Status, boolean, last line and rows agree, and the command answers about the invocation."""
    write(ledger.address, entry(), entry(agent="calm"))
    assert ask(capsys, "verify")[1]["passed"] is True
    statement, _, trouble = alteration.partition(": ")
    change(ledger, statement.strip())
    status, answer = ask(capsys, "verify")
    assert (status, answer["passed"]) == (1, False)
    assert answer["complete"].startswith("NOT complete: 1 check failed (")
    assert {row["trouble"] for row in answer["rows"]} == {trouble}
    assert "E-" not in str(answer["rows"])  # exact amounts, and no 0E-12
    assert run_command(capsys, answer["rows"][0]["command"]) == 0


def run_command(capsys: pytest.CaptureFixture[str], command: str) -> int:
    """Run a command that an answer proposes."""
    program, *arguments = shlex.split(command)
    assert program == "otel-limits"
    status = main(arguments)
    capsys.readouterr()
    return status


def test_rows_without_invocation_are_found_and_can_be_exported(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """No budget tree shows them, so the command exports them."""
    write(ledger.address, entry())
    change(ledger, "DELETE FROM otel_limits_invocations")
    status, answer = ask(capsys, "verify")
    assert status == 1
    assert {row["trouble"] for row in answer["rows"]} == {"totals differ", "tool calls differ"}
    for row in answer["rows"]:
        assert run_command(capsys, row["command"]) == 0


def test_unchanged_ledger_is_consistent_but_not_tamper_evident(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums prove that a ledger is consistent, and nothing else: the last line says so."""
    write(ledger.address, entry())
    _, answer = ask(capsys, "verify")
    assert (
        "consistent; changes are only ruled out by comparing with a close (--against)"
        in answer["complete"]
    )
    # Unpriced tokens are no failure; their line still ends in a command.
    told = {each["check"]: each["command"] for each in answer["verify"]}
    assert told["Unpriced tokens"].startswith("otel-limits ledger reprice --dry-run --ledger ")
    main(["audit", "schema", "verify"])
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["passed"]["type"] == "boolean"
    assert "passed" in schema["required"]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda each: each.name)
def test_refused_tool_calls_are_consistent_in_each_framework(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], subject: Subject
) -> None:
    """A refused call has a row but no duration, and is not among those that the agent counts."""
    for limits in (Limits(max_tool_calls=2), Limits(max_calls_per_tool={"search": 2})):
        with enabled(limits=limits):
            subject.call(subject.agent(subject.model(endless(uses("search")))))
    tools = [(row["status"], row["duration_us"] is None) for row in ledger.tools()]
    ran, refused = [("success", False)] * 2, ("refused", True)
    # One refusal of all tools is the halt, and three in a row of one tool are.
    assert tools == [*ran, refused, *ran, *[refused] * 3]
    assert ask(capsys, "verify")[0] == 0


# --- damaged pages --------------------------------------------------------------------------------


def pages_of(path: Path, name: str) -> list[int]:
    """The pages of a table or an index."""
    with closing(connect(path)) as connection:
        rows = connection.execute("SELECT pageno FROM dbstat WHERE name = ? ORDER BY 1", (name,))
        return [page for (page,) in rows]


def overwrite(path: Path, pages: list[int], content: bytes) -> None:
    """Overwrite whole pages."""
    data = bytearray(path.read_bytes())
    for page in pages:
        data[(page - 1) * 4096 : page * 4096] = content
    path.write_bytes(data)


@pytest.mark.parametrize("table", [CALL, TOOL, RUN, "otel_limits_attributes"])
def test_overwritten_pages_of_any_table_are_found(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    """Also where every answer can be read from an index, and the rows are never touched."""
    write(ledger.address, *(entry(agent=f"agent {n}") for n in range(100)))
    pages = pages_of(ledger.path, table)
    noise = hashlib.shake_256(b"noise").digest(4096)
    overwrite(ledger.path, pages[1::4] or pages, noise)
    status, answer = ask(capsys, "verify")
    assert (status, answer["passed"]) == (1, False)
    (check,) = answer["verify"]
    assert check["check"] == "Every row of the database is readable"
    assert check["command"] == f"sqlite3 {ledger.path} .recover | sqlite3 recovered.db"
    assert answer["complete"].startswith("NOT complete: ")


def test_changed_value_in_the_rows_alone_is_found(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each page is well-formed, but `spend` reads the index, which has another price."""
    write(ledger.address, *(Entry(calls=[Call(price="1234.567")], at=NOW) for _ in range(9)))
    pico = (1_234_567_000_000_000).to_bytes(8, "big").lstrip(b"\0")
    data = bytearray(ledger.path.read_bytes())
    starts = [(page - 1) * 4096 for page in pages_of(ledger.path, CALL)]
    place = next(found for start in starts if (found := data.find(pico, start, start + 4096)) >= 0)
    data[place + len(pico) - 1] ^= 1
    ledger.path.write_bytes(data)
    status, answer = ask(capsys, "verify")
    assert status == 1
    assert "differs from its rows" in answer["verify"][0]["why"]


# --- damaged spill files --------------------------------------------------------------------------


def test_lost_lines_fail_verification_until_they_are_accepted(
    faulty: None, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The writer that restores the file records them; the acceptance is listed ever after."""
    write(ledger.address, entry())
    (path,) = spill(ledger, entry(), entry()).files()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3:3] = [b"torn\n", b'["otel_limits_invocations",{}]\n']
    path.write_bytes(b"".join(lines))
    with ledger.locked():
        answer = ask(capsys, "verify")[1]
        assert states(answer)["Damaged lines in spill files"] == (2, "FAILED")
    # The next process that records restores the file.
    write(ledger.address, entry(), first=70)
    assert not SpillFiles(ledger.address).files()
    kept = path.with_suffix(".damaged")
    assert kept.exists()
    status, answer = ask(capsys, "verify")
    (lost,) = [each for each in answer["verify"] if each["check"].startswith("Lost lines")]
    assert (status, lost["found"], lost["state"]) == (1, 2, "FAILED")
    assert lost["why"] == f"2 lines of {kept}"
    assert "2 damaged lines of spill files lost" in ask(capsys, "spend")[1]["complete"]
    assert main(["ledger", "accept", "other.damaged", "--reason", "x"]) == 2
    command = lost["command"].replace("REASON", "'the disk was full'")
    assert run_command(capsys, command) == 0
    for _ in range(2):
        status, answer = ask(capsys, "verify")
        assert (status, states(answer)["Lost lines of restored spill files"]) == (0, (0, "ok"))
        (accepted,) = [each for each in answer["verify"] if each["check"].startswith("Accepted")]
        assert accepted["found"] == 2
        assert str(kept) in accepted["why"]
        assert accepted["why"].endswith(": the disk was full")
    # Once only.
    assert main(["ledger", "accept", kept.name, "--reason", "again"]) == 2


def test_lost_lines_are_recorded_when_no_row_is_left(
    faulty: None, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of damaged lines only restores nothing, and what it had is lost as well."""
    write(ledger.address, entry())
    (path,) = spill(ledger, entry()).files()
    for first, lines in ((70, b"x\n" * 20), (140, b"y\n" * 2)):
        path.write_bytes(lines)
        write(ledger.address, entry(), first=first)
    status, answer = ask(capsys, "verify")
    # One command accepts all losses of a file.
    (lost,) = [each for each in answer["verify"] if each["check"].startswith("Lost lines")]
    assert lost["command"].count("ledger accept") == 1
    assert (status, states(answer)["Lost lines of restored spill files"]) == (1, (22, "FAILED"))


# --- invocations without an end -------------------------------------------------------------------


def killed(entry: Entry, ledger: LedgerFile) -> list[Any]:
    """The events of an invocation whose process is killed before its end."""
    *before, _ = events_of(entry, ledger)
    record(ledger, *before)
    return before


def test_lost_invocation_no_longer_fails_verification(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its totals are those of its calls, it is apart in `stops`, and no basis of a suggestion."""
    write(ledger.address, entry(), first=9)
    killed(entry(at=NOW - 2 * DAY), ledger)
    status, answer = ask(capsys, "verify")
    assert (status, answer["passed"]) == (1, False)
    assert answer["complete"].startswith(
        "NOT complete: 1 check failed (Invocations without an end)"
    )
    (check,) = [each for each in answer["verify"] if each["state"] == "FAILED"]
    assert run_command(capsys, check["command"]) == 0
    status, answer = ask(capsys, "verify")
    assert (status, answer["passed"]) == (0, True)
    (lost,) = ledger.invocations("reason = 'lost'")
    assert (lost["action"], lost["model_calls"], lost["tool_calls"]) == ("lost", 3, 3)
    assert (lost["input_tokens"], lost["cache_read_tokens"], lost["turns"]) == (300, 40, 3)
    assert (lost["price_pico"], lost["unpriced_calls"]) == (20_000_000_000, 1)
    assert lost["ended_us"] == max(call["at_us"] for call in ledger.calls("number = 3 AND id > 3"))
    rows = ask(capsys, "stops")[1]["stops"]
    assert {(row["reason"], row["action"]): row["tokens"] for row in rows} == {
        ("end_turn", "none"): 360,
        ("lost", "lost"): 360,
    }
    (outcome,) = ask(capsys, "spend")[1]["outcomes"]
    assert (outcome["invocations"], outcome["successful"], outcome["halted"]) == (2, 1, 0)
    main(["audit", "suggest", "--min-invocations", "1"])
    assert "from 1 invocation" in capsys.readouterr().out
    with closing(connect(ledger.path)) as connection:
        (record,) = connection.execute("SELECT kind, subject FROM otel_limits_maintenance")
    assert record == ("lost", lost["id"])


def test_real_end_replaces_a_lost_one(
    faulty: None, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process was only suspended: its calls still count, and its end is the true one."""
    told = events_of(entry(at=NOW - 2 * DAY), ledger)
    last_call, stop = told[3], told[-1]
    record(ledger, *(event for event in told if event not in (last_call, stop)))
    assert main(["ledger", "end-lost", "--older-than", "1d"]) == 0
    assert "1 invocation ended as lost" in capsys.readouterr().out
    # In another process that only has the call, as after a restart of the recording.
    record(ledger, last_call)
    assert ask(capsys, "verify")[0] == 0
    assert [row["model_calls"] for row in ledger.invocations()] == [3]
    # As long as the end waits in a spill file, answers have it too.
    book = spill(ledger)
    observer_of(ledger, stop)
    assert book.files()
    (row,) = ask(capsys, "stops")[1]["stops"]
    assert row["reason"] == "end_turn"
    record(ledger)
    write(ledger.address, entry(), first=80)
    assert {row["reason"] for row in ledger.invocations()} == {"end_turn"}
    assert ask(capsys, "verify")[0] == 0


def observer_of(ledger: LedgerFile, event: Any) -> None:
    """Spill an event, as in an outage."""
    from otel_limits.observers.ledger import LedgerObserver
    from tests.unit.audit.test_completeness import outage

    observer = LedgerObserver(ledger.address)
    with outage():
        observer(event)
        observer.close()


def test_tree_with_recent_records_is_not_lost(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent that works for days is alive, as is its caller."""
    killed(entry(at=NOW - 2 * DAY), ledger)
    root = events_of(entry(), ledger)[0].invocation
    child = Entry(agent="child", calls=CALLS, at=NOW, parent=root)
    write(ledger.address, child, first=60)
    assert main(["ledger", "end-lost", "--older-than", "1d"]) == 0
    assert "0 invocations ended as lost" in capsys.readouterr().out
