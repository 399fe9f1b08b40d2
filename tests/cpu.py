"""Hooks of pytest that print the CPU time of the session and its ten dearest tests.

User and system seconds, with child processes. A fixture of a module counts for its first test.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

BEGIN: Final = pytest.StashKey[float]()
PROPERTY: Final = "cpu_seconds"
SHOWN: Final = 10

SECONDS_OF_FORKS: Final[defaultdict[int, float]] = defaultdict(float)
"""CPU time of the programs that a Python of `tests/forking.py` has forked, by its process ID.

The system adds it to ours when that Python ends: without this, it would be the last test's.
"""


def cpu_seconds() -> float:
    """Return the CPU time of this process, its ended children and the programs they forked."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    forks = sum(SECONDS_OF_FORKS.values())
    return sum(each.ru_utime + each.ru_stime for each in used) + forks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when a test begins, with its fixtures."""
    item.stash[BEGIN] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the time into the last report of a test, which reaches the process that prints."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROPERTY, cpu_seconds() - item.stash[BEGIN]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sum, and the dearest tests."""
    times = {
        report.nodeid: float(seconds)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, seconds in getattr(report, "user_properties", ())
        if name == PROPERTY
    }
    dearest = sorted(times, key=lambda test: -times[test])[:SHOWN]
    terminalreporter.section(f"{sum(times.values()):.0f} CPU seconds; the dearest tests")
    for test in dearest:
        terminalreporter.write_line(f"{times[test]:6.1f}  {test}")
