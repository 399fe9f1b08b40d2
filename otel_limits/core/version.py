"""The version of otel-limits."""

import functools
from importlib.metadata import PackageNotFoundError, version


@functools.cache  # it is in a file, which takes a millisecond to parse
def own_version() -> str:
    """Return the version of otel-limits; a frozen application may lack its metadata."""
    try:
        return version("otel-limits")
    except PackageNotFoundError:
        return "unknown"
