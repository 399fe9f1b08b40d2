"""Tokens of imported spans without a model call are counted once, or named."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from tests.unit.ledger.test_import_forms import CALL_ATTRIBUTES, START_US, TRACE, typed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ledger.fixtures import LedgerFile

FOUND: dict[str, Any] = dict(CALL_ATTRIBUTES)
A, B, STEP, C, D, ROOT = (f"00000000000000{each}" for each in ("aa", "bb", "5e", "cc", "dd", "00"))
Lines = Sequence[dict[str, Any]]


def span(
    name: str, identity: str, parent: str, *, at: tuple[int, int], scope: str = "acme", **found: Any
) -> dict[str, Any]:
    """A document with one span, which lasts from one second to another one."""
    known = {
        "traceId": TRACE,
        "spanId": identity,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str((START_US + at[0] * 1_000_000) * 1000),
        "endTimeUnixNano": str((START_US + at[1] * 1_000_000) * 1000),
        "attributes": [{"key": key, "value": typed(value)} for key, value in found.items()],
        "status": {},
    }
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": [known]}]}]}


def sums(tokens: int) -> dict[str, Any]:
    """The total of a span."""
    return {"gen_ai.usage.input_tokens": tokens - 10, "gen_ai.usage.output_tokens": 10}


def agent(
    identity: str,
    parent: str = "",
    tokens: int | None = None,
    at: tuple[int, int] = (0, 9),
    scope: str = "acme",
) -> dict[str, Any]:
    """The span of an agent, with a total or without one."""
    return span(
        "invoke_agent clerk",
        identity,
        parent,
        at=at,
        scope=scope,
        **(sums(tokens) if tokens else {}),
    )


def call(identity: str, parent: str, at: tuple[int, int] = (2, 3)) -> dict[str, Any]:
    """The span of a model call with 550 tokens."""
    return span("chat gpt-4o", identity, parent, at=at, **FOUND)


def imported(tmp_path: Path, *files: Lines) -> None:
    """Import files, one after another."""
    for lines in files:
        path = tmp_path / "spans.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
        main(["ledger", "import", str(path)])


def spent(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The answer of `audit spend`."""
    capsys.readouterr()
    assert main(["audit", "spend", "--format", "json", *options]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


TOTAL = [agent(A, tokens=1000)]
STEPS = [span("step", STEP, A, at=(1, 4))]
LATER = [call(C, A)]
FILES: dict[str, tuple[list[Lines], list[int]]] = {
    "a total": ([TOTAL], [1000]),
    "a total and its call": ([[*TOTAL, *LATER]], [550]),
    "a total, and its call in another file": ([TOTAL, LATER], [550]),
    "a call, and its total in another file": ([LATER, TOTAL], [550]),
    "a total, its call, and again": ([TOTAL, LATER, TOTAL, LATER], [550]),
    "a call below a span of the first file": ([[*TOTAL, *STEPS], [call(C, STEP)]], [550]),
    "a call below a span of the second file": ([TOTAL, [*STEPS, call(C, STEP)]], [550]),
    "a call of another time": ([TOTAL, [call(C, STEP, at=(20, 21))]], [550, 1000]),
    "totals within a total": ([[*TOTAL, agent(B, A, 400), agent(D, A, 600)]], [1000]),
    "a total within an agent with a call": ([[*TOTAL, *LATER, agent(B, A, 400)]], [400, 550]),
    "a total next to an agent with a call": (
        [[agent(A, ROOT), *LATER, span("run", ROOT, "", at=(0, 9)), agent(B, ROOT, 400)]],
        [400, 550],
    ),
    "a sum of a total": (
        [[span("run", ROOT, "", at=(0, 9), **sums(1000)), agent(A, ROOT, 1000)]],
        [1000],
    ),
    "a total of a whole life": ([[agent(A, tokens=1000, scope="strands.telemetry.tracer")]], []),
}


@pytest.mark.parametrize(("files", "counted"), FILES.values(), ids=FILES)
def test_total_of_an_agent_counts_until_its_calls_are_known(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    files: list[Lines],
    counted: list[int],
) -> None:
    """In any order of files; no token counts twice, and none is called uncounted."""
    imported(tmp_path, *files)
    calls = ledger.calls()
    assert sorted(each["input_tokens"] + each["output_tokens"] for each in calls) == counted
    answer = spent(capsys)
    assert "uncounted" not in answer
    assert answer["complete"].startswith("Totals match: ")
    assert main(["audit", "verify"]) == 0


QUANTUM = "gen_ai.usage.quantum_tokens"
ONLY_UNKNOWN: dict[str, Any] = {QUANTUM: 500}
CHAT: dict[str, Any] = {"gen_ai.operation.name": "chat"}
UNKNOWN = f"the meaning of {QUANTUM} is unknown"
SERVER_SPAN = [span("llm_request", B, "", at=(0, 1), **sums(801))]
LEFT_OUT: dict[str, tuple[Lines, tuple[str, str, int, int]]] = {
    "nothing shows a call": (
        SERVER_SPAN,
        ("llm_request", "no attribute shows a model call", 1, 801),
    ),
    "an unknown attribute": (
        [span("llm_request", A, "", at=(0, 1), **ONLY_UNKNOWN)],
        ("llm_request", UNKNOWN, 1, 500),
    ),
    "a call with nothing else": (
        [span("chat m", A, "", at=(0, 1), **CHAT, **ONLY_UNKNOWN)],
        ("chat m", UNKNOWN, 1, 500),
    ),
}


@pytest.mark.parametrize(("lines", "row"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_tokens_that_are_not_counted_stay_in_the_ledger(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: Lines,
    row: tuple[str, str, int, int],
) -> None:
    """Importing again adds none; text, JSON and the page say how many and why."""
    imported(tmp_path, lines, lines)
    name, cause, spans, tokens = row
    said = {"agent": "(no agent)", "span": name, "cause": cause, "spans": spans, "tokens": tokens}
    answer = spent(capsys)
    assert answer["uncounted"] == [said]
    verdict = f"Incomplete: 1 span with {tokens} tokens was not counted ({cause}); "
    assert answer["complete"].startswith(verdict)
    assert "uncounted" not in spent(capsys, "--until", "2026-03-01")
    for form in ("table", "html"):
        assert main(["audit", "spend", "--format", form]) == 0
        assert cause in capsys.readouterr().out
    assert main(["audit", "verify", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"].startswith(verdict)


def test_calls_of_uncounted_tokens_explain_them(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum of an application is no longer missing once its calls are imported."""
    imported(tmp_path, [span("run", A, "", at=(0, 9), **sums(550))])
    assert [each["tokens"] for each in spent(capsys)["uncounted"]] == [550]
    imported(tmp_path, LATER)
    assert "uncounted" not in spent(capsys)


@pytest.mark.parametrize("is_first", [True, False])
def test_total_gives_way_to_calls_of_another_ledger(
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_first: bool,
) -> None:
    """In either direction of the merge, whose totals of invocations still match."""
    places = [str(ledger.path), f"{tmp_path}/other.db"]
    for place, lines in zip(places, (TOTAL, [agent(A), *LATER]), strict=True):
        monkeypatch.setenv("OTEL_LIMITS_LEDGER", place)
        imported(tmp_path, lines)
    source, target = places if is_first else reversed(places)
    for _ in range(2):
        assert main(["ledger", "merge", source, "--into", target]) == 0
        assert spent(capsys, "--ledger", target)["totals"]["spend"]["tokens"] == 550
    assert main(["audit", "verify", "--ledger", target]) == 0


def test_uncounted_tokens_are_kept_like_other_rows(
    ledger: LedgerFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A merge, an export and a close have them; a prune deletes them."""
    imported(tmp_path, SERVER_SPAN)
    merged = f"{tmp_path}/merged.db"
    for _ in range(2):
        assert main(["ledger", "merge", str(ledger.path), "--into", merged]) == 0
    assert [each["tokens"] for each in spent(capsys, "--ledger", merged)["uncounted"]] == [801]
    export = ["ledger", "export", "--format", "jsonl", "--what", "uncounted"]
    assert main([*export, "--where", "agent=(no agent)"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["span"], row["tokens"], row["at"]) == (
        "llm_request",
        801,
        "2026-03-01T12:00:01+00:00",
    )
    assert main(["ledger", "close", "--until", "2026-03-02"]) == 0
    close = tmp_path / "close.json"
    close.write_text(capsys.readouterr().out, encoding="utf-8")
    against = ["audit", "verify", "--against", str(close), "--ledger"]
    assert main([*against, merged]) == 0
    assert main(["ledger", "prune", "--older-than", "1d"]) == 0
    assert "uncounted" not in spent(capsys)
    assert main([*against, str(ledger.path)]) == 0
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("DELETE FROM otel_limits_maintenance")
    capsys.readouterr()
    assert main([*against, str(ledger.path), "--format", "json"]) == 1
    days = json.loads(capsys.readouterr().out)["closed_days"]
    assert ("uncounted", "missing") in [(each["table"], each["difference"]) for each in days]
