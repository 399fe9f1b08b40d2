"""Fixtures of tests of the ledger."""

from __future__ import annotations

from tests.ledger.fixtures import ledger, week

__all__ = ["ledger", "week"]
