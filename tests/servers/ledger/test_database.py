"""A ledger in a real PostgreSQL server, which the test starts and stops."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from strands import Agent

from otel_limits import Limits, disable, enable
from otel_limits.cli import main
from otel_limits.core.errors import LedgerError
from otel_limits.ledger import maintenance
from otel_limits.ledger.address import parse
from otel_limits.ledger.database import Database, write_error
from otel_limits.ledger.proof import balance
from otel_limits.ledger.reading import open_for_query
from otel_limits.ledger.schema import UNRELEASED
from otel_limits.ledger.spill import SpillFiles, restore_spilled
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.testing import ScriptedModel, endless, says, uses
from tests.ledger import otlp
from tests.ledger.bills import THIRD, BilledCall, litellm_logs, openai, openai_bill, used
from tests.ledger.book import DAY, NINE, Book, Call, Entry, write
from tests.ledger.fixtures import eventually
from tests.ledger.size import one
from tests.paths import ROOT
from tests.postgresql import PROGRAMS
from tests.programs.ledger.test_writer import record_from_processes
from tests.resumed import SUBJECTS, run_allowed
from tests.unit.ledger.test_spill import check_equivalence
from tests.unit.ledger.test_traces import LATER, SERVER_SPAN, TOTAL, imported, spent
from tests.unit.ledger.test_writer import rows_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile
    from tests.postgresql import Server

pytestmark = pytest.mark.skipif(
    not PROGRAMS and os.environ.get("CI") != "true",
    reason="PostgreSQL is missing: apt-get install postgresql.",
)


@pytest.fixture
def server(postgresql: Server) -> Server:
    """A running server."""
    return postgresql


@pytest.fixture
def database(
    server: Server,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> str:
    """An empty database that `enable()` records in; rows wait in the test's own directory."""
    name = f"t{abs(hash(request.node.nodeid))}"
    server.ask("postgres", f"CREATE DATABASE {name}")
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", server.url(name))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return name


@pytest.mark.usefixtures("database")
def test_tasks_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Sums over a window are decimal numbers in PostgreSQL."""
    enable(Limits(max_turns=3))
    _, endings = run_allowed(SUBJECTS[0])
    run_allowed(SUBJECTS[0], 1)
    disable()
    assert main(["audit", "suggest", "--min-invocations", "1"]) == 0
    assert "unknown, but above 3 turns or 45 tokens." in capsys.readouterr().out
    assert main(["audit", "backtest", "--max-turns", "2", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["backtest"]
    assert (row["invocations"], row["halted"], row["saved_tokens"]) == (2, 1, 15)
    stop = endings[-1].stop
    assert stop is not None
    for identity in (stop.task.id, stop.invocation_id):
        assert main(["audit", "show", identity, "--format", "json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["tasks"]) == 4


def test_an_agent_is_recorded(server: Server, database: str, make_agent: MakeAgent) -> None:
    """Spend is in the database when the invocation has returned, or soon after."""
    enable(Limits(max_turns=3))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    sums = "SELECT count(*), sum(input_tokens), sum(output_tokens) FROM otel_limits_model_calls"
    eventually(lambda: tables(server, database) and server.ask(database, sums) == [(3, 30, 15)])
    ends = "SELECT reason, action, breach_limit, turns FROM otel_limits_invocations"
    eventually(lambda: server.ask(database, ends) == [("max_turns", "halted", "max_turns", 3)])


def tables(server: Server, database: str) -> bool:
    """Return whether the ledger's tables are there."""
    found = server.ask(database, "SELECT to_regclass('otel_limits_model_calls')::text")
    return found != [(None,)]


@pytest.fixture(params=["SQL_ASCII", "LATIN1"])
def encoding(
    server: Server,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> str:
    """That of an empty database, with the same name, that `enable()` records in."""
    name = str(request.param)
    as_it_is = "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    server.ask("postgres", f"CREATE DATABASE {name.lower()} ENCODING '{name}' {as_it_is}")
    monkeypatch.setenv("OTEL_LIMITS_LEDGER", server.url(name.lower()))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    return name


def test_a_database_in_another_encoding(
    server: Server, encoding: str, make_agent: MakeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unsupported characters are escaped, and no other row is affected."""
    enable()
    for agent in ("日本", "über"):
        make_agent(ScriptedModel([says("x")]), name=agent)("go")
    disable()
    counted = server.ask(encoding.lower(), "SELECT count(*) FROM otel_limits_model_calls")
    assert (counted, main(["audit", "verify"])) == ([(2,)], 0)
    capsys.readouterr()
    assert main(["audit", "spend", "--by", "agent", "--format", "json"]) == 0
    groups = json.loads(capsys.readouterr().out)["spend"]
    agents = {"SQL_ASCII": {"日本", "über"}, "LATIN1": {r"\u65e5\u672c", "über"}}
    assert {group["agent"] for group in groups} == agents[encoding]


def test_a_connection_that_the_server_has_ended_is_made_anew(
    server: Server, database: str, tmp_path: Path
) -> None:
    """As after its restart, or where it ends idle sessions: that is not an error."""
    opened = Database(parse("test", server.url(database), tmp_path))
    sessions = f"FROM pg_stat_activity WHERE datname = '{database}'"
    for number in (1, 2):
        opened.write(rows_of(f"{number}"))
        server.ask("postgres", "SELECT pg_terminate_backend(pid) " + sessions)
    opened.close()
    kept = server.ask(database, "SELECT count(*) FROM otel_limits_attributes")
    assert kept == [(2,)]


def test_eight_processes_in_one_database(server: Server, database: str, tmp_path: Path) -> None:
    """Eight processes record 500 model calls each: every row is there, once."""
    record_from_processes(server.url(database), tmp_path, 8, 500)
    address = parse("test", server.url(database), tmp_path / "data")
    opened = Database(address)
    for _ in restore_spilled(opened, SpillFiles(address)):
        pass
    opened.close()
    query = (
        "SELECT agent, count(*), count(DISTINCT number), sum(input_tokens)::bigint"
        " FROM otel_limits_model_calls GROUP BY 1 ORDER BY 1"
    )
    assert server.ask(database, query) == [(str(n), 500, 500, 125_250) for n in range(8)]


def test_every_question_has_the_same_answer(
    server: Server,
    database: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SQLite and PostgreSQL answer alike, to the last digit."""
    entries = [
        Entry(
            agent=f"agent-{n % 3}",
            calls=[
                Call(
                    input=n,
                    cached=n // 2,
                    price="0.000000000001" if n % 2 else None,
                    saved="-0.5" if n % 2 else None,
                    tools=("search=a", "search!=b", f"fetch={n}"),
                )
            ]
            * (n % 7 + 1),
            attributes={"tenant.id": "acme" if n % 2 else "%other"},
            at=NINE + n * DAY / 3,
            tools=["search"],
            session=f"s{n % 2}",
        )
        for n in range(60)
    ]
    entries.append(Entry(agent="agent-1", calls=[Call()] * 90, at=NINE + 20 * DAY))  # an anomaly
    places = (str(tmp_path / "same.db"), server.url(database))
    for place in places:
        write(parse("test", place, tmp_path / "data"), *entries)
    for question in QUESTIONS:
        first, second = (answer(capsys, place, *question) for place in places)
        if "export" in question:
            # In the order in which they were recorded, which a slow moment of a server changes.
            first, second = ("\n".join(sorted(each.splitlines())) for each in (first, second))
        assert first == second, question
        assert "agent-1" in first


MISSING = ("tenant.id=acmee", "model=x", "state=y", "reason=z", "session=s9", "day=2020-01-01")
"""Values that no row has; the answer names each."""
QUESTIONS = (
    ("audit", "stops", "--where", "agent=agnet-1", "--format", "json"),
    (
        *("audit", "spend", "--where", "agent=agent-1", "--format", "json"),
        *(word for each in MISSING for word in ("--where", each)),
    ),
    ("audit", "spend", "--by", "agent,model,day,tenant.id,session", "--format", "json"),
    ("audit", "spend", "--by", "week,agent", "--where", "tenant.id=ac*", "--format", "json"),
    ("audit", "spend", "--where", "tenant.id!=other,model!=x", "--format", "json"),
    ("audit", "stops", "--where", "tenant.id=,tenant.id=acme,model!=x", "--format", "json"),
    (
        "audit",
        "spend",
        "--where",
        "day=2025-10-09",
        "--where",
        "day=2025-10-10",
        "--format",
        "json",
    ),
    ("audit", "spend", "--by", "day,agent", "--time-zone", "Asia/Kathmandu", "--format", "json"),
    ("audit", "stops", "--where", "month=2025-10", "--format", "json"),
    ("audit", "anomalies", "--by", "agent", "--min-days", "5", "--format", "json"),
    ("audit", "spend", "--by", "agent,tool", "--top", "4", "--format", "json"),
    ("audit", "spend", "--where", "week=2025-W42", "--compare", "previous", "--format", "json"),
    ("audit", "loops", "--format", "json"),
    ("audit", "stops", "--format", "json"),
    ("audit", "show", f"{2:032x}", "--format", "json"),
    ("audit", "backtest", "--max-turns", "2", "--max-token-budget", "90", "--format", "json"),
    ("audit", "suggest", "--min-invocations", "5", "--format", "json"),
    ("ledger", "export", "--format", "jsonl"),
    ("ledger", "export", "--format", "csv", "--what", "tools", "--where", "agent=agent-1"),
)


def answer(capsys: pytest.CaptureFixture[str], place: str, *question: str) -> str:
    """The output of a query, without the address."""
    assert main([*question, "--ledger", place]) == 0
    address = parse("test", place, Path("/data"))
    output = capsys.readouterr().out
    for shown in (json.dumps(str(address)), str(address), address.name):
        output = output.replace(shown, "LEDGER")
    return output


def test_a_bill_has_the_same_answer(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums by day, by call, and by the days of another time zone are alike."""
    calls = [BilledCall(at=THIRD + n * DAY / 4, input=n + 1, output=2) for n in range(9)]
    made = [
        Call(input=each.input, output=each.output, model="m", price=str(each.price))
        for each in calls[1:]
    ]
    entries = [Entry(calls=[one], at=each.at) for one, each in zip(made, calls[1:], strict=True)]
    page = openai(used(model="m")).replace(str(THIRD), str(THIRD + 5 * 3_600))
    bills = [openai_bill(calls), litellm_logs(calls)]
    bills.append([page.replace(str(THIRD + 86_400), str(THIRD + 86_400 + 5 * 3_600))])
    places = (str(tmp_path / "bill.db"), server.url(database))
    for place in places:
        write(parse("test", place, tmp_path / "data"), *entries)
    for number, texts in enumerate(bills):
        files = [tmp_path / f"bill-{number}-{page}" for page in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text, encoding="utf-8")
        words = ("--tolerance", "100", "--format", "json", "--bill", *map(str, files))
        first, second = (answer(capsys, place, "audit", "reconcile", *words) for place in places)
        assert first == second
        assert '"difference"' in first


def test_prune_and_import(
    server: Server,
    database: str,
    make_agent: MakeAgent,
    spans: InMemorySpanExporter,
    tmp_path: Path,
) -> None:
    """Both work as they do in a file, and importing twice changes nothing."""
    make_agent(ScriptedModel(endless(uses("search"))), tools=[])
    write(parse("test", server.url(database), tmp_path / "data"), Entry(tools=["x"]))
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    counts = "SELECT (SELECT count(*) FROM otel_limits_model_calls), count(*) FROM {}"
    assert server.ask(database, counts.format("otel_limits_invocations")) == [(0, 0)]
    make_agent(ScriptedModel([uses("search"), says("x")]))("go")
    path = tmp_path / "spans.jsonl"
    path.write_text(otlp.line(spans.get_finished_spans()), encoding="utf-8")
    for _ in range(2):
        assert main(["ledger", "import", str(path)]) == 0
        assert server.ask(database, counts.format("otel_limits_invocations")) == [(2, 1)]


def test_uncounted_tokens_and_totals_give_way_to_calls(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a file: importing again adds nothing, and a total is replaced by its call."""
    imported(tmp_path, TOTAL, SERVER_SPAN, SERVER_SPAN)
    counts = "SELECT count(*), sum(tokens) FROM otel_limits_uncounted_spans"
    tokens = "SELECT sum(input_tokens + output_tokens) FROM otel_limits_model_calls"
    assert server.ask(database, counts) == [(1, 801)]
    assert server.ask(database, tokens) == [(1000,)]
    imported(tmp_path, LATER, TOTAL)
    assert server.ask(database, tokens) == [(550,)]
    answer = spent(capsys)
    assert [each["tokens"] for each in answer["uncounted"]] == [801]
    assert answer["complete"].startswith("Incomplete: 1 span with 801 tokens was not counted")
    assert main(["audit", "verify"]) == 0


def test_concurrent_prunes_count_each_invocation_once(
    server: Server, database: str, tmp_path: Path
) -> None:
    """Six cron jobs at the same minute report together what was deleted."""
    address = parse("test", server.url(database), tmp_path / "data")
    write(address, *(Entry() for _ in range(300)))
    gate = threading.Barrier(6)

    def prune(_: int) -> int:
        with contextlib.closing(Database(address)) as ledger:
            gate.wait()
            return sum(maintenance.prune(ledger, round(time.time() * 1e6), portion=50))

    with ThreadPoolExecutor(6) as jobs:
        assert sum(jobs.map(prune, range(6))) == 300


def test_an_invocation_beyond_64_bits_is_added_up(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its calls, of which one came after its end; `bigint` would be out of range."""
    address = parse("test", server.url(database), tmp_path / "data")
    told: list[Any] = []
    book = Book(address)
    book._observer = told.append  # type: ignore[assignment]
    book.write(Entry(calls=[Call(price="9000000")], reason="max_turns", action="halted"))
    observer = LedgerObserver(address)
    for event in (*told, replace(told[1], number=2, at=NINE + 9)):
        observer(event)
    observer.close()
    for question in ("stops", "spend"):
        told_of = answer(capsys, server.url(database), "audit", question)
        assert "$18,000,000.00" in told_of
    tried = ("audit", "backtest", "--max-cost-usd", "10000000", "--format", "json")
    totals = json.loads(answer(capsys, server.url(database), *tried))["totals"]
    assert totals["backtest"]["halted"] == 1
    answer(capsys, server.url(database), "audit", "verify")


def test_prune_gives_the_space_back_when_it_is_asked_to(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --full the space is for new rows, as is said; with it, tables are smaller on disk."""
    address = parse("test", server.url(database), tmp_path / "data")
    size = "SELECT sum(pg_table_size(oid)) FROM pg_class WHERE relname LIKE 'otel_limits_%calls'"
    write(address, *(Entry(calls=[Call()] * 50, tools=["t"] * 50) for _ in range(20)))
    write(address, Entry(at=time.time(), tools=["t"]), first=21)
    # Where the young ones were not put behind the others, it cuts off the empty end by itself.
    for table in ("model_calls", "tool_calls"):
        server.ask(database, f"ALTER TABLE otel_limits_{table} SET (vacuum_truncate = off)")
    ((before,),) = server.ask(database, size)
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    assert server.ask(database, size)[0][0] >= before
    write(address, *(Entry(calls=[Call()] * 50, tools=["t"] * 50) for _ in range(10)), first=22)
    assert server.ask(database, size)[0][0] < before * 11 / 10
    said = capsys.readouterr().out
    assert "20 invocations deleted from " in said
    assert "New rows reuse the space; --full returns it to the disk." in said
    assert main(["ledger", "prune", "--older-than", "1d", "--full"]) == 0
    assert server.ask(database, size)[0][0] < before / 5
    assert "--full" not in capsys.readouterr().out
    assert len(server.ask(database, "SELECT * FROM otel_limits_invocations")) == 1


def test_user_without_table_ownership_can_prune(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are deleted; that their space cannot be given back to the disk is a sentence."""
    write(parse("test", server.url(database), tmp_path / "data"), Entry())
    server.ask(database, "CREATE ROLE keeper LOGIN")
    try:
        server.ask(database, "GRANT ALL ON ALL TABLES IN SCHEMA public TO keeper")
        theirs = server.url(database).replace("auditor@", "keeper@")
        prune = ["ledger", "prune", "--older-than", "1d", "--ledger", theirs]
        assert main(prune) == 0
        assert "1 invocation deleted" in capsys.readouterr().out
        assert main([*prune, "--full"]) == 2
        said = capsys.readouterr().err
        assert "PostgreSQL did not free disk space: " in said
        assert "Prune as the role that owns the tables." in said
    finally:
        server.ask(database, "DROP OWNED BY keeper; DROP ROLE keeper")


def test_old_rows_are_deleted_in_the_background(
    server: Server,
    database: str,
    make_agent: MakeAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole trees without recent rows, and old calls without a tree, while an agent records."""
    now, address = time.time(), parse("test", server.url(database), tmp_path / "data")
    book = Book(address)
    for n in range(60):  # more than one portion
        gone = book.write(
            Entry(agent="gone", at=now - 100 * DAY, attributes={"k": f"{n}"}, tools=["t"])
        )
    book.write(Entry(agent="gone", at=now - 99 * DAY, parent=gone))
    book.write(Entry(agent="of nobody", at=now - 99 * DAY, tools=["t"]))
    stays = book.write(Entry(agent="stays", at=now - 100 * DAY))
    book.write(Entry(agent="stays", at=now - DAY, parent=stays))
    book.close()
    server.ask(database, "DELETE FROM otel_limits_invocations WHERE agent = 'of nobody'")
    monkeypatch.setenv("OTEL_LIMITS_LEDGER_RETENTION", "90d")
    enable()
    make_agent(ScriptedModel([says("x")]), name="young")("go")
    left = [("stays",), ("stays",), ("young",)]
    runs, calls = (
        f"SELECT agent FROM otel_limits_{table} ORDER BY 1"  # noqa: S608
        for table in ("invocations", "model_calls")
    )
    eventually(lambda: server.ask(database, runs) == left)
    eventually(lambda: server.ask(database, calls) == left)
    others = "SELECT (SELECT count(*) FROM otel_limits_tool_calls), count(*) FROM {}"
    eventually(lambda: server.ask(database, others.format("otel_limits_attributes")) == [(0, 0)])
    disable()


def test_pending_rows_are_in_every_answer(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], faulty: None
) -> None:
    """Once, also what is in the database already, or ends there what has begun."""
    url = server.url(database)
    address = parse("--ledger", url, Path(os.environ["XDG_DATA_HOME"], "otel-limits"))
    told: list[Any] = []
    book = Book(address)
    book._observer = told.append  # type: ignore[assignment]
    book.write(Entry(calls=[Call()] * 2, tools=["search"], attributes={"tenant": "acme"}))
    observer = LedgerObserver(address)
    for event in (told[0], told[1]):  # it has begun, and made a call
        observer(event)
    observer.close()
    write(address, Entry(agent="known"), first=2)
    server.stop()
    try:
        observer = LedgerObserver(address)
        for event in told:
            observer(event)
        observer(replace(told[1], number=3, at=NINE + 9))  # it came after the end
        observer.close()
        write(address, Entry(agent="known"), first=2)
        write(address, Entry(agent="new"), first=3)
    finally:
        server.start()
    count = "SELECT count(*), count(ended_us) FROM otel_limits_invocations"
    assert server.ask(database, count) == [(2, 1)]
    for question, wanted in (("spend", 5 * 120), ("stops", 5 * 120)):
        said = json.loads(answer(capsys, url, "audit", question, "--format", "json"))
        assert said["totals"][question]["tokens"] == wanted
        assert said["complete"].startswith("Totals of the whole ledger match: 5 calls add up to")
    assert server.ask(database, count) == [(3, 3)]
    assert SpillFiles(address).files() == []


@pytest.mark.parametrize(
    ("rights", "reason"),
    [
        ("SELECT", "this user may not write its tables"),
        ("SELECT, INSERT, UPDATE", "cannot execute INSERT in a read-only transaction"),
    ],
)
def test_rows_wait_for_a_role_that_may_write(
    server: Server, database: str, tmp_path: Path, rights: str, reason: str
) -> None:
    """The answer is without them, and says how many and why; later they are taken in."""
    write(parse("test", server.url(database), tmp_path / "data"), Entry())
    url = server.url(database).replace("auditor@", "keeper@")
    keeper = parse("test", url, tmp_path / "data")
    spill = SpillFiles(keeper)
    spill.append(one(1), to_disk=False)
    spill.seal()
    server.ask(database, "CREATE ROLE keeper LOGIN")
    try:
        server.ask(database, "ALTER ROLE keeper SET default_transaction_read_only = on")
        server.ask(database, f"GRANT {rights} ON ALL TABLES IN SCHEMA public TO keeper")
        server.ask(database, "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO keeper")
        with open_for_query(keeper) as (connection, waiting):
            assert balance(connection).calls.calls == 1
            assert (waiting.rows, waiting.reason) == (len(one(1)), reason)
        server.ask(database, "GRANT INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO keeper")
        server.ask(database, "ALTER ROLE keeper RESET default_transaction_read_only")
        with open_for_query(keeper) as (connection, waiting):
            assert (balance(connection).calls.calls, waiting.rows) == (11, 0)
    finally:
        server.ask(database, "DROP OWNED BY keeper; DROP ROLE keeper")


@pytest.mark.parametrize("seed", range(2))
def test_waiting_rows_are_seen_as_if_restored(
    server: Server, database: str, tmp_path: Path, seed: int
) -> None:
    """As in a file: replays, ends of recorded invocations, late and renumbered calls, losses."""
    check_equivalence(parse("test", server.url(database), tmp_path / "data"), seed)


def test_a_question_sees_one_moment(server: Server, database: str, tmp_path: Path) -> None:
    """An invocation that ends between two statements is in none: its totals would be missing."""
    address = parse("test", server.url(database), tmp_path / "data")
    write(address, Entry())
    with open_for_query(address) as (connection, _):
        first = balance(connection)
        write(address, Entry(calls=[Call()] * 3), first=2)
        assert balance(connection) == first
        assert first.calls.calls == 1


def test_calls_are_priced_again(
    server: Server,
    database: str,
    make_agent: MakeAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a file: once, with the recorded price next to the new one, and in the totals."""
    policy = tmp_path / "limits.yaml"
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(policy))
    policy.write_text("models: {other: {price: {input: 1, output: 1}}}\n")
    enable()
    make_agent(ScriptedModel(endless(uses("search"))), tools=[])("go", limits={"turns": 3})
    disable()
    read = (
        "SELECT price_pico, price_source, former_price_pico, former_price_source "
        "FROM otel_limits_model_calls"
    )
    calls = len(server.ask(database, read))
    assert calls
    expected: set[tuple[Any, ...]] = {(None, None, None, None)}
    for price, every, pico in ((3, [], 45_000_000), (5, ["--all"], 75_000_000)):
        policy.write_text(f"models: {{scripted: {{price: {{input: {price}, output: {price}}}}}}}\n")
        assert main(["ledger", "reprice", *every, "--dry-run"]) == 0
        assert set(server.ask(database, read)) == expected
        expected = {(pico, "policy", None, "none")}
        for _ in range(2):
            assert main(["ledger", "reprice", *every]) == 0
            assert set(server.ask(database, read)) == expected
        total = "SELECT price_pico, unpriced_calls FROM otel_limits_invocations"
        assert server.ask(database, total) == [(calls * pico, 0)]


def test_rows_wait_for_a_server_that_is_down(
    server: Server, database: str, tmp_path: Path, faulty: None
) -> None:
    """They go to a file in the data directory, and are in the answer once it is back."""
    address = parse("test", server.url(database), tmp_path / "data")
    book = Book(address)
    book.write(Entry())
    book.close()
    server.stop()
    try:
        write(address, Entry(), first=2)
        assert list((tmp_path / "data").glob("ledger-*.spill-*.jsonl"))
    finally:
        server.start()
    opened, spill = Database(address), SpillFiles(address)
    waiting = [line for path in spill.files() for line in path.read_text().splitlines()[1:]]
    assert sum(restore_spilled(opened, spill)) == len(waiting) > 0
    opened.close()
    assert server.ask(database, "SELECT count(*) FROM otel_limits_model_calls") == [(2,)]


def test_an_unreleased_ledger_is_refused(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its schema version is one that no release ever wrote."""
    write(parse("test", server.url(database), tmp_path / "data"), Entry())
    server.ask(database, "ALTER TABLE otel_limits_schema DROP COLUMN written_by")
    assert main(["audit", "spend"]) == 2
    assert UNRELEASED in capsys.readouterr().err
    with pytest.raises(LedgerError):
        Database(parse("test", server.url(database), tmp_path)).engine()


def test_a_newer_ledger_is_refused(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence says that a newer program wrote it."""
    write(parse("test", server.url(database), tmp_path / "data"), Entry())
    server.ask(database, "UPDATE otel_limits_schema SET version = 99")
    assert main(["audit", "spend"]) == 2
    assert "99" in capsys.readouterr().err
    with pytest.raises(LedgerError):
        Database(parse("test", server.url(database), tmp_path)).engine()


def test_whether_a_ledger_can_be_written_is_found_out_without_writing(
    server: Server, database: str
) -> None:
    """By the rights of the user: `otel-limits doctor` makes no table."""
    address = parse("--ledger", server.url(database), Path("/nowhere"))
    assert write_error(address) is None
    assert server.ask(database, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [
        (0,)
    ]
    server.ask(database, "CREATE ROLE reader LOGIN")
    reader = parse(
        "--ledger", server.url(database).replace("auditor@", "reader@"), Path("/nowhere")
    )
    assert write_error(reader) == "this user may not write its tables"
    nobody = parse(
        "--ledger", server.url(database).replace("auditor@", "nobody:hunter2@"), Path("/nowhere")
    )
    refusal = write_error(nobody)
    assert refusal is not None
    assert "hunter2" not in refusal


def test_read_only_user_can_query(
    server: Server, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role with no right but to read gets every answer, and nothing is written."""
    write(parse("test", server.url(database), None), Entry(calls=[Call()] * 2, at=NINE))
    server.ask(database, "CREATE ROLE pupil LOGIN")
    server.ask(database, "ALTER ROLE pupil SET default_transaction_read_only = on")
    server.ask(database, "GRANT SELECT ON ALL TABLES IN SCHEMA public TO pupil")
    server.ask(database, f"REVOKE TEMPORARY ON DATABASE {database} FROM PUBLIC")
    url = server.url(database).replace("auditor@", "pupil@")
    for question in ("spend", "stops", "verify"):
        assert main(["audit", question, "--ledger", url, "--format", "json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert "2 calls add up" in answer["complete"]


# --- proof ----------------------------------------------------------------------------------------


def test_close_has_the_same_bytes_as_in_sqlite(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ledger that moves to a server is proven by the closes that it had before."""
    entries = [
        Entry(
            agent=agent,
            calls=[Call(price="0.1", tools=["search"], side=True), Call(cached=9, model='é,"')],
            at=NINE + 40_000 * number,
            attributes={"tenant.id": f"t{number % 2}"},
        )
        for number, agent in enumerate(("Zoë", "a", "Ä", "_", "b\\n"))
    ]
    closes = []
    for text in (server.url(database), str(tmp_path / "ledger.db")):
        write(parse("test", text, tmp_path / "data"), *entries)
        assert main(["ledger", "close", "--month", "2025-10", "--ledger", text]) == 0
        closes.append(capsys.readouterr().out)
    assert closes[0] == closes[1]
    path = tmp_path / "october.json"
    path.write_text(closes[1], encoding="utf-8")
    assert main(["audit", "verify", "--against", str(path)]) == 0
    server.ask(database, "UPDATE otel_limits_attributes SET value = 't9' WHERE value = 't1'")
    capsys.readouterr()
    assert main(["audit", "verify", "--against", str(path), "--format", "json"]) == 1
    rows = json.loads(capsys.readouterr().out)["closed_days"]
    assert {(row["table"], row["difference"]) for row in rows} == {("attributes", "changed")}


def test_ledger_moves_to_a_server_and_back(
    server: Server, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closes stay the same, and so do the answers."""
    places = [str(tmp_path / "old.db"), server.url(database), str(tmp_path / "new.db")]
    calls = [Call(price="0.1", tools=["search"], side=True), Call(cached=9, model='é,"'), Call()]
    entries = [
        Entry(agent=agent, calls=calls, at=NINE + 40_000 * number, attributes={"tenant.id": "t"})
        for number, agent in enumerate(("Zoë", "a", "_"))
    ]
    write(parse("test", places[0], tmp_path / "data"), *entries)
    for source, target in itertools.pairwise(places):
        for _ in range(2):  # the second time nothing is new
            assert main(["ledger", "merge", source, "--into", target]) == 0
    capsys.readouterr()
    answers = []
    for place in places:
        assert main(["audit", "verify", "--ledger", place]) == 0
        capsys.readouterr()
        assert main(["ledger", "close", "--month", "2025-10", "--ledger", place]) == 0
        answers.append(capsys.readouterr().out)
    assert answers == answers[:1] * 3


def test_call_that_was_recorded_live_and_imported_is_merged_once(
    server: Server, database: str, ledger: LedgerFile, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """In PostgreSQL as in SQLite, also if the ledger had the import first."""
    live, imported = str(ledger.path), str(tmp_path / "imported.db")
    enable()
    Agent(model=ScriptedModel([says("a")]), callback_handler=None)("go")
    disable()
    file = tmp_path / "spans.jsonl"
    file.write_text(otlp.line(spans.get_finished_spans()))
    assert main(["ledger", "import", str(file), "--ledger", imported]) == 0
    for other in (imported, live, imported):
        assert main(["ledger", "merge", other, "--into", server.url(database)]) == 0
    calls = server.ask(database, "SELECT source FROM otel_limits_model_calls")
    runs = server.ask(database, "SELECT source FROM otel_limits_invocations")
    assert calls == runs == [("live",)]


def test_commands_that_move_and_back_up_do_so(
    server: Server, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the page, in its order; what they write is complete."""
    page = (ROOT / "otel_limits/docs/ledger.md").read_text(encoding="utf-8")
    commands = page.partition("## Moving and backing up")[2].split("```")[1]
    commands = commands.removeprefix("console").replace("postgresql://localhost/books", "$URL")
    commands = commands.replace("books books.dump", f"{database} books.dump")
    commands = commands.replace("books.dump books", f"books.dump {database}")
    for name, number in (("ledger", 1), ("node-1", 2), ("node-2", 3)):
        address = parse("test", str(tmp_path / f"{name}.db"), tmp_path / "data")
        write(address, Entry(calls=[Call(price="1")]), first=number)
    monkeypatch.setenv("PATH", PROGRAMS[-1], prepend=":")
    for variable, text in (
        ("PGHOST", "127.0.0.1"),
        ("PGPORT", str(server.port)),
        ("PGUSER", "auditor"),
        ("URL", server.url(database)),
    ):
        monkeypatch.setenv(variable, text)
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True)  # the page's own text
    for place, calls in ((server.url(database), 1), ("all.db", 2), ("backup.db", 1)):
        monkeypatch.chdir(tmp_path)
        address = parse("test", place, tmp_path / "data")
        with open_for_query(address) as (connection, _):
            counted = connection.exec_driver_sql("SELECT count(*) FROM otel_limits_model_calls")
            assert counted.scalar() == calls
        assert main(["audit", "verify", "--ledger", place]) == 0


def test_unreadable_heap_is_found(
    server: Server, database: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Indexes alone answer most queries, so that `verify` reads the rows."""
    url = server.url(database)
    write(parse("test", url, tmp_path / "data"), *(Entry(at=NINE + n) for n in range(200)))
    assert main(["audit", "verify", "--ledger", url]) == 0
    server.ask(database, "CHECKPOINT")
    path = "SELECT pg_relation_filepath('otel_limits_model_calls')"
    ((heap,),) = server.ask(database, path)
    server.stop()
    try:
        with (server.data / heap).open("r+b") as opened:
            opened.write(b"\xff" * 4096)
    finally:
        server.start()
    capsys.readouterr()
    assert main(["audit", "verify", "--ledger", url, "--format", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    (check,) = answer["verify"]
    assert (check["state"], answer["passed"]) == ("FAILED", False)
    assert "invalid page" in check["why"]
