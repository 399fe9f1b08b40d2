"""The benchmarks run and report their measurements. Speed itself is not tested."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from tests.benchmarks import quotas, table
from tests.benchmarks.loops import LOOPS, OTHERS, SERVED, STRANDS, installed
from tests.benchmarks.rounds import Distance, apart, mean_ratio, ratio, run_round

if TYPE_CHECKING:
    from tests.benchmarks.rounds import Lap


def test_lap_measures_every_loop_on_both_clocks() -> None:
    """Each loop runs in a separate process."""
    loops, distances = ("strands", "strands_limited"), (Distance(turns=2, laps=2),)

    laps = run_round([loops], distances, seed=0)

    assert {turns: len(runs) for turns, runs in laps.items()} == {2: 2}
    assert all(lap[loop][clock] > 0 for lap in laps[2] for loop in loops for clock in lap[loop])
    assert all(set(lap) == set(loops) for lap in laps[2])


def a_lap(bare: float, factor: float) -> Lap:
    """Return a lap in which the limited loop took `factor` times as long."""
    return {"bare": {"cpu": bare}, "limited": {"cpu": bare * factor}}


def test_ratio_pairs_the_runs_of_a_lap() -> None:
    """A slow machine slows both runs of a lap, so the lap counts like any other."""
    rounds = [[a_lap(1.0, 1.5), a_lap(100.0, 1.25)], [a_lap(3.0, 1.0)]]

    assert ratio(rounds, "limited", "bare", "cpu") == (1.125, 1.25, 1.375)


def test_mean_ratio_counts_each_round_once() -> None:
    """Laps of one process add little information, so the error is that of the rounds."""
    rounds = [[a_lap(1.0, 1.0), a_lap(9.0, 1.25), a_lap(1.0, 9.0)], [a_lap(5.0, 1.75)]]

    assert mean_ratio(rounds, "limited", "bare", "cpu") == (1.5, 0.25)


def test_every_choice_of_the_table_is_a_loop() -> None:
    """A renamed loop must not disappear from the table."""
    assert {name for each in table.CHOICES for name in (each.loop, each.bare)} == set(LOOPS)
    assert set(chain(*STRANDS, *OTHERS, *SERVED)) == set(LOOPS)


def test_compared_loops_belong_to_one_family() -> None:
    """Their runs are close in time."""
    pairs = [{each.loop, each.bare} for each in table.CHOICES]
    families = (*STRANDS, *OTHERS, *SERVED)
    assert all(any(pair <= set(family) for family in families) for pair in pairs)


def test_unmeasured_loop_has_no_row() -> None:
    """LangChain is optional."""
    times = {loop: {"cpu": 1.0, "wall": 1.0} for loop in LOOPS if "langchain" not in loop}

    rows = table.loop_rows({50: [[times]]})

    limited = rows[2]
    assert limited[:3] == ("Strands with otel-limits", "50", "20.00 ms")
    assert limited[3:] == ("1.000 ± nan", "", "CPU ≤ 1.25")
    assert len(rows) == len(table.CHOICES) - 6


def test_served_loop_takes_the_requested_turns() -> None:
    """Each takes a quarter of a second, which the bound on wall time is based on."""
    (lap,) = run_round(installed(SERVED), [Distance(turns=2, laps=1)], seed=0)[2]
    assert all(times["wall"] >= 0.5 for times in lap.values())


def test_worst_case_reservation_never_exceeds_the_quota() -> None:
    """Reserving the expected usage refuses fewer calls and can exceed it."""
    assert quotas.overshoot("worst_case", 100, 20_000, 64_000) == (37, 0)
    assert quotas.overshoot("expected", 100, 20_000, 64_000) == (0, 640_000)


def test_separate_processes_report_callbacks_memory_and_startup() -> None:
    """None of them influences another."""
    assert min(apart("callbacks", 2).values()) > 0
    assert apart("memory", 10, 10)["live"] > 0
    assert set(apart("startup")) == {"import", "enable"}
