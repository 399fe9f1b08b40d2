"""A real redis-server on a free port, and a faulty connection to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import pytest
import redis

import otel_limits
from otel_limits.quotas import fallback, redis_scripts
from otel_limits.quotas.kill_listener import KillListener
from otel_limits.quotas.redis_scripts import KeyNames
from otel_limits.quotas.store import StorePlace
from otel_limits.quotas.stores import open_shared_store
from tests.processes import free_port, tied

if TYPE_CHECKING:
    from otel_limits.quotas.redis_store import RedisStore

FROM_A_SCRIPT = re.compile(rb"admitted|refused|settled")
DELAY = 2.5
"""Seconds: more than a model call waits for the store."""

PATIENCE = 60.0
"""A timeout in seconds that passes on the busiest machine."""


def eventually(condition: Callable[[], bool], found: Callable[[], object] = lambda: None) -> None:
    """Wait until a condition holds; otherwise fail with what was found instead."""
    give_up = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < give_up, found()
        pause.wait(0.01)


def open_redis(place: StorePlace) -> RedisStore:
    """Open a store with all abilities of Redis."""
    # Its module needs the client of Redis, which tests in one process do without.
    return cast("RedisStore", open_shared_store(place))


class Server:
    """One redis-server, which a test may stop, freeze and restart."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None

    @cached_property
    def client(self) -> Any:
        """A client for inspecting it."""
        return redis.Redis(port=self.port, decode_responses=True)

    def start(self, *options: str) -> None:
        """Start it on the same port, with more options; empty, unless it finds saved data."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self.folder), "--daemonize", "no"]
        # A replica would be synchronized after five seconds, in case more of them come.
        command += ["--repl-diskless-sync-delay", "0", *self._options, *options]
        self._process = subprocess.Popen(tied(*command), stdout=subprocess.DEVNULL)
        self.wait()

    def age(self) -> None:
        """Let the first calls not wait for processes that used it before it restarted."""
        store = open_redis(StorePlace(self.url, PATIENCE))
        store.warm()
        store.close()
        self.client.hset(KeyNames().marker, "since", 0)

    def wait(self) -> None:
        """Wait until it answers."""
        eventually(self._answers)

    def stop(self) -> None:
        """Kill it, so it forgets everything."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            self.client.close()

    def freeze(self) -> None:
        """Keep its connections open and answer nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        self._signal(signal.SIGCONT)

    def calls(self, command: str = "evalsha") -> int:
        """Return how often a command was called."""
        statistics = self.client.info("commandstats")
        return int(statistics.get(f"cmdstat_{command}", {}).get("calls", 0))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        assert self._process is None or self._process.poll() is None, (
            "redis-server exited immediately"
        )
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


class Wire:
    """A proxy between client and server that delays, changes, cuts or swallows replies."""

    def __init__(self, port: int, spoiled: re.Pattern[bytes] = FROM_A_SCRIPT) -> None:
        self.target = port
        """Port of the server of new connections; those that are open keep theirs."""
        self._spoiled = spoiled
        self._ends: list[socket.socket] = [socket.create_server(("127.0.0.1", 0))]
        self._threads: list[threading.Thread] = []
        self.port: int = self._ends[0].getsockname()[1]
        self.delay = 0.0
        self.let_pass = 0
        """Replies still to be forwarded before one is cut."""
        self.faults: deque[str] = deque()
        """Faults of the next replies to scripts: `delay`, `cut`, `truncate`, `hang`."""
        self.replaced: dict[bytes, bytes] = {}
        """Texts in replies, and those that clients receive instead, of the same length."""
        self.round_trips: list[int] = []
        """Round trips of each connection, in the order of their beginning, which threads decide."""
        self.runs_scripts: list[bool] = []
        """Whether each of them runs scripts: that of the calls does, those of messages do not."""
        self.cuts = 0
        """Replies still to be swallowed, each with its connection."""
        self._start(self._accept)

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        """Hang up."""
        self.delay = 0.0
        # No client may be accepted after the ends of the others were closed.
        hang_up(self._ends[0])
        self._threads[0].join()
        for end in self._ends[1:]:
            hang_up(end)
        for thread in self._threads[1:]:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._ends[0].accept()
                self._ends.append(client)
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            hang_up(client)
            return
        self._ends.append(server)
        is_replica, is_answered = threading.Event(), threading.Event()
        is_answered.set()
        number = len(self.round_trips)
        self.round_trips.append(0)
        self.runs_scripts.append(False)

        def look(data: bytes) -> tuple[bytes, bool]:
            if b"PSYNC" in data:
                is_replica.set()
            # A long command arrives in parts; only the first begins with its number of words.
            self.round_trips[number] += is_answered.is_set() and data.startswith(b"*")
            self.runs_scripts[number] |= b"EVALSHA" in data
            is_answered.clear()
            return data, True

        self._start(self._carry, client, server, look)

        # A replica receives its data whole or not at all: TCP loses nothing in between.
        def spoil(data: bytes) -> tuple[bytes, bool]:
            is_answered.set()
            return (data, True) if is_replica.is_set() else self._spoil(data)

        self._start(self._carry, server, client, spoil)

    def _spoil(self, data: bytes) -> tuple[bytes, bool]:
        """Apply a fault to a script's reply; forward all others.

        Returns:
            The data to forward, and whether the connection lasts.
        """
        for text, other in self.replaced.items():
            data = data.replace(text, other)
        fault = self.faults.popleft() if self.faults and self._spoiled.search(data) else ""
        if fault in ("cut", "truncate", "hang"):
            return data[: len(data) // 2] if fault == "truncate" else b"", fault == "hang"
        if fault == "delay":
            threading.Event().wait(DELAY)
        if self.cuts and (b"admitted" in data or b"settled" in data):
            if not self.let_pass:
                self.cuts -= 1
                return b"", False
            self.let_pass -= 1
        threading.Event().wait(self.delay)
        return data, True

    def _carry(
        self,
        source: socket.socket,
        target: socket.socket,
        change: Callable[[bytes], tuple[bytes, bool]],
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                changed, lasts = change(data)
                target.sendall(changed)
                if not lasts:
                    break
        hang_up(source)
        hang_up(target)


def hang_up(end: socket.socket) -> None:
    """Close a socket that another thread may be waiting on."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def require_program(name: str) -> None:
    """Skip where a Debian package of this name is not installed; in CI that is a failure."""
    if shutil.which(name) is not None:
        return
    sentence = f"{name} is not installed: apt-get install {name}"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="session")
def redis_installed() -> None:
    """Skip where there is no redis-server."""
    require_program("redis-server")


@pytest.fixture(scope="session")
def shared_server(
    redis_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server for all tests that leave it running."""
    server = Server(tmp_path_factory.mktemp("redis"))
    server.start()
    # So that it need not age whenever it is emptied.
    eventually(lambda: server.client.info("server")["uptime_in_seconds"] > 2)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server, empty, without subscribers, and with no user of an earlier test."""
    client = shared_server.client
    client.flushall()
    for user in set(client.acl_users()) - {"default"}:
        client.acl_deluser(user)
    client.config_resetstat()
    yield shared_server
    otel_limits.disable()
    client.client_kill_filter(_type="pubsub")  # or they would notice it within a second
    for thread in threading.enumerate():
        if thread.name == KillListener.name:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "A kill listener outlives its test."
    # A Sentinel of another test may watch a server that had this port before.
    eventually(
        lambda: set(client.pubsub_channels()) <= {b"__sentinel__:hello", "__sentinel__:hello"},
        lambda: (client.client_list(_type="pubsub"), threading.enumerate()),
    )


@pytest.fixture
def own_server(redis_installed: None, tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stop, freeze or configure."""
    server = Server(tmp_path)
    server.start()
    server.age()
    yield server
    otel_limits.disable()  # or a worker would log that its server is gone
    server.stop()


@pytest.fixture
def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No regular read of the counts during the test."""
    monkeypatch.setattr(fallback, "look_seconds", lambda _processes: PATIENCE)


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    """A wire to the shared server."""
    wire = Wire(server.port)
    yield wire
    wire.close()


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    """An operator's client of the shared server, as on the command line."""
    store = open_redis(StorePlace(server.url, PATIENCE))
    yield store
    store.close()


@pytest.fixture
def cluster(redis_installed: None, tmp_path: Path) -> Iterator[str]:
    """A cluster of one node that has every slot."""
    node = Server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    node.start()
    node.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    eventually(lambda: node.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    yield f"redis+cluster://127.0.0.1:{node.port}"
    node.stop()


@pytest.fixture(scope="session")
def shared_cluster(
    redis_installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A cluster for all tests that leave it running."""
    node = Server(
        tmp_path_factory.mktemp("cluster"),
        *("--cluster-enabled", "yes", "--cluster-port", str(free_port())),
    )
    node.start()
    node.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    eventually(lambda: node.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    yield f"redis+cluster://127.0.0.1:{node.port}"
    node.stop()


@pytest.fixture(scope="session")
def shared_sentinel(
    shared_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A sentinel of the shared server."""
    folder, port = tmp_path_factory.mktemp("sentinel"), free_port()
    settings = folder / "sentinel.conf"
    settings.write_text(f"sentinel monitor fleet 127.0.0.1 {shared_server.port} 1\n")
    command = ["redis-server", str(settings), "--sentinel", "--port", str(port)]
    with subprocess.Popen(tied(*command), stdout=subprocess.DEVNULL) as watcher:
        Server(folder, port=port).wait()
        yield f"redis+sentinel://127.0.0.1:{port}/fleet"
        watcher.kill()


class Timed(NamedTuple):
    """A store with a clock set by the test."""

    store: RedisStore
    set_clock: Callable[[float], None]


@pytest.fixture
def timed_store(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """A real server whose scripts read the time from a key."""
    source_of, key = redis_scripts.source_of, "{otel_limits}:clock"

    def with_clock(script: str) -> str:
        read = f"{{ redis.call('GET', '{key}'), 0 }}"
        asked = source_of(script).replace("redis.call('TIME')", read)
        assert asked != source_of(script)
        return asked

    monkeypatch.setattr(redis_scripts, "source_of", with_clock)
    monkeypatch.setattr(redis_scripts, "sha_of", redis_scripts.sha_of.__wrapped__)
    store = open_redis(StorePlace(server.url, PATIENCE))
    yield Timed(store, lambda now: server.client.set(key, f"{now:.3f}"))
    store.close()


class Hold(Protocol):
    """Enables otel-limits with quotas."""

    def __call__(
        self,
        quotas: dict[str, dict[str, Any]],
        url: str = "memory://",
        observers: Sequence[Any] = (),
        timeout: float = PATIENCE,
        **more: Any,
    ) -> None:
        """Enforce `quotas`; `more` are other sections of the policy file.

        Only a test about outages needs a shorter store timeout: a busy machine is none.
        """


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Enable otel-limits with quotas until the end of the test."""

    def switch(
        quotas: dict[str, dict[str, Any]],
        url: str = "memory://",
        observers: Sequence[Any] = (),
        timeout: float = PATIENCE,
        **more: Any,
    ) -> None:
        monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE_TIMEOUT", str(timeout))
        path = tmp_path / "limits.yaml"
        path.write_text(json.dumps({"quotas": quotas, **more}))
        monkeypatch.setenv("OTEL_LIMITS_POLICY", str(path))
        monkeypatch.setenv("OTEL_LIMITS_QUOTA_STORE", url)
        otel_limits.enable(observers=observers)

    return switch


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """Both kinds of quota store."""
    if request.param == "memory":
        return "memory://"
    server: Server = request.getfixturevalue("server")
    return server.url
