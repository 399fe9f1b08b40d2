"""A server for each test, and nothing that is asked for over the network."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING

import pytest

from tests.wire.server import Vendor, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vendor]:
    """The server, which is every vendor."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with serving() as server:
        yield server
    # Clients leave their sockets to the collector, which would warn of them in a later test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
