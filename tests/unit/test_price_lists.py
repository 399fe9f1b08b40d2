"""The price list agrees with a second one, or there is a reason why it does not."""

from __future__ import annotations

import sys

import pytest

from tests.paths import ROOT
from tests.readme import with_tables

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="genai-prices cannot be installed on Python 3.10"
)


def test_each_disagreement_has_a_reason() -> None:
    """A price of ours that only one list knows may be wrong by any factor."""
    from tests.price_lists.compare import compared, disagreements, reason_of

    assert len(list(compared())) > 800
    unexplained = [
        (each.model, ratio)
        for each in disagreements()
        for ratio in each.ratios.values()
        if reason_of(each.vendor, each.model, ratio, is_deprecated=each.is_deprecated) is None
    ]
    assert unexplained == []


def test_page_lists_the_disagreements() -> None:
    """Run `python -m tests.generate tables` when this fails."""
    from tests.price_lists.compare import explained_table

    page = (ROOT / "otel_limits/docs/prices.md").read_text(encoding="utf-8")
    assert with_tables(page, {"price-lists": explained_table}) == page


def test_tables_follow_from_the_comparison() -> None:
    """Run `python -m tests.price_lists.compare` when this fails."""
    from tests.price_lists.compare import LISTS, as_yaml, tables

    assert LISTS.read_text(encoding="utf-8") == as_yaml(tables())
