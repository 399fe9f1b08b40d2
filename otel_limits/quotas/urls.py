"""Where quotas can be counted: which URLs are known, and of what kind each is."""

from __future__ import annotations

import re
from typing import Final

MEMORY_URL: Final = "memory://"
"""Counts in each process by itself."""

PLAIN_URL: Final = re.compile(r"(rediss?|valkeys?|unix)://.+")
CLUSTER_URL: Final = re.compile(r"(rediss?|valkeys?)\+cluster://.+")
SENTINEL_URL: Final = re.compile(
    r"(redis|valkey)\+sentinel://(?P<hosts>[^/,:]+:\d+(?:,[^/,:]+:\d+)*)/(?P<service>[^/?]+)"
)
CUT_PASSWORD: Final = re.compile(r"(rediss?|valkeys?)(\+cluster)?://[^?]*/[^?]*@")
"""A password with a `/` in it: what stands before that would be taken for the host and its port."""


def require_store_url(name: str, url: str) -> str:
    """Return `url`, or list what it may be.

    Raises:
        ValueError: No store is known for it.
    """
    known = (PLAIN_URL, CLUSTER_URL, SENTINEL_URL)
    if url == MEMORY_URL or any(pattern.fullmatch(url) for pattern in known):
        return url
    raise ValueError(
        f"{name} must be memory://, redis://host:port/db, rediss://…, unix://path, "
        "redis+cluster://host:port or redis+sentinel://host:port,host:port/service "
        f"(valkey means the same as redis), got one with the scheme {url.partition(':')[0]!r}."
    )
