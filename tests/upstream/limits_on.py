"""A pytest plugin that switches otel-limits on in a process of a framework's own tests.

`tests.upstream` puts this folder on `PYTHONPATH`, so of otel-limits it may import only the
installed package.
"""

from __future__ import annotations

import os
from typing import Final

import pytest
from prometheus_client import REGISTRY

import otel_limits
from otel_limits import Limits

NEVER_REACHED: Final = 1_000_000_000

LIMITS: Final = Limits(
    max_iterations=NEVER_REACHED,
    max_turns=NEVER_REACHED,
    max_token_budget=NEVER_REACHED,
    max_tool_calls=NEVER_REACHED,
    max_duration_seconds=3600,
    max_identical_tool_calls=NEVER_REACHED,
    max_no_progress_turns=NEVER_REACHED,
)
"""One limit of each kind, so that everything is counted and nothing is halted."""

TREE: Final = Limits(max_turns=NEVER_REACHED, max_token_budget=NEVER_REACHED)


def pytest_configure() -> None:
    """Switch it on before a test module imports the framework."""
    if "UPSTREAM_TRACER_PROVIDER" in os.environ:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        trace.set_tracer_provider(TracerProvider())
    if "UPSTREAM_WITHOUT_LIMITS" in os.environ:
        otel_limits.enable()
    else:
        otel_limits.enable(LIMITS, tree=TREE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was followed."""
    terminalreporter.write_line(f"otel-limits followed {followed():.0f} invocations.")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail when nothing was followed: such a run proves nothing."""
    if not followed() and "UPSTREAM_HAS_NO_AGENTS" not in os.environ:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def followed() -> float:
    """Return how many invocations ended in this process, by the metrics."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "otel_limits_stops_total"
    )
