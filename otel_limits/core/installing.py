"""The command that installs otel-limits with more extras, from where it was installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from otel_limits.core.secrets import redact_url

NAME: Final = "otel-limits"


def install_command(*extras: str, option: str = "") -> str:
    """Return the command that adds extras to this installation, with an option of `pip install`.

    It names the checkout, the file or the repository that this installation is from, or else the
    package index. Source: https://packaging.python.org/en/latest/specifications/direct-url/, read
    2026-11-29.
    """
    install, origin = f"pip install {option} ".replace("  ", " "), _origin()
    url, named = origin.get("url", ""), f"{NAME}[{','.join(extras)}]" if extras else NAME
    path = Path(unquote(urlsplit(url).path))
    if url.startswith("file:") and path.exists():  # not a wheel that only built an image
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"{install}{editable}'{path}{named.removeprefix(NAME)}'"
    if url.startswith(("http:", "https:", "ssh:")):
        kind = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
        return f"{install}'{named} @ {kind}{redact_url(url)}'"
    return f"{install}'{named}'"


def _origin() -> dict[str, Any]:
    """Return where this distribution was installed from; empty for a package index."""
    try:
        text = distribution(NAME).read_text("direct_url.json")
        found: dict[str, Any] = json.loads(text or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return found
