"""Keeping a ledger: spans imported into it, rows exported from it, what is old pruned."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import sqlite3
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from strands import Agent, tool

import otel_limits
from otel_limits import Limits, enable
from otel_limits.cli import main
from otel_limits.cli.terminal import working
from otel_limits.core.price_lookup import Prices
from otel_limits.ledger import reading, schema
from otel_limits.ledger.database import Database
from otel_limits.ledger.imports import import_files
from otel_limits.testing import ScriptedModel, endless, fails, says, uses
from tests.ledger import otlp
from tests.ledger.book import DAY, Book, Call, Entry, write
from tests.ledger.fixtures import eventually
from tests.unit.audit.test_completeness import events_of, record

if TYPE_CHECKING:
    from pathlib import Path

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from otel_limits.ledger.rows import Rows
    from tests.conftest import MakeAgent
    from tests.ledger.fixtures import LedgerFile

Output = pytest.CaptureFixture[str]


def usage(sent: int, received: int) -> dict[str, int]:
    """The usage that a provider reports."""
    return {"inputTokens": sent, "outputTokens": received, "totalTokens": sent + received}


# --- import ---------------------------------------------------------------------------------------


@pytest.fixture
def exported(make_agent: MakeAgent, spans: InMemorySpanExporter, tmp_path: Path) -> Path:
    """Spans of one agent, invoked three times without otel-limits: 1,110 and 111 tokens.

    Those of a last call are unknown: Strands' span of it has zeros, and what was said.
    """
    script = [
        uses("search", usage=usage(1000, 100)),
        says("a", usage=usage(100, 10)),
        says("b", usage=usage(10, 1)),
        says("c", usage=usage(0, 0)),
    ]
    agent = make_agent(
        ScriptedModel(script), trace_attributes={"tenant.id": "acme", "session.id": "s"}
    )
    for _ in range(3):
        agent("SECRET-PROMPT")
    return saved(spans, tmp_path)


def saved(spans: InMemorySpanExporter, directory: Path) -> Path:
    """Write a file as a collector does: one line per batch."""
    path = directory / "spans.jsonl"
    finished = spans.get_finished_spans()
    half = len(finished) // 2
    path.write_text(otlp.line(finished[:half]) + otlp.line(finished[half:]), encoding="utf-8")
    return path


def test_imported_spend_is_the_scripted_truth(
    exported: Path, ledger: LedgerFile, capsys: Output
) -> None:
    """Model calls are summed, never the agent's spans, whose usage is that of its whole life."""
    assert main(["ledger", "import", str(exported)]) == 0
    said = "Imported 4 model calls, 3 invocations and 1 tool call."
    assert said in capsys.readouterr().out
    *calls, last = [(c["input_tokens"], c["output_tokens"], c["state"]) for c in ledger.calls()]
    assert calls == [(1000, 100, "measured"), (100, 10, "measured"), (10, 1, "measured")]
    assert last[0] == pytest.approx(70, rel=0.2)
    assert last[1:] == (1, "estimated")
    found = [
        (r["agent"], r["reason"], r["turns"], r["model_calls"], r["tool_calls"], r["input_tokens"])
        for r in ledger.invocations()
    ]
    assert found == [
        ("tester", "end_turn", 2, 2, 1, 1100),
        ("tester", "end_turn", 1, 1, 0, 10),
        ("tester", "end_turn", 1, 1, 0, last[0]),
    ]
    assert [row["session_id"] for row in ledger.invocations()] == ["s"] * 3
    assert ledger.tools()[0]["tool"] == "search"


def test_importing_again_changes_nothing(
    exported: Path, ledger: LedgerFile, capsys: Output
) -> None:
    """What is there already is counted as known."""
    main(["ledger", "import", str(exported)])
    before = ledger.calls(), ledger.invocations(), ledger.tools()
    capsys.readouterr()
    assert main(["ledger", "import", str(exported), str(exported)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Imported 0 model calls,")
    assert "4 model calls were already in the ledger." in out
    assert (ledger.calls(), ledger.invocations(), ledger.tools()) == before


def test_an_import_that_is_broken_off_leaves_what_adds_up(
    exported: Path, ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Totals are written with the calls, so a concurrent query finds a consistent ledger."""
    write_rows, found = Database.write, []

    def written(database: Database, rows: Rows) -> dict[str, int]:
        changed = write_rows(database, rows)
        found.append([main(["audit", question]) for question in ("verify", "stops", "suggest")])
        return changed

    monkeypatch.setattr(Database, "write", written)
    with contextlib.closing(Database(ledger.address)) as database, working("Importing") as work:
        import_files(database, [str(exported)], (), Prices(), work, portion=1)
    assert found == [[0, 0, 0]] * 8
    assert "NOT complete" not in capsys.readouterr().out


def test_audit_keys_of_imported_spans(
    exported: Path, ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attributes of the agent's span that are chosen for audit are taken over."""
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", "tenant.id")
    main(["ledger", "import", str(exported)])
    assert {key: value for (_, key), value in ledger.attributes().items()} == {"tenant.id": "acme"}


def test_nothing_that_was_said_is_imported(exported: Path, ledger: LedgerFile) -> None:
    """The file holds the prompt; the ledger does not."""
    assert "SECRET-PROMPT" in exported.read_text()
    main(["ledger", "import", str(exported)])
    ledger.calls()
    for path in ledger.path.parent.glob("ledger.db*"):
        assert b"SECRET-PROMPT" not in path.read_bytes()


def test_live_recorded_calls_are_not_imported(
    make_agent: MakeAgent,
    spans: InMemorySpanExporter,
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: Output,
) -> None:
    """The ledger's own rows stand; the same invocation in a file of spans adds nothing."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    otel_limits.disable()
    before = ledger.calls(), ledger.invocations(), ledger.tools()
    assert main(["ledger", "import", str(saved(spans, tmp_path))]) == 0
    assert "Imported 0 model calls, 0 invocations and 0 tool calls." in capsys.readouterr().out
    assert (ledger.calls(), ledger.invocations(), ledger.tools()) == before


def test_a_halt_is_imported_with_its_limit(
    make_agent: MakeAgent, spans: InMemorySpanExporter, ledger: LedgerFile, tmp_path: Path
) -> None:
    """Attributes of a halt on exported spans become its row, where nothing was recorded live."""
    enable(Limits(max_turns=2))
    make_agent(ScriptedModel(endless(uses("search"))))("go")
    otel_limits.disable()
    path = saved(spans, tmp_path)
    ledger.path.unlink()
    main(["ledger", "import", str(path)])
    (row,) = ledger.invocations()
    columns = ("reason", "action", "breach_limit", "breach_cap", "turns")
    assert [row[name] for name in columns] == ["max_turns", "halted", "max_turns", "2", 2]
    assert row["halt"].startswith("Agent 'tester' was halted by max_turns: 2 of 2 turns used.")


def test_sub_agents_are_imported_as_a_tree(
    make_agent: MakeAgent, spans: InMemorySpanExporter, ledger: LedgerFile, tmp_path: Path
) -> None:
    """An agent in a tool hangs under the one that called it."""

    @tool
    def ask() -> str:
        """Ask another agent."""
        helper = Agent(model=ScriptedModel([says("x")]), name="helper", callback_handler=None)
        return str(helper("go"))

    make_agent(ScriptedModel([uses("ask"), says("done")]), tools=[ask], name="boss")("go")
    main(["ledger", "import", str(saved(spans, tmp_path))])
    rows = {row["agent"]: row for row in ledger.invocations()}
    assert rows["helper"]["parent_id"] == rows["boss"]["id"] == rows["helper"]["root_id"]
    assert [rows[name]["model_calls"] for name in ("boss", "helper")] == [2, 1]


def test_a_failed_call_is_imported_as_failed(
    make_agent: MakeAgent, spans: InMemorySpanExporter, ledger: LedgerFile, tmp_path: Path
) -> None:
    """A request that raised has no tokens, and says why."""
    with pytest.raises(Exception, match="broken"):
        make_agent(ScriptedModel([fails(ValueError("broken"))]))("go")
    main(["ledger", "import", str(saved(spans, tmp_path))])
    assert [call["state"] for call in ledger.calls()] == ["failed"]
    assert ledger.invocations()[0]["turns"] == 0


def test_a_call_seen_by_two_instrumentations_counts_once(
    exporter: InMemorySpanExporter, ledger: LedgerFile, tmp_path: Path
) -> None:
    """A `chat` span of a provider's client under Strands' own is that same call."""
    tokens: dict[str, Any] = {"gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 3}
    strands = trace.get_tracer("strands.telemetry.tracer")
    client = trace.get_tracer("opentelemetry.instrumentation.openai_v2")
    with (
        strands.start_as_current_span(
            "invoke_agent a", attributes={"gen_ai.operation.name": "invoke_agent"} | tokens
        ),
        strands.start_as_current_span("chat", attributes=tokens),
        client.start_as_current_span("chat gpt-5", attributes=tokens),
    ):
        pass
    main(["ledger", "import", str(saved(exporter, tmp_path))])
    assert ledger.tokens() == 10


@pytest.mark.parametrize("form", ["gzip", "base64"])
def test_other_ways_to_write_it(
    exported: Path, spans: InMemorySpanExporter, ledger: LedgerFile, tmp_path: Path, form: str
) -> None:
    """Compressed files, and ids in base64, are the same spans."""
    path = tmp_path / "other.jsonl.gz"
    text = otlp.line(spans.get_finished_spans(), ids="hex" if form == "gzip" else "base64")
    path.write_bytes(gzip.compress(text.encode()))
    main(["ledger", "import", str(exported)])
    before = ledger.tokens()
    main(["ledger", "import", str(path)])
    assert ledger.tokens() == before > 1221


def test_lines_that_are_no_spans(exported: Path, ledger: LedgerFile, capsys: Output) -> None:
    """They are left out and counted; metrics and empty lines are no mistake."""
    with exported.open("a", encoding="utf-8") as file:
        file.write(
            '\n{"resourceMetrics": []}\nnonsense\n[]\n{"resourceSpans": [{"scopeSpans": 1}]}\n'
        )
    assert main(["ledger", "import", str(exported)]) == 0
    assert "Skipped 2 parts that cannot be read:" in capsys.readouterr().out


def test_a_file_that_is_not_there(ledger: LedgerFile, tmp_path: Path, capsys: Output) -> None:
    """The sentence names it, and the exit status is 2."""
    assert main(["ledger", "import", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl cannot be read: No such file or directory." in capsys.readouterr().err


# --- export ---------------------------------------------------------------------------------------


@pytest.fixture
def kept(ledger: LedgerFile) -> LedgerFile:
    """Two invocations, one of them priced to the picodollar."""
    write(
        ledger.address,
        Entry(
            calls=[Call(input=3, output=2, price="0.000000000001"), Call(input=2**53 + 1)],
            attributes={"tenant.id": "acme"},
            tools=["search"],
        ),
        Entry(agent="other"),
    )
    return ledger


def test_json_lines(kept: LedgerFile, capsys: Output) -> None:
    """Integers and money are exact, times are ISO 8601, audit keys are columns."""
    assert main(["ledger", "export", "--format", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["agent"], r["input_tokens"], r["price_usd"], r["tenant.id"]) for r in rows] == [
        ("worker", 3, "0.000000000001", "acme"),
        ("worker", 2**53 + 1, None, "acme"),
        ("other", 100, None, None),
    ]
    assert rows[0]["at"] == "2025-10-09T09:00:01+00:00"


def test_csv(kept: LedgerFile, capsys: Output) -> None:
    """A condition narrows what is written."""
    assert main(["ledger", "export", "--format", "csv", "--where", "tenant.id=acme"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["input_tokens"] for row in rows] == ["3", str(2**53 + 1)]
    assert rows[1]["price_usd"] == ""


def test_prices_before_repricing_are_exported_in_usd(kept: LedgerFile, capsys: Output) -> None:
    """As all money: a spreadsheet would read picodollars as dollars."""
    with contextlib.closing(sqlite3.connect(kept.path)) as connection, connection:
        connection.execute("UPDATE otel_limits_model_calls SET former_price_pico = 1500000000000")
    assert main(["ledger", "export", "--format", "jsonl"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["former_price_usd"] == "1.500000000000"
    assert [name for name in row if name.endswith("_pico")] == []


def test_another_format_is_refused(kept: LedgerFile, capsys: Output) -> None:
    """With those that exist."""
    with pytest.raises(SystemExit, match="2"):
        main(["ledger", "export", "--format", "parquet"])
    said = capsys.readouterr().err
    assert "--format: invalid choice: 'parquet' (choose from" in said
    assert "csv" in said
    assert "jsonl" in said


def test_a_key_that_is_called_like_a_column_is_exported(
    ledger: LedgerFile, tmp_path: Path, capsys: Output
) -> None:
    """Under its prefix; and a number below 0 is not quoted as a formula would be."""
    keys = {"turn": "=1+1", "tool": "mine", "tenant": "acme"}
    write(ledger.address, Entry(calls=[Call(price="1", saved="-0.5")], attributes=keys))
    file = tmp_path / "calls.csv"
    assert main(["ledger", "export", "--format", "csv", "--output", str(file)]) == 0
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert (row["turn"], row["key:turn"], row["tool"], row["tenant"]) == (
        "1",
        "'=1+1",
        "mine",
        "acme",
    )
    assert row["cache_saved_usd"] == "-0.500000000000"


def test_export_to_a_file_reports_its_rows(
    ledger: LedgerFile, tmp_path: Path, capsys: Output
) -> None:
    """Apart from the rows, so they can go to /dev/stdout; and that another file is gone."""
    write(ledger.address, Entry(calls=[Call(), Call()]))
    path = tmp_path / "out.csv"
    capsys.readouterr()
    for _ in range(2):
        assert main(["ledger", "export", "--format", "csv", "--output", str(path)]) == 0
    assert capsys.readouterr() == (
        "",
        f"Wrote 2 rows to {path}.\nWrote 2 rows to {path}, replacing its content.\n",
    )


def test_an_export_that_cannot_be_written(kept: LedgerFile, tmp_path: Path, capsys: Output) -> None:
    """The sentence names the file."""
    path = tmp_path / "missing" / "out.csv"
    assert main(["ledger", "export", "--format", "csv", "--output", str(path)]) == 2
    assert f"Cannot write {path}: No such file or directory." in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "ledger export --format csv",
        "ledger export --format jsonl",
        "audit spend --format json",
        "audit verify",
    ],
)
def test_unwritable_standard_output_is_reported(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, capsys: Output, command: str
) -> None:
    """A reader that has seen enough is no error; a full disk is one, and not the ledger's."""
    write(ledger.address, Entry(calls=[Call()] * 200))
    read_end, write_end = os.pipe()
    os.close(read_end)
    found = []
    for descriptor in (write_end, os.open("/dev/full", os.O_WRONLY)):
        with os.fdopen(descriptor, "w") as output, monkeypatch.context() as ended:
            ended.setattr(sys, "stdout", output)
            found.append((main(command.split()), capsys.readouterr().err))
    assert found[0] == (141, "")
    status, said = found[1]
    assert (status, said.count("Cannot write output: No space left on device.")) == (2, 1)
    assert "ledger.db" not in said


def test_special_file_is_written_to_and_not_replaced(ledger: LedgerFile, tmp_path: Path) -> None:
    """A link stays a link, and a pipe a pipe: so would /dev/stdout of a container."""
    write(ledger.address, Entry())
    export = ["ledger", "export", "--format", "jsonl", "--output"]
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("before")
    assert main([*export, str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    written = (tmp_path / "target").read_text(encoding="utf-8")
    assert json.loads(written)["agent"] == "worker"
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as threads:
        read = threads.submit((tmp_path / "pipe").read_text, encoding="utf-8")
        assert main([*export, str(tmp_path / "pipe")]) == 0
        assert read.result() == written
    assert (tmp_path / "pipe").is_fifo()


# --- prune ----------------------------------------------------------------------------------------


def test_prune_deletes_old_trees_whole(ledger: LedgerFile, capsys: Output) -> None:
    """A tree goes with everything below it, once nothing in it is young."""
    now = time.time()
    book = Book(ledger.address)
    gone = book.write(Entry(agent="gone", at=now - 100 * DAY, attributes={"k": "v"}, tools=["t"]))
    book.write(Entry(agent="gone", at=now - 99 * DAY, parent=gone))
    stays = book.write(Entry(agent="stays", at=now - 100 * DAY))
    book.write(Entry(agent="stays", at=now - 1 * DAY, parent=stays))
    book.write(Entry(agent="young", at=now - 89 * DAY))
    book.close()
    assert main(["ledger", "prune", "--older-than", "90d"]) == 0
    assert "2 invocations deleted" in capsys.readouterr().out
    assert [row["agent"] for row in ledger.invocations()] == ["stays", "stays", "young"]
    assert [row["agent"] for row in ledger.calls()] == ["stays", "stays", "young"]
    assert (ledger.tools(), ledger.attributes()) == ([], {})


@pytest.mark.parametrize("last", ["model call", "tool call"])
def test_prune_keeps_a_tree_with_recent_calls(
    ledger: LedgerFile, last: str, capsys: Output
) -> None:
    """An agent that works for months is in progress, and so is its caller."""
    now = time.time()
    (caller,) = write(ledger.address, Entry(agent="caller", at=now - 100 * DAY), first=80)
    agent = Entry(agent="agent", at=now - 99 * DAY, calls=[Call(tools=["search"])], parent=caller)
    started, call, tool_call, stop = events_of(agent, ledger)
    recent = {
        "model call": (replace(call, at=now), tool_call),
        "tool call": (call, replace(tool_call, at=now)),
    }
    record(ledger, started, *recent[last])
    write(ledger.address, Entry(agent="gone", at=now - 100 * DAY), first=90)
    assert main(["ledger", "prune", "--older-than", "90d"]) == 0
    assert "1 invocation deleted" in capsys.readouterr().out
    record(ledger, stop)
    assert main(["audit", "verify"]) == 0


def test_prune_deletes_a_crashed_tree(ledger: LedgerFile, capsys: Output) -> None:
    """It has no end, but also no recent call."""
    started, call, _ = events_of(Entry(at=time.time() - 100 * DAY), ledger)
    record(ledger, started, call)
    assert main(["ledger", "prune", "--older-than", "90d"]) == 0
    assert "1 invocation deleted" in capsys.readouterr().out
    assert (ledger.invocations(), ledger.calls()) == ([], [])


def test_ledger_that_another_process_opens_is_pruned(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Several hosts prune at the same hour: none may fail because another one began."""
    write(ledger.address, Entry())
    has_tables = schema.has_tables
    others = []

    def opened_elsewhere(connection: Any) -> bool:
        found = has_tables(connection)
        others.append(Book(ledger.address, first=9))
        others[-1].write(Entry())
        eventually(ledger.path.with_name("ledger.db-wal").exists)
        return found

    monkeypatch.setattr(reading, "has_tables", opened_elsewhere)
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    assert "invocation" in capsys.readouterr().out
    for book in others:
        book.close()


def test_prune_gives_room_back(ledger: LedgerFile) -> None:
    """The file becomes smaller."""
    old = time.time() - 100 * DAY
    write(ledger.address, *(Entry(calls=[Call()] * 50, at=old) for _ in range(60)))
    main(["audit", "spend"])  # takes back what an outage may have left
    before = pages(ledger)
    assert main(["ledger", "prune", "--older-than", "90d"]) == 0
    assert pages(ledger) < before / 5


def pages(ledger: LedgerFile) -> int:
    """How large the database is."""
    connection = sqlite3.connect(ledger.path)
    count = int(connection.execute("PRAGMA page_count").fetchone()[0])
    connection.close()
    return count


def test_prune_needs_a_duration(ledger: LedgerFile, capsys: Output) -> None:
    """Nothing is deleted by a slip."""
    with pytest.raises(SystemExit) as stop:
        main(["ledger", "prune", "--older-than", "90"])
    assert stop.value.code == 2
    assert "must be a duration such as 30m, 12h, 7d or 2w" in capsys.readouterr().err
