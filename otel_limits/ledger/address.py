"""The address of a ledger: a file or a PostgreSQL database. Its password is never shown."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from otel_limits.core.installing import install_command
from otel_limits.core.secrets import quote_value, redact_value
from otel_limits.ledger.files import temporary_directory

SQLITE: Final = "sqlite:///"
POSTGRESQL: Final = ("postgresql", "postgres", "postgresql+psycopg")
IN_MEMORY: Final = re.compile(r"^:memory:$|^file:(:memory:|.*[?&]mode=memory)")
"""Names that SQLite treats as a database in memory, not as a file."""
NAMING: Final = ("user=", "host=", "hostaddr=", "port=", "dbname=", "service=")
"""Parameters of a PostgreSQL address that name the database; the others configure the
connection."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Address:
    """The address of a ledger.

    Printing it never shows a password.
    """

    url: str
    """For SQLAlchemy, password included."""
    file: Path | None
    """The SQLite file, `None` for a server."""
    name: str
    """The whole address without a password, as recorded in its spill files."""
    spills: tuple[Path, ...]
    """Path prefixes of its spill files, in the order in which they are tried."""
    group: int | None = None
    """Group that may read its files."""

    def __str__(self) -> str:
        """Return the address without a password."""
        shown = redact_value(self.url if self.file is None else str(self.file))
        # File names may contain bytes that are not text, which no log accepts.
        return shown.encode("utf-8", "backslashreplace").decode()

    @property
    def recovery(self) -> str:
        """A command that copies the readable rows of a damaged SQLite file to a new one."""
        return f"sqlite3 {shlex.quote(str(self))} .recover | sqlite3 recovered.db"

    def __repr__(self) -> str:
        """Return the same, recognisable."""
        return f"Address({self})"


def parse(name: str, text: str, data_directory: Path | None) -> Address:
    """Parse an address.

    Args:
        name: Its name in errors.
        text: A path, `sqlite:///PATH` or `postgresql://…`.
        data_directory: Where rows wait while a server is unavailable; `None` if there is none, as
            for a user without a home directory.

    Raises:
        ValueError: It is not an address, or the driver of its server is not installed.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme == "sqlite":
        return _file(name, text, data_directory)
    if scheme not in POSTGRESQL:
        raise ValueError(
            f"{name} must be a path, sqlite:///PATH or postgresql://HOST/DATABASE, got "
            f"{quote_value(text)}."
        )
    if importlib.util.find_spec("psycopg") is None:
        raise ValueError(
            f"{name} names a PostgreSQL database, but its driver is not installed. "
            f"Run: {install_command('postgres')}"
        )
    url = "postgresql+psycopg" + text[len(scheme) :]
    _require_readable(name, url)
    full = server_name(url)
    return Address(
        url=url,
        file=None,
        name=full,
        spills=_places(full, data_directory),
    )


def _require_readable(name: str, url: str) -> None:
    """Reject what the client cannot parse, as its own message would quote parts of a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        is_readable = "@" not in (make_url(url).host or "") and bool(server_name(url))
    except (ArgumentError, ValueError):
        is_readable = False
    if not is_readable:
        raise ValueError(
            f"{name} is not a URL that SQLAlchemy can parse: {quote_value(url)}. The port must be "
            "a number; in a password, write %2F for /, %3F for ?, %23 for # and %40 for @."
        )


def _file(name: str, text: str, data_directory: Path | None) -> Address:
    path = text.removeprefix(SQLITE)
    shown = quote_value(text)
    if not path or IN_MEMORY.search(path):
        raise ValueError(f"{name} must name a file, got {shown}. A ledger in memory would be lost.")
    if path.startswith("sqlite:"):
        raise ValueError(
            f"{name} must be a path or sqlite:///PATH, with three slashes and the path, got "
            f"{shown}."
        )
    # It would be read as parameters, which could have any effect.
    if text.startswith(SQLITE) and "?" in path:
        raise ValueError(
            f"{name} must be sqlite:///PATH without parameters, got {shown}. Remove the "
            "parameters, or, if the ? is part of the file name, use PATH without sqlite:///."
        )
    try:
        file = Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user, or a deleted directory
        reason = str(error).rstrip(".")
        raise ValueError(f"{name} is {shown}: {reason}. Use an absolute path.") from None
    # Checked for directories that may not exist yet, too.
    if not file.name:
        raise ValueError(
            f"{name} must name a file, and {shown} is a directory. Use a file in it: "
            f"{file / 'ledger.db'}"
        )
    if _is_special(file):
        raise ValueError(
            f"{name} must name a file, got {shown}, which is a device, pipe or socket. To record "
            "nothing, use: none"
        )
    full = os.path.realpath(file)
    places = (file, *_places(full, data_directory))
    return Address(url=f"{SQLITE}{file}", file=file, name=full, spills=places)


def _is_special(file: Path) -> bool:
    """Return whether this is neither a file nor a directory, nor free for a new one."""
    try:
        mode = file.stat().st_mode
    except OSError:  # an unreadable directory is reported when the ledger is opened
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def server_name(url: str) -> str:
    """Name a database of a server by user, host, port and database; the password may change."""
    # Not by `urlsplit` alone: a password may contain any character here.
    credentials, _, place = url.partition("://")[2].rpartition("@")
    user, parts = credentials.partition(":")[0], urlsplit(f"postgresql://{place}")
    query = "&".join(sorted(each for each in parts.query.split("&") if each.startswith(NAMING)))
    return urlunsplit(("postgresql", f"{user}@{parts.netloc}", parts.path, query, ""))


def database_of(name: str) -> str:
    """Return a server's name without user and host: the database."""
    return urlsplit(name).path


def _places(full: str, data_directory: Path | None) -> tuple[Path, ...]:
    """List where rows can wait apart from the ledger, under a name of their ledger."""
    directories = (data_directory, temporary_directory())
    # As the file system has it: a path may contain bytes that are not text.
    digest = hashlib.blake2s(os.fsencode(full), digest_size=6).hexdigest()
    return tuple(each / f"ledger-{digest}" for each in directories if each is not None)
