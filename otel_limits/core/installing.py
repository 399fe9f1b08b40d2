"""The command that installs otel-limits with more extras, from where it was installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from otel_limits.core.secrets import redact_url

NAME: Final = "otel-limits"


def install_command(*extras: str) -> str:
    """Return the command that adds extras to this installation.

    It names the checkout, the file or the repository that this installation is from, or else the
    package index. Source: https://packaging.python.org/en/latest/specifications/direct-url/, read
    2026-11-29.
    """
    origin = _origin()
    url, named = origin.get("url", ""), f"{NAME}[{','.join(extras)}]" if extras else NAME
    if "vcs_info" in origin:
        return f"pip install '{named} @ {origin['vcs_info']['vcs']}+{redact_url(url)}'"
    if not url.startswith("file:"):
        return f"pip install '{named}'"
    path = unquote(urlsplit(url).path)
    if not Path(path).exists():  # e.g. a wheel that was only copied to build an image
        return f"pip install '{named}'"
    option = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {option}'{path}{named.removeprefix(NAME)}'"


def _origin() -> dict[str, Any]:
    """Return where this distribution was installed from; empty for a package index."""
    try:
        text = distribution(NAME).read_text("direct_url.json")
        found: dict[str, Any] = json.loads(text or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return found
