"""More random programs of agents than the unit tests have."""

from __future__ import annotations

import pytest

from tests.compositions.__main__ import KINDS
from tests.compositions.frameworks import FRAMEWORKS
from tests.compositions.run import problems

FIRST, LAST = 100, 140


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_random_programs_keep_their_limits(name: str, kind: str) -> None:
    """Each outcome is the expected one, and no cap is passed."""
    framework = FRAMEWORKS[name]
    programs = [(seed, KINDS[kind](seed, framework)) for seed in range(FIRST, LAST)]
    found = [(seed, each) for seed, program in programs for each in problems(program, framework)]
    assert found == []
