"""The command line: `otel_limits.cli:main` is what the console script calls."""

from otel_limits.cli.parser import main

__all__ = ["main"]
