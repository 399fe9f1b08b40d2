"""Fixtures of tests with programs that record in a ledger."""

from __future__ import annotations

from tests.ledger.fixtures import ledger, program, week

__all__ = ["ledger", "program", "week"]
