"""A store and the truth, compared after every step of whatever can happen to a fleet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.windows import Windows
from tests.quotas.truth import Stores, Truth

if TYPE_CHECKING:
    from tests.quotas.conftest import Server, Timed

BEGIN = Windows("day").at(time.time() + 2 * 86_400).start + 12 * 3600.0
"""Noon of a day in the future, so that a server does not find its counts expired."""


def small(examples: int) -> settings:
    """So many examples of thirty steps."""
    return settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def test_memory_and_the_truth_agree_after_every_step() -> None:
    """Never more is admitted than permitted, and nothing stays reserved after settlement."""

    class InMemory(Truth):
        def __init__(self) -> None:
            clock = [0.0]
            store = MemoryStore(lambda: clock[0])
            super().__init__(Stores(store, lambda now: clock.__setitem__(0, now), BEGIN))

    run_state_machine_as_test(InMemory, settings=small(60))


def test_a_server_and_the_truth_agree_after_every_step(timed_store: Timed, server: Server) -> None:
    """The same, with the scripts that ship on a real server."""

    class OnServer(Truth):
        def __init__(self) -> None:
            server.client.flushdb()
            super().__init__(Stores(*timed_store, BEGIN))

    run_state_machine_as_test(OnServer, settings=small(25))
