"""Fixtures of tests of the ledger."""

from __future__ import annotations

from tests.ledger.fixtures import ledger

__all__ = ["ledger"]
