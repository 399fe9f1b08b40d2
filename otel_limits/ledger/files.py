"""Files and directories of a ledger: made for their owner alone, or for a group of auditors too."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import stat
import tempfile
from pathlib import Path
from typing import IO, Any, Final

from otel_limits.core.secrets import redact_url

grp: Any = importlib.import_module("grp") if importlib.util.find_spec("grp") else None
"""Missing on Windows, where files belong to their user's profile."""

NO_LINKS: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def group_id(name: str, text: str) -> int:
    """Read the name, or the number, of a group.

    Raises:
        ValueError: There is no such group.
    """
    if grp is None:
        raise ValueError(
            f"{name} is {redact_url(text)!r}, but this system has no groups of users. Unset it."
        )
    try:
        return int(text) if text.isdigit() else int(grp.getgrnam(text).gr_gid)
    except KeyError:
        raise ValueError(
            f"{name} must be a group of this system, got {redact_url(text)!r}. getent group lists them."
        ) from None


def make_directory(path: Path, group: int | None = None) -> None:
    """Make a directory and what it is in, 0700 each, or 0750 for a group; others stay as they are.

    Raises:
        OSError: It cannot be made.
    """
    if path.is_dir():
        return
    make_directory(path.parent, group)
    # Two processes may make it at once; whoever comes second finds it.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        if group is not None:
            # The group first: in between it would be open to the group of the process.
            os.chown(path, -1, group)
            path.chmod(0o750)


def create(path: Path, group: int | None = None) -> IO[bytes]:
    """Create a file, 0600, or 0640 for a group, and open it unbuffered.

    Raises:
        OSError: It is there already, or cannot be made.
    """
    # O_EXCL and no links: somebody else may have put a file of this name in a shared directory.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o600)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        if group is not None:
            share(path, group)
    except OSError:
        file.close()
        raise
    return file


def share(path: Path, group: int) -> None:
    """Let a group read a file of ours.

    Raises:
        OSError: We are not in that group, or the file is not ours.
    """
    os.chown(path, -1, group)
    path.chmod(0o640)


def open_existing(path: Path) -> IO[bytes] | None:
    """Open a regular file for reading, `None` where there is none: a link could lead anywhere."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | NO_LINKS), "rb")
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None


def temporary_directory() -> Path | None:
    """The directory of this user among everybody's temporary files; it need not exist."""
    user = getattr(os, "geteuid", None)
    return None if user is None else Path(tempfile.gettempdir()) / f"otel-limits-{user()}"


def is_own_directory(path: Path) -> bool:
    """Tell whether a directory is not a link, and only this user can enter it.

    Anybody can make one of any name among the temporary files.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return False
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return is_private and found.st_uid == os.geteuid()
