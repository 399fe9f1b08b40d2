"""Write access to the policy file, which tools of an agent share with its user."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CHANGEABLE: Final = (
    "Agents that run as this user can change policy file {path}, e.g. with a shell tool. "
    "To prevent this, run them as a user that owns neither the file nor its directory, or mount "
    "the file read-only."
)


def is_changeable(path: str) -> bool:
    """Return whether the user of this process can write, replace or take over a file.

    False on Windows, where neither modes nor `os.access` show who can write a file.
    """
    if not hasattr(os, "getuid"):
        return False
    try:
        return any(map(_is_under_control, _places(Path(path))))
    except OSError:
        return False


def is_shared(path: str) -> bool:
    """Return whether a file belongs to another user, or can be written by every user.

    A file that its user can change is usual on the machine of a developer; this is a mistake.
    """
    try:
        status = Path(path).stat()
    except OSError:  # just removed
        return False
    return status.st_uid != os.getuid() or bool(status.st_mode & stat.S_IWOTH)


def _places(path: Path) -> Iterator[Path]:
    """Yield a file and the directories and links that lead to it, up to a read-only file system.

    A user that can change one of these can replace the file.
    """
    for start in dict.fromkeys((path.resolve(strict=True), path.absolute())):
        for place in (start, *start.parents):
            # A file mounted on its own cannot be renamed, so its directory does not matter. A link
            # to it can be replaced.
            if not place.is_symlink():
                if os.statvfs(place).f_flag & os.ST_RDONLY:
                    break
                yield place


def _is_under_control(place: Path) -> bool:
    """Return whether this user can write to a file, or replace files in a directory."""
    status = place.stat()
    # The owner can change the mode.
    if status.st_uid == os.getuid():
        return True
    # In a sticky directory, such as /tmp, users can only replace their own files.
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return os.access(place, os.W_OK) and not (is_sticky and os.getuid() != 0)
