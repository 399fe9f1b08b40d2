"""Tests of the sample ledger: it is reproducible, and every audit query returns rows."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from datetime import date, timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.core.events import ModelCall, Stop
from otel_limits.demo.sample_fleet import (
    DAYS,
    FLEET,
    QUESTIONS,
    READER,
    REVIEWER,
    history,
    midnight,
)

if TYPE_CHECKING:
    from pathlib import Path

MONDAY = date(2026, 11, 23)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the sample ledger; return its directory."""
    made = tmp_path_factory.mktemp("example")
    assert main(["demo", "--record", str(made / "new")]) == 0
    return made / "new"


def query(directory: Path, question: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Query the sample ledger."""
    words = [*question.split(), "--format", "json", "--ledger", str(directory / "ledger.db")]
    assert main(["audit", *words]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize(
    ("question", "tables"),
    [
        ("spend --by agent,tenant.id", ["spend", "outcomes"]),
        ("spend --by tool", ["spend"]),
        ("spend --compare 7d --since 7d", ["changes"]),
        ("stops", ["stops", "costliest_halted"]),
        ("loops", ["loops", "worst"]),
        ("anomalies", ["cost", "turns"]),
        ("backtest --max-turns 20", ["backtest", "cuts"]),
        ("grants", ["grants"]),
        ("verify", ["verify"]),
    ],
)
def test_every_audit_query_returns_rows(
    directory: Path, question: str, tables: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Users see each table filled when they try the commands."""
    answer = query(directory, question, capsys)
    assert {name: bool(answer[name]) for name in tables} == dict.fromkeys(tables, True)


def test_forecast_and_suggestions_have_enough_data(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Enough days for a forecast, and enough invocations of each agent for a suggestion."""
    assert query(directory, "spend", capsys)["forecast"]["days"] == DAYS - 1
    assert main(["audit", "suggest", "--ledger", str(directory / "ledger.db")]) == 0
    suggested = capsys.readouterr().out
    halted_too_often = {REVIEWER.name, "sales-analyst"}
    for agent in {each.name for each in FLEET} | {READER.name}:
        assert (f'# "{agent}": ' in suggested) is (agent in halted_too_often)
        assert (f'  "{agent}":  # from ' in suggested) is (agent not in halted_too_often)


def test_printed_commands_work(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users copy them."""
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(directory / "limits.yaml"))
    for question, _ in QUESTIONS:
        words = ["audit", *question.split(), "--ledger", str(directory / "ledger.db")]
        assert main(words) == 0, capsys.readouterr()


def test_policy_file_is_that_of_the_ledger(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotas that halted agents are in it, none is used up, and lines are those of its limits."""
    path = directory / "limits.yaml"
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
    policy = json.loads(path.read_text("utf-8"))
    stops = [event for event in history(MONDAY) if isinstance(event, Stop)]
    halted = {each.breach.limit for each in stops if each.reason == "quota_exceeded" if each.breach}
    assert halted == {"tenant-slots"}
    assert halted < {*policy["quotas"]}
    budget = query(directory, "budget", capsys)["budget"]
    assert [row for row in budget if row["used_share"] >= 1] == []
    lines = path.read_text("utf-8").splitlines()
    in_file = [
        row for row in query(directory, "policies", capsys)["limits"] if row["source"] == "file"
    ]
    assert len(in_file) == 3
    for row in in_file:
        line = lines[int(row["place"].partition(":")[2]) - 1]
        assert line.strip().rstrip(",") == f'"{row["limit"]}": {row["cap"]}'


def test_hash_of_the_page_has_a_name(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its example of `whois` is a key that an operator changed."""
    monkeypatch.setenv("OTEL_LIMITS_POLICY", str(directory / "limits.yaml"))
    page = files("otel_limits.docs").joinpath("audit.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"audit whois '(#\w+)'", page)
    changed = {row["key"] for row in query(directory, "grants", capsys)["grants"]}
    assert shown in changed
    assert {key[0] for key in changed} == {"#"}
    summary = query(directory, f"whois {shown}", capsys)["summary"]
    assert summary.startswith("The ledger contains the hash.")
    assert "globex" in summary


def outcomes(today: date) -> Counter[tuple[Any, ...]]:
    """Count the calls and stops of a history, without times."""
    return Counter(
        (event.invocation.id, event.number, event.usage.total, event.price)
        if isinstance(event, ModelCall)
        else (event.reason, event.turns, event.cost)
        for event in history(today)
        if isinstance(event, (ModelCall, Stop))
    )


@pytest.mark.parametrize("later", [1, 5, 100])
def test_history_differs_only_in_dates(later: int) -> None:
    """Documentation pages quote its totals."""
    assert outcomes(MONDAY) == outcomes(MONDAY + timedelta(days=later))


def test_history_covers_the_four_weeks_before_today() -> None:
    """No event is in the future or older."""
    times = [event.at for event in history(MONDAY) if isinstance(event, ModelCall)]
    assert midnight(MONDAY - timedelta(days=DAYS)) < min(times)
    assert midnight(MONDAY - timedelta(days=1)) < max(times) < midnight(MONDAY)


def test_fleet_is_believable() -> None:
    """Screenshots show the sample fleet: most work succeeds, and one agent wastes money."""
    stops = [event for event in history(MONDAY) if isinstance(event, Stop)]
    assert 8 <= len({stop.agent for stop in stops}) <= 10
    halted = sum(stop.action in ("halted", "killed") for stop in stops)
    assert 0.02 <= halted / len(stops) <= 0.06
    wasted: dict[str, float] = defaultdict(float)
    for stop in stops:
        wasted[stop.agent] += float(stop.cost) if stop.reason != "end_turn" else 0
    second, most = sorted(wasted.values())[-2:]
    assert most > 1.5 * second


def test_reader_belongs_to_the_tree_of_its_parent() -> None:
    """`audit show` displays it below the agent that started it."""
    stops = [event.invocation for event in history(MONDAY) if isinstance(event, Stop)]
    assert {each.parent_id is None for each in stops if each and each.agent == READER.name} == {
        False
    }


def test_existing_ledger_is_not_overwritten(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be a real ledger."""
    before = (directory / "ledger.db").read_bytes()
    assert main(["demo", "--record", str(directory)]) == 2
    assert "already exists. Use it as it is, delete it, or choose" in capsys.readouterr().err
    assert (directory / "ledger.db").read_bytes() == before


def test_unwritable_directory_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, no traceback."""
    (tmp_path / "file").touch()
    assert main(["demo", "--record", str(tmp_path / "file" / "new")]) == 2
    assert "ledger.db: Not a directory." in capsys.readouterr().err


def test_record_rejects_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No option is ignored silently."""
    with pytest.raises(SystemExit):
        main(["demo", "--record", str(tmp_path), "--json"])
    assert "argument --json: not allowed with argument --record" in capsys.readouterr().err
