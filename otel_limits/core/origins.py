"""Where a limit is set, in words: a variable, a line of a file, or a line of the application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from otel_limits.core.limits import Limits

PACKAGE: Final = "otel_limits"

EXTENSION: Final = "the answer that extended it"
"""Where a limit is set that a human was asked about, and gave more."""


def origins_of(limits: Limits, origin: str, prefix: str = "") -> dict[str, str]:
    """Say of each cap that it comes from one place; of caps of single tools, tool by tool."""
    origins: dict[str, str] = {}
    for name, cap in limits.items():
        # Two places can each cap other tools, and both hold.
        names = [f"{name}.{tool}" for tool in cap] if isinstance(cap, Mapping) else [name]
        origins |= dict.fromkeys((prefix + each for each in names), origin)
    return origins


def file_name(path: str) -> str:
    """Return a path without its folders.

    The sentence that it is for reaches models and users, who have nothing to do with the paths of a
    machine.
    """
    return path.replace("\\", "/").rpartition("/")[2]


def _place(path: str, line: int) -> str:
    # ipykernel makes up a file for each cell, which nobody can open: ipykernel_4711/1490997570.py.
    folders = path.replace("\\", "/").split("/")[:-1]
    if folders and folders[-1].startswith("ipykernel_"):
        return f"a cell of the notebook, line {line}"
    return f"{file_name(path)}:{line}"


def caller_location(door: str) -> str:
    """Return where the application came in by a name of this package, as `app.py:12 (enable)`."""
    import inspect  # only whoever sets a limit in code needs it

    # Up to the first frame that is not ours: `enable` may be reached through the plugin.
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != PACKAGE:
            return f"{_place(frame.f_code.co_filename, frame.f_lineno)} ({door})"
        frame = frame.f_back
    return door
