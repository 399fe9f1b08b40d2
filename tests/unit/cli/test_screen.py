"""The screen at every width: no line too long, no number cut, what is missing shown as such."""

from __future__ import annotations

import dataclasses
import html
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len

from otel_limits.audit.answer import UNKNOWN, Chart, ChartSeries
from otel_limits.cli.show.page import draw as draw_chart
from otel_limits.cli.top.screen import ORDERS, View, bar, count, draw, page, percent, press, usd
from otel_limits.top.fleet import CapShare, QuotaRow, Rates, RecentHalt, Totals
from tests.top.pages import BEGAN
from tests.top.picture import PICTURE, lines
from tests.unit.cli.test_live import fleet_of, row

if TYPE_CHECKING:
    from otel_limits.top.fleet import AgentRow, Fleet


WIDTHS = (60, 80, 100, 120, 200)
every_width = pytest.mark.parametrize("width", WIDTHS)
LONG = "research-assistant-for-quarterly-filings-emea"


def busy(agent: str = LONG, **more: Any) -> AgentRow:
    """Make a row in which everything is as wide as it gets."""
    values: dict[str, Any] = {
        "in_progress": 12_345,
        "rates": Rates(
            turns_per_minute=98_765.4,
            tokens_per_minute=123_456_789,
            usd_per_hour=21_789.63,
            unpriced_tokens_per_minute=5,
        ),
        "usd_share": 0.999,
        "now": [CapShare(limit="max_token_budget", cap=1e6, share=0.87)],
        "hour": [
            CapShare(limit="max_cost_usd", cap=5, share=1.25),
            CapShare(limit="max_turns", cap=5, share=0.8),
        ],
        "halts": {"max_token_budget": 1234, "quota_exceeded": 12, "killed": 1},
        "refusals": {"web_search": 4321, "fetch_page": 3},
        "errors": {"model_calls": 7, "tool_calls": 1},
    }
    return row(agent, 1, **values | more)


HALT = RecentHalt(
    at=BEGAN, agent=LONG, reason="max_turns", action="wrapped_up", count=3, trace_id="ab" * 16
)
QUOTA = QuotaRow(
    quota="a-quota-for-all-of-the-teams-in-emea",
    key="research/#0123456789abcdef",
    used=4_900_000,
    reserved=50_000,
    limit=5_000_000,
    resets=BEGAN,
)
BUSY = fleet_of(
    busy(),
    busy("摘要を作る長い名前のエージェント・四半期", in_progress=None, now=[], hour=[], halts={}),
    busy("idle", rates=Rates(), usd_share=None, errors={}),
    feeds={"http://one/metrics": "", "http://two/metrics": "http://two/metrics is unavailable."},
    quotas=[QUOTA],
    last_halts=[HALT],
    warnings=["Limits are not enforced in 1 process: run otel-limits doctor there."],
)


def shown(width: int, height: int = 40, view: View | None = None, fleet: Fleet = BUSY) -> list[str]:
    """Return the lines of a screen."""
    return [line.plain for line in draw(fleet, view or View(), width, height)]


@pytest.mark.parametrize("mode", ["rows", "filter", "kill", "help"])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_no_line_is_wider_than_the_terminal(mode: Any, height: int) -> None:
    """At every width from 60 to 200, and no screen higher than it."""
    view = View(mode=mode, chosen=LONG, typed="re" * 60)
    for width in range(60, 201):
        lines = shown(width, height, view)
        assert [line for line in lines if cell_len(line) > width] == []
        assert len(lines) == height


def test_question_about_a_kill_names_its_keys() -> None:
    """The end of the question is shown even in a narrow terminal, after a long name."""
    lines = shown(60, view=View(mode="kill", chosen=LONG))
    assert " ".join(lines).rstrip().endswith("? y kills, any other key (also q) cancels.")


@every_width
def test_numbers_are_whole_at_every_width(width: int) -> None:
    """Rates, money and shares; the name gives way, with a mark."""
    line = next(line for line in shown(width) if "98.8k" in line)
    for number in ("12.3k", "98.8k", "123M", "≥$21.8k", "99%", "87%"):
        assert number in line
    name = line.split()[0]
    assert name == LONG or "…" in name
    assert len(name) >= 8


def test_the_table_is_as_full_as_the_terminal_is_wide() -> None:
    """Narrower ones leave out reasons, full titles, long bars, columns, then names of limits."""
    fleet = fleet_of(busy("research"))
    parts = ("12 quota_exceeded", "Running", "█" * 10, ">100%", "max_token_budget")
    for width, missing in ((200, 0), (180, 1), (120, 2), (100, 3), (80, 4), (70, 5)):
        lines = shown(width, fleet=fleet)
        head = next(n for n, line in enumerate(lines) if line.startswith("Agent "))
        table = " ".join(lines[head : head + 2])
        assert [part for part in parts if part not in table] == list(parts[:missing]), width


def test_agent_without_running_invocations_is_idle() -> None:
    """Not unknown; where the column of the last hour has no room, it shows that instead."""
    fleet = fleet_of(busy("research", now=[], in_progress=0))
    for width, text in ((200, " idle "), (80, " max_cost_usd >100% ")):
        assert text in next(line for line in shown(width, fleet=fleet) if line.startswith("rese"))


@every_width
def test_selected_row_is_shown_in_full(width: int) -> None:
    """Details without room in the table appear below it."""
    told = " ".join(shown(width))
    for part in (
        "max_token_budget 87%",
        "max_cost_usd >100%",
        "max_turns ≤80%",
        "(1.23k max_token_budget, 12 quota_exceeded, 1 killed)",
        "refused calls web_search 4.32k, fetch_page 3",
        "7 model calls, 1 tool calls",
    ):
        assert part in re.sub(r" +", " ", told)


@every_width
def test_problems_are_sentences_on_the_screen(width: int) -> None:
    """An address that does not answer, and limits that are not in force."""
    told = " ".join(shown(width))
    assert "! http://two/metrics is unavailable." in told
    assert "! Limits are not enforced in 1 process" in told
    assert "1 of 2 addresses up" in told


@every_width
def test_quotas_and_halts_stand_below(width: int) -> None:
    """Usage and reset time of quotas; agent and reason of halts."""
    lines = shown(width)
    quota = lines[lines.index("Quotas close to their limit") + 1]
    assert "99% of 5M, resets " in quota
    halt = lines[lines.index("Last halts") + 1]
    assert "max_turns, wrapped up (3 times)" in halt


def test_the_trace_of_a_halt_is_shown_where_there_is_room() -> None:
    """Whole on a wide terminal."""
    assert any("trace " + "ab" * 16 in line for line in shown(200))


def test_unknown_values_are_dashes() -> None:
    """Neither 0 nor blank."""
    line = next(line for line in shown(200) if line.startswith("idle"))
    assert line.count(UNKNOWN) == 4
    line = next(line for line in shown(200) if line.startswith("摘要"))
    assert line.count(UNKNOWN) == 3


def test_no_price_is_said() -> None:
    """An agent whose calls have no price does not cost nothing."""
    rates = Rates(turns_per_minute=1, tokens_per_minute=1, unpriced_tokens_per_minute=1)
    fleet = fleet_of(busy(rates=rates, usd_share=None))
    assert all(any("no price" in line for line in shown(w, fleet=fleet)) for w in WIDTHS)
    totals = dataclasses.replace(fleet.totals, rates=rates)
    head = shown(100, fleet=dataclasses.replace(fleet, totals=totals))
    assert f"{UNKNOWN}/h" not in " ".join(head)


@pytest.mark.parametrize("height", [10, 14, 24])
def test_the_chosen_row_is_always_there(height: int) -> None:
    """However many rows there are and however low the screen is."""
    fleet = dataclasses.replace(BUSY, agents=[row(f"agent-{n:02}", n) for n in range(50)])
    view = View(order="a")
    for number in range(50):
        assert any(
            line.startswith(f"agent-{number:02} ") for line in shown(80, height, view, fleet)
        )
        view = press(view, "down", fleet)  # type: ignore[assignment]


def test_the_first_look_has_nothing() -> None:
    """Before any answer."""
    empty = fleet_of(feeds={}, rate_seconds=None)
    empty = dataclasses.replace(
        empty, totals=Totals(agents=0, in_progress=0, rates=Rates(), halts=0, refusals=0, errors=0)
    )
    told = "\n".join(shown(80, fleet=empty))
    assert "connecting" in told
    assert "No agents." in told
    assert f"{UNKNOWN} turns/min" in told


def test_names_from_outside_cannot_move_the_cursor() -> None:
    """Control characters of a foreign endpoint are left out."""
    fleet = fleet_of(row("a\x1b[2Jb\nc", 1), feeds={"x": "x\x1b[2J is unavailable."})
    for view in (View(), View(mode="kill", chosen="a\x1b[2Jb\nc")):
        assert "\x1b" not in "".join(shown(80, view=view, fleet=fleet))


def test_halts_are_known_since_a_time() -> None:
    """It is said where that is less than an hour."""
    assert "in the last hour" in " ".join(shown(120))
    later = dataclasses.replace(BUSY, halts_since=BEGAN - 60)
    told = " ".join(shown(120, fleet=later))
    assert re.search(r"6 halts, 6 refusals, 6 errors since \d\d:\d\d", told)


def test_the_help_fits_a_small_terminal() -> None:
    """Every key and every column is explained on 80 columns and 24 lines."""
    told = "\n".join(shown(80, 24, View(mode="help")))
    assert " ".join(ORDERS) in told
    words = ("Running", "Cap now", "Cap 1 h", "USD/h", "Share", "Errors", "quit", "glob")
    assert all(word in told for word in words)
    assert all(order.title in told for order in ORDERS.values())


def test_a_file_has_every_row() -> None:
    """And no keys."""
    fleet = dataclasses.replace(BUSY, agents=[row(f"agent-{n}", n) for n in range(100)])
    lines = [line.plain for line in page(fleet, 200)]
    assert sum(line.startswith("agent-") for line in lines) == 100
    assert "q quit" not in "".join(lines)


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((None, UNKNOWN), (0, "0"), (0.25, "0.25"), (9.96, "9.96"), (99.96, "100"), (999, "999")),
        *((999.6, "1k"), (1234, "1.23k"), (999_700, "1M"), (5e9, "5B")),
    ],
)
def test_a_number_has_five_characters_at_most(number: float | None, text: str) -> None:
    """Three digits and a suffix."""
    assert count(number) == text


def test_charts_abbreviate_numbers_like_top() -> None:
    """Also those that round to the next suffix, without an exponent."""
    bars = Chart(
        name="tokens",
        title="Tokens",
        labels=["coder", "critic"],
        series=[ChartSeries("Input", [999_700, 1_234])],
        horizontal=True,
    )
    values = re.findall(r'class="value"[^>]*>([^<]*)<', draw_chart(bars))
    assert values == [count(999_700), count(1_234)] == ["1M", "1.23k"]


@pytest.mark.parametrize(
    ("amount", "text"),
    [(None, UNKNOWN), (0, "$0.00"), (0.001, "<$0.01"), (14.2, "$14.20"), (1240, "$1.24k")],
)
def test_money_is_short(amount: float | None, text: str) -> None:
    """Cents below a thousand; little is not nothing."""
    assert usd(amount) == text


def test_almost_reached_is_not_reached() -> None:
    """100 % is a cap that was reached."""
    assert [percent(share) for share in (0.994, 0.999, 1, 1.25)] == ["99%", "99%", "100%", "125%"]


def test_a_bar_is_as_long_as_its_share() -> None:
    """In eighths, and never longer than its room."""
    assert bar(0, 4) == "░░░░"
    assert bar(0.5, 4) == "██░░"
    assert bar(0.53125, 4) == "██▏░"
    assert bar(7, 4) == "████"


# --- the picture of the page ----------------------------------------------------------------------


def test_the_picture_is_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m tests.generate images` when this fails."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        drawn = ["".join(line.split()) for line in lines()]
    finally:
        monkeypatch.undo()
        time.tzset()
    picture = PICTURE.read_text(encoding="utf-8")
    texts = re.findall(r"<text [^>]*y=\"([\d.]+)\"[^>]*>([^<]*)</text>", picture)
    shown: dict[str, str] = {}
    for y, text in texts[1:]:  # the first is the title of the window
        shown[y] = shown.get(y, "") + html.unescape(text).replace("\xa0", " ")
    assert ["".join(text.split()) for text in shown.values()] == drawn
    assert "http" not in re.sub(r"xmlns=\S+|<!--.*?-->", "", picture)
