"""The table of places where quotas can be counted. A new store is one file and one line in it."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, cast

from otel_limits.core.installing import install_command

if TYPE_CHECKING:
    from otel_limits.quotas.store import QuotaStore, SharedStore, StorePlace

MEMORY_URL: Final = "memory://"
"""Counts in each process by itself."""


@dataclass(frozen=True, slots=True)
class StoreKind:
    """One kind of store."""

    form: str
    """Its URL form, for messages."""
    pattern: str
    """Its URLs, as a regular expression."""
    example: str
    """A store on this machine; tests use it unless `OTEL_LIMITS_TEST_<MODULE>` names another."""
    module: str
    """Its module in this package, a `StoreModule`."""
    extra: str = ""
    """The extra that installs its client."""
    is_shared: bool = True
    """Whether processes share it."""


class StoreModule(Protocol):
    """The interface of a store module."""

    def require_readable(self, name: str, url: str) -> None:
        """Verify, without connecting, that a URL that matches the pattern is usable.

        Raises:
            ValueError: It is not; the message begins with `name` and contains no secret.
        """

    def open_store(self, place: StorePlace) -> QuotaStore:
        """Make the store, without connecting; a `SharedStore` where its kind is shared."""


STORES: Final = (
    StoreKind(MEMORY_URL, "memory://", MEMORY_URL, "memory", is_shared=False),
    StoreKind(
        "redis://host:port/db, rediss://…, unix://path",
        "(rediss?|valkeys?|unix)://.+",
        "redis://localhost:6379/0",
        "redis_server",
        "redis",
    ),
    StoreKind(
        "redis+cluster://host:port,host:port",
        r"(rediss?|valkeys?)\+cluster://.+",
        "redis+cluster://localhost:7000",
        "redis_cluster",
        "redis",
    ),
    StoreKind(
        "redis+sentinel://host:port,host:port/service/db (valkey is an alias for redis)",
        r"(redis|valkey)\+sentinel://([^@/]*@)?[^/,:@]+:\d+(,[^/,:]+:\d+)*/[^/?]+(/\d+)?(\?.*)?",
        "redis+sentinel://localhost:26379/mymaster/0",
        "redis_sentinel",
        "redis",
    ),
)
"""Every kind of store. Its file is imported on use: only who uses Redis needs its client."""


def require_store_url(name: str, url: str) -> str:
    """Return the URL of a store, as the setting `name` has it.

    Raises:
        ValueError: No store has such a URL, or its client is not installed or cannot read it.
    """
    kind = _kind_of(name, url)
    try:
        module = _module_of(kind)
    except ImportError:
        raise ValueError(f"{name} needs a client. Run: {install_command(kind.extra)}") from None
    module.require_readable(name, url)
    return url


def is_shared(url: str) -> bool:
    """Return whether processes share the store."""
    return _kind_of("url", url).is_shared


def open_store(place: StorePlace) -> QuotaStore:
    """Create a store for one thread, without connecting."""
    return _module_of(_kind_of("url", place.url)).open_store(place)


def open_shared_store(place: StorePlace) -> SharedStore:
    """Create a shared store for one thread, without connecting.

    Args:
        place: Its settings; `is_shared` is true for the URL.
    """
    return cast("SharedStore", open_store(place))


def version_problem(store: QuotaStore) -> str:
    """Return what is wrong with a store's version; empty if nothing is, or it is unknown."""
    # Imported here, because the table of settings imports this module.
    from otel_limits.quotas.store import Diagnoses

    return store.outdated() if isinstance(store, Diagnoses) else ""


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, for messages: the rest may contain a password."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator and scheme.replace("+", "").isalnum() else ""


def _kind_of(name: str, url: str) -> StoreKind:
    # The patterns are mutually exclusive, so the order of the table does not matter.
    for kind in STORES:
        if re.fullmatch(kind.pattern, url):
            return kind
    *forms, last = (kind.form for kind in STORES)
    # Only the scheme is shown: the rest may contain a password.
    raise ValueError(f"{name} must be {', '.join(forms)} or {last}, got scheme {scheme_of(url)!r}.")


def _module_of(kind: StoreKind) -> StoreModule:
    # The module name is from our table, never from a URL.
    return cast("StoreModule", importlib.import_module(f"otel_limits.quotas.{kind.module}"))
