"""Colors never carry meaning alone: words or patterns repeat it, for print and color blindness."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from decimal import Decimal
from importlib.resources import files
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from otel_limits.cli import main
from otel_limits.cli.quota_table import table_of
from otel_limits.cli.show.page import COLOURS, HATCHES, colour, hatches
from otel_limits.quotas.remaining import KeyUse, Uses
from tests.ledger.book import Call, Entry, write

if TYPE_CHECKING:
    from tests.ledger.fixtures import LedgerFile


def plain(shown: Any) -> list[str]:
    """Return the lines of something on a screen without colours."""
    screen = Console(file=io.StringIO(), width=100, no_color=True, record=True)
    screen.print(shown)
    return screen.export_text().splitlines()


@pytest.mark.parametrize(("remaining", "state"), [(0, "used up"), (20, "nearly used up"), (21, "")])
def test_quota_close_to_its_limit_shows_a_word(remaining: int, state: str) -> None:
    """In a separate column, as it is red or yellow in a terminal."""
    row = KeyUse(
        quota="users",
        key="joe",
        unit="tokens",
        used=100 - remaining,
        reserved=0,
        remaining=remaining,
        limit=100,
        resets=None,
    )
    (line,) = [line for line in plain(table_of(Uses([row], 0))) if "joe" in line]
    assert line.split("tokens")[1].strip() == state


def rows() -> Uses:
    """Two quotas with names and numbers as fleets have them."""
    limits: list[tuple[str, str, str, int | Decimal]] = [
        ("tenants-of-europe", "acme-research-and-development", "tokens", 20_000_000),
        ("nightly", "(all)", "USD", Decimal(20)),
    ]
    return Uses(
        [
            KeyUse(
                quota=quota,
                key=key,
                unit=unit,
                used=limit,
                reserved=0,
                remaining=0,
                limit=limit,
                resets=1_795_500_000,
            )
            for quota, key, unit, limit in limits
        ],
        7,
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_number_and_no_time_of_a_quota_is_cut(width: int) -> None:
    """Names are shortened, and columns without room are named; every line fits."""
    shown = str(table_of(rows(), width))
    assert max(map(cell_len, shown.splitlines()[:-2])) <= width
    assert "20,000,000" in shown
    assert shown.count("used up") == 2
    assert shown.count("2026-") == shown.count("2026-11-24T06:00:00Z")
    assert "Resets" in shown
    assert shown.endswith("7 more keys not shown (--top).")


def test_limit_changed_by_an_operator_is_named() -> None:
    """In a column that other tables do not have."""
    uses = rows()
    assert "Changed by" not in str(table_of(uses))
    changed = [replace(row, has_changed_limit=row.key == "(all)") for row in uses.rows]
    head, _, europe, nightly, *_ = str(table_of(uses._replace(rows=changed))).splitlines()
    assert head.endswith("Limit changed by")
    assert (europe.endswith("operator"), nightly.endswith("operator")) == (False, True)


def test_a_file_has_all_of_a_quota() -> None:
    """It has no edge."""
    shown = str(table_of(rows()))
    assert "tenants-of-europe  acme-research-and-development  20,000,000" in shown
    assert "Hidden columns" not in shown


def test_no_quota_and_no_conversation_is_said() -> None:
    """The headings of a table without rows would not say of what there is none."""
    shown = str(table_of(Uses([], 0)))
    assert shown == "No key of a quota matches, and no conversation is near a cap."
    shown = str(table_of(Uses([], 0, is_pattern_of_hashes=True)))
    assert "Values from baggage and attributes are shown as hashes" in shown


def test_table_without_a_readable_key_does_not_deny_that_there_are_any() -> None:
    """Standard error names those that cannot be read."""
    damaged = ["quota 'daily': data of another program is under the key 'x' of the quota store."]
    assert str(table_of(Uses([], 0, damaged=damaged))) == "No other key can be shown."


def test_every_series_of_a_chart_but_the_first_has_a_pattern() -> None:
    """The style sheet fills it with that, and a line around it, in the legend as in the chart."""
    style = files("otel_limits.cli.show").joinpath("page.css").read_text(encoding="utf-8")
    tiles = hatches()
    series: Any = SimpleNamespace(tone="")
    for number in range(1, COLOURS):
        assert colour(number, series) in HATCHES
    for name in HATCHES:
        assert f".{name} {{ fill: url(#hatch-{name}); stroke: var(--{name}); }}" in style
        assert f'id="hatch-{name}"' in tiles
    assert len(set(HATCHES.values())) == len(HATCHES)


@pytest.mark.parametrize(
    ("zeros", "width", "shown"),
    [
        (0, 90, "Invocations Synthetic Zero-token Tokens Cost; "),
        (0, 72, "Invocations Synthetic Tokens Cost; Zero-token calls (each 0)"),
        (0, 60, "Invocations Tokens Cost; Zero-token calls (each 0), Synthetic halts"),
        (1, 72, "Invocations Zero-token Tokens Cost; Synthetic halts"),
        (1, 60, "Invocations Zero-token Cost; Synthetic halts, Tokens"),
    ],
)
def test_stops_on_a_narrow_terminal_shows_costs_and_zero_token_calls(
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    zeros: int,
    width: int,
    shown: str,
) -> None:
    """Zeros are said in a word where there is little room; the note explains no hidden column."""
    calls = [Call(price="0.01")] * 3
    write(
        ledger.address,
        Entry(
            agent="research-assistant",
            calls=[*calls, *[Call(input=0, output=0, kind="zero_token")] * zeros],
        ),
        Entry(agent="research-assistant", calls=calls, reason="max_turns", action="halted"),
    )
    heads, hidden = shown.split("; ")
    found, note = stops_at(width, monkeypatch, capsys)
    assert found == heads.split()
    assert hidden_in(note) == hidden
    assert ("For a zero-token call" in note) == ("Zero" in heads)


def test_last_of_equally_wide_columns_is_hidden_first(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns are in the order of their importance; two of these are nine characters wide."""
    calls = [Call(estimated=True, kind="estimated"), Call(input=0, output=0, kind="zero_token")]
    write(ledger.address, Entry(calls=calls, reason="max_turns", action="halted"))
    found, note = stops_at(76, monkeypatch, capsys)
    assert "Synthetic" in found
    assert hidden_in(note) == "Estimated calls"


def stops_at(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], str]:
    """Return the first line of the headings after the action, and the note of the table."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["audit", "stops"]) == 0
    table, _, note = capsys.readouterr().out.partition("Refused tool calls")[0].partition("total")
    return table.partition("─")[0].partition("Action")[2].splitlines()[0].split(), note


def hidden_in(note: str) -> str:
    """Return the names of hidden columns."""
    return note.partition("Hidden: ")[2].partition(" (--wide")[0]
