"""Guarantees of quotas on a server that do not depend on the machine's speed.

Timings are checked by `python -m tests.benchmarks.quotas`, which exits with 1 on a missed target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.benchmarks import quotas

if TYPE_CHECKING:
    from tests.quotas.fixtures import Server


@pytest.mark.parametrize("held", [1, 4])
def test_call_leaves_at_most_120_bytes_in_the_store(server: Server, held: int) -> None:
    """For an hour, independent of the number of quotas."""
    for_a_call, _ = quotas.kept(server, held, calls=500)
    assert for_a_call <= 120
