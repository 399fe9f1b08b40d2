"""No unit test starts a program, uses a socket or sleeps, so all of them run anywhere and fast."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache, wraps
from typing import Any, Final

import pytest

from otel_limits.cli.parser import COMMANDS, make_parser
from tests.ledger.fixtures import ledger, week
from tests.quotas.fixtures import hold
from tests.quotas.gates import open_gate

__all__ = ["hold", "ledger", "open_gate", "week"]

FORBIDDEN: Final = {
    **dict.fromkeys(
        ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"),
        "starts a process",
    ),
    "socket.connect": "connects a socket",
    "socket.bind": "listens on a socket",
}
"""Audit events of Python. The pair of sockets that wakes an event loop causes none of them."""

LONGEST_SLEEP: Final = 0.05
"""Seconds. A cancelled sleep of any length is no wait."""

BREACHES: Final[list[str]] = []


def note_event(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what the present test must not do."""
    if event in FORBIDDEN:
        BREACHES.append(f"{FORBIDDEN[event]}: {arguments}")


def note_sleep(seconds: float) -> None:
    """Note a sleep that is too long."""
    if seconds > LONGEST_SLEEP:
        BREACHES.append(f"sleeps for {seconds} seconds")


sys.addaudithook(note_event)
blocking_sleep, async_sleep = time.sleep, asyncio.sleep


@wraps(blocking_sleep)
def sleep(seconds: float) -> None:
    """Sleep, and note it."""
    note_sleep(seconds)
    blocking_sleep(seconds)


@wraps(async_sleep)
async def sleep_in_loop(delay: float, result: Any = None) -> Any:
    """Sleep, and note it unless it is cancelled."""
    answer = await async_sleep(delay, result)
    note_sleep(delay)
    return answer


# Before the test modules are imported, which may import these functions by name.
time.sleep = sleep  # type: ignore[assignment]
asyncio.sleep = sleep_in_loop


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget what the imports of a test module did."""
    BREACHES.clear()


@pytest.fixture(scope="session", autouse=True)
def own_python() -> Iterator[None]:
    """`python` is this one, also where no environment is active: another would be started."""
    folder = os.path.dirname(sys.executable)  # noqa: PTH120  not that of what it links to
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_parsers() -> Iterator[None]:
    """Make the parser of a command once, which takes as long as many a command that is tested."""

    @cache
    def kept(command: str | None, _columns: int) -> ArgumentParser:
        return make_parser(command)

    def parser_of(first: str | None = None) -> ArgumentParser:
        command = first if first in COMMANDS else None
        return kept(command, shutil.get_terminal_size().columns)  # which wraps its help

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otel_limits.cli.parser.make_parser", parser_of)
        yield


@pytest.fixture(autouse=True)
def barrier() -> Iterator[None]:
    """Fail a test that, with its fixtures, needs more than this process."""
    yield
    if BREACHES:
        pytest.fail(f"A unit test {'; '.join(BREACHES)}. Move it to another folder of tests.")
