"""Two scrapes and what lies between them: rates, shares, halts and errors."""

from __future__ import annotations

import pytest

from otel_limits.top.follower import Increases
from otel_limits.top.scrapes import Scrape
from tests.top.pages import BEGAN, OLD, YOUNG, row_of, told, watched


def turns(number: int, agent: str = "a") -> str:
    """Write the counter of turns."""
    return f'turns_total{{agent="{agent}"}} {number}'


def halts(number: int, reason: str = "max_turns", action: str = "halted") -> str:
    """Write the counter of stops."""
    return f'stops_total{{agent="a",reason="{reason}",action="{action}"}} {number}'


def spent(usd: float, unpriced: int = 0, agent: str = "a") -> str:
    """Write the counters of money."""
    labels = f'{{agent="{agent}",model="m"}}'
    return f"cost_usd_total{labels} {usd}\nunpriced_tokens_total{labels} {unpriced}"


def test_a_rate_is_what_was_counted_in_between() -> None:
    """30 turns in a minute, whatever there was before."""
    fleet = watched(told(turns(1000), 0), told(turns(1030), 60))
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(30)
    assert fleet.rate_seconds == 60


def test_tokens_of_every_model_and_type_are_summed() -> None:
    """Input and output."""
    one, two = (
        f'tokens_total{{agent="a",model="m",type="input"}} {n}\n'
        f'tokens_total{{agent="a",model="n",type="output"}} {n}'
        for n in (0, 600)
    )
    fleet = watched(told(one, 0), told(two, 30))
    assert fleet.totals.rates.tokens_per_minute == pytest.approx(2400)


def test_nobody_knows_a_rate_of_the_first_seconds() -> None:
    """It is not 0, it is not known."""
    fleet = watched(told(turns(1), 0), told(turns(2), 4))
    assert fleet.rate_seconds is None
    assert fleet.totals.rates.turns_per_minute is None
    assert fleet.totals.rates.usd_per_hour is None


def test_a_rate_forgets_what_is_over() -> None:
    """What was counted more than a minute ago is not of the last minute."""
    later = [told(turns(100), second) for second in range(10, 75)]
    fleet = watched(told(turns(0), 0), *later)
    assert row_of(fleet).rates.turns_per_minute == 0


def test_a_counter_that_begins_again_has_counted_from_0() -> None:
    """The process was restarted: 3 turns, and not 97 fewer."""
    fleet = watched(told(turns(100), 0), told(turns(3), 60))
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(3)


def test_a_series_that_was_not_there_began_at_0() -> None:
    """An agent that was seen for the first time."""
    fleet = watched(told(turns(5), 0), told(f"{turns(5)}\n{turns(7, 'b')}", 60))
    assert row_of(fleet, "b").rates.turns_per_minute == pytest.approx(7)


def test_what_was_counted_during_an_outage_is_no_rate_of_now() -> None:
    """Halts of the hour are counted nevertheless."""
    fleet = watched(
        told(f"{turns(0)}\n{halts(0)}", 0),
        Scrape("one", BEGAN + 1, error="It is unavailable."),
        told(f"{turns(500)}\n{halts(2)}", 600),
        told(f"{turns(500)}\n{halts(2)}", 601),
    )
    assert row_of(fleet).rates.turns_per_minute == 0
    assert row_of(fleet).halts == {"max_turns": 2}


def test_what_came_between_two_looks_came_evenly() -> None:
    """Of what a Prometheus kept for each minute, half a minute counts half."""
    increases = Increases(seconds=300, step=1)
    increases.add(("turns", "a"), 60, at=1060, since=1000)
    assert increases.over(1060, 30)["turns", "a"] == pytest.approx(30)
    assert increases.over(1060, 60)["turns", "a"] == pytest.approx(60)
    assert increases.over(1400, 300) == {}


def test_all_addresses_are_summed() -> None:
    """Two processes with the same agent are one row."""
    fleet = watched(
        told(f'{turns(0)}\ninvocations_in_progress{{agent="a"}} 1', 0, "one"),
        told(f'{turns(0)}\ninvocations_in_progress{{agent="a"}} 2', 0, "two"),
        told(f'{turns(10)}\ninvocations_in_progress{{agent="a"}} 1', 60, "one"),
        told(f'{turns(20)}\ninvocations_in_progress{{agent="a"}} 2', 60, "two"),
    )
    assert row_of(fleet).in_progress == 3
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(30)
    assert fleet.totals.in_progress == 3


def test_processes_behind_one_address_are_told_apart() -> None:
    """A Prometheus has the same series of many instances."""
    one, two = (
        f'turns_total{{agent="a",instance="1"}} {first}\n'
        f'turns_total{{agent="a",instance="2"}} {second}'
        for first, second in ((10, 100), (20, 5))
    )
    fleet = watched(told(one, 0), told(two, 60))
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(10 + 5)


def test_nobody_knows_what_is_running_where_nobody_answers() -> None:
    """The row stays, as its halts are of the last hour."""
    fleet = watched(
        told(f'invocations_in_progress{{agent="a"}} 1\n{halts(0)}', 0),
        told(f'invocations_in_progress{{agent="a"}} 1\n{halts(1)}', 1),
        Scrape("one", BEGAN + 2, error="It is unavailable."),
    )
    assert row_of(fleet).in_progress is None
    assert fleet.problems == ["It is unavailable."]


# --- money ----------------------------------------------------------------------------------------


def test_money_is_told_for_an_hour_and_shared() -> None:
    """0.30 USD in a minute are 18 an hour, of which each agent has its part."""
    fleet = watched(
        told(f"{spent(1)}\n{spent(0, agent='b')}", 0),
        told(f"{spent(1.2)}\n{spent(0.1, agent='b')}", 60),
    )
    assert fleet.totals.rates.usd_per_hour == pytest.approx(18)
    assert row_of(fleet).rates.usd_per_hour == pytest.approx(12)
    assert row_of(fleet).usd_share == pytest.approx(2 / 3)


def test_what_has_no_price_is_not_free() -> None:
    """The money is not known where no call has a price, and what there is where some have."""
    free = watched(told(spent(0, 0), 0), told(spent(0, 60), 60))
    assert row_of(free).rates.usd_per_hour is None
    assert row_of(free).usd_share is None
    partly = watched(told(spent(0, 0), 0), told(spent(1, 60), 60))
    assert row_of(partly).rates.usd_per_hour == pytest.approx(60)
    assert row_of(partly).rates.unpriced_tokens_per_minute == pytest.approx(60)


# --- halts and errors -----------------------------------------------------------------------------


def test_halts_are_told_by_reason() -> None:
    """Natural ends and halts that were only observed are none."""
    before = [halts(0), halts(0, "killed"), halts(0, "max_turns", "observed")]
    after = [
        halts(2),
        halts(1, "killed"),
        halts(5, "max_turns", "observed"),
        halts(9, "end_turn", "none"),
    ]
    fleet = watched(told("\n".join(before), 0), told("\n".join(after), 5))
    assert row_of(fleet).halts == {"max_turns": 2, "killed": 1}
    assert fleet.totals.halts == 3


def test_the_last_halts_are_those_since_somebody_looks() -> None:
    """The newest first; one that was there before is not among them."""
    fleet = watched(
        told(halts(5), 0), told(halts(6), 1), told(f"{halts(6)}\n{halts(2, 'killed')}", 2)
    )
    assert [(each.reason, each.count) for each in fleet.last_halts] == [
        ("killed", 2),
        ("max_turns", 1),
    ]


def test_all_halts_of_a_young_process_are_of_the_last_hour() -> None:
    """It tells when it began; what it had halted before somebody looked is not seen."""
    fleet = watched(told(f"{YOUNG}\n{halts(5)}", 0))
    assert row_of(fleet).halts == {"max_turns": 5}
    assert fleet.last_halts == ()
    assert fleet.halts_since == fleet.at - 3600


@pytest.mark.parametrize("start", [OLD, ""])
def test_halts_of_an_old_process_are_known_since_somebody_looks(start: str) -> None:
    """When the others were, no metric says; neither where the process does not say its age."""
    fleet = watched(told(f"{start}\n{halts(5)}", 0), told(f"{start}\n{halts(6)}", 100))
    assert row_of(fleet).halts == {"max_turns": 1}
    assert fleet.halts_since == BEGAN


def test_halts_are_forgotten_after_an_hour() -> None:
    """To the minute."""
    fleet = watched(
        told(halts(0), 0), told(halts(4), 10), told(halts(5), 3000), told(halts(5), 3680)
    )
    assert row_of(fleet).halts == {"max_turns": 1}


def test_who_comes_back_after_hours_is_a_stranger() -> None:
    """Its 9 halts may be of any of them; the series of the others are still compared."""
    fleet = watched(
        told(halts(5), 0),
        told(halts(5), 0, "two"),
        Scrape("one", BEGAN + 1, error="It is unavailable."),
        *(told(halts(5 + n), 1800 * n, "two") for n in range(1, 5)),
        told(halts(14), 7201),
    )
    assert row_of(fleet).halts == {"max_turns": 2}


def test_a_process_that_counts_nothing_is_known_all_the_time() -> None:
    """No agent has run in it; for hours."""
    fleet = watched(*(told(f"{OLD}\npolicy_valid 1", 1000 * n) for n in range(10)))
    assert fleet.halts_since == BEGAN + 9000 - 3600


def test_a_process_that_comes_later_counts_from_its_begin() -> None:
    """A Prometheus meets it for the first time when it has halted once already."""
    instance = halts(1).replace("{", '{instance="2",')
    fleet = watched(told(turns(0), 0), told(f"{turns(0)}\n{instance}", 15))
    assert row_of(fleet).halts == {"max_turns": 1}


def test_what_a_prometheus_kept_counts_in_the_hour() -> None:
    """It is not among the last halts, since nobody saw it."""
    fleet = watched(
        told(halts(1), -3600, is_past=True),
        told(halts(4), -60, is_past=True),
        told(halts(4), 0),
    )
    assert row_of(fleet).halts == {"max_turns": 3}
    assert fleet.last_halts == ()
    assert fleet.halts_since == BEGAN - 3600


def test_errors_are_calls_that_failed() -> None:
    """Of models and of tools; an invocation that an exception ended is told beside them."""
    one, two = (
        f'model_calls_total{{agent="a",model="m",kind="failed"}} {n}\n'
        f'model_calls_total{{agent="a",model="m",kind="measured"}} {n}\n'
        f'tool_calls_total{{agent="a",tool="t",status="error"}} {n}\n'
        f"{halts(n, 'error', 'none')}"
        for n in (0, 2)
    )
    row = row_of(watched(told(one, 0), told(two, 1)))
    assert row.errors == {"model_calls": 2, "tool_calls": 2, "invocations": 2}
    assert row.error_count == 4
    assert row.halts == {}


def test_faults_of_our_own_are_sentences() -> None:
    """What does not enforce, a policy that was refused, and failures that were kept away."""
    fleet = watched(
        told(
            'enforcing{source="run"} 1\npolicy_valid 1\ninternal_errors_total{component="x"} 0', 0
        ),
        told(
            'enforcing{source="run"} 0\npolicy_valid 0\ninternal_errors_total{component="x"} 3', 1
        ),
    )
    assert [each.split(":")[0] for each in fleet.warnings] == [
        "Limits are not enforced in 1 process",
        "Policy file rejected in 1 process",
        "3 internal errors in otel-limits",
    ]
