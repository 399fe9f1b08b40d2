"""Keys: sorting, filters, the chosen agent, and the question before a kill."""

from __future__ import annotations

from typing import Any

import pytest

from otel_limits.cli.top.live import keys_of, kill_chosen
from otel_limits.cli.top.screen import ORDERS, View, press
from otel_limits.quotas.store import PermanentStoreError, StoreError
from otel_limits.top.fleet import AgentRow, CapShare, Fleet, Rates, Totals
from tests.top.pages import BEGAN, names


def row(agent: str, number: int, **more: Any) -> AgentRow:
    """Make a row in which every value is a multiple of a number."""
    values: dict[str, Any] = {
        "in_progress": number,
        "rates": Rates(
            turns_per_minute=number, tokens_per_minute=number * 1000, usd_per_hour=number / 10
        ),
        "usd_share": None,
        "now": [CapShare(limit="max_turns", cap=10, share=number / 10)],
        "hour": [],
        "halts": {"max_turns": number},
        "refusals": {"search": number},
        "errors": {"tool_calls": number},
    }
    return AgentRow(agent=agent, **values | more)


def fleet_of(*rows: AgentRow, **more: Any) -> Fleet:
    """Make a fleet of some agents."""
    values: dict[str, Any] = {
        "at": BEGAN,
        "feeds": {"http://one/metrics": ""},
        "rate_seconds": 60.0,
        "usd_seconds": 300.0,
        "halts_since": BEGAN - 3600,
        "totals": Totals(
            agents=len(rows),
            in_progress=sum(each.in_progress or 0 for each in rows),
            rates=Rates(turns_per_minute=6, tokens_per_minute=6000, usd_per_hour=0.6),
            halts=6,
            refusals=6,
            errors=6,
        ),
    }
    return Fleet(agents=rows, **values | more)


FLEET = fleet_of(row("alpha", 1), row("Beta", 3), row("gamma-beta", 2))


def after(*keys: str, view: View | None = None, fleet: Fleet = FLEET) -> Any:
    """Return what is looked at after some keys."""
    seen: Any = view or View()
    for key in keys:
        seen = press(seen, key, fleet)
    return seen


@pytest.mark.parametrize("key", [key for key in ORDERS if key != "a"])
def test_the_most_comes_first(key: str) -> None:
    """By whatever one sorts; once more turns it round."""
    view = after("a", key)
    assert names(view.rows(FLEET)) == ["Beta", "gamma-beta", "alpha"]
    assert names(after(key, view=view).rows(FLEET)) == ["alpha", "gamma-beta", "Beta"]


def test_names_rise() -> None:
    """Upper and lower case are the same."""
    assert names(after("a").rows(FLEET)) == ["alpha", "Beta", "gamma-beta"]
    assert names(after("a", "a").rows(FLEET)) == ["gamma-beta", "Beta", "alpha"]


def test_a_value_that_is_not_known_is_the_least() -> None:
    """It sorts below known values."""
    fleet = fleet_of(row("unknown", 0, rates=Rates(), in_progress=None), row("known", 1))
    for key in "ctur":
        assert names(after("a", key, fleet=fleet).rows(fleet)) == ["known", "unknown"]


@pytest.mark.parametrize(
    ("typed", "found"),
    [("beta", ["Beta", "gamma-beta"]), ("*-beta", ["gamma-beta"]), ("x", []), ("", None)],
)
def test_a_filter_is_a_part_of_a_name_or_a_glob(typed: str, found: list[str] | None) -> None:
    """While it is typed, and after enter."""
    typing = after("/", *typed)
    everyone = ["Beta", "gamma-beta", "alpha"]
    assert names(typing.rows(FLEET)) == (everyone if found is None else found)
    filtered = after("enter", view=typing)
    assert filtered.mode == "rows"
    assert names(filtered.rows(FLEET)) == (everyone if found is None else found)
    assert names(after("escape", view=filtered).rows(FLEET)) == everyone


def test_a_filter_can_be_given_up() -> None:
    """All agents are shown then, as where none was typed; backspace takes a character back."""
    view = after("/", "b", "e", "enter", "/", "x", "x", "escape")
    assert (view.mode, view.filter) == ("rows", "")
    assert after("/", "b", "x", "backspace", "enter").filter == "b"


def test_keys_of_a_filter_do_nothing_else() -> None:
    """A `q` in it does not leave."""
    assert after("/", "q", "k", "enter").filter == "qk"


def test_a_row_is_chosen_and_stays_chosen() -> None:
    """Also when rows change places, and no further than to the last one."""
    view = after("down", "down", "down", "down")
    assert view.chosen == "alpha"
    assert after("up", view=view).chosen == "gamma-beta"
    assert after("a", view=view).chosen_row(view.rows(FLEET)).agent == "alpha"
    assert after("home", view=view).chosen == "Beta"
    assert after("page down").chosen == "alpha"


def test_nothing_is_chosen_where_there_is_nothing() -> None:
    """No key does harm."""
    empty = fleet_of()
    for key in ("down", "k", "c", "/", "?", "escape", "x"):
        after(key, fleet=empty)
    assert after("k", fleet=empty).mode == "rows"


def test_q_leaves() -> None:
    """From the table."""
    assert after("q") == "quit"


def test_any_key_leaves_the_help() -> None:
    """Also q, which one presses first."""
    assert after("?").mode == "help"
    assert after("?", "q").mode == "rows"


def test_keys_are_read_from_what_terminals_send() -> None:
    """Arrows in both modes, a single key and text; unknown sequences are dropped."""
    assert list(keys_of("\x1b[A\x1bOB\x1b[5~q\x1b[99~/é\r\x7f")) == [
        *("up", "down", "page up", "q", "/", "é", "enter", "backspace")
    ]
    assert list(keys_of("\x1b")) == ["escape"]


# --- killing --------------------------------------------------------------------------------------


def test_a_kill_is_asked_about() -> None:
    """Only `y` is yes."""
    asked = after("down", "k")
    assert (asked.mode, asked.chosen) == ("kill", "gamma-beta")
    assert after("y", view=asked) == "kill"
    for key in ("n", "escape", "enter", "k", "q"):
        assert after(key, view=asked).message == "Not killed."


def test_a_kill_without_a_store_is_refused_before_the_question() -> None:
    """A yes could not be carried out."""
    view = after("k", view=View(cannot_kill="There is no store."))
    assert (view.mode, view.message) == ("rows", "There is no store.")


def test_exactly_the_chosen_agent_is_killed() -> None:
    """Its name is not taken for a glob."""
    patterns: list[str] = []

    def kill(pattern: str) -> str:
        patterns.append(pattern)
        return "Told 2 processes."

    view = kill_chosen(View(mode="kill", chosen="a[b]*"), kill)
    assert patterns == ["a[[]b][*]"]
    assert (view.mode, view.message) == ("rows", "Told 2 processes.")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("There is no store."), "There is no store."),
        (StoreError("refused"), "Quota store unavailable (refused)."),
        (PermanentStoreError("rename that key"), "Not sent: rename that key."),
    ],
)
def test_a_kill_that_fails_is_a_sentence(error: Exception, said: str) -> None:
    """On the screen."""

    def kill(pattern: str) -> str:
        raise error

    assert kill_chosen(View(mode="kill", chosen="a"), kill).message == said


@pytest.mark.parametrize("agent", ["_other", "a\N{REPLACEMENT CHARACTER}", "x" * 128])
def test_agents_without_an_exact_name_are_not_killed(agent: str) -> None:
    """Several agents, or a name that is not whole: the command takes a glob."""
    fleet = fleet_of(row(agent, 1))
    view = after("k", fleet=fleet)
    assert view.mode == "rows"
    assert view.message.endswith("Run: otel-limits kill --agent GLOB")
