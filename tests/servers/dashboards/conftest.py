"""One scene, shared by all tests of panels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboards.servers import Scene, scene

ROUNDS = 3


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Real agents, scraped by a real Prometheus.

    It ends with the module: it scrapes and evaluates rules each second, while others would run.
    """
    with scene(tmp_path_factory.mktemp("scene"), ROUNDS) as played:
        yield played
