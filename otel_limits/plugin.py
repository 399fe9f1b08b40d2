"""Limits for one agent, given to it when it is made."""

import otel_limits.runtime.runtime  # noqa: F401  frameworks have their host from here on
from otel_limits.bindings.strands.limits_plugin import LimitsPlugin

__all__ = ["LimitsPlugin"]
