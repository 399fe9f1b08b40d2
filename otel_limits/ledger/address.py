"""Where a ledger is: a file, or a PostgreSQL database, whose password is never shown."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from otel_limits.core.secrets import redact_url
from otel_limits.ledger.files import temporary_directory

SQLITE: Final = "sqlite:///"
POSTGRESQL: Final = ("postgresql", "postgres", "postgresql+psycopg")
IN_MEMORY: Final = re.compile(r"^:memory:$|^file:(:memory:|.*[?&]mode=memory)")
"""What SQLite takes for a database in memory, and not for the name of a file."""
NAMING: Final = ("user=", "host=", "hostaddr=", "port=", "dbname=", "service=")
"""Parameters of a PostgreSQL address that name the database; the others say how to talk to it."""


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
    """The whole address without a password: what its spill files say they belong to."""
    spills: tuple[Path, ...]
    """Beginnings of the paths of its spill files, in the order in which they are tried."""
    group: int | None = None
    """Of those who may read its files besides their owner."""

    def __str__(self) -> str:
        """The address as a user may see it."""
        shown = redact_url(self.url if self.file is None else str(self.file))
        # The name of a file may have bytes that are not text, which no log could be written with.
        return shown.encode("utf-8", "backslashreplace").decode()

    def __repr__(self) -> str:
        """The same, recognisable."""
        return f"Address({self})"


def parse(name: str, text: str, data_directory: Path | None) -> Address:
    """Read an address.

    Args:
        name: What it is called in errors.
        text: A path, `sqlite:///PATH` or `postgresql://…`.
        data_directory: Where the rows of a server wait while it cannot be reached; `None` where
            nobody knows, as a user may have no home directory.

    Raises:
        ValueError: It is not such an address, or the driver of its server is not installed.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme == "sqlite":
        return _file(name, text, data_directory)
    if scheme not in POSTGRESQL:
        raise ValueError(
            f"{name} must be a path, sqlite:///PATH or postgresql://HOST/DATABASE, got "
            f"{redact_url(text)!r}."
        )
    if importlib.util.find_spec("psycopg") is None:
        raise ValueError(
            f"{name} names a PostgreSQL database, but its driver is not installed. "
            f"Run: pip install 'otel-limits[postgres]'"
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
    """Refuse what the client cannot read, whose own words would quote pieces of a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        is_readable = "@" not in (make_url(url).host or "") and bool(server_name(url))
    except (ArgumentError, ValueError):
        is_readable = False
    if not is_readable:
        raise ValueError(
            f"{name} is not a URL that SQLAlchemy can read: {redact_url(url)!r}. The port must be a "
            "number, and in a password write %2F for /, %3F for ?, %23 for # and %40 for @."
        )


def _file(name: str, text: str, data_directory: Path | None) -> Address:
    path = text.removeprefix(SQLITE)
    shown = redact_url(text)
    if not path or IN_MEMORY.search(path):
        raise ValueError(f"{name} must name a file, got {shown!r}. A ledger in memory is lost.")
    if path.startswith("sqlite:"):
        raise ValueError(
            f"{name} must be a path or sqlite:///PATH, with three slashes and the path, got "
            f"{shown!r}."
        )
    # An address could have parameters there, which would change what this one does not know of.
    if text.startswith(SQLITE) and "?" in path:
        raise ValueError(
            f"{name} must be sqlite:///PATH without parameters, got {shown!r}. Leave out the ? and "
            "what follows it, or, if it belongs to the name of the file, write the path alone."
        )
    try:
        file = Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user, or a directory that is gone
        reason = str(error).rstrip(".")
        raise ValueError(f"{name} is {shown!r}: {reason}. Give the whole path.") from None
    # Any other directory may be gone soon, and the rows wait for that: whoever asks is told.
    if not file.name:
        raise ValueError(
            f"{name} must name a file, and {shown!r} is a directory. Name a file in it: "
            f"{file / 'ledger.db'}"
        )
    full = os.path.realpath(file)
    places = (file, *_places(full, data_directory))
    return Address(url=f"{SQLITE}{file}", file=file, name=full, spills=places)


def server_name(url: str) -> str:
    """Name a database of a server by user, host, port and database: a password may change."""
    # Not by `urlsplit` alone: a password may have any characters here.
    credentials, _, place = url.partition("://")[2].rpartition("@")
    user, parts = credentials.partition(":")[0], urlsplit(f"postgresql://{place}")
    query = "&".join(sorted(each for each in parts.query.split("&") if each.startswith(NAMING)))
    return urlunsplit(("postgresql", f"{user}@{parts.netloc}", parts.path, query, ""))


def database_of(name: str) -> str:
    """What is left of a server's name without user and host: the database."""
    return urlsplit(name).path


def _places(full: str, data_directory: Path | None) -> tuple[Path, ...]:
    """Where rows wait that cannot be kept beside the ledger: no two ledgers share a name there."""
    directories = (data_directory, temporary_directory())
    return tuple(each / f"ledger-{_digest(full)}" for each in directories if each is not None)


def _digest(text: str) -> str:
    # As the file system has it: a path may hold bytes that are not text.
    return hashlib.blake2s(os.fsencode(text), digest_size=6).hexdigest()
