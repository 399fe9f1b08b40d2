"""Garbage at every parser never switches a cap off, and never shows a traceback."""

from __future__ import annotations

import logging
import operator
from pathlib import Path
from random import Random

import pytest

from otel_limits.runtime.runtime import RUNTIME
from tests.fuzz.cases import CASES

EACH = 100
"""600 in all; `python -m tests.fuzz 10000` runs more of them."""

WITH_AGENT = [name for name in CASES if name != "bills"]
"""Bills are only read."""


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
        except (Exception, SystemExit) as error:  # noqa: BLE001  each is reported
            failed.append(f"{number}: {error!a}")  # which any report can carry
    assert failed == []


# --- the cases themselves -------------------------------------------------------------------------


def fails(name: str, place: Path) -> str:
    """Run cases of a kind until one of them notices something; return what it says."""
    for number in range(EACH):
        (place / str(number)).mkdir()
        try:
            CASES[name](Random(number), place / str(number))  # noqa: S311  to be repeated
        except Exception as error:  # noqa: BLE001  whatever is noticed
            return repr(error)
    return ""


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("name", WITH_AGENT)
def test_each_kind_of_case_notices_that_limits_are_off(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where garbage switched everything off."""
    monkeypatch.setattr(RUNTIME, "start", lambda *_, **__: None)
    assert "calls at a cap of 3" in fails(name, tmp_path)


BREAKABLE = {
    "environment": "otel_limits.settings.settings_reader.near_misses",
    "policy": "otel_limits.settings.policy.reader.read_yaml",
    "stores": "otel_limits.runtime.wiring.Wiring.connect",
    "chunks": "otel_limits.bindings.strands.sent_requests.SentRequest.read_part",
    "bills": "otel_limits.audit.bills.bill_reading.objects_in",
    "command_line": "otel_limits.cli.command.Parser.error",
}


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_case_notices_a_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers exceptions from unexpected places."""
    # With any arguments, and in its caller's frame, as it has none of its own.
    monkeypatch.setattr(BREAKABLE[name], operator.index)
    assert fails(name, tmp_path) != ""
