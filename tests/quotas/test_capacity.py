"""What is promised of quotas on a server, as far as it does not depend on how fast a machine is.

Times are compared by `python -m tests.benchmarks.quotas`, which ends with 1 where a bar is missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.benchmarks import quotas

if TYPE_CHECKING:
    from tests.quotas.conftest import Server


def test_two_hundred_agents_that_ask_at_once_are_all_heard_in_time(server: Server) -> None:
    """In one process, with the timeout that ships."""
    refused, slowest = quotas.many_agents(server, 1)
    assert refused == 0
    assert slowest < quotas.TIMEOUT


@pytest.mark.parametrize("held", [1, 4])
def test_a_call_leaves_little_behind(server: Server, held: int) -> None:
    """At most 120 bytes for an hour, however many quotas apply."""
    for_a_call, _ = quotas.kept(server, held, calls=500)
    assert for_a_call <= 120
