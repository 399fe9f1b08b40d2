"""Fixtures of other folders that the nightly tests use."""

from __future__ import annotations

from tests.quotas.fixtures import redis_installed

__all__ = ["redis_installed"]
