"""Some vendors' bills against our counts, through real model classes and clients; at night all.

One process runs all cases in every mode (`tests/wire/run.py`); each test checks its counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.wire.checks import CHECKS
from tests.wire.run import results

if TYPE_CHECKING:
    from tests.wire.checks import Check
    from tests.wire.run import Results

BY_DAY = ("OpenAI Chat", "OpenAI Responses", "Anthropic", "Bedrock", "Ollama")
"""One of each way to report cached tokens, and one that runs locally."""


@pytest.fixture(scope="module")
def run() -> Results:
    """All counts."""
    return results(BY_DAY)


@pytest.mark.parametrize("vendor_name", BY_DAY)
@pytest.mark.parametrize("check", CHECKS)
def test_vendor_is_counted_as_it_bills(run: Results, check: Check, vendor_name: str) -> None:
    """A vendor's bill holds in calls, sums, metrics, ledger rows, prices and under caps."""
    check(run, vendor_name)
