"""Vendors' bills against our counts, in every mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.programs.wire.test_wire import calls_by_mode
from tests.wire.providers import BY_NAME
from tests.wire.run import MODES, results

if TYPE_CHECKING:
    from tests.wire.run import Results

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run() -> Results:
    """All counts."""
    return results()


@pytest.mark.parametrize("vendor_name", BY_NAME)
def test_each_vendor_is_counted_alike_in_every_mode(run: Results, vendor_name: str) -> None:
    """With spans, with hooks alone and with `OTEL_SDK_DISABLED=true`."""
    found = calls_by_mode(run, vendor_name)
    assert len(found) == len(MODES)
    assert found[1:] == found[:1] * 2
