"""A month of 1,000 calls at four vendors, and their bills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bills.reconciled import (
    assert_every_difference_has_its_cause,
    assert_reconciles_to_the_cent,
    simulate,
)

if TYPE_CHECKING:
    from pathlib import Path

CALLS = 1_000


def test_month_reconciles_to_the_cent(tmp_path: Path) -> None:
    """Every token and every price is that of the vendors."""
    assert_reconciles_to_the_cent(simulate(tmp_path, CALLS, has_differences=False))


def test_differences_of_a_month_have_their_causes(tmp_path: Path) -> None:
    """Nothing is unexplained."""
    assert_every_difference_has_its_cause(simulate(tmp_path, CALLS, has_differences=True))
