"""Files and directories of a ledger, for their owner alone or also for a group of auditors."""

from __future__ import annotations

import contextlib
import getpass
import importlib
import importlib.util
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import IO, Any, Final

from otel_limits.core.secrets import quote_value

grp: Any = importlib.import_module("grp") if importlib.util.find_spec("grp") else None
"""Missing on Windows, where files belong to the user's profile."""

NO_LINKS: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def group_id(name: str, text: str) -> int:
    """Parse the name or number of a group.

    Raises:
        ValueError: There is no such group.
    """
    if grp is None:
        raise ValueError(
            f"{name} is {quote_value(text)}, but this system has no user groups. Unset it."
        )
    try:
        return int(text) if text.isdigit() else int(grp.getgrnam(text).gr_gid)
    except KeyError:
        raise ValueError(
            f"{name} must be a group of this system, got {quote_value(text)}. List them with: "
            "getent group"
        ) from None


def make_directory(path: Path, group: int | None = None) -> None:
    """Create a directory and its parents with mode 0700, or 0750 for a group.

    Existing directories are unchanged.

    Raises:
        OSError: It cannot be created.
    """
    if path.is_dir():
        return
    make_directory(path.parent, group)
    # Another process may create it concurrently.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        if group is not None:
            # The group first: otherwise the group of this process could briefly read it.
            os.chown(path, -1, group)
            path.chmod(0o750)


def create(path: Path, group: int | None = None) -> IO[bytes]:
    """Create a file with mode 0600, or 0640 for a group, and open it unbuffered.

    Raises:
        OSError: It exists, or cannot be created.
    """
    # O_EXCL and no links: another user may have created this name in a shared directory.
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
    """Let a group read one of our files.

    Raises:
        OSError: This user is not in that group, or does not own the file.
    """
    os.chown(path, -1, group)
    path.chmod(0o640)


def open_existing(path: Path) -> IO[bytes] | None:
    """Open a regular file for reading; `None` if there is none. Links are not followed."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | NO_LINKS), "rb")
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None


def is_forbidden(path: Path) -> bool:
    """Return whether this user may not read a file that exists."""
    try:
        os.close(os.open(path, os.O_RDONLY | NO_LINKS))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def user_and_host() -> str:
    """Return the user and host of this process, as the author of a change."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        user = str(getattr(os, "getuid", lambda: "unknown")())
    return f"{user}@{socket.gethostname()}"


def temporary_directory() -> Path | None:
    """Return this user's directory for temporary files, which need not exist."""
    user = getattr(os, "geteuid", None)
    return None if user is None else Path(tempfile.gettempdir()) / f"otel-limits-{user()}"


def is_own_directory(path: Path) -> bool:
    """Return whether a directory is not a link, and only this user can enter it.

    Other users can create any name among the temporary files.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return False
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return is_private and found.st_uid == os.geteuid()
