"""Completeness verdicts of a ledger are true, and reading it writes nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sqlite3
import stat
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from otel_limits.audit.completeness import completeness, of_everything
from otel_limits.audit.sums import Sums
from otel_limits.cli import main
from otel_limits.core.events import Stop
from otel_limits.ledger import waiting_rows
from otel_limits.ledger.database import Database
from otel_limits.ledger.reading import open_for_query
from otel_limits.ledger.selection import Selection
from otel_limits.ledger.spill import SpillFiles
from otel_limits.observers.ledger import LedgerObserver
from tests.ledger.book import Book, Call, Entry, write
from tests.ledger.fixtures import LedgerFile, eventually
from tests.price_list import listed

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

NOW = time.time() - 60


def entry(agent: str = "worker") -> Entry:
    """An invocation of a minute ago, with two calls of 120 tokens."""
    return Entry(agent=agent, calls=[Call(price="0.01"), Call(price="0.01")], at=NOW)


def ask(capsys: pytest.CaptureFixture[str], *question: str) -> tuple[int, Any]:
    """Ask, and read status and answer."""
    capsys.readouterr()
    status = main(["audit", *question, "--format", "json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else said.err


def events_of(entry: Entry, ledger: LedgerFile) -> list[Any]:
    """Return the events of an invocation, without recording them."""
    told: list[Any] = []
    book = Book(ledger.address)
    book._observer = told.append  # type: ignore[assignment]
    book.write(entry)
    return told


def record(ledger: LedgerFile, *events: Any) -> None:
    """Write events into a ledger."""
    observer = LedgerObserver(ledger.address)
    for event in events:
        observer(event)
    observer.close()


def states(answer: Any) -> dict[str, tuple[int, str]]:
    """The findings, and the verdict."""
    return {each["check"]: (each["found"], each["state"]) for each in answer["verify"]}


def test_sums_of_another_moment_are_not_taken_for_the_ledger(ledger: LedgerFile) -> None:
    """`spend` adds up halves on two connections, and a call may be recorded between the two."""
    write(ledger.address, entry())
    with open_for_query(ledger.address) as (connection, waiting):
        inquiry: Any = SimpleNamespace(
            connection=connection, address=ledger.address, waiting=waiting, selection=Selection()
        )
        whole = Sums(calls=2, input=200, output=40, pico=20_000_000_000)
        later = replace(whole, calls=3, input=300, output=60)
        assert of_everything(inquiry, whole) == completeness(inquiry)
        assert not of_everything(inquiry, later)


@pytest.mark.parametrize(
    "name",
    [
        "a?b.db",
        "a?mode=ro&cache=shared.db",
        "a#b.db",
        "a%2Fb %20.db",
        "ünïあ.db",
        "C:\\x\\l.db",
        "file:x.db",
        "x:memory:y.db",
        "-x'\"[*].db",
        "two\nlines.db",
    ],
)
@pytest.mark.usefixtures("faulty")
def test_a_ledger_has_any_name_that_a_file_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It is recorded in, has rows that wait, is asked, and takes them in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    ledger = LedgerFile(tmp_path / name)
    write(ledger.address, entry())
    (waiting,) = spill(ledger, entry()).files()
    for address in (f"--ledger={name}", f"--ledger={tmp_path / name}"):
        answer = ask(capsys, "spend", address)[1]
        assert "4 calls add up" in answer["complete"], address
        assert not waiting.exists()
    (waiting,) = spill(ledger, entry(), first=60).files()
    assert main(["ledger", "adopt", str(waiting), f"--into={name}"]) == 0
    assert "which now has its rows." in capsys.readouterr().out
    assert not waiting.exists()
    assert len(ledger.calls()) == 6


def test_input_that_stands_as_output_is_found(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """They add up to the same tokens, and do not cost the same."""
    write(ledger.address, entry())
    change(
        ledger,
        "UPDATE otel_limits_invocations SET input_tokens = input_tokens + 1, "
        "output_tokens = output_tokens - 1",
    )
    status, answer = ask(capsys, "verify")
    assert status == 1
    (row,) = answer["rows"]
    assert "recorded totals 2 calls, 240 tokens (201 of input)" in row["rows"]
    assert "sums of its calls 2 calls, 240 tokens (200 of input)" in row["rows"]
    assert answer["complete"].startswith("NOT complete: 1 check failed (Invocation totals")
    assert "differ by 1 input token, 1 output token;" in ask(capsys, "spend")[1]["complete"]


def test_errors_that_cancel_out_are_found(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """One invocation says a token more than its calls have, and another one less."""
    first, second = write(ledger.address, entry(), entry())
    for each, change_by in ((first, "+ 1"), (second, "- 1")):
        change(
            ledger,
            f"UPDATE otel_limits_invocations SET input_tokens = input_tokens {change_by} "  # noqa: S608
            f"WHERE id = '{each.id}'",
        )
    status, answer = ask(capsys, "verify")
    assert (status, len(answer["rows"])) == (1, 2)
    assert answer["complete"].startswith("NOT complete: 1 check failed (Invocation totals")
    assert ask(capsys, "spend")[1]["complete"].startswith("Totals of the whole ledger match: ")


def test_a_loss_is_not_forgotten_when_totals_are_brought_up_to_date(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call after the end has a number, which shows how many were made before it."""
    told = events_of(entry(), ledger)
    record(ledger, *told)
    change(ledger, "DELETE FROM otel_limits_model_calls WHERE number = 2")
    record(ledger, replace(told[1], number=3, at=NOW + 9))
    assert ask(capsys, "verify")[0] == 1
    assert "differ by 1 call;" in ask(capsys, "spend")[1]["complete"]


def test_a_pipe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a spill file's name, but no writer."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    os.mkfifo(tmp_path / "pipe.db")
    status, said = ask(capsys, "spend", "--ledger", str(tmp_path / "pipe.db"))
    assert status == 2
    assert "is a device, pipe or socket." in said


def test_a_ledger_can_have_a_name_that_is_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """File systems know bytes."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    ledger = LedgerFile(tmp_path / os.fsdecode(b"\xff.db"))
    write(ledger.address, entry())
    assert "2 calls add up" in ask(capsys, "spend", f"--ledger={ledger.path}")[1]["complete"]


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("sqlite:///x.db?mode=ro", "Remove the parameters"),
        ("sqlite://x.db", "with three slashes and the path, got 'sqlite://x.db'"),
        ("sqlite:x.db", "with three slashes and the path, got 'sqlite:x.db'"),
        ("sqlite:///", "must name a file, got 'sqlite:///'. A ledger in memory would be lost."),
        (":memory:", "must name a file, got ':memory:'. A ledger in memory would be lost."),
        ("file:x?mode=memory&cache=shared", "A ledger in memory would be lost."),
        ("~nobody-9/x.db", "Use an absolute path."),
        ("/", "'/' is a directory. Use a file in it: /ledger.db"),
        (
            "/dev/null",
            "'/dev/null', which is a device, pipe or socket. To record",
        ),
        ("sqlite:////dev/null", "which is a device, pipe or socket."),
    ],
)
def test_invalid_file_name_is_rejected_with_a_fix(
    capsys: pytest.CaptureFixture[str], address: str, sentence: str
) -> None:
    """The sentence has the value."""
    status, said = ask(capsys, "spend", "--ledger", address)
    assert status == 2
    assert said.startswith("otel-limits: --ledger ")
    assert sentence in said
    assert address in said


def change(ledger: LedgerFile, statement: str) -> None:
    """Change a ledger behind its back."""
    with closing(sqlite3.connect(ledger.path)) as connection:
        connection.execute(statement)
        connection.commit()


def outage() -> AbstractContextManager[object]:
    """Let the database refuse everything."""
    return patch.object(Database, "write", side_effect=OSError(28, "No space left on device"))


def spill(ledger: LedgerFile, *told: Entry, first: int = 50) -> SpillFiles:
    """Make entries wait in a spill file, as in an outage of the database."""
    with outage():
        write(ledger.address, *told, first=first)
    return SpillFiles(ledger.address)


TWICE = """
    INSERT INTO otel_limits_model_calls (at_us, invocation_id, agent, model, provider, input_tokens,
        output_tokens, cache_read_tokens, cache_write_tokens, state, estimated, source)
    SELECT 7, invocation_id, agent, model, provider, 0, 0, 0, 0, 'zero', 0, 'live'
    FROM otel_limits_model_calls LIMIT 1
"""

# --- verify ---------------------------------------------------------------------------------------


def test_a_whole_ledger_is_said_to_be_complete(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0, every check in order, and the line under every other answer says so."""
    write(ledger.address, entry(), entry())
    status, answer = ask(capsys, "verify")
    assert status == 0
    assert {state for _, state in states(answer).values()} == {"ok"}
    for question in (("spend",), ("stops",), ("show", "00000001"), ("grants",)):
        _, other = ask(capsys, *question)
        assert other["complete"].startswith(
            "Totals of the whole ledger match: 4 calls add up to the totals of 2 invocations. "
            "`otel-limits audit verify` checks each row"
        )
    assert answer["complete"].startswith(
        "Complete: 4 calls add up to the totals of 2 invocations, each verified"
    )


PRUNED = [
    (("spend",), True),
    (("stops", "--since", "15d"), True),
    (("spend", "--since", "5d"), False),
    (("spend", "--since", "6d", "--compare", "previous"), True),
    (("spend", "--since", "2d", "--compare", "previous"), False),
    (("spend", "--prices", "recorded", "--until", "12d"), True),
    (("verify",), True),
]


def test_pruned_rows_are_named_where_the_question_reaches_them(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A week that was deleted would look like one in which no agent ran."""
    write(ledger.address, replace(entry(), at=NOW - 20 * 86_400), entry(), first=1)
    assert main(["ledger", "prune", "--older-than", "10d"]) == 0
    for question, is_missing in PRUNED:
        _, answer = ask(capsys, *question)
        assert (question, "pruned_before" in answer) == (question, is_missing)
        assert answer["complete"].startswith("Incomplete: rows before ") == is_missing
    assert main(["audit", "spend", "--format", "html"]) == 0
    assert " UTC were pruned; 2 calls add up to" in capsys.readouterr().out
    for period, is_missing in ((), True), (("--since", "5d"), False):
        out = ("--format", "csv", "--output", str(tmp_path / "calls.csv"))
        assert main(["ledger", "export", *out, *period]) == 0
        assert ("were pruned, and are not exported." in capsys.readouterr().err) == is_missing
    change(ledger, "DELETE FROM otel_limits_model_calls WHERE number = 2")
    _, answer = ask(capsys, "spend")
    assert "lists the rows. Rows before " in answer["complete"]


def days(*ago: int) -> str:
    """Return the value of --where for some past days of UTC, by their age in days."""
    names = (time.strftime("%Y-%m-%d", time.gmtime(NOW - each * 86_400)) for each in ago)
    return ",".join(f"day={name}" for name in names)


BEFORE, AFTER = days(15), days(5)
WEEK = time.strftime("%G-W%V", time.gmtime(NOW - 5 * 86_400))
MONTHS_LATER = time.strftime("%Y-%m", time.gmtime(NOW + 60 * 86_400))


@pytest.mark.parametrize(
    ("question", "is_missing"),
    [
        (("--where", BEFORE), True),
        (("--where", AFTER), False),
        (("--where", days(15, 5)), True),
        (("--where", f"month={MONTHS_LATER}"), False),
        (("--where", BEFORE, "--since", "8d"), False),
        (("--where", AFTER, "--since", "15d"), False),
        # A week without the earlier one of the two days.
        (("--where", days(15, 5), "--where", f"week={WEEK}"), False),
        (("--where", AFTER.replace("=", "!=")), True),
        (("--where", BEFORE, "--until", "30d"), False),
    ],
)
def test_pruned_rows_are_named_only_for_periods_that_reach_them(
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    question: tuple[str, ...],
    *,
    is_missing: bool,
) -> None:
    """A day that `--where` selects is a period, like one of `--since` and `--until`."""
    write(ledger.address, replace(entry(), at=NOW - 20 * 86_400), entry(), first=1)
    assert main(["ledger", "prune", "--older-than", "10d"]) == 0
    _, answer = ask(capsys, "spend", *question)
    assert ("pruned_before" in answer) == is_missing


@pytest.mark.parametrize(("tree", "is_missing"), [("00000001", True), ("00000003", False)])
def test_shown_tree_names_pruned_rows_only_if_it_began_before(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], tree: str, *, is_missing: bool
) -> None:
    """A tree of today lacks no row of last month."""
    book = Book(ledger.address)
    root = book.write(replace(entry(), at=NOW - 12 * 86_400))
    book.write(replace(entry(), parent=root))
    for days_ago in (0, 20):
        book.write(replace(entry(), at=NOW - days_ago * 86_400))
    book.close()
    assert main(["ledger", "prune", "--older-than", "10d"]) == 0
    _, answer = ask(capsys, "show", tree)
    assert ("pruned_before" in answer) == is_missing


@pytest.mark.parametrize(
    ("statement", "trouble", "how"),
    [
        ("DELETE FROM otel_limits_model_calls WHERE id = 2", "totals differ", "240 tokens"),
        ("DELETE FROM otel_limits_model_calls WHERE id = 1", "gap in the numbers", "existing: 2"),
        ("DELETE FROM otel_limits_model_calls", "totals differ", "0 of 2 calls"),
        (
            "UPDATE otel_limits_model_calls SET output_tokens = 7",
            "totals differ",
            "214",
        ),
        ("DELETE FROM otel_limits_invocations", "totals differ", "no invocation"),
        (
            TWICE,
            "counted twice",
            "row 3 has",
        ),
    ],
)
def test_a_row_that_is_missing_changed_or_double_is_found(
    ledger: LedgerFile,
    capsys: pytest.CaptureFixture[str],
    statement: str,
    trouble: str,
    how: str,
) -> None:
    """Status 1, and the rows are named; other answers are said not to be complete either."""
    write(ledger.address, entry())
    change(ledger, statement)
    status, answer = ask(capsys, "verify")
    assert status == 1
    assert any(each["trouble"] == trouble and how in each["rows"] for each in answer["rows"])
    assert answer["complete"].startswith("NOT complete")
    assert ask(capsys, "spend")[1]["complete"].startswith("NOT complete")


def test_open_invocation_fails_only_when_stale(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed run is said; its calls are in every question, and fail a verification later."""
    record(ledger, *(each for each in events_of(entry(), ledger) if not isinstance(each, Stop)))
    status, answer = ask(capsys, "verify")
    assert (status, states(answer)["Invocations without an end"]) == (0, (1, "waiting"))
    assert ask(capsys, "verify", "--stale", "10s")[0] == 1
    spent = ask(capsys, "spend")[1]["totals"]["spend"]["tokens"]
    assert spent == ask(capsys, "stops")[1]["totals"]["stops"]["tokens"] == 240


def test_a_call_after_the_end_counts_in_every_question(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The totals of its invocation are brought up to date with it."""
    told = events_of(entry(), ledger)
    record(ledger, *told, replace(told[1], number=3, at=NOW + 9))
    assert ask(capsys, "verify")[0] == 0
    assert ask(capsys, "stops")[1]["totals"]["stops"]["tokens"] == 360


@listed
def test_estimated_unmeasured_and_unpriced_shares_are_reported(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails nothing: the numbers are complete, but some of them are estimates."""
    calls = [Call(price="0.01")] * 6 + [
        Call(input=0, output=0, kind="unmeasured"),
        Call(kind="estimated", estimated=True),
    ]
    write(ledger.address, Entry(calls=calls, at=NOW))
    status, answer = ask(capsys, "verify")
    assert status == 0
    told = {each["check"]: (each["found"], each["state"], each["why"]) for each in answer["verify"]}
    assert told["Estimated calls"] == told["Unmeasured calls"] == (1, "ok", "12.5% of all")
    assert told["Unpriced tokens"] == (120, "ok", "14.3% of all")
    for by in ("model", "provider"):  # from an index, and from the rows
        spent = ask(capsys, "spend", "--by", by)[1]
        (row,) = spent["spend"]
        assert (row["estimated_calls"], row["unmeasured_calls"]) == (1, 1)
    assert (
        "12.5% of calls are estimated. 12.5% of calls are unmeasured. 14.3% of tokens are "
        f"unpriced: run `otel-limits ledger reprice --ledger {ledger.path}`, which lists the "
        "models that need a price in the policy file."
    ) in spent["complete"]
    monkeypatch.setattr("otel_limits.core.price_lookup.Prices.available", False)
    assert "reprice` needs prices, and there are none. Run: pip install" in (
        ask(capsys, "spend")[1]["complete"].replace(f" --ledger {ledger.path}", "")
    )


# --- rows that wait -------------------------------------------------------------------------------


def test_waiting_rows_are_taken_in_before_the_answer(
    faulty: None, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a reader that may write, as by a process that records."""
    write(ledger.address, entry())
    spilled = spill(ledger, entry(agent="waits"), entry(agent="waits"))
    _, spend = ask(capsys, "spend", "--by", "agent")
    assert spend["totals"]["spend"]["tokens"] == 720
    assert "wait" not in spend["complete"]
    assert spilled.files() == []
    assert len(ledger.calls()) == 6
    status, answer = ask(capsys, "verify", "--stale", "10s")
    assert (status, states(answer)["Rows pending in spill files"]) == (0, (0, "ok"))


def test_rows_that_cannot_be_taken_in_are_reported(
    faulty: None, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their number, place and reason; the answer is without them, and nothing changes."""
    write(ledger.address, entry())
    (path,) = spill(ledger, entry(agent="waits"), entry(agent="waits")).files()
    before = path.read_bytes()
    with ledger.locked():
        status, answer = ask(capsys, "verify")
        assert (status, states(answer)["Rows pending in spill files"]) == (0, (8, "waiting"))
        (check,) = (each for each in answer["verify"] if each["found"] == 8)
        assert check["why"] == f"not included (database is locked): {path}"
        assert ask(capsys, "verify", "--stale", "10s")[0] == 1
        assert main(["audit", "spend", "--format", "json"]) == 0
        out, err = capsys.readouterr()
        said = f"8 rows wait in {path} and are not included (database is locked)"
        assert err == f"otel-limits: {said}.\n"
        assert said in json.loads(out)["complete"]
        assert json.loads(out)["totals"]["spend"]["tokens"] == 240
    assert path.read_bytes() == before
    assert ask(capsys, "spend")[1]["totals"]["spend"]["tokens"] == 720


@pytest.mark.parametrize("made", [None, b"", "WAL"])
def test_a_ledger_that_could_not_be_made_yet_is_what_waits_for_it(
    faulty: None,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    made: bytes | str | None,
) -> None:
    """No file, an empty one, or one without tables, as a full disk leaves them: all rows count."""
    spill(ledger, entry())
    if made == "WAL":
        change(ledger, "PRAGMA journal_mode = WAL")
    elif made is not None:
        ledger.path.write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(waiting_rows, "write_error", lambda _: "the disk is full")
        before = sorted(path.name for path in ledger.path.parent.iterdir())
        status, answer = ask(capsys, "verify")
        assert (status, states(answer)["Rows pending in spill files"]) == (0, (4, "waiting"))
        assert sorted(path.name for path in ledger.path.parent.iterdir()) == before
    assert ask(capsys, "spend")[1]["totals"]["spend"]["tokens"] == 240
    assert not ledger.spills()


def test_a_row_that_waits_and_is_there_counts_once(
    faulty: None, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row written to both, because the commit was uncertain, counts once."""
    write(ledger.address, entry(), first=50)
    spill(ledger, entry(), first=50)
    _, answer = ask(capsys, "spend")
    assert answer["totals"]["spend"]["tokens"] == 240
    assert "wait" not in answer["complete"]


def test_a_late_call_that_waits_is_in_the_totals_of_its_invocation(
    faulty: None, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended after its invocation, whose row in the database does not know of it yet."""
    told = events_of(entry(), ledger)
    observer = LedgerObserver(ledger.address)
    for event in told:
        observer(event)
    observer.close()
    observer = LedgerObserver(ledger.address)
    with outage():
        observer(replace(told[1], number=3, at=NOW + 9))
        observer.close()
    assert ledger.spills()
    for question in ("spend", "stops"):
        assert ask(capsys, question)[1]["totals"][question]["tokens"] == 360
    assert ask(capsys, "verify")[0] == 0


def test_an_orphan_is_listed_and_adopted(
    faulty: None,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A ledger that was moved leaves its spill file behind: a person says where its rows belong."""
    spill(ledger, entry())
    (path,) = ledger.spills()
    ledger.path = ledger.path.with_name("moved.db")
    write(ledger.address, entry())
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(ledger.path))
    status, answer = ask(capsys, "verify")
    assert (status, states(answer)["Spill files without a ledger"]) == (0, (1, "waiting"))
    assert ask(capsys, "spend")[1]["totals"]["spend"]["tokens"] == 240
    assert main(["ledger", "adopt", str(path), "--into", str(ledger.path)]) == 0
    assert not path.exists()
    assert ask(capsys, "spend")[1]["totals"]["spend"]["tokens"] == 480
    assert states(ask(capsys, "verify")[1])["Spill files without a ledger"] == (0, "ok")


def test_an_orphan_fails_when_it_is_old(
    faulty: None, ledger: LedgerFile, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the time of its last row, and it is said with the file and what to do."""
    write(ledger.address, entry())
    place = temporary / f"otel-limits-{os.geteuid()}"
    place.mkdir(mode=0o700)
    path = place / "ledger-0.spill-1-0.jsonl"
    path.write_text('{"otel_limits_ledger": "/gone/ledger.db"}\n', encoding="utf-8")
    check = "Spill files without a ledger"
    for age, expected in ((59 * 60, (0, "waiting")), (61 * 60, (1, "FAILED"))):
        os.utime(path, (time.time() - age,) * 2)
        status, answer = ask(capsys, "verify")
        assert (status, states(answer)[check][1]) == expected
    (left,) = (each for each in answer["verify"] if each["check"] == check)
    assert left["why"] == f"{path} of /gone/ledger.db"
    assert left["command"] == f"otel-limits ledger adopt {path} --into {ledger.path}"
    assert ask(capsys, "verify", "--stale", "1d")[0] == 0


def test_non_spill_file_is_not_adopted(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence, and the file is left as it is."""
    write(ledger.address, entry())
    path = tmp_path / "notes.txt"
    path.write_text("mine", encoding="utf-8")
    assert main(["ledger", "adopt", str(path), "--into", str(ledger.path)]) == 2
    assert "is not a spill file" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == "mine"
    assert main(["ledger", "adopt", str(path) + "x", "--into", str(ledger.path)]) == 2
    assert f"File {path}x not found." in capsys.readouterr().err


# --- asking never writes --------------------------------------------------------------------------


def test_a_foreign_database_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No table is made in it, and it is not switched to another journal."""
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.commit()
    before = path.read_bytes()
    for command in (
        ["audit", "spend"],
        ["audit", "verify"],
        ["ledger", "prune", "--older-than", "1d"],
    ):
        assert main([*command, "--ledger", str(path)]) == 2
        assert "contains no ledger" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert list(tmp_path.glob("theirs.db-*")) == []


@pytest.mark.parametrize("content", [b"", b"not a database at all"])
def test_a_file_that_is_no_database_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    """A sentence, and what to do if it was one."""
    path = tmp_path / "x.db"
    path.write_bytes(content)
    assert main(["audit", "spend", "--ledger", str(path)]) == 2
    assert "is not a ledger" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_query_works_during_recording(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows in the write-ahead log alone are in the answer."""
    book = Book(ledger.address)
    book.write(entry())
    # A ledger without a row is complete, too: only its calls show that they were written.
    eventually(lambda: "2 calls add up" in str(ask(capsys, "verify")))
    assert ledger.path.with_name("ledger.db-wal").stat().st_size > 0
    assert ask(capsys, "spend")[1]["totals"]["spend"]["tokens"] == 240
    book.close()


def test_a_copy_of_two_moments_is_not_taken_for_the_ledger(
    ledger: LedgerFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A log that restarts while a ledger is copied for reading loses no rows of the answer."""
    write(ledger.address, entry())
    beside = LedgerFile(tmp_path / "beside" / "ledger.db")
    beside.path.parent.mkdir()
    # SQLite cannot create its shared-memory file, as in another user's directory.
    shared = beside.path.with_name("ledger.db-shm")
    shared.symlink_to(shared)
    copies: list[Path] = []
    copyfile = shutil.copyfile
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as writer:

        def run(statement: str) -> None:
            writer.execute(statement)
            for name in ("ledger.db", "ledger.db-wal"):
                copyfile(ledger.path.with_name(name), beside.path.with_name(name))

        def copy(source: Path, target: Path) -> None:
            copyfile(source, target)
            copies.append(target)
            if len(copies) == 1:  # the database is copied, and its log not yet
                writer.execute("PRAGMA wal_checkpoint(RESTART)")
                run("DELETE FROM otel_limits_tool_calls")

        run(
            "INSERT INTO otel_limits_attributes SELECT id, 'team', 'x' FROM otel_limits_invocations"
        )
        monkeypatch.setattr("shutil.copyfile", copy)
        status, said = ask(capsys, "spend", "--by", "team", "--ledger", str(beside.path))
        monkeypatch.undo()
    assert (status, len(copies)) == (0, 4), said
    assert [row["team"] for row in said["spend"]] == ["x"]


def test_files_are_for_their_owner(faulty: None, ledger: LedgerFile, tmp_path: Path) -> None:
    """0600 in directories of 0700 that are made for them, whatever the umask permits."""
    ledger.path = tmp_path / "new" / "deep" / "ledger.db"
    write(ledger.address, entry())
    spill(ledger, entry())
    made = [ledger.path, *ledger.spills(), ledger.path.parent, ledger.path.parent.parent]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in made]
    assert modes == [0o600, 0o600, 0o700, 0o700]


def test_a_path_can_hold_anything(ledger: LedgerFile, tmp_path: Path) -> None:
    """A percent sign is part of a name, and no code of another character."""
    path = tmp_path / "a%2Fb #1.db"
    ledger.path = path
    write(ledger.address, entry())
    assert path.exists()
    assert main(["audit", "verify", "--ledger", str(path)]) == 0
    assert main(["audit", "spend", "--ledger", f"sqlite:///{path}"]) == 0


# --- exact sums, and what spreadsheets do ---------------------------------------------------------


def test_sums_beyond_64_bits_are_exact(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger answers absurd figures to the last digit, too."""
    write(ledger.address, entry(), entry())
    most = "input_tokens = 9223372036854775807, price_pico = 4611686018427387904"
    change(ledger, f"UPDATE otel_limits_model_calls SET {most}")  # noqa: S608
    _, answer = ask(capsys, "spend")
    assert answer["totals"]["spend"]["input_tokens"] == 4 * (2**63 - 1)
    assert answer["totals"]["spend"]["cost_usd"] == "18446744.073709551616"
    assert ask(capsys, "stops")[0] == 0
    assert ask(capsys, "verify")[0] == 1


def test_an_invocation_beyond_64_bits_costs_the_same_in_every_question(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row has no room for what it cost: its calls say it, to the last picodollar."""
    calls = [Call(price="9000000"), Call(price="9000000.000000000001")]
    write(ledger.address, Entry(calls=calls, at=NOW, reason="max_turns", action="halted"))
    total = "18000000.000000000001"
    _, spent = ask(capsys, "spend")
    assert spent["totals"]["spend"]["cost_usd"] == total
    assert spent["totals"]["outcomes"]["spent_on_halted_usd"] == total
    _, stops = ask(capsys, "stops")
    assert stops["totals"]["stops"]["cost_usd"] == total
    assert [row["cost_usd"] for row in stops["costliest_halted"]] == [total]
    _, tried = ask(capsys, "backtest", "--max-cost-usd", "10000000")
    assert tried["totals"]["backtest"]["halted"] == 1
    assert ask(capsys, "verify")[0] == 0


def test_calls_after_the_end_may_leave_64_bits(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """The totals of their invocation are brought up to date, and nothing is refused."""
    told = events_of(Entry(calls=[Call(price="9000000")], at=NOW), ledger)
    record(ledger, *told, replace(told[1], number=2, at=NOW + 9))
    assert not ledger.spills()
    assert [row["model_calls"] for row in ledger.invocations()] == [2]
    assert ask(capsys, "stops")[1]["totals"]["stops"]["cost_usd"] == "18000000.000000000000"
    assert ask(capsys, "verify")[0] == 0


BEYOND = str(10**30)


@pytest.mark.parametrize(
    ("question", "status"),
    [
        (("audit", "stops", "--top", BEYOND), 0),
        (("audit", "backtest", "--max-turns", BEYOND), 0),
        (("audit", "backtest", "--max-cost-usd", str(10**12)), 0),
        (("audit", "backtest", "--max-token-budget", BEYOND, "--max-turns", "1"), 0),
        (("audit", "spend", "--until", "9999-12-31T23:59", "--time-zone", "America/Lima"), 2),
        (("audit", "spend", "--since", "0001-01-01", "--time-zone", "Asia/Tokyo"), 2),
        (("ledger", "prune", "--older-than", "99999999d"), 0),
    ],
)
def test_values_out_of_range_are_answered_or_reported(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], question: tuple[str, ...], status: int
) -> None:
    """Larger than every figure is an answer or a sentence, and never a traceback."""
    write(ledger.address, entry())
    assert main(list(question)) == status
    assert ("must be in the years 1 to 9999" in capsys.readouterr().err) == bool(status)
    assert len(ledger.invocations()) == 1


def test_a_spreadsheet_finds_no_formula(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Names that begin like one are quoted, in answers and in exports; numbers are not."""
    write(ledger.address, *(entry(agent=f"{sign}cmd()") for sign in "=+-@"))
    capsys.readouterr()
    main(["audit", "spend", "--by", "agent", "--format", "csv"])
    told = capsys.readouterr()
    assert sorted(row["agent"][:2] for row in csv.DictReader(io.StringIO(told.out))) == [
        "'+", "'-", "'=", "'@",
    ]  # fmt: skip
    assert "\nTotals of the whole ledger match: " in told.err
    out = tmp_path / "calls.csv"
    main(["ledger", "export", "--format", "csv", "--output", str(out)])
    exported = csv.DictReader(io.StringIO(out.read_text(encoding="utf-8")))
    assert {row["agent"][0] for row in exported} == {"'"}


# --- damage ---------------------------------------------------------------------------------------


def test_damaged_schema_ends_in_a_command(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Questions say what to do, though SQLite cannot say what is wrong."""
    write(ledger.address, entry(), entry())
    data = ledger.path.read_bytes()
    # In the name of an index, which the error would quote.
    damaged = data.replace(
        b"INDEX ix_otel_limits_inv", b"INDEX \xff\xfe\xfd \xff\xfe\xfd_limits_inv"
    )
    assert len(damaged) == len(data)
    assert damaged != data
    ledger.path.write_bytes(damaged)
    for question in ("spend", "verify"):
        assert main(["audit", question]) == 2
        assert f"Run: sqlite3 {ledger.path} .recover | sqlite3 " in capsys.readouterr().err


PAGES = ("sums", "proof")


def test_rows_of_another_table_are_damage(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a page is replaced by another, SQLite reads nonsense without an error."""
    write(ledger.address, *(entry() for _ in range(40)))
    with closing(sqlite3.connect(ledger.path)) as connection:
        last = dict(connection.execute("SELECT name, max(pageno) FROM dbstat GROUP BY name"))
    data = bytearray(ledger.path.read_bytes())
    there, here = ((last[f"ix_otel_limits_model_calls_{name}"] - 1) * 4096 for name in PAGES)
    data[there : there + 4096] = data[here : here + 4096]
    ledger.path.write_bytes(data)
    assert main(["audit", "spend"]) == 2
    said = capsys.readouterr().err
    assert "the file is damaged" in said
    assert " .recover | " in said
