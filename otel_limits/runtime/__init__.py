"""Switches otel-limits on and off in a process."""

from otel_limits.runtime.switch import RUNTIME

__all__ = ["RUNTIME"]
