"""Limits for one agent, given to it when it is made."""

from otel_limits import runtime  # noqa: F401  without it no framework knows whom to ask
from otel_limits.bindings.strands.plugin import LimitsPlugin

__all__ = ["LimitsPlugin"]
