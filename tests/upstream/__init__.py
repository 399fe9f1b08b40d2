"""Runs the unit tests of frameworks with otel-limits and without: `python -m tests.upstream`."""
