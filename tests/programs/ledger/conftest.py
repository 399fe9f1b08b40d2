"""Fixtures of tests of the ledger."""

from __future__ import annotations

from tests.ledger.fixtures import ledger, program, week

__all__ = ["ledger", "program", "week"]
