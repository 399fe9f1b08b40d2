"""A month of agents at four vendors, and their bills; `tests/nightly` has one with 1,000 calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bills.reconciled import (
    assert_every_difference_has_its_cause,
    assert_reconciles_to_the_cent,
    simulate,
)

if TYPE_CHECKING:
    from pathlib import Path

CALLS = 124
"""One agent a day."""


def test_month_reconciles_to_the_cent(tmp_path: Path) -> None:
    """Every token and every price is that of the vendors."""
    found = simulate(tmp_path, CALLS, has_differences=False)
    assert_reconciles_to_the_cent(found)
    # The gateway's log has the calls that its agents recorded, and adds none.
    _, out = found.ask("ledger", "import", str(tmp_path / "litellm-0"))
    assert out.endswith(f"{len(found.of('litellm'))} model calls were already in the ledger.\n")
    assert_reconciles_to_the_cent(found)


def test_differences_of_a_month_have_their_causes(tmp_path: Path) -> None:
    """Nothing is unexplained."""
    assert_every_difference_has_its_cause(simulate(tmp_path, CALLS, has_differences=True))
