"""Oldest supported versions of Redis and Valkey."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# ZADD GT, which keeps the lists of keys, came with Redis 6.2. 7.2 is the first Valkey.
OLDEST: Final = {"Redis": (6, 2), "Valkey": (7, 2)}

VERSION: Final = re.compile(r"(\d+)\.(\d+)")


def outdated(info: Mapping[str, Any]) -> str:
    """Return what is wrong with a server's version; empty if nothing is, or it is unknown.

    Args:
        info: The server's reply to `INFO server`.
    """
    # Valkey also reports the Redis version that it is compatible with.
    product = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get(f"{product.lower()}_version", "")).strip()
    found = VERSION.match(version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST[product]:
        return ""
    oldest = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in OLDEST.items())
    return f"the server is {product} {version}, but quotas need {oldest} or later. Upgrade it."
