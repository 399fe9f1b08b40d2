"""Closed books: the same bytes from the same rows, and every later alteration found."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import shutil
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from sqlite3 import connect
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.core.events import ModelCall, QuotaGrant
from otel_limits.ledger.address import parse
from otel_limits.ledger.closing import as_text, digest_of
from otel_limits.ledger.database import Database
from otel_limits.ledger.maintenance import prune
from tests.ledger.book import DAY, NINE, Book, Call, Entry, write
from tests.ledger.fixtures import LedgerFile
from tests.unit.audit.test_completeness import ask, events_of, record, spill
from tests.unit.audit.test_verify import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Edit = Callable[[dict[str, Any]], object]

CALLS = [
    Call(price="0.01", cached=40, tools=["search", "fetch"]),
    Call(price="0.02", model="n", tools=["search"]),
    Call(),
]


def entry(agent: str = "worker", day: int = 0) -> Entry:
    """An invocation of the given day after 2025-10-09."""
    return Entry(agent=agent, calls=CALLS, at=NINE + day * DAY, attributes={"tenant.id": "acme"})


def close(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    """Close, write it to a file, and read it."""
    capsys.readouterr()
    status = main(["ledger", "close", *options])
    said = capsys.readouterr()
    assert status == 0, said.err
    path.write_text(said.out, encoding="utf-8")
    document: dict[str, Any] = json.loads(said.out)
    return document


def compare(
    capsys: pytest.CaptureFixture[str], *paths: Path
) -> tuple[int, set[tuple[str, str, str]]]:
    """Verify against closes; return the status, and day, table and kind of each difference."""
    status, answer = ask(capsys, "verify", *(f"--against={path}" for path in paths))
    found = {(row["day"], row["table"], row["difference"]) for row in answer["closed_days"]}
    return status, found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a ledger of two invocations on each of three days, and its close."""
    directory = tmp_path_factory.mktemp("closed")
    ledger = LedgerFile(directory / "ledger.db")
    write(ledger.address, *(entry(f"agent-{n % 2}", n // 2) for n in range(6)))
    record(
        ledger,
        QuotaGrant(
            quota="team", key="acme", change="grant", amount=5, unit="usd", until=None,
            by="ops@host", at=NINE + DAY, id="grant-1",
        ),
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["ledger", "close", "--ledger", str(ledger.path), "--month", "2025-10"]) == 0
    (directory / "october.json").write_text(said.getvalue(), encoding="utf-8")
    return directory


@pytest.fixture
def closed(template: Path, ledger: LedgerFile, tmp_path: Path) -> Path:
    """A close of October 2025, in which two invocations ended on each of three days."""
    shutil.copy(template / "ledger.db", ledger.path)
    shutil.copy(template / "october.json", tmp_path / "october.json")
    return tmp_path / "october.json"


def test_close_has_counts_sums_and_digests_of_each_day(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An auditor reads the same sums as in `spend`, and closing again gives the same bytes."""
    document = json.loads(closed.read_text("utf-8"))
    assert sorted(document["days"]) == ["2025-10-09", "2025-10-10", "2025-10-11"]
    day = document["days"]["2025-10-10"]
    rows = {table: day[table]["rows"] for table in day if table != "sums"}
    assert rows == {"calls": 6, "invocations": 2, "attributes": 2, "tools": 6, "grants": 1}
    assert [(row["agent"], row["model"], row["tenant"]) for row in day["sums"]] == [
        (f"agent-{n}", model, "acme") for n in range(2) for model in "mn"
    ]
    first = day["sums"][0]
    assert (first["calls"], first["input_tokens"], first["cache_read_tokens"]) == (2, 200, 40)
    assert (first["usd_recorded"], first["unpriced_calls"]) == ("0.010000000000", 1)
    again = close(capsys, closed.with_name("again.json"), "--month", "2025-10")
    assert again == document
    assert compare(capsys, closed) == (0, set())
    assert (
        f"3 closed days as in {closed.name}, other days not compared"
        in ask(capsys, "verify", f"--against={closed}")[1]["complete"]
    )


def test_a_close_without_days_proves_nothing(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ledger had no whole day yet, as the command says."""
    empty = closed.with_name("empty.json")
    assert main(["ledger", "close", "--until", "2025-10-09"]) == 0
    said = capsys.readouterr()
    assert "The close has no day: the ledger has no rows before 2025-10-09." in said.err
    empty.write_text(said.out, encoding="utf-8")
    complete = ask(capsys, "verify", f"--against={empty}")[1]["complete"]
    assert "changes are only ruled out by comparing with a close" in complete


DAY_OF = "2025-10-10"
PARTS = {
    "FIRST": "(SELECT min(id) FROM otel_limits_model_calls WHERE day = 20371)",
    "RUN": "(SELECT invocation_id FROM otel_limits_model_calls WHERE day = 20371 LIMIT 1)",
}
ALTERATIONS = {
    "renamed tenant": (
        "UPDATE otel_limits_attributes SET value = 'x' WHERE invocation_id = RUN",
        {("attributes", "changed")},
    ),
    "renamed model": (
        "UPDATE otel_limits_model_calls SET model = 'cheap' WHERE id = FIRST",
        {("calls", "changed")},
    ),
    "other stop reason": (
        "UPDATE otel_limits_invocations SET reason = 'max_turns' WHERE id = RUN",
        {("invocations", "changed")},
    ),
    "halved costs on both sides": (
        """
        UPDATE otel_limits_model_calls SET price_pico = price_pico / 2;
        UPDATE otel_limits_invocations SET price_pico = price_pico / 2
        """,
        {("calls", "changed")},
    ),
    "deleted invocation with all of its rows": (
        """
        CREATE TEMP TABLE gone AS SELECT RUN AS id;
        DELETE FROM otel_limits_tool_calls WHERE invocation_id IN gone;
        DELETE FROM otel_limits_attributes WHERE invocation_id IN gone;
        DELETE FROM otel_limits_model_calls WHERE invocation_id IN gone;
        DELETE FROM otel_limits_invocations WHERE id IN gone
        """,
        {(table, "missing") for table in ("calls", "invocations", "attributes", "tools")},
    ),
    "renamed tool": (
        "UPDATE otel_limits_tool_calls SET tool = 'x' WHERE invocation_id = RUN",
        {("tools", "changed")},
    ),
    "deleted tool calls with their count": (
        """
        DELETE FROM otel_limits_tool_calls WHERE invocation_id = RUN AND number > 1;
        UPDATE otel_limits_invocations SET tool_calls = 1 WHERE id = RUN
        """,
        {("tools", "missing"), ("invocations", "changed")},
    ),
    "deleted call with the totals": (
        """
        DELETE FROM otel_limits_model_calls WHERE invocation_id = RUN AND number = 3;
        UPDATE otel_limits_invocations
        SET model_calls = 2, input_tokens = 200, output_tokens = 40, unpriced_calls = 0
        WHERE id = RUN
        """,
        {("calls", "missing")},
    ),
    "deleted tenant": (
        "DELETE FROM otel_limits_attributes WHERE invocation_id = RUN",
        {("attributes", "missing")},
    ),
    "end declared lost": (
        "UPDATE otel_limits_invocations SET reason = 'lost', action = 'lost' WHERE id = RUN",
        {(table, "missing") for table in ("invocations", "attributes", "tools")},
    ),
    "end in another month": (
        "UPDATE otel_limits_invocations SET ended_us = ended_us + 2592000000000 WHERE id = RUN",
        {(table, "missing") for table in ("invocations", "attributes", "tools")},
    ),
    "deleted grant": ("DELETE FROM otel_limits_quota_changes", {("grants", "missing")}),
    "smaller grant": (
        "UPDATE otel_limits_quota_changes SET amount = '1'",
        {("grants", "changed")},
    ),
    "side call": (
        "UPDATE otel_limits_model_calls SET side = 1 WHERE id = FIRST",
        {("calls", "changed")},
    ),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alteration_of_both_sides_is_found_by_day_table_and_kind(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Sums stay consistent, so only the close shows what was done."""
    statements, expected = ALTERATIONS[name]
    alter(ledger, statements)
    assert ask(capsys, "verify")[0] == 0
    status, answer = ask(capsys, "verify", f"--against={closed}")
    assert status == 1
    rows = [row for row in answer["closed_days"] if row["day"] == DAY_OF]
    assert {(row["table"], row["difference"]) for row in rows} == expected
    for row in rows:
        assert run_command(capsys, row["command"]) == 0


def alter(ledger: LedgerFile, statements: str) -> None:
    """Alter a ledger with SQL, in which the names of `PARTS` mean rows of the second day."""
    for name, query in PARTS.items():
        statements = statements.replace(name, query)
    with closing(connect(ledger.path)) as connection:
        connection.executescript(statements)


def rewrite(path: Path, edit: Edit, *, digest: bool) -> None:
    """Edit a close, and recompute its digest on request."""
    document = json.loads(path.read_text("utf-8"))
    edit(document)
    if digest:
        document["digest"] = digest_of(document)
    path.write_text(as_text(document), encoding="utf-8")


def scale_sums(figure: str) -> Edit:
    """Halve a figure in the sums of a day."""

    def edit(document: dict[str, Any]) -> None:
        sums = document["days"][DAY_OF]["sums"][0]
        sums[figure] = str(Decimal(sums[figure]) / 2)

    return edit


def move_to_another_tenant(document: dict[str, Any]) -> None:
    """Bill a tenant for the calls of another."""
    document["days"][DAY_OF]["sums"][0]["tenant"] = "other"


SUM_EDITS = {
    **{figure: scale_sums(figure) for figure in ("input_tokens", "usd_recorded", "usd_present")},
    "tenant": move_to_another_tenant,
    "left out": lambda document: document["days"][DAY_OF]["sums"].pop(),
}
EDITS = {
    **SUM_EDITS,
    "rows": lambda document: document["days"][DAY_OF]["calls"].update(rows=1),
    "sha256": lambda document: document["days"][DAY_OF]["calls"].update(sha256="0" * 64),
    "removed day": lambda document: document["days"].pop(DAY_OF),
    "added day": lambda document: document["days"].update({"2025-10-20": {}}),
    "days that are none": lambda document: document.update(days=["2025-10-20"]),
    "end": lambda document: document.update(until="2025-10-10"),
    "tenant key": lambda document: document.update(tenant_key="user.id"),
    "open invocations": lambda document: document.update(open_invocations=["x"]),
    "no digest": lambda document: document.pop("digest"),
}


def edited(closed: Path, edits: Mapping[str, Edit], *, digest: bool) -> dict[str, Path]:
    """Return an edited copy of a close for each edit, by its name."""
    paths = {name: closed.with_name(f"{name}.json") for name in edits}
    for name, edit in edits.items():
        paths[name].write_bytes(closed.read_bytes())
        rewrite(paths[name], edit, digest=digest)
    return paths


def unnamed(
    capsys: pytest.CaptureFixture[str], paths: Mapping[str, Path], problem: str
) -> set[str]:
    """Verify against closes; return those that no failed check names with a problem."""
    status, answer = ask(capsys, "verify", *(f"--against={path}" for path in paths.values()))
    assert (status, answer["passed"]) == (1, False)
    failed = "; ".join(each["why"] for each in answer["verify"] if each["state"] == "FAILED")
    return {name for name, path in paths.items() if f"{path} {problem}" not in failed}


def test_edited_close_fails_by_its_own_digest(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An auditor reads the sums in the close, which no digest of rows covers."""
    problem = "differs from its digest and was not compared"
    paths = edited(closed, EDITS, digest=False)
    assert unnamed(capsys, paths, problem) == set()
    rewrite(closed, EDITS["rows"], digest=False)
    status, answer = ask(capsys, "verify", f"--against={closed}")
    (failed,) = [each for each in answer["verify"] if each["state"] == "FAILED"]
    assert (status, failed["why"]) == (1, f"{closed} {problem}")
    (rows,) = [each for each in answer["verify"] if each["check"] == "Closed rows are unchanged"]
    assert (rows["state"], rows["why"]) == ("not compared", "")
    assert "NOT complete: 1 check failed (Each close is as it was written)" in answer["complete"]


@pytest.mark.parametrize("name", SUM_EDITS)
def test_edited_sums_differ_from_the_rows(
    closed: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The editor of a close can also recompute its digest."""
    rewrite(closed, SUM_EDITS[name], digest=True)
    assert compare(capsys, closed) == (1, {(DAY_OF, "sums", "changed")})


FORGERIES: dict[str, Edit] = {
    "no days": lambda document: document.pop("days"),
    "no tenant key": lambda document: document.pop("tenant_key"),
    "days as a list": lambda document: document.update(days=["2025-10-20"]),
    "a day that is none": lambda document: document["days"].update(Friday={}),
    "a day in another form": lambda document: document["days"].update({"20251020": {}}),
    "a day of text": lambda document: document["days"].update({DAY_OF: "calls"}),
    "an unknown table": lambda document: document["days"][DAY_OF].update(other={}),
    "a table of text": lambda document: document["days"][DAY_OF].update(calls="12"),
    "rows as text": lambda document: document["days"][DAY_OF]["calls"].update(rows="6"),
    "no digest of rows": lambda document: document["days"][DAY_OF]["calls"].pop("sha256"),
    "an index that is none": lambda document: document["days"][DAY_OF]["calls"].update(index="é"),
    "half an index": lambda document: document["days"][DAY_OF]["calls"].update(index="AAAA"),
    "prices as a list": lambda document: document["days"][DAY_OF]["calls"].update(prices_sha256=[]),
    "sums of a number": lambda document: document["days"][DAY_OF].update(sums=5),
    "a sum of text": lambda document: document["days"][DAY_OF].update(sums=["x"]),
    "a sum without an agent": lambda document: document["days"][DAY_OF]["sums"][0].pop("agent"),
    "a sum without calls": lambda document: document["days"][DAY_OF]["sums"][0].pop("calls"),
    "no number": lambda document: document["days"][DAY_OF]["sums"][0].update(calls="sNaN"),
    "a huge number": lambda document: document["days"][DAY_OF]["sums"][0].update(calls="1e999999"),
    "a list as a tenant": lambda document: document["days"][DAY_OF]["sums"][0].update(tenant=[]),
}


def test_close_of_another_form_is_named(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its digest can be right, as anyone can compute it. The other closes are still compared."""
    paths = {**edited(closed, FORGERIES, digest=True), "whole": closed}
    assert unnamed(capsys, paths, "is not a close, although its digest is right") == {"whole"}


def test_close_without_its_predecessor_follows_none(
    ledger: LedgerFile, closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its digest can be right, as anyone can compute it."""
    write(ledger.address, entry("november", 30), first=40)
    november = tmp_path / "november.json"
    close(capsys, november, "--month", "2025-11", "--after", str(closed))
    rewrite(november, lambda document: document.pop("after"), digest=True)
    status, answer = ask(capsys, "verify", f"--against={closed}", f"--against={november}")
    assert (status, "Each close follows the one before it" in answer["complete"]) == (1, True)


@pytest.mark.parametrize("table", ["calls", "invocations", "attributes", "tools", "grants"])
def test_edited_number_of_rows_differs_from_the_rows(
    closed: Path, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    """An auditor reads it, and the editor of a close can recompute its digest."""
    rewrite(closed, lambda made: made["days"][DAY_OF][table].update(rows=1_000), digest=True)
    assert compare(capsys, closed) == (1, {(DAY_OF, table, "changed")})


def test_damaged_close_is_named_and_the_others_are_compared(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy can be cut off or empty, and closes of another format have other columns."""
    text = closed.read_text("utf-8")
    paths = {}
    for name, damaged in (("cut", text[: len(text) // 2]), ("empty", ""), ("list", "[]")):
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(damaged, encoding="utf-8")
    assert unnamed(capsys, {**paths, "whole": closed}, "is damaged, or not a close") == {"whole"}
    forms: dict[str, Edit] = {
        "another format": lambda document: document.update(format="otel-limits/close/2"),
        "no format": lambda document: document.pop("format"),
        "no start": lambda document: document.pop("since"),
        "no end": lambda document: document.pop("until"),
    }
    for digest, said in ((True, "is not a close"), (False, "is damaged, or not a close")):
        paths = {**edited(closed, forms, digest=digest), "whole": closed}
        assert unnamed(capsys, paths, said) == {"whole"}


def test_late_attributes_and_new_prices_do_not_change_the_sums(
    ledger: LedgerFile, closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They divide and price the same calls in another way; tokens and calls must still agree."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("models: {m: {price: {input: 1, output: 1}}}\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    assert main(["ledger", "reprice"]) == 0
    late = "INSERT INTO otel_limits_attributes SELECT invocation_id, 'team', 'x'"
    alter(ledger, f"{late} FROM otel_limits_attributes WHERE key = 'tenant.id'")
    status, found = compare(capsys, closed)
    assert (status, {kind for _, _, kind in found}) == (0, {"repriced", "added late"})
    rewrite(closed, scale_sums("input_tokens"), digest=True)
    status, found = compare(capsys, closed)
    assert (status, (DAY_OF, "sums", "changed") in found) == (1, True)


def test_csv_of_verify_has_each_check_and_each_difference(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the day and the table, as in every other format."""
    alter(ledger, "UPDATE otel_limits_model_calls SET model = 'cheap' WHERE id = FIRST")
    write(ledger.address, entry("late", 1), first=90)
    capsys.readouterr()
    assert main(["audit", "verify", f"--against={closed}", "--format", "csv"]) == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {(row["state"], row["why"], row["found"]) for row in rows} >= {
        ("FAILED", f"{closed.name}: calls of {DAY_OF} changed", "1"),
        ("ok", f"{closed.name}: invocations of {DAY_OF} added late", "1"),
    }
    (check,) = [row for row in rows if row["why"].endswith("(days and tables)")]
    assert check["why"] == "added late on 4, changed on 1 (days and tables)"


def test_csv_of_verify_has_each_inconsistent_row(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the invocation, which only the checks name otherwise."""
    alter(ledger, "DELETE FROM otel_limits_model_calls WHERE id = FIRST")
    capsys.readouterr()
    assert main(["audit", "verify", "--format", "csv"]) == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    status, answer = ask(capsys, "verify")
    assert status == 1
    for trouble in answer["rows"]:
        why = f"{trouble['invocation_id']}: {trouble['rows']}"
        assert why in {row["why"] for row in rows if row["state"] == "FAILED"}


def test_moved_day_is_missing_on_one_day_and_late_on_another(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spend moved from one month's budget to another."""
    alter(
        ledger,
        "UPDATE otel_limits_model_calls SET at_us = at_us + 86400000000 WHERE day = 20371",
    )
    status, found = compare(capsys, closed)
    assert status == 1
    assert found == {(DAY_OF, "calls", "missing"), ("2025-10-11", "calls", "added late")}


def test_rows_added_late_pass_and_hide_no_change(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The spill file of another host arrives; and with it, a row is changed."""
    write(ledger.address, entry("late", 1), first=90)
    tables = ("calls", "invocations", "attributes", "tools")
    late = {(DAY_OF, table, "added late") for table in tables}
    assert compare(capsys, closed) == (0, late)
    alter(ledger, "UPDATE otel_limits_model_calls SET model = 'cheap' WHERE id = FIRST")
    status, found = compare(capsys, closed)
    assert status == 1
    assert found == {*late, (DAY_OF, "calls", "changed")}


def test_repriced_rows_pass(
    ledger: LedgerFile, closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The recorded price is kept, and hashed apart from the present one."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("models: {m: {price: {input: 1, output: 1}}}\n", encoding="utf-8")
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    assert main(["ledger", "reprice"]) == 0
    assert "6 of 6 model calls were repriced" in capsys.readouterr().out
    days = ("2025-10-09", DAY_OF, "2025-10-11")
    assert compare(capsys, closed) == (0, {(day, "calls", "repriced") for day in days})


def test_pruned_rows_pass(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention records its border; later rows must exist."""
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    status, found = compare(capsys, closed)
    assert (status, {kind for _, _, kind in found}) == (0, {"pruned"})
    assert len(found) == 13
    main(["audit", "verify", "--against", str(closed)])
    days = len(json.loads(closed.read_text())["days"])
    said = f"{days} closed days as in {closed.name}, but {days} were pruned and not verified"
    assert said in capsys.readouterr().out


def test_prune_and_close_keep_the_same_trees(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A side call may come after the end of its invocation: its tree is as old as the call."""
    started, *calls, stop = events_of(entry(), ledger)
    late = next(each for each in calls if isinstance(each, ModelCall))
    calls[calls.index(late)] = replace(late, at=NINE + 2 * DAY)
    record(ledger, started, *calls, stop)
    write(ledger.address, entry("gone"), first=90)
    close(capsys, tmp_path / "c.json", "--month", "2025-10")
    with closing(Database(ledger.address)) as database:
        assert sum(prune(database, round((NINE + DAY) * 1e6))) == 1
    status, found = compare(capsys, tmp_path / "c.json")
    assert (status, {kind for _, _, kind in found}) == (0, {"pruned"})


DELETION = """
    CREATE TEMP TABLE gone AS SELECT RUN AS id;
    DELETE FROM otel_limits_tool_calls WHERE invocation_id IN gone;
    DELETE FROM otel_limits_attributes WHERE invocation_id IN gone;
    DELETE FROM otel_limits_model_calls WHERE invocation_id IN gone;
    DELETE FROM otel_limits_invocations WHERE id IN gone
"""


def test_prune_border_of_another_ledger_hides_no_deletion(
    ledger: LedgerFile, closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention deletes whole days up to its border, rather than one invocation."""
    other = tmp_path / "other.db"
    write(parse("test", str(other), None), entry("other", 0), first=90)
    assert main(["ledger", "prune", "--older-than", "1d", "--ledger", str(other)]) == 0
    alter(ledger, DELETION)
    assert main(["ledger", "merge", str(other), "--into", str(ledger.path)]) == 0
    status, found = compare(capsys, closed)
    assert (status, {kind for _, _, kind in found}) == (1, {"missing"})
    # Once retention has deleted the rest, it accounts for all.
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    status, found = compare(capsys, closed)
    assert (status, {kind for _, _, kind in found}) == (0, {"pruned"})


def test_pruned_ledger_passes_after_a_merge_with_an_unpruned_one(
    ledger: LedgerFile, closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows are older than the border, but were never closed."""
    other = tmp_path / "other.db"
    write(parse("test", str(other), None), entry("other", 1), first=90)
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    assert main(["ledger", "merge", str(other), "--into", str(ledger.path)]) == 0
    status, found = compare(capsys, closed)
    assert (status, {kind for _, _, kind in found}) == (0, {"pruned", "added late"})


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("UPDATE otel_limits_model_calls SET tier = x'ff00'", "JSON cannot hold BLOB values"),
        ("DROP TABLE otel_limits_quota_changes", "no such table: otel_limits_quota_changes"),
    ],
)
@pytest.mark.usefixtures("faulty")
def test_rows_that_cannot_be_compared_fail(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str],
    statement: str, reason: str,
) -> None:  # fmt: skip
    """SQLite stores a value of any type in any column."""
    alter(ledger, statement)
    status, answer = ask(capsys, "verify", f"--against={closed}")
    (check,) = answer["verify"]
    assert (status, check["state"], check["why"]) == (1, "FAILED", reason)


def test_close_is_refused_while_rows_wait_or_invocations_are_open(
    faulty: None, ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their rows would change the closed days; `--with-open` lists them."""
    *before, stop = events_of(entry(), ledger)
    record(ledger, *before)
    assert main(["ledger", "close", "--until", "2025-11-01"]) == 2
    assert "Not closed: 1 invocation has no end" in capsys.readouterr().err
    spill(ledger, entry("waiting"))
    with ledger.locked():
        assert main(["ledger", "close", "--until", "2025-11-01"]) == 2
        assert "rows wait in " in capsys.readouterr().err
        document = close(capsys, tmp_path / "c.json", "--until", "2025-11-01", "--with-open")
    assert document["open_invocations"] == [stop.invocation_id]
    assert document["pending_rows"] > 0
    # The end comes after the close, and the rows that waited are restored.
    record(ledger, replace(stop, seconds=2.0))
    status, found = compare(capsys, tmp_path / "c.json")
    assert status == 0
    assert {(table, kind) for _, table, kind in found} == {
        (table, "added late") for table in ("invocations", "attributes", "calls", "tools")
    }


def test_close_takes_waiting_rows_in(
    faulty: None, ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then they are closed like the others, and nothing is added late."""
    write(ledger.address, entry("recorded"))
    spill(ledger, entry("waiting"))
    document = close(capsys, tmp_path / "c.json", "--until", "2025-11-01")
    assert document["pending_rows"] == 0
    assert not ledger.spills()
    assert compare(capsys, tmp_path / "c.json") == (0, set())


def test_closes_form_a_chain(
    ledger: LedgerFile, closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has the digest of the one before, so that none can be exchanged alone."""
    write(ledger.address, entry("november", 30), first=40)
    november = tmp_path / "november.json"
    document = close(capsys, november, "--month", "2025-11", "--after", str(closed))
    assert document["after"] == hashlib.sha256(closed.read_bytes()).hexdigest()
    assert (document["since"], list(document["days"])) == ("2025-11-01", ["2025-11-08"])
    assert compare(capsys, closed, november) == (0, set())
    closed.write_text(closed.read_text("utf-8") + "\n", encoding="utf-8")
    status, answer = ask(capsys, "verify", f"--against={closed}", f"--against={november}")
    assert status == 1
    assert "Each close follows the one before it" in answer["complete"]
    failed = [each["command"] for each in answer["verify"] if each["state"] == "FAILED"]
    assert f"sha256sum {closed} {november}" in failed


def test_close_with_a_key_twice_differs_from_its_digest(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Readers of JSON take the last one, and people may see the first."""
    text = closed.read_text("utf-8")
    twice = text.replace('"input_tokens"', '"input_tokens": 99999, "input_tokens"', 1)
    assert twice != text
    closed.write_text(twice, encoding="utf-8")
    status, answer = ask(capsys, "verify", f"--against={closed}")
    assert status == 1
    assert "differs from its digest" in str(answer)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--month", "2999-01"], "2999-01-31 is not. Close those before"),
        (["--month", "2999-01", "--after", "october.json"], " --after october.json"),
        (["--month", "2025-12", "--after", "october.json"], "Close the days between them"),
        (["--until", "2025-10-01", "--after", "october.json"], "--until must be later than"),
        (["--until", "2025-11-02", "--after", "ledger.db"], "is not a close"),
        (["--until", "2025-11-02", "--after", "none.json"], "cannot be read"),
    ],
)
@pytest.mark.usefixtures("closed")
def test_close_of_unsuitable_days_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: list[str], sentence: str,
) -> None:  # fmt: skip
    """A sentence names the fix."""
    monkeypatch.chdir(tmp_path)
    assert main(["ledger", "close", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_lost_invocation_may_still_end_after_the_close(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator only assumed its end, so that the real one is added late."""
    *before, stop = events_of(entry(), ledger)
    record(ledger, *before)
    assert main(["ledger", "end-lost", "--older-than", "1d"]) == 0
    document = close(capsys, tmp_path / "c.json", "--month", "2025-10")
    assert document["lost_invocations"] == [stop.invocation_id]
    record(ledger, stop)
    status, found = compare(capsys, tmp_path / "c.json")
    assert (status, {kind for _, _, kind in found}) == (0, {"added late"})


def test_change_while_a_ledger_is_recorded_in_is_found(
    ledger: LedgerFile, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger with an open log, which a copy without it would lack."""
    book = Book(ledger.address, 200)
    book.write(entry("now", 60))
    alter(ledger, "DELETE FROM otel_limits_tool_calls WHERE invocation_id = RUN")
    status, found = compare(capsys, closed)
    book.close()
    assert status == 1
    assert found == {(DAY_OF, "tools", "missing")}
