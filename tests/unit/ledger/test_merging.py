"""Ledgers are merged without a change to any sum, and merging again changes nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from strands import Agent

from otel_limits import disable, enable
from otel_limits.cli import main
from otel_limits.core.events import Invocation, ModelCall, Started
from otel_limits.ledger.address import parse
from otel_limits.ledger.merging import PORTION
from otel_limits.observers.ledger import LedgerObserver
from otel_limits.testing import ScriptedModel, says
from tests.ledger.book import DAY, NINE, Call, Entry, write
from tests.ledger.fixtures import LedgerFile
from tests.ledger.otlp import line
from tests.price_list import listed
from tests.unit.audit.test_completeness import ask, events_of, spill
from tests.unit.ledger.test_otlp import START_US, TRACE
from tests.unit.ledger.test_traces import agent, call, imported, span, sums, used

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ENTRIES = [
    Entry(
        agent=f"agent-{number % 3}",
        calls=[Call(price="0.01", tools=["search"], side=True), Call(cached=9, model="n"), Call()],
        at=NINE + number * DAY,
        attributes={"tenant.id": f"t{number % 2}"},
    )
    for number in range(8)
]


@pytest.fixture
def other(tmp_path: Path) -> str:
    """A ledger of another machine."""
    return str(tmp_path / "other.db")


def write_other(other: str, *entries: Entry, first: int = 1) -> None:
    """Write entries into the other ledger."""
    address = parse("test", other, None)
    write(address, *entries, first=first)


def merge(capsys: pytest.CaptureFixture[str], other: str, ledger: LedgerFile) -> str:
    """Merge, and return what was said."""
    capsys.readouterr()
    status = main(["ledger", "merge", other, "--into", str(ledger.path)])
    said = capsys.readouterr()
    assert status == 0, said.err
    return said.out.partition(": ")[2]


def test_merged_ledger_closes_like_one_ledger(
    ledger: LedgerFile, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes as if all had been recorded in one: no row is changed, lost or doubled."""
    write(ledger.address, *ENTRIES[:4])
    write_other(other, *ENTRIES[4:], first=5)
    assert merge(capsys, other, ledger).startswith(
        "4 invocations, 12 model calls, 4 tool calls new"
    )
    whole = str(tmp_path / "whole.db")
    write_other(whole, *ENTRIES)
    closes = []
    for place in (whole, str(ledger.path)):
        assert main(["ledger", "close", "--month", "2025-10", "--ledger", place]) == 0
        closes.append(capsys.readouterr().out)
    assert closes[0] == closes[1]
    assert ask(capsys, "verify")[0] == 0


def test_merging_again_changes_nothing(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted merge is simply repeated; both may have the same invocations."""
    write(ledger.address, *ENTRIES[:5])
    write_other(other, *ENTRIES)
    assert merge(capsys, other, ledger).startswith("3 invocations, 9 model calls")
    assert merge(capsys, other, ledger).startswith("0 invocations, 0 model calls")
    assert ask(capsys, "spend")[1]["totals"]["spend"]["calls"] == 24
    assert ask(capsys, "verify")[0] == 0


def test_merging_rows_with_the_same_number_again_changes_nothing(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both calls of a number are kept, in either ledger, and each only once."""
    write(ledger.address, ENTRIES[0])
    write_other(other, replace(ENTRIES[0], at=NINE + 9))
    assert merge(capsys, other, ledger).startswith("0 invocations, 3 model calls, 1 tool call new")
    assert merge(capsys, other, ledger).startswith("0 invocations, 0 model calls, 0 tool calls")
    # And back.
    assert main(["ledger", "merge", str(ledger.path), "--into", other]) == 0
    assert "0 invocations, 3 model calls, 1 tool call new" in capsys.readouterr().out
    assert main(["ledger", "merge", str(ledger.path), "--into", other]) == 0
    assert "0 invocations, 0 model calls, 0 tool calls" in capsys.readouterr().out


def test_call_that_was_recorded_live_and_imported_counts_once(
    ledger: LedgerFile,
    tmp_path: Path,
    spans: InMemorySpanExporter,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its span, whichever ledger has which: the live row stays, as if only it had been there."""
    enable()
    Agent(model=ScriptedModel([says("a")]), callback_handler=None)("go")
    disable()
    live = {table: ledger.rows(table) for table in ("invocations", "model_calls")}
    file = tmp_path / "spans.jsonl"
    file.write_text(line(spans.get_finished_spans()))
    # The file of a collector that dropped the agent's span: its calls are imported by trace.
    calls = tmp_path / "calls.jsonl"
    calls.write_text(line(span for span in spans.get_finished_spans() if span.name == "chat"))
    for number, (spans_of, live_first) in enumerate(
        [(file, True), (file, False), (calls, True), (calls, False)]
    ):
        imported = str(tmp_path / f"imported-{number}.db")
        merged = type(ledger)(tmp_path / f"merged-{number}.db")
        assert main(["ledger", "import", str(spans_of), "--ledger", imported]) == 0
        both = [str(ledger.path), imported] if live_first else [imported, str(ledger.path)]
        capsys.readouterr()
        assert main(["ledger", "merge", *both, "--into", str(merged.path)]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert second.endswith("1 imported model call was already recorded live.")
        assert ("0 invocations, 0 model calls" in second) is live_first
        assert "recorded live" not in first
        for table, rows in live.items():
            assert [{**row, "id": 0} for row in merged.rows(table)] == [
                {**row, "id": 0} for row in rows
            ]
        assert main(["audit", "verify", "--ledger", str(merged.path)]) == 0


def test_more_rows_than_a_transaction_has_are_merged(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Portions neither overlap nor leave gaps, also between invocations of the same moment."""
    write_other(other, *(Entry() for _ in range(2 * PORTION + 1)))
    assert merge(capsys, other, ledger).startswith("1,001 invocations, 1,001 model calls")
    assert ask(capsys, "verify")[0] == 0


@pytest.mark.usefixtures("faulty")
def test_rows_that_wait_are_merged(
    ledger: LedgerFile, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spill files are part of a ledger."""
    write_other(other, ENTRIES[0])
    source = type(ledger)(tmp_path / "other.db")
    spill(source, ENTRIES[1])
    assert merge(capsys, other, ledger).startswith("2 invocations, 6 model calls")
    assert ask(capsys, "verify")[0] == 0


@pytest.mark.usefixtures("faulty")
def test_ledger_is_not_merged_without_its_waiting_rows(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who then deletes the other one would lose them."""
    source = type(ledger)(tmp_path / "other.db")
    write(source.address, ENTRIES[0])
    spill(source, ENTRIES[1])
    arguments = ["ledger", "merge", str(source.path), "--into", str(ledger.path)]
    with source.locked():
        assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "are not included (database is locked)" in said
    assert f"Run it as a user who may write {source.path}, while no other program locks it" in said
    assert not ledger.path.exists()
    assert main(arguments) == 0
    assert len(ledger.invocations()) == 2


def test_recorded_end_replaces_an_assumed_one(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invocation was ended as lost in one ledger; the other has its true end."""
    write(ledger.address, Entry(reason="lost", action="lost"))  # type: ignore[arg-type]
    write_other(other, Entry())
    merge(capsys, other, ledger)
    assert [row["reason"] for row in ledger.rows("invocations")] == ["end_turn"]


def test_pruned_ledger_passes_with_its_prune_border(
    ledger: LedgerFile, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Moving a ledger does not make what retention deleted there look missing."""
    write_other(other, *ENTRIES)
    assert main(["ledger", "close", "--month", "2025-10", "--ledger", other]) == 0
    close = tmp_path / "october.json"
    close.write_text(capsys.readouterr().out)
    assert main(["ledger", "prune", "--older-than", "1d", "--ledger", other]) == 0
    write_other(other, Entry(at=time.time() - 60), first=50)
    merge(capsys, other, ledger)
    status, answer = ask(capsys, "verify", "--against", str(close))
    assert (status, {row["difference"] for row in answer["closed_days"]}) == (0, {"pruned"})


def test_prune_records_of_both_ledgers_are_kept(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both may be closed rows, even if they are of the same day."""
    write(ledger.address, ENTRIES[0])
    write_other(other, ENTRIES[1], first=9)
    for place, age in ((str(ledger.path), "2d"), (other, "1d")):
        assert main(["ledger", "prune", "--older-than", age, "--ledger", place]) == 0
    before = ledger.rows("maintenance")
    merge(capsys, other, ledger)
    merged = ledger.rows("maintenance")
    assert (len(merged), [row for row in merged if row in before]) == (2, before)


def test_merge_into_the_same_ledger_is_refused(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would read what it writes."""
    write(ledger.address, ENTRIES[0])
    assert main(["ledger", "merge", str(ledger.path), "--into", str(ledger.path)]) == 2
    assert "cannot be merged into itself" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"garbage\n", b"SQLite format 3\x00" + b"\xff" * 4096])
def test_damaged_target_is_named(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    """Rather than the ledger that is read, which a reader would then recover in vain."""
    write_other(other, ENTRIES[0])
    ledger.path.write_bytes(content)
    assert main(["ledger", "merge", other, "--into", str(ledger.path)]) == 2
    said = capsys.readouterr().err
    assert f"The ledger {ledger.path} cannot be used: " in said
    assert f"Run: sqlite3 {ledger.path} .recover | sqlite3 " in said


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["merge", "OTHER", "--into", "/dev/null"], "--into"),
        (["merge", "/dev/null"], "OTHER"),
        pytest.param(["reprice", "--ledger", "/dev/null"], "--ledger", marks=listed),
    ],
    ids=lambda each: each if isinstance(each, str) else each[0],
)
def test_device_is_refused_by_the_name_of_its_argument(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str], words: list[str], name: str
) -> None:
    """As it was typed, or as the help calls it."""
    write_other(other, ENTRIES[0])
    typed = [other if word == "OTHER" else word for word in words]
    assert main(["ledger", *typed]) == 2
    assert f"otel-limits: {name} must name a file, got '/dev/null'" in capsys.readouterr().err


def test_missing_ledger_is_reported(
    ledger: LedgerFile, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt name is no empty ledger."""
    assert main(["ledger", "merge", other, "--into", str(ledger.path)]) == 2
    assert f"No ledger found at {other}" in capsys.readouterr().err


# --- rows that were recorded live and imported ----------------------------------------------------

LIVE: Final = Entry(
    calls=[Call(tools=["search"]), Call()],
    attributes={"tenant.id": "acme"},
    at=START_US / 1_000_000,
    parent=Invocation(agent="caller", id="c", root_id="c", trace_id=TRACE),
)
AGENT, FIRST, SECOND = f"{1:016x}", f"{1:08x}{1:08x}", f"{1:08x}{2:08x}"
"""The spans of the first entry of a book and of its model calls."""
TOOL, STEP, CALLER, OTHER = (f"{number:016x}" for number in range(0xA0, 0xA4))
TENANT: Final = {"tenant.id": "acme"}


def agent_of_live(later: int = 0) -> dict[str, Any]:
    """The span of its agent, some seconds later than the ledger has it."""
    return span("invoke_agent worker", AGENT, CALLER, at=(later, later + 9), **TENANT)


def calls_of_live(parent: str = AGENT, later: int = 0) -> list[dict[str, Any]]:
    """The spans of its model calls."""
    first, second = (later, later + 1), (later + 1, later + 2)
    return [call(FIRST, parent, at=first), call(SECOND, parent, at=second)]


STATED: Final[Mapping[str, Any]] = {"at": (1, 2), **sums(99)}
SUM: Final = span("step", STEP, AGENT, **STATED)
SEARCH: Final = used(TOOL, AGENT)
FETCHED: Final[Mapping[str, Any]] = {"gen_ai.tool.name": "fetch"}
FETCH: Final = used(TOOL, AGENT, **FETCHED)
LATE_SEARCH: Final = used(TOOL, AGENT, at=(60, 61))
KEPT: Final[Mapping[str, tuple[Sequence[dict[str, Any]], Mapping[str, int]]]] = {
    "all spans": ([agent_of_live(), *calls_of_live(), SEARCH, SUM], {}),
    "without its agent": ([*calls_of_live(), SEARCH], {}),
    "without its agent, with a tool of a server": ([*calls_of_live(), FETCH], {}),
    "without its agent, with a sum": ([*calls_of_live(), SUM], {"uncounted_spans": 1}),
    "without its agent, with a call of another program": (
        [*calls_of_live(), SEARCH, call(OTHER, "")],
        {"invocations": 1, "model_calls": 1},
    ),
    "without its agent, with another tool and call": (
        [*calls_of_live(), FETCH, call(OTHER, "")],
        {"invocations": 1, "model_calls": 1, "tool_calls": 1},
    ),
    "without its agent, with a later tool and a call": (
        [*calls_of_live(), LATE_SEARCH, call(OTHER, "")],
        {"invocations": 1, "model_calls": 1, "tool_calls": 1},
    ),
    "calls of an agent that was not recorded": (
        [agent(CALLER), *calls_of_live(CALLER), used(TOOL, CALLER)],
        {"invocations": 1, "tool_calls": 1},
    ),
    "all spans, with a sum of its caller": (
        [agent(CALLER), agent_of_live(), *calls_of_live(), span("step", OTHER, CALLER, **STATED)],
        {"invocations": 1, "uncounted_spans": 1},
    ),
    "a minute later": ([agent_of_live(60), *calls_of_live(later=60)], {}),
    "a minute later, without its agent": (calls_of_live(later=60), {}),
    "calls of a later run with the same IDs": (
        [agent_of_live(61), *calls_of_live(later=61)],
        {"invocations": 1, "model_calls": 2, "attributes": 1},
    ),
}
"""Spans of `LIVE`, and how many imported rows stay next to its own, by table."""
TABLES: Final = ("invocations", "attributes", "model_calls", "tool_calls", "uncounted_spans")


@pytest.mark.parametrize(("spans", "kept"), KEPT.values(), ids=KEPT)
def test_rows_of_recorded_spans_are_live_ones_in_any_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spans: Sequence[dict[str, Any]],
    kept: Mapping[str, int],
) -> None:
    """No row counts twice, and none is lost, by an import and by a merge."""
    monkeypatch.setenv("OTEL_LIMITS_AUDIT_KEYS", "tenant.id")
    live, exported, *both = (LedgerFile(tmp_path / f"{number}.db") for number in range(6))

    def import_into(ledger: LedgerFile) -> None:
        monkeypatch.setenv("OTEL_LIMITS_LEDGER", str(ledger.path))
        imported(tmp_path, spans)

    write(live.address, LIVE)
    import_into(exported)
    write(both[0].address, LIVE)
    import_into(both[0])
    import_into(both[1])
    write(both[1].address, LIVE)
    merge(capsys, str(live.path), both[2])
    merge(capsys, str(exported.path), both[2])
    merge(capsys, str(exported.path), both[3])
    merge(capsys, str(live.path), both[3])
    said = merge(capsys, str(exported.path), both[3])
    assert said.startswith("0 invocations, 0 model calls, 0 tool calls new")
    recorded = len(exported.calls()) - kept.get("model_calls", 0)
    assert (f"{recorded} imported model calls were already recorded live" in said) is bool(recorded)
    for ledger in both:
        for table in TABLES:
            own = [{**row, "id": 0} for row in live.rows(table)]
            found = [{**row, "id": 0} for row in ledger.rows(table)]
            assert all(row in found for row in own), table
            assert (table, len(found) - len(own)) == (table, kept.get(table, 0))
        called = sum(row["tool_calls"] for row in ledger.invocations())
        assert called == len(ledger.tools())
        assert main(["audit", "verify", "--ledger", str(ledger.path)]) == 0


def test_live_call_after_its_import_counts_once_before_its_invocation_ends(
    ledger: LedgerFile, tmp_path: Path
) -> None:
    """Spans are exported while an agent runs, and its process may be killed."""
    events = events_of(LIVE, ledger)
    observer = LedgerObserver(ledger.address)
    for event in events:
        if isinstance(event, Started):
            observer(event)
    observer.flush()
    imported(tmp_path, calls_of_live())
    assert [row["source"] for row in ledger.calls()] == ["import", "import"]
    for event in events:
        if isinstance(event, ModelCall):
            observer(event)
    observer.flush()
    assert [row["source"] for row in ledger.calls()] == ["live", "live"]
    observer.close()


def test_recorded_invocation_without_a_call_counts_once(ledger: LedgerFile, tmp_path: Path) -> None:
    """E.g. one that a quota refused."""
    imported(tmp_path, [agent_of_live(), agent(CALLER), call(OTHER, CALLER)])
    assert [row["span_id"] for row in ledger.invocations("source = 'import'")] == [AGENT, CALLER]
    write(ledger.address, replace(LIVE, calls=[]))
    assert [row["span_id"] for row in ledger.invocations("source = 'import'")] == [CALLER]
