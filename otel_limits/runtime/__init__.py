"""Enables and disables otel-limits in a process."""
