"""Limits for one Strands agent, passed to its constructor."""

import otel_limits.runtime.runtime  # noqa: F401  sets the host of each framework
from otel_limits.bindings.known import require
from otel_limits.bindings.strands.strands_framework import STRANDS

require(STRANDS, "LimitsPlugin")

from otel_limits.bindings.strands.limits_plugin import LimitsPlugin  # noqa: E402

__all__ = ["LimitsPlugin"]
