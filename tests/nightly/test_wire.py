"""Every vendor's bills against our counts, and the page that lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.paths import ROOT
from tests.readme import with_tables
from tests.wire.checks import CHECKS
from tests.wire.providers import BY_NAME
from tests.wire.run import results
from tests.wire.table import vendors

if TYPE_CHECKING:
    from tests.wire.checks import Check
    from tests.wire.run import Results

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run() -> Results:
    """All counts."""
    return results()


@pytest.mark.parametrize("vendor_name", BY_NAME)
@pytest.mark.parametrize("check", CHECKS)
def test_vendor_is_counted_as_it_bills(run: Results, check: Check, vendor_name: str) -> None:
    """A vendor's bill holds in calls, sums, metrics, ledger rows, prices and under caps."""
    check(run, vendor_name)


def test_page_matches_the_counts(run: Results) -> None:
    """Run `python -m tests.generate tables` when this fails."""
    page = (ROOT / "otel_limits/docs/vendors.md").read_text(encoding="utf-8")
    assert with_tables(page, {"vendors": lambda: vendors(run)}) == page
