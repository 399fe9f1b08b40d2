"""The benchmark runs and says what it measured; how fast anything is, is no test's business."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from tests.benchmarks import quotas, table
from tests.benchmarks.loops import FAMILIES, LOOPS, SERVED
from tests.benchmarks.rounds import Distance, apart, mean_ratio, ratio, run_round

if TYPE_CHECKING:
    from tests.benchmarks.rounds import Lap


def test_laps_time_every_loop_on_both_clocks() -> None:
    """Each lap has the seconds of each loop, and each is a process of its own."""
    loops, distances = ("strands", "strands_limited"), (Distance(turns=2, laps=2),)

    laps = run_round([loops], distances, seed=0)

    assert {turns: len(runs) for turns, runs in laps.items()} == {2: 2}
    assert all(lap[loop][clock] > 0 for lap in laps[2] for loop in loops for clock in lap[loop])
    assert all(set(lap) == set(loops) for lap in laps[2])


def a_lap(bare: float, factor: float) -> Lap:
    """Make a lap in which the limited loop took that many times as long."""
    return {"bare": {"cpu": bare}, "limited": {"cpu": bare * factor}}


def test_a_ratio_pairs_the_runs_of_a_lap() -> None:
    """A lap on a slowed machine counts like any other: both of its runs were slowed."""
    rounds = [[a_lap(1.0, 1.5), a_lap(100.0, 1.25)], [a_lap(3.0, 1.0)]]

    assert ratio(rounds, "limited", "bare", "cpu") == (1.125, 1.25, 1.375)


def test_a_mean_ratio_takes_each_round_once() -> None:
    """Its error is that of the rounds: laps of the same processes tell little more than one."""
    rounds = [[a_lap(1.0, 1.0), a_lap(9.0, 1.25), a_lap(1.0, 9.0)], [a_lap(5.0, 1.75)]]

    assert mean_ratio(rounds, "limited", "bare", "cpu") == (1.5, 0.25)


def test_every_pair_of_the_table_is_a_loop() -> None:
    """The table asks for no loop that does not exist."""
    assert {name for pair in table.PAIRS for name in (pair.loop, pair.bare)} == set(LOOPS)
    assert set(chain(*FAMILIES, SERVED)) == set(LOOPS)


def test_what_is_compared_is_of_one_family() -> None:
    """The runs of a ratio follow each other."""
    families = [{pair.loop, pair.bare} for pair in table.PAIRS]
    assert all(any(pair <= set(family) for family in (*FAMILIES, SERVED)) for pair in families)


def test_a_loop_that_was_not_run_has_no_row() -> None:
    """LangChain is optional."""
    times = {loop: {"cpu": 1.0, "wall": 1.0} for loop in LOOPS if "langchain" not in loop}

    rows = table.loop_rows({50: [[times]]})

    assert rows[0][:2] == ("SDK provider: otel-limits", "50")
    assert rows[0][2:5] == ("1.000 ± nan", *("1.000 (1.000-1.000)",) * 2)
    assert len(rows) == len(table.PAIRS) - 1


def test_a_served_loop_takes_as_many_turns_as_it_is_asked_for() -> None:
    """A quarter of a second each, which is what the bar on wall time is compared with."""
    (lap,) = run_round([SERVED], [Distance(turns=2, laps=1)], seed=0)[2]
    assert all(lap[loop]["wall"] >= 0.5 for loop in SERVED)


def test_a_quota_with_a_known_cap_is_never_passed() -> None:
    """Whatever answers were before; what is expected refuses nothing and can be passed."""
    assert quotas.overshoot("worst_case", 100, 20_000, 64_000) == (37, 0)
    assert quotas.overshoot("expected", 100, 20_000, 64_000) == (0, 640_000)


def test_costs_are_measured_in_processes_of_their_own() -> None:
    """Callbacks, memory and start each answer with numbers."""
    assert min(apart("callbacks", 2).values()) > 0
    assert apart("memory", 10, 10)["live"] > 0
    assert set(apart("startup")) == {"import", "enable"}
