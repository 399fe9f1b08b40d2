"""Reads facts from YAML files, on first use."""

from __future__ import annotations

import logging  # noqa: F401  before a fork, our lock comes before that of logging
import os
import pkgutil
import threading
from pathlib import Path
from typing import Any, Final

LOADING: Final = threading.RLock()
"""Held while a package is imported on first use: a process forked during the import would wait
forever for it to finish, in a thread that does not exist there. The fork waits instead."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=LOADING.acquire,
        after_in_parent=LOADING.release,
        after_in_child=LOADING.release,
    )


def facts(file: str) -> Any:
    """Return the contents of a file of this package, such as `vendors/openai.yaml`."""
    text = pkgutil.get_data("otel_limits", file)
    assert text is not None  # as every loader of packages has data
    with LOADING:
        import yaml

        # PyYAML may be built without the parser in C, which is ten times faster.
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506


def hook_directories() -> list[str]:
    """Return where PyInstaller finds how to include the files."""
    return [str(Path(__file__).parent)]
