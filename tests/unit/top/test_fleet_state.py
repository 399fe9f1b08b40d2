"""Two scrapes and what lies between them: rates, shares, halts and errors."""

from __future__ import annotations

import pytest

from otel_limits.top.fleet_state import Increases
from otel_limits.top.scrapes import Scrape
from tests.top.pages import BEGAN, OLD, YOUNG, row_of, scrape, watched


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
    fleet = watched(scrape(turns(1000), 0), scrape(turns(1030), 60))
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(30)
    assert fleet.rate_seconds == 60


def test_tokens_of_every_model_and_type_are_summed() -> None:
    """Input and output."""
    one, two = (
        f'tokens_total{{agent="a",model="m",type="input"}} {n}\n'
        f'tokens_total{{agent="a",model="n",type="output"}} {n}'
        for n in (0, 600)
    )
    fleet = watched(scrape(one, 0), scrape(two, 30))
    assert fleet.totals.rates.tokens_per_minute == pytest.approx(2400)


def test_rate_of_the_first_seconds_is_unknown() -> None:
    """Unknown, not 0."""
    fleet = watched(scrape(turns(1), 0), scrape(turns(2), 4))
    assert fleet.rate_seconds is None
    assert fleet.totals.rates.turns_per_minute is None
    assert fleet.totals.rates.usd_per_hour is None


def test_a_rate_forgets_what_is_over() -> None:
    """Counts older than a minute are excluded from the rate."""
    later = [scrape(turns(100), second) for second in range(10, 75)]
    fleet = watched(scrape(turns(0), 0), *later)
    assert row_of(fleet).rates.turns_per_minute == 0


def test_a_counter_that_begins_again_has_counted_from_0() -> None:
    """The process was restarted: 3 turns, and not 97 fewer."""
    fleet = watched(scrape(turns(100), 0), scrape(turns(3), 60))
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(3)


def test_restarted_process_has_counted_from_0() -> None:
    """Its start time shows it, although it counted more since than the process before."""
    first, second = (
        f"{turns(number)}\n{halts(number)}\nprocess_start_time_seconds {start}"
        for number, start in ((3, BEGAN - 9000), (5, BEGAN + 20))
    )
    row = row_of(watched(scrape(first, 0), scrape(second, 60)))
    assert row.rates.turns_per_minute == pytest.approx(5)
    assert row.halts == {"max_turns": 5}


def test_a_series_that_was_not_there_began_at_0() -> None:
    """An agent that was seen for the first time."""
    fleet = watched(scrape(turns(5), 0), scrape(f"{turns(5)}\n{turns(7, 'b')}", 60))
    assert row_of(fleet, "b").rates.turns_per_minute == pytest.approx(7)


def test_rate_of_a_new_agent_covers_its_age() -> None:
    """Unknown at its first point, even if the agent ran an hour ago; then over the time since."""
    last_hour = [
        scrape(f"{turns(5, 'old')}\n{turns(9, 'b')}", -3600, is_past=True),
        *(scrape(turns(5, "old"), at, is_past=True) for at in range(-3540, -60, 60)),
    ]
    # The new process has another instance, as in a Prometheus.
    first, second = (
        f'{turns(5, "old")}\nturns_total{{agent="b",instance="2"}} {n}\n'
        'invocations_in_progress{agent="b",instance="2"} 1'
        for n in (32, 84)
    )
    window = {"rate_seconds": 300.0, "least_seconds": 60.0}
    fleet = watched(*last_hour, scrape(first, 0), scrape(first, 5), **window)
    assert row_of(fleet, "b").rates.turns_per_minute is None
    assert fleet.totals.rates.turns_per_minute is None
    fleet = watched(*last_hour, scrape(first, 0), scrape(second, 60), **window)
    assert row_of(fleet, "b").rates.turns_per_minute == pytest.approx(52)
    assert fleet.totals.rates.turns_per_minute == pytest.approx(52)


def test_counts_of_an_outage_are_excluded_from_the_rate() -> None:
    """Halts of the hour are still counted."""
    fleet = watched(
        scrape(f"{turns(0)}\n{halts(0)}", 0),
        Scrape("one", BEGAN + 1, error="It is unavailable."),
        scrape(f"{turns(500)}\n{halts(2)}", 600),
        scrape(f"{turns(500)}\n{halts(2)}", 606),
    )
    assert row_of(fleet).rates.turns_per_minute == 0
    assert row_of(fleet).halts == {"max_turns": 2}


def test_counts_between_two_scrapes_are_spread_evenly() -> None:
    """Of what a Prometheus kept for each minute, half a minute counts half."""
    increases = Increases(seconds=300, step=1)
    increases.add(("turns", "a"), 60, at=1060, since=1000)
    assert increases.over(1060, 30)["turns", "a"] == pytest.approx(30)
    assert increases.over(1060, 60)["turns", "a"] == pytest.approx(60)
    assert increases.over(1400, 300) == {}


def test_all_addresses_are_summed() -> None:
    """Two processes with the same agent are one row."""
    fleet = watched(
        scrape(f'{turns(0)}\ninvocations_in_progress{{agent="a"}} 1', 0, "one"),
        scrape(f'{turns(0)}\ninvocations_in_progress{{agent="a"}} 2', 0, "two"),
        scrape(f'{turns(10)}\ninvocations_in_progress{{agent="a"}} 1', 60, "one"),
        scrape(f'{turns(20)}\ninvocations_in_progress{{agent="a"}} 2', 60, "two"),
    )
    assert row_of(fleet).in_progress == 3
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(30)
    assert fleet.totals.in_progress == 3


def test_processes_behind_one_address_are_distinguished() -> None:
    """A Prometheus has the same series of many instances."""
    one, two = (
        f'turns_total{{agent="a",instance="1"}} {first}\n'
        f'turns_total{{agent="a",instance="2"}} {second}'
        for first, second in ((10, 100), (20, 5))
    )
    fleet = watched(scrape(one, 0), scrape(two, 60))
    assert row_of(fleet).rates.turns_per_minute == pytest.approx(10 + 5)


def test_running_invocations_of_a_silent_process_are_unknown() -> None:
    """The row stays, as its halts are of the last hour."""
    fleet = watched(
        scrape(f'invocations_in_progress{{agent="a"}} 1\n{halts(0)}', 0),
        scrape(f'invocations_in_progress{{agent="a"}} 1\n{halts(1)}', 1),
        Scrape("one", BEGAN + 2, error="It is unavailable."),
    )
    assert row_of(fleet).in_progress is None
    assert fleet.problems == ["It is unavailable."]


# --- money ----------------------------------------------------------------------------------------


def test_cost_is_shown_per_hour_and_by_agent() -> None:
    """0.30 USD in a minute are 18 an hour, of which each agent has its part."""
    fleet = watched(
        scrape(f"{spent(1)}\n{spent(0, agent='b')}", 0),
        scrape(f"{spent(1.2)}\n{spent(0.1, agent='b')}", 60),
    )
    assert fleet.totals.rates.usd_per_hour == pytest.approx(18)
    assert row_of(fleet).rates.usd_per_hour == pytest.approx(12)
    assert row_of(fleet).usd_share == pytest.approx(2 / 3)


def test_unpriced_calls_are_not_free() -> None:
    """The money is not known where no call has a price, and what there is where some have."""
    free = watched(scrape(spent(0, 0), 0), scrape(spent(0, 60), 60))
    assert row_of(free).rates.usd_per_hour is None
    assert row_of(free).usd_share is None
    partly = watched(scrape(spent(0, 0), 0), scrape(spent(1, 60), 60))
    assert row_of(partly).rates.usd_per_hour == pytest.approx(60)
    assert row_of(partly).rates.unpriced_tokens_per_minute == pytest.approx(60)


# --- halts and errors -----------------------------------------------------------------------------


def test_halts_are_counted_by_reason() -> None:
    """Natural ends and halts that were only observed are none."""
    before = [halts(0), halts(0, "killed"), halts(0, "max_turns", "observed")]
    after = [
        halts(2),
        halts(1, "killed"),
        halts(5, "max_turns", "observed"),
        halts(9, "end_turn", "none"),
    ]
    fleet = watched(scrape("\n".join(before), 0), scrape("\n".join(after), 5))
    assert row_of(fleet).halts == {"max_turns": 2, "killed": 1}
    assert fleet.totals.halts == 3


def test_refused_tool_calls_are_counted_by_tool() -> None:
    """In addition to halts; one that was only observed at its cap is none."""
    counted = 'tool_refusals_total{{agent="a",tool="{}",limit="{}",action="{}"}} {}'
    before = [counted.format("search", "max_calls_per_tool", "refused", 4)]
    after = [
        counted.format("search", "max_calls_per_tool", "refused", 6),
        counted.format("fetch", "max_calls_per_tool", "refused", 3),
        counted.format("fetch", "max_tool_calls", "refused", 1),
        counted.format("pay", "max_calls_per_tool", "observed", 9),
    ]
    fleet = watched(scrape("\n".join(before), 0), scrape("\n".join(after), 5))
    assert row_of(fleet).refusals == {"fetch": 4, "search": 2}
    assert (fleet.totals.refusals, fleet.totals.halts) == (6, 0)


def test_last_halts_begin_with_the_first_scrape() -> None:
    """The newest first; one that was there before is not among them."""
    fleet = watched(
        scrape(halts(5), 0),
        scrape(halts(6), 1),
        scrape(f"{halts(6)}\n{halts(2, 'killed')}", 2),
    )
    assert [(each.reason, each.count) for each in fleet.last_halts] == [
        ("killed", 2),
        ("max_turns", 1),
    ]


def test_all_halts_of_a_young_process_are_of_the_last_hour() -> None:
    """Its start is known; the times of its halts before the first scrape are not."""
    fleet = watched(scrape(f"{YOUNG}\n{halts(5)}", 0))
    assert row_of(fleet).halts == {"max_turns": 5}
    assert fleet.last_halts == ()
    assert fleet.halts_since == fleet.at - 3600


@pytest.mark.parametrize("start", [OLD, ""])
def test_halts_of_an_old_process_count_from_the_first_scrape(start: str) -> None:
    """No metric has the time of earlier halts, or the start of a process without its age."""
    fleet = watched(scrape(f"{start}\n{halts(5)}", 0), scrape(f"{start}\n{halts(6)}", 100))
    assert row_of(fleet).halts == {"max_turns": 1}
    assert fleet.halts_since == BEGAN


def test_halts_are_forgotten_after_an_hour() -> None:
    """To the minute."""
    fleet = watched(
        scrape(halts(0), 0),
        scrape(halts(4), 10),
        scrape(halts(5), 3000),
        scrape(halts(5), 3680),
    )
    assert row_of(fleet).halts == {"max_turns": 1}


def test_process_returning_after_hours_is_new() -> None:
    """Its 9 halts may be of any of them; the series of the others are still compared."""
    fleet = watched(
        scrape(halts(5), 0),
        scrape(halts(5), 0, "two"),
        Scrape("one", BEGAN + 1, error="It is unavailable."),
        *(scrape(halts(5 + n), 1800 * n, "two") for n in range(1, 5)),
        scrape(halts(14), 7201),
    )
    assert row_of(fleet).halts == {"max_turns": 2}


def test_a_process_that_counts_nothing_is_known_all_the_time() -> None:
    """No agent has run in it; for hours."""
    fleet = watched(*(scrape(f"{OLD}\npolicy_valid 1", 1000 * n) for n in range(10)))
    assert fleet.halts_since == BEGAN + 9000 - 3600


def test_a_process_that_comes_later_counts_from_its_begin() -> None:
    """A Prometheus meets it for the first time when it has halted once already."""
    instance = halts(1).replace("{", '{instance="2",')
    fleet = watched(scrape(turns(0), 0), scrape(f"{turns(0)}\n{instance}", 15))
    assert row_of(fleet).halts == {"max_turns": 1}


def test_halts_stored_by_prometheus_count_in_the_hour() -> None:
    """It is not among the last halts, since the view did not see it happen."""
    fleet = watched(
        scrape(halts(1), -3600, is_past=True),
        scrape(halts(4), -60, is_past=True),
        scrape(halts(4), 0),
    )
    assert row_of(fleet).halts == {"max_turns": 3}
    assert fleet.last_halts == ()
    assert fleet.halts_since == BEGAN - 3600


def test_errors_are_calls_that_failed() -> None:
    """Of models and of tools; an invocation ended by an exception is listed separately."""
    one, two = (
        f'model_calls_total{{agent="a",model="m",kind="failed"}} {n}\n'
        f'model_calls_total{{agent="a",model="m",kind="measured"}} {n}\n'
        f'tool_calls_total{{agent="a",tool="t",status="error"}} {n}\n'
        f"{halts(n, 'error', 'none')}"
        for n in (0, 2)
    )
    row = row_of(watched(scrape(one, 0), scrape(two, 1)))
    assert row.errors == {"model_calls": 2, "tool_calls": 2, "invocations": 2}
    assert row.error_count == 4
    assert row.halts == {}


def test_faults_of_our_own_are_sentences() -> None:
    """What does not enforce, a policy that was refused, and failures that were kept away."""
    fleet = watched(
        scrape(
            'enforcing{source="run"} 1\npolicy_valid 1\ninternal_errors_total{component="x"} 0', 0
        ),
        scrape(
            'enforcing{source="run"} 0\npolicy_valid 0\ninternal_errors_total{component="x"} 3', 1
        ),
    )
    assert [each.split(":")[0] for each in fleet.warnings] == [
        "Limits are not enforced in 1 process",
        "Policy file rejected in 1 process",
        "3 internal errors in otel-limits",
    ]
