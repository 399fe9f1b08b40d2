"""Reading `/metrics`: real agents behind a real endpoint, and everything else that may answer."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_limits.top.scrapes import Endpoint, samples_of
from tests.top.pages import page

# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("localhost:9464", "http://localhost:9464/metrics"),
        ("worker-1", "http://worker-1/metrics"),
        ("https://h/", "https://h/metrics"),
        ("http://h:1/own/path", "http://h:1/own/path"),
        ("[::1]:9464", "http://[::1]:9464/metrics"),
        ("http://me:s3cret@h:1", "http://me:***@h:1/metrics"),
    ],
)
def test_an_address_may_be_short(address: str, shown: str) -> None:
    """And is never shown with its password."""
    assert Endpoint(address).shown == shown


@pytest.mark.parametrize(
    "address", ["", "file:///etc/passwd", "http://h:port", "ftp://h", "http://"]
)
def test_invalid_address_is_rejected(address: str) -> None:
    """The message shows a valid one."""
    with pytest.raises(ValueError, match="Invalid endpoint"):
        Endpoint(address)


def test_metrics_of_others_are_not_read() -> None:
    """An application may have arbitrary metrics, even malformed ones."""
    strange = 'other_total{a="otel_limits_x"} 1\n# TYPE other nonsense\n}{ 1 2 3 4\n'
    samples = list(samples_of(strange + page("policy_valid 1"), is_openmetrics=False))
    assert [each.name for each in samples] == ["otel_limits_policy_valid"]


def test_a_number_that_is_none_is_left_out() -> None:
    """NaN and infinities."""
    lines = "policy_valid NaN\nquota_limit +Inf\nturns_total 1"
    samples = list(samples_of(page(lines), is_openmetrics=False))
    assert [each.name for each in samples] == ["otel_limits_turns_total"]


@given(st.text(), st.booleans())
def test_garbage_is_a_sentence(text: str, is_openmetrics: bool) -> None:  # noqa: FBT001
    """Any text may follow our prefix."""
    lines = "\n".join(f"otel_limits_{line}" for line in text.split("\n"))
    with suppress(ValueError):
        list(samples_of(lines, is_openmetrics=is_openmetrics))
