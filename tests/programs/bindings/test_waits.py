"""Agents in threads that outlive the main thread, after which no thread pool takes work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.launching import RUN, execute
from tests.otlp.receiver import Received, http_receiver

if TYPE_CHECKING:
    from pathlib import Path

LATE = """
import asyncio, threading
from langchain.agents import create_agent
from otel_limits import stop_of
from otel_limits.testing import ScriptedChatModel, endless, says

agent = create_agent(ScriptedChatModel(endless(says("done"))), [], name="late")

async def call():
    for _ in range(2):
        stop = stop_of(agent.invoke({"messages": "go"}))
        print(stop and stop.reason)

def work():
    threading.main_thread().join()
    asyncio.run(call())

threading.Thread(target=work).start()
"""
"""Calls an agent in an event loop, synchronously."""


def test_late_agent_is_limited_and_traced(tmp_path: Path) -> None:
    """Its quota is asked, and its spans are exported with the attributes of the service."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {calls: {model_calls: 1, window: P1D}}", encoding="utf-8")
    received = Received()
    with http_receiver(received) as endpoint:
        ended = execute(
            *(*RUN, "--policy", str(policy), "--", sys.executable, "-c", LATE),
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
            OTEL_SERVICE_NAME="night",
        )
    assert (ended.status, ended.output.split()) == (0, ["None", "quota_exceeded"])
    assert not [line for line in ended.ours if "halted by quota_exceeded" not in line]
    agents = [span.name for span in received.spans if span.name.startswith("invoke_agent")]
    assert agents == ["invoke_agent late"] * 2
    texts = {each.key: each.value.string_value for each in received.resources[-1].attributes}
    assert texts["service.name"] == "night"
    assert texts["telemetry.sdk.name"] == "opentelemetry"
