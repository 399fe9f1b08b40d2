"""A store without channels is polled for kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_store import RedisStore
from otel_limits.runs.registry import LIVE
from tests.quotas.fixtures import eventually

if TYPE_CHECKING:
    import pytest

    from otel_limits.quotas.store import (
        SharedStore,
    )
    from tests.quotas.fixtures import Hold, Server


def test_store_without_channels_is_polled_for_kills(
    hold: Hold,
    server: Server,
    store: SharedStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Channels are optional, so a store that lacks them is no reason for a warning."""
    received: list[str] = []

    def kill(*, agent: str, before: float) -> int:
        received.append(agent)
        return int(before)

    monkeypatch.setattr(LIVE, "kill", kill)
    monkeypatch.setattr(RedisStore, "has_channels", False)
    hold({}, server.url)
    caplog.clear()
    eventually(lambda: bool(store.kill("research-*") or received))
    assert not server.client.pubsub_channels(KeyNames().kill_channel)
    assert "cannot subscribe" not in caplog.text
