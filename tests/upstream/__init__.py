"""Runs Strands' own tests with otel-limits switched on, and without: `python -m tests.upstream`."""
