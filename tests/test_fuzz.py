"""Garbage at every parser never switches a cap off, and never shows a traceback."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.cases import CASES

EACH = 100
"""500 in all; `python -m tests.fuzz 10000` runs more of them."""


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(300)
def test_garbage_never_switches_a_cap_off(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent is halted at its cap, or the process refused to start with a sentence."""
    caplog.set_level(logging.CRITICAL)
    failed = []
    for number in range(EACH):
        place = tmp_path / str(number)
        place.mkdir()
        try:
            CASES[name](Random(number), place)  # noqa: S311  to be repeated, not secret
        except (Exception, SystemExit) as error:  # noqa: BLE001  each is told
            failed.append(f"{number}: {error!r}")
    assert failed == []
