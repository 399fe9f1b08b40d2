"""The command line; `main` is the entry point of the console script."""

from otel_limits.cli.parser import main

__all__ = ["main"]
