"""The table of stores: the URLs of each kind, and what adding a new kind takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.redis_store import RedisStore
from otel_limits.runs.registry import LIVE
from tests.quotas.fixtures import eventually

if TYPE_CHECKING:
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


IN_MEMORY = """
import sys
import otel_limits
from strands import Agent
from otel_limits.runs.registry import LIVE
from otel_limits.testing import ScriptedModel, says
otel_limits.enable()
agent = Agent(model=ScriptedModel([says("done")]), callback_handler=None)
print([agent("go").stop_reason for _ in range(2)])
sys.exit(any(name.startswith(("redis", "otel_limits.quotas.redis")) for name in sys.modules))
"""


@pytest.mark.parametrize("url", [None, "memory://"])
def test_quotas_in_memory_import_no_client(url: str | None, tmp_path: Path) -> None:
    """Users without Redis neither need its client nor pay for its import."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {calls: {model_calls: 1, window: month}}")
    variables = {"OTEL_LIMITS_POLICY": str(policy)}
    if url is not None:
        variables["OTEL_LIMITS_QUOTA_STORE"] = url
    done = subprocess.run(
        [sys.executable, "-c", IN_MEMORY],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "['end_turn', 'quota_exceeded']\n")
