"""The table of stores: what a URL of each is, what a new one takes, and what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.quotas import stores
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import StorePlace
from otel_limits.quotas.stores import STORES, StoreKind, is_shared, require_store_url
from otel_limits.testing import ScriptedModel, endless, says

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeAgent
    from tests.quotas.conftest import Hold

URLS = (
    "memory://",
    "redis://localhost:1/0",
    "redis+cluster://localhost:1",
    "redis+sentinel://localhost:1/service",
)


@pytest.mark.parametrize(("kind", "url"), list(zip(STORES, URLS, strict=True)))
def test_every_kind_of_store_checks_its_urls_and_opens_them(kind: StoreKind, url: str) -> None:
    """Without connecting; only memory is not shared."""
    assert require_store_url("x", url) == url
    assert is_shared(url) == kind.is_shared == (url != "memory://")
    opener = stores.open_shared_store if kind.is_shared else stores.open_store
    opener(StorePlace(url, 1.0)).close()


def test_a_new_store_is_one_file_and_one_line(
    hold: Hold, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file checks a URL and opens it; settings and agents then use it."""
    toy: Any = ModuleType("toy")
    toy.opened = []

    def require_readable(name: str, url: str) -> None:
        if url.endswith("!"):
            raise ValueError(f"{name} must not end with an exclamation mark.")

    def open_store(place: StorePlace) -> MemoryStore:
        toy.opened.append(place.url)
        return MemoryStore()

    toy.require_readable, toy.open_store = require_readable, open_store
    monkeypatch.setitem(sys.modules, "otel_limits.quotas.toy", toy)
    line = StoreKind("toy://name", "toy://.+", "toy", is_shared=False)
    monkeypatch.setattr(stores, "STORES", (*STORES, line))

    hold({"calls": {"model_calls": 1, "window": "month"}}, "toy://box")
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    assert toy.opened == ["toy://box"]
    with pytest.raises(ValueError, match="x must not end with an exclamation mark"):
        require_store_url("x", "toy://box!")
    with pytest.raises(ValueError, match=r"x must be memory://, .* or toy://name, got .* 'http'"):
        require_store_url("x", "http://box")


IN_MEMORY = """
import sys
import otel_limits
from strands import Agent
from otel_limits.testing import ScriptedModel, says
otel_limits.enable()
agent = Agent(model=ScriptedModel([says("done")]), callback_handler=None)
print([agent("go").stop_reason for _ in range(2)])
sys.exit(any(name.startswith(("redis", "otel_limits.quotas.redis")) for name in sys.modules))
"""


@pytest.mark.parametrize("url", [None, "memory://"])
def test_quotas_in_memory_import_no_client(url: str | None, tmp_path: Path) -> None:
    """Whoever does not use Redis neither waits for its client nor needs to have it."""
    policy = tmp_path / "limits.yaml"
    policy.write_text("quotas: {calls: {model_calls: 1, window: month}}")
    variables = {"OTEL_LIMITS_POLICY": str(policy)}
    if url is not None:
        variables["OTEL_LIMITS_QUOTA_STORE"] = url
    done = subprocess.run(
        [sys.executable, "-c", IN_MEMORY],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "['end_turn', 'quota_exceeded']\n")
