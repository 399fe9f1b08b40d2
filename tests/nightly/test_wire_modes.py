"""Vendors' bills against our counts, in every mode and under every cap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.programs.wire.test_wire import calls_by_mode, expected_under_caps
from tests.wire.providers import BY_NAME
from tests.wire.run import CAPPED, MODES, results

if TYPE_CHECKING:
    from tests.wire.run import Results

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run() -> Results:
    """All counts."""
    return results()


every_vendor = pytest.mark.parametrize("vendor_name", BY_NAME)


@every_vendor
def test_each_vendor_is_counted_alike_in_every_mode(run: Results, vendor_name: str) -> None:
    """With spans, with hooks alone and with `OTEL_SDK_DISABLED=true`."""
    found = calls_by_mode(run, vendor_name)
    assert len(found) == len(MODES)
    assert found[1:] == found[:1] * 2


@every_vendor
def test_every_cap_is_exact_with_each_vendor(run: Results, vendor_name: str) -> None:
    """The caps of tokens and cost, at the bill of two calls and one unit above it."""
    assert run[CAPPED][vendor_name] == expected_under_caps(vendor_name, is_whole=True)
