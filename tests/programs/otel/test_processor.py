"""Processes that record no spans halt at their limits."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from opentelemetry import context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def unsampled() -> Iterator[None]:
    """Run under an incoming `traceparent` whose sender does not sample."""
    carrier = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
    token = context.attach(TraceContextTextMapPropagator().extract(carrier))
    yield
    context.detach(token)


APPLICATION = """
import logging, sys
import otel_limits
from otel_limits.testing import ScriptedModel, endless, uses
from strands import Agent, tool

if "provider" in sys.argv:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    trace.set_tracer_provider(TracerProvider())

@tool
def search() -> str:
    "Search."
    return "nothing"

otel_limits.enable()
model = ScriptedModel(endless(uses("search")))
result = Agent(model=model, tools=[search], callback_handler=None)("go")
from prometheus_client import REGISTRY
unsampled = REGISTRY.get_sample_value(
    "otel_limits_unsampled_invocations_total", {"agent": "Strands Agents"}
)
print(model.calls, result.stop_reason, unsampled)
"""


@pytest.mark.parametrize(
    ("arguments", "variables", "unsampled"),
    [
        ([], {}, 1.0),
        (["provider"], {}, 0.0),
        (["provider"], {"OTEL_SDK_DISABLED": "true"}, 1.0),
        (["provider"], {"OTEL_TRACES_SAMPLER": "always_off"}, 1.0),
    ],
    ids=["no provider", "provider", "disabled", "always_off"],
)
def test_configured_process_halts_with_any_spans(
    arguments: list[str], variables: dict[str, str], unsampled: float
) -> None:
    """An application with nothing but the variable is halted at 3, whatever its span settings."""
    done = subprocess.run(
        [sys.executable, "-c", APPLICATION, *arguments],
        env={"OTEL_LIMITS_MAX_TURNS": "3", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["3", "max_turns", str(unsampled)]
