"""LangSmith's client sets its own tracer provider, which replaces ours."""

from __future__ import annotations

import pytest
from langsmith import Client
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.util._once import Once
from strands.telemetry import tracer as strands_tracer

from otel_limits import Event, Limits, enable
from otel_limits.otel.provider import FallbackProvider
from otel_limits.runtime.runtime import RUNTIME
from tests.unit.otel.test_provider import call_strands


@pytest.fixture(autouse=True)
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no tracer provider yet, as if it had just started."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    monkeypatch.setattr(strands_tracer, "_tracer_instance", strands_tracer.Tracer())


@pytest.fixture
def limited(events: list[Event]) -> None:
    """As `otel-limits run` enables limits."""
    enable(Limits(max_turns=3), observers=[events.append])
    RUNTIME.provide_when_missing()


@pytest.mark.usefixtures("limited")
def test_langsmith_client_created_in_a_run_sets_its_provider() -> None:
    """LangChain creates the client at its first call, which is the first agent call."""
    call_strands()
    client = Client(
        api_url="http://127.0.0.1:1", api_key="x", tracing_mode="otel", auto_batch_tracing=False
    )
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    assert not isinstance(provider, FallbackProvider)
    assert client.otel_exporter is not None
    provider.shutdown()
    client.cleanup()
