"""Fixtures of other folders that the nightly tests use."""

from __future__ import annotations

from tests.ledger.fixtures import ledger
from tests.quotas.fixtures import redis_installed

__all__ = ["ledger", "redis_installed"]
