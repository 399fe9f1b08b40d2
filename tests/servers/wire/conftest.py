"""A loopback server per test file, and no network access."""

from __future__ import annotations

import asyncio
import functools
import gc
import ssl
import warnings
from typing import TYPE_CHECKING

import pytest

from tests.wire.agents_models import close_clients
from tests.wire.run import ENVIRONMENT
from tests.wire.server import Vendor, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[Vendor]:
    """Serve all tests of a file."""
    with pytest.MonkeyPatch.context() as patch, serving() as server:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # Nothing here is encrypted, and each client would read the certificates of all authorities.
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield server
    # Clients leave their sockets to the garbage collector, which would warn in a later test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def vendor(server: Vendor) -> Vendor:
    """The server in the role of every vendor, without requests so far."""
    server.requests.clear()
    server.replies.clear()
    server.is_over.clear()
    return server


@pytest.fixture(scope="module")
def loop(server: Vendor) -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop, as clients share their connections."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(close_clients())
    loop.close()
