"""Entry points of other distributions are read without the frameworks of otel-limits."""

from __future__ import annotations

from otel_limits.bindings.entry_points import OWN_PACKAGES
from otel_limits.bindings.known import OURS


def test_own_packages_are_those_of_the_frameworks() -> None:
    """Written twice, since `otel-limits run` imports no framework's binding."""
    found = {package: each.distribution for each in OURS for package in each.packages}
    assert found == OWN_PACKAGES
