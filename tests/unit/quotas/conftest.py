"""Fixtures of tests of quotas that need no server."""

from __future__ import annotations

from tests.quotas.fixtures import hold

__all__ = ["hold"]
