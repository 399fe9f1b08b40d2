"""The table of stores: the URLs of each kind, and what adding a new kind takes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from otel_limits.cli import main
from otel_limits.cli.quotas import kill_named
from otel_limits.quotas import stores
from otel_limits.quotas.memory import MemoryStore
from otel_limits.quotas.store import (
    Change,
    Count,
    CountState,
    Kill,
    Operation,
    QuotaStore,
    Reply,
    SharedStore,
    StoreError,
    StorePlace,
)
from otel_limits.quotas.stores import STORES, StoreKind, is_shared, require_store_url
from otel_limits.runs.registry import LIVE
from otel_limits.settings.table import PROCESS_FIELDS
from otel_limits.testing import ScriptedModel, endless, says

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from otel_limits.quotas.keys import Key
    from tests.conftest import MakeAgent
    from tests.quotas.fixtures import Hold


@pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.module)
def test_store_opens_its_example_url_without_connecting(kind: StoreKind) -> None:
    """Settings are checked before any server is reachable."""
    assert require_store_url("x", kind.example) == kind.example
    assert is_shared(kind.example) == kind.is_shared
    store = stores.open_store(StorePlace(kind.example, 1.0))
    assert isinstance(store, QuotaStore)
    assert isinstance(store, SharedStore) == kind.is_shared
    if isinstance(store, SharedStore):
        store.close()


def test_every_store_is_in_the_table() -> None:
    """A file without a line in `STORES` would have no URL."""
    files = Path(stores.__file__).parent.glob("*.py")
    found = {each.stem for each in files if "\ndef require_readable(" in each.read_text("utf-8")}
    assert found == {kind.module for kind in STORES}, (
        "give each store a line in STORES of quotas/stores.py"
    )


@pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.module)
def test_every_store_is_in_the_help(kind: StoreKind) -> None:
    """The setting lists every scheme, so that a user learns of each store."""
    scheme = kind.example.partition("://")[0] + "://"
    assert scheme in PROCESS_FIELDS["quota_store"].help, (
        f"add {scheme} to the help of quota_store in settings/table.py"
    )


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
    line = StoreKind("toy://name", "toy://.+", "toy://box", "toy", is_shared=False)
    monkeypatch.setattr(stores, "STORES", (*STORES, line))

    hold({"calls": {"model_calls": 1, "window": "month"}}, "toy://box")
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]
    assert toy.opened == ["toy://box"]
    with pytest.raises(ValueError, match="x must not end with an exclamation mark"):
        require_store_url("x", "toy://box!")
    with pytest.raises(ValueError, match=r"x must be memory://, .* or toy://name, got .* 'http'"):
        require_store_url("x", "http://box")


class PlainStore(SharedStore):
    """Has no ability beyond those of every shared store."""

    def __init__(self, counts: MemoryStore) -> None:
        """Share these counts."""
        self._counts = counts

    def run(self, operations: Sequence[Operation]) -> list[Reply]:
        """Apply operations."""
        return self._counts.run(operations)

    def check(self) -> None:
        """Accept writes."""

    def close(self) -> None:
        """Close nothing."""

    def after_fork(self) -> None:
        """Reset the lock."""
        self._counts.after_fork()

    def now(self) -> float:
        """Return the time."""
        return self._counts.now()

    def keys(self, quota: str) -> Iterator[Key]:
        """Iterate over the keys of a quota."""
        return self._counts.keys(quota)

    def look(self, counts: Sequence[tuple[Count, int]]) -> list[CountState]:
        """Return the state of counts."""
        return self._counts.look(counts)

    def change(self, count: Count, change: Change) -> int:
        """Change a count."""
        return self._counts.change(count, change)


class PolledStore(PlainStore):
    """Keeps kills, but has no channels."""

    def kill(self, pattern: str) -> int:
        """Send none."""
        raise StoreError(pattern)

    def noted_kills(self, since: float) -> list[Kill]:
        """Return one kill."""
        return [Kill("1", "research-*", since + 1)]


@pytest.fixture
def add_store(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[PlainStore]], None]:
    """Add a shared store to the table, as toy://box."""

    def add(store: type[PlainStore]) -> None:
        toy: Any = ModuleType("toy")
        counts = MemoryStore()
        toy.require_readable = lambda _name, _url: None
        toy.open_store = lambda _place: store(counts)
        monkeypatch.setitem(sys.modules, "otel_limits.quotas.toy", toy)
        line = StoreKind("toy://name", "toy://.+", "toy://box", "toy", is_shared=True)
        monkeypatch.setattr(stores, "STORES", (*STORES, line))

    return add


def test_shared_store_needs_only_to_run_look_and_change(
    hold: Hold, make_agent: MakeAgent, add_store: Callable[[type[PlainStore]], None]
) -> None:
    """Kills and the search for missing settlements, for example, are optional."""
    add_store(PlainStore)
    hold({"calls": {"model_calls": 1, "window": "month"}}, "toy://box")
    agent = make_agent(ScriptedModel(endless(says("done"))))
    assert [agent("go").stop_reason for _ in range(2)] == ["end_turn", "quota_exceeded"]


def test_kill_names_a_store_that_cannot_send_it(
    add_store: Callable[[type[PlainStore]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not sent is not the same as sent to no process."""
    add_store(PlainStore)
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", "toy://box")
    with pytest.raises(ValueError, match="OTEL_LIMITS_QUOTA_STORE cannot send kills"):
        kill_named("research-*")


class PolledForKills(PlainStore):
    """A store without channels."""

    def kill(self, *_: object) -> int:
        """Send a kill."""
        return 0

    def noted_kills(self, *_: object) -> list[Kill]:
        """Return no kill."""
        return []


class WithoutSubscribers(PolledForKills):
    """It counts its subscribers."""

    def subscribe(self, *_: object) -> Iterator[None]:
        """Return no message."""
        return iter(())


class WithSubscribers(WithoutSubscribers):
    """Two processes have subscribed."""

    def kill(self, *_: object) -> int:
        """Send a kill."""
        return 2


@pytest.mark.parametrize(
    ("store", "receivers", "status"),
    [
        (WithSubscribers, "2 processes.", 0),
        (WithoutSubscribers, "0 processes. No process is subscribed", 1),
        (PolledForKills, "each process that polls.", 0),
    ],
)
def test_kill_that_no_process_received_has_exit_status_1(
    add_store: Callable[[type[PlainStore]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: type[PlainStore],
    receivers: str,
    status: int,
) -> None:
    """A script must not report that the agents were stopped."""
    add_store(store)
    monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", "toy://box")
    assert main(["kill", "--agent", "research-*"]) == status
    told = capsys.readouterr()
    sentence = f"Sent kill for 'research-*' to {receivers}"
    assert (sentence in told.out, sentence in told.err) == (not status, bool(status))


def test_store_without_channels_is_polled_for_kills(
    hold: Hold,
    add_store: Callable[[type[PlainStore]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Channels are optional, so a store that lacks them is no reason for a warning."""
    received: list[str] = []
    is_received = threading.Event()

    def kill(*, agent: str, before: float) -> int:
        received.append(agent)
        is_received.set()
        return int(before)

    monkeypatch.setattr(LIVE, "kill", kill)
    add_store(PolledStore)
    hold({}, "toy://box")
    assert is_received.wait(10)
    assert received == ["research-*"]
    assert "cannot subscribe" not in caplog.text
