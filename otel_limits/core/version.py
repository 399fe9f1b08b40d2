"""The version of otel-limits."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of otel-limits; a frozen application may lack its metadata."""
    try:
        return version("otel-limits")
    except PackageNotFoundError:
        return "unknown"
