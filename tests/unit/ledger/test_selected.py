"""The command that a dashboard has for its selection, run as Grafana writes it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from otel_limits.cli import main
from otel_limits.core.labels import MAX_LENGTH
from otel_limits.core.limits import Breach
from otel_limits.dashboards.exported_files import directory
from tests.dashboards import panels
from tests.ledger.book import NINE, Call, Entry, write

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile

Output = pytest.CaptureFixture[str]

(NOTE,) = (
    panel
    for board in panels.read_all(directory())
    for panel in board.panels
    if panel.kind == "text"
)

SHELL, MARKDOWN, LISTED = 'Bob\'s $(agent) "b" & 100%+*', "`a` </code> é", "a,agent=coder"
"""Names of agents that a shell, Markdown or a condition could take for something else."""

MAX_TURNS: dict[str, Any] = {"reason": "max_turns", "action": "halted"}
ENDED: dict[str, Any] = {"reason": "end_turn", "action": "none"}

OBSERVED: dict[str, Any] = {
    "reason": "end_turn",
    "action": "observed",
    "breach": Breach("max_turns", 3, 3, "max_turns"),
}

ENTRIES = (
    Entry(agent="coder", calls=[Call(model="small")], **MAX_TURNS),
    Entry(agent="coder", calls=[Call(model="large")], **ENDED),
    Entry(agent=SHELL, calls=[Call(model="small"), Call(model="large")], **MAX_TURNS),
    Entry(agent=MARKDOWN, calls=[Call(model="large")], **ENDED),
    Entry(agent=LISTED, calls=[Call(model="small")], **ENDED),
    Entry(agent="watched", calls=[Call(model="small")], **OBSERVED),
)

ALL = ("$__all",)


def queryparam(name: str, values: Sequence[str]) -> str:
    """Write a variable as Grafana does in that format (`toUrlParams` of @grafana/data)."""
    return "&".join(f"var-{name}={quote(value, safe='@:$,;')}" for value in values)


def commands(selected: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The copied lines, split as a shell does."""
    begin = datetime.fromtimestamp(NINE, timezone.utc)
    times = {"__from": begin, "__to": begin + timedelta(days=1)}

    def fill(found: re.Match[str]) -> str:
        name, form = found[1], found[2]
        if form == "date:iso":
            return times[name].strftime("%Y-%m-%dT%H:%M:%S.000Z")
        assert form == "queryparam", found
        return queryparam(name, selected.get(name, ALL))

    content = NOTE.content.replace("\\\n", "")
    lines = re.sub(r"\$\{(\w+):([\w:]+)\}", fill, content).splitlines()
    split = [shlex.split(line) for line in lines if not line.startswith("```")]
    assert [words[:3] for words in split] == [
        ["otel-limits", "audit", question] for question in ("stops", "spend")
    ]
    return [words[1:] for words in split]


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ({}, {"coder": 2, SHELL: 1, MARKDOWN: 1, LISTED: 1, "watched": 1}),
        ({"agent": ["coder"]}, {"coder": 2}),
        ({"agent": [SHELL, MARKDOWN, LISTED]}, {SHELL: 1, MARKDOWN: 1, LISTED: 1}),
        ({"reason": ["max_turns"]}, {"coder": 1, SHELL: 1, "watched": 1}),
        ({"reason": ["end_turn"]}, {"coder": 1, MARKDOWN: 1, LISTED: 1, "watched": 1}),
        ({"model": ["large"]}, {"coder": 1, SHELL: 1, MARKDOWN: 1}),
        ({"agent": ["coder", SHELL], "model": ["small"], "reason": ["max_turns", "killed"]},
         {"coder": 1, SHELL: 1}),
        ({"agent": ["unknown"]}, {}),
    ],
)  # fmt: skip
def test_it_asks_for_what_is_selected(
    ledger: LedgerFile, capsys: Output, selected: dict[str, list[str]], expected: dict[str, int]
) -> None:
    """One agent, several, all; also of models and reasons, whatever characters a name has."""
    write(ledger.address, *ENTRIES)
    stops, spend = (asked(capsys, command) for command in commands(selected))

    found: dict[str, int] = {}
    for row in stops["stops"]:
        found[row["agent"]] = found.get(row["agent"], 0) + row["invocations"]
    assert found == expected
    models = selected.get("model", ["small", "large"])
    calls = [
        call
        for entry in ENTRIES
        for call in entry.calls
        if entry.agent in expected
        and reasons_of(entry) & set(selected.get("reason", reasons_of(entry)))
        and call.model in models
    ]
    assert sum(row["calls"] for row in spend["spend"]) == len(calls)


def reasons_of(entry: Entry) -> set[str]:
    """How it ended, and what would have halted it."""
    return {entry.reason} | ({entry.breach.reason} if entry.breach else set())


def asked(capsys: Output, command: Sequence[str]) -> Any:
    """The answer as JSON."""
    assert main([*command, "--format", "json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("address", ["var-agent=All", "agent=$__all", "var-reason=$__all"])
def test_all_is_not_a_condition(ledger: LedgerFile, capsys: Output, address: str) -> None:
    """As addresses of Grafana say it, up to version 10 and since."""
    write(ledger.address, *ENTRIES)
    answer = asked(capsys, ["audit", "stops", "--dashboard-vars", address])
    assert sum(row["invocations"] for row in answer["stops"]) == len(ENTRIES)


def test_a_name_that_metrics_cut_is_found(ledger: LedgerFile, capsys: Output) -> None:
    """A ledger has more of it, and a dashboard shows what metrics have."""
    write(ledger.address, *ENTRIES, Entry(agent="a" * (MAX_LENGTH + 1), **ENDED))
    answer = asked(capsys, ["audit", "stops", "--dashboard-vars", f"var-agent={'a' * MAX_LENGTH}"])
    assert [row["invocations"] for row in answer["stops"]] == [1]


@pytest.mark.parametrize("text", ["var-job=nightly&var-agent=a", "research", "var-agent=_other"])
def test_unknown_dashboard_variable_is_rejected(
    ledger: LedgerFile, capsys: Output, text: str
) -> None:
    """An answer about every job would look like one about the job that is selected."""
    write(ledger.address, *ENTRIES)
    with pytest.raises(SystemExit):
        main(["audit", "stops", "--dashboard-vars", text])
    assert "must be dashboard variables" in " ".join(capsys.readouterr().err.split())
