"""How near agents are to their caps, and quotas to their end."""

from __future__ import annotations

import pytest

from tests.top.pages import BEGAN, YOUNG, row_of, scrape, watched


def running(count: int, turns: int, ended: int, cap: float = 10) -> str:
    """Write the metrics of an agent's turns."""
    return f"""
        invocations_in_progress{{agent="a"}} {count}
        turns_total{{agent="a"}} {turns}
        invocation_turns_sum{{agent="a"}} {ended}
        limit{{agent="a",limit="max_turns"}} {cap}
    """


def test_running_invocations_use_turns_of_unfinished_ones() -> None:
    """12 turns, of which 5 are of finished invocations: 7 of 10 are taken."""
    (cap,) = row_of(watched(scrape(running(1, 12, 5), 0))).now
    assert (cap.limit, cap.cap, cap.share) == ("max_turns", 10, pytest.approx(0.7))


def test_several_invocations_have_a_mean() -> None:
    """Two of them have taken 7 turns."""
    (cap,) = row_of(watched(scrape(running(2, 12, 5), 0))).now
    assert cap.share == pytest.approx(0.35)


def test_tokens_are_measured_as_turns_are() -> None:
    """The nearest cap comes first."""
    lines = f"""
        {running(1, 1, 0)}
        tokens_total{{agent="a",model="m",type="input"}} 700
        tokens_total{{agent="a",model="m",type="output"}} 200
        invocation_tokens_sum{{agent="a"}} 100
        limit{{agent="a",limit="max_token_budget"}} 1000
        limit{{agent="a",limit="max_cost_usd"}} 1
    """
    shares = [(cap.limit, cap.share) for cap in row_of(watched(scrape(lines, 0))).now]
    assert shares == [("max_token_budget", pytest.approx(0.8)), ("max_turns", pytest.approx(0.1))]


def test_a_cap_of_0_is_none() -> None:
    """The limit was removed while the process ran."""
    assert row_of(watched(scrape(running(1, 1, 0, cap=0), 0))).now == ()


def test_nothing_that_runs_is_near_nothing() -> None:
    """No bar, rather than an empty one."""
    assert row_of(watched(scrape(running(0, 5, 5), 0))).now == ()


def test_turns_left_by_a_killed_worker_are_forgotten() -> None:
    """Its invocation never ends in the files that workers share: 3 turns would stay forever."""
    fleet = watched(
        scrape(running(0, 8, 5), 0),
        scrape(running(0, 8, 5), 1),
        scrape(running(1, 10, 5), 2),
    )
    assert row_of(fleet).now[0].share == pytest.approx(0.2)


def test_restarted_process_forgets_turns_of_the_killed_one() -> None:
    """The 3 turns that it left are not those of the new process."""
    old, new = (f"process_start_time_seconds {BEGAN + at}" for at in (-9000, 2))
    fleet = watched(
        scrape(f"{running(0, 8, 5)}\n{old}", 0),
        scrape(f"{running(0, 8, 5)}\n{old}", 1),
        scrape(f"{running(1, 2, 0)}\n{new}", 3),
    )
    assert row_of(fleet).now[0].share == pytest.approx(0.2)


def test_a_scrape_between_a_turn_and_an_end_forgets_nothing() -> None:
    """Leftovers are forgotten only after two scrapes agree."""
    fleet = watched(
        scrape(running(0, 8, 5), 0),
        scrape(running(0, 8, 8), 1),
        scrape(running(1, 10, 8), 2),
    )
    assert row_of(fleet).now[0].share == pytest.approx(0.2)


def used(counts: dict[str, int], limit: str = "max_turns") -> str:
    """Write the histogram of what finished invocations had used."""
    name = "budget_used_ratio_bucket"
    return "\n".join(
        f'{name}{{agent="a",limit="{limit}",le="{bound}"}} {count}'
        for bound, count in counts.items()
    )


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        ({"0.25": 20, "0.5": 20, "1.25": 20, "+Inf": 20}, 0.25),
        ({"0.25": 0, "0.5": 18, "0.8": 19, "1.25": 20, "+Inf": 20}, 0.8),
        ({"1.0": 0, "1.25": 0, "+Inf": 3}, 1.25),
    ],
)
def test_95_of_100_invocations_used_at_most(counts: dict[str, int], share: float) -> None:
    """The upper bound of their bucket, and above the highest one just more than all of it."""
    (cap,) = row_of(watched(scrape(f"{YOUNG}\n{used(counts)}", 0))).hour
    assert cap.share == share


def test_only_the_last_hour_is_looked_at() -> None:
    """Counts from before the first scrape of an old process are excluded."""
    before = {"0.25": 0, "1.0": 100, "+Inf": 100}
    after = {"0.25": 4, "1.0": 104, "+Inf": 104}
    fleet = watched(scrape(used(before), 0), scrape(used(after), 60))
    assert row_of(fleet).hour[0].share == 0.25


# --- quotas ---------------------------------------------------------------------------------------


def quota(
    used: float,
    *,
    instance: str = "1",
    resets: float = 600,
    key: str = "acme",
    limit: float = 100,
) -> str:
    """Write the metrics of a quota key."""
    labels = f'{{quota="daily",key="{key}",instance="{instance}"}}'
    return f"""
        quota_used{labels} {used}
        quota_reserved{labels} 10
        quota_limit{labels} {limit}
        quota_resets_timestamp_seconds{labels} {BEGAN + resets}
    """


def test_a_quota_near_its_end_is_shown() -> None:
    """Reservations count; usage below 80% is not close to the limit."""
    fleet = watched(scrape(quota(70) + quota(69, key="b"), 0))
    assert [(row.quota, row.key, row.share) for row in fleet.quotas] == [("daily", "acme", 0.8)]


def test_quota_of_several_processes_shows_highest_usage() -> None:
    """Each process reports the usage of its latest query."""
    fleet = watched(scrape(quota(90, instance="1") + quota(75, instance="2"), 0))
    assert [row.used for row in fleet.quotas] == [90]


def test_limit_that_an_operator_sets_is_shown_once_a_process_has_read_it() -> None:
    """A process that has made no call since then still has the former one."""
    idle = quota(90, instance="1")
    fleet = watched(
        scrape(idle + quota(90, instance="2"), 0),
        scrape(idle + quota(90, instance="2", limit=50), 1),
        scrape(idle + quota(90, instance="2", limit=50), 2),
    )
    assert [row.limit for row in fleet.quotas] == [50]


def test_a_window_that_has_ended_is_not_shown() -> None:
    """A later one is newer, however little was used of it."""
    assert watched(scrape(quota(95, resets=-1), 0)).quotas == ()
    fleet = watched(scrape(quota(95, resets=5) + quota(20, instance="2", resets=600), 0))
    assert fleet.quotas == ()
