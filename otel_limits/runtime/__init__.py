"""Switches otel-limits on and off in a process."""
