"""Fixtures of tests of the ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import postgresql as servers
from tests.ledger.fixtures import ledger, program

__all__ = ["ledger", "program"]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[servers.Server]:
    """One server for all tests of this process, each with its own database."""
    with servers.running() as server:
        yield server
