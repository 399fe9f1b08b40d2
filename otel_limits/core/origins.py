"""Where a limit is set: a variable, an option, or a line of a file or of the application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from otel_limits.core.limits import Limits

PACKAGE: Final = "otel_limits"

PREFIX: Final = "OTEL_LIMITS_"
"""The beginning of each variable's name."""

PRESET: Final = "preset "
"""The beginning of the origin of a limit that a preset sets."""

RUN: Final = "otel-limits run"
"""The command that an option belongs to, as the first words of its origin."""

EXTENSION: Final = "the answer that extended it"
"""The origin of a limit that a person extended."""


def origins_of(limits: Limits, origin: str, prefix: str = "") -> dict[str, str]:
    """Return the origin of each cap, for caps of single tools by tool."""
    origins: dict[str, str] = {}
    for name, cap in limits.items():
        # Two places can each cap different tools, and both apply.
        names = [f"{name}.{tool}" for tool in cap] if isinstance(cap, Mapping) else [name]
        origins |= dict.fromkeys((prefix + each for each in names), origin)
    return origins


def file_name(path: str) -> str:
    """Return a path without its folders.

    Models and users read it, and the paths of a machine do not concern them.
    """
    return path.replace("\\", "/").rpartition("/")[2]


def _location(path: str, line: int) -> str:
    # ipykernel generates a file name for each cell: ipykernel_4711/1490997570.py.
    folders = path.replace("\\", "/").split("/")[:-1]
    if folders and folders[-1].startswith("ipykernel_"):
        return f"a cell of the notebook, line {line}"
    return f"{file_name(path)}:{line}"


def caller_location(entry_point: str) -> str:
    """Return the application's line that called this package, e.g. `app.py:12 (enable)`."""
    import inspect  # only needed for limits that are set in code

    # The first frame outside this package: `enable` may be called by the plugin.
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != PACKAGE:
            return f"{_location(frame.f_code.co_filename, frame.f_lineno)} ({entry_point})"
        frame = frame.f_back
    return entry_point
