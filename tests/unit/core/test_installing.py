"""The command in hints that installs an extra works from where otel-limits was installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from otel_limits.core import installing
from otel_limits.core.installing import install_command

if TYPE_CHECKING:
    from pathlib import Path

REPOSITORY = "https://example.com/otel-limits.git"


def test_command_installs_from_the_origin_of_this_installation(tmp_path: Path) -> None:
    """Before a release, no index has otel-limits; afterwards, most installations are from one."""
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    of = {"url": checkout.as_uri()}
    rows: dict[str, tuple[Any, str]] = {
        "index": (None, "'otel-limits[redis]'"),
        "checkout": (of | {"dir_info": {}}, f"'{checkout}[redis]'"),
        "editable": (of | {"dir_info": {"editable": True}}, f"-e '{checkout}[redis]'"),
        "wheel that is gone": (
            {"url": "file:///gone/otel_limits-1-py3-none-any.whl", "archive_info": {}},
            "'otel-limits[redis]'",
        ),
        "repository": (
            {"url": REPOSITORY, "vcs_info": {"vcs": "git", "commit_id": "1"}},
            f"'otel-limits[redis] @ git+{REPOSITORY}'",
        ),
        "address": (
            {"url": "https://example.com/otel_limits.whl", "archive_info": {}},
            "'otel-limits[redis] @ https://example.com/otel_limits.whl'",
        ),
        "unreadable": ("{", "'otel-limits[redis]'"),
    }
    for name, (origin, expected) in rows.items():
        text = origin if origin is None or isinstance(origin, str) else json.dumps(origin)
        with patch.object(installing, "distribution") as found:
            found.return_value.read_text.return_value = text
            assert install_command("redis") == f"pip install {expected}", name


def test_command_without_metadata_names_the_index() -> None:
    """Tools that make small images delete the metadata."""
    with patch.object(installing, "distribution", side_effect=PackageNotFoundError):
        assert install_command("otlp", "redis") == "pip install 'otel-limits[otlp,redis]'"
        again = install_command(option="--force-reinstall")
        assert again == "pip install --force-reinstall 'otel-limits'"
