"""Where a ledger is: a file, or a PostgreSQL database, whose password is never shown."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

SQLITE: Final = "sqlite:///"
POSTGRESQL: Final = ("postgresql", "postgres", "postgresql+psycopg")
SECRET_QUERY: Final = re.compile(r"(?i)(password|passfile)=[^&]*")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Address:
    """The address of a ledger.

    Printing it never shows a password.
    """

    url: str
    """For SQLAlchemy, password included."""
    file: Path | None
    """The SQLite file, `None` for a server."""
    spills: tuple[Path, ...]
    """Beginnings of the paths of its spill files, in the order in which they are tried."""

    def __str__(self) -> str:
        """The address as a user may see it."""
        return str(self.file) if self.file is not None else without_password(self.url)

    def __repr__(self) -> str:
        """The same, recognisable."""
        return f"Address({self})"


def without_password(url: str) -> str:
    """Return `url` with stars in the place of its password."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user:
        user = user.partition(":")[0] + ":***"
    query = SECRET_QUERY.sub(r"\1=***", parts.query)
    return urlunsplit((parts.scheme, f"{user}{at}{host}", parts.path, query, ""))


def parse(name: str, text: str, data_directory: Path) -> Address:
    """Read an address.

    Args:
        name: What it is called in errors.
        text: A path, `sqlite:///PATH` or `postgresql://…`.
        data_directory: Where the rows of a server wait while it cannot be reached.

    Raises:
        ValueError: It is not such an address, or the driver of its server is not installed.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme == "sqlite":
        return _file(name, text, data_directory)
    if scheme not in POSTGRESQL:
        raise ValueError(
            f"{name} must be a path, sqlite:///PATH or postgresql://HOST/DATABASE, got "
            f"{without_password(text)!r}."
        )
    if importlib.util.find_spec("psycopg") is None:
        raise ValueError(
            f"{name} names a PostgreSQL database, but its driver is not installed. "
            f"Run: pip install 'otel-limits[postgres]'"
        )
    url = "postgresql+psycopg" + text[len(scheme) :]
    digest = hashlib.blake2s(url.encode(), digest_size=6).hexdigest()
    return Address(url=url, file=None, spills=(data_directory / f"ledger-{digest}",))


def _file(name: str, text: str, data_directory: Path) -> Address:
    path = text.removeprefix(SQLITE)
    if not path or path.startswith("sqlite:") or ":memory:" in path or "?" in path:
        raise ValueError(
            f"{name} must name a file, got {text!r}. A ledger in memory would be lost."
        )
    file = Path(path).expanduser().absolute()
    return Address(url=f"{SQLITE}{file}", file=file, spills=(file, data_directory / file.name))
