"""Benchmarks of the overhead of otel-limits."""
