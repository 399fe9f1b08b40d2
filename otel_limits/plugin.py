"""Limits for one agent, passed to its constructor."""

import otel_limits.runtime.runtime  # noqa: F401  sets the host of each framework
from otel_limits.bindings.strands.limits_plugin import LimitsPlugin

__all__ = ["LimitsPlugin"]
